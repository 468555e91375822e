"""The training loop: resume, step, log, evaluate, save, stop."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from rich.console import Console

from depthjax.config import Config, to_dict
from depthjax.errors import InputError
from depthjax.parallel import make_mesh, mesh_text, processes
from depthjax.plan import peak_flops, training_flops_per_token, with_mesh
from depthjax.train.checkpoint import Checkpoints, parameters_sha256
from depthjax.train.evaluate import heldout_loss, heldout_losses
from depthjax.train.inputs import open_data, training_batches
from depthjax.train.metrics import Metrics, NoMetrics, read_jsonl, tensorboard_writer
from depthjax.train.progress import ProgressLine
from depthjax.train.report import write_summary
from depthjax.train.run_dir import RunDirectory, check_unchanged, git_commit
from depthjax.train.source import parameters_of_folder
from depthjax.train.step import Program, TrainState
from depthjax.train.stop import Stopped, StopSignal


class TrainingDiverged(RuntimeError):
    """Updates were skipped again and again, even after a return to the last good checkpoint."""


def train(config: Config, console: Console | None = None) -> tuple[dict[str, Any] | None, int]:
    """Trains, or continues, the run in `config.run.dir`.

    Returns (summary, 0) once `train.steps` are done; (None, status) when it was asked to stop
    before: status 0 for SIGTERM, 130 for Ctrl-C, the work saved. Raises InputError for bad input,
    before anything is compiled, and TrainingDiverged when the guard gives up. Of several processes
    each calls this; the first one speaks and writes, and has the complete summary.
    """
    if not processes.is_first():
        console = Console(quiet=True)
    console = console or Console()
    say = functools.partial(console.print, soft_wrap=True, markup=False, highlight=False)
    mesh = make_mesh(with_mesh(config.check(), jax.devices()))
    with StopSignal(say) as stop, contextlib.ExitStack() as opened:
        with processes.together():
            directory = opened.enter_context(RunDirectory(config.run.dir))
            shards, vocab = open_data(config)
        run = opened.enter_context(_Run(config, mesh, directory, shards, vocab, console, say))
        summary = run.loop(stop)
        return summary, 0 if summary else stop.exit_status


class _Run:
    """The moving parts of one training run in one process."""

    def __init__(self, config, mesh, directory: RunDirectory, shards, vocab: int, console, say):
        self.config, self.directory, self.console, self.say = config, directory, console, say
        self.shards, self.vocab = shards, vocab
        self.title = f"{config.residual.name}, {config.model.shape}, {shards.tokenizer}"
        if config.run.tensorboard:
            tensorboard_writer()  # before anything is compiled
        self.program = Program(config, vocab, mesh)
        rows = processes.rows_here(self.program.by_row, config.train.batch)
        self.batches = training_batches(config, shards, rows)
        self.checkpoints = Checkpoints(directory.path / "checkpoints", config.run.keep, say)
        self.seconds_before, self.rollbacks, self.resumed_from = 0.0, 0, []
        self.state, self.step = self._start()
        self.began = time.monotonic()
        self.metrics = self._open_metrics()
        self.parameters = sum(x.size for x in jax.tree.leaves(self.state.params))
        say(
            f"{self.title}: {self.parameters:,} parameters, {config.train.steps:,} steps of "
            f"{config.train.batch * config.model.context:,} tokens on {jax.device_count()} x "
            f"{jax.devices()[0].device_kind}, mesh {mesh_text(mesh.shape)}"
            + (f", in {jax.process_count()} processes" if processes.several() else "")
        )
        say(
            f"text: {shards.train.tokens:,} training and {shards.heldout.tokens:,} held-out tokens "
            f"in {shards.directory}"
        )

    def _open_metrics(self) -> Metrics | NoMetrics:
        if not processes.is_first():
            return NoMetrics()
        return Metrics(self.directory.path, self.step, self.config.run.tensorboard)

    def _start(self) -> tuple[TrainState, int]:
        """The state to begin with, restored where the run has a checkpoint."""
        notes: list[str] = []

        def accept(meta: dict[str, Any]) -> bool:
            notes[:] = check_unchanged(meta["config"], self.config)
            if meta["data_sha256"] != self.shards.sha256:
                raise InputError(
                    f"data.dir {self.shards.directory} holds other text than the checkpoint in "
                    "run.dir was made with: give the same data, or another run.dir"
                )
            return True

        restored = self.checkpoints.restore(self.program.abstract_state(), accept)
        if restored is None:
            state = self._first_state()
            self.directory.write_origin(self.config)
            self.directory.note("start", git_commit=git_commit())
            return state, 0
        state, meta = restored
        step = int(state.step)
        self.batches.set_state(meta["data"])
        self.seconds_before, self.rollbacks = meta["seconds"], meta["rollbacks"]
        self.resumed_from = meta["resumed_from"]
        for note in notes:
            self.say(f"changed since the checkpoint: {note}")
        if step >= self.config.train.steps:
            self.say(f"all steps are done already: the checkpoint is of step {step}")
            return state, step
        self.resumed_from = [*self.resumed_from, step]
        self.say(f"resuming at step {step} of {self.config.train.steps}")
        self.directory.write_origin(self.config)
        self.directory.note("resume", step=step, changed=notes, git_commit=git_commit())
        return state, step

    def _first_state(self) -> TrainState:
        """The state of step 0: initialised, or with the parameters of `train.init_from`."""
        source, name = self.config.train.init_from, "train.init_from"
        if source is None:
            return self.program.init()
        params = parameters_of_folder(self.config, self.program, self.vocab, source, name)
        self.say(f"starting from the parameters in {source}")
        return self.program.start(params)

    @property
    def seconds(self) -> float:
        """Training time so far, of earlier processes as well."""
        return self.seconds_before + time.monotonic() - self.began

    def save(self) -> None:
        """Saves the state after `self.step` steps, if it is not saved yet."""
        meta = {
            "config": to_dict(self.config),
            "data": self.batches.get_state(),
            "data_sha256": self.shards.sha256,
            "seconds": self.seconds,
            "rollbacks": self.rollbacks,
            "skipped_in_row": int(self.state.skipped_in_row),
            "resumed_from": self.resumed_from,
        }
        self.checkpoints.save(self.step, self.state, meta)

    def loop(self, stop: StopSignal) -> dict[str, Any] | None:
        """Trains to the end and returns the summary; saves and returns None when asked to stop."""
        steps = self.config.train.steps
        with ProgressLine(self.console, steps, self.step) as self.progress:
            if self._evaluation_due() and not self._evaluated():  # stopped before it was done
                self._evaluate(stop)
            interval = _Interval(self, stop)
            while self.step < steps and not stop.requested:
                self._take_step(interval, stop)
                if interval.skipped_in_row >= self.config.train.guard_patience:
                    self._roll_back()
                    interval = _Interval(self, stop)
            # Not in the middle of skipped updates: what follows them is decided from their start.
            if self.step >= steps or interval.skipped_in_row == 0:
                self.save()
        try:
            if self.step >= steps:
                return self._summarize(stop, self.seconds)
        except Stopped:
            pass
        self.say(f"stopped at step {self.step} of {steps}: run again to continue")
        self.directory.note("stop", step=self.step)
        return None

    def _take_step(self, interval: "_Interval", stop: StopSignal) -> None:
        """One optimizer step, and the held-out loss and the checkpoint where they are due."""
        rows = interval.wait_for(self.batches)
        self.state, metrics = self.program.step(self.state, self.program.put(rows))
        stop.ready()
        self.step += 1
        # The device works on this step while the metrics of the one before are looked at.
        interval.settle()
        interval.pending = (self.step, metrics, stop.vote())
        evaluate, save = self._evaluation_due(), self.step % self.config.run.save_every == 0
        if evaluate or save or stop.requested or self.step == self.config.train.steps:
            interval.settle()
        if interval.skipped_in_row >= self.config.train.guard_patience:
            return
        if evaluate:
            with interval.paused():
                self._evaluate(stop)
        if save and interval.skipped_in_row == 0:  # a place to return to
            self.save()

    def _evaluation_due(self) -> bool:
        every, steps = self.config.run.eval_every, self.config.train.steps
        return every > 0 and 0 < self.step < steps and self.step % every == 0

    def _records(self) -> list[dict[str, Any]]:
        return read_jsonl(self.directory.path / "metrics.jsonl")

    def _evaluated(self) -> bool:
        found = any(r["step"] == self.step and "heldout_loss" in r for r in self._records())
        return processes.of_first(found)  # which wrote them; the others may see an older file

    def _evaluate(self, stop: StopSignal) -> None:
        try:
            loss = heldout_loss(
                self.program, self.state.params, self.shards, self.config.run.eval_batches, stop
            )
        except Stopped:  # which the loop notices by itself
            return
        self.metrics.write(self.step, {"heldout_loss": loss})
        self.progress.update(self.step, f"held-out loss {loss:.4f}")

    def _roll_back(self) -> None:
        """Returns to the last good checkpoint but not to its data, which led to the trouble."""
        train = self.config.train
        trouble = (
            f"{train.guard_patience} updates in a row were skipped up to step {self.step}, their "
            f"gradients not finite or above train.guard_norm {train.guard_norm:g}"
        )
        remedy = "lower train.peak_lr, or raise train.guard_norm if such gradients are right here"
        if self.rollbacks:
            raise TrainingDiverged(f"{trouble}, again after a return to a checkpoint: {remedy}")
        restored = self.checkpoints.restore(
            self.program.abstract_state(), lambda meta: meta["skipped_in_row"] == 0
        )
        if restored is None:
            raise TrainingDiverged(f"{trouble}, and there is no checkpoint to return to: {remedy}")
        self.state, _ = restored
        diverged_at, self.step = self.step, int(self.state.step)
        self.rollbacks += 1
        self.say(f"{trouble}: returning to the checkpoint of step {self.step}")
        self.directory.note("rollback", step=diverged_at, to=self.step)
        self.metrics.close()
        self.metrics = self._open_metrics()

    def _summarize(self, stop: StopSignal, seconds: float) -> dict[str, Any]:
        """The final losses and counts, also written to summary.json, loss.png and the console."""
        stop.ready()
        config, state = self.config, self.state
        self.say("computing the held-out losses")
        losses = heldout_losses(
            self.program, state.params, self.shards, self.vocab, config.run.eval_batches, stop
        )
        if not self._evaluated():
            self.metrics.write(self.step, {"heldout_loss": losses.heldout_loss})
        trained = [r["loss"] for r in self._records() if "loss" in r]
        summary = {
            "title": self.title,
            "steps": self.step,
            "tokens": self.step * config.train.batch * config.model.context,
            "seconds": round(seconds, 3),
            "parameters": self.parameters,
            "train_loss": trained[-1] if trained else None,
            **dataclasses.asdict(losses),
            "resumed_from": self.resumed_from,
            "skipped_updates": int(state.skipped),
            "rollbacks": self.rollbacks,
            "parameters_sha256": parameters_sha256(state.params),
        }
        if processes.is_first():
            write_summary(self.directory.path, summary, self.console)
        self.directory.note("finish", step=self.step)
        return summary

    def __enter__(self) -> "_Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Waits for the checkpoint that is being written, and closes the files."""
        # All processes write it: where one is gone, this would never end.
        if kind in (None, TrainingDiverged) or not processes.several():
            self.checkpoints.close()
        self.metrics.close()


class _Interval:
    """What is collected between two log lines."""

    def __init__(self, run: _Run, stop: StopSignal):
        self.run, self.stop = run, stop
        self.pending: tuple[int, dict[str, jax.Array], jax.Array | int] | None = None
        self.skipped_in_row = 0
        config = run.config
        self._flops = training_flops_per_token(
            config.shape, run.vocab, config.model.context, config.residual
        )
        peak = peak_flops(jax.devices()[0].device_kind)
        self._peak = peak and peak * jax.device_count()
        self._clear()

    def _clear(self) -> None:
        self._losses: list[float] = []
        self._waited, self._began = 0.0, time.monotonic()

    def wait_for(self, batches: Iterator[np.ndarray]) -> np.ndarray:
        """The next batch, and the time it kept us waiting."""
        began = time.monotonic()
        rows = next(batches)
        self._waited += time.monotonic() - began
        return rows

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is done meanwhile does not count as training time."""
        began = time.monotonic()
        yield
        self._began += time.monotonic() - began

    def settle(self) -> None:
        """Waits for the pending step, and logs if it is time."""
        if self.pending is None:
            return
        (step, metrics, vote), self.pending = self.pending, None
        values = jax.device_get(metrics)
        self.stop.heed(vote)
        self.skipped_in_row = int(values["skipped_in_row"])
        self._losses.append(float(values["loss"]))
        if step % self.run.config.run.log_every == 0 or step == self.run.config.train.steps:
            self._log(step, values)

    def _log(self, step: int, values: dict[str, np.ndarray]) -> None:
        config = self.run.config
        seconds = time.monotonic() - self._began
        tokens = len(self._losses) * config.train.batch * config.model.context
        speed = tokens / seconds
        record = {name: np.asarray(value, float).tolist() for name, value in values.items()}
        record |= {
            "loss": float(np.mean(self._losses)),
            "skipped": int(values["skipped"]),
            "tokens_per_second": speed,
            "data_wait_share": self._waited / seconds,
        }
        del record["skipped_in_row"]
        if self._peak:
            record["model_flops_utilisation"] = speed * self._flops / self._peak
        self.run.metrics.write(step, record)
        text = f"loss {record['loss']:.4f}  lr {record['learning_rate']:.2e}  {speed:,.0f} tokens/s"
        self.run.progress.update(step, text)
        self._clear()

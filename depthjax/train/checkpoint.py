"""Checkpoints through Orbax v1: asynchronous, kept to the newest few, restored past damage."""

import functools
import hashlib
import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from depthjax.errors import InputError
from depthjax.parallel import processes
from depthjax.train.step import TrainState


class Checkpoints:
    """The checkpoints of one run. `meta` is JSON: config, data position and counters.

    keep: how many of the newest stay; None: for reading only, nothing is deleted.
    A checkpoint appears under its final name only when all of it is written, so a process killed
    while saving leaves the earlier ones in force.
    """

    def __init__(self, directory: pathlib.Path, keep: int | None, say: Callable[[str], None]):
        self._say = say
        self._unfinished = sorted(p.name for p in directory.glob("*.orbax-checkpoint-tmp*"))
        self._checkpointer = ocp.training.Checkpointer(
            directory.absolute(),
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),
            cleanup_tmp_directories=keep is not None,
        )
        self._bad: set[int] = set()

    @property
    def steps(self) -> list[int]:
        """Steps with a checkpoint that is not known to be damaged, oldest first."""
        return sorted(c.step for c in self._checkpointer.checkpoints if c.step not in self._bad)

    def save(self, step: int, state: TrainState, meta: dict[str, Any]) -> None:
        """Copies `state` off the devices and writes it in the background, once a step."""
        if step in self.steps:
            return
        overwrite = step in self._bad
        self._bad.discard(step)
        meta = {**meta, "fingerprint": processes.fetch(fingerprint(state)).tolist()}
        self._checkpointer.save_checkpointables_async(
            step, {"state": state}, custom_metadata=meta, overwrite=overwrite
        )

    def meta(self, step: int) -> dict[str, Any]:
        """The JSON saved with a checkpoint."""
        return self._checkpointer.checkpointables_metadata(step).custom_metadata

    def restore(
        self, abstract: TrainState, accept: Callable[[dict[str, Any]], bool]
    ) -> tuple[TrainState, dict[str, Any]] | None:
        """The newest readable state, laid out as `abstract`, and its meta; None without any.

        Damaged and half-written checkpoints are named and passed over, but never deleted: with
        nothing readable left this raises InputError. `accept` sees each meta before its state is
        loaded, and may turn it down or raise. What one of several processes cannot read, all pass
        over.
        """
        for name in self._unfinished:
            self._say(f"checkpoint {name} was never finished: falling back to the one before it")
        self._unfinished = []
        self._checkpointer.wait()  # a checkpoint that is still being written is the newest
        found = self.steps
        for step in reversed(found):
            try:
                meta = self.meta(step)
                if not isinstance(meta, dict):
                    raise ValueError("its metadata is missing")
                accepted, expected, trouble = accept(meta), meta["fingerprint"], None
            except InputError:
                raise
            except Exception as error:
                trouble = error
            if self._passed_over(step, trouble):
                continue
            if accepted and (state := self._load(step, abstract, expected)) is not None:
                return state, meta
        if found and not self.steps:
            raise InputError(
                f"none of the checkpoints {found} in {self._checkpointer.directory} can be read: "
                "restore one from a copy, or start anew with another run.dir"
            )
        return None

    def _load(self, step: int, abstract: TrainState, expected: list[int]) -> TrainState | None:
        """The state of a checkpoint; None, and a word about it, where it cannot be read."""
        _ignore_abandoned_reads()
        trouble = None
        try:
            state = self._checkpointer.load_checkpointables(step, {"state": abstract})["state"]
        except Exception as error:  # Orbax and tensorstore raise many kinds for a damaged file
            trouble = error
        if self._passed_over(step, trouble):
            return None
        if processes.fetch(fingerprint(state)).tolist() != expected:
            trouble = ValueError("its numbers are not those that were saved")
        return None if self._passed_over(step, trouble) else state

    def _passed_over(self, step: int, trouble: Exception | None) -> bool:
        """Whether there is trouble with a checkpoint on any process, which is then said."""
        if not processes.any_of(trouble is not None):
            return False
        self._bad.add(step)
        error = trouble or ValueError("another process cannot")
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)
        self._say(f"checkpoint {step} cannot be read ({reason}): falling back to the one before it")
        return True

    def close(self) -> None:
        """Waits until all that was saved is on disk."""
        self._checkpointer.close()


@functools.cache
def _ignore_abandoned_reads() -> None:
    """Keeps quiet about the reads that Orbax leaves behind when one of them fails.

    They end in threads of their own, some time later, each with a traceback that helps nobody.
    """
    report_others = sys.unraisablehook

    def report(unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        of_orbax = code is not None and "orbax" in code.co_filename
        if not of_orbax and str(unraisable.exc_value) != "Event loop is closed":
            report_others(unraisable)

    sys.unraisablehook = report
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)


@jax.jit
def fingerprint(state: Any) -> jax.Array:
    """uint32 [leaves]: a sum over the bits of each leaf, weighted by position, that any flipped bit
    changes. Integers, so the same however the leaf is sharded."""

    def of(leaf: jax.Array) -> jax.Array:
        unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
        bits = jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
        weight, stride = jnp.ones(leaf.shape, jnp.uint32), 2  # odd: no bit is ever multiplied away
        for axis in reversed(range(leaf.ndim)):
            weight += jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * jnp.uint32(stride)
            stride = stride * leaf.shape[axis] % 2**32
        return jnp.sum(bits * weight, dtype=jnp.uint32)

    return jnp.stack([of(leaf) for leaf in jax.tree.leaves(state)])


def parameters_sha256(params: Any) -> str:
    """SHA-256 over the bytes of all parameters in path order: equal if and only if they all are."""
    digest = hashlib.sha256()
    leaves = jax.tree_util.tree_leaves_with_path(params)
    named = {"/".join(str(getattr(k, "key", k)) for k in path): leaf for path, leaf in leaves}
    for name in sorted(named):
        digest.update(np.ascontiguousarray(processes.fetch(named[name])).tobytes())
    return digest.hexdigest()

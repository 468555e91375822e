"""Compiles one program ahead of time, and says what it took."""

import contextlib
import dataclasses
import re
import resource
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from depthjax.aot.topology import Target
from depthjax.config import Config
from depthjax.errors import InputError
from depthjax.infer import Cache, decode_step, empty_cache, in_activation_dtype, prefill
from depthjax.parallel import batch_ways, cache_sharding
from depthjax.train.step import Program

_EFFORTS = {
    "tpu": {"O0": {"xla_optimization_level": "EFFORT_O0"}},
    "cpu": {"O0": {"xla_backend_optimization_level": 0}},
    "gpu": {"O0": {"xla_backend_optimization_level": 0}},
}
# A program that does not fit is compiled all the same, so that it can be told by how much.
_KEEP_GOING = {"tpu": {"xla_tpu_no_crash_on_oom": "true"}}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program, or what the compiler said when it gave up for lack of memory."""

    executable: jax.stages.Compiled | None
    cpu_seconds: float
    needed: int | None = None
    """Bytes of temporaries that the compiler asked for, where it gave up."""


@dataclasses.dataclass(frozen=True)
class Inference:
    """A program other than the training step. kind: "prefill" of sequences of so many tokens, or
    "decode", one step with so many in the cache. rows: sequences on each device. chunk: tokens that
    a prefill takes at a time, into a cache; None: all, and nothing is kept of them."""

    kind: str
    tokens: int
    rows: int = 1
    chunk: int | None = None

    @property
    def advanced(self) -> int:
        """Tokens of each sequence that it computes at a time."""
        return self.chunk or self.tokens if self.kind == "prefill" else 1

    def __str__(self) -> str:
        if self.kind == "prefill":
            pieces = "" if self.chunk is None else f", {self.chunk:,} at a time"
            return f"prefill of {self.tokens:,} tokens{pieces}"
        return f"decode step after {self.tokens:,} tokens"


def effort_options(effort: str | None, platform: str) -> dict[str, Any]:
    """Compiler options of `--effort`; InputError where it is unknown."""
    if effort is None:
        return {}
    if effort not in _EFFORTS[platform]:
        raise InputError(f"effort is {effort!r}: use O0, or leave it out for the full one")
    return dict(_EFFORTS[platform][effort])


def lower(
    config: Config, vocab: int, mesh: jax.sharding.Mesh, inference: Inference | None
) -> jax.stages.Lowered:
    """The program of an `Inference`; None: the training step."""
    if inference is None:
        return lower_training(config, vocab, mesh)
    sizes = config, vocab, mesh, inference.tokens, inference.rows
    if inference.kind == "decode":
        return lower_decode(*sizes)
    return lower_prefill(*sizes, inference.chunk)


def lower_training(config: Config, vocab: int, mesh: jax.sharding.Mesh) -> jax.stages.Lowered:
    """The optimizer step that `depthjax train` runs."""
    return Program(config, vocab, mesh).lower()


def lower_prefill(
    config: Config,
    vocab: int,
    mesh: jax.sharding.Mesh,
    tokens: int,
    rows: int = 1,
    chunk: int | None = None,
) -> jax.stages.Lowered:
    """The forward over `rows` sequences of `tokens` for each device along the batch's axes, to the
    logits behind the last one. chunk: so many tokens at a time, into the cache that comes back."""
    program = Program(config, vocab, mesh)

    def whole(params, input_ids):
        model = program.model(params)
        return model.logits(model.features(input_ids)[0][:, -1:])

    def chunked(params, input_ids):
        model = in_activation_dtype(program.model(params))
        return prefill(model, input_ids, -(-tokens // chunk) * chunk, chunk=chunk)

    batch = rows * batch_ways(mesh)
    ids = jax.ShapeDtypeStruct((batch, tokens), jnp.int32, sharding=program.by_row)
    by_row, run = program.by_row, program.on_mesh(whole if chunk is None else chunked)
    out = by_row if chunk is None else (by_row, _cache_layout(program, config))
    jitted = jax.jit(run, out_shardings=out)
    return jitted.lower(program.abstract_state().params, ids)


def _cache_layout(program: Program, config: Config) -> Cache:
    """The shardings of a cache."""
    entries = cache_sharding(program.mesh, config.shape.kv_heads)
    return Cache(entries, entries, program.by_row, program.by_row, program.replicated)


def lower_decode(
    config: Config, vocab: int, mesh: jax.sharding.Mesh, tokens: int, rows: int = 1
) -> jax.stages.Lowered:
    """One more token for `rows` sequences for each device along the batch's axes, with a cache of
    `tokens` slots, written in place; matrices in the dtype of the activations, as `depthjax
    generate` holds them."""
    program = Program(config, vocab, mesh)

    def place(shapes, sharding):
        def one(x, where):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

        if isinstance(sharding, NamedSharding):
            return jax.tree.map(lambda x: one(x, sharding), shapes)
        return jax.tree.map(one, shapes, sharding)

    def make(params):
        model = in_activation_dtype(program.model(params))
        return model, empty_cache(model, batch, tokens)

    batch, params = rows * batch_ways(mesh), program.abstract_state().params
    model, cache = jax.eval_shape(make, params)
    by_row, layout = program.by_row, _cache_layout(program, config)
    model = place(model, program.model(program.shardings.params))
    cache = place(cache, layout)
    ids = jax.ShapeDtypeStruct((batch,), jnp.int32, sharding=by_row)
    step = program.on_mesh(decode_step)
    jitted = jax.jit(step, donate_argnums=2, out_shardings=(by_row, layout))
    return jitted.lower(model, ids, cache)


def compile_lowered(
    lowered: jax.stages.Lowered, target: Target, options: dict[str, Any]
) -> Compiled:
    """Compiles, whatever a cache holds; a lack of memory is an answer, not an error."""
    before = _cpu_seconds()
    extra = _KEEP_GOING.get(target.platform, {})
    try:
        with _without_cache():
            try:
                executable = lowered.compile(options | extra)
            except Exception as error:
                if "No such compile option" not in str(error) or not extra:
                    raise
                executable = lowered.compile(options)  # this compiler cannot be told to go on
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Compiled(None, _cpu_seconds() - before, _needed(str(error)))
    return Compiled(executable, _cpu_seconds() - before)


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """jax keeps programs for devices that are not here, too, but cannot load them; and the seconds
    are to be the compiler's."""
    from jax.experimental.compilation_cache import compilation_cache

    def use(cache: bool) -> None:
        jax.config.update("jax_enable_compilation_cache", cache)
        compilation_cache.reset_cache()  # it looks at the setting once

    enabled = jax.config.jax_enable_compilation_cache
    use(False)
    try:
        yield
    finally:
        use(enabled)


def _needed(message: str) -> int:
    """Bytes that an out-of-memory message asks for."""
    found = re.search(r"(?:required for HLO temporaries \(|Used )([0-9.]+)([KMGT]?)", message)
    if not found:
        return 0
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2] or " "))


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@contextlib.contextmanager
def working(console: Console, text: str) -> Iterator[None]:
    """Shows that something takes long: a spinner and a clock, or one line in a log."""
    if not console.is_terminal:
        console.print(text, soft_wrap=True, highlight=False)
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(text)
        yield

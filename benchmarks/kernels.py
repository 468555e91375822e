"""What the depth kernels move and take on a TPU, against the least that they could.

    python benchmarks/kernels.py                              without a TPU: v5p and v6e
    python benchmarks/kernels.py --chips v4,v5e,tpu7x --widths 896,7168 --only "phase 1"
    python benchmarks/kernels.py --measure                    on a TPU: times and errors

A line a function, width and number of queries, at 8 finished sources (Full Attention Residuals: the
33rd of 65 rows; streams: 4 of them), in bfloat16. The floor is each operand read and each result
written once. Without a TPU (needs the extra `plan`):

    bytes   of its kernels, counted from their block specs, over the floor
    XLA     the same of the XLA form as compiled for the chip, its temporaries included
    VMEM    of a kernel's blocks, both halves of double buffers
    time    bundles of the compiled schedule at one a cycle, over the floor at the chip's
            bandwidth: at 1 or less the kernel is bound by memory; stalls are not in it. "<" where
            code that is skipped in most steps is counted as if it ran in all

On a TPU: time against the floor, against the XLA form, and the largest error against float64 over
the largest value.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from depthjax.kernels import depth_read, gather_rows, phase1, phase2, read_streams
from depthjax.kernels.two_phase.api import phase1_backward
from depthjax.plan.chips import CHIPS, chip_of_kind
from depthjax.plan.hlo import parse
from depthjax.plan.hlo_traffic import hbm_bytes
from depthjax.plan.kernel_traffic import KernelTraffic, kernel_traffic
from depthjax.residuals import REGISTRY
from depthjax.residuals.module import init_params, sublayer_params

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:1x1"}
TOPOLOGIES |= {"tpu7x": "tpu7x:2x2x1"}
CLOCKS = {"v4": (1.05e9, 2), "v5e": (1.5e9, 1), "v5p": (1.75e9, 2), "v6e": (1.75e9, 1)}
"""Cycles a second, and cores of a device, of the chips whose clock is known well enough."""
SOURCES = 8
FULL_ROWS, FULL_INDEX = 65, 32
WIDTHS = (896, 1024, 2048, 4096, 7168)


@dataclasses.dataclass(frozen=True)
class Sizes:
    tokens: int
    width: int
    queries: int

    def rows(self, *lead: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*lead, self.tokens, self.width), dtype)

    def numbers(self, *lead: int) -> jax.ShapeDtypeStruct:
        """fp32, one a token."""
        return jax.ShapeDtypeStruct((*lead, self.tokens), jnp.float32)

    def vector(self, *lead: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*lead, self.width), jnp.float32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A function. make(sizes): (function of implementation, arguments); rows(queries): the floor,
    in arrays [T, D] of bfloat16; skips: its kernels skip much of their code in most steps."""

    name: str
    make: Callable[[Sizes], tuple[Callable, tuple]]
    rows: Callable[[int], float]
    many_queries: bool = False
    skips: bool = False


def make_phase1(s: Sizes):
    def function(implementation, blocks, queries):
        return phase1(blocks, queries, implementation=implementation)

    return function, (s.rows(SOURCES), s.vector(s.queries))


def make_phase1_backward(s: Sizes):
    def function(implementation, *arguments):
        return phase1_backward(*arguments, implementation=implementation)

    given = s.rows(s.queries), s.numbers(s.queries)
    return function, (s.rows(SOURCES), s.vector(s.queries), s.numbers(s.queries), *given)


def _phase2(implementation, mixture, lse, open_sum, branch, query, scale):
    options = {"query": query, "norm_scale": scale, "implementation": implementation}
    return phase2(mixture, lse, open_sum, branch, **options)


def make_phase2(s: Sizes):
    return _phase2, (s.rows(), s.numbers(), s.rows(), s.rows(), s.vector(), s.vector())


def _read(implementation, history, newest, direction, scale):
    options = {"output_scale": scale, "implementation": implementation}
    return depth_read(history, newest, direction, SOURCES, 1e-6, **options)[0]


def make_read(s: Sizes):
    return _read, (s.rows(SOURCES), s.rows(), s.vector(), s.vector())


def make_gather(s: Sizes):
    def function(implementation, rows, last, directions, lse, delta):
        options = {"dtype": jnp.bfloat16, "implementation": implementation}
        return gather_rows(rows, FULL_INDEX, last, directions, lse, delta, 1e-6, **options)

    statistics = s.numbers(FULL_ROWS), s.numbers(FULL_ROWS)
    return function, (s.rows(FULL_ROWS), s.rows(), s.vector(FULL_ROWS), *statistics)


def make_streams(variant: str, s: Sizes):
    rule = REGISTRY[variant]().bind(2)

    def function(implementation, params, streams):
        row = sublayer_params(rule, params, 1, layers=2, width=s.width)
        return read_streams(
            rule.weigh,
            rule.eps,
            rule.gates(row),
            rule.columns(row),
            row["norm"],
            streams,
            implementation=implementation,
        )

    init = functools.partial(init_params, rule, layers=2, width=s.width)
    return function, (jax.eval_shape(init, jax.random.key(0)), s.rows(rule.streams))


def pulled(make: Callable) -> Callable:
    """The function and its backward pass, from cotangents like its results."""

    def wrapped(sizes):
        function, arguments = make(sizes)
        results = jax.eval_shape(functools.partial(function, "xla"), *arguments)

        def pull(implementation, cotangents, *arguments):
            run = functools.partial(function, implementation)
            return jax.vjp(run, *arguments)[1](cotangents)

        return pull, (results, *arguments)

    return wrapped


CASES = (
    Case("phase 1", make_phase1, lambda q: SOURCES + q, many_queries=True),
    Case("phase 1 backward", make_phase1_backward, lambda q: 2 * SOURCES + q, many_queries=True),
    Case("phase 2", make_phase2, lambda q: 5),
    Case("phase 2 both ways", pulled(make_phase2), lambda q: 5 + 6),
    Case("one-shot", make_read, lambda q: SOURCES + 2, skips=True),
    Case("one-shot backward", pulled(make_read), lambda q: 3 * SOURCES + 4, skips=True),
    Case("Full's gather", make_gather, lambda q: FULL_ROWS - FULL_INDEX + 2, skips=True),
    Case("HC read", functools.partial(make_streams, "hc"), lambda q: 4 + 5),
    Case("HC both ways", pulled(functools.partial(make_streams, "hc")), lambda q: 9 + 13),
    Case("mHC both ways", pulled(functools.partial(make_streams, "mhc")), lambda q: 9 + 13),
)


def in_blocks(kernel: KernelTraffic) -> float:
    """VMEM in MiB."""
    return kernel.blocks / 2**20


def cycles(text: str, steps: int) -> int:
    """Bundles that a kernel issues in so many steps of its grid, of its final schedule `text`: its
    loops as often as their exit tests say, whatever may be skipped always."""
    segments: list[list[int]] = []  # [depth, bundles, trips]
    for line in text.splitlines():
        found = re.match(r"\s*0(?:x[0-9a-f]+)?\s+([A-Z]{2})?\s*:\s+((?:> ?)*)", line)
        if not found:
            continue
        depth = found[2].count(">")
        if not segments or found[1] == "LB" or depth != segments[-1][0]:
            segments.append([depth, 0, 1])
        segments[-1][1] += 1
        exits = re.search(r"scmp\S* (%s\w+), (\d+) */\* loop exit test", line)
        if exits and depth > 1:
            stride = re.search(rf"{exits[1]} = sadd.s32 (\d+),", text)
            before = re.search(rf"= sphi (%s\w+), {exits[1]}\b", text)
            start = before and re.search(rf"{before[1]} = smov\S* (?:\(\S+\), )?(\d+)", text)
            most = int(exits[2]) - int(start[1] if start else 0)
            segments[-1][2] = -(-most // int(stride[1] if stride else 1))
    return steps * sum(bundles * trips for depth, bundles, trips in segments if depth)


def compiled(chip: str, only: str, widths: Sequence[int], queries: Sequence[int], tokens: int):
    """Prints a JSON line a function and size, of one chip; the process was started for it alone,
    with LIBTPU_INIT_ARGS that write the schedules to the folder in DUMP."""
    from depthjax.aot.topology import devices_of, prepare_environment, target

    wanted = target(TOPOLOGIES[chip])
    prepare_environment(wanted)
    automatic = (jax.sharding.AxisType.Auto,)
    one = jax.sharding.Mesh(devices_of(wanted)[:1], ("data",), axis_types=automatic)
    everywhere = jax.sharding.NamedSharding(one, jax.sharding.PartitionSpec())
    folder = pathlib.Path(os.environ["DUMP"])
    for case, sizes in chosen(only, widths, queries, tokens):
        function, arguments = case.make(sizes)
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), arguments
        )
        mosaic = functools.partial(function, "mosaic_tpu")
        with jax.sharding.use_abstract_mesh(one.abstract_mesh):
            kernels = kernel_traffic(mosaic, *arguments)
        with jax.set_mesh(one):
            before = set(folder.iterdir())
            jax.jit(mosaic).lower(*arguments).compile()
            new = sorted(set(folder.iterdir()) - before)
            spelled = jax.jit(functools.partial(function, "xla")).lower(*arguments).compile()
        issued = 0
        for kernel in kernels:
            schedule = next(
                file
                for file in new
                if re.search(rf"-\w*{kernel.name}_*(\.\d+)?-\d+-final_bundles.txt$", file.name)
            )
            issued += cycles(schedule.read_text(), kernel.steps)
            new.remove(schedule)
        floor = case.rows(sizes.queries) * sizes.tokens * sizes.width * 2
        line = {"case": case.name, **dataclasses.asdict(sizes), "floor": floor}
        line |= {"skips": case.skips, "many_queries": case.many_queries}
        line |= {"moved": sum(k.moved for k in kernels), "vmem": max(map(in_blocks, kernels))}
        line |= {"xla": hbm_bytes(parse(spelled.as_text())), "cycles": issued}
        print(json.dumps(line), flush=True)


def chosen(only: str, widths, queries, tokens) -> Iterator[tuple[Case, Sizes]]:
    for case in CASES:
        if only in case.name:
            for width in widths:
                for count in queries if case.many_queries else queries[:1]:
                    yield case, Sizes(tokens, width, count)


def ahead_of_time(options: argparse.Namespace) -> None:
    """Prints the table, a chip after the other."""
    print(f"{'':20} {'D':>5} {'S':>3} {'chip':>6} {'bytes':>6} {'XLA':>6} {'VMEM':>9} {'time':>6}")
    for chip in options.chips:
        with tempfile.TemporaryDirectory() as folder:
            dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
            environment = {**os.environ, "LIBTPU_INIT_ARGS": dump, "DUMP": folder}
            arguments = [sys.executable, __file__, *sys.argv[1:], "--worker", chip]
            worker = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)
            for text in worker.stdout:
                if text.startswith("{"):
                    print(row(chip, json.loads(text)), flush=True)
            if worker.wait():
                sys.exit(worker.returncode)


def row(chip: str, found: dict[str, Any]) -> str:
    floor, issued = found["floor"], "-"
    if chip in CLOCKS:
        clock, cores = CLOCKS[chip]
        seconds = found["cycles"] / clock / cores
        issued = f"{'<' * found['skips']}{seconds / (floor / CHIPS[chip].hbm):.2f}"
    queries = found["queries"] if found["many_queries"] else ""
    return (
        f"{found['case']:20} {found['width']:5} {queries:>3} {chip:>6} "
        f"{found['moved'] / floor:6.3f} {found['xla'] / floor:6.2f} {found['vmem']:5.1f} MiB "
        f"{issued:>6}"
    )


def measured(options: argparse.Namespace) -> None:
    """Prints times and errors on the TPU at hand."""
    chip = chip_of_kind(jax.devices()[0].device_kind)
    print(f"{jax.devices()[0].device_kind}: time over the floor, XLA's time over it, error")
    for case, sizes in chosen(options.only, options.widths, options.queries, options.tokens):
        function, abstract = case.make(sizes)
        arguments = filled(abstract)
        forms = {form: jax.jit(functools.partial(function, form)) for form in ("mosaic", "xla")}
        floor = case.rows(sizes.queries) * sizes.tokens * sizes.width * 2 / chip.hbm
        taken = {form: best_time(run, arguments) for form, run in forms.items()}
        few = dataclasses.replace(sizes, tokens=256)
        error = largest_error(*case.make(few))
        print(
            f"{case.name:20} {sizes.width:5} {sizes.queries if case.many_queries else '':>3} "
            f"{taken['mosaic'] / floor:6.2f} {taken['xla'] / floor:6.2f} {error:9.1e}",
            flush=True,
        )


def filled(abstract: Any) -> Any:
    """Normal numbers in place of `jax.ShapeDtypeStruct`s; small ones in fp32, where logits and a
    log-sum-exp that is not theirs would overflow."""
    leaves, tree = jax.tree.flatten(abstract)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    sizes = [0.05 if x.dtype == jnp.float32 else 1 for x in leaves]
    made = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, [s * x for s, x in zip(sizes, made, strict=True)])


def best_time(run: Callable, arguments: tuple) -> float:
    """Seconds, the least of 5 means of 10 calls."""

    def once() -> float:
        start = time.perf_counter()
        for _ in range(10):
            result = run(*arguments)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / 10

    jax.block_until_ready(run(*arguments))
    return min(once() for _ in range(5))


def largest_error(function: Callable, abstract: tuple) -> float:
    """Of the Mosaic form on this platform, over the largest value of each result."""
    arguments = filled(abstract)
    actual = jax.jit(functools.partial(function, "mosaic"))(*arguments)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), arguments)
        expected = jax.jit(functools.partial(function, "xla"))(*wide)
    errors = jax.tree.map(
        lambda a, b: np.max(np.abs(np.asarray(a, np.float64) - b)) / max(np.max(np.abs(b)), 1e-30),
        actual,
        expected,
    )
    return max(jax.tree.leaves(errors))


def main() -> None:
    def number(text: str) -> int:
        if int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text} is no size: give at least 1")
        return int(text)

    def numbers(text: str) -> list[int]:
        return [number(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chips", type=lambda text: text.split(","), default=["v5p", "v6e"])
    parser.add_argument("--only", default="", help="functions whose name holds this")
    parser.add_argument("--widths", type=numbers, default=list(WIDTHS))
    parser.add_argument("--queries", type=numbers, default=[8, 16])
    parser.add_argument("--tokens", type=number, default=8192)
    parser.add_argument("--measure", action="store_true", help="on the TPU of this machine")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for chip in options.chips:
        if chip not in TOPOLOGIES:
            parser.error(f"chip is {chip!r}: choose from {', '.join(TOPOLOGIES)}")
    if not any(options.only in case.name for case in CASES):
        names = ", ".join(case.name for case in CASES)
        parser.error(f"no function's name holds {options.only!r}: there are {names}")
    if options.measure and jax.default_backend() != "tpu":
        parser.error(f"--measure takes a TPU, and this machine's devices are {jax.devices()[0]}")
    if options.worker:
        sizes = options.only, options.widths, options.queries, options.tokens
        compiled(options.worker, *sizes)
    elif options.measure:
        measured(options)
    else:
        ahead_of_time(options)


if __name__ == "__main__":
    main()

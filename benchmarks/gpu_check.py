"""Checks every Mosaic GPU kernel, and the public functions with their gradients, against float64,
and times them against XLA's form.

    python benchmarks/gpu_check.py            on a GPU from Hopper on: values, times, bandwidth
    python benchmarks/gpu_check.py --dry-run  with jax 0.12 anywhere: values, in a simulation

A line a kernel and width: the largest error over the largest value of each result, the time, the
share of the memory's bandwidth in bytes that the kernel has to move, and the gain, XLA's
time over the kernel's. The last line times a whole stack of reads at the sizes that Triton kernels
are published for. Ends with status 1 where a value is wrong.
"""

import argparse
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from gpu_cases import CASES, LIVE, PUBLIC, QUERIES, STACK, STACK_SIZES, Case, up, worst_error

from depthjax.kernels.mosaic_gpu import fits

PEAKS = {"H100": 3352e9, "H200": 4800e9}  # bytes a second, NVIDIA's data sheets (SXM)
TOLERANCE = 1e-2
"""Of results rounded to bf16 once, 2^-8 of a value, beside the largest value of an array."""


def seconds(function: Callable, arrays: tuple, carry: int | None, calls: int = 20) -> float:
    """A call's time, from many in a row, where the first result may replace an argument."""
    compiled = jax.jit(function, donate_argnums=() if carry is None else (carry,))
    arrays = list(arrays)
    if carry is not None:
        arrays[carry] = jnp.copy(arrays[carry])

    def run(times):
        for _ in range(times):
            out = compiled(*arrays)
            if carry is not None:
                arrays[carry] = out[0]
        jax.block_until_ready(out)

    run(3)
    start = time.perf_counter()
    run(calls)
    return (time.perf_counter() - start) / calls


def timings(case: Case, tokens: int, width: int, peak: float) -> str:
    arrays = case.inputs(tokens, width)
    ours = seconds(case.kernel, arrays, case.carry)
    xla = seconds(case.reference, arrays, case.carry)
    rate = case.moved * tokens * width * 2 / ours
    return f"{ours * 1e6:9.0f}  {rate / 1e9:8.0f}  {rate / peak:6.0%}  {xla / ours:10.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="simulated, values alone")
    parser.add_argument("--tokens", type=int, default=8192, help="of the timings")
    options = parser.parse_args()
    if not options.dry_run and jax.default_backend() != "gpu":
        parser.error("there is no GPU here: --dry-run")
    kind = "simulated" if options.dry_run else jax.devices()[0].device_kind
    peak = next((rate for name, rate in PEAKS.items() if name in kind), PEAKS["H100"])
    print(f"jax {jax.__version__}, {kind}, {LIVE} live rows, {QUERIES} queries, bf16")
    print(
        f"{'kernel':20}{'D':>6}  {'error':>8}  {'us':>9}  {'GB/s':>8}  {'share':>6}  {'gain':>10}"
    )
    failed = False
    for width in (256,) if options.dry_run else (1024, 4096, 7168):
        for case in CASES + PUBLIC:
            arrays = case.inputs(3 if options.dry_run else 257, width)
            exact = case in PUBLIC and fits(width, jnp.float32)
            error = worst_error(case, tuple(map(up, arrays)) if exact else arrays)
            times = "" if options.dry_run else timings(case, options.tokens, width, peak)
            failed |= error > TOLERANCE
            mark = "  WRONG" if error > TOLERANCE else ""
            print(f"{case.name:20}{width:6}  {error:8.1e}  {times}{mark}", flush=True)
    if not options.dry_run:
        tokens, width = STACK_SIZES
        times = timings(STACK, tokens, width, peak)
        print(f"{STACK.name:20}{width:6}  {tokens:8}  {times}, of so many tokens", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

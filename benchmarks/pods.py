"""What one training step of the study takes of real pods, compiled for each of them on a laptop.

    python benchmarks/pods.py                              all, about an hour on two cores
    python benchmarks/pods.py --pods v5p:4x4x4 --residuals pre_ln,block_attnres

400m-L32, the study's recipe (512 sequences of 2,048 tokens), at effort O0; needs the extra `plan`,
and `plan-cuda` for H100. Per device: peak memory, whether it fits, HBM traffic, and bytes sent by
mesh axis (of a ring), all counted in the compiled program. For H100 attention is XLA's.
"""

import argparse
import dataclasses
import math
import pathlib
import sys
from collections.abc import Iterator

from depthjax.aot.compile import effort_options
from depthjax.aot.entry import Entry, make_entry
from depthjax.aot.topology import devices_of, prepare_environment, target
from depthjax.config import MeshConfig, load_config
from depthjax.errors import InputError
from depthjax.parallel import make_mesh, mesh_text
from depthjax.residuals import REGISTRY

STUDY = str(pathlib.Path(__file__).parents[1] / "configs" / "depthbench.py")
VOCAB = 50280
PODS = {
    "v5e:4x4": MeshConfig(fsdp=16),
    "v5p:4x4x4": MeshConfig(stage=4, tensor=4, fsdp=4, virtual_stages=2, microbatches=8),
    "v6e:16x16": MeshConfig(fsdp=16, tensor=2),
    "2xv5p:4x4x4": MeshConfig(fsdp=16, tensor=4),
    "h100:8": MeshConfig(fsdp=8),
}
"""Pod -> mesh; `data` takes what is left."""
RESIDUALS = ("pre_ln", "block_attnres", "full_attnres", "hc", "mhc")
LARGE = ("v5p:4x4x4", "1.6b-L54", "full_attnres", MeshConfig(fsdp=16, tensor=4))
COLUMNS = "{:12} {:9} {:14} {:>9} {:>5} {:>9} {:>7}  {}"


def wanted(pods: list[str], residuals: list[str]) -> Iterator[tuple[str, str, str, MeshConfig]]:
    for pod in pods:
        yield from ((pod, "400m-L32", name, PODS[pod]) for name in residuals)
    if LARGE[0] in pods and LARGE[2] in residuals:
        yield LARGE


def plan(pod: str, shape: str, residual: str, mesh: MeshConfig) -> tuple[str, Entry]:
    """(the mesh, the figures)."""
    found = target(pod)
    prepare_environment(found)
    config = dataclasses.replace(load_config(STUDY, shape, residual), mesh=mesh).check()
    made = make_mesh(config, devices_of(found))
    options = effort_options("O0", found.platform)
    return mesh_text(made.shape), make_entry(config, VOCAB, found, made, options=options)


def sent(entry: Entry) -> str:
    """GB by axes."""
    axes = dict.fromkeys(c.axes for c in entry.collectives)
    total = {a: math.fsum(c.sent for c in entry.collectives if c.axes == a) / 1e9 for a in axes}
    return ", ".join(f"{axis} {size:.3g}" for axis, size in total.items() if size > 0.005)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pods", default=",".join(PODS))
    parser.add_argument("--residuals", default=",".join(RESIDUALS))
    options = parser.parse_args()
    pods, residuals = options.pods.split(","), options.residuals.split(",")
    if unknown := [pod for pod in pods if pod not in PODS]:
        parser.error(f"pods has {unknown[0]!r}: choose from {', '.join(PODS)}")
    if unknown := [name for name in residuals if name not in REGISTRY]:
        parser.error(f"residuals has {unknown[0]!r}: choose from {', '.join(REGISTRY)}")
    print(
        COLUMNS.format("pod", "shape", "residual", "peak GiB", "fits", "HBM GB", "CPU s", "sent GB")
    )
    before = None
    for pod, shape, residual, mesh in wanted(pods, residuals):
        try:
            where, entry = plan(pod, shape, residual, mesh)
        except InputError as error:
            print(f"{pod} {residual}: {error}", file=sys.stderr)
            continue
        if (pod, where) != before:
            print(f"{pod}, {where}")
            before = pod, where
        figures = (f"{(entry.peak_bytes or 0) / 2**30:.2f}", "yes" if entry.fits else "no")
        figures += (f"{(entry.hbm_bytes or 0) / 1e9:.0f}", f"{entry.compile_cpu_s:.0f}")
        print(COLUMNS.format("", shape, residual, *figures, sent(entry)), flush=True)


if __name__ == "__main__":
    main()

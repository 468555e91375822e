"""Which form of a kernel runs, and how a Mosaic form runs where there is no accelerator."""

import re
from typing import Any, Literal

import jax

from depthjax.kernels.over_mesh import device_kind, platform

Implementation = Literal["xla", "mosaic", "mosaic_tpu", "mosaic_gpu"] | None


def choose(implementation: Implementation, *, tpu: bool = True, gpu: bool = True) -> str:
    """ "xla", "mosaic_tpu" or "mosaic_gpu": the form of a kernel that runs.

    None: Mosaic on a platform that it is made for, of GPUs those from Hopper on, XLA elsewhere;
    "mosaic": that of the platform, on a CPU the TPU's, interpreted. tpu, gpu: whether the kernel's
    forms there take the arguments at hand; without a choice, XLA takes the others. On several
    devices a Mosaic form is divided by the mesh in force (`jax.set_mesh`), which it needs; JAX
    0.10.2 cannot map one over an axis on a GPU (`vmap`). Raises ValueError for another name.
    """
    where = platform()
    takes = {"mosaic_tpu": tpu, "mosaic_gpu": gpu}
    if implementation is None:
        own = f"mosaic_{where}"
        made_for = where != "gpu" or _from_hopper_on(device_kind())
        return own if takes.get(own, False) and made_for else "xla"
    if implementation == "mosaic":
        return "mosaic_gpu" if where == "gpu" else "mosaic_tpu"
    if implementation not in ("xla", *takes):
        raise ValueError(
            f"implementation is {implementation!r}: give None, 'xla', 'mosaic', 'mosaic_tpu' or "
            "'mosaic_gpu'"
        )
    return implementation


def _from_hopper_on(kind: str) -> bool:
    """Whether a GPU's name is that of a chip with bulk copies (TMA) and as much shared memory as
    Hopper: H100, H20, GH200, B200, GB300 and the like."""
    return re.search(r"\b(G?H\d{2,3}|G?B[123]00)\b", kind) is not None


MIB = 2**20


def small_vmem() -> bool:
    """Whether the TPU of the mesh in force is one of 16 MiB of vector memory a core, as they are up
    to v4; the others have 64 MiB or more."""
    return device_kind().startswith(("TPU v2", "TPU v3", "TPU v4"))


def tpu_interpreter() -> bool:
    """What a TPU kernel gives `pallas_call` as `interpret`: whether there is no TPU, so that the
    kernel runs as plain JAX, also within `jax.checkpoint`, which does not take the effects of JAX's
    simulation of a TPU; `pltpu.force_tpu_interpret_mode` chooses that one, to look for races."""
    return platform() != "tpu"


def gpu_interpreter() -> Any:
    """What a GPU kernel gives as `interpret`: nothing on a GPU, elsewhere JAX's simulation of one,
    which is not made for several devices at work at once. Raises NotImplementedError where this JAX
    has none."""
    if platform() == "gpu":
        return False
    from jax.experimental.pallas import mosaic_gpu as plgpu  # late: it takes a while to import

    if not hasattr(plgpu, "InterpretGPUParams"):
        raise NotImplementedError(
            f"there is no GPU here, and jax {jax.__version__} does not simulate one as jax 0.12 "
            "does: give implementation=None or 'xla'"
        )
    return plgpu.InterpretGPUParams()

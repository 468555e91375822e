"""Which form of a kernel runs, and how a Mosaic form runs where there is no accelerator."""

from typing import Any, Literal

from depthjax.kernels.over_mesh import platform

Implementation = Literal["xla", "mosaic", "mosaic_tpu", "mosaic_gpu"] | None


def choose(implementation: Implementation, *, tpu: bool = True, gpu: bool = True) -> str:
    """ "xla", "mosaic_tpu" or "mosaic_gpu": the form of a kernel that runs.

    None: Mosaic on a platform that it is made for, XLA elsewhere; "mosaic": that of the platform,
    on a CPU the TPU's, interpreted. tpu, gpu: whether the kernel's forms there take the arguments
    at hand; without a choice, XLA takes the others. Raises ValueError for another name.
    """
    where = platform()
    takes = {"mosaic_tpu": tpu, "mosaic_gpu": gpu}
    if implementation is None:
        own = f"mosaic_{where}"
        return own if takes.get(own, False) else "xla"
    if implementation == "mosaic":
        return "mosaic_gpu" if where == "gpu" else "mosaic_tpu"
    if implementation not in ("xla", *takes):
        raise ValueError(
            f"implementation is {implementation!r}: give None, 'xla', 'mosaic', 'mosaic_tpu' or "
            "'mosaic_gpu'"
        )
    return implementation


def tpu_interpreter() -> Any:
    """What a TPU kernel gives `pallas_call` as `interpret`: nothing on a TPU, elsewhere JAX's
    simulation of one."""
    from jax.experimental.pallas import tpu as pltpu  # late: it takes a while to import

    return False if platform() == "tpu" else pltpu.InterpretParams()

"""Accelerators by name: memory and rates of one JAX device, from the vendors' data sheets."""

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device of a kind. Rates are peaks a second.

    usable: bytes of device memory that a program may use (what libtpu says is available; for GPUs
    the driver's total). flops: dense bf16. hbm: bytes between memory and chip. links: bytes out of
    the device into the interconnect, all links together, one direction.
    """

    name: str
    kinds: tuple[str, ...]
    """Beginnings of `jax.Device.device_kind`."""
    usable: int | None
    flops: float
    hbm: float
    links: float
    example: str = ""
    """A topology of it, as `depthjax plan` takes one."""


# A v4 chip is one device (megacore); a TPU7x chip is two.
_TABLE = (
    Chip("v4", ("TPU v4",), int(31.25 * GIB), 275e12, 1228e9, 300e9, "v4:2x2x4"),
    Chip("v5e", ("TPU v5 lite", "TPU v5e"), int(15.75 * GIB), 197e12, 819e9, 200e9, "v5e:4x4"),
    Chip("v5p", ("TPU v5p", "TPU v5"), int(95.73 * GIB), 459e12, 2765e9, 600e9, "v5p:4x4x4"),
    Chip("v6e", ("TPU v6e", "TPU v6 lite"), int(31.24 * GIB), 918e12, 1638e9, 448e9, "v6e:16x16"),
    Chip("tpu7x", ("TPU7x",), int(94.74 * GIB), 1153.5e12, 3690e9, 600e9, "tpu7x:2x2x1"),
    Chip("h100", ("NVIDIA H100",), 84_942_979_072, 989e12, 3352e9, 450e9, "h100:8"),
    Chip("a100", ("NVIDIA A100",), None, 312e12, 2039e9, 300e9),
    Chip("h200", ("NVIDIA H200",), None, 989e12, 4800e9, 450e9),
    Chip("b200", ("NVIDIA B200",), None, 2250e12, 8000e9, 900e9),
)

CHIPS: dict[str, Chip] = {chip.name: chip for chip in _TABLE}


def chip_of_kind(device_kind: str) -> Chip | None:
    """The chip by `jax.Device.device_kind`; None where not known."""
    matches = [
        (len(kind), chip.name)
        for chip in _TABLE
        for kind in chip.kinds
        if device_kind.startswith(kind)
    ]
    return CHIPS[max(matches)[1]] if matches else None


def peak_flops(device_kind: str) -> float | None:
    """Peak dense bf16 FLOP/s of a device by `jax.Device.device_kind`; None where not known."""
    chip = chip_of_kind(device_kind)
    return chip and chip.flops

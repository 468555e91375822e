"""Devices to compile for: `v5p:4x4x4`, `h100:8`, `cpu`, described by the compiler alone."""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from depthjax.errors import InputError
from depthjax.plan.chips import CHIPS, Chip

_TPU_AXES = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2, "tpu7x": 3}
_TPU_MOST = {"v4": 16, "v5e": 16, "v5p": 28, "v6e": 16, "tpu7x": 24}  # along an axis of a pod
_TPU_OPTIONS = {"v4": {"chip_config_name": "megacore"}}  # a chip is one device, as when it runs
_GPUS = ("h100",)

# What the compiler wants to know of a GPU that it does not see.
_H100 = """\
gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
memory_bandwidth: 3352000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536
registers_per_block_limit: 65536 }
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """Where a program is to run. name: as the user wrote it; platform: tpu, gpu or cpu."""

    name: str
    platform: str
    devices: int
    chip: Chip | None
    """None for a CPU."""
    sizes: tuple[int, ...] = ()


def known_topologies() -> str:
    """One example a kind, for messages."""
    return ", ".join([*(CHIPS[name].example for name in (*_TPU_AXES, *_GPUS)), "cpu"])


def target(name: str) -> Target:
    """The target that `--topology` names; InputError where there is none of that name, or what
    compiles for it is not installed."""
    kind, _, rest = name.partition(":")
    sizes = (
        tuple(int(size) for size in rest.split("x")) if re.fullmatch(r"\d+(x\d+)*", rest) else ()
    )
    devices = math.prod(sizes)
    if kind == "cpu" and (not rest or (len(sizes) == 1 and devices)):
        return Target(name, "cpu", devices if rest else 1, None, sizes)
    if kind in _GPUS and len(sizes) == 1 and devices:
        _require_cuda(name)
        return Target(name, "gpu", devices, CHIPS[kind], sizes)
    if kind in _TPU_AXES and len(sizes) == _TPU_AXES[kind] and devices:
        if max(sizes) > _TPU_MOST[kind]:
            raise InputError(
                f"topology is {name}, but a {kind} pod has at most {_TPU_MOST[kind]} chips along "
                f"an axis: use one like {CHIPS[kind].example}"
            )
        if importlib.util.find_spec("libtpu") is None:
            raise InputError(
                f"topology is {name}, which needs libtpu to compile for, and it is not installed: "
                'pip install "depthjax[plan]"'
            )
        return Target(name, "tpu", devices * (2 if kind == "tpu7x" else 1), CHIPS[kind], sizes)
    raise InputError(f"topology is {name!r}, which is not known: use one like {known_topologies()}")


def _require_cuda(name: str) -> None:
    plugins = importlib.util.find_spec("jax_plugins")
    places = list(plugins.submodule_search_locations or ()) if plugins else []
    found = any(
        os.path.isdir(os.path.join(place, f"xla_cuda{version}"))
        for place in places
        for version in (12, 13)
    )
    if not found:
        raise InputError(
            f"topology is {name}, which needs JAX's CUDA plugin to compile for, and it is not "
            'installed: pip install "depthjax[plan-cuda]"'
        )


def mesh_axes(text: str | None, devices: int) -> dict[str, int]:
    """{"data": N} of `--mesh data=N`; None stands for all devices."""
    if text is None:
        return {"data": devices}
    found = re.fullmatch(r"(\w+)=(\d+)(,\w+=\d+)*", text)
    if not found:
        raise InputError(f"mesh is {text!r}: write data={devices}")
    axes = dict(part.split("=") for part in text.split(","))
    for axis in axes:
        if axis != "data":
            raise InputError(
                f"mesh has the axis {axis!r}, but training divides the batch alone so far: use "
                f"data={devices}"
            )
    if int(axes["data"]) != devices:
        raise InputError(
            f"mesh is data={axes['data']}, but the topology has data={devices}: use that"
        )
    return {"data": devices}


def prepare_environment(wanted: Target) -> None:
    """Before JAX starts its backends: nothing here runs on a device, and processes do not fight
    for one."""
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    if wanted.platform == "gpu":
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    else:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if wanted.platform == "cpu":
        import jax

        if wanted.devices <= jax.config.jax_num_cpu_devices:
            return
        with contextlib.suppress(RuntimeError):  # the backend runs already, with its own number
            jax.config.update("jax_num_cpu_devices", wanted.devices)


def mesh_of(wanted: Target, axes: Mapping[str, int]) -> Any:
    """The `jax.sharding.Mesh` of a target's devices."""
    import numpy as np
    from jax.sharding import AxisType, Mesh

    devices = np.array(_devices(wanted)).reshape(tuple(axes.values()))
    kinds = (AxisType.Auto,) * len(axes)
    return Mesh(devices, tuple(axes), axis_types=kinds)


def _devices(wanted: Target) -> list[Any]:
    import jax
    from jax.experimental import topologies

    if wanted.platform == "cpu":
        found = jax.devices("cpu")
        if len(found) < wanted.devices:
            raise InputError(
                f"topology is {wanted.name}, but this process has {len(found)} CPU devices: use "
                f"cpu:{len(found)}"
            )
        return found[: wanted.devices]
    kind = wanted.name.partition(":")[0]
    with _quiet():
        try:
            if wanted.platform == "gpu":
                jax.devices()  # registers the plugin
                described = topologies.get_topology_desc(
                    kind,
                    platform="cuda",
                    target_config=_H100,
                    topology=f"1 x 1 x {wanted.devices}",
                )
            else:
                described = topologies.get_topology_desc(
                    platform="tpu", topology_name=wanted.name, **_TPU_OPTIONS.get(kind, {})
                )
        except Exception as error:  # a size that this kind does not come in, or a plugin that fails
            reason = " ".join(str(error).split())
            raise InputError(
                f"topology is {wanted.name}, which the compiler refuses ({reason}): use one like "
                f"{CHIPS[kind].example}"
            ) from error
    return list(described.devices)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Swallows what libraries in C++ print on stderr."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)

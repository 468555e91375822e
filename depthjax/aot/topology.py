"""Devices to compile for, described by the compiler alone: `v5p:4x4x4`, `2xv5p:4x4x4` (two slices),
`h100:8`, `cpu`."""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from depthjax.errors import InputError
from depthjax.plan.chips import CHIPS, Chip

_TPU_AXES = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2, "tpu7x": 3}
_TPU_MOST = {"v4": 16, "v5e": 16, "v5p": 28, "v6e": 16, "tpu7x": 24}  # along an axis of a pod
_TPU_OPTIONS = {"v4": {"chip_config_name": "megacore"}}  # a chip is one device, as when it runs
_TPU_HOST = (2, 2, 1)  # chips of one host
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
    slices: int = 1
    """Of a TPU pod: so many times `sizes`, with the data-center network between them."""


def known_topologies() -> str:
    """One example a kind, for messages."""
    return ", ".join([*(CHIPS[name].example for name in (*_TPU_AXES, *_GPUS)), "cpu"])


def target(name: str) -> Target:
    """The target that `--topology` names; InputError where there is none of that name, or what
    compiles for it is not installed."""
    several = re.fullmatch(r"([1-9]\d{0,2})x([a-z].*)", name)
    slices, one = (int(several[1]), several[2]) if several else (1, name)
    kind, _, rest = one.partition(":")
    sizes = (
        tuple(int(size) for size in rest.split("x")) if re.fullmatch(r"\d+(x\d+)*", rest) else ()
    )
    devices = math.prod(sizes)
    if slices > 1 and kind not in _TPU_AXES:
        raise InputError(f"topology is {name!r}, but only TPUs come in slices: use {one}")
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
        devices *= slices * (2 if kind == "tpu7x" else 1)
        return Target(name, "tpu", devices, CHIPS[kind], sizes, slices)
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


def prepare_environment(wanted: Target) -> None:
    """Before JAX starts its backends: nothing here runs on a device, and processes do not fight
    for one."""
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    if wanted.platform == "gpu":
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        return
    import jax

    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    if wanted.platform == "cpu":
        if wanted.devices <= jax.config.jax_num_cpu_devices:
            return
        with contextlib.suppress(RuntimeError):  # the backend runs already, with its own number
            jax.config.update("jax_num_cpu_devices", wanted.devices)


def devices_of(wanted: Target) -> list[Any]:
    """The devices of a target, which need not be there."""
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
    one = wanted.name if wanted.slices == 1 else wanted.name.partition("x")[2]
    kind = one.partition(":")[0]
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
                options = dict(_TPU_OPTIONS.get(kind, {}))
                chips = *wanted.sizes, *[1] * (3 - len(wanted.sizes))
                if all(size <= most for size, most in zip(chips, _TPU_HOST, strict=True)):
                    options["chips_per_host_bounds"] = chips  # jax 0.10.2 takes a part no other way
                if wanted.slices > 1:
                    options["num_slices"] = wanted.slices
                described = topologies.get_topology_desc(
                    platform="tpu", topology_name=one, **options
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

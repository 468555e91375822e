"""The processes of one job: how they find each other, what they agree on, and how they end.

A launcher starts the same command once a host (or once a GPU) with DEPTHJAX_PROCESSES set to their
number. Where they are JAX finds out by itself on TPUs, SLURM, Open MPI and Kubernetes; elsewhere
JAX_COORDINATOR_ADDRESS (host:port of process 0) and DEPTHJAX_PROCESS_ID say it.

Everything that decides what is computed next has to be the same on all processes, or they wait for
each other forever: hence `any_of` and `of_first`.
"""

import contextlib
import functools
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from depthjax.errors import InputError, JobBroken

COUNT, INDEX = "DEPTHJAX_PROCESSES", "DEPTHJAX_PROCESS_ID"
HEARTBEAT_SECONDS = 30
"""A process that has not been heard of for so long is gone, and the others end. JAX's own 100 make
a pod wait longer; heartbeats are sent by a thread that neither Python nor XLA can hold up."""


def join() -> bool:
    """Joins the processes of this job, if there are several: once, before JAX sees a device.

    Returns whether there are several. Raises InputError where JAX cannot find the others, or finds
    another number of them than DEPTHJAX_PROCESSES.
    """
    count = _number(COUNT, 1, "the number of processes of the job")
    if not count or count == 1:
        return False
    # It would take SIGTERM for itself; the training loop agrees on a step to stop at without it.
    jax.config.update("jax_enable_preemption_service", False)
    place = _place(count)
    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_SECONDS, **place)
    except ValueError as error:  # JAX's word for a launcher that it does not know
        raise InputError(
            f"{COUNT} is {count}, but jax knows no launcher here that says where they are "
            f"({error}): set JAX_COORDINATOR_ADDRESS (host:port of process 0) and {INDEX} (0 to "
            f"{count - 1})"
        ) from error
    except RuntimeError as error:
        raise InputError(
            f"{COUNT} is {count}, but they did not come together ({_first_line(error)}): start as "
            "many, with one coordinator address, before anything uses a device"
        ) from error
    if jax.process_count() != count:
        raise InputError(
            f"{COUNT} is {count}, but jax found {jax.process_count()}: start as many processes as "
            "it says"
        )
    return True


def _place(count: int) -> dict[str, Any]:
    """Where this process stands, as arguments; none where the launcher tells JAX itself."""
    index = _number(INDEX, 0, f"0 to {count - 1}, another one for each process")
    if index is None:
        return {}
    if index >= count:
        raise InputError(f"{INDEX} is {index}: with {COUNT} {count} give 0 to {count - 1}")
    address = os.environ.get("JAX_COORDINATOR_ADDRESS", "")
    if not re.fullmatch(r".+:[0-9]{1,5}", address):
        raise InputError(
            f"{INDEX} is {index}, but JAX_COORDINATOR_ADDRESS is {address!r}: give host:port of "
            "process 0"
        )
    known = {"num_processes": count, "process_id": index}
    return {**known, "cluster_detection_method": "deactivate"}


def _number(name: str, least: int, meaning: str) -> int | None:
    """An environment variable; None where it is not set."""
    text = os.environ.get(name, "")
    if not text:
        return None
    if not re.fullmatch("[0-9]{1,6}", text) or int(text) < least:
        raise InputError(f"{name} is {text!r}: give {meaning}")
    return int(text)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def several() -> bool:
    """Whether the job has more than one process."""
    return jax.process_count() > 1


def is_first() -> bool:
    """Whether this process is the one that writes logs, metrics, summary and figures."""
    return jax.process_index() == 0


def any_of(flag: bool) -> bool:
    """Whether `flag` is true on any process; all of them call it, and wait for each other."""
    return int(largest(int(flag))) > 0


def of_first(flag: bool) -> bool:
    """`flag` as it is on the first process; all of them call it, and wait for each other."""
    return any_of(flag and is_first())


def name() -> str:
    """Which of the processes this is, in words."""
    return f"process {jax.process_index()} of {jax.process_count()}"


def largest(number: int) -> jax.Array | int:
    """The largest of all processes' numbers: on its way (int32 []) without holding up the host."""
    if not several():
        return number
    sharding, maximum = _maximum()
    mine = np.full(1, number, np.int32)
    return maximum(
        jax.make_array_from_callback((jax.device_count(),), sharding, lambda index: mine)
    )


@functools.cache
def _maximum() -> tuple[Sharding, Callable[[jax.Array], jax.Array]]:
    mesh = Mesh(np.array(jax.devices()), ("all",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, P("all")), jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))


@contextlib.contextmanager
def together() -> Iterator[None]:
    """For what each process does alone, such as opening files: where it fails on one of them, all
    end, each with a sentence (InputError) and not by waiting for the others."""
    try:
        yield
    except (InputError, OSError):
        any_of(True)
        raise
    if any_of(False):
        raise InputError("another process of the job cannot start: see what it says")


def fetch(tree: Any) -> Any:
    """Arrays on the host, also those whose parts lie on several processes; all of them call it."""

    def one(leaf: Any) -> Any:
        here = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
        if here or leaf.is_fully_replicated:
            return jax.device_get(leaf)
        return multihost_utils.process_allgather(leaf, tiled=True)

    return jax.tree.map(one, tree)


def rows_here(sharding: Sharding, rows: int) -> np.ndarray:
    """int64 [..]: which of `rows` rows, divided by `sharding`, this process's devices hold, in
    order. Where an axis of the mesh that divides no rows spans processes, these hold the same."""
    parts = sharding.addressable_devices_indices_map((rows,)).values()
    return np.unique(np.concatenate([np.arange(rows)[index] for index in parts]))


def as_one(work: Callable[[], int]) -> int:
    """The exit status of `work`, all that one of several processes does, once all have done it.

    Raises JobBroken, after a traceback where it may help, for what broke off the work here.
    """
    try:
        status = work()
    except (InputError, OSError):
        raise
    except Exception as error:
        again = "run the same command again to continue from the newest checkpoint"
        if isinstance(error, jax.errors.JaxRuntimeError) and _LOST.search(str(error)):
            gone = f"another process of the job is gone ({_first_line(error)})"
            raise JobBroken(f"{gone}: {again}") from error
        traceback.print_exc()
        raise JobBroken(f"the error above ends the whole job: once mended, {again}") from error
    jax.distributed.shutdown()
    return status


_LOST = re.compile("gloo|nccl|peer|socket|connection|coordination|unavailable", re.IGNORECASE)


def leave(status: int) -> NoReturn:
    """Ends one of several processes, without the exit handlers of JAX, which would wait for others
    that may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    if status and is_first():  # the others end with their coordinator: let them speak before it
        time.sleep(1)
    os._exit(status)

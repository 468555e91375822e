"""Runs a prefill on the device at hand: what it takes, and what it holds."""

import statistics
import time

import jax
import jax.numpy as jnp

from depthjax.config import Config, build_model

_RUNS = 5
_ENOUGH = 60.0  # seconds, after which no further run is begun


def measure_prefill(config: Config, vocab: int, batch: int) -> tuple[float | None, int | None]:
    """(seconds, bytes at the peak) of reading `batch` prompts of the config's context to the logits
    of their last position, with freshly initialised parameters, on the first device.

    Seconds: the median of up to 5 runs behind one to warm up. Bytes: arguments, results and
    temporaries of the executable, which XLA lays out before it runs. None where memory does not
    suffice.
    """

    def prefill(model, input_ids):
        return model.logits(model.features(input_ids)[0][:, -1:])

    peak = None
    try:
        with jax.default_device(jax.devices()[0]):
            model = build_model(config, vocab)
            ids = jnp.zeros((batch, config.model.context), jnp.int32)
            executable = jax.jit(prefill).lower(model, ids).compile()
            held = executable.memory_analysis()
            peak = held.argument_size_in_bytes + held.output_size_in_bytes
            peak += held.temp_size_in_bytes - held.alias_size_in_bytes
            return _median_seconds(lambda: jax.block_until_ready(executable(model, ids))), peak
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None, peak


def _median_seconds(run) -> float:
    run()
    seconds, began = [], time.monotonic()
    while len(seconds) < _RUNS and time.monotonic() - began < _ENOUGH:
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)

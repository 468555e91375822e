"""The initialisation that every matrix of the LLaMA backbone shares."""

import jax


def truncated_normal(std: float):
    """Normal with standard deviation `std`, cut at +-3 std (realised: 0.987 std)."""
    return jax.nn.initializers.truncated_normal(std, lower=-3.0, upper=3.0)

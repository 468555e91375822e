"""Floating-point operations of the model, and the peak rates of known devices.

A multiply-add counts 2; norms, softmax and rotary positions are left out (DepthBench, appendix D).
Training counts three forward passes: the backward computes two products for each one.
"""

from depthjax.models import Shape
from depthjax.residuals import Residual


def forward_flops_per_token(
    shape: Shape, vocab: int, context: int, residual: Residual, *, causal: bool = True
) -> int:
    """Forward FLOPs a token at sequence length `context`, with logits at every position.

    causal: count the lower half of the attention matrix, as model FLOPs do; without it the whole,
    as a kernel without skipping executes. `residual` must be bound to the shape's depth.
    """
    attention = 4 * shape.heads * shape.head_dim * context // (2 if causal else 1)
    branches = 2 * shape.branch_parameters() + shape.layers * attention
    head = 2 * shape.width * vocab
    return branches + head + residual.flops_per_token(shape.layers, shape.width)


def training_flops_per_token(shape: Shape, vocab: int, context: int, residual: Residual) -> int:
    """Model FLOPs a token of one training step: three times the forward."""
    return 3 * forward_flops_per_token(shape, vocab, context, residual)


# Dense 16-bit FLOP/s of one JAX device, from the vendors' data sheets.
_PEAKS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 1153.5e12,  # a chip is two devices
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Peak dense bf16 FLOP/s of a device by `jax.Device.device_kind`; None where not known."""
    matches = [name for name in _PEAKS if device_kind.startswith(name)]
    return _PEAKS[max(matches, key=len)] if matches else None

"""Floating-point operations of the model, by formula.

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
    head = 2 * shape.width * vocab
    extra = residual.flops_per_token(shape.layers, shape.width)
    return _branches(shape, context, causal) + head + extra


def training_flops_per_token(shape: Shape, vocab: int, context: int, residual: Residual) -> int:
    """Model FLOPs a token of one training step: three times the forward."""
    return 3 * forward_flops_per_token(shape, vocab, context, residual)


def prefill_flops(
    shape: Shape, vocab: int, tokens: int, residual: Residual, *, every_logit: bool = False
) -> int:
    """Forward FLOPs of one sequence of `tokens`, with the logits of its last position or of all."""
    extra = residual.flops_per_token(shape.layers, shape.width)
    head = 2 * shape.width * vocab * (tokens if every_logit else 1)
    return tokens * (_branches(shape, tokens, causal=True) + extra) + head


def decode_flops(shape: Shape, vocab: int, tokens: int, residual: Residual) -> int:
    """Forward FLOPs of one more token behind `tokens`, all of which it sees, with its logits."""
    return forward_flops_per_token(shape, vocab, tokens, residual, causal=False)


def matmul_flops_per_sequence(shape: Shape, vocab: int, tokens: int, residual: Residual) -> int:
    """Products of two matrices in one training step that keeps its branches, of one sequence of
    `tokens`: what a compiled program with attention over the whole T x T square executes."""
    mixed = residual.matmul_flops_per_token(shape.layers, shape.width)
    forward = _branches(shape, tokens, causal=False) + mixed + 2 * shape.width * vocab
    again = residual.rereading_matmul_flops_per_token(shape.layers, shape.width)
    return tokens * (3 * forward + again)


def _branches(shape: Shape, context: int, causal: bool) -> int:
    attention = 4 * shape.heads * shape.head_dim * context // (2 if causal else 1)
    return 2 * shape.branch_parameters() + shape.layers * attention

"""What reading a prompt costs (DepthBench, section 4.4, figure 11, and appendix D)."""

import dataclasses

from depthjax.models import Shape
from depthjax.plan.flops import prefill_flops
from depthjax.plan.memory import key_value_bytes
from depthjax.residuals import Residual


@dataclasses.dataclass(frozen=True)
class PrefillCost:
    """Of prompts of so many tokens, to the logits of their last position."""

    residual: str
    shape: str
    layers: int
    tokens: int
    flops: int
    """Of one prompt, by formula."""
    flops_published: int
    """The same with the sources over the depth counted as the study does, where that differs."""
    key_value_bytes: int
    """Of one prompt, by formula."""
    batch: int | None = None
    """Prompts in the measured run; this and the next two are None where nothing was run."""
    seconds: float | None = None
    """Measured: one run of the batch."""
    peak_bytes: int | None = None
    """What the compiled run holds at most; with no `seconds` it did not fit."""

    @property
    def hours_per_billion_tokens(self) -> float | None:
        """Device hours of 1e9 tokens, at the pace of the measured run."""
        return self.seconds and self.seconds / (self.batch * self.tokens) * 1e9 / 3600


def prefill_cost(
    name: str, shape: Shape, residual: Residual, *, vocab: int, tokens: int, itemsize: int
) -> PrefillCost:
    """The formulas for the shape called `name`; itemsize: bytes of an element of keys and values.
    `residual` must be bound to the shape's depth."""
    flops = prefill_flops(shape, vocab, tokens, residual)
    extra = residual.flops_per_token(shape.layers, shape.width)
    countings = residual.flop_countings(shape.layers, shape.width)
    return PrefillCost(
        residual=residual.name,
        shape=name,
        layers=shape.layers,
        tokens=tokens,
        flops=flops,
        flops_published=flops + tokens * (countings.get("as published", extra) - extra),
        key_value_bytes=key_value_bytes(shape, tokens, itemsize, residual),
    )

"""Figures of single layers along the depth: what they add, what can be read off behind them
(DepthBench, figure 8; arXiv 2603.15031, figure 5)."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from depthjax.report.plate import Plate, drawing
from depthjax.report.style import Lines, line_figure
from depthjax.report.subject import Subject, having

_COLUMNS = ("model", "quantity", "depth", "value")


@dataclasses.dataclass(frozen=True)
class _Curve:
    """A panel: one array along the depth of every model that has the diagnostic. first: what the
    axis begins at; skip: so many values at the beginning are not drawn; line: a value to compare
    with; again: shows another panel's values."""

    diagnostic: str
    array: str
    title: str
    across: str
    up: str
    first: int = 0
    skip: int = 0
    scale: str = "linear"
    line: float | None = None
    again: bool = False

    def panel(self, subjects: Sequence[Subject]) -> Lines:
        series = {}
        for subject in having(subjects, self.diagnostic):
            y = subject.get(self.diagnostic, self.array)
            series[subject.name] = (np.arange(len(y)) + self.first)[self.skip :], y[self.skip :]
        return Lines(self.title, self.across, self.up, series, self.scale, self.line)

    def rows(self, subjects: Sequence[Subject]) -> list[tuple[str, str, int, float]]:
        return [
            (subject.name, self.array, depth + self.first, float(value))
            for subject in having(subjects, self.diagnostic)
            for depth, value in enumerate(subject.get(self.diagnostic, self.array))
            if np.isfinite(value)
        ]


def _plate(
    name: str, title: str, caption: str, curves: Sequence[_Curve]
) -> Callable[[Sequence[Subject]], Plate | None]:
    """A function that draws the curves of which there is something; None where there is nothing."""

    def draw(subjects: Sequence[Subject]) -> Plate | None:
        found = [curve for curve in curves if having(subjects, curve.diagnostic)]
        if not found:
            return None
        with drawing():
            panels = [curve.panel(subjects) for curve in found]
            figure = line_figure(panels, [subject.name for subject in subjects])
        rows = [row for curve in found if not curve.again for row in curve.rows(subjects)]
        return Plate(name, title, caption, figure, _COLUMNS, rows)

    return draw


layer_pruning = _plate(
    "layer_pruning_loss",
    "What does the loss pay for a missing layer?",
    "Loss with one layer left out, less the loss of the whole model: high means that the rest "
    "cannot make up for the layer, low that it can; it does not show layers that stand in for "
    "each other, which look dispensable one by one.",
    [
        _Curve(
            *("layer_pruning_loss", "delta", "Loss paid", "layer left out", "nats a token"),
            line=0,
        ),
        _Curve(
            *("layer_pruning_loss", "delta", "The same, logarithmic", "layer left out", ""),
            scale="symlog",
            line=0,
            again=True,
        ),
    ],
)

_BEHIND = "layers computed"
logit_lens = _plate(
    "logit_lens",
    "When is the prediction made?",
    "The state behind each layer, read by the model's own head (LogitLens): high divergence and "
    "loss, and low overlap, mean that the prediction is still to come, the reverse that later "
    "layers change little of it; what the head misreads, not trained on these states, may be "
    "there all the same.",
    [
        _Curve("logit_lens", "kl", "KL(final ‖ probe)", _BEHIND, "nats a token"),
        _Curve("logit_lens", "cross_entropy", "Loss of the probe", _BEHIND, "nats a token"),
        _Curve("logit_lens", "top5_overlap", "Top five in common", _BEHIND, "share"),
    ],
)

layer_maps = _plate(
    "layer_maps",
    "Is a layer more than a linear map?",
    "Loss with a layer replaced by its best affine map, over the loss (a layer counts as useful "
    "above the line), and how far its Jacobian is from the identity: high means that the layer "
    "does what its stand-in cannot, low that it is nearly linear, or nearly the identity; whether "
    "later layers use what it does is not shown, and a map fitted to few tokens flatters it.",
    [
        _Curve(
            *("usefulness", "ratio", "Usefulness", "layer", "loss if linear / loss"),
            line=1.1,
        ),
        _Curve(
            *("jacobian_norms", "norms", "Distance from the identity", "layer", "‖J − I‖ / √D"),
            skip=1,
        ),
    ],
)

token_collapse = _plate(
    "token_collapse",
    "Do the tokens stay apart?",
    "Ranks of the matrix of a sequence's states behind each layer: high means that tokens point in "
    "many directions, low that they collapse onto few; it does not show what they say.",
    [
        _Curve("token_collapse", "stable_rank", "Stable rank", _BEHIND, "Σσ² / σ₁²"),
        _Curve("token_collapse", "effective_rank", "Effective rank", _BEHIND, "exp entropy of σ²"),
        _Curve("token_collapse", "l1_over_l2", "Spread of the spectrum", _BEHIND, "Σσ / √Σσ²"),
    ],
)

magnitudes = _plate(
    "magnitudes",
    "How large are states and gradients along the depth?",
    "Root mean square of the running state, and of the gradient at the output of each sublayer "
    "(logarithmic): a high state drowns what later layers add, and a high gradient moves its layer "
    "more, low is the reverse; optimizer and norms rescale both, so that size is not effect.",
    [
        _Curve("magnitudes", "output_rms", "State", _BEHIND, "RMS", scale="log"),
        _Curve("magnitudes", "gradient_rms", "Gradient", "sublayer", "RMS", scale="log"),
    ],
)

"""The model shapes of the DepthBench study, one name each: `400m-L32`, `1.6b-L28`, ...

A name fixes layers, width, heads and MLP width. Below 1B: 16 heads, as many key-value heads, and
the MLP width is 8 D / 3 rounded up to a multiple of 16; at 1.6B: 8 key-value heads and 3 D
(DepthBench, appendix B). `backbone-` names hold the parameters of the blocks constant instead
of the total.
"""

import dataclasses
import difflib

from depthjax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a decoder-only transformer; raises InputError where they do not fit together."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp_width: int

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise InputError(f"model.{field.name} is {value}: give a positive integer")
        if self.width % self.heads:
            raise InputError(
                f"model.heads is {self.heads}, which does not divide model.width {self.width}"
            )
        if self.head_dim % 2:
            raise InputError(
                f"model.width {self.width} over model.heads {self.heads} gives heads of odd size "
                f"{self.head_dim}: rotary positions need an even one"
            )
        if self.heads % self.kv_heads:
            raise InputError(
                f"model.kv_heads is {self.kv_heads}, which does not divide model.heads {self.heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def branch_parameters(self) -> int:
        """Parameters of all attention and MLP branches."""
        attention = 2 * self.width * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.mlp_width)


def _study(layers: int, width: int) -> Shape:
    return Shape(layers, width, 16, 16, -(-width // 6) * 16)


def _study_gqa(layers: int, width: int) -> Shape:
    return Shape(layers, width, 16, 8, 3 * width)


_WIDTHS = {  # family -> {layers: width}
    "200m": {24: 672, 18: 768, 12: 896},
    "300m": {28: 800, 21: 896, 14: 1056},
    "400m": {
        16: 1216,
        20: 1120,
        24: 1024,
        28: 960,
        32: 896,
        42: 800,
        70: 640,  # the main study
        26: 992,
        30: 928,
        36: 864,
        50: 736,
        56: 704,
        62: 672,
    },
    "500m": {34: 992, 26: 1120, 17: 1344},
    "backbone-300m": {16: 1248, 24: 1024, 32: 896, 42: 768, 70: 608, 84: 544},
}
_WIDTHS_GQA = {"1.6b": {28: 2048, 40: 1728, 54: 1504}}

SHAPES: dict[str, Shape] = {
    "tiny-L8": Shape(layers=8, width=128, heads=4, kv_heads=4, mlp_width=352),
    **{f"{f}-L{n}": _study(n, d) for f, table in _WIDTHS.items() for n, d in table.items()},
    **{f"{f}-L{n}": _study_gqa(n, d) for f, t in _WIDTHS_GQA.items() for n, d in t.items()},
}


def shape_of(name: str) -> Shape:
    """The shape called `name`; InputError with the nearest name where there is none."""
    if name not in SHAPES:
        family = [known for known in SHAPES if known.startswith(name.rpartition("-L")[0] + "-L")]
        near = family or difflib.get_close_matches(name, SHAPES, n=3, cutoff=0.0)
        raise InputError(
            f"model.shape is {name!r}, which is no known shape: try {', '.join(near)}, "
            "or 'custom' with layers, width, heads and mlp_width"
        )
    return SHAPES[name]

"""The authors' random weights, drawn again as PyTorch draws them, so that no file has to hold them.

A fixture's weights came from one generator with the fixture's seed: `torch.randn(shape) * spread +
centre` for each tensor of the state dict, in the sorted order of their names. Here NumPy repeats
that bit for bit; the fixture keeps a checksum. PyTorch on a CPU draws normal numbers in two ways:

    16 values or more   24-bit uniforms, Box-Muller on blocks of 16 in float32, with the logarithm,
                        sine and cosine of the Cephes library and fused multiply-adds;
    fewer               53-bit uniforms, Box-Muller in float64; of each pair of normal numbers the
                        second is kept for the next such tensor.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

F32 = np.float32
LOG = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1)
LOG += (-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)
SINE = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
COSINE = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
QUARTER_PI = (-0.78515625, -2.4187564849853515625e-4, -3.77489497744594108e-8)  # minus pi / 4


def multiply_add(a, b, c):
    """a * b + c in float32, rounded once."""
    wide = np.asarray(a, np.float64) * np.asarray(F32(b), np.float64)
    return (wide + np.asarray(F32(c), np.float64)).astype(F32)


def polynomial(x, coefficients):
    """Horner's scheme in float32, the highest power first."""
    y = np.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        y = multiply_add(y, x, c)
    return y


def log(x):
    """Natural logarithm in float32, rounded as by Cephes."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < F32(np.sqrt(0.5))
    x = (mantissa - F32(1)) + np.where(small, mantissa, F32(0))
    exponent = exponent.astype(F32) - small.astype(F32)
    square = x * x
    y = polynomial(x, LOG) * x
    y = multiply_add(y, square, exponent * F32(-2.12194440e-4))
    y = multiply_add(-square, 0.5, y)
    return multiply_add(exponent, 0.693359375, x + y)


def sine_and_cosine(x):
    """Both in float32 for x >= 0, rounded as by Cephes."""
    octant = (x * F32(4 / np.pi)).astype(np.int32) + 1 & ~1
    for part in QUARTER_PI:
        x = multiply_add(octant.astype(F32), part, x)
    square = x * x
    cosine = polynomial(square, COSINE) * square
    cosine = multiply_add(cosine, square, -(square * F32(0.5))) + F32(1)
    sine = multiply_add(polynomial(square, SINE) * square, x, x)
    swap = octant & 2 != 0
    sine, cosine = np.where(swap, cosine, sine), np.where(swap, sine, cosine)
    return np.where(octant & 4, -sine, sine), np.where(octant + 2 & 4, -cosine, cosine)


class TorchGenerator:
    """The normal numbers of `torch.Generator().manual_seed(seed)` on a CPU."""

    def __init__(self, seed: int):
        self.bits = np.random.MT19937()
        self.bits._legacy_seeding(seed)
        self.spare = None

    def randn(self, size: int) -> np.ndarray:
        """`torch.randn(size)`: float32 [size]."""
        if size < 16:
            return np.array([self._single() for _ in range(size)], F32)
        blocks, rest = divmod(size, 16)
        uniform = self._uniform(size)
        normal = self._blocks(uniform[: 16 * blocks])
        if rest:  # the last sixteen are drawn afresh, over the end of the last whole block
            normal = np.append(normal, np.zeros(rest, F32))
            normal[-16:] = self._blocks(self._uniform(16))
        return normal

    def _uniform(self, size: int) -> np.ndarray:
        return (self.bits.random_raw(size) & (2**24 - 1)).astype(F32) * F32(2**-24)

    @staticmethod
    def _blocks(uniform: np.ndarray) -> np.ndarray:
        halves = uniform.reshape(-1, 2, 8)
        radius = np.sqrt(F32(-2) * log(F32(1) - halves[:, 0]))
        sine, cosine = sine_and_cosine(F32(2 * np.pi) * halves[:, 1])
        return np.stack([radius * cosine, radius * sine], axis=1).ravel()

    def _single(self) -> float:
        if self.spare is not None:
            value, self.spare = self.spare, None
            return value
        high, low = self.bits.random_raw((2, 2)).T
        angle, radius = (((high << 32) | low) & (2**53 - 1)) * 2.0**-53
        radius = np.sqrt(-2 * np.log1p(-radius))
        self.spare = radius * np.sin(2 * np.pi * angle)
        return radius * np.cos(2 * np.pi * angle)


# By the last part of a name: (spread, centre). Other vectors are norms, and other matrices have
# 1 / sqrt(columns) and 0.
RULES = {
    **dict.fromkeys(("dynamic_alpha_proj", "dynamic_beta_proj"), (0.2, 0)),
    **dict.fromkeys(("dynamic_alpha_scale", "dynamic_beta_scale"), (0.04, 0.15)),
    "static_beta": (0.3, 1),
    **dict.fromkeys(("alpha_pre", "alpha_post", "alpha_res"), (0.1, 0.5)),
    **dict.fromkeys(("pre_gate", "post_gate", "residual_gate"), (0.1, 0.5)),
    **dict.fromkeys(("pre_dynamic_proj", "post_dynamic_proj", "residual_dynamic_proj"), (0.1, 0)),
    "phi": (0.1, 0),
    **dict.fromkeys(("pre_bias", "post_bias", "H_pre_logits", "H_post_logits"), (0.8, 0)),
    "H_res_logits": (0.03, 0),
    **dict.fromkeys(("attn_res_bias", "mlp_res_bias", "res_bias"), (0.5, 0)),
}
NORM = (0.2, 1)
NEAR_IDENTITY = 1.5 * np.eye(4) - 1.5  # of transport logits between four streams


def spread_and_centre(name: str, shape: Sequence[int]):
    """What the normal numbers of a tensor are multiplied by, and what is added then."""
    last = name.rpartition(".")[2]
    if last in RULES:
        return RULES[last]
    if last.endswith("attnres_logit_scale"):
        return 0.3, 0
    if last == "residual_bias":
        return 0.5, NEAR_IDENTITY
    if last == "b":  # four columns each for read and write, then the transport
        return 0.8, np.append(np.zeros(8), NEAR_IDENTITY)
    if last == "static_alpha":  # column 0 reads stream s mod 4 of sublayer s, the others carry
        _, layer, connector = name.split(".")[:3]
        s = 2 * int(layer) + connector.startswith("feed_forward")
        return 0.12, np.column_stack([np.eye(4)[s % 4], np.eye(4)])
    if name == "embeddings.weight":
        return 0.7, 0
    if name.endswith("res_proj.weight"):
        return 0.25, 0
    return NORM if len(shape) == 1 else (shape[1] ** -0.5, 0)


def draw(seed: int, shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """The weights of a fixture. shapes: state-dict name -> shape."""
    generator, weights = TorchGenerator(seed), {}
    for name in sorted(shapes):
        spread, centre = spread_and_centre(name, shapes[name])
        normal = generator.randn(int(np.prod(shapes[name]))).reshape(shapes[name])
        weights[name] = normal * F32(spread) + np.asarray(centre, F32)
    return weights


def checksum(weights: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over the bytes of all tensors, in the sorted order of their names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(np.ascontiguousarray(weights[name], "<f4").tobytes())
    return digest.hexdigest()

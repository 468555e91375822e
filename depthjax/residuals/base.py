"""The residual protocol: a residual connection is a few pure moves on a depth state.

A network of L layers has 2L sublayers: s = 2l is the attention (or any mixer) of layer l and
s = 2l + 1 its MLP. A *branch* is what a sublayer computes; a residual connection says what the
branch is given and what becomes of its output. In the plain case both are one stream h:
h <- h + branch(norm(h)). Others keep several streams, or remember what each sublayer returned and
let later ones choose. All of them fit one form. They hold a *depth state* of two parts,

    carry    a pytree of fixed shape that changes at every sublayer (the residual stream, an open
             sum, several streams, a few counters);
    history  a pytree of append-only buffers [rows, ...]: each row is written once, and a reader
             touches only rows below its count; a variant without memory has an empty history,

and a model makes the same five moves on it, whatever the variant (`s` may be traced, so that one
scan serves all depths):

    carry, history         = begin(embedding, layers)
    for s in 0 .. 2L-1:
        x, ctx, carry, history = read(params[s], carry, history, s)  # x: normalised branch input
        y, aux                 = branch[s](x, ctx)
        carry, appended        = write(params[s], carry, y, aux, s)
        history                = append(history, appended)
    out                    = finish(params["final"], carry, history) # what the LM head reads

*Begin* makes the state out of the embedding. *Read* computes what the next branch is given: the
norms of a block belong to its residual connection, since where they stand is what tells many
variants apart. *Write* takes the branch's output in. *Finish* is the last read, followed by the
final norm. `ctx` hands depth keys and values to an attention that wants them, and `aux` brings its
own back; all other branches are given None and return None.

Why the moves look as they do: `read` returns the state because what it computes for the read may
also be what the write needs; `write` never touches the history, the caller appends, so that a
backward pass can hold one buffer.

*Probing* asks what a layer does for the rest. `skip` gives the state as if a layer had not been
there, `swap` the parameters with two layers exchanged, both with traced indices, so that a probe of
all layers, or of all pairs, compiles once. `observe` tells what a read weighs, `stream` the
running state whose size is logged, `depth_state`, `lens` and `layer_tensor` what stands at the
boundary of two layers, `paths` how a read is a sum of all that came before; `limits` names the
diagnostics that make no sense of a variant. Their defaults suit a single stream.

A new variant is a frozen dataclass that derives from `Residual` (or from a variant that it changes)
and gives itself a `name`, with which it is registered. Its hyperparameters are the fields, all with
defaults. README.md has a complete one.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from depthjax.kernels.rms_norm import at_least_float32

ATTENTION, MLP = 0, 1
KINDS = ("attention", "mlp")  # the sublayers of one layer, in order

State = tuple[Any, Any]  # (carry, history)
Appended = tuple[Any, jax.Array | int, jax.Array | bool] | None  # (rows, slot, flag)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """What a variant says of one of its parameters.

    shape: of one row. init: an initializer (key, shape, dtype) -> array, asked for all rows at
    once. first_layer, missing_last: layers before the first and so many at the end do not have the
    parameter, and store no row for it. decay: "matrix" is always decayed, "vector" only when the
    recipe decays norms and queries too, "never". float32: stays fp32 when others are bf16. rounded:
    the moves see it in the dtype of the activations.
    """

    shape: tuple[int, ...]
    init: Callable = jax.nn.initializers.ones
    first_layer: int = 0
    missing_last: int = 0
    decay: str = "vector"
    float32: bool = False
    rounded: bool = False


@dataclasses.dataclass(frozen=True)
class UpdateScale:
    """Factors on what the optimizer does to a group of parameters: its learning rate, the epsilon
    of Adam, and the weight decay (which the learning rate multiplies once more)."""

    rate: float = 1.0
    eps: float = 1.0
    decay: float = 1.0


class Paths(NamedTuple):
    """One sublayer as linear moves on K slots (see `Residual.paths`), a token or for all alike."""

    read: jax.Array
    """[..., K]: the branch input, before its norm, is the sum of the slots with these weights."""
    keep: jax.Array | None = None
    """[..., K, K]: new slot t takes keep[..., t, k] of old slot k; None at the final read."""
    write: jax.Array | None = None
    """[..., K]: new slot t takes so much of the branch output."""


class Pull(Protocol):
    """A variant whose every sublayer output is a row that all later reads mix, for a backward pass
    in one buffer.

    The buffer [2 L + 1, ..., D] holds the embedding in row 0 and the output of sublayer s in row
    s + 1; reader s mixes rows 0..s, the final reader is number 2 L. Going backward, a row whose own
    cotangent has been gathered from its readers is not needed any more: the cotangent of the read
    in front of that sublayer takes its place. Mixtures and gathered cotangents are in at least
    fp32, and so are lse and delta [2 L + 1, ...].
    """

    def directions(self, residual: Mapping[str, Any], final: Any) -> jax.Array:
        """[2 L + 1, D]: what the readers look for, of the parameters of all layers."""

    def mix(self, rows: jax.Array, s, direction: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(mixture [..., D], log-sum-exp [...]) of reader s."""

    def normalize(self, params: Any, mixture: jax.Array, s, like: jax.Array) -> jax.Array:
        """What reader s makes of its mixture: the input of sublayer s in the dtype of `like`."""

    def gather(self, rows, index, last, directions, lse, delta) -> tuple[jax.Array, jax.Array]:
        """(cotangent [..., D] of row `index`, its share in those of the directions). rows: behind
        `index`, row j + 1 holds the cotangent of mixture j; last: that of the final reader. delta:
        product of each mixture and its cotangent."""

    def state(self, rows: jax.Array, s) -> State:
        """The depth state in front of reader s, for an observer."""


class Phases(Protocol):
    """A variant whose consecutive sublayers read the same rows, for a forward pass that reads them
    once for a group of up to `size` sublayers (Attention Residuals, two-phase computation).

    Phase 1 answers all readers of a group from the history, when the first of them comes. Phase 2
    stands between two branches: it takes in what the one returned and completes what the next is
    given. In front of sublayer s that is, with begun false at the very first of a stack, which has
    nothing to take in,

        carry, appended = close(carry, s, begun)            # then the caller appends
        answers         = answer(carry, history, directions of the group)   # where place(s) is 0
        x, carry        = seam(params[s], carry, y of s - 1, answers, s, begun)
    """

    size: int

    def directions(self, residual: Mapping[str, Any]) -> jax.Array:
        """[2 L, D]: what the readers look for, of the parameters of L layers."""

    def place(self, s) -> jax.Array:
        """Which reader of its group s is."""

    def close(self, carry, s, begun) -> tuple[Any, Appended]:
        """The carry with the counters of `write` at s - 1, and what that appends."""

    def answer(self, carry, history, directions: jax.Array) -> Any:
        """What the history answers to readers that look for `directions` [size, D]."""

    def seam(self, params, carry, y, answers, s, begun) -> tuple[jax.Array, Any]:
        """(x, carry): the rest of `write` at s - 1, and `read` at s."""


REGISTRY: dict[str, type["Residual"]] = {}
"""Name -> class of every variant that has been defined."""


@dataclasses.dataclass(frozen=True)
class Residual:
    """Base of all variants: a frozen set of hyperparameters and the pure moves of the protocol.

    A subclass with a `name` of its own is registered under it; ValueError where it is taken.
    """

    name: ClassVar[str]
    peak_lr: ClassVar[float] = 2e-3
    """Peak learning rate that suits the variant (DepthBench, 400M models, AdamW)."""
    positive: ClassVar[tuple[str, ...]] = ()
    """Hyperparameters that must be above 0, where they are not None."""
    limits: ClassVar[Mapping[str, str]] = {
        "permutation_score_routing": "it has no connectors beside its norms",
        "transport_effective_rank": "it has a single stream, which nothing transports",
        "newest_source_weight": "it sums what came before in a stream and weighs no sources",
    }
    """Diagnostics of `depthjax.probes` that say nothing about the variant, and why."""

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        if "name" in cls.__dict__:
            known = REGISTRY.setdefault(cls.name, cls)
            if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(f"{cls.name!r} names {known.__qualname__} already: take another")
            REGISTRY[cls.name] = cls

    def bind(self, layers: int, kv_shape: tuple[int, int] | None = None) -> "Residual":
        """This variant for a stack of `layers` layers whose attention, if it has any, has keys of
        `kv_shape` = (heads, size): defaults that depend on them filled in.

        Raises ValueError with one sentence where a hyperparameter does not fit, or the variant is
        bound to another number of layers already.
        """
        if layers < 1:
            raise ValueError(f"layers is {layers}: give at least 1")
        bound_to = getattr(self, "_layers", layers)
        if bound_to != layers:
            raise ValueError(
                f"{self.name} is bound to {bound_to} layers, not {layers}: bind it as it was made"
            )
        for name in self.positive:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}: give a positive number")
        bound = copy.copy(self.fill_in(layers, kv_shape))
        object.__setattr__(bound, "_layers", layers)  # no field: it is not part of what it is
        return bound

    def fill_in(self, layers: int, kv_shape: tuple[int, int] | None) -> "Residual":
        """What `bind` makes of this variant: a copy with the defaults that depend on the depth."""
        return self

    def parameters(self, layers: int, width: int) -> Mapping[str, Mapping[str, Parameter]]:
        """Declares the parameters: {"attention": {...}, "mlp": {...}, "final": {...}}."""
        raise NotImplementedError

    def constants(self, layers: int) -> Mapping[str, Mapping[str, np.ndarray]]:
        """What `read` and `write` find beside the parameters but nothing trains: {kind: {name:
        [L, ...]}}. Swapping layers exchanges their rows too."""
        return {}

    def init_scales(self, layers: int, width: int) -> Mapping[str, float]:
        """Factors on the init of the branches' matrices, by path ("attention/out", "mlp/down")."""
        return {}

    def update_scales(self, layers: int, width: int) -> Mapping[str, UpdateScale]:
        """What the optimizer does differently, by pattern of parameter path ("attention/*",
        "residual/mlp/norm", "head"); the first pattern that matches counts."""
        return {}

    def begin(self, embedding: jax.Array, layers: int) -> State:
        """The state before the first sublayer; embedding: [..., D]."""
        raise NotImplementedError

    def read(self, params, carry, history, s):
        """(x, ctx, carry, history): x is the normalised input [..., D] of sublayer s."""
        raise NotImplementedError

    def write(self, params, carry, y, aux, s) -> tuple[Any, Appended]:
        """(carry, appended) after sublayer s returned y [..., D]."""
        raise NotImplementedError

    def finish(self, params, carry, history) -> jax.Array:
        """What the LM head reads, [..., D]: the final read and the final norm."""
        raise NotImplementedError

    def rows_before(self, s: int) -> int:
        """Rows of the history that are written in front of sublayer s, a plain number: what a stage
        of a pipeline has to have of it."""
        return 0

    def appends(self, kind: int) -> bool:
        """Whether a sublayer of this kind (ATTENTION, MLP) may append to the history. Where not,
        `write` never sets the flag, and a stack of layers leaves the row out: a variant that
        changes where another's `write` appends changes this with it."""
        return True

    def pull(self) -> "Pull | None":
        """How the backward pass over the depth may do with one buffer; None: it needs two."""
        return None

    def phases(self) -> "Phases | None":
        """How a forward pass may read the history once for several sublayers; None: it does not."""
        return None

    def stream(self, carry) -> jax.Array:
        """The running state [..., D] whose size by depth is logged."""
        raise NotImplementedError

    def observe(self, params, carry, history, s) -> dict[str, jax.Array]:
        """What a probe can record of the read at s (None: the final read). Empty by default."""
        return {}

    def skip(self, before: State, after: State, s) -> State:
        """The state that follows when the layer whose first sublayer is s is left out."""
        return before

    def swap(self, params, i, j):
        """The parameters, as `layered` gives them, with those of layers i and j exchanged."""
        return {**params, **{kind: swap_rows(params[kind], i, j) for kind in KINDS}}

    def swap_routing(self, params, i, j):
        """The same with only their connectors exchanged: what routes between streams."""
        raise NotImplementedError

    def depth_state(self, params, carry, history, s) -> jax.Array:
        """The state z [..., D'] at the boundary of two layers, whose movement probes measure. s:
        the first sublayer behind it, params: its own; None: the end, params: the final ones."""
        return self.stream(carry)

    def lens(self, params, final, carry, history, s) -> jax.Array:
        """What the head would read, [..., D], if the network ended at this boundary (LogitLens);
        final: the final parameters, the others as in `depth_state`."""
        return self.finish(final, carry, history)

    def layer_tensor(self, carry) -> jax.Array:
        """What a layer hands on to the next as one tensor, [..., D] or [m, ..., D]."""
        return self.stream(carry)

    def with_layer_tensor(self, carry, tensor: jax.Array):
        """The carry with `layer_tensor` replaced."""
        return tensor

    def boundaries(self, layers: int) -> tuple[int, ...]:
        """The sublayers in front of which a block of sources is closed."""
        return ()

    def slots(self, layers: int) -> np.ndarray:
        """[K]: how much of the embedding each slot of `paths` holds at first."""
        return np.ones(1, np.float32)

    def paths(self, params, before: State, y, after: State | None, s) -> Paths:
        """How sublayer s, which returned y and led from one state to another, moves K slots
        linearly: with it every read is a weighted sum of the embedding and the earlier outputs
        (path weights, DepthBench, section 7). s = None: the final read; y and after are None.

        Here, for a single stream, the slot: keep and write are the two numbers that give the new
        stream of a token from the old one and y with the least square error, means over features
        aside, which a LayerNorm takes out. They are those of an additive write; a norm of the sum
        counts as what it multiplies by.
        """
        if s is None:
            return Paths(jnp.ones(1))
        return _fitted(*map(at_least_float32, (self.stream(before[0]), y, self.stream(after[0]))))

    def flops_per_token(self, layers: int, width: int) -> int:
        """Forward FLOPs a token beyond the branches and the norms (a multiply-add counts 2)."""
        return 0

    def matmul_flops_per_token(self, layers: int, width: int) -> int:
        """The part of `flops_per_token` that is products of two matrices, each with an axis of its
        own; the rest is dot products and weighted sums."""
        return 0

    def rereading_matmul_flops_per_token(self, layers: int, width: int) -> int:
        """Such products that a training step adds to three times the forward ones: the backward
        pass computes reads again, whatever it keeps of the branches."""
        return self.matmul_flops_per_token(layers, width)

    def flop_countings(self, layers: int, width: int) -> dict[str, int]:
        """The ways of counting `flops_per_token` that are in use, by name; the first is its own."""
        return {"as computed": self.flops_per_token(layers, width)}

    def kept_per_token(self, layers: int, width: int) -> int:
        """Elements that decoding keeps of each past token, beside the keys and values of attention:
        none where, as in all variants here, depth is read at the token's own position only."""
        return 0

    def state_bytes_per_token(self, layers: int, width: int, dtype: Any) -> int:
        """Bytes a token of the depth state, carry and full history, at activations of `dtype`."""
        embedding = jax.ShapeDtypeStruct((width,), dtype)
        return _bytes(jax.eval_shape(lambda x: self.begin(x, layers), embedding))

    def carry_bytes_per_token(self, layers: int, width: int, dtype: Any) -> int:
        """The same of the carry alone."""
        embedding = jax.ShapeDtypeStruct((width,), dtype)
        return _bytes(jax.eval_shape(lambda x: self.begin(x, layers)[0], embedding))

    def elements_moved(self, layers: int, width: int) -> dict[str, float]:
        """Elements that the moves of the forward read and write, a token and sublayer on average,
        by how they are carried out (Attention Residuals, table 1): here d of the stream and d of
        the branch in, d out."""
        return {"stream": 3.0 * width}


def _bytes(state: Any) -> int:
    """Of a token's abstract state, counters aside."""
    leaves = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def _fitted(old: jax.Array, y: jax.Array, new: jax.Array) -> Paths:
    """new ~ keep old + write y, a token, [..., D] each, all centred."""
    old, y, new = (x - jnp.mean(x, axis=-1, keepdims=True) for x in (old, y, new))

    def dot(a, b):
        return jnp.sum(a * b, axis=-1, keepdims=True)

    def share(a, b):  # of b in a
        return dot(a, b) / jnp.maximum(dot(b, b), jnp.finfo(b.dtype).tiny)

    write = share(new, y - share(y, old) * old)
    keep = share(new - write * y, old)
    return Paths(jnp.ones(1), keep[..., None], write)


def append(history, appended: Appended):
    """Writes `appended` = (rows, slot, flag) into the history; an unset flag changes nothing."""
    if appended is None:
        return history
    rows, slot, flag = appended

    def put(buffer, row):
        old = jax.lax.dynamic_index_in_dim(buffer, slot, 0, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(buffer, jnp.where(flag, row, old), slot, 0)

    return jax.tree.map(put, history, rows)


def empty_history(row: jax.Array, rows: int) -> jax.Array:
    """Zeros [rows, ...] for rows like `row` [...], laid over a mesh as it is."""
    return jnp.broadcast_to(jnp.zeros_like(row), (rows, *row.shape))


def swap_rows(tree, i, j):
    """Exchanges rows i and j of every leaf [L, ...]; the indices may be traced."""
    return jax.tree.map(lambda leaf: leaf.at[i].set(leaf[j]).at[j].set(leaf[i]), tree)

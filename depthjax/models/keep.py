"""What a backward pass over the depth keeps of the forward pass, and what it computes again."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from depthjax.kernels.layout import gathers, not_gathered

POLICIES = ("none", "dots", "sublayer", "layer", "group")


@dataclasses.dataclass(frozen=True)
class Remat:
    """What the backward pass finds ready beside the history; it computes the rest again.

    policy: "none", all that the branches keep; "dots", the matrix products of the branches;
    "sublayer" or "layer", the carry in front of each; "group", that in front of `group` layers.
    Reads are computed again whatever the policy: what they keep would grow with the depth.
    """

    policy: str = "none"
    group: int = 1

    def __post_init__(self):
        if self.policy not in POLICIES:
            raise ValueError(f"policy is {self.policy!r}: choose from {', '.join(POLICIES)}")
        if self.group < 1:
            raise ValueError(f"group is {self.group}: give 1 or more layers")

    @property
    def keeps_branches(self) -> bool:
        return self.policy in ("none", "dots")


KEEP_ALL = Remat()


def recompute(branch: Callable, remat: Remat) -> Callable:
    """The branch, made so that its pullback keeps what the policy says, and on a mesh no input or
    matrix that was gathered, which would be a copy of it for every layer."""
    if remat.policy == "dots":
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return jax.checkpoint(branch, policy=policy)
    if remat.policy == "none" and gathers():
        return jax.checkpoint(branch, policy=not_gathered, prevent_cse=False)
    return branch


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Ready:
    """Stands in a kept pullback for a value that the backward pass has anyway."""

    index: int


def thin(pullbacks: Any, ready: Any) -> Any:
    """Pullbacks without those of their leaves that are leaves of `ready`."""
    places = {id(leaf): _Ready(index) for index, leaf in enumerate(jax.tree.leaves(ready))}
    return jax.tree.map(lambda leaf: places.get(id(leaf), leaf), pullbacks)


def full(pullbacks: Any, ready: Any) -> Any:
    """The inverse of `thin`."""
    leaves = jax.tree.leaves(ready)

    def fill(leaf):
        return leaves[leaf.index] if isinstance(leaf, _Ready) else leaf

    return jax.tree.map(fill, pullbacks, is_leaf=lambda leaf: isinstance(leaf, _Ready))

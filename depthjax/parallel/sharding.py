"""How a training state is divided over a mesh, by `depthjax.kernels.layout`."""

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from depthjax.kernels.layout import parameter_spec, residual_axes
from depthjax.kernels.over_mesh import BATCH_AXES, STAGE, TENSOR


def parameter_shardings(params: nnx.State, mesh: Mesh) -> dict[str, Any]:
    """Of a model's parameters, as a nested dict: by the `axes` that each one says it has, and for
    those of the residual connection by shape."""

    def of(path: tuple[str, ...], variable: nnx.Variable) -> NamedSharding:
        shape = variable.shape
        axes = variable.get_metadata().get("axes")
        if axes is None:
            own = shape if path[-2] == "final" else shape[1:]  # the first axis is the layers'
            axes = residual_axes(own)
        spec = parameter_spec(axes, shape, mesh.shape)
        stages = mesh.shape.get(STAGE, 1)
        if len(axes) < len(shape) and stages > 1 and shape[0] % stages == 0:
            spec = P(STAGE, *spec[1:])
        return NamedSharding(mesh, spec)

    flat = {path: of(path, variable) for path, variable in nnx.to_flat_state(params)}
    return nnx.traversals.unflatten_mapping(flat)


def like_parameters(shardings: dict[str, Any], state: Any, mesh: Mesh) -> Any:
    """Of an optimizer's state: its trees that have the parameters' form are divided as they are,
    all else is whole everywhere."""
    form = jax.tree.structure(shardings)

    def is_tree(x: Any) -> bool:
        return jax.tree.structure(x) == form

    whole = NamedSharding(mesh, P())
    return jax.tree.map(lambda x: shardings if is_tree(x) else whole, state, is_leaf=is_tree)


def row_sharding(mesh: Mesh, lead: int = 0) -> NamedSharding:
    """Of arrays [lead axes, B, ...], whose batch is divided."""
    rows = tuple(axis for axis in BATCH_AXES if axis in mesh.shape)
    return NamedSharding(mesh, P(*[None] * lead, rows))


def cache_sharding(mesh: Mesh, kv_heads: int) -> NamedSharding:
    """Of the keys and values [L, B, S, K, E] that decoding keeps: rows as a batch, and heads."""
    by_head = TENSOR if kv_heads % mesh.shape.get(TENSOR, 1) == 0 and TENSOR in mesh.shape else None
    return NamedSharding(mesh, P(*row_sharding(mesh, lead=1).spec, None, by_head))

"""One config on any mesh: how the devices are divided, and what lies where."""

from depthjax.parallel.mesh import AXES, batch_ways, make_mesh, mesh_sizes, mesh_text
from depthjax.parallel.sharding import (
    cache_sharding,
    like_parameters,
    parameter_shardings,
    row_sharding,
)
from depthjax.parallel.stages import over_stages

__all__ = [
    "AXES",
    "batch_ways",
    "cache_sharding",
    "like_parameters",
    "make_mesh",
    "mesh_sizes",
    "mesh_text",
    "over_stages",
    "parameter_shardings",
    "row_sharding",
]

"""What a model costs: by formula, and counted on the text of a compiled program."""

from depthjax.plan.auto_mesh import with_mesh
from depthjax.plan.chips import peak_flops
from depthjax.plan.flops import forward_flops_per_token, training_flops_per_token

__all__ = ["forward_flops_per_token", "peak_flops", "training_flops_per_token", "with_mesh"]

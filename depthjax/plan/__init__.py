"""What a model costs, by formula."""

from depthjax.plan.flops import forward_flops_per_token, peak_flops, training_flops_per_token

__all__ = ["forward_flops_per_token", "peak_flops", "training_flops_per_token"]

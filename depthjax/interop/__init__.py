"""Checkpoints of others, in and out."""

from depthjax.interop.depthbench import from_depthbench, to_depthbench

__all__ = ["from_depthbench", "to_depthbench"]

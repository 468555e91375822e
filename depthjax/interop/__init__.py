"""Checkpoints of others, in and out."""

from depthjax.interop.depthbench import from_depthbench

__all__ = ["from_depthbench"]

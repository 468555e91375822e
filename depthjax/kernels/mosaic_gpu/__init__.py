"""Depth kernels for NVIDIA GPUs from Hopper on (Mosaic GPU), over arrays, without gradients of
their own. A width that `fits` refuses goes to the XLA form."""

from depthjax.kernels.mosaic_gpu.warpgroup import fits

__all__ = ["fits"]

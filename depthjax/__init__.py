"""depthjax: residual connections that turn extra layers into useful depth, and what they cost.

The rooms, from the bottom up: `kernels` (arrays in, arrays out), `residuals` and `layers` (the two
halves of a block), `models`, `data`, `train`, `plan`, `interop`, and the command line in `cli`.
Nothing is imported here, so that `import depthjax.residuals` needs jax and flax alone.
"""

__version__ = "0.1.0"

"""Training: the step, its optimizer, checkpoints, metrics, and the loop that ties them together."""

from depthjax.train.loop import TrainingDiverged, train

__all__ = ["TrainingDiverged", "train"]

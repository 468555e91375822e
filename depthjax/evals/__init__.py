"""Evaluations: domain NLL and zero-shot choices, exactly as the DepthBench study scores them.

`read_rows(task)` gets the documents, `task.documents(rows)` says what is asked, `evaluate_task`
what a model makes of it; `choice_accuracy` does so with a layer left out. `log_likelihoods` is
beneath them all.
"""

from depthjax.evals.measure import (
    TaskResult,
    TaskSize,
    category_means,
    choice_accuracy,
    choice_measures,
    encode_documents,
    evaluate_task,
    task_size,
)
from depthjax.evals.pairs import Pair, encode_pairs
from depthjax.evals.score import Scores, log_likelihoods
from depthjax.evals.sources import read_rows
from depthjax.evals.tasks import TASKS, Document, Task, task_named

__all__ = [
    "TASKS",
    "Document",
    "Pair",
    "Scores",
    "Task",
    "TaskResult",
    "TaskSize",
    "category_means",
    "choice_accuracy",
    "choice_measures",
    "encode_documents",
    "encode_pairs",
    "evaluate_task",
    "log_likelihoods",
    "read_rows",
    "task_named",
    "task_size",
]

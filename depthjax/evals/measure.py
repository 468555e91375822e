"""Tasks as numbers: token-weighted NLL, accuracy over choices, and means of categories."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np

from depthjax.data.tokenizer import Tokenizer
from depthjax.evals.pairs import Pair, encode_pairs
from depthjax.evals.score import log_likelihoods
from depthjax.evals.tasks import TASKS, Document, Task
from depthjax.models import Transformer


@dataclasses.dataclass(frozen=True)
class TaskSize:
    """What a task's documents come to under a tokenizer."""

    task: str
    documents: int
    pairs: int
    target_tokens: int
    """Tokens of all completions."""
    longest: int
    """Tokens of the longest pair, context included."""
    over_context: int
    """Documents with a pair that is longer than the context."""


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """What a model makes of a task."""

    size: TaskSize
    measures: dict[str, float]
    """"nll" in nats a token of the completions; "acc", "acc_norm" as fractions."""


def task_size(
    task: Task, documents: Sequence[Document], pairs: Sequence[Pair], context: int
) -> TaskSize:
    """The `TaskSize` of documents whose pairs, in order, are encoded as `pairs`."""
    lengths = np.array([len(pair.ids) for pair in pairs])
    long = np.repeat(np.arange(len(documents)), [len(d.pairs) for d in documents])
    return TaskSize(
        task=task.name,
        documents=len(documents),
        pairs=len(pairs),
        target_tokens=sum(pair.targets for pair in pairs),
        longest=int(lengths.max()),
        over_context=len(np.unique(long[lengths > context])),
    )


def encode_documents(tokenizer: Tokenizer, documents: Iterable[Document]) -> list[Pair]:
    """The pairs of all documents, one document after the other."""
    return encode_pairs(tokenizer, [pair for document in documents for pair in document.pairs])


def evaluate_task(
    model: Transformer,
    task: Task,
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    *,
    context: int,
    skip: jax.Array | int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> TaskResult:
    """The measures of a task. Documents longer than `context`, the model's in training, are scored
    whole, as DepthBench does, and counted. skip: without this layer (all share one program)."""
    pairs = encode_documents(tokenizer, documents)
    size = task_size(task, documents, pairs, context)
    found = log_likelihoods(model, pairs, skip=skip, mesh=mesh, title=task.name)
    scores = found.log_likelihood
    if "nll" in task.measures:
        return TaskResult(size, {"nll": -scores.sum() / max(size.target_tokens, 1)})
    accuracies = choice_measures(documents, scores)
    return TaskResult(size, {name: accuracies[name] for name in task.measures})


def choice_measures(documents: Sequence[Document], scores: np.ndarray) -> dict[str, float]:
    """{"acc", "acc_norm"} of the log-likelihoods [N] of all pairs of all documents: how often the
    right choice has the highest one, as it is and divided by the choice's characters. The first of
    equals counts, as in lm-evaluation-harness."""
    ends = np.cumsum([len(document.pairs) for document in documents])
    right = {"acc": 0, "acc_norm": 0}
    for document, own in zip(documents, np.split(scores, ends[:-1]), strict=True):
        right["acc"] += int(np.argmax(own)) == document.gold
        sizes = np.array(document.sizes or np.ones(len(own)), float)
        with np.errstate(divide="ignore", invalid="ignore"):  # an empty choice, as there
            right["acc_norm"] += int(np.argmax(own / sizes)) == document.gold
    return {name: count / len(documents) for name, count in right.items()}


def choice_accuracy(
    model: Transformer,
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    skip: jax.Array | int | None = None,
    *,
    mesh: jax.sharding.Mesh | None = None,
) -> dict[str, float]:
    """{"acc", "acc_norm"} of a choice task; skip: without this layer (all share one program)."""
    pairs = encode_documents(tokenizer, documents)
    scores = log_likelihoods(model, pairs, skip=skip, mesh=mesh)
    return choice_measures(documents, scores.log_likelihood)


def category_means(results: Mapping[str, TaskResult]) -> dict[str, float]:
    """The plain mean of the NLLs of a category's tasks, where all of them were evaluated, as
    DepthBench reports them."""
    categories: dict[str, list[str]] = {}
    for task in TASKS.values():
        if task.category is not None:
            categories.setdefault(task.category, []).append(task.name)
    return {
        category: float(np.mean([results[name].measures["nll"] for name in names]))
        for category, names in categories.items()
        if all(name in results for name in names)
    }

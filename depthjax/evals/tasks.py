"""The evaluation tasks: where their documents come from, and what is asked of each.

Two kinds. *Domain NLL*: how well a model predicts the reference answer given its prompt, with the
prompts of DepthBench's evaluation code. *Choice*: which of a few continuations it finds likeliest,
zero shots, with the prompts of lm-evaluation-harness 0.4.12.

A row holds the columns that the dataset has on the Hugging Face hub. A row of a choice task may
hold what is asked instead, already made: {"query", "choices", "gold"}.
"""

import dataclasses
import hashlib
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from depthjax.errors import InputError, suggest

Row = Mapping[str, Any]


class Document(NamedTuple):
    """What is asked of a model: the log-likelihood of each completion behind its context."""

    pairs: tuple[tuple[str, str], ...]
    """(context, completion): one for a domain NLL, else one a choice."""
    gold: int = 0
    """Which pair is the right one."""
    sizes: tuple[int, ...] = ()
    """Characters of each choice, by which `acc_norm` divides."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One dataset and what is asked of its documents.

    dataset, subset, split: on the Hugging Face hub. ask: from a row to what is asked; KeyError
    where it lacks a column. measures: "nll", or "acc" and, where lm-evaluation-harness has it,
    "acc_norm". category: whose mean the task goes into.
    """

    name: str
    dataset: str
    subset: str | None
    split: str
    ask: Callable[[Row], Document]
    measures: tuple[str, ...] = ("nll",)
    category: str | None = None

    def documents(self, rows: Iterable[Row]) -> list[Document]:
        """What is asked in each row; InputError that says the row and what is wrong with it."""
        made = []
        for number, row in enumerate(rows, 1):
            try:
                document = self.ask(row)
                if not 0 <= document.gold < len(document.pairs):
                    raise ValueError(f"answer {document.gold} of {len(document.pairs)}")
                for part in (part for pair in document.pairs for part in pair):
                    if not isinstance(part, str):
                        raise TypeError(f"{part!r} where text belongs")
            except KeyError as error:
                raise InputError(
                    f"document {number} of {self.name} has no column {error.args[0]!r}: give the "
                    f"columns of {self.dataset}"
                ) from error
            except (TypeError, ValueError, AttributeError) as error:
                raise InputError(
                    f"document {number} of {self.name} is not as in {self.dataset} ({error}): give "
                    "its columns as they are there"
                ) from error
            made.append(document)
        return made


def _several(row: Row, name: str) -> Sequence[str]:
    """The texts of a column; TypeError for a single one, whose letters would be taken for them."""
    texts = row[name]
    if isinstance(texts, str):
        raise TypeError(f"{name} is {texts!r} where a list of texts belongs")
    return texts


def _completion(prompt: str, completion: str) -> Document:
    return Document(((prompt, completion),))


def _spaced(prompt: str, completion: str) -> Document:
    """With a space between the two, where neither brings one."""
    if completion and prompt and not prompt[-1].isspace() and not completion[0].isspace():
        completion = " " + completion
    return _completion(prompt, completion)


def _mbpp(row: Row) -> Document:
    tests = [*_several(row, "test_list"), "", "", ""][:3]
    task = f"You are an expert Python programmer, and here is your task: {row['text']}"
    lines = [f"{task} Your code should pass these tests:", "", *tests, "[BEGIN]", ""]
    code = row["code"]
    return _completion("\n".join(lines), code if code.endswith("\n") else code + "\n")


def _humaneval(row: Row) -> Document:
    return _completion(row["prompt"], row["canonical_solution"])


def _answer(question: str, answer: str) -> Document:
    return _spaced(f"Question: {question}\nAnswer:", answer)


def _sciq(row: Row) -> Document:
    return _answer(row["question"], f"{row['correct_answer']}\nExplanation: {row['support']}")


def _gsm8k(row: Row) -> Document:
    return _answer(row["question"], row["answer"])


def _math500(row: Row) -> Document:
    return _spaced(f"Problem:\n{row['problem']}\n\nSolution:", row.get("solution") or row["answer"])


def _gpqa(row: Row) -> Document:
    """The choices stand in an order that the document's id decides."""
    names = ("Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3)))
    right, *others = (str(row[name]).strip() for name in names)
    choices, question = [right, *others], str(row["Question"]).strip()
    identity = str(row.get("Record ID") or row["Question"])
    seed = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "big")
    random.Random(seed).shuffle(choices)
    listed = [f"{letter}. {choice}" for letter, choice in zip("ABCD", choices, strict=True)]
    explanation = str(row.get("Explanation") or "").strip()
    answer = f"{right}\nExplanation: {explanation}" if explanation else right
    return _answer("\n".join([question, "Choices:", *listed]), answer)


def _choose(context: str, choices: Sequence[str], gold: int) -> Document:
    pairs = tuple((context, f" {choice}") for choice in choices)
    return Document(pairs, int(gold), tuple(len(choice) for choice in choices))


def _made_or(ask: Callable[[Row], Document]) -> Callable[[Row], Document]:
    """`ask`, or for a row with a query what it says."""

    def choose(row: Row) -> Document:
        if "query" in row:
            return _choose(row["query"], _several(row, "choices"), row["gold"])
        return ask(row)

    return choose


def _labelled(context: str, row: Row) -> Document:
    """ARC and OpenBookQA: choices as {"text": [...], "label": [...]}, the answer as a label."""
    choices = row["choices"]
    gold = list(choices["label"]).index(row["answerKey"].lstrip())
    return _choose(context, _several(choices, "text"), gold)


def _arc(row: Row) -> Document:
    return _labelled(f"Question: {row['question']}\nAnswer:", row)


def _openbookqa(row: Row) -> Document:
    return _labelled(row["question_stem"], row)


def _hellaswag(row: Row) -> Document:
    def clean(text: str) -> str:  # the texts from WikiHow have headings in brackets
        text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
        return text.replace("  ", " ")

    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    endings = [clean(ending) for ending in _several(row, "endings")]
    return _choose(clean(context), endings, int(row["label"]))


def _piqa(row: Row) -> Document:
    query = f"Question: {row['goal']}\nAnswer:"
    return _choose(query, (row["sol1"], row["sol2"]), row["label"])


def _social_iqa(row: Row) -> Document:
    choices = [row[f"answer{letter}"] for letter in "ABC"]
    return _choose(f"Q: {row['context']} {row['question']}\nA:", choices, int(row["label"]) - 1)


def _winogrande(row: Row) -> Document:
    """The choice stands in the context, and what follows the gap is scored."""
    before, gap, after = row["sentence"].partition("_")
    if not gap:
        raise ValueError("its sentence has no gap _")
    pairs = tuple((before + row[f"option{i}"], " " + after.strip()) for i in (1, 2))
    return Document(pairs, int(row["answer"]) - 1)


_BOTH, _ACC = ("acc", "acc_norm"), ("acc",)
_SCIQ, _ARC = "allenai/sciq", "allenai/ai2_arc"
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("mbpp", "google-research-datasets/mbpp", "full", "test", _mbpp, category="coding"),
        Task("humaneval", "openai/openai_humaneval", None, "test", _humaneval, category="coding"),
        Task("sciq", _SCIQ, None, "test", _sciq, category="stem"),
        Task("sciq_validation", _SCIQ, None, "validation", _sciq),
        Task("gpqa_diamond", "Idavidrein/gpqa", "gpqa_diamond", "train", _gpqa, category="stem"),
        Task("gsm8k", "openai/gsm8k", "main", "test", _gsm8k, category="math"),
        Task("math500", "HuggingFaceH4/MATH-500", None, "test", _math500, category="math"),
        Task("arc_easy", _ARC, "ARC-Easy", "test", _made_or(_arc), _BOTH),
        Task("arc_challenge", _ARC, "ARC-Challenge", "test", _made_or(_arc), _BOTH),
        Task("openbookqa", "allenai/openbookqa", "main", "test", _made_or(_openbookqa), _BOTH),
        Task("hellaswag", "Rowan/hellaswag", None, "validation", _made_or(_hellaswag), _BOTH),
        Task("piqa", "baber/piqa", None, "validation", _made_or(_piqa), _BOTH),
        Task("social_iqa", "lighteval/siqa", None, "validation", _made_or(_social_iqa), _ACC),
        Task("winogrande", "allenai/winogrande", "winogrande_xl", "validation", _winogrande, _ACC),
    )
}
"""All tasks by name. `sciq_validation` is the split that can be had without the hub."""


def task_named(name: str) -> Task:
    """The task called `name`; InputError with the nearest name where there is none."""
    if name not in TASKS:
        raise InputError(f"task {name!r} is unknown: {suggest(name, TASKS)}")
    return TASKS[name]

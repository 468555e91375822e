"""(context, completion) as token ids, encoded as lm-evaluation-harness does."""

from collections.abc import Sequence
from typing import NamedTuple

from depthjax.data.tokenizer import Tokenizer


class Pair(NamedTuple):
    """Token ids of context and completion; those from `start` on are the completion's."""

    ids: list[int]
    start: int

    @property
    def targets(self) -> int:
        """Tokens of the completion."""
        return len(self.ids) - self.start


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> list[Pair]:
    """The pairs as ids, without special tokens around them.

    White space at the end of a context goes to the completion, the two are encoded as one text, and
    its ids are cut where the context alone ends. An empty context becomes the end of text, so that
    the first token of the completion has something before it.
    """
    contexts = [context.rstrip() for context, _ in pairs]
    starts = [len(ids) for ids in tokenizer.encode_plain(contexts)]
    wholes = tokenizer.encode_plain([context + completion for context, completion in pairs])
    return [
        Pair(ids, min(start, len(ids))) if start else _without_context(ids, tokenizer.eos_id)
        for ids, start in zip(wholes, starts, strict=True)
    ]


def _without_context(ids: list[int], eos_id: int) -> Pair:
    return Pair(ids if ids[:1] == [eos_id] else [eos_id, *ids], 1)

"""depthjax models in lm-evaluation-harness (the extra `lm-eval`).

import lm_eval
from depthjax.data import load_tokenizer
from depthjax.evals.harness import HarnessModel
from depthjax.train.source import trained_model

config, model = trained_model("runs/quickstart", print)
tokenizer = load_tokenizer(config.data.tokenizer)
lm_eval.simple_evaluate(HarnessModel(model, tokenizer, config.model.context), tasks=["piqa"])
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from depthjax.data.tokenizer import Tokenizer
from depthjax.evals.pairs import Pair
from depthjax.evals.score import log_likelihoods
from depthjax.infer import Sampling, stream
from depthjax.models import Transformer

_GENERATED_TOGETHER = 16


class HarnessModel(TemplateLM):
    """One model and its tokenizer as the harness wants them.

    context: tokens that a request may have; longer ones lose their beginning, as is usual there.
    mesh: devices that rows are divided over when log-likelihoods are asked for (None: one).
    """

    max_gen_toks = 256

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        context: int,
        mesh: jax.sharding.Mesh | None = None,
    ):
        super().__init__()
        self._model, self._tokenizer, self._mesh = model, tokenizer, mesh
        self.max_length = context

    @property
    def eot_token_id(self) -> int:
        """The token that ends texts, and stands before those without a context."""
        return self._tokenizer.eos_id

    @property
    def tokenizer_name(self) -> str:
        """By which the harness tells its caches apart."""
        return self._tokenizer.name

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """The ids of a text; special tokens are never added."""
        return self._tokenizer.encode_plain([string])[0]

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether it is greedy) of each (key, context, completion) in ids."""
        pairs = [self._pair(context, completion) for _, context, completion in requests]
        title = None if disable_tqdm else "log-likelihoods"
        scores = log_likelihoods(self._model, pairs, mesh=self._mesh, title=title)
        found = list(zip(scores.log_likelihood.tolist(), scores.greedy.tolist(), strict=True))
        for (key, *_), answer in zip(requests, found, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return found

    def _pair(self, context: list[int], completion: list[int]) -> Pair:
        """At most `context` tokens to predict from, and one more to predict."""
        ids = (context + completion)[-(self.max_length + 1) :]
        return Pair(ids, max(1, len(ids) - len(completion)))

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of each whole text, in windows of the context's length."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            (text,) = request.args
            pieces = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, 1
            )
            windows += [(None, *make_disjoint_window(piece)) for piece in pieces]
            owners += [number] * (len(windows) - len(owners))
        totals = [0.0] * len(requests)
        found = self._loglikelihood_tokens(windows, disable_tqdm)
        for owner, (score, _) in zip(owners, found, strict=True):
            totals[owner] += score
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text behind each context, up to the first of its stop strings."""
        alike = defaultdict(list)
        for number, request in enumerate(requests):
            alike[repr(sorted(request.args[1].items()))].append(number)
        texts = [""] * len(requests)
        for numbers in alike.values():
            numbers.sort(key=lambda i: -len(requests[i].args[0]))
            for start in range(0, len(numbers), _GENERATED_TOGETHER):
                some = numbers[start : start + _GENERATED_TOGETHER]
                contexts = [requests[i].args[0] for i in some]
                options = requests[some[0]].args[1]
                for i, text in zip(some, self._continued(contexts, options), strict=True):
                    texts[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return texts

    def _continued(self, contexts: Sequence[str], options: dict[str, Any]) -> list[str]:
        """The texts behind contexts that have the same options."""
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        steps = min(int(options.get("max_gen_toks", self.max_gen_toks)), self.max_length - 1)
        room = self.max_length - steps
        prompts = [(self.tok_encode(c) or [self.eot_token_id])[-room:] for c in contexts]
        rows: list[list[int]] = [[] for _ in prompts]
        texts: list[str | None] = [None] * len(prompts)
        for ids in stream(self._model, prompts, steps, _sampling(options)):
            for i, one in enumerate(ids.tolist()):
                if texts[i] is None:
                    rows[i].append(one)
                    texts[i] = self._ended(rows[i], stops)
            if None not in texts:
                break
        return [
            self._tokenizer.decode(row) if text is None else text
            for row, text in zip(rows, texts, strict=True)
        ]

    def _ended(self, ids: list[int], stops: list[str]) -> str | None:
        """The text, if these ids end it."""
        over = ids[-1] == self.eot_token_id
        text = self._tokenizer.decode(ids[:-1] if over else ids)
        cuts = [text.find(stop) for stop in stops if stop and stop in text]
        return text[: min(cuts)] if cuts else text if over else None


def _sampling(options: dict[str, Any]) -> Sampling:
    """Greedy unless sampling is asked for, as in the harness."""
    temperature = float(options.get("temperature") or 0.0)
    if not options.get("do_sample", temperature > 0):
        return Sampling(temperature=0.0)
    return Sampling(temperature or 1.0, options.get("top_k"), options.get("top_p"))

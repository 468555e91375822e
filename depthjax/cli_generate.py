"""The command `depthjax generate`: text continued by a trained model, as it comes."""

import functools
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from depthjax.errors import InputError, suggest

USAGE = """\
usage: depthjax generate RUN_DIR --prompt TEXT [options]

Continues TEXT with the newest checkpoint of a run, or with a model folder.

  --prompt TEXT       what the text begins with; may be empty
  --tokens N          at most so many tokens (default 100); the end of a text ends it earlier
  --temperature X     0 takes the likeliest token; higher is more varied (default 1)
  --top_k N           draw from the N likeliest tokens only
  --top_p P           draw from the fewest tokens that have a probability of P together
  --seed N            the same seed gives the same text (default 0)
  --tokenizer NAME    neox, bpe8k or a tokenizers JSON file (default: that of the config)
"""
_OPTIONS = (
    *("--prompt", "--tokens", "--temperature", "--top_k", "--top_p", "--seed", "--tokenizer"),
)
_DEFAULT_TOKENS = 100


def run(arguments: Sequence[str]) -> None:
    """Raises InputError for what cannot be right."""
    if "--help" in arguments or "-h" in arguments:
        print(USAGE, end="")
        return
    if not arguments or arguments[0].startswith("-"):
        raise InputError(
            "depthjax generate needs a run directory, such as runs/quickstart, or a model folder"
        )
    from depthjax.infer import Sampling, stream

    path, options = arguments[0], _options(arguments[1:])
    if options["--prompt"] is None:
        raise InputError('prompt is missing: give --prompt "text", which may be empty')
    number = functools.partial(_number, options)
    tokens, seed = number("tokens", int, None, least=1), number("seed", int, 0, least=0)
    sampling = Sampling(
        temperature=number("temperature", float, 1.0, least=0),
        top_k=number("top_k", int, None, least=1),
        top_p=number("top_p", float, None, least=0),
    )
    config, model, tokenizer = _load(path, options["--tokenizer"])
    prompt = tokenizer.encode(options["--prompt"]) or [tokenizer.eos_id]
    steps = _steps(tokens, len(prompt), config.model.context)
    ids = (int(row[0]) for row in stream(model, [prompt], steps, sampling, seed))
    print(options["--prompt"], end="", flush=True)
    ids = itertools.takewhile(lambda one: one != tokenizer.eos_id, ids)
    for piece in pieces(ids, tokenizer.decode):
        print(piece, end="", flush=True)
    print()


def _options(arguments: Sequence[str]) -> dict[str, str | None]:
    from depthjax.overrides import take

    rest, options = take(
        [re.sub("^--top-", "--top_", argument) for argument in arguments], _OPTIONS
    )
    for argument in rest:
        if argument.startswith("--"):
            name = argument.partition("=")[0]
            raise InputError(f"option {name} is unknown: {suggest(name, _OPTIONS)}")
        raise InputError(
            f"argument {argument!r} follows no option: put the text of --prompt in quotes"
        )
    return options


def _number(options: dict[str, str | None], name: str, kind: type, default: Any, least: int) -> Any:
    """The value of an option as a finite number of the kind, at least `least`."""
    text = options[f"--{name}"]
    if text is None:
        return default
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not least <= value < 2**31:
        words = "a whole number" if kind is int else "a number"
        raise InputError(f"{name} is {text!r}: give {words}, at least {least}")
    return value


def _load(path: str, tokenizer: str | None) -> tuple[Any, Any, Any]:
    """(config, model on one device, tokenizer)."""
    import jax

    from depthjax.data import load_tokenizer
    from depthjax.train.source import trained_model

    config, model = trained_model(path, lambda text: print(text, file=sys.stderr))
    name = config.data.tokenizer if tokenizer is None else tokenizer
    found = load_tokenizer(name)
    if found.vocab_size > model.vocab:
        raise InputError(
            f"tokenizer {name} has {found.vocab_size} ids, but the model has {model.vocab}: give "
            "--tokenizer the one that it was trained with"
        )
    return config, jax.device_put(model, jax.devices()[0]), found


def _steps(tokens: int | None, prompt: int, context: int) -> int:
    """How many tokens to generate: those asked for, or so many that the context holds."""
    room = context - prompt
    if room < 1 or (tokens or 1) > room:
        raise InputError(
            f"prompt has {prompt} tokens, and {tokens or 1} more do not fit the {context} that the "
            "model was trained on: give a shorter prompt, or fewer --tokens"
        )
    return tokens or min(_DEFAULT_TOKENS, room)


def pieces(ids: Iterable[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """What each token adds to the text; a character of several tokens comes with its last one."""
    known, shown = [], ""
    for one in ids:
        known.append(one)
        text = decode(known)
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
    yield decode(known)[len(shown) :]

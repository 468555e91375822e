"""The commands `depthjax data prepare | index | verify`."""

from collections.abc import Sequence
from typing import Annotated

import tyro
from rich.console import Console

from depthjax.data import load_tokenizer, open_shards, prepare, write_index
from depthjax.data.shards import TokenShards
from depthjax.errors import InputError
from depthjax.overrides import parse


def _prepare(
    inputs: Annotated[tuple[str, ...], tyro.conf.Positional],
    out: str,
    tokenizer: str = "neox",
    heldout_every: int = 10,
    heldout_files: str | None = None,
    shard_tokens: int = 100_000_000,
    text_key: str = "text",
) -> None:
    """Turn text into token shards. After an interruption the same command continues.

    Args:
        inputs: .txt, .jsonl[.gz|.xz|.zst] or .parquet files, folders of them, or hf:// URLs.
        out: Folder for the shards and their index.
        tokenizer: neox (50280 ids), bpe8k (8192 ids), or the path of a tokenizers JSON.
        heldout_every: Hold out one of every so many documents.
        heldout_files: Hold out the input files whose name matches this glob instead.
        shard_tokens: Tokens after which a shard is closed.
        text_key: The JSON key or Parquet column that holds the text.
    """
    if not all((*inputs, out)):
        raise InputError("an input or --out is empty: give a file, a folder or a URL")
    remote = [source for source in inputs if "://" in source]
    try:
        summary = prepare(
            inputs,
            out,
            tokenizer=tokenizer,
            heldout_every=heldout_every,
            heldout_files=heldout_files,
            shard_tokens=shard_tokens,
            text_key=text_key,
        )
    except InputError:
        raise
    except Exception as error:  # each file system and hub client has kinds of its own
        if not remote:
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"{remote[0]} cannot be read ({reason}): check address, network and access, and run "
            "the same command again to continue"
        ) from error
    Console(markup=False).print(
        f"{summary.directory}: {summary.documents:,} documents, {summary.train_tokens:,} training "
        f"and {summary.heldout_tokens:,} held-out tokens in {summary.shards} shards",
        soft_wrap=True,
    )


def _index(
    dir: Annotated[str, tyro.conf.Positional],
    tokenizer: str = "neox",
    heldout: str = "*013_00008*",
) -> None:
    """Add an index.json with checksums to token shards made elsewhere; the shards stay as they are.

    Args:
        dir: Folder of headerless uint16 .npy shards.
        tokenizer: What they were made with.
        heldout: Glob of the shards that are held out.
    """
    _describe(write_index(dir, load_tokenizer(tokenizer), heldout=heldout))


def _verify(dir: Annotated[str, tyro.conf.Positional]) -> None:
    """Check every shard against its size and checksum.

    Args:
        dir: Folder of token shards.
    """
    if not dir:
        raise InputError("the folder to verify is empty: give one with token shards")
    _describe(open_shards(dir))


def _describe(shards: TokenShards) -> None:
    Console(markup=False).print(
        f"{shards.directory}: {shards.train.tokens:,} training and "
        f"{shards.heldout.tokens:,} held-out tokens ({shards.tokenizer}), all as they should be",
        soft_wrap=True,
    )


COMMANDS = {"prepare": _prepare, "index": _index, "verify": _verify}


def run(command: str, arguments: Sequence[str]) -> None:
    """Runs one of COMMANDS; InputError names a wrong option."""
    prog = f"depthjax data {command}"
    function = COMMANDS[command]
    parse(lambda: tyro.cli(function, prog=prog, args=list(arguments), use_underscores=True))

"""The text of a run: its shards, and its global batches."""

import numpy as np

from depthjax.config import Config
from depthjax.data import default_corpus, global_batches, load_tokenizer, open_shards
from depthjax.data.shards import TokenShards
from depthjax.errors import InputError


def open_data(config: Config) -> tuple[TokenShards, int]:
    """The shards of a config and the size of its vocabulary; InputError where they do not fit."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    vocab = config.model.vocab or tokenizer.vocab_size
    shards = open_shards(
        default_corpus(config.data.tokenizer) if config.data.dir is None else config.data.dir,
        vocab_size=vocab,
        tokenizer_sha256=tokenizer.sha256,
        verify=config.data.verify,
        heldout=config.data.heldout,
    )
    context = config.model.context
    for split in (shards.train, shards.heldout):
        if not split.tokens:
            raise InputError(f"data.dir {shards.directory} has no tokens in its {split.name} split")
        split.windows(context)  # raises where no shard is as long as the context
    return shards, vocab


def training_batches(config: Config, shards: TokenShards, rows: np.ndarray):
    """The iterator of the given rows int32 [len(rows), T] of the global batches [B, T]."""
    return iter(
        global_batches(
            shards.train.windows(config.model.context),
            batch=config.train.batch,
            seed=config.data.seed,
            rows=rows,
        )
    )

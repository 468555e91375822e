"""Text to token shards to batches, each step a function of its own.

`prepare` writes shards, `open_shards` checks and opens them, and `global_batches` feeds a training
run; `default_corpus` needs no data at all.
"""

from depthjax.data.corpus import embedded_documents, find_sources, read_documents
from depthjax.data.files import cache_dir
from depthjax.data.pipeline import global_batches, heldout_documents, heldout_windows
from depthjax.data.prepare import default_corpus, prepare
from depthjax.data.shards import open_shards, write_index
from depthjax.data.tokenizer import load_tokenizer

__all__ = [
    "cache_dir",
    "default_corpus",
    "embedded_documents",
    "find_sources",
    "global_batches",
    "heldout_documents",
    "heldout_windows",
    "load_tokenizer",
    "open_shards",
    "prepare",
    "read_documents",
    "write_index",
]

"""Tokenizers: GPT-NeoX rebuilt from its merges, a small byte-level BPE, or a tokenizers JSON file.

`neox` is the tokenizer of DepthBench (50280 ids, end of text 50279, padding 1), known upstream as
`allenai_gpt-neox-olmo-dolma-v1_5`. `bpe8k` (8192 ids) is trained on the embedded corpus at first
use; a small model spends fewer of its parameters on rows of the embedding that no text uses.
"""

import hashlib
import json
import lzma
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import numpy as np

from depthjax.data.corpus import EMBEDDED_CORPUS, embedded_documents
from depthjax.data.files import cache_dir, write_atomically
from depthjax.errors import InputError

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"
BPE8K_IDS = 8192


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with the ids and the identity that token shards record.

    `sha256` is the digest of `canonical_json()`, so equal digests mean equal ids for every text.
    """

    name: str
    vocab_size: int
    eos_id: int
    pad_id: int
    sha256: str
    backend: object = field(repr=False, compare=False)  # a tokenizers.Tokenizer

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return int32 ids of each text, ending in `eos_id`; an empty text gives one `eos_id`.

        Special tokens spelled out in a text become their ids, and a text whose last id already is
        `eos_id` gets no second one.
        """
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=True)
        documents = []
        for encoding in encodings:
            ids = encoding.ids
            if not ids or ids[-1] != self.eos_id:
                ids.append(self.eos_id)
            documents.append(np.array(ids, np.int32))
        return documents

    def encode(self, text: str) -> list[int]:
        """Return the ids that a document which begins with `text` begins with."""
        ids = self.encode_documents([text])[0].tolist()
        return ids[:-1]

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text alone, without anything added before or behind it."""
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, special tokens included."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def canonical_json(self) -> str:
        """Return the tokenizer as compact JSON with sorted keys, which `tokenizers` can load."""
        return _canonical_json(self.backend)


def load_tokenizer(name_or_path: str | os.PathLike) -> Tokenizer:
    """Return the tokenizer "neox" or "bpe8k", or the one in a tokenizers JSON file.

    A file must define `<|endoftext|>`; its padding id is that of `<|padding|>`, or else the end of
    text. Its truncation and padding settings are switched off. Raises InputError for an unknown
    name, an unreadable file, or a file without `<|endoftext|>`.
    """
    if name_or_path == "neox":
        return _wrap("neox", _build_neox())
    if name_or_path == "bpe8k":
        return _wrap("bpe8k", _load_file(_cached_bpe8k()))
    path = Path(name_or_path)
    if not path.is_file():
        raise InputError(
            f"tokenizer {os.fspath(name_or_path)!r} is neither 'neox' nor 'bpe8k' nor the path of "
            "a tokenizers JSON file"
        )
    return _wrap(path.name, _load_file(path))


def _wrap(name: str, backend) -> Tokenizer:
    eos_id = backend.token_to_id(END_OF_TEXT)
    if eos_id is None:
        raise InputError(f"tokenizer {name} has no token {END_OF_TEXT}, which ends each document")
    pad_id = backend.token_to_id(PADDING)
    return Tokenizer(
        name=name,
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values()) + 1,
        eos_id=eos_id,
        pad_id=eos_id if pad_id is None else pad_id,
        sha256=hashlib.sha256(_canonical_json(backend).encode()).hexdigest(),
        backend=backend,
    )


def _canonical_json(backend) -> str:
    parts = json.loads(backend.to_str())
    return json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _load_file(path: Path):
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(os.fspath(path))
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"{path} is not a tokenizers JSON file: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _byte_symbols() -> dict[int, str]:
    """Return the printable character that stands for each byte in a byte-level BPE.

    Visible Latin-1 characters stand for themselves; the others take U+0100 onwards, in byte order.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return {byte: chr(byte if byte in visible else next(stand_ins)) for byte in range(256)}


def _build_neox():
    """Rebuild the GPT-NeoX tokenizer as AI2 renumbered it for OLMo and Dolma, setting for setting.

    Ids run: the IP address mask, padding, the symbols of the 243 bytes that UTF-8 can hold (sorted
    by symbol), one id a merge in merge order, runs of 24 down to 2 spaces, the email and telephone
    masks, end of text.
    """
    import tokenizers

    packed = (resources.files("depthjax") / "assets" / "gpt_neox_merges.txt.xz").read_bytes()
    merges = [line.split(" ") for line in lzma.decompress(packed).decode().split("\n")]
    absent = {0xC0, 0xC1, *range(0xF5, 0x100)}
    symbols = sorted(symbol for byte, symbol in _byte_symbols().items() if byte not in absent)
    first = ["|||IP_ADDRESS|||", PADDING]
    last = [" " * length for length in range(24, 1, -1)]
    last += ["|||EMAIL_ADDRESS|||", "|||PHONE_NUMBER|||", END_OF_TEXT]
    tokens = [*first, *symbols, *(left + right for left, right in merges), *last]
    ids = {token: i for i, token in enumerate(tokens)}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    description = {
        "version": "1.0",
        "added_tokens": [_added_token(ids[token], token) for token in first + last],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": ids, "merges": merges},
    }
    return tokenizers.Tokenizer.from_str(json.dumps(description))


def _added_token(token_id: int, token: str) -> dict:
    """Return the JSON of a token matched whole; the two control tokens match before NFC."""
    special = token in (PADDING, END_OF_TEXT)
    return {
        "id": token_id,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": not special,
        "special": special,
    }


def _cached_bpe8k() -> Path:
    """Return the file of the `bpe8k` tokenizer, training it if this cache has none.

    The name holds a digest of the corpus, so another corpus never meets a stale tokenizer.
    """
    corpus = (resources.files("depthjax") / "assets" / EMBEDDED_CORPUS).read_bytes()
    path = cache_dir() / f"bpe8k-{hashlib.sha256(corpus).hexdigest()[:12]}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, _canonical_json(_train_bpe(embedded_documents())).encode())
    return path


def _train_bpe(texts: Iterable[str]):
    """Train byte-level BPE on NFC text: end of text 0, padding 1, then bytes, then merges."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BPE8K_IDS,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend

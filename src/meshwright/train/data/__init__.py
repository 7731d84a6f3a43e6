"""Text to batches: tokenizers, the packed token store, mixtures, and batch = f(step).

pack -> TokenStore -> Mixture -> Loader; every step's batch is a pure function of its number.
"""

from meshwright.train.data.check import check_data
from meshwright.train.data.embedded import embedded_corpus, embedded_text
from meshwright.train.data.loader import Loader, held_out_loader, training_loader
from meshwright.train.data.mixture import Mixture
from meshwright.train.data.needle import NeedleRows, Needles, needle_rows, write_needles
from meshwright.train.data.packing import Packed, pack, upgrade
from meshwright.train.data.readers import Reading
from meshwright.train.data.rows import FIELDS, NO_TARGET, read_rows, row_count
from meshwright.train.data.store import TokenStore
from meshwright.train.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    decode_stream,
    load_tokenizer,
    tokenizer_from_json,
)

__all__ = [
    "FIELDS",
    "NO_TARGET",
    "ByteTokenizer",
    "Loader",
    "Mixture",
    "NeedleRows",
    "Needles",
    "Packed",
    "Reading",
    "TokenStore",
    "Tokenizer",
    "check_data",
    "decode_stream",
    "embedded_corpus",
    "embedded_text",
    "held_out_loader",
    "load_tokenizer",
    "needle_rows",
    "pack",
    "read_rows",
    "row_count",
    "tokenizer_from_json",
    "training_loader",
    "upgrade",
    "write_needles",
]

"""Text to batches: tokenizers, the packed token store, mixtures, and batch = f(step).

pack -> TokenStore -> Mixture -> Loader; the batch of a step is a pure function of the step.
"""

from typing import TYPE_CHECKING

from meshwright.lazy import import_when_used

if TYPE_CHECKING:
    from meshwright.data.chat_templates import ChatTemplate, load_chat_template, special_tokens
    from meshwright.data.check import check_data
    from meshwright.data.conversations import FORMATS
    from meshwright.data.display import page as documents_page
    from meshwright.data.display import shown_documents
    from meshwright.data.embedded import EMBEDDED, embedded_corpus, embedded_text
    from meshwright.data.examples import Encoding, LossOn, Weigh
    from meshwright.data.fields import Base64Dtype, Fields
    from meshwright.data.first_use import open_or_pack
    from meshwright.data.loader import (
        Loader,
        Objective,
        all_sequences_loader,
        held_out_loader,
        training_loader,
    )
    from meshwright.data.mixture import Mixture, with_sources
    from meshwright.data.objectives import (
        OBJECTIVES,
        EncoderDecoderObjective,
        PrefixLM,
        SpanCorruption,
        sentinel_top,
    )
    from meshwright.data.packing import Packed, pack, upgrade
    from meshwright.data.readers import Reading
    from meshwright.data.sequences import (
        FIELDS,
        NO_TARGET,
        WEIGHTS,
        read_sequences,
        sequence_count,
        sequence_table,
    )
    from meshwright.data.store import TokenStore, token_dtype
    from meshwright.data.text_stream import TextStream, added_text, decode_stream, last_character
    from meshwright.data.tokenizers import (
        REPLACEMENT,
        ByteTokenizer,
        Tokenizer,
        added_tokens,
        load_tokenizer,
        tokenizer_files,
        tokenizer_folder,
        tokenizer_from_json,
    )

__all__ = [
    "EMBEDDED", "FIELDS", "FORMATS", "NO_TARGET", "OBJECTIVES", "REPLACEMENT", "WEIGHTS",
    "Base64Dtype", "ByteTokenizer", "ChatTemplate", "EncoderDecoderObjective", "Encoding",
    "Fields", "Loader", "LossOn", "Mixture", "Objective", "Packed", "PrefixLM", "Reading",
    "SpanCorruption", "TextStream", "TokenStore", "Tokenizer", "Weigh", "added_text",
    "added_tokens", "all_sequences_loader", "check_data", "decode_stream", "documents_page",
    "embedded_corpus", "embedded_text", "held_out_loader", "last_character",
    "load_chat_template", "load_tokenizer", "open_or_pack", "pack", "read_sequences",
    "sentinel_top", "sequence_count", "sequence_table", "shown_documents", "special_tokens",
    "token_dtype", "tokenizer_files", "tokenizer_folder", "tokenizer_from_json",
    "training_loader", "upgrade", "with_sources",
]  # fmt: skip

import_when_used(__name__)

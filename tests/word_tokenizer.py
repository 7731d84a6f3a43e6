"""A tokenizer.json for tests."""

from collections.abc import Mapping, Sequence
from typing import Any


def word_tokenizer(
    vocab: Mapping[str, int], special: Sequence[str] = (), unknown: str = "a"
) -> dict[str, Any]:
    """Tokens are words between white space; those of no token are the unknown one."""
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "post_processor": None, "decoder": None, "pre_tokenizer": {"type": "Whitespace"},
        "added_tokens": [
            {"id": vocab[token], "content": token, "special": True, "single_word": False,
             "lstrip": False, "rstrip": False, "normalized": False}
            for token in special
        ],
        "model": {"type": "WordLevel", "vocab": dict(vocab), "unk_token": unknown},
    }  # fmt: skip

"""Pieces of examples, texts and tokens with loss weights, and their token ids."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.data.store import WEIGHT_DTYPE
from meshwright.data.tokenizers import Ids, Span, Tokenizer

Encoded = tuple[Ids, npt.NDArray[Any]]  # token ids, and their loss weights


@dataclass(frozen=True)
class TextPiece:
    """A text that is encoded by itself; tokens outside of the spans have no loss."""

    text: str
    spans: Sequence[tuple[Span, float]] = ()
    special_tokens: bool = False


@dataclass(frozen=True)
class TokenPiece:
    ids: Sequence[int]
    weight: float


Piece = TextPiece | TokenPiece


def encode_pieces(examples: Sequence[Sequence[Piece]], tokenizer: Tokenizer) -> list[Encoded]:
    """The token ids and weights of examples; their texts are encoded at once."""
    pieces = list(itertools.chain.from_iterable(examples))
    encoded: dict[int, Encoded] = {}
    for special_tokens in (False, True):
        texts = {
            id(piece): piece
            for piece in pieces
            if isinstance(piece, TextPiece) and piece.special_tokens == special_tokens
        }
        encoded |= zip(texts, _encode_texts([*texts.values()], tokenizer), strict=True)
    for piece in pieces:
        if isinstance(piece, TokenPiece):
            weights = np.full(len(piece.ids), piece.weight, WEIGHT_DTYPE)
            encoded[id(piece)] = np.array(piece.ids, np.int32), weights
    return [_joined([encoded[id(piece)] for piece in example]) for example in examples]


def _encode_texts(pieces: Sequence[TextPiece], tokenizer: Tokenizer) -> Iterator[Encoded]:
    if not pieces:
        return
    texts, special_tokens = [piece.text for piece in pieces], pieces[0].special_tokens
    spans = [[span for span, _ in piece.spans] for piece in pieces]
    found = tokenizer.encode_spans(texts, spans, special_tokens)
    for piece, (ids, slices) in zip(pieces, found, strict=True):
        if special_tokens and len(ids) and ids[-1] == tokenizer.end_of_document:
            ids = ids[:-1]  # which the example has at its end
        weights = np.zeros(len(ids), WEIGHT_DTYPE)
        for tokens, (_, weight) in zip(slices, piece.spans, strict=True):
            weights[tokens] = weight
        yield ids, weights


def _joined(parts: list[Encoded]) -> Encoded:
    ids = [np.empty(0, np.int32), *(ids for ids, _ in parts)]
    return np.concatenate(ids), np.concatenate([np.empty(0, WEIGHT_DTYPE), *(w for _, w in parts)])

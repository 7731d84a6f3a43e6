"""EasyLM's fields: a specification turns a record into tokens and a loss mask.

[question+context],answer     two keys joined, without loss; then one with loss
<|bos|>,[<|17|>],{tokens}     token ids; a key that holds base64-encoded ids
"""

import base64
import binascii
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from meshwright.data.pieces import Piece, TextPiece, TokenPiece
from meshwright.errors import MeshwrightError, did_you_mean

Base64Dtype = Literal["int32", "int64", "uint16", "uint32"]
_TOKEN = re.compile(r"<\|(?P<name>bos|eos|\d+)\|>")


@dataclass(frozen=True)
class Fields:
    """How a record becomes tokens, as the text processor of EasyLM does it."""

    spec: str = ""
    from_example: str = ""
    """Key of the record that holds its own specification."""
    separator: str = " "
    """Between the values of keys that are joined with +."""
    prepend_text: str = ""
    """Put before the first field, if that is text."""
    add_bos: bool = True
    """Begin with the BOS token, if the tokenizer has one; it has no loss."""
    add_eos: bool = True
    """End with the EOS token, which has loss."""
    base64_dtype: Base64Dtype = "int32"
    bos: int | None = None  # of the tokenizer

    def __post_init__(self) -> None:
        if bool(self.spec) == bool(self.from_example):
            raise MeshwrightError(
                "give the fields of a record, as in --fields '[prompt],answer', or the key that "
                "holds them: --fields-from-example KEY"
            )
        _parsed(self.spec)

    def pieces(self, record: Mapping[str, Any], end: int) -> list[Piece]:
        """The texts and tokens of a record, each with loss or without; `end` is the EOS token."""
        pieces: list[Piece] = []
        if self.add_bos and self.bos is not None:
            pieces.append(TokenPiece([self.bos], 0))
        spec = _text(record, self.from_example) if self.from_example else self.spec
        for number, (field, has_loss) in enumerate(_parsed(spec)):
            if token := _TOKEN.fullmatch(field):
                pieces.append(TokenPiece([self._token(token["name"], end)], has_loss))
            elif field.startswith("{") and field.endswith("}"):
                pieces.append(TokenPiece(self._base64(record, field[1:-1]), has_loss))
            else:
                values = [_text(record, key.strip()) for key in field.split("+")]
                text = self.prepend_text * (number == 0) + self.separator.join(values)
                pieces.append(TextPiece(text, [((0, len(text)), has_loss)]))
        if self.add_eos:
            pieces.append(TokenPiece([end], 1))
        return pieces

    def _token(self, name: str, end: int) -> int:
        if name == "eos":
            return end
        if name != "bos":
            return int(name)
        if self.bos is None:
            raise MeshwrightError("the fields name <|bos|>, which the tokenizer does not have")
        return self.bos

    def _base64(self, record: Mapping[str, Any], key: str) -> list[int]:
        try:
            data = base64.b64decode(value_of_key(record, key), validate=True)
            return np.frombuffer(data, self.base64_dtype).astype(np.int64).tolist()
        except (binascii.Error, ValueError, TypeError) as reason:
            if isinstance(reason, MeshwrightError):
                raise
            raise MeshwrightError(
                f"{key!r} does not hold base64-encoded {self.base64_dtype} tokens: {reason}"
            ) from None


def _parsed(spec: str) -> list[tuple[str, int]]:
    """Each field, and 1 if its tokens have loss.

    >>> _parsed("[q+p],a")
    [('q+p', 0), ('a', 1)]
    """
    fields = []
    for part in map(str.strip, spec.split(",")) if spec else ():
        bracketed = part.startswith("[") and part.endswith("]")
        field = part[1:-1].strip() if bracketed else part
        if not field or set("[]") & set(field):
            raise MeshwrightError(
                f"fields {spec!r}: {part!r} is not a field; write keys between commas, with "
                "brackets around each that has no loss: [question],[context],answer"
            )
        fields.append((field, int(not bracketed)))
    return fields


def _text(record: Mapping[str, Any], key: str) -> str:
    value = value_of_key(record, key)
    if isinstance(value, bool) or not isinstance(value, str | numbers.Number):
        raise MeshwrightError(f"field {key!r} is {type(value).__name__}, not text or a number")
    return str(value)


def value_of_key(record: Mapping[str, Any], key: str) -> Any:
    """What a record has under a key; an error if that is nothing."""
    if key in record and record[key] is None:
        raise MeshwrightError(f"has null as its {key!r}; give it a value, or leave the record out")
    if key not in record:
        raise MeshwrightError(f"has no {key!r}{did_you_mean(key, map(str, record))}")
    return record[key]

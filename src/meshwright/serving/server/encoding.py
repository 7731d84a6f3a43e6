"""Answers as JSON. Long lists are encoded in parts, between which other threads run."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

_ENTRIES = 64  # at once: the encoder lets no other thread run


def encoded(value: Any) -> bytes:
    """The JSON of a value. An iterator in it is a list, of whose entries only a few are kept.

    >>> encoded({"squares": (number**2 for number in range(3))})
    b'{"squares":[0,1,4]}'
    """
    return _ENCODER.encode(value)


def encoded_answer(
    head: Mapping[str, Any], choices: Iterable[Any], rest: Mapping[str, Any]
) -> list[bytes]:
    """Parts of the JSON of an answer: it may be too large to be copied at once.

    >>> b"".join(encoded_answer({"id": "a"}, [{}, {}], {"usage": 2}))
    b'{"id":"a","choices":[{},{}],"usage":2}'
    """
    parts = [encoded(head)[:-1], b',"choices":[']
    for choice in choices:
        parts += (encoded(choice), b",")
    parts[-1] = b"],"
    return [*parts, encoded(rest)[1:]]


def event(value: Any) -> bytes:
    """A value as a server-sent event."""
    return b"".join((b"data: ", encoded(value), b"\n\n"))


def _encoded_entries(entries: Any) -> list[msgspec.Raw]:
    if not isinstance(entries, Iterator):
        raise NotImplementedError(f"{type(entries).__name__} is no JSON")
    parts = []
    while part := list(itertools.islice(entries, _ENTRIES)):
        parts.append(msgspec.Raw(_ENCODER.encode(part)[1:-1]))
    return parts


_ENCODER = msgspec.json.Encoder(enc_hook=_encoded_entries)

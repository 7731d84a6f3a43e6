"""Needles in a haystack: rows of hay that hide `!kv` pairs and ask for them at the end, as `?kv`.

>>> rows = needle_sequences(Needles(needles=3), rows=1, seq=80)
>>> print(rows.text(0))
yg lzc yg yg lzc yg yg !qr yg lzc yg tek !dw lzc yg yg lzc !xn lzc ?qr ?dw ?xn
>>> [rows.text(0)[at] for at in rows.asked[0]], [rows.text(0)[at] for at in rows.told[0]]
(['r', 'w', 'n'], ['r', 'w', 'n'])

Hay is three words that come again and again, other words in every row. A needle is said once: who
predicts what follows `?r` must have looked at `!rx`, far back. A letter is of the hay, of keys or
of values, in each row another, so hay teaches what needles need (to look for what followed this
letter before) on every token, and a small model learns it in minutes.

Every row is a document of exactly `seq` tokens, so rows of training are these rows.
"""

import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshwright.arithmetic import check_seed, whole_number
from meshwright.data.packing import new_store
from meshwright.data.store import TokenStore
from meshwright.data.tokenizers import ByteTokenizer
from meshwright.errors import MeshwrightError
from meshwright.machines import check_host_memory
from meshwright.present import count

LETTERS = string.ascii_lowercase
STRAWS = 3  # words the hay is made of
SHORTEST_STRAW, LONGEST_STRAW = 2, 4
KEY_LETTERS = 10  # at most, so that at least four are left for values
_ROWS_AT_A_TIME = 256
_TRAINING, _FRESH = 0, 1


@dataclass(frozen=True)
class Needles:
    """How hard the rows are."""

    needles: int = 4
    """Pairs hidden in a row, each with a key of its own."""
    questions: int | None = None
    """How many of them are asked for, each once; by default all."""
    key_length: int = 1
    """Letters of a key; from two on, keys share letters."""
    value_length: int = 1
    """Letters of a value."""

    def __post_init__(self) -> None:
        for name in ("needles", "key_length", "value_length"):
            if whole_number(getattr(self, name), name) < 1:
                raise MeshwrightError(f"{name}={getattr(self, name)} must be at least 1")
        if self.needles > KEY_LETTERS**self.key_length:
            raise MeshwrightError(
                f"needles={self.needles} need a key each, and there are "
                f"{KEY_LETTERS**self.key_length} of key_length={self.key_length}; give a longer key"
            )
        if self.questions is not None and not 1 <= self.questions <= self.needles:
            raise MeshwrightError(
                f"questions={self.questions} of needles={self.needles}: each needle is asked for "
                f"once at most; give 1 to {self.needles}"
            )

    @property
    def asked(self) -> int:
        return self.needles if self.questions is None else self.questions

    @property
    def pair(self) -> int:
        """Characters of a needle or a question, with the space after it."""
        return self.key_length + self.value_length + 2

    @property
    def shortest(self) -> int:
        """Tokens of the shortest row: a straw for each needle, and the end of document."""
        straws = self.needles * (LONGEST_STRAW + 1)
        return (self.needles + self.asked) * self.pair + straws + 1

    def check_room(self, seq: int) -> None:
        """A MeshwrightError if a row of `seq` tokens cannot hold them with hay between."""
        if seq < self.shortest:
            raise MeshwrightError(
                f"seq={seq} is too short for {count(self.needles, 'needle')} and "
                f"{count(self.asked, 'question')} of {self.pair} characters each, with hay "
                f"between; {self.shortest} or more would do, or fewer needles"
            )


@dataclass(frozen=True, eq=False)
class NeedleSequences:
    """Rows, and where in each the answers stand."""

    tokens: npt.NDArray[np.int32]  # [rows, seq]; the last of a row ends the document
    asked: npt.NDArray[np.int32]  # [rows, questions]: the first character of an answer
    told: npt.NDArray[np.int32]  # [rows, questions]: of the same value in the hay
    value_length: int

    @property
    def places(self) -> npt.NDArray[np.int32]:
        """Every character of every answer, [rows, questions, value_length]."""
        within: npt.NDArray[np.int32] = np.arange(self.value_length, dtype=np.int32)
        return self.asked[:, :, None] + within

    @property
    def answers(self) -> npt.NDArray[np.int32]:
        """What stands there."""
        rows = np.arange(len(self.tokens))[:, None, None]
        return self.tokens[rows, self.places]

    def text(self, row: int) -> str:
        return ByteTokenizer().decode(self.tokens[row]).rstrip()


def needle_sequences(
    needles: Needles, rows: int, seq: int, seed: int = 0, *, first: int = 0, fresh: bool = False
) -> NeedleSequences:
    """Rows `first`, `first + 1` …: each depends on the seed and its number alone.

    `fresh` rows are never those that training has seen with the same or another seed.
    """
    needles.check_room(seq)
    for name, number in (("rows", rows), ("first", first)):
        whole_number(number, name)
    check_seed(seed)
    if not rows:
        raise MeshwrightError("rows=0 asks for nothing; give 1 or more")
    check_host_memory(4 * rows * seq, f"rows={rows} of seq={seq}", "ask for fewer rows")
    tokens = np.full((rows, seq), ByteTokenizer.end_of_document, np.int32)
    asked, told = (np.zeros((rows, needles.asked), np.int32) for _ in range(2))
    for row in range(rows):
        random = np.random.default_rng([_FRESH if fresh else _TRAINING, seed, first + row])
        text, asked[row], told[row] = _row(needles, seq - 1, random)
        tokens[row, :-1] = np.frombuffer(text.encode(), np.uint8)
    return NeedleSequences(tokens, asked, told, needles.value_length)


def write_needles(
    needles: Needles, out: str | Path, rows: int, seq: int, seed: int = 0, overwrite: bool = False
) -> TokenStore:
    """The rows as a token store, for `meshwright train --data out --seq seq`."""
    needle_sequences(needles, min(rows, 1), seq, seed)  # a mistake shows before anything is written
    about = {"path": f"needles, seed {seed}", "documents": rows, "seq": seq}
    with new_store(out, ByteTokenizer(), overwrite=overwrite) as store:
        for texts in _texts(needles, rows, seq, seed):
            store.add(texts)
        store.finish({"sources": [about], "empty": 0, "bad": 0})
    return TokenStore.open(out)


def _texts(needles: Needles, rows: int, seq: int, seed: int) -> Iterator[list[str]]:
    for first in range(0, rows, _ROWS_AT_A_TIME):
        some = needle_sequences(needles, min(_ROWS_AT_A_TIME, rows - first), seq, seed, first=first)
        yield [bytes(row[:-1].astype(np.uint8)).decode() for row in some.tokens]


def _row(
    needles: Needles, length: int, random: np.random.Generator
) -> tuple[str, list[int], list[int]]:
    """One row of `length` characters, where its answers stand and where they are told."""
    straws, keys, values = _words(needles, random)
    chosen = random.permutation(needles.needles)[: needles.asked]
    questions = [f"?{keys[i]}{values[i]} " for i in chosen]
    hay = _hay(straws, length - (needles.needles + needles.asked) * needles.pair, random)
    # each needle after another straw
    after = np.sort(random.choice(len(hay), needles.needles, replace=False)) + 1
    ends = np.cumsum([len(straw) for straw in hay])
    parts: list[str] = []
    told: list[int] = []
    before = 0
    for number, (key, value, straw) in enumerate(zip(keys, values, after.tolist(), strict=True)):
        parts += [*hay[before:straw], f"!{key}{value} "]
        told.append(int(ends[straw - 1]) + number * needles.pair + 1 + needles.key_length)
        before = straw
    start = length - needles.asked * needles.pair + 1 + needles.key_length
    asked = [start + number * needles.pair for number in range(needles.asked)]
    return "".join(parts + hay[before:] + questions), asked, [told[i] for i in chosen]


def _words(needles: Needles, random: np.random.Generator) -> tuple[list[str], list[str], list[str]]:
    """The straws, keys and values of a row; no two of the three share a letter."""
    letters = [str(letter) for letter in random.permutation(list(LETTERS))]

    def take(number: int) -> list[str]:
        taken, letters[:number] = letters[:number], []
        return taken

    lengths = random.integers(SHORTEST_STRAW, LONGEST_STRAW + 1, STRAWS).tolist()
    straws = ["".join(take(length)) + " " for length in lengths]
    of_keys = 4  # or as many as keys of this length need
    while of_keys**needles.key_length < needles.needles:
        of_keys += 1
    key_letters = take(of_keys)
    numbers = _distinct(of_keys**needles.key_length, needles.needles, random)
    keys = [
        "".join(key_letters[n // of_keys**place % of_keys] for place in range(needles.key_length))
        for n in numbers
    ]
    values = ["".join(random.choice(letters, needles.value_length)) for _ in keys]
    return straws, keys, values


def _distinct(below: int, number: int, random: np.random.Generator) -> list[int]:
    drawn: dict[int, None] = {}  # in the order they were drawn
    while len(drawn) < number:
        drawn[int(random.integers(min(below, 2**62)))] = None
    return list(drawn)


def _hay(straws: list[str], length: int, random: np.random.Generator) -> list[str]:
    """Straws in any order, `length` characters together; the first may be cut."""
    drawn = random.integers(STRAWS, size=length // (SHORTEST_STRAW + 1) + 1)
    ends = np.cumsum([len(straws[straw]) for straw in drawn])
    hay = [straws[straw] for straw in drawn[: np.searchsorted(ends, length) + 1]]
    over = sum(map(len, hay)) - length
    while over >= len(hay[0]):
        over -= len(hay.pop(0))
    return [hay[0][over:], *hay[1:]]

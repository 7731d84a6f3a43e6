"""Needle in a haystack: filler text hides `!key value` pairs and asks for them at the end.

>>> made = needle_sequences(Needles(needles=3), sequences=1, seq=80)
>>> print(made.text(0))
yg lzc yg yg lzc yg yg !qr yg lzc yg tek !dw lzc yg yg lzc !xn lzc ?qr ?dw ?xn
>>> [made.text(0)[at] for at in made.asked[0]], [made.text(0)[at] for at in made.told[0]]
(['r', 'w', 'n'], ['r', 'w', 'n'])

The hay (filler text) repeats three words, which differ from sequence to sequence. A needle occurs
once: to predict the value after `?q`, a model must attend to `!qr`, far back. Within a sequence, a
letter belongs to the hay, to keys or to values. So the hay teaches induction (copy what followed
this letter before) on every token, and a small model learns the task in minutes.

Every sequence is one document of exactly `seq` tokens, so training reads exactly these sequences.
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
STRAWS = 3  # distinct words in the hay of a sequence
SHORTEST_STRAW, LONGEST_STRAW = 2, 4
KEY_LETTERS = 10  # at most, so that at least four letters are left for values
_SEQUENCES_AT_A_TIME = 256
_TRAINING, _FRESH = 0, 1


@dataclass(frozen=True)
class Needles:
    """Settings of the task: how many needles and questions, and how long keys and values are."""

    needles: int = 4
    """Key-value pairs hidden in each sequence; keys are distinct."""
    questions: int | None = None
    """Pairs asked for at the end of a sequence, each once; all of them by default."""
    key_length: int = 1
    """Letters in a key; keys of two or more letters share letters."""
    value_length: int = 1
    """Letters in a value."""

    def __post_init__(self) -> None:
        for name in ("needles", "key_length", "value_length"):
            if whole_number(getattr(self, name), name) < 1:
                raise MeshwrightError(f"{name}={getattr(self, name)} must be at least 1")
        if self.needles > KEY_LETTERS**self.key_length:
            raise MeshwrightError(
                f"needles={self.needles} need distinct keys, and there are only "
                f"{KEY_LETTERS**self.key_length} of key_length={self.key_length}; give a longer key"
            )
        if self.questions is not None and not 1 <= self.questions <= self.needles:
            raise MeshwrightError(
                f"questions={self.questions} with needles={self.needles}: each needle is asked for "
                f"at most once; give 1 to {self.needles}"
            )

    @property
    def asked(self) -> int:
        return self.needles if self.questions is None else self.questions

    @property
    def pair(self) -> int:
        """Characters in a needle or a question, including the space after it."""
        return self.key_length + self.value_length + 2

    @property
    def shortest(self) -> int:
        """The shortest possible sequence: a word of hay per needle, and the end of document."""
        straws = self.needles * (LONGEST_STRAW + 1)
        return (self.needles + self.asked) * self.pair + straws + 1

    def check_room(self, seq: int) -> None:
        """Raise a MeshwrightError if `seq` tokens cannot hold the needles with hay between them."""
        if seq < self.shortest:
            raise MeshwrightError(
                f"seq={seq} is too short for {count(self.needles, 'needle')} and "
                f"{count(self.asked, 'question')} of {self.pair} characters each, with hay between "
                f"them; use seq={self.shortest} or more, or fewer needles"
            )


@dataclass(frozen=True, eq=False)
class NeedleSequences:
    """Sequences, with the position of every answer and of its needle."""

    tokens: npt.NDArray[np.int32]  # [sequences, seq]; the last token ends the document
    asked: npt.NDArray[np.int32]  # [sequences, questions]: position of an answer's first character
    told: npt.NDArray[np.int32]  # [sequences, questions]: position of that value in the hay
    value_length: int

    @property
    def positions(self) -> npt.NDArray[np.int32]:
        """Positions of all characters of all answers, [sequences, questions, value_length]."""
        within: npt.NDArray[np.int32] = np.arange(self.value_length, dtype=np.int32)
        return self.asked[:, :, None] + within

    @property
    def answers(self) -> npt.NDArray[np.int32]:
        """The tokens at those positions: the expected answers."""
        index = np.arange(len(self.tokens))[:, None, None]
        return self.tokens[index, self.positions]

    def text(self, index: int) -> str:
        return ByteTokenizer().decode(self.tokens[index]).rstrip()


def needle_sequences(
    needles: Needles,
    sequences: int,
    seq: int,
    seed: int = 0,
    *,
    first: int = 0,
    fresh: bool = False,
) -> NeedleSequences:
    """Sequences `first`, `first + 1` …; each depends only on the seed and its index.

    `fresh` sequences differ from every training sequence, whatever the seed.
    """
    needles.check_room(seq)
    for name, number in (("sequences", sequences), ("first", first)):
        whole_number(number, name)
    check_seed(seed)
    if not sequences:
        raise MeshwrightError("sequences=0 leaves nothing to ask; give 1 or more")
    check_host_memory(
        4 * sequences * seq, f"sequences={sequences} of seq={seq}", "use fewer sequences"
    )
    tokens = np.full((sequences, seq), ByteTokenizer.end_of_document, np.int32)
    asked, told = (np.zeros((sequences, needles.asked), np.int32) for _ in range(2))
    for index in range(sequences):
        random = np.random.default_rng([_FRESH if fresh else _TRAINING, seed, first + index])
        text, asked[index], told[index] = _sequence(needles, seq - 1, random)
        tokens[index, :-1] = np.frombuffer(text.encode(), np.uint8)
    return NeedleSequences(tokens, asked, told, needles.value_length)


def write_needles(
    needles: Needles,
    out: str | Path,
    sequences: int,
    seq: int,
    seed: int = 0,
    overwrite: bool = False,
) -> TokenStore:
    """Write the sequences as a token store, for `meshwright train --data out --seq seq`."""
    needle_sequences(needles, min(sequences, 1), seq, seed)  # fail before anything is written
    about = {"path": f"needles, seed {seed}", "documents": sequences, "seq": seq}
    with new_store(out, ByteTokenizer(), overwrite=overwrite) as store:
        for texts in _texts(needles, sequences, seq, seed):
            store.add(texts)
        store.finish({"sources": [about], "empty": 0, "bad": 0})
    return TokenStore.open(out)


def _texts(needles: Needles, sequences: int, seq: int, seed: int) -> Iterator[list[str]]:
    for first in range(0, sequences, _SEQUENCES_AT_A_TIME):
        number = min(_SEQUENCES_AT_A_TIME, sequences - first)
        made = needle_sequences(needles, number, seq, seed, first=first)
        yield [bytes(tokens[:-1].astype(np.uint8)).decode() for tokens in made.tokens]


def _sequence(
    needles: Needles, length: int, random: np.random.Generator
) -> tuple[str, list[int], list[int]]:
    """One sequence of `length` characters, the positions of its answers and of their needles."""
    straws, keys, values = _words(needles, random)
    chosen = random.permutation(needles.needles)[: needles.asked]
    questions = [f"?{keys[i]}{values[i]} " for i in chosen]
    hay = _hay(straws, length - (needles.needles + needles.asked) * needles.pair, random)
    # no two needles follow the same word of hay
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
    """The words of hay, keys and values of a sequence; no two of the three share a letter."""
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
        "".join(key_letters[n // of_keys**digit % of_keys] for digit in range(needles.key_length))
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
    """Words of hay in random order, `length` characters in total; the first may be cut."""
    drawn = random.integers(STRAWS, size=length // (SHORTEST_STRAW + 1) + 1)
    ends = np.cumsum([len(straws[straw]) for straw in drawn])
    hay = [straws[straw] for straw in drawn[: np.searchsorted(ends, length) + 1]]
    over = sum(map(len, hay)) - length
    while over >= len(hay[0]):
        over -= len(hay.pop(0))
    return [hay[0][over:], *hay[1:]]

"""What an engine's programs are compiled for, and the host's arrays that they take.

Everything a program needs from the host is one array of integers: each transfer takes time.
"""

import dataclasses
import math
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


class Widths(NamedTuple):
    """Numbers of a sequence in the inputs of a step."""

    pages: int
    encoder_pages: int  # of what an encoder read for it
    adapter: int = 0  # 1 if it may have an adapter


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a step is compiled for."""

    decode: int
    chunks: int = 0
    length: int = 0  # tokens of a chunk
    first: bool = True  # every chunk starts at position 0
    scored: bool = False  # log-probabilities of the chunks' tokens are returned

    @property
    def places(self) -> int:
        """Sequences that may get a new token."""
        return self.decode + self.chunks

    def __str__(self) -> str:
        text = f"decode {self.decode}"
        if not self.chunks:
            return text
        kind = "score" if self.scored else "prefill"
        return f"{text} + {kind} {self.chunks} x {self.length}{'' if self.first else ' continued'}"


@dataclasses.dataclass(frozen=True)
class PromptShape:
    """What a program for whole prompts is compiled for."""

    prompts: int
    length: int  # tokens of each

    def __str__(self) -> str:
        return f"whole prompts {self.prompts} x {self.length}"


class HostArrays:
    """Arrays of the host that are views of one array."""

    @staticmethod
    def shapes(shape: Any, widths: Widths) -> dict[str, tuple[int, ...]]:
        """Of each field, in the order that they have in the array."""
        raise NotImplementedError

    @classmethod
    def empty(cls, shape: Any, widths: Widths) -> tuple[Self, Ints]:
        """Zeros to be filled, and the one array that they are views of."""
        sizes = (math.prod(each) for each in cls.shapes(shape, widths).values())
        flat = np.zeros(sum(sizes), np.int32)
        return cls.unpack(flat, shape, widths), flat

    @classmethod
    def unpack(cls, flat: Any, shape: Any, widths: Widths) -> Self:
        views, start = {}, 0
        for name, dims in cls.shapes(shape, widths).items():
            size = math.prod(dims)
            views[name] = flat[start : start + size].reshape(dims)
            start += size
        return cls(**views)


@dataclasses.dataclass(frozen=True)
class StepInputs(HostArrays):
    """The host's arrays for a step."""

    next_slots: Any  # [decode + chunks]: where the token goes that follows each
    slots: Any  # [decode]: where the last token of the sequence is
    tokens: Any  # [decode]: -1 takes the last token of the slot
    positions: Any  # [decode]
    tables: Any  # [decode, width]
    chunk_tokens: Any  # [chunks, length]
    chunk_targets: Any  # [chunks, length]: the tokens after these, where they are scored
    chunk_tables: Any  # [chunks, width]
    starts: Any  # [chunks]
    counts: Any  # [chunks]
    encoder_tables: Any  # [decode, encoder width]
    encoder_lengths: Any  # [decode]; as those of chunks, empty for a model without an encoder
    chunk_encoder_tables: Any
    chunk_encoder_lengths: Any
    adapters: Any  # [decode]: slot of the adapter, 0 for none; empty without adapters
    chunk_adapters: Any

    @staticmethod
    def shapes(shape: Shape, widths: Widths) -> dict[str, tuple[int, ...]]:
        decode, chunks, length = shape.decode, shape.chunks, shape.length
        width, encoder, adapter = widths
        return {
            "next_slots": (shape.places,),
            "slots": (decode,),
            "tokens": (decode,),
            "positions": (decode,),
            "tables": (decode, width),
            "chunk_tokens": (chunks, length),
            "chunk_targets": (chunks, length if shape.scored else 0),
            "chunk_tables": (chunks, width),
            "starts": (chunks,),
            "counts": (chunks,),
            "encoder_tables": (decode, encoder),
            "encoder_lengths": (decode if encoder else 0,),
            "chunk_encoder_tables": (chunks, encoder),
            "chunk_encoder_lengths": (chunks if encoder else 0,),
            "adapters": (decode * adapter,),
            "chunk_adapters": (chunks * adapter,),
        }


@dataclasses.dataclass(frozen=True)
class PromptInputs(HostArrays):
    """The host's arrays for a program that takes whole prompts."""

    tokens: Any  # [prompts, length]
    lengths: Any  # [prompts]
    tables: Any  # [prompts, width]
    adapters: Any  # [prompts]: slot of the adapter, 0 for none; empty without adapters

    @staticmethod
    def shapes(shape: PromptShape, widths: Widths) -> dict[str, tuple[int, ...]]:
        prompts = shape.prompts
        return {
            "tokens": (prompts, shape.length),
            "lengths": (prompts,),
            "tables": (prompts, widths.pages),
            "adapters": (prompts * widths.adapter,),
        }

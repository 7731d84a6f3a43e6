"""Plans and results of steps as bytes: JSON, and the arrays behind it. Nothing is unpickled."""

import dataclasses
import json
import struct
from typing import Any

import numpy as np

from meshwright.serving.executor import Results, Sizes, StepPlan
from meshwright.serving.program_inputs import PromptShape, Shape, Widths
from meshwright.serving.sampler import SamplingBatch, SlotState
from meshwright.serving.sampling import Sampling

_SIZE = struct.Struct("<I")
_ARRAY = "array"  # the one key of what stands for an array


def pack(value: Any) -> bytes:
    """
    >>> unpack(pack({"step": 3, "tokens": np.array([5, 9], np.int32)}))
    {'step': 3, 'tokens': array([5, 9], dtype=int32)}
    """
    arrays: list[bytes] = []

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays.append(value.tobytes())
            return {_ARRAY: [value.dtype.str, *value.shape]}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return value.item()  # of NumPy

    head = json.dumps(value, default=plain, separators=(",", ":")).encode()
    return b"".join((_SIZE.pack(len(head)), head, *arrays))


def unpack(data: bytes) -> Any:
    (size,) = _SIZE.unpack_from(data)
    end = _SIZE.size + size

    def restored(fields: dict[str, Any]) -> Any:
        nonlocal end
        if _ARRAY not in fields:
            return fields
        dtype, *shape = fields[_ARRAY]
        array = np.frombuffer(data, dtype, int(np.prod(shape, dtype=np.int64)), end).reshape(shape)
        end += array.nbytes
        return array

    return json.loads(data[_SIZE.size : end], object_hook=restored)


def plan_of(data: Any) -> StepPlan:
    """The plan whose first three fields were packed."""
    prompts, tokens, choice = data
    if prompts is not None:
        prompts = PromptShape(**prompts[0]), prompts[1]
    if tokens is not None:
        tokens = Shape(**tokens[0]), tokens[1]
    if choice is not None:
        where, variant, new_slots, masked = choice
        choice = SamplingBatch(where, variant, [_held(*each) for each in new_slots], masked)
    return StepPlan(prompts, tokens, choice)


def _held(slot: int, sampling: dict[str, Any], prompt: list[int], output: list[int]) -> SlotState:
    bias = tuple((token, value) for token, value in sampling.pop("logit_bias"))
    return SlotState(slot, Sampling(**sampling, logit_bias=bias), prompt, output)


def results_of(data: Any) -> Results:
    return Results(*data)


def sizes_of(data: Any) -> Sizes:
    widths, prompt_shapes, *rest = data
    return Sizes(Widths(*widths), [PromptShape(**shape) for shape in prompt_shapes], *rest)

"""Programs that take whole prompts, outside of the steps: an encoder, or a prefill split over sp.

They write keys into pages and give no logits. An encoder sees all of a prompt, so a prompt is not
cut into chunks. A prefill with context parallelism takes all tokens of a long prompt but the last,
which a step computes. A few shapes are compiled, and prompts are padded to them.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from meshwright.arithmetic import round_up
from meshwright.errors import MeshwrightError
from meshwright.models import Compute, encodes_prompts, serving_of
from meshwright.ops.attention import fill_pages
from meshwright.serving.settings import EngineConfig

_SHORTEST = 64  # tokens of the smallest default shape


@dataclasses.dataclass(frozen=True)
class PromptShape:
    """What a program is compiled for."""

    prompts: int
    length: int  # tokens of each

    def __str__(self) -> str:
        return f"whole prompts {self.prompts} x {self.length}"


@dataclasses.dataclass(frozen=True)
class PromptInputs:
    """The host's arrays for a program, which are views of one array (`empty`)."""

    tokens: Any  # [prompts, length]
    lengths: Any  # [prompts]
    tables: Any  # [prompts, width]
    adapters: Any  # [prompts]: slot of the adapter, 0 for none; empty without adapters

    @classmethod
    def empty(cls, shape: PromptShape, widths: Any) -> "tuple[PromptInputs, Any]":
        """Zeros to be filled, and the one array that they are views of; `widths` as of steps."""
        numbers = shape.length + 1 + widths.pages + widths.adapter
        flat = np.zeros(shape.prompts * numbers, np.int32)
        return cls.unpack(flat, shape, widths), flat

    @classmethod
    def unpack(cls, flat: Any, shape: PromptShape, widths: Any) -> "PromptInputs":
        n, width = shape.prompts, widths.pages
        ends = n * shape.length, n * (shape.length + 1), n * (shape.length + 1 + width)
        return cls(
            flat[: ends[0]].reshape(n, shape.length),
            flat[ends[0] : ends[1]],
            flat[ends[1] : ends[2]].reshape(n, width),
            flat[ends[2] :],
        )


def prompt_shapes(
    config: EngineConfig, model_config: Any, mesh_shape: Any, max_length: int
) -> tuple[PromptShape, ...]:
    """The shapes of the programs, shortest first; none if a model needs no such program.

    An encoder takes any prompt. Without one, prompts longer than a chunk are taken on meshes with
    sp, one at a time.
    """
    encoder = encodes_prompts(model_config)
    if not encoder and mesh_shape.get("sp", 1) == 1:
        return ()
    # context parallelism: two parts per device, of a length that all axes but tp split
    parts = 1 if encoder else 2 * mesh_shape.get("sp", 1) * mesh_shape.get("fsdp", 1)
    longest = round_up(max_length, parts)
    if config.prompt_shapes:
        shapes = sorted(config.prompt_shapes, key=lambda shape: shape[1])
        if any(length % parts for _, length in shapes):
            need = f"lengths must be multiples of {parts}, which the mesh splits them into"
            raise MeshwrightError(f"prompt_shapes={config.prompt_shapes}: {need}")
        if encoder and shapes[-1][1] < max_length:
            need = f"the longest must be at least max_length={max_length}: prompts are not cut"
            raise MeshwrightError(f"prompt_shapes={config.prompt_shapes}: {need}")
        return tuple(PromptShape(*shape) for shape in shapes)
    length = round_up(_SHORTEST if encoder else 2 * longest_chunk(config), parts)
    lengths = []
    while length < longest:
        lengths.append(length)
        length *= 2
    if encoder or longest > longest_chunk(config) + 1:
        lengths.append(longest)
    most = config.max_batch if encoder else 1
    return tuple(
        PromptShape(min(max(config.chunk // length, 1), most), length) for length in lengths
    )


def longest_chunk(config: EngineConfig) -> int:
    return max(length for _, length in config.chunks)


def fill_with_prompts(
    weights: Any, pools: Any, inputs: PromptInputs, model_config: Any, compute: Compute, kernel: str
) -> Any:
    """The pools with the keys and values of prompts."""
    prompt_keys = serving_of(model_config).prompt_keys
    kept = prompt_keys(weights, inputs.tokens, inputs.lengths, model_config, compute)
    by_head = P(None, None, compute.layouts.kv_heads.partitions[2], None)

    def filled(pool: Any, keys: tuple[jax.Array, jax.Array]) -> Any:
        k, v = (reshard(x, by_head) for x in keys)
        return fill_pages(pool, k, v, inputs.tables, inputs.lengths, kernel)

    return [filled(pool, keys) for pool, keys in zip(pools, kept, strict=True)]

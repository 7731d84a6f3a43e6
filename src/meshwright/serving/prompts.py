"""Programs that take whole prompts, outside of the steps: an encoder, or a prefill split over sp.

They write keys into pages and give no logits. An encoder sees all of a prompt, so a prompt is not
cut into chunks. A prefill with context parallelism takes all tokens of a long prompt but the last,
which a step computes. A few shapes are compiled, and prompts are padded to them.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from meshwright.arithmetic import round_up
from meshwright.errors import MeshwrightError
from meshwright.models import Compute, encodes_prompts, serving_of
from meshwright.ops.attention import fill_pages
from meshwright.serving.program_inputs import PromptInputs, PromptShape
from meshwright.serving.settings import EngineConfig

_SHORTEST = 64  # tokens of the smallest default shape


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
    length = round_up(_SHORTEST if encoder else 2 * config.longest_chunk, parts)
    lengths = []
    while length < longest:
        lengths.append(length)
        length *= 2
    if encoder or longest > config.longest_chunk + 1:
        lengths.append(longest)
    most = config.max_batch if encoder else 1
    return tuple(
        PromptShape(min(max(config.chunk // length, 1), most), length) for length in lengths
    )


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

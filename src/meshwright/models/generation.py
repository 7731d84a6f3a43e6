"""Prefill and decode by the forward pass of any family, with the logits of the next tokens.

logits, state = prefill(params, prompts, lengths, config, room)
logits, state = decode(params, state, tokens, config)
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from meshwright.models.blocks import Params
from meshwright.models.compute import Compute
from meshwright.models.loss import lm_logits
from meshwright.models.registry import family_of, generation_of
from meshwright.ops import spec_of, split_axes


def prefill(
    params: Params, prompts: jax.Array, lengths: jax.Array, config: Any, room: int
) -> tuple[jax.Array, Any]:
    """Prompts [batch, length], padded after their lengths [batch], through the model.

    Returns the logits [batch, vocab] of the first new tokens, and a state for `room` tokens.
    """
    batch, state, compute = generation_of(config).start(params, prompts, lengths, config, room)
    hidden, state = family_of(config).forward(params, batch, config, compute, state)
    return _next_logits(params, hidden, config, lengths - 1), state


def decode(params: Params, state: Any, tokens: jax.Array, config: Any) -> tuple[jax.Array, Any]:
    """The next token [batch] of each sequence: logits [batch, vocab] of those after, the state."""
    compute = generation_of(config).compute(params)
    batch = {"tokens": tokens[:, None]}
    hidden, state = family_of(config).forward(params, batch, config, compute, state)
    return _next_logits(params, hidden, config), state


def batch_multiple(config: Any, mesh_shape: Mapping[str, int]) -> int:
    """A batch must be a multiple of this: the number of devices that split it."""
    axes = split_axes(generation_of(config).rules().layout("batch").axes)
    return math.prod(mesh_shape.get(axis, 1) for axis in axes)


def _next_logits(
    params: Params, hidden: jax.Array, config: Any, at: jax.Array | None = None
) -> jax.Array:
    """Logits [batch, vocab] in float32, each sequence on one device; `at`: indices [batch]."""
    compute: Compute = generation_of(config).compute(params)
    layouts = compute.layouts
    hidden = reshard(hidden, layouts.residual)
    if at is not None and hidden.shape[1] > 1:
        hidden = _take(hidden, reshard(at, P(layouts.residual.partitions[0])))
    logits = lm_logits(hidden, family_of(config).lm_head(params, config), config.vocab, compute)
    return reshard(logits, P(*layouts.logits.partitions[:2], None))[:, 0]


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """[batch, length, embed] at one index of each sequence: [batch, 1, embed]."""
    spec, indices = spec_of(x), spec_of(index)
    return jax.shard_map(
        lambda x, index: jnp.take_along_axis(x, index[:, None, None], axis=1),
        in_specs=(spec, indices),
        out_specs=spec,
    )(x, index)

"""The vocabulary in memory: padded where the mesh does not divide it.

A token more than a power of two must not rule out tensor parallelism. The added entries of the
embedding and the LM head are zeros and stay zeros; their logits are masked.
"""

import math
from collections.abc import Mapping
from typing import Any

from meshwright.arithmetic import round_up
from meshwright.layouts import Rules


def padded_vocab(config: Any, rules: Rules, mesh_shape: Mapping[str, int]) -> int:
    """The least multiple, from the model's vocabulary, of the devices that split it."""
    return round_up(config.vocab, math.prod(_splitting(rules, mesh_shape).values()))


def describe_padding(config: Any, rules: Rules, mesh_shape: Mapping[str, int]) -> str | None:
    """`vocab 257 padded to 258 for tp=2`; None where nothing is padded."""
    padded = padded_vocab(config, rules, mesh_shape)
    if padded == config.vocab:
        return None
    over = " · ".join(f"{axis}={size}" for axis, size in _splitting(rules, mesh_shape).items())
    return f"vocab {config.vocab} padded to {padded} for {over}"


def _splitting(rules: Rules, mesh_shape: Mapping[str, int]) -> dict[str, int]:
    """The mesh axes of the vocabulary, of the arrays that have it and of logits."""
    axes = (*rules.layout("vocab embed").axes[0], *rules.layout("vocab").axes[0])
    return {axis: mesh_shape[axis] for axis in axes if mesh_shape.get(axis, 1) > 1}

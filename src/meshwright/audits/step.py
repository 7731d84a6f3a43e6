"""The expected collectives of the built-in train step, from its layouts.

Weights are sharded over fsdp and sp: all-gathered before use over the axes that split the tokens;
gradients are reduce-scattered, and all-reduced over the rest of those axes (dp). tp all-reduces the
partial sums of heads and mlp, or all-gathers and reduce-scatters along the sequence. Experts that
ep splits are not all-gathered over it: tokens are exchanged.
"""

import math
from typing import Any

import jax

from meshwright.audits.collective import Collective, Phase
from meshwright.models import activation_layouts, choose_exchange, family_of
from meshwright.ops import nontrivial_axes, split_axes


def expected_of_step(step: Any) -> tuple[Collective, ...]:
    """Expected collectives of an AbstractStep, on a mesh of the standard axes.

    Custom rules are compared with what the standard rules send.
    """
    family, axes = family_of(step.model), step.mesh.axis_names
    rules = family.rules(
        sp=True, sequence_parallel=step.config.compute.sequence_parallel, ep="ep" in axes
    )
    nontrivial = nontrivial_axes(step.mesh.shape)
    layouts = activation_layouts(rules, nontrivial)
    order = list(step.mesh.axis_names)
    kept = tuple(axis for axis in rules.layout("embed").axes[0] if axis in nontrivial)
    tokens = layouts.token_axes
    found: list[Collective] = []

    def expect(
        operation: str, axes: Any, what: str, phase: Phase | None = None, at_most: int | None = None
    ) -> None:
        names = tuple(sorted(set(axes), key=order.index))
        if names:
            found.append(Collective(operation, names, phase=phase, what=what, bytes=at_most))

    expect("all-gather", kept, "weights")
    expect("reduce-scatter", kept, "gradients of weights")
    # the sum over micro-batches may be reduced after its loop, which has no phase
    rest = [axis for axis in tokens if axis not in kept]
    expect("all-reduce", rest, "gradients of weights")
    # vectors of all layers, in float32; a matrix must be reduce-scattered over these axes
    vectors = [spec for spec in jax.tree.leaves(step.unquantized) if not spec.is_matrix]
    most = 4 * max(spec.size for spec in vectors)
    between_blocks = split_axes(layouts.residual.partitions[:2])
    expect("all-reduce", between_blocks, "gradients of norms", at_most=most)
    if any({"heads", "kv_heads"} & set(spec.dims) for spec in vectors):
        expect("all-reduce", tokens, "gradients of biases", at_most=most)
    if any(spec.dims == ("layers", "head_dim") for spec in vectors):
        heads = split_axes(layouts.heads.partitions)
        expect("all-reduce", heads, "gradients of the norms of heads", at_most=most)
    inside = layouts.axes(layouts.heads)
    between = set(inside) & set(split_axes(layouts.residual.partitions[1:2]))
    if between:
        expect("all-gather", inside, "input of a block")
        expect("reduce-scatter", inside, "output of a block")
    if not between or step.config.compute.mlp_chunk:
        expect("all-reduce", inside, "output of a block, gradient of its input")
    # per token: maximum, sum of exp, and the target's logit, reduced over the vocabulary
    parts = math.prod(step.mesh.shape[axis] for axis in tokens)
    of_tokens = 4 * step.config.batch * step.config.seq // parts
    expect("all-reduce", inside, "sums of the loss over the vocabulary", at_most=of_tokens)
    length = split_axes(layouts.tokens.partitions[1:])
    if step.config.objective == "dpo":
        most = of_tokens * math.prod(step.mesh.shape[axis] for axis in length)
        expect("all-reduce", length, "sums over answers", "forward", at_most=most)
    blocks = [block for stack in family.work(step.model) for block in stack.blocks]
    for experts in (block.experts for block in blocks if block.experts):
        split = tuple(axis for axis in rules.layout("experts").axes[0] if axis in nontrivial)
        embed = [axis for axis in kept if axis not in split]
        expect("all-gather", embed, "expert weights, router")
        expect("reduce-scatter", embed, "gradients of expert weights")
        _expect_exchange(step, split, experts.per_token, expect)
        if between:
            expect("all-reduce", inside, "gradient of the router", "backward")
    _expect_sequence(step, length, expect)
    _expect_optimizer(step, (*kept, *inside), expect)
    return tuple(found)


def _expect_exchange(step: Any, split: tuple[str, ...], per_token: int, expect: Any) -> None:
    """Tokens to experts that these axes split, and back; and the router, whose outputs they are."""
    if not split:
        return
    expect("all-gather", split, "router")
    expect("reduce-scatter", split, "gradient of the router")
    ways = math.prod(step.mesh.shape[axis] for axis in split)
    if choose_exchange(step.compute.experts, ways, per_token) == "ring":
        expect("all-gather", split, "tokens for the experts")
        expect("reduce-scatter", split, "sums of the experts")
    else:
        expect("all-to-all", split, "tokens to experts and back")


def _expect_sequence(step: Any, length: tuple[str, ...], expect: Any) -> None:
    """Attention with context parallelism over the axes `length`."""
    if not length:
        return
    strategy = step.compute.context_parallel
    if strategy == "auto":
        strategy = (step.attention or "ring").split()[0]
    if strategy != "ulysses":  # which keeps text order
        # DPO also reorders log-probabilities, whose gradients are sent in the backward pass
        phase = None if step.config.objective == "dpo" else "forward"
        expect("collective-permute", length, "order of tokens", phase)
    if strategy == "ring":
        expect("collective-permute", length, "keys and values")
    elif strategy == "allgather":
        expect("all-gather", length, "keys and values")
        expect("reduce-scatter", length, "gradients of keys and values")
    else:
        expect("all-to-all", length, "heads for length")


def _expect_optimizer(step: Any, splits: tuple[str, ...], expect: Any) -> None:
    """Collectives of optimizers that use full matrices, or sums of their rows and columns."""
    name = step.config.optimizer.name
    if name == "muon":
        expect("all-to-all", splits, "whole layers", "optimizer")
    if name == "adafactor":
        for axis in splits:
            expect("all-reduce", (axis,), "sums of rows and columns", "optimizer")
        expect("all-reduce", splits, "sums of rows and columns", "optimizer")

"""The mlp of experts for the few tokens of a decode step, on NVIDIA GPUs, by Triton.

Such a step takes as long as its weights are read. So no token is sorted or copied: each expert that
any token chose is read once, multiplied with all tokens, and its part of those that did not choose
it is multiplied with zero. Two kernels: gate, up and their activation; down, summed over experts.
A third chooses the experts: in XLA that takes six, of which each lasts as long as all of it.
"""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.ops.attention.paged_triton import unavailable as no_triton
from meshwright.ops.collectives import current_platform, untyped

MOST_TOKENS = 128  # more take longer to multiply than to read
_FEWEST = 16  # tokens that a tensor core's matmul takes
_BLOCK = 64  # of the dims of matrices, which have a multiple of it
_STAGES = 4  # blocks that are being read

Activate = Callable[[jax.Array, jax.Array | None], jax.Array]
"""`up` and `gate`, if there is one, to what the down projection multiplies."""


def unavailable(tokens: int, dtype: Any, *dims: int) -> str | None:
    """Why these kernels cannot be used for so many tokens and matrices of `dims`, or None."""
    if current_platform() not in ("gpu", "cuda"):
        return "it runs on NVIDIA GPUs"
    if tokens > MOST_TOKENS:
        return f"it is for at most {MOST_TOKENS} tokens, these are {tokens}"
    if jnp.dtype(dtype).itemsize != 2:
        return f"it is for 16 bits, not {jnp.dtype(dtype).name}"
    if any(dim % _BLOCK for dim in dims):
        return f"it needs matrices of multiples of {_BLOCK}, these are {dims}"
    return no_triton()


def top_experts(
    logits: jax.Array,
    bias: jax.Array | None,
    per_token: int,
    *,
    softmax: bool,
    normalized: bool,
    scale: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The experts with the highest scores, and these [tokens, per_token], of logits in float32.

    The scores of all are a softmax of the logits, or each its sigmoid. With a bias [experts] they
    are ranked by their sum with it.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    tokens, experts = logits.shape
    of_token = pl.BlockSpec((None, _padded(experts)), lambda t: (t, 0))
    out = pl.BlockSpec((None, _padded(per_token)), lambda t: (t, 0))
    biases = [] if bias is None else [bias.astype(jnp.float32)]

    def kernel(logit_ref: Any, *refs: Any) -> None:
        *bias_ref, chosen_ref, weight_ref = refs
        numbers, columns = jnp.arange(_padded(experts)), jnp.arange(_padded(per_token))
        inside = numbers < experts
        logit = triton.load(logit_ref.at[...], mask=inside, other=-jnp.inf)
        if softmax:
            scores = jnp.exp(logit - jnp.max(logit, axis=0))
            scores = scores / jnp.sum(scores, axis=0)
        else:
            scores = jax.nn.sigmoid(logit)
        ranked = scores
        if bias_ref:
            ranked += triton.load(bias_ref[0].at[...], mask=inside, other=0.0)
        ranked = jnp.where(inside, ranked, -jnp.inf)
        chosen, weights = jnp.zeros_like(columns), jnp.zeros(columns.shape, jnp.float32)
        for place in range(per_token):
            best = jnp.min(jnp.where(ranked == jnp.max(ranked, axis=0), numbers, experts), axis=0)
            score = jnp.sum(jnp.where(numbers == best, scores, 0.0), axis=0)
            ranked = jnp.where(numbers == best, -jnp.inf, ranked)
            chosen = jnp.where(columns == place, best, chosen)
            weights = jnp.where(columns == place, score, weights)
        if normalized:
            weights = weights / (jnp.sum(weights, axis=0) + 1e-20)
        kept = columns < per_token
        triton.store(chosen_ref.at[...], chosen, mask=kept)
        triton.store(weight_ref.at[...], weights * scale, mask=kept)

    def run(logits: jax.Array, *biases: jax.Array) -> Any:
        shape = tokens, per_token
        return pl.pallas_call(
            kernel,
            grid=(tokens,),
            in_specs=[
                of_token,
                *(pl.BlockSpec((_padded(experts),), lambda t: (0,)) for _ in biases),
            ],
            out_specs=[out, out],
            out_shape=[
                jax.ShapeDtypeStruct(shape, jnp.int32),
                jax.ShapeDtypeStruct(shape, jnp.float32),
            ],
            compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
            interpret=interpret,
            name="top_experts",
        )(logits, *biases)

    with warnings.catch_warnings():  # that this backend will be removed
        warnings.simplefilter("ignore", DeprecationWarning)
        chosen, weights = untyped(run, logits, *biases)
    return chosen, weights


def few_tokens_mlp(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    arrays: Mapping[str, jax.Array],
    activate: Activate,
    interpret: bool = False,
) -> jax.Array:
    """What experts add to tokens x [tokens, embed], in float32.

    Arguments:
        chosen: [tokens, k], the experts of a token. Numbers below 0, and from the count of experts
            on, are of none.
        weights: [tokens, k], what the results of these experts are multiplied with.
        arrays: `up` and `gate`, if there is one, [experts, embed, mlp], their biases [experts, mlp]
            as `up_bias` and `gate_bias`, `down` [experts, mlp, embed] and perhaps `down_bias`.
    """

    def run(
        x: jax.Array, choice: tuple[jax.Array, ...], arrays: Mapping[str, jax.Array]
    ) -> jax.Array:
        hidden = _hidden(x, choice, arrays, activate, interpret)
        return _down(hidden, choice[0], arrays["down"], x.shape[0], interpret)

    count = arrays["down"].shape[0]
    with warnings.catch_warnings():  # that this backend will be removed
        warnings.simplefilter("ignore", DeprecationWarning)
        choice = _read(chosen, count), chosen, weights
        total: jax.Array = jnp.sum(untyped(run, x, choice, dict(arrays)), axis=0)
    if "down_bias" in arrays:
        of_experts = jnp.sum(jnp.where(_is_chosen(chosen, count), weights[None], 0), axis=-1)
        bias = arrays["down_bias"].astype(jnp.float32)
        total += jnp.matmul(of_experts.T, bias, precision=lax.Precision.HIGHEST)
    return total


def _is_chosen(chosen: jax.Array, count: int) -> jax.Array:
    """[experts, tokens, k]."""
    return chosen[None] == lax.broadcasted_iota(jnp.int32, (count, *chosen.shape), 0)


def _read(chosen: jax.Array, count: int) -> jax.Array:
    """The experts that are read, each once, and -1 for the other programs."""
    if chosen.size > count:
        is_read = jnp.any(_is_chosen(chosen, count), axis=(1, 2))
        return jnp.where(is_read, lax.iota(jnp.int32, count), -1)
    flat = chosen.reshape(-1)
    own = jnp.where((flat < 0) | (flat >= count), -1, flat)
    if chosen.shape[0] == 1:
        return own
    places = lax.iota(jnp.int32, flat.size)
    before = places[None] < places[:, None]
    again = jnp.any((flat[None] == flat[:, None]) & before, axis=1)
    return jnp.where(again, -1, own)


def _padded(count: int, least: int = 1) -> int:
    """Triton's arrays have powers of two."""
    return max(least, 1 << (count - 1).bit_length())


def _block(dim: int, tokens: int) -> int:
    """How much of a dim of matrices a program writes."""
    return 2 * _BLOCK if tokens > _FEWEST and dim % (2 * _BLOCK) == 0 else _BLOCK


def _hidden(
    x: jax.Array,
    choice: tuple[jax.Array, ...],
    arrays: Mapping[str, jax.Array],
    activate: Activate,
    interpret: bool,
) -> jax.Array:
    """[experts, tokens, mlp], activated and multiplied; of no expert, nothing."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    experts, chosen, _ = choice
    names = [name for name in ("gate", "up") if name in arrays]
    biases = [f"{name}_bias" for name in names if f"{name}_bias" in arrays]
    count, embed, mlp = arrays["up"].shape
    tokens, per_token = chosen.shape
    height = _padded(tokens, _FEWEST)
    width = _block(mlp, height)
    deep = 2 * _BLOCK if height == _FEWEST and embed % (2 * _BLOCK) == 0 else _BLOCK
    of_choice = pl.BlockSpec((height, _padded(per_token)), lambda s, n: (0, 0))
    return pl.pallas_call(
        functools.partial(_hidden_kernel, names, chosen.shape, deep, activate),
        grid=(experts.size, mlp // width),
        in_specs=[
            pl.BlockSpec((height, embed), lambda s, n: (0, 0)),
            pl.BlockSpec((None,), lambda s, n: (s,)),
            of_choice,
            of_choice,
            *(pl.BlockSpec((count, embed, width), lambda s, n: (0, 0, n)) for _ in names),
            *(pl.BlockSpec((count, width), lambda s, n: (0, n)) for _ in biases),
        ],
        out_specs=pl.BlockSpec((None, height, width), lambda s, n: (s, 0, n)),
        out_shape=jax.ShapeDtypeStruct((experts.size, height, mlp), x.dtype),
        compiler_params=triton.CompilerParams(
            num_warps=8 if height > 32 else 4, num_stages=_STAGES
        ),
        interpret=interpret,
        name="experts_hidden",
    )(x, *choice, *(arrays[name] for name in (*names, *biases)))


def _hidden_kernel(
    names: list[str], shape: tuple[int, ...], deep: int, activate: Activate, *refs: Any
) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    x_ref, expert_ref, chosen_ref, weight_ref, *of_arrays, out_ref = refs
    matrices, biases = of_arrays[: len(names)], of_arrays[len(names) :]
    expert = expert_ref[()]

    @pl.when(expert >= 0)
    def _() -> None:
        places, columns = (jnp.arange(size) for size in chosen_ref.shape)
        is_token = (places < shape[0])[:, None]
        inside = is_token & (columns < shape[1])[None]
        chosen = triton.load(chosen_ref.at[...], mask=inside, other=-1)
        weights = triton.load(weight_ref.at[...], mask=inside, other=0)
        weight = jnp.sum(jnp.where(chosen == expert, weights, 0.0), axis=1)
        of_tokens = jnp.broadcast_to(is_token, (places.size, deep))

        def block(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            here = pl.ds(index * deep, deep)
            x = triton.load(x_ref.at[:, here], mask=of_tokens, other=0)
            return tuple(
                total + triton.dot(x, matrix[expert, here, :])
                for total, matrix in zip(sums, matrices, strict=True)
            )

        zeros = jnp.zeros(out_ref.shape, jnp.float32)
        sums = lax.fori_loop(0, x_ref.shape[1] // deep, block, (zeros,) * len(names))
        if biases:
            sums = tuple(
                total + bias[expert, :].astype(jnp.float32)[None]
                for total, bias in zip(sums, biases, strict=True)
            )
        parts = dict(zip(names, sums, strict=True))
        activated = activate(parts["up"], parts.get("gate"))
        out_ref[...] = (activated * weight[:, None]).astype(out_ref.dtype)


def _down(
    hidden: jax.Array, experts: jax.Array, down: jax.Array, tokens: int, interpret: bool
) -> jax.Array:
    """[parts, tokens, embed] in float32: sums over the experts of each part."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    count, mlp, embed = down.shape
    height = hidden.shape[1]
    width = _block(embed, height)
    parts = min(experts.size, 16 if height <= 32 else 8)
    return pl.pallas_call(
        functools.partial(_down_kernel, tokens, parts),
        grid=(parts, embed // width),
        in_specs=[
            pl.BlockSpec(hidden.shape, lambda s, n: (0, 0, 0)),
            pl.BlockSpec(experts.shape, lambda s, n: (0,)),
            pl.BlockSpec((count, mlp, width), lambda s, n: (0, 0, n)),
        ],
        out_specs=pl.BlockSpec((None, height, width), lambda s, n: (s, 0, n)),
        out_shape=jax.ShapeDtypeStruct((parts, tokens, embed), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=_STAGES),
        interpret=interpret,
        name="experts_down",
    )(hidden, experts, down)


def _down_kernel(tokens: int, parts: int, *refs: Any) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    hidden_ref, expert_ref, down_ref, out_ref = refs
    blocks = down_ref.shape[1] // _BLOCK
    first = pl.program_id(0)

    def of_expert(index: jax.Array, total: jax.Array) -> jax.Array:
        place = first + index * parts
        expert = expert_ref[place]

        def block(index: jax.Array, total: jax.Array) -> jax.Array:
            here = pl.ds(index * _BLOCK, _BLOCK)
            return total + triton.dot(hidden_ref[place, :, here], down_ref[expert, here, :])

        # none of an expert that is not read
        return lax.fori_loop(0, (expert >= 0).astype(jnp.int32) * blocks, block, total)

    zeros = jnp.zeros(out_ref.shape, jnp.float32)
    rounds = pl.cdiv(expert_ref.shape[0] - first, parts)
    is_token = (jnp.arange(out_ref.shape[0]) < tokens)[:, None]
    total = lax.fori_loop(0, rounds, of_expert, zeros)
    triton.store(out_ref.at[...], total, mask=jnp.broadcast_to(is_token, total.shape))

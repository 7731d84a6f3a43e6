"""The mlp of experts for the few tokens of a decode step, on NVIDIA GPUs, by Triton.

Such a step takes as long as its weights are read. So no token is sorted or copied: each expert that
any token chose is read once, multiplied with all tokens, and its part of those that did not choose
it is multiplied with zero. Two kernels: gate, up and their activation; down, summed over experts.
A third chooses the experts: in XLA that takes six, of which each lasts as long as all of it.
Weights of 8 bits are converted to float16 in registers, which is one instruction for two numbers.
"""

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.ops.attention.paged_triton import unavailable as no_triton
from meshwright.ops.collectives import current_platform, untyped
from meshwright.ops.quantized import Quantized
from meshwright.ops.split_norm import PartialSums, Squares

FEW_TOKENS = 128  # more take longer to multiply than to read
_FEWEST = 16  # tokens that a tensor core's matmul takes
NARROWEST = 16  # what a tensor core's matmul takes; the dims of matrices have a multiple of it
_BLOCK = 64  # of a dim, where its size has such a divisor
_STAGES = 4  # blocks that are being read

Activate = Callable[[jax.Array, jax.Array | None], jax.Array]
"""`up` and `gate`, if there is one, to what the down projection multiplies."""


def unavailable(tokens: int, dtype: Any, *dims: int) -> str | None:
    """Why these kernels cannot be used for so many tokens and matrices of `dims`, or None."""
    if current_platform() not in ("gpu", "cuda"):
        return "it runs on NVIDIA GPUs"
    if tokens > FEW_TOKENS:
        return f"it is for at most {FEW_TOKENS} tokens, these are {tokens}"
    if jnp.dtype(dtype).itemsize != 2:
        return f"it is for 16 bits, not {jnp.dtype(dtype).name}"
    if any(dim % NARROWEST for dim in dims):
        return f"it needs matrices of multiples of {NARROWEST}, these are {dims}"
    return no_triton()


def top_experts(
    logits: jax.Array | PartialSums,
    bias: jax.Array | None,
    per_token: int,
    *,
    softmax: bool,
    normalized: bool,
    scale: float,
    padding: jax.Array | None = None,
    squares: Squares | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The experts with the highest scores, and these [tokens, per_token], of logits in float32.

    The scores of all are a softmax of the logits, or each its sigmoid. With a bias [experts] they
    are ranked by their sum with it. Tokens where `padding` is not 0 choose expert `experts`, which
    is none. With `squares`, logits are multiplied with a norm's factor, the last result [tokens].
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    sums = logits.parts if isinstance(logits, PartialSums) else logits[None]
    parts, tokens, experts = sums.shape
    of_token = pl.BlockSpec((_padded(parts), None, _padded(experts)), lambda t: (0, t, 0))
    number = pl.BlockSpec((None,), lambda t: (t,))
    of_norm = [] if squares is None else [squares.parts]
    out = pl.BlockSpec((None, _padded(per_token)), lambda t: (t, 0))
    biases = [] if bias is None else [bias.astype(jnp.float32)]
    of_nobody = [] if padding is None else [padding.astype(jnp.int32)]

    def kernel(logit_ref: Any, *refs: Any) -> None:
        bias_ref, padding_ref, square_ref, outs = _split(refs, biases, of_nobody, of_norm)
        chosen_ref, weight_ref, *factor_ref = outs
        numbers, columns = jnp.arange(_padded(experts)), jnp.arange(_padded(per_token))
        inside = numbers < experts
        is_part = (jnp.arange(_padded(parts)) < parts)[:, None]
        logit = triton.load(logit_ref.at[...], mask=is_part & inside[None], other=0.0)
        logit = jnp.sum(logit, axis=0)
        if squares is not None:
            factor = squares.factor(square_ref[0])
            factor_ref[0][()] = factor
            logit *= factor
        logit = jnp.where(inside, logit, -jnp.inf)
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
            score = jnp.max(ranked, axis=0)
            best = jnp.min(jnp.where(ranked == score, numbers, experts), axis=0)
            if bias_ref:
                score = jnp.sum(jnp.where(numbers == best, scores, 0.0), axis=0)
            ranked = jnp.where(numbers == best, -jnp.inf, ranked)
            chosen = jnp.where(columns == place, best, chosen)
            weights = jnp.where(columns == place, score, weights)
        if normalized:
            weights = weights / (jnp.sum(weights, axis=0) + 1e-20)
        if padding_ref:
            chosen = jnp.where(padding_ref[0][()] != 0, experts, chosen)
        kept = columns < per_token
        triton.store(chosen_ref.at[...], chosen, mask=kept)
        triton.store(weight_ref.at[...], weights * scale, mask=kept)

    def run(*arrays: jax.Array) -> Any:
        shape = tokens, per_token
        return pl.pallas_call(
            kernel,
            grid=(tokens,),
            in_specs=[
                of_token,
                *(pl.BlockSpec((_padded(experts),), lambda t: (0,)) for _ in biases),
                *(number for _ in of_nobody),
                *(pl.BlockSpec((_padded(parts), None), lambda t: (0, t)) for _ in of_norm),
            ],
            out_specs=[out, out, *(number for _ in of_norm)],
            out_shape=[
                jax.ShapeDtypeStruct(shape, jnp.int32),
                jax.ShapeDtypeStruct(shape, jnp.float32),
                *(jax.ShapeDtypeStruct((tokens,), jnp.float32) for _ in of_norm),
            ],
            compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
            interpret=interpret,
            name="top_experts",
        )(*arrays)

    with warnings.catch_warnings():  # that this backend will be removed
        warnings.simplefilter("ignore", DeprecationWarning)
        chosen, weights, *factor = untyped(run, sums, *biases, *of_nobody, *of_norm)
    return chosen, weights, factor[0] if factor else None


def _split(refs: Sequence[Any], *arrays: list[Any]) -> list[Sequence[Any]]:
    """The refs of each list of arrays, and those that are left."""
    left = iter(refs)
    return [*(list(itertools.islice(left, len(each))) for each in arrays), list(left)]


def few_tokens_mlp(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    arrays: Mapping[str, jax.Array | Quantized],
    activate: Activate,
    interpret: bool = False,
    factor: jax.Array | None = None,
) -> PartialSums:
    """What experts add to tokens x [tokens, embed], in float32, still to be added up.

    Arguments:
        chosen: [tokens, k], the experts of a token. Numbers below 0, and from the count of experts
            on, are of none.
        weights: [tokens, k], what the results of these experts are multiplied with.
        arrays: `up` and `gate`, if there is one, [experts, embed, mlp], their biases [experts, mlp]
            as `up_bias` and `gate_bias`, `down` [experts, mlp, embed] and perhaps `down_bias`.
            Matrices of 8 bits are Quantized.
        factor: [tokens], what the products of x with `up` and `gate` are multiplied with.
    """

    def run(x: jax.Array, choice: tuple[jax.Array, ...], arrays: Mapping[str, Any]) -> Any:
        if isinstance(arrays["down"], Quantized):
            x = _in_float16(x)
        hidden, experts = _hidden(x, choice, arrays, activate, interpret)
        return _down(hidden, experts, arrays["down"], x.shape[0], interpret)

    with warnings.catch_warnings():  # that this backend will be removed
        warnings.simplefilter("ignore", DeprecationWarning)
        choice = chosen, weights, *([] if factor is None else [factor])
        parts: jax.Array = untyped(run, x, choice, dict(arrays))
    if "down_bias" in arrays:
        bias = arrays["down_bias"]
        assert isinstance(bias, jax.Array)
        is_chosen = chosen[None] == lax.broadcasted_iota(
            jnp.int32, (bias.shape[0], *chosen.shape), 0
        )
        of_experts = jnp.sum(jnp.where(is_chosen, weights[None], 0), axis=-1)
        more = jnp.matmul(of_experts.T, bias.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        parts = jnp.concatenate([parts, more[None]])
    return PartialSums(parts)


def _padded(count: int, least: int = 1) -> int:
    """Triton's arrays have powers of two."""
    return max(least, 1 << (count - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Of a matrix: what a program writes, reads at a time, and by how many warps."""

    width: int
    depth: int
    warps: int
    stages: int = _STAGES  # blocks that are being read


def _hidden_blocks(height: int, embed: int, mlp: int, itemsize: int) -> _Blocks:
    width, depth = block(mlp), block(embed)
    if height == _FEWEST:
        return _Blocks(width, depth, 4, 8) if itemsize > 1 else _Blocks(width, _widest(embed), 4)
    if itemsize == 1:
        return _Blocks(_widest(mlp) if height <= 64 else width, depth, 4, 3)
    return _Blocks(_widest(mlp), depth, 8 if height > 32 else 4)


def _down_blocks(height: int, embed: int, mlp: int, itemsize: int) -> _Blocks:
    width, depth = block(embed), block(mlp)
    if height == _FEWEST:
        return _Blocks(width, depth if itemsize > 1 else _widest(mlp), 4)
    return _Blocks(_widest(embed), depth, 4)


def block(dim: int, most: int = _BLOCK) -> int:
    """The largest power of two that divides a dim, up to `most`."""
    return math.gcd(dim, most)


def _widest(dim: int) -> int:
    return block(dim, 2 * _BLOCK)


def _parts(programs: int, height: int, itemsize: int) -> int:
    """Into how many sums over experts the result is split, to keep the device busy.

    Two tokens with k experts each have 2 · k programs. One of them is padding where a sequence is
    alone, so k parts are enough.
    """
    return min(programs, 16 if programs > 16 and (height <= 32 or itemsize == 1) else 8)


def _columns(matrix: jax.Array | Quantized, width: int) -> list[Any]:
    """The BlockSpecs of a matrix of experts, and of its scale: program n has so many outputs."""
    from jax.experimental import pallas as pl

    if not isinstance(matrix, Quantized):
        return [pl.BlockSpec((*matrix.shape[:2], width), lambda s, n: (0, 0, n))]
    count, _, inputs = matrix.values.shape
    return [
        pl.BlockSpec((count, width, inputs), lambda s, n: (0, n, 0)),
        pl.BlockSpec((count, width), lambda s, n: (0, n)),
    ]


def _in_float16(x: jax.Array) -> jax.Array:
    """x as weights of 8 bits are multiplied with it; what float16 cannot hold is its largest."""
    most = float(jnp.finfo(jnp.float16).max)
    return jnp.clip(x.astype(jnp.float32), -most, most).astype(jnp.float16)


def _product(x: jax.Array, matrix: Any, expert: jax.Array, here: Any) -> jax.Array:
    """Of x and an expert's matrix: its inputs `here`, and the columns of a program."""
    from jax.experimental.pallas import triton

    if len(matrix) == 1:
        return triton.dot(x, matrix[0][expert, here, :])
    return triton.dot(x, matrix[0][expert, :, here].astype(x.dtype).T)


def _times_scale(total: jax.Array, matrix: Any, expert: jax.Array) -> jax.Array:
    return total if len(matrix) == 1 else total * matrix[1][expert, :][None]


def _refs(refs: Sequence[Any], matrices: Sequence[jax.Array | Quantized]) -> list[list[Any]]:
    """The refs of each matrix: of itself, or of its values and its scale."""
    left = iter(refs)
    return [list(itertools.islice(left, len(jax.tree.leaves(matrix)))) for matrix in matrices]


def _hidden(
    x: jax.Array,
    choice: tuple[jax.Array, ...],
    arrays: Mapping[str, Any],
    activate: Activate,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """[programs, tokens, mlp], activated and multiplied, and the expert of each program.

    Of few choices each has a program, so that those with an expert are the first; of more, each
    expert. A program whose expert nobody chose, or an earlier program has, gets -1 and writes
    nothing.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    chosen, _, *factor = choice
    names = [name for name in ("gate", "up") if name in arrays]
    biases = [arrays[f"{name}_bias"] for name in names if f"{name}_bias" in arrays]
    matrices = [arrays[name] for name in names]
    count = jax.tree.leaves(matrices)[0].shape[0]
    embed, mlp = x.shape[1], _outputs(matrices[0])
    tokens, per_token = chosen.shape
    height, programs = _padded(tokens, _FEWEST), min(count, chosen.size)
    blocks = _hidden_blocks(height, embed, mlp, jax.tree.leaves(matrices)[0].dtype.itemsize)
    of_choice = pl.BlockSpec((height, _padded(per_token)), lambda s, n: (0, 0))
    kernel = functools.partial(
        _hidden_kernel,
        names,
        matrices,
        (tokens, per_token),
        programs < count,
        blocks.depth,
        activate,
        len(factor),
    )
    hidden, experts = pl.pallas_call(
        kernel,
        grid=(programs, mlp // blocks.width),
        in_specs=[
            pl.BlockSpec((height, embed), lambda s, n: (0, 0)),
            of_choice,
            of_choice,
            *(pl.BlockSpec((height,), lambda s, n: (0,)) for _ in factor),
            *(spec for matrix in matrices for spec in _columns(matrix, blocks.width)),
            *(pl.BlockSpec((count, blocks.width), lambda s, n: (0, n)) for _ in biases),
        ],
        out_specs=[
            pl.BlockSpec((None, height, blocks.width), lambda s, n: (s, 0, n)),
            pl.BlockSpec((None,), lambda s, n: (s,)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((programs, height, mlp), x.dtype),
            jax.ShapeDtypeStruct((programs,), jnp.int32),
        ],
        compiler_params=triton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name="experts_hidden",
    )(x, *choice, *jax.tree.leaves(matrices), *biases)
    return hidden, experts


def _outputs(matrix: jax.Array | Quantized) -> int:
    return int(matrix.values.shape[1] if isinstance(matrix, Quantized) else matrix.shape[2])


def _hidden_kernel(
    names: list[str],
    matrices: list[Any],
    shape: tuple[int, int],
    by_choice: bool,
    depth: int,
    activate: Activate,
    factors: int,
    *refs: Any,
) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    x_ref, chosen_ref, weight_ref, *of_arrays, out_ref, expert_ref = refs
    factor_ref, of_arrays = of_arrays[:factors], of_arrays[factors:]
    tokens, per_token = shape
    of_matrices = _refs(of_arrays, matrices)
    biases = of_arrays[sum(map(len, of_matrices)) :]
    count, program = of_matrices[0][0].shape[0], pl.program_id(0)

    places, columns = (jnp.arange(size) for size in chosen_ref.shape)
    is_token = (places < tokens)[:, None]
    inside = is_token & (columns < per_token)[None]
    chosen = triton.load(chosen_ref.at[...], mask=inside, other=-1)
    if by_choice:
        expert = chosen_ref[program // per_token, program % per_token]
        order = places[:, None] * per_token + columns[None]
        first = jnp.min(jnp.min(jnp.where(chosen == expert, order, count), axis=1), axis=0)
        is_read = (expert >= 0) & (expert < count) & (first == program)
    else:
        expert = program
        is_read = jnp.max(jnp.max((chosen == expert).astype(jnp.int32), axis=1), axis=0) > 0
    expert_ref[()] = jnp.where(is_read, expert, -1)

    @pl.when(is_read)
    def _() -> None:
        weights = triton.load(weight_ref.at[...], mask=inside, other=0)
        weight = jnp.sum(jnp.where(chosen == expert, weights, 0.0), axis=1)
        of_tokens = jnp.broadcast_to(is_token, (places.size, depth))

        def block(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            here = pl.ds(index * depth, depth)
            x = triton.load(x_ref.at[:, here], mask=of_tokens, other=0)
            return tuple(
                total + _product(x, matrix, expert, here)
                for total, matrix in zip(sums, of_matrices, strict=True)
            )

        zeros = jnp.zeros(out_ref.shape, jnp.float32)
        sums = lax.fori_loop(0, x_ref.shape[1] // depth, block, (zeros,) * len(names))
        sums = tuple(
            _times_scale(total, matrix, expert)
            for total, matrix in zip(sums, of_matrices, strict=True)
        )
        for ref in factor_ref:
            factor = triton.load(ref.at[...], mask=places < tokens, other=0.0)
            sums = tuple(total * factor[:, None] for total in sums)
        if biases:
            sums = tuple(
                total + bias[expert, :].astype(jnp.float32)[None]
                for total, bias in zip(sums, biases, strict=True)
            )
        parts = dict(zip(names, sums, strict=True))
        activated = activate(parts["up"], parts.get("gate"))
        activated *= weight[:, None]
        is_small = out_ref.dtype == jnp.float16 and len(of_matrices[0]) > 1
        out_ref[...] = _in_float16(activated) if is_small else activated.astype(out_ref.dtype)


def _down(
    hidden: jax.Array,
    experts: jax.Array,
    down: jax.Array | Quantized,
    tokens: int,
    interpret: bool,
) -> jax.Array:
    """[parts, tokens, embed] in float32: sums over the experts of each part."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (programs, height, mlp), embed = hidden.shape, _outputs(down)
    itemsize = jax.tree.leaves(down)[0].dtype.itemsize
    blocks, parts = _down_blocks(height, embed, mlp, itemsize), _parts(programs, height, itemsize)
    return pl.pallas_call(
        functools.partial(_down_kernel, tokens, parts, blocks.depth),
        grid=(parts, embed // blocks.width),
        in_specs=[
            pl.BlockSpec(hidden.shape, lambda s, n: (0, 0, 0)),
            pl.BlockSpec(experts.shape, lambda s, n: (0,)),
            *_columns(down, blocks.width),
        ],
        out_specs=pl.BlockSpec((None, height, blocks.width), lambda s, n: (s, 0, n)),
        out_shape=jax.ShapeDtypeStruct((parts, tokens, embed), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name="experts_down",
    )(hidden, experts, *jax.tree.leaves(down))


def _down_kernel(tokens: int, parts: int, depth: int, *refs: Any) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    hidden_ref, expert_ref, *down, out_ref = refs
    blocks = hidden_ref.shape[2] // depth
    first = pl.program_id(0)
    zeros = jnp.zeros(out_ref.shape, jnp.float32)

    def of_expert(index: jax.Array, total: jax.Array) -> jax.Array:
        place = first + index * parts
        expert = expert_ref[place]

        def block(index: jax.Array, total: jax.Array) -> jax.Array:
            here = pl.ds(index * depth, depth)
            return total + _product(hidden_ref[place, :, here], down, expert, here)

        # none of an expert that is not read
        own = (expert >= 0).astype(jnp.int32) * blocks
        if len(down) == 1:
            return lax.fori_loop(0, own, block, total)
        return total + _times_scale(
            lax.fori_loop(0, own, block, zeros), down, jnp.maximum(expert, 0)
        )

    rounds = pl.cdiv(expert_ref.shape[0] - first, parts)
    is_token = (jnp.arange(out_ref.shape[0]) < tokens)[:, None]
    total = lax.fori_loop(0, rounds, of_expert, zeros)
    triton.store(out_ref.at[...], total, mask=jnp.broadcast_to(is_token, total.shape))

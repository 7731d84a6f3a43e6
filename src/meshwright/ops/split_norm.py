"""The sums and norms between the matmuls of a few tokens, and a router, by one Triton kernel.

A decode step of one sequence takes as long as its weights are read, and each small kernel between
two matmuls takes a microsecond or more. So one kernel adds up what a block adds to the residual
stream, also where that is partial sums. The root mean square of a token is a factor of all products
with it: the kernel leaves sums of squares, and the kernel after the matmul multiplies.
"""

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.ops.collectives import untyped

_SPAN = 128  # dims that a program reads, of one token
_WIDTH = 64  # outputs of a program


def scale_unavailable(*sizes: int) -> str | None:
    """Why `scale_for_norm` cannot be used for tokens of these sizes, or None."""
    return f"{sizes} are not multiples of {_SPAN}" if any(size % _SPAN for size in sizes) else None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Squares:
    """Sums of squares of tokens, by which an RMS norm divides them."""

    parts: jax.Array  # [parts, tokens], in float32, still to be added up
    dim: int = dataclasses.field(metadata={"static": True})  # numbers of a token
    eps: float = dataclasses.field(metadata={"static": True})

    def factor(self, parts: Any) -> jax.Array:
        """What the norm multiplies a token with, in a kernel: of the ref of its parts."""
        from jax.experimental.pallas import triton

        is_part = jnp.arange(parts.shape[0]) < self.parts.shape[0]
        squares = triton.load(parts.at[...], mask=is_part, other=0.0)
        return lax.rsqrt(jnp.sum(squares, axis=0) / self.dim + self.eps)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartialSums:
    """What is still to be added up over the first dim."""

    parts: jax.Array  # [parts, tokens, dim]

    def total(self) -> jax.Array:
        return jnp.sum(self.parts, axis=0)


def scale_for_norm(
    x: jax.Array,
    update: jax.Array | PartialSums | None,
    scale: jax.Array,
    eps: float,
    weight: jax.Array | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, Squares, PartialSums | None]:
    """What an RMS norm with this eps begins with, of tokens x [tokens, embed] and an update.

    An update is [1, tokens, embed], or partial sums.

    Returns:
        x with the update; that times the scale, whose norm is it times a factor; what gives the
        factor; and if there is a weight [embed, outputs], its products with that in float32.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    tokens, embed = x.shape
    parts = embed // _SPAN
    update = update.parts if isinstance(update, PartialSums) else update
    updates, weights = ([] if each is None else [each] for each in (update, weight))
    columns = 1 if weight is None else weight.shape[1] // _WIDTH
    here = pl.BlockSpec((None, _SPAN), lambda n, s, t: (t, s))
    out_specs = [here, here, pl.BlockSpec((None, None), lambda n, s, t: (s, t))]
    out_shape = [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct((parts, tokens), jnp.float32),
    ]
    if weight is not None:
        out_specs.append(pl.BlockSpec((None, None, _WIDTH), lambda n, s, t: (s, t, n)))
        out_shape.append(jax.ShapeDtypeStruct((parts, tokens, weight.shape[1]), jnp.float32))

    def run(*arrays: jax.Array) -> Any:
        return pl.pallas_call(
            functools.partial(_kernel, len(updates), len(weights)),
            grid=(columns, parts, tokens),
            in_specs=[
                here,
                pl.BlockSpec((_SPAN,), lambda n, s, t: (s,)),
                *(pl.BlockSpec((each.shape[0], None, _SPAN), lambda n, s, t: (0, t, s))
                  for each in updates),
                *(pl.BlockSpec((_SPAN, _WIDTH), lambda n, s, t: (s, n)) for _ in weights),
            ],
            out_specs=out_specs,
            out_shape=out_shape,
            compiler_params=triton.CompilerParams(num_warps=4 if weights else 1, num_stages=1),
            interpret=interpret,
            name="scale_for_norm",
        )(*arrays)  # fmt: skip

    with warnings.catch_warnings():  # that this backend will be removed
        warnings.simplefilter("ignore", DeprecationWarning)
        total, scaled, squares, *logits = untyped(run, x, scale, *updates, *weights)
    return (
        total, scaled, Squares(squares, embed, eps), PartialSums(logits[0]) if logits else None,
    )  # fmt: skip


def _kernel(updates: int, weights: int, *refs: Any) -> None:
    x_ref, scale_ref, *more = refs
    update_refs, weight_refs = more[:updates], more[updates:][:weights]
    total_ref, scaled_ref, square_ref, *out_ref = more[updates + weights :]
    matrices = [ref[...].astype(jnp.float32) for ref in weight_refs]
    x = x_ref[...].astype(jnp.float32)
    for ref in update_refs:
        for part in map(np.int32, range(ref.shape[0])):
            x += ref[part, :].astype(jnp.float32)
    # programs of other outputs write the same
    total_ref[...] = x.astype(total_ref.dtype)
    x = x.astype(total_ref.dtype).astype(jnp.float32)
    square_ref[()] = jnp.sum(x * x, axis=0)
    x *= scale_ref[...].astype(jnp.float32)
    scaled_ref[...] = x.astype(scaled_ref.dtype)
    for matrix, ref in zip(matrices, out_ref, strict=True):
        ref[...] = jnp.sum(x[:, None] * matrix, axis=0)

"""What the layers of every transformer here have in common: weights, norms, the mlp, the loop.

An addition to the residual stream waits for the norm behind it, which can be made together with the
sum: so a block takes `x` and an `update` still to be added, and gives both again.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from meshwright.models.activations import ActivationLayouts
from meshwright.models.compute import Compute, remat_policy
from meshwright.ops import all_gather, norm_beside, over_chunks, partial_sums, reduce_to, split_axes

Params = dict[str, Any]
# x, the update or None, the layer's weights → x, the next update
Layer = Callable[[jax.Array, jax.Array | None, Params], tuple[jax.Array, jax.Array]]

# what a layer keeps for its backward pass, by the names given above; the rest is made again, and
# all-gathered weights are gathered again
_MATMULS = frozenset({"input", "q", "k", "v", "attention", "middle", "gate", "up"})
REMAT: dict[str, frozenset[str]] = {
    "none": _MATMULS | {"normed", "activated"},  # everything that costs time to make
    "elementwise": _MATMULS,  # norms and activations twice
    "mlp": _MATMULS - {"gate", "up"},  # and the first half of the mlp: a third of the memory
    "full": frozenset({"input"}),  # every layer's forward twice
}


def through_layers(
    layer: Layer, x: jax.Array, weights: Params, layers: int, compute: Compute
) -> tuple[jax.Array, jax.Array | None]:
    """x through all layers, and the update that is still to be added, if there is one."""
    once = functools.partial(jax.checkpoint, policy=remat_policy(compute.remat, REMAT))
    if not compute.scan:
        kept, update = once(layer), None
        for layer_weights in _unstack(weights, layers):
            x, update = kept(x, update, layer_weights)
        return x, update

    # what a loop hands on is written and read again: one array, not two
    def added(x: jax.Array, w: Params) -> jax.Array:
        x, update = layer(x, None, w)
        return x + update

    kept = once(added, prevent_cse=False)
    x, _ = lax.scan(lambda x, w: (kept(x, w), None), x, weights)
    return x, None


def prepare_weights(layers: Params, layouts: ActivationLayouts, compute: Compute) -> Params:
    """The stacked weights of all layers, ready for the loop.

    Matrices are cast while they are split. Vectors (norms, biases) are small and whole: marked
    here, their gradients are added up once for all layers, after the loop.
    """

    def ready(name: str, w: jax.Array) -> jax.Array:
        match name:
            case "norm" | "bo":
                return along_residual(w, layouts)
            case "bq" | "bk" | "bv":
                return all_gather(w, layouts.token_axes)
            case "q_norm" | "k_norm":
                return all_gather(w, split_axes(layouts.heads.partitions))
            case _:
                return w.astype(compute.dtype)

    return {
        block: {name: ready(name, w) for name, w in arrays.items()}
        for block, arrays in layers.items()
    }


def _unstack(weights: Params, layers: int) -> list[Params]:
    """The weights of each layer; by split, whose gradient is one concatenation."""
    leaves, treedef = jax.tree.flatten(weights)
    parts = [lax.split(leaf, (1,) * layers, axis=0) for leaf in leaves]
    return [
        jax.tree.unflatten(treedef, [lax.squeeze(part[i], (0,)) for part in parts])
        for i in range(layers)
    ]


def along_residual(vector: jax.Array, layouts: ActivationLayouts) -> jax.Array:
    """A vector over embed, split as the residual stream is."""
    *tokens, embed_axes = layouts.residual.partitions
    vector = reshard(vector, P(*(None,) * (vector.ndim - 1), embed_axes))
    return all_gather(vector, split_axes(tokens))


def enter(
    x: jax.Array,
    update: jax.Array | None,
    scale: jax.Array,
    uses: int,
    name: str,
    eps: float,
    compute: Compute,
) -> tuple[jax.Array, list[jax.Array]]:
    """A block's first step: `x + update`, by name, and its norm; together if kept together."""
    kept = REMAT[compute.remat]
    if update is not None and (name in kept) != ("normed" in kept):
        x, update = checkpoint_name(x + update, name), None
    return norm_beside(x, scale, eps, uses, update, name)


def mlp(
    x: jax.Array,
    update: jax.Array | None,
    w: Params,
    eps: float,
    compute: Compute,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
) -> tuple[jax.Array, jax.Array]:
    """x with the update, and what is to be added to it next.

    With a weight `gate` the activation of its product multiplies that of `up`; without, the mlp is
    the activation between `up` and `down`.
    """
    layouts = compute.layouts
    over = layouts.axes(layouts.mlp)
    whole = not compute.mlp_chunk
    names = [name for name in ("gate", "up") if name in w]
    uses = len(names) if whole and not over else 1
    x, normed = enter(x, update, w["norm"], uses, "middle", eps, compute)
    weights = [all_gather(w[name], layouts.token_axes) for name in (*names, "down")]

    def forward(target: P, *given: jax.Array) -> Any:
        *normed, down = given
        first = [normed.pop() for _ in names][::-1]
        normed = normed if not over else [all_gather(normed[0], over)]  # [batch, length, embed]
        inputs = normed * len(names) if len(normed) == 1 else normed
        hidden = [
            checkpoint_name(jnp.einsum("ble,em->blm", h, weight, out_sharding=layouts.mlp), name)
            for name, h, weight in zip(names, inputs, first, strict=True)
        ]
        gated = activation(hidden[0])
        activated = checkpoint_name(gated * hidden[1] if len(names) == 2 else gated, "activated")
        out = jnp.einsum(
            "blm,me->ble", activated, down, out_sharding=partial_sums(layouts.block, over)
        )
        return reduce_to(out, over, target)

    if whole:
        return x, forward(layouts.residual, *normed, *weights)
    # a chunk's sums are added whole, since its tokens are not those that tp splits between blocks
    chunk = functools.partial(forward, layouts.block)
    out = over_chunks(chunk, reshard(normed[0], layouts.block), weights, compute.mlp_chunk)
    return x, reshard(out, layouts.residual)

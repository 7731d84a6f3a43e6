"""A function of a layer's whole array, where a stack of layers is kept split: each device takes
layers of its own.

    [16 layers, embed/8, mlp], 8 devices: in 2 rounds, each device receives the parts of one layer,
    works on it, and sends the parts back.

An all-to-all of a round turns every device's part of 8 layers into one whole layer a device, and
another turns it back. No layer is worked on twice, every byte is sent once each way, and a device
holds one whole layer at a time. A last round that lacks layers is filled up with zeros.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.layouts import axes_of
from meshwright.ops import drop_trivial_axes, nontrivial_axes, split_axes


def map_layers(
    function: Callable[..., jax.Array], stack: jax.Array, spec: P, *shared: jax.Array
) -> jax.Array:
    """`function(layer, *shared)` of each whole layer of `stack`, whose parts lie as `spec` says.

    The result has the layer's shape and lies as the stack does. Axes that hold copies (dp) each do
    the same work.
    """
    spec = drop_trivial_axes(P(*spec, *(None,) * (stack.ndim - len(spec))), nontrivial_axes())
    if not split_axes(spec):
        return lax.map(lambda layer: function(layer, *shared), stack)
    axes = split_axes(spec[1:])
    sizes = jax.sharding.get_abstract_mesh().shape
    cuts = tuple(math.prod(sizes[axis] for axis in axes_of(entry, spec)) for entry in spec[1:])

    def local(part: jax.Array, *shared: jax.Array) -> jax.Array:
        def round_of_layers(parts: jax.Array) -> jax.Array:  # [devices, *part of a layer]
            layer = _join(_exchange(parts, axes), cuts)
            return _exchange(_cut(function(layer, *shared), cuts), axes)

        layers, devices = part.shape[0], math.prod(cuts)
        rounds = -(-layers // devices)
        # devices without a layer in the last round would only wait for the others
        missing = jnp.zeros((rounds * devices - layers, *part.shape[1:]), part.dtype)
        padded = lax.concatenate([part, missing], 0) if len(missing) else part
        done = lax.map(round_of_layers, padded.reshape(rounds, devices, *part.shape[1:]))
        return done.reshape(padded.shape)[:layers]

    mapped = jax.shard_map(local, in_specs=(spec, *(P(),) * len(shared)), out_specs=spec)
    return mapped(stack, *shared)


def _exchange(parts: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """parts[i] goes to device i of the axes; what comes from device i is at i."""
    return lax.all_to_all(parts, axes, 0, 0, tiled=True) if axes else parts


def _join(parts: jax.Array, cuts: tuple[int, ...]) -> jax.Array:
    """Parts, in the devices' order, to the whole: [4 * 2, embed/4, heads/2] to [embed, heads]."""
    sizes, dims = parts.shape[1:], len(cuts)
    order = [place for dim in range(dims) for place in (dim, dims + dim)]
    sizes_of_layer = [cut * size for cut, size in zip(cuts, sizes, strict=True)]
    return parts.reshape(*cuts, *sizes).transpose(order).reshape(sizes_of_layer)


def _cut(layer: jax.Array, cuts: tuple[int, ...]) -> jax.Array:
    """The whole to its parts, in the devices' order: _join's inverse."""
    sizes = [size // cut for cut, size in zip(cuts, layer.shape, strict=True)]
    pairs = [size for pair in zip(cuts, sizes, strict=True) for size in pair]
    order = [*range(0, len(pairs), 2), *range(1, len(pairs), 2)]
    return layer.reshape(pairs).transpose(order).reshape(-1, *sizes)

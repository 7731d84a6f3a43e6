"""ppermute along mesh axes, with devices numbered in the order the axes are named."""

from collections.abc import Iterable

import jax
import numpy as np
from jax import lax


def permute(x: jax.Array, over: tuple[str, ...], pairs: Iterable[tuple[int, int]]) -> jax.Array:
    """Inside shard_map: `x` sent along the pairs (source, target), indices along the axes `over`.

    lax.ppermute numbers devices in mesh order, whatever the order of the names (newer versions
    refuse another order); lax.axis_index and layouts use the order of the names.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    ordered = [axis for axis in sizes if axis in over]
    numbers = np.arange(np.prod([sizes[axis] for axis in ordered]))
    numbers = numbers.reshape([sizes[axis] for axis in ordered])
    numbers = numbers.transpose([ordered.index(axis) for axis in over]).reshape(-1)
    in_mesh_order = [(int(numbers[source]), int(numbers[target])) for source, target in pairs]
    return lax.ppermute(x, tuple(ordered), in_mesh_order)

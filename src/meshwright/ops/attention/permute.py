"""Arrays from device to device along mesh axes, numbered as a layout numbers them."""

from collections.abc import Iterable

import jax
import numpy as np
from jax import lax


def permute(x: jax.Array, over: tuple[str, ...], places: Iterable[tuple[int, int]]) -> jax.Array:
    """Inside shard_map: `x` sent from place to place along the axes `over`, the first outermost.

    lax.ppermute numbers devices in the order of the mesh, whatever order the axes are named in
    (newer ones refuse another); lax.axis_index and layouts go by the order named.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    ordered = [axis for axis in sizes if axis in over]
    numbers = np.arange(np.prod([sizes[axis] for axis in ordered]))
    numbers = numbers.reshape([sizes[axis] for axis in ordered])
    numbers = numbers.transpose([ordered.index(axis) for axis in over]).reshape(-1)
    pairs = [(int(numbers[source]), int(numbers[target])) for source, target in places]
    return lax.ppermute(x, tuple(ordered), pairs)

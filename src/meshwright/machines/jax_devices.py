"""The devices and arrays of jax; the other files of this package work without it."""

import math
from typing import Any

import jax


def all_devices() -> list[Any]:
    """All devices that jax has, those of other processes too."""
    return jax.devices()


def host_bytes(tree: Any) -> int:
    """Bytes of abstract arrays with shardings on all CPU devices of this host."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        devices = [d for d in leaf.sharding.addressable_devices if d.platform == "cpu"]
        shard = math.prod(leaf.sharding.shard_shape(leaf.shape))
        total += shard * leaf.dtype.itemsize * len(devices)
    return total

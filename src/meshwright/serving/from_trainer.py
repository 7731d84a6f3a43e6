"""The parameters of a trainer as the weights of an engine, without a file."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.errors import MeshwrightError
from meshwright.layouts import fit, stored, tree_paths
from meshwright.models import ADAPTER, abstract_arrays, merged
from meshwright.ops import Quantized


def trained_weights(params: Any, adapter_scale: float | None = None) -> Callable[[Any], Any]:
    """A Source's `read` for the parameters of a trainer, whose arrays are copied, never shared.

    They stay on the devices where the engine's are the trainer's; else JAX moves them. An adapter
    is merged, with its scale (`step.compute.adapter_scale`).
    """
    check_plain(params)
    if adapter_scale is None and ADAPTER in params:
        raise MeshwrightError(
            "the parameters have an adapter, which is merged with its scale; give it: "
            "adapter_scale=step.compute.adapter_scale"
        )
    mesh = jax.tree.leaves(params)[0].sharding.mesh

    def place(array: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
        abstract = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        unpadded = fit(array, stored(abstract, target.shape))  # the trainer pads for its own mesh
        moved = jax.device_put(unpadded, target.sharding)  # which may share buffers
        with jax.set_mesh(target.sharding.mesh):
            return _copied(moved, target.dtype)

    def read(targets: Any) -> Any:
        with jax.set_mesh(mesh):
            without_adapter = merged(params, 1.0 if adapter_scale is None else adapter_scale)
        return jax.tree.map(place, without_adapter, targets)

    return read


@functools.partial(jax.jit, static_argnums=1)
def _copied(x: jax.Array, dtype: Any) -> jax.Array:
    return jnp.copy(x).astype(dtype)


def check_plain(params: Any) -> None:
    """Raise a MeshwrightError if a trainer holds weights in 8 or 4 bits, which no engine takes."""
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    if any(isinstance(leaf, Quantized) for leaf in leaves):
        raise MeshwrightError(
            "an engine cannot take frozen weights in 8 or 4 bits from a trainer; give --lora.base "
            "bfloat16, or leave --eval.prompts out"
        )


def check_params(params: Any, config: Any) -> None:
    """Raise a MeshwrightError if a trainer's parameters are not those of a model.

    The vocabulary may be padded, and there may be an adapter.
    """
    check_plain(params)
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)):
        raise MeshwrightError(
            "the parameters are those before a train step, which has used up their memory; give "
            "those of the state that it returned"
        )
    given = {name: tree for name, tree in params.items() if name != ADAPTER}
    arrays = dict(zip(tree_paths(given), jax.tree.leaves(given), strict=True))
    specs = abstract_arrays(config)
    for path, spec in zip(tree_paths(specs), jax.tree.leaves(specs), strict=True):
        array = arrays.pop(path, None)
        shape = None if array is None else array.shape
        padded = [have for have, dim in zip(shape or (), spec.dims, strict=False) if dim == "vocab"]
        expected = tuple(
            max(size, *padded) if dim == "vocab" and padded else size
            for size, dim in zip(spec.shape, spec.dims, strict=True)
        )
        if shape != expected:
            raise MeshwrightError(
                f"the parameters are not those of the engine's model: {path} is "
                f"{shape or 'missing'} instead of {spec.shape}"
            )
    if arrays:
        raise MeshwrightError(
            f"the parameters are not those of the engine's model, which has no {min(arrays)}"
        )

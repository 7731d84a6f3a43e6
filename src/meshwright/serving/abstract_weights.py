"""What a mesh holds of a model that is served: abstract weights and adapters, with shardings."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightError
from meshwright.layouts import ArraySpec, Layout, Rules, layout_tree
from meshwright.models import (
    ADAPTER,
    LoraConfig,
    abstract_arrays,
    family_of,
    hf_names,
    padded_vocab,
    serving_of,
    with_adapter,
)
from meshwright.ops import drop_trivial_axes, nontrivial_axes
from meshwright.present import mesh_text, nearest_sizes_text
from meshwright.serving.settings import served_config


def repeat_kv_heads(array: jax.Array, target: jax.ShapeDtypeStruct, spec: ArraySpec) -> jax.Array:
    """An array with as many KV heads as its target has; others as they are."""
    if "kv_heads" not in spec.dims or array.shape == target.shape:
        return array
    with jax.set_mesh(target.sharding.mesh):
        dim = spec.dims.index("kv_heads")
        repeated: jax.Array = _repeat(array, dim, target.shape[dim], target.sharding.spec)
    return repeated


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _repeat(x: jax.Array, dim: int, size: int, spec: P) -> jax.Array:
    axes = [*spec, *(None,) * (x.ndim - len(spec))]
    whole = reshard(x, P(*axes[:dim], None, *axes[dim + 1 :]))
    return reshard(jnp.repeat(whole, size // x.shape[dim], axis=dim), P(*axes))


def check_fits(config: Any, mesh: Mesh) -> None:
    """Raise a MeshwrightError if the mesh does not divide the model's dims."""
    shape = dict(mesh.shape)
    if (why := _misfit(config, shape)) is None:
        return
    for axis in [axis for axis in ("tp", *shape) if shape[axis] > 1]:
        sizes = range(1, 2 * mesh.size + 1)
        if fits := [size for size in sizes if _misfit(config, shape | {axis: size}) is None]:
            why += f"; {axis}={nearest_sizes_text(shape[axis], fits)} would fit"
            break
    raise MeshwrightError(f"mesh '{mesh_text(shape)}': {why}")


def _misfit(config: Any, shape: Mapping[str, int]) -> str | None:
    """Why a mesh of this shape cannot split the model; None if it can."""
    rules = serving_of(config).rules("ep" in shape)
    for field, dim in family_of(config).split_dims.items():
        axes = rules.layout(dim).axes[0]
        parts = math.prod(shape[axis] for axis in axes)
        if dim == "kv_heads" or parts == 1:  # key heads may be repeated
            continue
        size = getattr(config, field, None) or 0
        sizes = " · ".join(f"{axis}={shape[axis]}" for axis in axes)
        if not size and dim == "experts":
            return f"the model has no {dim} to be split in {sizes}"
        if size % parts:
            return f"{sizes} does not divide the model's {field}={size}"
    tensor, size = shape["tp"], config.kv_heads
    if size % tensor and tensor % size:
        return f"tp={tensor} neither divides the model's kv_heads={size} nor is a multiple of them"
    return None


def targets(config: Any, mesh: Mesh, dtype: Any) -> Any:
    """Abstract parameters with shardings; norms and biases in float32.

    The vocabulary is padded where the mesh does not divide it.
    """
    rules = serving_of(config).rules("ep" in mesh.shape)
    arrays = abstract_arrays(config, vocab=padded_vocab(config, rules, mesh.shape))
    return abstract_params(arrays, rules, mesh, lambda spec: dtype if spec.is_cast else jnp.float32)


def abstract_params(
    arrays: Any, rules: Rules, mesh: Mesh, dtype_of: Callable[[ArraySpec], Any]
) -> Any:
    """ArraySpecs as jax.ShapeDtypeStructs with shardings."""
    nontrivial = nontrivial_axes(mesh.shape)

    def target(spec: ArraySpec, layout: Layout) -> jax.ShapeDtypeStruct:
        place = NamedSharding(mesh, drop_trivial_axes(P(*layout.axes), nontrivial))
        return jax.ShapeDtypeStruct(spec.shape, dtype_of(spec), sharding=place)

    return jax.tree.map(target, arrays, layout_tree(arrays, rules, mesh=mesh))


def adapter_targets(config: Any, lora: LoraConfig, mesh: Mesh) -> Any:
    """The abstract arrays of an adapter as its files have them, with shardings."""
    rules = serving_of(config).rules("ep" in mesh.shape)

    def arrays(config: Any) -> Any:
        model = abstract_arrays(config, vocab=padded_vocab(config, rules, mesh.shape))
        return with_adapter(model, lora, jnp.float32, hf_names(config))

    def on_disk(target: jax.ShapeDtypeStruct, spec: ArraySpec) -> jax.ShapeDtypeStruct:
        if target.shape == spec.shape:
            return target
        axes = zip(spec.shape, target.shape, target.sharding.spec, strict=True)
        whole = P(*(axis if size == padded else None for size, padded, axis in axes))
        place = NamedSharding(mesh, whole)
        return jax.ShapeDtypeStruct(spec.shape, target.dtype, sharding=place)

    served = served_config(config, mesh.shape)  # which may have more KV heads
    placed = abstract_params(arrays(served), rules, mesh, lambda spec: spec.dtype)
    return {ADAPTER: jax.tree.map(on_disk, placed[ADAPTER], arrays(config)[ADAPTER])}

"""The weights that a run starts from, read where they lie; frozen ones may be quantized."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from meshwright.layouts import fit, stored, tree_paths
from meshwright.models import ADAPTER, load_hf
from meshwright.ops import NF4, Quantized, quantize
from meshwright.training.abstract_step import AbstractStep
from meshwright.training.state import placed_params


def start_weights(step: AbstractStep, model: Any, folder: Path) -> dict[str, Any]:
    """The parameters of a step from a Hugging Face folder, without an adapter.

    `model` is the config of the folder. A stack of matrices that the step holds quantized is read
    and quantized a layer at a time.
    """
    targets = {name: step.state.params[name] for name in step.arrays if name != ADAPTER}
    specs = {name: step.unquantized[name] for name in targets}
    padded = placed_params(specs, step.rules, step.mesh)
    shardings = jax.tree.map(
        lambda target, spec: stored(target, spec.unpadded_shape).sharding, padded, specs
    )
    dtype = targets["embedding"].dtype
    with jax.set_mesh(step.mesh):
        loaded = load_hf(folder, model, shardings, dtype, on_layer=_quantizers(specs, targets))
    return jax.tree.map(lambda x, target: x.astype(target.dtype), fit(loaded, targets), targets)


def _quantizers(arrays: Any, targets: Any) -> dict[str, Callable[[jax.Array], Any]]:
    """By path of each stack that `targets` has quantized, how a layer of it [1, ..] becomes that.

    `arrays` are the ArraySpecs before, `targets` the abstract parameters.
    """
    leaves, treedef = jax.tree.flatten(arrays)
    structure: Any = treedef  # jax's stub has no flatten_up_to
    each = zip(tree_paths(arrays), leaves, structure.flatten_up_to(targets), strict=True)
    return {
        path: _quantizer(spec.inputs, target)
        for path, spec, target in each
        if isinstance(target, Quantized)
    }


def _quantizer(inputs: int, target: Quantized) -> Callable[[jax.Array], Any]:
    name = NF4 if target.is_nf4 else "int8"
    shardings = jax.tree.map(lambda leaf: leaf.sharding, target)

    def one(layer: jax.Array) -> Any:
        return jax.tree.map(lambda part: part[None], quantize(layer[0], inputs, name))

    # nf4 splits a dim that may be sharded into blocks, which types do not follow
    return jax.jit(jax.sharding.auto_axes(one, out_sharding=shardings))

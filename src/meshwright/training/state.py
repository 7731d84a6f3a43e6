"""What training carries from step to step, and where each part of it lies."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.arithmetic import round_up
from meshwright.layouts import (
    Layout,
    Rules,
    create,
    layout_tree,
    optimizer_layouts,
    resized_like,
    stored,
)
from meshwright.models import ADAPTER
from meshwright.ops import drop_trivial_axes, nontrivial_axes
from meshwright.training.trainable import trained_part, trained_specs, unfrozen


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    step: Any  # optimizer steps tried, int32: the data position
    params: Any
    optimizer: Any
    skipped: Any  # steps left out because loss or gradient was not finite
    skipped_in_a_row: Any
    reference: Any = None  # frozen, never saved: see dpo.py


def abstract_state(
    arrays: Any,
    rules: Rules,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    reference: Any = None,
) -> TrainState:
    """The abstract state: jax.ShapeDtypeStructs, each with its sharding on the mesh.

    `reference` are the ArraySpecs of a frozen copy, if there is one: it lies as the parameters do.

    Optimizer state is of what is trained, and lies with its parameter. Axes of one device are left
    out, as in the forward's types. What does not divide is padded.
    """
    trained = unpadded_arrays(trained_specs(arrays))
    param_layouts = layout_tree(arrays, rules, mesh=mesh)
    moments = jax.eval_shape(optimizer.init, trained)
    moment_layouts = optimizer_layouts(moments, trained, unfrozen(arrays, param_layouts))
    counter = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    return TrainState(
        step=counter,
        params=_placed(arrays, param_layouts, mesh),
        optimizer=_placed(moments, moment_layouts, mesh),
        skipped=counter,
        skipped_in_a_row=counter,
        reference=None
        if reference is None
        else _placed(reference, unfrozen(arrays, param_layouts), mesh),
    )


def placed_params(arrays: Any, rules: Rules, mesh: Mesh) -> Any:
    """The parameters of an abstract state."""
    return _placed(arrays, layout_tree(arrays, rules, mesh=mesh), mesh)


def _placed(arrays: Any, layouts: Any, mesh: Mesh) -> Any:
    nontrivial = nontrivial_axes(mesh.shape)

    def placed(leaf: Any, layout: Layout) -> jax.ShapeDtypeStruct:
        parts = (math.prod(mesh.shape[axis] for axis in axes) for axes in layout.axes)
        shape = tuple(map(round_up, leaf.shape, parts))
        sharding = NamedSharding(mesh, drop_trivial_axes(P(*layout.axes), nontrivial))
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(placed, arrays, layouts)


def unpadded_arrays(arrays: Any) -> Any:
    """The abstract parameters without padding, as checkpoints hold and optimizers see them."""
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.unpadded_shape, spec.dtype), arrays)


def stored_state(
    arrays: Any, target: TrainState, optimizer: optax.GradientTransformation
) -> TrainState:
    """The abstract state `target` as a checkpoint holds it: without padding.

    Of a model with an adapter it is the adapter; what is frozen can be read again.
    """
    target, params = saved_part(target), saved_params(unpadded_arrays(arrays))
    moments = jax.eval_shape(optimizer.init, unpadded_arrays(trained_specs(arrays)))

    def without(tree: Any, unpadded: Any) -> Any:
        return jax.tree.map(lambda padded, leaf: stored(padded, leaf.shape), tree, unpadded)

    return dataclasses.replace(
        target,
        params=without(target.params, params),
        optimizer=without(target.optimizer, moments),
    )


def saved_params(params: Any) -> Any:
    """What a checkpoint holds of the parameters: the adapter if they have one, else all."""
    return {ADAPTER: params[ADAPTER]} if ADAPTER in params else params


def saved_part(state: TrainState) -> TrainState:
    """What a checkpoint holds of the state."""
    return dataclasses.replace(state, params=saved_params(state.params), reference=None)


def new_state(
    arrays: Any,
    target: TrainState,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    seed: int = 0,
    params: Any = None,
) -> TrainState:
    """The first state, every array created where it lies; `params` in place of random ones."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, target)

    def first_moments(params: Any) -> Any:
        trained = unpadded_arrays(trained_specs(arrays))
        moments = optimizer.init(resized_like(trained_part(arrays, params), trained))
        return resized_like(moments, target.optimizer)

    with jax.set_mesh(mesh):
        if params is None:
            params = create(arrays, shardings.params, seed)
        start = jax.sharding.auto_axes(first_moments, out_sharding=shardings.optimizer)
        moments = jax.jit(start, out_shardings=shardings.optimizer)(params)
        zero = [jax.device_put(jnp.zeros((), jnp.int32), shardings.step) for _ in range(3)]
    state = TrainState(zero[0], params, moments, zero[1], zero[2])
    return with_reference(arrays, target, state, params)


def with_reference(arrays: Any, target: TrainState, state: TrainState, first: Any) -> TrainState:
    """The state with a frozen copy of the parameters `first`, if `target` has one."""
    if target.reference is None:
        return state

    # what is copied has buffers of its own: a step donates the state
    def copied(leaf: jax.Array, wanted: Any) -> jax.Array:
        return jnp.array(leaf, wanted.dtype, copy=True)

    reference = jax.tree.map(copied, unfrozen(arrays, first), target.reference)
    return dataclasses.replace(state, reference=reference)


def params_are_finite(state: TrainState, mesh: Mesh) -> bool:
    """Whether every parameter is finite; one pass over them, the same in every process."""
    with jax.set_mesh(mesh):
        return bool(jax.device_get(_all_finite(state.params)))


@jax.jit
def _all_finite(tree: Any) -> jax.Array:
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]).all()

"""What training carries from step to step, and where each part of it lies."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.layout import Rules, create, layouts, optimizer_layouts
from meshwright.layout.layout import Layout
from meshwright.ops.exchange import narrow, wide_axes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    step: Any  # optimizer steps tried, int32: the data position
    params: Any
    optimizer: Any
    skipped: Any  # steps left out because loss or gradient was not finite
    skipped_in_a_row: Any


def abstract_state(
    arrays: Any, rules: Rules, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """The state described: jax.ShapeDtypeStructs, each with its sharding on the mesh.

    Optimizer state lies with its parameter. Axes of one device are left out, as in the forward's
    types.
    """
    wide = wide_axes(mesh.shape)
    described = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), arrays)
    param_layouts = layouts(arrays, rules, mesh=mesh)
    moments = jax.eval_shape(optimizer.init, described)
    moment_layouts = optimizer_layouts(moments, described, param_layouts)

    def placed(leaf: Any, layout: Layout) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, narrow(P(*layout.axes), wide))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    counter = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    return TrainState(
        step=counter,
        params=jax.tree.map(placed, described, param_layouts),
        optimizer=jax.tree.map(placed, moments, moment_layouts),
        skipped=counter,
        skipped_in_a_row=counter,
    )


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
    with jax.set_mesh(mesh):
        if params is None:
            params = create(arrays, shardings.params, seed)
        start = jax.sharding.auto_axes(optimizer.init, out_sharding=shardings.optimizer)
        moments = jax.jit(start, out_shardings=shardings.optimizer)(params)
        zero = [jax.device_put(jnp.zeros((), jnp.int32), shardings.step) for _ in range(3)]
    return TrainState(zero[0], params, moments, zero[1], zero[2])


def params_are_finite(state: TrainState, mesh: Mesh) -> bool:
    """Whether every parameter is finite; one pass over them, the same in every process."""
    with jax.set_mesh(mesh):
        return bool(jax.device_get(_all_finite(state.params)))


@jax.jit
def _all_finite(tree: Any) -> jax.Array:
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]).all()

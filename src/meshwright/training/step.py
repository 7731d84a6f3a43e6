"""One optimizer step, as one compiled program: micro-batches, gradients, the update.

functions = step_functions(config, compute, optimizer, rate, mesh)
state, report = functions.train(state, batch)

A batch with `cotangents` is trained on a loss of its targets' log-probabilities that is computed
elsewhere, as in RL: they are its gradient, and the step carries it through the model (policy.py).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightError
from meshwright.layouts import ArraySpec, resized_like
from meshwright.models import (
    ADAPTER,
    DROPOUT,
    Compute,
    LossConfig,
    LossSums,
    Metric,
    family_of,
    sequence_noise,
    target_count,
    target_weight,
)
from meshwright.ops import COMPILER_OPTIONS as FP8_OPTIONS
from meshwright.ops import current_platform, group_alignment
from meshwright.training.compute import check_balance
from meshwright.training.config import DpoConfig
from meshwright.training.dpo import dpo_loss, pair_count, reference_params, with_answers
from meshwright.training.run.summary import EXPERT_LOADS
from meshwright.training.state import TrainState
from meshwright.training.tpu import compiler_options
from meshwright.training.trainable import (
    trained_part,
    trained_specs,
    unfrozen,
    with_trained,
    with_unfrozen,
)

# tokens, targets, segments, positions, maybe weights: [micro-batches, sequences, length]
Batch = dict[str, jax.Array]
Report = dict[str, jax.Array]
Metrics = dict[str, Metric]
COTANGENTS = "cotangents"  # the gradient of a loss by the log-probability of each target
# what a step reports of itself; the other names of a report are metrics of the model's loss
STEP_VALUES = frozenset(
    {"total_loss", "gradient_norm", "learning_rate", "tokens", "skipped", "skipped_in_a_row"}
) | {"keys_seen", EXPERT_LOADS}


@dataclasses.dataclass(frozen=True)
class MeshFunction:
    """A jitted function that runs and lowers with its current mesh."""

    jitted: Any
    mesh: Mesh

    def __call__(self, *arguments: Any) -> Any:
        with jax.set_mesh(self.mesh):
            return self.jitted(*arguments)

    def lower(self, *arguments: Any) -> Any:
        """As jax.jit's: arguments may be abstract."""
        with jax.set_mesh(self.mesh):
            if jax.default_backend() != "gpu" and self.mesh.devices.flat[0].platform != "cpu":
                return self._lower_for_absent(arguments)
            return self.jitted.lower(*arguments)

    def _lower_for_absent(self, arguments: tuple[Any, ...]) -> Any:
        """A GPU that is not here must be named; a TPU is known by its devices."""
        traced = self.jitted.trace(*arguments)
        gpu = self.mesh.devices.flat[0].platform in ("gpu", "cuda")
        return traced.lower(lowering_platforms=("cuda",)) if gpu else traced.lower()


@dataclasses.dataclass(frozen=True)
class StepFunctions:
    train: MeshFunction  # (TrainState, Batch) to (TrainState, Report); the state is donated
    evaluate: MeshFunction  # (params, Batch, maybe reference) to sum and count of each metric
    log_probs: MeshFunction  # (params, Batch) to those of the targets, 0 where there is none
    batch_sharding: NamedSharding  # of every array of a batch


def step_functions(
    config: Any,
    compute: Compute,
    optimizer: optax.GradientTransformation,
    rate: Callable[[Any], Any],
    mesh: Mesh,
    *,
    loss: LossConfig | None = None,
    clip_norm: float | None = 1.0,
    overlap: bool = False,
    arrays: Any = None,
    dpo: DpoConfig | None = None,
) -> StepFunctions:
    """The functions of a run on one mesh; they compile on first use.

    `arrays` are the ArraySpecs of the parameters, with what is trained; by default all is. With
    `dpo` the loss is that of pairs, not of next tokens.
    """
    family = family_of(config)
    settings = LossConfig() if loss is None else loss
    arrays = family.arrays(config) if arrays is None else arrays
    if settings.balance_bias:
        kept_by = "LoRA" if ADAPTER in arrays else "DPO" if dpo is not None else ""
        check_balance(arrays, settings.balance_bias, kept_by)
    with jax.set_mesh(mesh):
        tokens = compute.layouts.tokens

    def loss_of(params: Any, reference: Any, part: Batch, scale: jax.Array) -> LossSums:
        if dpo is None:
            return family.loss(params, part, scale, config, compute, settings)
        assert family.log_probs is not None  # or dpo is none of its objectives
        with jax.named_scope("reference"):
            frozen = reference_params(arrays, params, reference)
            by_reference = family.log_probs(frozen, part, config, compute, settings)
        log_probs = family.log_probs(params, part, config, compute, settings)
        return dpo_loss(log_probs, by_reference, part, scale, dpo)

    def train(state: TrainState, batch: Batch) -> tuple[TrainState, Report]:
        def total_of(params: Any, part: Batch, scale: jax.Array) -> tuple[jax.Array, Any]:
            sums = loss_of(params, state.reference, part, scale)
            return sums.total(scale), (sums.reported, sums.chosen)

        counted = target_count(batch["targets"])
        batch = batch if dpo is None else with_answers(batch)
        divided_by = counted if dpo is None else pair_count(batch)
        scale = 1.0 / jnp.maximum(divided_by, 1).astype(jnp.float32)
        if COTANGENTS in batch:
            batch = _weighted_by_cotangents(batch, settings, counted)
        else:
            batch = _with_mean_weight_one(batch, counted)
        if compute.dropout:
            shape = batch["tokens"].shape[:2]
            batch = batch | {DROPOUT: sequence_noise(compute.seed, state.step, shape)}
        params = cast_matrices(state.params, arrays, compute.dtype)
        sums, gradient = _over_micro_batches(total_of, params, arrays, batch, scale)
        total, (metrics, chosen) = sums
        trained = trained_part(arrays, state.params)
        by_layer = _written_by_layer(arrays, compute)
        gradient = _written_once(gradient, by_layer)
        gradient = jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, trained)
        norm = _global_norm(gradient, by_layer)
        ok = jnp.isfinite(total) & jnp.isfinite(norm)
        if clip_norm is not None:
            factor = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12))
            gradient = jax.tree.map(lambda g: g * factor.astype(g.dtype), gradient)
        new_params, new_moments = _update(
            optimizer, gradient, trained, state.optimizer, trained_specs(arrays)
        )

        def keep(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(ok, new, old)

        params = with_trained(arrays, state.params, jax.tree.map(keep, new_params, trained))
        if settings.balance_bias:
            params = _balanced(arrays, params, chosen, jnp.where(ok, settings.balance_bias, 0.0))
        new = TrainState(
            step=state.step + 1,
            params=params,
            optimizer=jax.tree.map(keep, new_moments, state.optimizer),
            skipped=state.skipped + (1 - ok.astype(jnp.int32)),
            skipped_in_a_row=jnp.where(ok, 0, state.skipped_in_a_row + 1),
            reference=state.reference,
        )
        report = {
            **_means(metrics, scale),
            "total_loss": total,
            "gradient_norm": norm,
            "learning_rate": _rate_at(rate, state.step - state.skipped),
            "tokens": counted,
            "skipped": new.skipped,
            "skipped_in_a_row": new.skipped_in_a_row,
        }
        if chosen is not None:
            report[EXPERT_LOADS] = chosen / jnp.mean(chosen, axis=-1, keepdims=True)
        seen = None if family.keys_seen is None else family.keys_seen(config, batch)
        return new, report if seen is None else report | {"keys_seen": seen}

    def evaluate(params: Any, batch: Batch, reference: Any = None) -> Metrics:
        params = cast_matrices(params, arrays, compute.dtype)
        batch = batch if dpo is None else with_answers(batch)

        def add_micro_batch(carry: Any, part: Batch) -> Any:
            return jax.tree.map(jnp.add, carry, counted_metrics(part)), None

        def counted_metrics(part: Batch) -> Metrics:
            sums = loss_of(params, reference, part, jnp.float32(1))
            return {
                name: Metric(one.sum, sums.count if one.count is None else one.count)
                for name, one in sums.reported.items()
            }

        return lax.scan(add_micro_batch, _zeros_of(counted_metrics, _first(batch)), batch)[0]

    def log_probs(params: Any, batch: Batch) -> jax.Array:
        of_targets = family.log_probs
        if of_targets is None:
            raise MeshwrightError(f"models of the family {family.name} give no log-probabilities")
        params = cast_matrices(params, arrays, compute.dtype)

        def of_micro_batch(_: None, part: Batch) -> tuple[None, jax.Array]:
            return None, of_targets(params, part, config, compute, settings)

        return lax.scan(of_micro_batch, None, batch)[1]

    platform = mesh.devices.flat[0].platform
    told: dict[str, Any] = dict(compiler_options(platform, overlap))
    if compute.matmul == "fp8" and platform in ("gpu", "cuda"):
        told |= FP8_OPTIONS
    options = told or None
    return StepFunctions(
        train=MeshFunction(jax.jit(train, donate_argnums=0, compiler_options=options), mesh),
        evaluate=MeshFunction(jax.jit(evaluate, compiler_options=options), mesh),
        log_probs=MeshFunction(jax.jit(log_probs, compiler_options=options), mesh),
        batch_sharding=NamedSharding(mesh, P(None, *tokens.partitions)),
    )


def _balanced(arrays: Any, params: Any, chosen: jax.Array, speed: jax.Array) -> Any:
    """The parameters with the bias of experts that were chosen less than the average raised.

    That of the others is lowered; all by the same, whatever the difference (DeepSeek-V3, section
    2.1.2).
    """
    step = speed * jnp.sign(jnp.mean(chosen, axis=-1, keepdims=True) - chosen)

    def move(spec: ArraySpec, array: jax.Array) -> jax.Array:
        if spec.kind != "balance":
            return array
        return array + reshard(step, jax.typeof(array).sharding.spec).astype(array.dtype)

    return jax.tree.map(move, arrays, params)


def _written_once(gradient: Any, by_layer: Any) -> Any:
    """The gradient in the dtype of matmuls, on GPUs held apart from what reads it.

    The norm and the optimizer read all of it. XLA would write the float32 that they cast it to,
    which is twice the bytes.
    """
    if current_platform() not in ("gpu", "cuda"):
        return gradient
    held = jax.tree.map(lambda apart, g: None if apart else g, by_layer, gradient)
    held = lax.optimization_barrier(held)  # one for all, as the norm needs all
    return jax.tree.map(lambda apart, *pair: pair[not apart], by_layer, gradient, held)


def _written_by_layer(arrays: Any, compute: Compute) -> Any:
    """Of each trained array: whether our kernel for experts writes its gradient, layer by layer.

    XLA casts nothing within such a kernel, and reads the layers where they are: a barrier, or a
    norm of all layers together, would only make it write them again as one array.
    """
    apart = not compute.scan and not compute.layouts.weight_axes

    def by_kernel(spec: ArraySpec) -> bool:
        if not apart or spec.kind != "expert" or spec.dims[0] != "layers":
            return False
        return group_alignment(compute.dtype)[0] > 1

    return jax.tree.map(by_kernel, trained_specs(arrays))


def _before_it_is_added(gradient: Any, specs: Any) -> Any:
    """The gradient of a micro-batch, on TPUs with that of each matrix held apart from the sum.

    libtpu 0.0.42 would take the scattering out of the loop over micro-batches, which needs whole
    gradients in it, and where the scattered one is cast it fails to compile.
    """
    if current_platform() != "tpu":
        return gradient

    def hold(spec: ArraySpec, array: jax.Array) -> jax.Array:
        return lax.optimization_barrier(array) if spec.is_matrix else array

    return jax.tree.map(hold, specs, gradient)


def cast_matrices(params: Any, arrays: Any, dtype: Any) -> Any:
    """Matrices in the dtype of matmuls; norms and biases stay as they are stored."""

    def cast(spec: ArraySpec, array: jax.Array) -> jax.Array:
        return array.astype(dtype) if spec.is_cast else array

    return jax.tree.map(cast, arrays, params)


def _over_micro_batches(
    total_of: Any, params: Any, arrays: Any, batch: Batch, scale: jax.Array
) -> Any:
    """What `total_of` gives and the gradient of the trained part, over all micro-batches.

    One is not worth a loop.
    """

    def of_unfrozen(some: Any, part: Batch, scale: jax.Array) -> tuple[jax.Array, Any]:
        return total_of(with_unfrozen(arrays, params, some), part, scale)

    def value_and_gradient(params: Any, part: Batch, scale: jax.Array) -> Any:
        both = jax.value_and_grad(of_unfrozen, has_aux=True)
        value, gradient = both(unfrozen(arrays, params), part, scale)
        return value, trained_part(arrays, gradient)

    if batch["tokens"].shape[0] == 1:
        return value_and_gradient(params, _first(batch), scale)

    specs = trained_specs(arrays)

    def add_micro_batch(carry: Any, part: Batch) -> Any:
        sums, gradient = carry
        more, more_gradient = value_and_gradient(params, part, scale)
        more_gradient = _before_it_is_added(more_gradient, specs)
        gradient = jax.tree.map(lambda a, b: a + b.astype(a.dtype), gradient, more_gradient)
        return (jax.tree.map(jnp.add, sums, more), gradient), None

    # summed in float32, laid out as the parameters are kept
    trained = trained_part(arrays, params)
    nothing = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), trained)
    zeros = _zeros_of(total_of, params, _first(batch), scale)
    return lax.scan(add_micro_batch, (zeros, nothing), batch)[0]


def _with_mean_weight_one(batch: Batch, counted: jax.Array) -> Batch:
    """Weights such that a sum over targets times one over their number is the weighted mean."""
    if "weights" not in batch:
        return batch
    total = target_weight(batch["targets"], batch["weights"])
    factor = counted.astype(jnp.float32) / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    return batch | {"weights": batch["weights"] * factor}


def _weighted_by_cotangents(batch: Batch, loss: LossConfig, counted: jax.Array) -> Batch:
    """Weights with which the mean cross-entropy has the gradient that the cotangents ask for."""
    if loss.z_loss:
        raise MeshwrightError(
            f"loss.z_loss={loss.z_loss} is of next tokens, and this batch has {COTANGENTS} of its "
            "log-probabilities; use 0"
        )
    rest = {name: array for name, array in batch.items() if name != COTANGENTS}
    return rest | {"weights": -batch[COTANGENTS] * counted.astype(jnp.float32)}


def _first(batch: Batch) -> Batch:
    """The first micro-batch."""
    return {name: array[0] for name, array in batch.items()}


def _zeros_of(function: Callable[..., Any], *arguments: Any) -> Any:
    """Zeros like the sums that a function returns, which every device has."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *arguments))


def _means(metrics: Metrics, scale: jax.Array) -> Report:
    """Each metric's sum over its count; `scale` is one over the number of targets, or pairs."""
    if reserved := STEP_VALUES & metrics.keys():
        raise MeshwrightError(
            f"the loss returns a metric named {min(reserved)!r}, which each step reports itself; "
            "give it another name"
        )

    def mean(one: Metric) -> jax.Array:
        if one.count is None:
            return one.sum * scale
        return one.sum / jnp.maximum(one.count, 1).astype(one.sum.dtype)

    return {name: mean(one) for name, one in metrics.items()}


def _update(
    optimizer: optax.GradientTransformation, gradient: Any, params: Any, moments: Any, specs: Any
) -> Any:
    """The trained part and its moments after an update.

    optax is written for automatic sharding, so it runs there. It sees arrays without padding, so
    that what it takes over a whole one (a root mean square, factored moments) is the same on every
    mesh.
    """
    padded = params, moments
    kept = jax.tree.map(lambda x: jax.typeof(x).sharding, padded)
    shapes = jax.tree.map(
        lambda spec, x: jax.ShapeDtypeStruct(spec.unpadded_shape, x.dtype), specs, params
    )
    unpadded = shapes, jax.eval_shape(optimizer.init, shapes)
    # muon moves whole layers between devices itself, and types say nothing in there
    informed = optax.with_extra_args_support(optimizer)

    def update(gradient: Any, moments: Any, params: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            params, moments = resized_like((params, moments), unpadded)
            gradient = resized_like(gradient, unpadded[0])
            updates, moments = informed.update(gradient, moments, params, shardings=kept[0])
            return resized_like((optax.apply_updates(params, updates), moments), padded)

    with jax.named_scope("optimizer"):
        return jax.sharding.auto_axes(update, out_sharding=kept)(gradient, moments, params)


def _global_norm(gradient: Any, by_layer: Any) -> jax.Array:
    def parts(g: jax.Array, apart: bool) -> list[jax.Array]:
        return list(lax.split(g, (1,) * g.shape[0], axis=0)) if apart else [g]

    arrays = jax.tree.leaves(jax.tree.map(parts, gradient, by_layer))
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in arrays]
    return jnp.sqrt(sum(squares, jnp.float32(0)))


def _rate_at(rate: Callable[[Any], Any], step: jax.Array) -> jax.Array:
    with jax.numpy_dtype_promotion("standard"):
        return jnp.asarray(rate(step), jnp.float32)

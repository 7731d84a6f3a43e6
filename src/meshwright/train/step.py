"""One optimizer step, as one compiled program: micro-batches, gradients, the update.

functions = step_functions(config, compute, optimizer, rate, mesh)
state, report = functions.train(state, batch)
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightError
from meshwright.layout.padding import resized_like
from meshwright.models.decoder import (
    VECTORS,
    Compute,
    DecoderConfig,
    abstract_arrays,
    hidden_states,
    output_head,
)
from meshwright.models.decoder.sequence import row_plan
from meshwright.ops.cross_entropy import IGNORED, cross_entropy
from meshwright.ops.exchange import gather, gradients_together, platform_in_force
from meshwright.train.state import TrainState
from meshwright.train.tpu import compiler_options

Batch = dict[str, jax.Array]  # tokens, targets, segments, positions: [micro-batches, rows, length]
Report = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class LossConfig:
    z_loss: float = 0.0
    """Weight of the squared log-normalizer, which keeps logits from drifting."""
    chunk: int = 2048
    """Tokens whose logits a device holds at a time."""

    def __post_init__(self) -> None:
        if not self.z_loss >= 0:  # nan too
            raise MeshwrightError(
                f"loss.z_loss={self.z_loss} must be at least 0; 0 means no z-loss, 1e-4 is usual"
            )
        if self.chunk < 1:
            raise MeshwrightError(f"loss.chunk={self.chunk} must be at least 1")


@dataclasses.dataclass(frozen=True)
class OnMesh:
    """A jitted function that runs and lowers with its mesh in force."""

    jitted: Any
    mesh: Mesh

    def __call__(self, *arguments: Any) -> Any:
        with jax.set_mesh(self.mesh):
            return self.jitted(*arguments)

    def lower(self, *arguments: Any) -> Any:
        """As jax.jit's: arguments may be described."""
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
    train: OnMesh  # (TrainState, Batch) to (TrainState, Report); the state is donated
    evaluate: OnMesh  # (params, Batch) to Report
    batch_sharding: NamedSharding  # of every array of a batch


def step_functions(
    config: DecoderConfig,
    compute: Compute,
    optimizer: optax.GradientTransformation,
    rate: Callable[[Any], Any],
    mesh: Mesh,
    *,
    loss: LossConfig | None = None,
    clip_norm: float | None = 1.0,
    overlap: bool = False,
) -> StepFunctions:
    """The functions of a run on one mesh; they compile on first use."""
    loss = LossConfig() if loss is None else loss
    with jax.set_mesh(mesh):
        tokens = compute.layouts.tokens

    def sums(params: Any, part: Batch, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        return loss_sums(params, part, scale, config, compute, loss)

    def train(state: TrainState, batch: Batch) -> tuple[TrainState, Report]:
        counted = jnp.sum((batch["targets"] != IGNORED).astype(jnp.int32))
        scale = 1.0 / jnp.maximum(counted, 1).astype(jnp.float32)
        params = cast_matrices(state.params, compute.dtype)
        (total, entropy), gradient = _over_micro_batches(sums, params, batch, scale)
        gradient = jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, state.params)
        norm = _global_norm(gradient)
        ok = jnp.isfinite(total) & jnp.isfinite(norm)
        if clip_norm is not None:
            factor = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12))
            gradient = jax.tree.map(lambda g: g * factor.astype(g.dtype), gradient)
        new_params, new_moments = _update(optimizer, gradient, state, config)

        def keep(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(ok, new, old)

        new = TrainState(
            step=state.step + 1,
            params=jax.tree.map(keep, new_params, state.params),
            optimizer=jax.tree.map(keep, new_moments, state.optimizer),
            skipped=state.skipped + (1 - ok.astype(jnp.int32)),
            skipped_in_a_row=jnp.where(ok, 0, state.skipped_in_a_row + 1),
        )
        report = {
            "loss": entropy * scale,
            "total_loss": total,
            "gradient_norm": norm,
            "learning_rate": _rate_at(rate, state.step - state.skipped),
            "tokens": counted,
            "skipped": new.skipped,
            "skipped_in_a_row": new.skipped_in_a_row,
        }
        return new, report

    def evaluate(params: Any, batch: Batch) -> Report:
        params = cast_matrices(params, compute.dtype)

        def one(carry: Any, part: Batch) -> Any:
            _, entropy = sums(params, part, jnp.float32(1))
            counted = jnp.sum((part["targets"] != IGNORED).astype(jnp.int32))
            return (carry[0] + entropy, carry[1] + counted), None

        (entropy, counted), _ = lax.scan(one, (jnp.float32(0), jnp.int32(0)), batch)
        return {"entropy": entropy, "tokens": counted}

    options = dict(compiler_options(mesh.devices.flat[0].platform, overlap)) or None
    return StepFunctions(
        train=OnMesh(jax.jit(train, donate_argnums=0, compiler_options=options), mesh),
        evaluate=OnMesh(jax.jit(evaluate, compiler_options=options), mesh),
        batch_sharding=NamedSharding(mesh, P(None, *tokens.partitions)),
    )


def loss_sums(
    params: Any,
    part: Batch,
    scale: jax.Array,
    config: DecoderConfig,
    compute: Compute,
    loss: LossConfig,
) -> tuple[jax.Array, jax.Array]:
    """Of a micro-batch [rows, length]: `scale` times its summed loss, and the summed entropy."""
    layouts = compute.layouts
    x = hidden_states(
        params, part["tokens"], config, compute,
        segments=part.get("segments"), positions=part.get("positions"), as_arranged=True,
    )  # fmt: skip
    targets = jax.sharding.reshard(part["targets"], layouts.tokens)
    targets = row_plan(config, compute, targets.shape[1]).arranged(targets)
    with jax.named_scope("loss"):
        x, head = _hidden_and_head(x, params, config, compute)
        return cross_entropy(
            gather(x, layouts.axes(layouts.logits)),
            head,
            targets,
            scale,
            z_loss=loss.z_loss,
            chunk=loss.chunk,
            tied=config.tied_embeddings,
            vocab=config.vocab,
        )


def _hidden_and_head(x: jax.Array, params: Any, config: DecoderConfig, compute: Compute) -> Any:
    """The hidden states and the gathered output head, whose gradient is made before x's is used.

    XLA would put the matmuls of the head's gradient off until after the backward pass of all
    layers, and keep what they multiply. A head of its own has its gradient scattered first, a tied
    one after that of the embedding was added. On TPUs it is the sum in float32 that would wait:
    there this is for tied heads and for sequences split over sp. On one device there is nothing to
    scatter.
    """
    _, along = compute.layouts.tokens.partitions
    first = platform_in_force() != "tpu" or config.tied_embeddings or bool(along)
    if not compute.layouts.token_axes or not first:
        return x, output_head(params, config, compute)
    if config.tied_embeddings:
        return gradients_together(x, output_head(params, config, compute))
    x, head = gradients_together(x, params["output"])
    return x, output_head({**params, "output": head}, config, compute)


def _before_it_is_added(gradient: Any) -> Any:
    """The gradient of a micro-batch, on TPUs with that of each matrix held apart from the sum.

    libtpu 0.0.42 would take the scattering out of the loop over micro-batches, which needs whole
    gradients in it, and where the scattered one is cast it fails to compile.
    """
    if platform_in_force() != "tpu":
        return gradient

    def hold(path: Any, array: jax.Array) -> jax.Array:
        return array if path[-1].key in VECTORS else lax.optimization_barrier(array)

    return jax.tree_util.tree_map_with_path(hold, gradient)


def cast_matrices(params: Any, dtype: Any) -> Any:
    """Matrices in the dtype they are multiplied in; norms and biases stay as they are kept."""

    def cast(path: Any, array: jax.Array) -> jax.Array:
        return array if path[-1].key in VECTORS else array.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


def _over_micro_batches(sums: Any, params: Any, batch: Batch, scale: jax.Array) -> Any:
    """Loss sums and the gradient over all micro-batches; one is not worth a loop."""
    slope = jax.value_and_grad(sums, has_aux=True)
    if batch["tokens"].shape[0] == 1:
        return slope(params, {name: array[0] for name, array in batch.items()}, scale)

    def one(carry: Any, part: Batch) -> Any:
        (total, entropy), gradient = carry
        (more, more_entropy), more_gradient = slope(params, part, scale)
        more_gradient = _before_it_is_added(more_gradient)
        gradient = jax.tree.map(lambda a, b: a + b.astype(a.dtype), gradient, more_gradient)
        return ((total + more, entropy + more_entropy), gradient), None

    # summed in float32, laid out as the parameters are kept
    nothing = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
    zero = jnp.float32(0)
    return lax.scan(one, ((zero, zero), nothing), batch)[0]


def _update(
    optimizer: optax.GradientTransformation, gradient: Any, state: TrainState, config: DecoderConfig
) -> Any:
    """New parameters and moments. optax is written for automatic sharding, so it runs there.

    It sees arrays without padding, so that what it takes over a whole one (a root mean square,
    factored moments) is the same on every mesh.
    """
    kept = jax.tree.map(lambda x: jax.typeof(x).sharding, (state.params, state.optimizer))
    padded = state.params, state.optimizer
    params = jax.tree.map(
        lambda spec, x: jax.ShapeDtypeStruct(spec.shape, x.dtype),
        abstract_arrays(config), state.params,
    )  # fmt: skip
    unpadded = params, jax.eval_shape(optimizer.init, params)
    # muon moves whole layers between devices itself, and types say nothing in there
    informed = optax.with_extra_args_support(optimizer)

    def update(gradient: Any, moments: Any, params: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            params, moments = resized_like((params, moments), unpadded)
            gradient = resized_like(gradient, unpadded[0])
            updates, moments = informed.update(gradient, moments, params, shardings=kept[0])
            return resized_like((optax.apply_updates(params, updates), moments), padded)

    with jax.named_scope("optimizer"):
        return jax.sharding.auto_axes(update, out_sharding=kept)(
            gradient, state.optimizer, state.params
        )


def _global_norm(tree: Any) -> jax.Array:
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.float32(0)))


def _rate_at(rate: Callable[[Any], Any], step: jax.Array) -> jax.Array:
    with jax.numpy_dtype_promotion("standard"):
        return jnp.asarray(rate(step), jnp.float32)

"""The abstract step of a run on any mesh: its functions and abstract arguments, and no data.

    step = abstract_step(TrainConfig("llama-3.1-8b", batch=64, seq=8192), mesh)
    compiled = step.lower().compile()

The devices of the mesh may be of a machine that is not here. The step is the one `train` would run
there: the same settings, the same checks, and the platform's own dtype and attention kernel.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from meshwright.errors import MeshwrightError
from meshwright.layouts import Rules
from meshwright.models import Compute, override, padded_vocab
from meshwright.training.compute import compute_of, known_chip
from meshwright.training.config import DPO, TrainConfig
from meshwright.training.dpo import copied_arrays
from meshwright.training.optimizer import make_optimizer
from meshwright.training.setup import (
    accepted_meshes,
    check_sizes,
    choose_rules,
    field_lengths,
    held_arrays,
    model_of,
    training_arrays,
    training_mesh,
)
from meshwright.training.state import TrainState, abstract_state
from meshwright.training.step import StepFunctions, step_functions
from meshwright.training.tpu import overlap_choice
from meshwright.training.work import StepWork, frozen_weights


@dataclasses.dataclass(frozen=True)
class AbstractStep:
    """A step and what it takes, all of it abstract."""

    config: TrainConfig
    model: Any  # its config
    mesh: Mesh
    rules: Rules
    compute: Compute
    arrays: Any  # ArraySpecs of the parameters, with what is trained
    unquantized: Any  # the same before frozen matrices are quantized
    optimizer: Any
    functions: StepFunctions
    state: TrainState  # jax.ShapeDtypeStructs with shardings
    batch: dict[str, jax.ShapeDtypeStruct]  # [micro-batches, sequences, length]
    attention: str | None  # how it is split over sp, and a kernel that is slow, in words

    @property
    def work(self) -> StepWork:
        """The FLOPs of a step."""
        lengths = {name: field.shape[2] for name, field in self.batch.items()}
        alone = "encoder_tokens" not in lengths
        frozen = frozen_weights(self.unquantized) if alone else 0
        return StepWork(self.model, lengths, frozen, self.config.objective == DPO)

    def lower(self) -> Any:
        """The train step, lowered for the mesh's platform; `.compile()` compiles it."""
        return self.functions.train.lower(self.state, self.batch)


def abstract_step(config: TrainConfig, mesh: Mesh | None = None, model: Any = None) -> AbstractStep:
    """The step of these settings on `mesh` (default: `config.mesh` over the devices here).

    `model` takes the place of the one `config.model` names: one with fewer layers, say. Mistakes
    are found as `train` finds them; those of data, weights and trackers are not looked for.
    """
    if config.backend != "jax":
        raise MeshwrightError(
            f"this is about the compiled step of the JAX backend, and backend is {config.backend}; "
            "leave it out. `plan --backend torch` predicts the step of PyTorch"
        )
    model = model_of(config) if model is None else override(model, config.override, config.seq)
    rules = choose_rules(config, model)
    if mesh is None:
        mesh = training_mesh(config, accepts=accepted_meshes(config, model))
    if any(kind != jax.sharding.AxisType.Explicit for kind in mesh.axis_types):
        raise MeshwrightError(
            "the step runs on explicit mesh axes; make the mesh with axis_types='explicit'"
        )
    check_sizes(config, model, rules, mesh.shape)
    compute, attention = compute_of(config, model, rules, mesh)
    vocab = padded_vocab(model, rules, mesh.shape)
    unquantized = training_arrays(config, model, compute.dtype, vocab)
    arrays = held_arrays(config, unquantized)
    optimizer, rate = make_optimizer(config.optimizer, config.steps, arrays)
    overlap, _ = overlap_choice(config.compute.overlap, known_chip(mesh.devices.flat[0]))
    functions = step_functions(
        model, compute, optimizer, rate, mesh,
        loss=config.loss, clip_norm=config.optimizer.clip_norm, overlap=overlap,
        arrays=arrays, dpo=config.dpo if config.objective == DPO else None,
    )  # fmt: skip
    reference = copied_arrays(arrays, compute.dtype) if config.objective == DPO else None
    lengths = field_lengths(model, config.seq, config.objective)

    def field(length: int) -> jax.ShapeDtypeStruct:
        shape = (config.accumulation, config.batch // config.accumulation, length)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=functions.batch_sharding)

    return AbstractStep(
        config, model, mesh, rules, compute, arrays, unquantized, optimizer, functions,
        state=abstract_state(arrays, rules, optimizer, mesh, reference),
        batch={name: field(length) for name, length in lengths.items()},
        attention=attention,
    )  # fmt: skip

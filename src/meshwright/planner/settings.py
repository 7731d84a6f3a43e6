"""Between the settings of train and the planner: a config's job and choice, and a choice applied.

job = job_of(config, machine)
best = apply(config, plan(config, machine).best.choice)
"""

from collections.abc import Collection
from typing import Any, Literal

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.launch import flat_settings
from meshwright.machines import Machine
from meshwright.models import OFFLOAD, default_dtype, model_config, override
from meshwright.planner import constraints
from meshwright.planner.candidates import with_strategy
from meshwright.planner.constraints import Constraints
from meshwright.planner.result import Choice, Job
from meshwright.present import mesh_text
from meshwright.training import (
    AUTO,
    TrainConfig,
    check_fp8,
    layers_choice,
    overlap_choice,
    training_spec,
    with_settings,
)

# what is chosen with the mesh: fields of Choice, and the settings that they are
CHOSEN = {
    "accumulation": "accumulation",
    "remat": "compute.remat",
    "sequence_parallel": "compute.sequence_parallel",
    "strategy": "context_parallel",
    "mlp_chunk": "compute.mlp_chunk",
}


def setting_name(name: str, known: Collection[str]) -> str:
    """The dotted name of a setting that is given by its last part, or with `_` for the dot.

    >>> known = ("batch", "optimizer.name", "compute.remat")
    >>> [setting_name(name, known) for name in ("batch", "remat", "compute_remat", "optimizer")]
    ['batch', 'compute.remat', 'compute.remat', 'optimizer.name']
    """
    names = (name, name.replace("_", ".", 1), f"{name}.name")
    alike = [setting for setting in known if setting in names or setting.endswith(f".{name}")]
    if len(alike) == 1:
        return alike[0]
    if alike:
        raise MeshwrightError(f"setting {name!r} can be {' or '.join(alike)}; give one of them")
    short = [setting.rpartition(".")[2] for setting in known]
    raise MeshwrightError(f"there is no setting {name!r}{did_you_mean(name, [*known, *short])}")


def job_of(
    config: TrainConfig,
    machine: Machine,
    model: Any = None,
    kind: Literal["train", "serve"] = "train",
) -> Job:
    """What the planner counts with; `model` takes the place of the one that the config names."""
    if config.rules != "standard":
        raise MeshwrightError(
            f"the plan knows the standard rules; with --rules {config.rules} name the mesh"
        )
    model = model_config(config.model) if model is None else model
    model = override(model, config.override, config.seq)
    compute = config.compute
    if compute.matmul == "fp8":
        check_fp8(config, model, machine.chip)
    platform, in_torch = machine.chip.platform, config.backend == "torch"
    scan, _ = layers_choice(config, model, platform, machine.num_devices)
    overlap, _ = overlap_choice(compute.overlap, machine.chip)
    compiled = {"auto": platform == "gpu", "on": True, "off": False}[config.torch.compile]
    return Job(
        model, config.batch, config.seq, config.model, kind,
        optimizer=config.optimizer.name, moments=config.optimizer.moments,
        param_dtype=compute.param_dtype,
        dtype=default_dtype(compute.dtype, platform), loss_chunk=config.loss.chunk,
        matmul=compute.matmul, fp8_skips=compute.fp8_skips,
        scan=scan and not in_torch, overlap=overlap, attention=compute.attention,
        objective=config.objective, trainable=config.trainable,
        backend=config.backend, compiled=compiled,
        loss_parallel=config.torch.loss_parallel,
        reshard_after_forward=config.torch.reshard_after_forward,
    )  # fmt: skip


def choice_of(config: TrainConfig, job: Job, machine: Machine) -> Choice:
    """How the config says to run its job, with the strategy that `auto` is on this machine."""
    values = flat_settings(config)
    chosen = {field: values[setting] for field, setting in CHOSEN.items()}
    axes = dict(training_spec(config).resolve(machine.num_devices).axes)
    return with_strategy(job, Choice.of(**axes, **chosen), machine)


def apply(config: TrainConfig, choice: Choice) -> TrainConfig:
    """The config that runs its job as chosen."""
    changes = {setting: getattr(choice, field) for field, setting in CHOSEN.items()}
    if choice.size("sp") == 1:  # nothing for a strategy to split
        del changes["context_parallel"]
    if choice.remat == OFFLOAD:
        changes["compute.layers"] = AUTO  # which is a loop then
    mesh = choice.mesh
    if config.backend == "torch":  # which needs a data axis, and has no sp
        kept = {axis: n for axis, n in choice.sizes.items() if n > 1 or axis == "fsdp"}
        mesh = mesh_text(kept)
    whole = {"mesh": mesh, "num_partitions": None, "submesh": None}
    return with_settings(config, whole | changes)


def constraints_of(config: TrainConfig, named: Collection[str] = ()) -> Constraints:
    """What a config leaves to be chosen: the mesh, and settings that have their default value.

    Settings in `named`, by their dotted names, are kept in any case.
    """
    values, usual = flat_settings(config), flat_settings(TrainConfig(config.model))
    mesh = AUTO if config.mesh == AUTO else str(training_spec(config)).removeprefix("!")
    limits = constraints.parse(None if mesh in (AUTO, usual["mesh"]) else mesh)
    fixed = {
        field: values[setting]
        for field, setting in CHOSEN.items()
        if setting in named or values[setting] != usual[setting]
    }
    return Constraints(limits.limits, fixed)

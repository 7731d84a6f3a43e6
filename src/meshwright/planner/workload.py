"""What is planned, and the ways to run it: settings on a machine, and changes to them.

    workload = Workload.of(TrainConfig("llama-3.1-8b", batch=256, seq=4096), machine)
    best = apply(workload.config, plan(workload.config, machine).best.choice)

Settings stand in TrainConfig and EngineConfig alone: here is what follows from them on a machine.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.launch import flat_settings
from meshwright.lazy import cached_property
from meshwright.machines import Machine
from meshwright.meshes import STANDARD_AXES
from meshwright.models import OFFLOAD, default_dtype, family_of, model_config, override
from meshwright.ops import expert_capacity
from meshwright.planner.sizes import ModelSizes, StackSizes, sizes_of
from meshwright.planner.stacks import OURS, Stack, like
from meshwright.present import mesh_text
from meshwright.serving import EngineConfig
from meshwright.training import (
    AUTO,
    DPO,
    TrainConfig,
    check_experts,
    check_fp8,
    field_lengths,
    held_arrays,
    layers_choice,
    overlap_choice,
    training_arrays,
    training_spec,
    with_settings,
    without_fp8,
)

if TYPE_CHECKING:
    from meshwright.planner.step import Schedule

Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True)
class Workload:
    """A run's settings, its model and the machine: what the planner counts with."""

    config: TrainConfig  # of serving: its model, batch, seq and dtype
    machine: Machine
    model: Any  # its config, with the overrides of the settings
    engine: EngineConfig | None = None  # which serves; None: training
    imbalance: float = 1.0  # the tokens of the most loaded device's experts, over the average
    like: Stack = OURS  # whose speed is planned
    # what is the same on many machines, where they are compared (once)
    memo: dict[Any, Any] | None = dataclasses.field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        machine: Machine,
        model: Any = None,
        engine: EngineConfig | None = None,
    ) -> "Workload":
        """Checked; `model` takes the place of the one that the config names."""
        if config.rules != "standard":
            raise MeshwrightError(
                f"the plan knows the standard rules; with --rules {config.rules} name the mesh"
            )
        model = model_config(config.model) if model is None else model
        model = override(model, config.override, config.seq)
        check_experts(config, model)
        if config.compute.matmul == "fp8":
            check_fp8(config, model, machine.chip)
        if config.lora.quantizes:
            held_arrays(config, training_arrays(config, model, np.float32))  # or an error
        return cls(config, machine, model, engine)

    def resized(self, batch: int, seq: int | None = None) -> "Workload":
        """The same with another batch, and another sequence length if one is given."""
        config = dataclasses.replace(self.config, batch=batch, seq=seq or self.seq)
        return dataclasses.replace(self, config=config)

    def running_like(self, stack: str) -> "Workload":
        """The same at the speed of another stack, if one is named."""
        if not stack:
            return self
        if self.engine is not None or self.config.backend != "jax" or self.sizes.experts:
            raise MeshwrightError(
                f"--like {stack} is known of training dense models on the jax backend's meshes; "
                "leave it out"
            )
        return dataclasses.replace(
            self, like=like(stack, self.machine.chip, self.config.compute.matmul, self.seq)
        )

    def once(self, what: tuple[Any, ...], make: Callable[[], Made]) -> Made:
        """What is made once for all machines that are compared."""
        if self.memo is None:
            return make()
        if what not in self.memo:
            self.memo[what] = make()
        made: Made = self.memo[what]
        return made

    def expert_room(self, stack: StackSizes, ways: int) -> float:
        """Copies of a token that can go to the experts of one of so many devices."""
        experts, factor = stack.experts, self.config.compute.capacity
        assert experts is not None
        own = experts.count // ways
        most = min(experts.per_token, own)
        if not factor:
            return most
        length = self.lengths[stack.field]
        capacity = expert_capacity(factor, length, experts.per_token, experts.count)
        return min(most, own * capacity / length)

    def load_of_experts(self, stack: StackSizes, ways: int) -> float:
        """Tokens of the device whose experts have most, over the average: assumed, if possible."""
        assert stack.experts is not None
        most = ways * self.expert_room(stack, ways) / stack.experts.per_token
        return min(self.imbalance, max(most, 1.0))

    @property
    def kind(self) -> Literal["train", "serve"]:
        return "train" if self.engine is None else "serve"

    @cached_property
    def batch(self) -> int:
        """Sequences of an optimizer step, over all devices and micro-batches."""
        return self.config.batch

    @cached_property
    def seq(self) -> int:
        return self.config.seq

    @cached_property
    def dtype(self) -> str:
        """Of matmuls."""
        return default_dtype(self.config.compute.dtype, self.machine.chip.platform)

    @cached_property
    def param_dtype(self) -> str:
        """Of the weights; with LoRA of the frozen ones, but for those that are quantized."""
        lora = self.config.lora
        if not lora.rank:
            return self.config.compute.param_dtype
        return self.dtype if lora.base == AUTO or lora.quantizes else lora.base

    @property
    def layers_dtype(self) -> str:
        """Of the matrices of the layers."""
        return self.config.lora.base if self.config.lora.quantizes else self.param_dtype

    @cached_property
    def moments_dtype(self) -> str:
        """The dtype that the optimizer's moments are kept in."""
        moments = self.config.optimizer.moments
        return self.config.compute.param_dtype if moments == AUTO else moments

    @cached_property
    def scan(self) -> bool:
        """Whether a loop runs over the layers; that of an engine and of PyTorch is none."""
        machine = self.machine
        loops, _ = layers_choice(
            self.config, self.model, machine.chip.platform, machine.num_devices
        )
        return loops and self.schedule.scans

    @cached_property
    def overlap(self) -> bool:
        """Whether a TPU is told to all-gather weights while it computes."""
        return overlap_choice(self.config.compute.overlap, self.machine.chip)[0]

    @cached_property
    def compiled(self) -> bool:
        """Whether torch.compile takes each block and the loss."""
        is_gpu = self.machine.chip.platform == "gpu"
        return {"auto": is_gpu, "on": True, "off": False}[self.config.torch.compile]

    def data_ranks(self, choice: "Choice") -> int:
        """Devices that sequences are split over; an engine's are replicated over ep."""
        return choice.data_ranks if self.engine is None else choice.size("dp")

    def fp8_layers(self, layers: int, kind: str = "matrix", tensor: int = 1) -> int:
        """Of a stack of so many layers, those whose matmuls with this kind are in fp8."""
        compute = self.config.compute
        if compute.matmul != "fp8" or (kind == "expert" and self.experts_not_in_fp8(tensor)):
            return 0
        return max(0, layers - 2 * compute.fp8_skips)

    def experts_not_in_fp8(self, tensor: int) -> str | None:
        """Why experts, if there are some, are not multiplied in fp8, split over so many devices."""
        return without_fp8(self.config.compute, self.model, self.machine.chip, tensor)

    @cached_property
    def sizes(self) -> ModelSizes:
        """Of the model."""
        return sizes_of(self.model, self.config.trainable, self.config.lora)

    @property
    def has_reference(self) -> bool:
        """Whether a frozen model reads the batch too, as in DPO."""
        return self.engine is None and self.config.objective == DPO

    @cached_property
    def lengths(self) -> Mapping[str, int]:
        """The length of each field of a batch."""
        return field_lengths(self.model, self.seq, self.config.objective)

    @cached_property
    def flops(self) -> float:
        """Of an example, as its family counts them."""
        return float(family_of(self.model).flops(self.model, self.lengths))

    @cached_property
    def remat(self) -> Mapping[str, frozenset[str]]:
        """Remat policies of the model: the activations that each saves."""
        return self.schedule.remat(family_of(self.model).remat)

    @cached_property
    def schedule(self) -> "Schedule":
        from meshwright.planner.schedules import schedule_of  # which imports this module

        return schedule_of(self.kind, self.config.backend)

    @property
    def choice(self) -> "Choice":
        """How the config says to run it."""
        values = flat_settings(self.config)
        chosen = {field: values[setting] for field, setting in CHOSEN.items()}
        axes = dict(training_spec(self.config).resolve(self.machine.num_devices).axes)
        return Choice.of(**axes, **chosen)

    @cached_property
    def splits(self) -> dict[tuple[int, int], Any]:
        """How attention is split, by (tp, sp), as far as it was asked for (attention.splits_of)."""
        return self.once(("splits",), dict)

    @cached_property
    def kernels(self) -> dict[tuple[int, int, str], Any]:
        """The same of attention's kernels, by (tp, sp, strategy)."""
        return self.once(("kernels", self.machine.chip), dict)


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to run a workload: a mesh, and changes to the settings of the same names."""

    sizes: Mapping[str, int]  # of mesh axes, by role
    remat: str = "none"
    accumulation: int = 1
    sequence_parallel: bool = False
    context_parallel: str = "auto"  # which is not known before the machine is
    mlp_chunk: int = 0
    weights: str | None = None  # serving: int8 or fp8; None: not quantized
    cache: str | None = None  # serving: fp8; None: as activations

    @classmethod
    def of(cls, **values: Any) -> "Choice":
        """Axes that are not named have one device: `Choice.of(fsdp=8, tp=2, remat="full")`.

        An axis of experts is among them if it was named: before tp, which needs faster links.
        """
        dp, fsdp, *others = STANDARD_AXES
        order = [dp, fsdp, *(["ep"] if "ep" in values else []), *others]
        return cls({axis: values.pop(axis, 1) for axis in order}, **values)

    def __hash__(self) -> int:
        mesh = tuple(self.sizes.items())
        return hash((mesh, self.remat, self.accumulation, self.context_parallel, self.weights))

    def changed(self, **fields: Any) -> "Choice":
        other = object.__new__(Choice)  # a search makes tens of thousands
        other.__dict__.update(self.__dict__)
        other.__dict__.update(fields)
        return other

    @property
    def key(self) -> tuple[Any, ...]:
        """All of it, hashable."""
        return (
            *self.sizes.items(), self.remat, self.accumulation, self.sequence_parallel,
            self.context_parallel, self.mlp_chunk, self.weights, self.cache,
        )  # fmt: skip

    def size(self, *roles: str) -> int:
        """Devices along these axes together."""
        devices = 1
        for role in roles:
            devices *= self.sizes.get(role, 1)
        return devices

    @property
    def data_ranks(self) -> int:
        """Devices that the sequences of a batch are split over."""
        return self.size("dp", "fsdp", "ep")

    @property
    def shards(self) -> int:
        """Devices over which weights are split, and all-gathered to be used but for experts."""
        return self.size("fsdp", "sp", "ep")

    @property
    def tensor(self) -> int:
        """Devices that heads, mlp and vocabulary are split over."""
        return self.sizes["tp"]

    @property
    def context(self) -> int:
        """Devices that a sequence is split over."""
        return self.sizes["sp"]

    @property
    def devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def mesh(self) -> str:
        """As `--mesh` takes it."""
        return mesh_text(self.sizes)

    @property
    def repeats_layers(self) -> bool:
        """Whether the forward of every layer is computed again in the backward pass."""
        return self.remat in ("full", OFFLOAD)


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


ENGINE_SETTINGS = ("weights", "cache")  # what is chosen of an EngineConfig
CHOSEN = {  # what is chosen of a TrainConfig: fields of Choice, and their dotted names
    field.name: setting_name(field.name, flat_settings(TrainConfig("")))
    for field in dataclasses.fields(Choice)
    if field.name not in ("sizes", *ENGINE_SETTINGS)
}


def apply(config: TrainConfig, choice: Choice) -> TrainConfig:
    """The config that runs as chosen."""
    from meshwright.planner.schedules import schedule_of  # which imports this module

    changes = {setting: getattr(choice, field) for field, setting in CHOSEN.items()}
    if choice.context == 1:  # nothing for a strategy to split
        del changes["context_parallel"]
    if choice.remat == OFFLOAD:
        changes["compute.layers"] = AUTO  # which is a loop then
    mesh = schedule_of("train", config.backend).mesh_text(choice)
    return with_settings(config, {"mesh": mesh, "num_partitions": None, "submesh": None} | changes)

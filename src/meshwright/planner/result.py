"""What a plan says: the ways to run a job, and what each would cost. Data only.

Bytes and seconds are of one device and of one optimizer step unless a name says otherwise.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from meshwright.machines import Machine
from meshwright.meshes import STANDARD_AXES
from meshwright.models import OFFLOAD, family_of
from meshwright.planner.collective import Collective
from meshwright.planner.sizes import ModelSizes, sizes_of
from meshwright.present import mesh_text
from meshwright.training import TrainConfig, field_lengths

if TYPE_CHECKING:
    from meshwright.planner.step import Schedule

RESERVE = 0.05  # of memory


@dataclasses.dataclass(frozen=True)
class Job:
    """What the planner counts with, as settings.job_of reads it from a TrainConfig."""

    model: Any  # its config
    batch: int  # sequences of an optimizer step, over all devices and micro-batches
    seq: int
    name: str = ""  # of the model
    kind: Literal["train", "serve"] = "train"
    optimizer: str = "adamw"
    param_dtype: str = "float32"
    moments: str = "auto"  # of the optimizer: a dtype, or as the parameters
    dtype: str = "bfloat16"
    matmul: str = "auto"  # of layers: in dtype, or fp8
    fp8_skips: int = 0  # layers at each end that stay in dtype with fp8
    loss_chunk: int = 2048
    scan: bool = True
    documents: bool = True  # sequences are packed: segments and positions come with the tokens
    overlap: bool = False  # a TPU is told to gather weights while it computes
    attention: str = "auto"  # the kernel, as train's --compute.attention takes it
    objective: str = "auto"  # what it is trained on, as train's --objective takes it
    trainable: tuple[str, ...] = ()  # patterns of what is trained; none: everything
    backend: Literal["jax", "torch"] = "jax"
    compiled: bool = True  # PyTorch: torch.compile of each block and of the loss
    loss_parallel: bool = True  # PyTorch: logits stay split over tp
    reshard_after_forward: bool = True  # PyTorch: all-gather blocks again for the backward pass

    @property
    def moments_dtype(self) -> str:
        """The dtype that the optimizer's moments are kept in."""
        return self.param_dtype if self.moments == "auto" else self.moments

    def fp8_layers(self, layers: int) -> int:
        """Of a stack of so many layers, those whose matmuls are in fp8."""
        return max(0, layers - 2 * self.fp8_skips) if self.matmul == "fp8" else 0

    @functools.cached_property
    def sizes(self) -> ModelSizes:
        """Of the model."""
        return sizes_of(self.model, self.trainable)

    @functools.cached_property
    def lengths(self) -> Mapping[str, int]:
        """The length of each field of a batch."""
        return field_lengths(self.model, self.seq, self.objective)

    @functools.cached_property
    def arrays_by_length(self) -> Mapping[int, int]:
        """Arrays of a batch of each length; without documents, tokens and targets alone."""
        fields = dict(self.lengths)
        if not self.documents:
            for name in ("segments", "positions"):
                fields.pop(name, None)
        return collections.Counter(fields.values())

    @functools.cached_property
    def remat(self) -> Mapping[str, frozenset[str]]:
        """Remat policies of the model: the activations that each saves."""
        return self.schedule.remat(family_of(self.model).remat)

    @functools.cached_property
    def schedule(self) -> "Schedule":
        from meshwright.planner.schedules import schedule_of  # which imports this module

        return schedule_of(self.kind, self.backend)

    @functools.cached_property
    def splits(self) -> dict[tuple[int, int], Any]:
        """How attention is split, by (tp, sp), as far as it was asked for (parts.splits_of)."""
        return {}

    @functools.cached_property
    def kernels(self) -> dict[tuple[int, int, str, str], Any]:
        """The same of attention's kernels, by (tp, sp, strategy, chip) (planner.kernels)."""
        return {}


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to run a job: the mesh, and what is chosen with it."""

    sizes: Mapping[str, int]  # of mesh axes, by role
    remat: str = "none"
    accumulation: int = 1
    sequence_parallel: bool = False
    strategy: str = "auto"  # of attention over sp; auto is not known before the machine is
    mlp_chunk: int = 0
    weights: str | None = None  # serving: int8 or fp8; None: not quantized
    cache: str | None = None  # serving: fp8; None: as activations

    @classmethod
    def of(cls, **values: Any) -> "Choice":
        """Axes that are not named have one device: `Choice.of(fsdp=8, tp=2, remat="full")`."""
        sizes = {axis: values.pop(axis, 1) for axis in STANDARD_AXES}
        return cls(sizes, **values)

    def __hash__(self) -> int:
        return hash((self.mesh, self.remat, self.accumulation, self.strategy, self.weights))

    def size(self, *roles: str) -> int:
        """Devices along these axes together."""
        devices = 1
        for role in roles:
            devices *= self.sizes[role]
        return devices

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


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a device at the fullest moment, by kind, in the order they are shown."""

    kinds: Mapping[str, int]  # parameters, gradients, optimizer, activations …
    limit: int  # what the compiler gives out
    host: int = 0  # bytes in the memory of each host
    host_limit: int | None = None  # None: not known

    @functools.cached_property
    def total(self) -> int:
        return sum(self.kinds.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.limit and self.fits_host

    @property
    def fits_host(self) -> bool:
        return self.host_limit is None or self.host <= self.host_limit

    @property
    def reserve(self) -> int:
        """Left free for fragmentation and for what the count does not see."""
        return round(RESERVE * self.limit)

    @property
    def tight(self) -> bool:
        """It needs some of the reserve: the count's own error could tip it."""
        return self.total > self.limit - self.reserve


@dataclasses.dataclass(frozen=True)
class Serving:
    """What a choice does for requests, beside the step of the batch that was asked for."""

    first_token_seconds: float  # of a prompt of seq tokens, when no other is computed
    largest_batch: int  # sequences of seq tokens that the cache holds, over all devices
    full_step_seconds: float  # time of a token with so many

    @property
    def full_tokens_per_second(self) -> float:
        return self.largest_batch / self.full_step_seconds


@dataclasses.dataclass(frozen=True, repr=False)
class Estimate:
    """What a choice would cost."""

    choice: Choice
    memory: Memory
    flops: float  # useful ones, by the formula of DecoderConfig.flops_per_token
    computed_flops: float  # with what remat computes again
    memory_bytes: float  # read and written
    collectives: tuple[Collective, ...]
    seconds: Mapping[str, float]  # by part: matmuls, attention, elementwise, optimizer, exposed …
    step_seconds: float
    mfu: float
    bound: str  # compute, memory, or the axis whose links are waited for
    reason: str  # a sentence: why it is as fast as it is
    group: int = 0  # of choices whose times cannot be told apart, from 1; 0: not ranked by time
    serving: Serving | None = None

    @property
    def exposed(self) -> float:
        """Seconds of collectives that nothing hides."""
        return sum(one.exposed for one in self.collectives)

    def __repr__(self) -> str:
        """The choice and what it costs; every number is a field."""
        share = self.memory.total / self.memory.limit
        return (
            f"Estimate({self.choice.mesh}, remat={self.choice.remat}, accumulation="
            f"{self.choice.accumulation}: {self.step_seconds:.3g} s a step, MFU {self.mfu:.0%}, "
            f"memory {share:.0%}, bound by {self.bound})"
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Refusal:
    """A choice that cannot be, and why in a sentence."""

    choice: Choice
    why: str
    memory: Memory | None = None  # where it is memory that refuses

    def __repr__(self) -> str:
        return f"Refusal({self.choice.mesh}: {self.why})"


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The ways to run a job on a machine, the best first."""

    config: TrainConfig  # settings.apply(config, choice) runs a choice
    model: Any  # the one that the config names, before its positions are changed
    kind: Literal["train", "serve"]
    machine: Machine
    rank_by: Literal["throughput", "latency", "memory"]
    ranked: tuple[
        Estimate, ...
    ]  # one for each mesh, with the best of the rest; serving: and weights
    refused: tuple[Refusal, ...]
    largest_batch: int | None = None  # of the best mesh, at this seq
    largest_seq: int | None = None  # of the best mesh, at one sequence a device
    cost_per_hour: float | None = None  # of one chip
    warnings: tuple[str, ...] = ()  # what would keep the printed commands from running as they are

    @functools.cached_property
    def job(self) -> Job:
        from meshwright.planner.settings import job_of  # which imports this module

        return job_of(self.config, self.machine, self.model, self.kind)

    @property
    def best(self) -> Estimate:
        return self.ranked[0]

    @property
    def mesh(self) -> str:
        """The best mesh, as `--mesh` takes it."""
        return self.best.choice.mesh

    def __repr__(self) -> str:
        """What is planned and the best of it; `meshwright plan` shows it all."""
        return (
            f"Plan({self.job.name or 'a model'} on {self.machine}, batch={self.job.batch}, "
            f"seq={self.job.seq}, {self.job.kind}: {len(self.ranked)} meshes ranked, "
            f"{len(self.refused)} refused; best {self.best!r})"
        )

    def tokens_per_second(self, estimate: Estimate) -> float:
        """Of the whole machine; serving, a step makes one token of each sequence."""
        tokens = self.job.seq if self.job.kind == "train" else 1
        return self.job.batch * tokens / estimate.step_seconds

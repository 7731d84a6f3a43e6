"""What a plan says: the ways to run a workload, and what each would cost. Data only.

Bytes and seconds are of one device and of one optimizer step unless a name says otherwise.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from meshwright.audits import Collective
from meshwright.lazy import cached_property
from meshwright.machines import Machine
from meshwright.planner.goodput import LongRun
from meshwright.planner.workload import Choice, Workload
from meshwright.serving import EngineConfig
from meshwright.training import TrainConfig

RESERVE = 0.05  # of memory


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a device at the fullest moment, by kind, in the order they are shown."""

    kinds: Mapping[str, int]  # parameters, gradients, optimizer, activations …
    limit: int  # what the compiler gives out
    host: int = 0  # bytes in the memory of each host
    host_limit: int | None = None  # None: not known

    @cached_property
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

    @property
    def exhausted(self) -> bool:
        """It leaves nothing: it only fits because a compiler schedules it for memory."""
        return self.total > self.limit - 2**20


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
    flops: float  # useful ones, as ModelFamily.flops counts them
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
    """The ways to run a workload on a machine, the best first."""

    config: TrainConfig  # apply(config, choice) runs a choice
    model: Any  # the one that the config names, before its positions are changed
    engine: EngineConfig | None  # which serves; None: training
    machine: Machine
    rank_by: Literal["throughput", "fastest", "latency", "memory"]
    ranked: tuple[
        Estimate, ...
    ]  # one for each mesh, with the best of the rest; serving: and weights
    refused: tuple[Refusal, ...]
    largest_batch: int | None = None  # of the best mesh, at this seq
    largest_seq: int | None = None  # of the best mesh, at one sequence a device
    cost_per_hour: float | None = None  # of one chip
    tokens: float | None = None  # of the whole run
    long_run: LongRun = dataclasses.field(default_factory=LongRun)  # what stops it
    warnings: tuple[str, ...] = ()  # what would keep the printed commands from running as they are
    imbalance: float = 1.0  # assumed of routers, as Workload.imbalance
    like: str = ""  # the stack whose speed is planned; "": our own

    @cached_property
    def workload(self) -> Workload:
        workload = Workload.of(self.config, self.machine, self.model, self.engine)
        return dataclasses.replace(workload, imbalance=self.imbalance).running_like(self.like)

    @property
    def best(self) -> Estimate:
        return self.ranked[0]

    @property
    def mesh(self) -> str:
        """The best mesh, as `--mesh` takes it."""
        return self.best.choice.mesh

    def __str__(self) -> str:
        """The table of `meshwright plan`."""
        from meshwright.planner.report.terminal import plain_report

        return plain_report(self)

    def _repr_html_(self) -> str:
        from meshwright.planner.report.terminal import notebook

        return notebook(self)

    def __repr__(self) -> str:
        """What is planned and the best of it; print it for the table."""
        return (
            f"Plan({self.config.model or 'a model'} on {self.machine}, batch={self.config.batch}, "
            f"seq={self.config.seq}, {self.workload.kind}: {len(self.ranked)} meshes ranked, "
            f"{len(self.refused)} refused; best {self.best!r})"
        )

    def tokens_per_second(self, estimate: Estimate) -> float:
        """Of the whole machine; serving, a step makes one token of each sequence."""
        tokens = self.workload.seq if self.workload.kind == "train" else 1
        return self.workload.batch * tokens / estimate.step_seconds

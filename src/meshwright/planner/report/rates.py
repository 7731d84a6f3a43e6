"""What follows from an estimate's numbers: rates, money, the roofline, sums by axis."""

import dataclasses
import math

from meshwright.audits import wire_bytes
from meshwright.planner import efficiency
from meshwright.planner.long_run import checkpoint_bytes, data_bytes_per_second
from meshwright.planner.result import Estimate, Plan


@dataclasses.dataclass(frozen=True)
class AxisTime:
    """Seconds of a step on the links of one axis (or of several together)."""

    seconds: float
    hidden: float
    wire_bytes: float

    @property
    def exposed(self) -> float:
        return self.seconds - self.hidden


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The seconds each resource alone would need; the longest is the floor of a step."""

    compute: float  # all FLOPs at the peak of the fastest matmuls
    memory: float  # all bytes at the memory's bandwidth
    links: float  # all transfers, one after another

    @property
    def longest(self) -> str:
        return max(("compute", "memory", "links"), key=lambda name: getattr(self, name))


def peak_flops(plan: Plan) -> float:
    """Of one device, a second, in bfloat16: what MFU is a part of."""
    return efficiency.peak(plan.machine.chip)


def roof_flops(plan: Plan, estimate: Estimate) -> float:
    """Of one device, a second, in the fastest matmuls of the step."""
    in_fp8 = plan.config.compute.matmul == "fp8" or estimate.choice.weights == "fp8"
    return efficiency.peak(plan.machine.chip, "fp8" if in_fp8 else plan.workload.dtype)


def memory_bandwidth(plan: Plan) -> float:
    """Of one device, bytes a second."""
    chip = plan.machine.chip
    return chip.memory_bandwidth / chip.cores_per_chip


def link_bandwidth(plan: Plan) -> float:
    """Of all links of one device together, bytes a second in one direction."""
    chip = plan.machine.chip
    return chip.links * chip.link_bandwidth / chip.cores_per_chip


def per_chip(plan: Plan, estimate: Estimate) -> float:
    """Tokens a second and chip."""
    return plan.tokens_per_second(estimate) / plan.machine.num_chips


def cost_per_trillion(plan: Plan, estimate: Estimate) -> float | None:
    """Money for a trillion tokens; None where no price was given."""
    if plan.cost_per_hour is None:
        return None
    an_hour = plan.cost_per_hour * plan.machine.num_chips
    return an_hour / 3600 / plan.tokens_per_second(estimate) * 1e12


def checkpoint(plan: Plan) -> int | None:
    """Bytes of a checkpoint; None of serving."""
    return checkpoint_bytes(plan.workload) if plan.workload.kind == "train" else None


def data_rate(plan: Plan, estimate: Estimate) -> float | None:
    """Bytes of tokens read in a second; None of serving."""
    if plan.workload.kind == "serve":
        return None
    return data_bytes_per_second(plan.workload, plan.tokens_per_second(estimate))


@dataclasses.dataclass(frozen=True)
class RunTime:
    """A run over all its tokens."""

    goodput: float  # of the time rented
    seconds: float
    cost: float | None  # None: no price was given


def run(plan: Plan, estimate: Estimate) -> RunTime | None:
    """The run that the plan is for; None where its tokens are not known."""
    size = checkpoint(plan)
    if plan.tokens is None or size is None:
        return None
    chips = plan.machine.num_chips
    goodput = plan.long_run.goodput(chips, size)
    seconds = plan.tokens / plan.tokens_per_second(estimate) / goodput
    price = plan.cost_per_hour
    return RunTime(goodput, seconds, None if price is None else price * chips * seconds / 3600)


def roofline(plan: Plan, estimate: Estimate) -> Roofline:
    return Roofline(
        compute=estimate.computed_flops / roof_flops(plan, estimate),
        memory=estimate.memory_bytes / memory_bandwidth(plan),
        links=sum(one.seconds for one in estimate.collectives),
    )


def by_axis(estimate: Estimate) -> dict[str, AxisTime]:
    """Transfers summed by the axes they go over: `{"fsdp": …, "fsdp+sp": …}`, the longest first."""
    sums: dict[str, list[float]] = {}
    for one in estimate.collectives:
        total = sums.setdefault("+".join(one.axes), [0.0, 0.0, 0.0])
        total[0] += one.seconds
        total[1] += one.hidden
        ways = math.prod(estimate.choice.sizes[axis] for axis in one.axes)
        total[2] += one.times * wire_bytes(one.operation, one.bytes, ways)
    ordered = sorted(sums.items(), key=lambda item: -item[1][0])
    return {axes: AxisTime(*numbers) for axes, numbers in ordered}

"""The time of a step, from the compiled program instead of from the plan's own model.

    found = roofline(proof.text, step.choice.sizes, step)
    found.seconds, found.overlapped, found.tokens_per_second

Every instruction of the program takes its time in instruction_times, and every collective the bytes
that audit reads over the links of the planner. The program is then read in its order: what is
sent synchronously is waited for, what is asynchronous only as far as the compute between its start
and its done does not cover it. `overlapped` is what would be left if a layer's weights came, and
its gradients went, under that layer's compute, which the compiler's usual options do not do.
"""

import dataclasses
import re
from collections import ChainMap, defaultdict
from collections.abc import Mapping
from typing import Any

from instruction_times import Prices
from meshwright.audits import Instruction, SentCollective, collectives, read_program, trip_count
from meshwright.errors import MeshwrightError
from meshwright.planner import StepModel, over, place_axes
from meshwright.present import mesh_text

_SENDS = re.compile(
    r"(?:ragged-)?all-to-all|all-(?:gather|reduce)|reduce-scatter|collective-permute|send"
)
_HIDEABLE = ("all-gather", "reduce-scatter", "all-reduce")


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of one optimizer step on each device, and where they go."""

    compute: Mapping[str, float]  # matmuls, attention, elementwise
    exposed: Mapping[str, float]  # by axes, "fsdp" or "fsdp+sp": waited for, as compiled
    hidden: Mapping[str, float]  # by axes: under compute, as compiled
    left: Mapping[str, float]  # by axes: waited for even if those of layers are hidden
    flops: Mapping[str, float]  # matmuls, attention: with what is computed again
    tokens: int  # of a step, on all devices
    devices: int
    notes: tuple[str, ...] = ()  # what could not be priced

    @property
    def seconds(self) -> float:
        """As compiled."""
        return sum(self.compute.values()) + sum(self.exposed.values())

    @property
    def overlapped(self) -> float:
        """With a layer's all-gathers and gradient sums under its compute."""
        return sum(self.compute.values()) + sum(self.left.values())

    @property
    def tokens_per_second(self) -> float:
        """Of the whole machine, as compiled."""
        return self.tokens / self.seconds

    def data(self) -> dict[str, Any]:
        """As plain JSON data."""
        derived = ("seconds", "overlapped", "tokens_per_second")
        return {
            "compute": dict(self.compute), "exposed": dict(self.exposed),
            "hidden": dict(self.hidden), "left": dict(self.left), "flops": dict(self.flops),
            "tokens": self.tokens, "devices": self.devices, "notes": list(self.notes),
        } | {name: getattr(self, name) for name in derived}  # fmt: skip


def roofline(text: str, mesh_sizes: Mapping[str, int], step: StepModel) -> Roofline:
    """The step that a TPU program's text says; sizes are those of the mesh's axes."""
    machine, choice, workload = step.machine, step.choice, step.workload
    if not machine.is_tpu:
        raise MeshwrightError(
            f"a roofline is read from programs compiled for TPUs, which say their cycles; "
            f"'{machine}' is none"
        )
    sizes = {axis: mesh_sizes.get(axis, 1) for axis in choice.sizes}
    if sizes != choice.sizes or not set(mesh_sizes) <= set(choice.sizes):
        raise MeshwrightError(
            f"the program is for mesh '{mesh_text(mesh_sizes)}', the choice for '{choice.mesh}'; "
            "give the choice that was compiled"
        )
    timeline = _Timeline(text, mesh_sizes, step)
    ran = timeline.run(timeline.program.entry, in_loop=False)
    return Roofline(
        compute={part: ran.compute[part] for part in ("matmuls", "attention", "elementwise")},
        exposed=dict(ran.exposed),
        hidden={axes: max(seconds, 0.0) for axes, seconds in ran.hidden.items()},
        left=dict(ran.left),
        flops={part: ran.flops[part] for part in ("matmuls", "attention")},
        tokens=workload.batch * workload.seq,
        devices=choice.devices,
        notes=tuple(dict.fromkeys(timeline.notes)),
    )


Seconds = defaultdict[str, float]  # by part or by axes


def _none() -> Seconds:
    return defaultdict(float)


@dataclasses.dataclass
class _Ran:
    """One run of a computation: seconds by part and by axes."""

    compute: Seconds = dataclasses.field(default_factory=_none)
    exposed: Seconds = dataclasses.field(default_factory=_none)
    hidden: Seconds = dataclasses.field(default_factory=_none)
    left: Seconds = dataclasses.field(default_factory=_none)
    flops: Seconds = dataclasses.field(default_factory=_none)

    @property
    def seconds(self) -> float:
        return sum(self.compute.values()) + sum(self.exposed.values())

    def add(self, other: "_Ran", times: int) -> None:
        for name in ("compute", "exposed", "hidden", "left", "flops"):
            mine, theirs = getattr(self, name), getattr(other, name)
            for key, amount in theirs.items():
                mine[key] += amount * times


@dataclasses.dataclass
class _Sent:
    """A collective on its way."""

    axes: str
    seconds: float
    finish: float
    could_hide: bool


class _Timeline:
    """A device computes one thing after the other; the links of each set of axes send likewise."""

    def __init__(self, text: str, mesh: Mapping[str, int], step: StepModel) -> None:
        self.program = read_program(text)
        self.mesh = mesh
        self.placement = place_axes(step.machine, step.choice.sizes)
        self.prices = Prices(self.program, text, step)
        self.notes: list[str] = []

    def run(self, name: str, in_loop: bool) -> _Ran:
        """Go through a computation once."""
        body = self.program.computations.get(name, ())
        ran = _Ran()
        now = 0.0
        free: dict[str, float] = {}  # when the links of axes are free again
        going: dict[str, list[_Sent]] = {}  # by what its end is known by
        could_hide = _none()
        ends = self._ends(name, body)
        for position, one in enumerate(body):
            inside = self._called(name, one, in_loop)
            if inside is not None:
                ran.add(*inside)
                now += inside[0].seconds * inside[1]
                continue
            compute = self.prices.of(one, name)
            sent: list[_Sent] = []
            if self._sends(one):
                if not compute.flops and "estimated_cycles" not in one.rest:
                    compute = dataclasses.replace(compute, seconds=0.0)  # it only sends
                begun = self._begun(one)
                if begun not in going:
                    sent = [self._send(row, now, free, in_loop) for row in self._rows(one)]
                    going[begun] = sent
            for each in sent:
                could_hide[each.axes] += each.seconds * each.could_hide
            now += compute.seconds
            ran.compute[compute.part] += compute.seconds
            ran.flops[compute.part] += compute.flops
            if compute.unknown:
                self.notes.append(f"kernel {one.name}: only its bytes are counted")
            for each in [each for begun in ends.get(position, ()) for each in going.get(begun, ())]:
                waited = max(each.finish - now, 0.0)  # also for what went before it
                now += waited
                ran.exposed[each.axes] += waited
                ran.hidden[each.axes] += each.seconds - waited
                if not each.could_hide:
                    ran.left[each.axes] += waited
        room = sum(ran.compute.values())
        wanted = sum(could_hide.values())
        for axes, seconds in could_hide.items():
            ran.left[axes] += seconds * max(0.0, 1 - room / wanted) if wanted else 0.0
        return ran

    def _begun(self, one: Instruction) -> str:
        """What a collective that begins here, or continues, is known by at its end."""
        chain = self._chain(one)
        return f"chain {chain}" if chain else _meeting(one) or one.name

    def _ends(self, name: str, body: tuple[Instruction, ...]) -> dict[int, list[str]]:
        """At each place of a computation, what must have arrived after it."""
        last: dict[str, int] = {}
        alias: dict[str, str] = {}
        for position, one in enumerate(body):
            if one.operation.endswith("-update") and one.operands:
                alias[one.name] = alias.get(one.operands[0], one.operands[0])
            elif one.operation == "recv-done":
                last[_meeting(self.prices.by_name(name).get(one.operands[0]))] = position
            elif one.operation.endswith("-done") and one.operands:
                last[alias.get(one.operands[0], one.operands[0])] = position
            elif self._sends(one) and (self._chain(one) or not _is_start(one)):
                last[self._begun(one)] = position
        ends: dict[int, list[str]] = {}
        for begun, position in last.items():
            ends.setdefault(position, []).append(begun)
        return ends

    def _called(self, name: str, one: Instruction, in_loop: bool) -> tuple[_Ran, int] | None:
        """What an instruction runs that is a timeline of its own, and how often."""
        if one.operation == "while":
            trips = trip_count(self.program, name, one)
            if trips is None:
                self.notes.append(
                    f"loop {one.name}: its trip count is unknown, so it is counted once"
                )
            return self.run(one.called("body") or "", in_loop=True), 1 if trips is None else trips
        if one.operation == "call":
            return self.run(one.called("to_apply") or "", in_loop), 1
        if one.operation == "conditional" and one.branches:
            ways = [self.run(branch, in_loop) for branch in one.branches]
            return max(ways, key=lambda way: way.seconds), 1
        return None

    def _send(
        self, row: SentCollective, now: float, free: dict[str, float], in_loop: bool
    ) -> _Sent:
        names = tuple(axis for axis in self.placement.axes if axis in row.axes)
        axes = "+".join(names)
        link = over(self.placement, names)
        if link.stages is not None:
            link = link.stages[row.between_slices]
        seconds = link.seconds(row.operation, row.bytes)
        finish = max(now, free.get(axes, 0.0)) + seconds
        free[axes] = finish
        # the ends say where they come from; a layer's sums that the compiler rewrote may not
        of_layer = bool(re.search(r"[/(](attention|mlp)[/)]", row.scope)) or (
            in_loop and not row.scope
        )
        could_hide = of_layer and "tp" not in names and row.operation in _HIDEABLE
        return _Sent(axes, seconds, finish, could_hide)

    def _rows(self, one: Instruction) -> list[SentCollective]:
        """What one instruction sends, as audit reads it."""
        alone = dataclasses.replace(
            self.program, entry="one", computations=ChainMap({"one": (one,)}, _all(self.program))
        )
        return collectives(alone, self.mesh)

    def _sends(self, one: Instruction) -> bool:
        operation = one.operation.removesuffix("-start")
        if _SENDS.fullmatch(operation):
            return True
        if one.operation.endswith(("-done", "-update")):
            return False
        if one.operation not in ("fusion", "async-start", "call-start"):
            return False
        names = (one.called("calls"), one.called("called_computation"), one.called("to_apply"))
        called = next(filter(None, names), "")
        return any(map(self._sends, self.program.computations.get(called, ())))

    def _chain(self, one: Instruction) -> str:
        """Of a fusion that is one of several a collective is spread over, which that is."""
        if one.operation != "fusion":
            return ""
        for inner in self.program.computations.get(one.called("calls") or "", ()):
            found = re.search(r'\bchain_id="?(\w+)', inner.rest)
            if found and _SENDS.fullmatch(inner.operation):
                return found[1]
        return ""


def _all(program: Any) -> dict[str, tuple[Instruction, ...]]:
    computations: dict[str, tuple[Instruction, ...]] = program.computations
    return computations


def _meeting(one: Instruction | None) -> str:
    """What the send and the receive of a transfer between slices have in common."""
    found = re.search(r'_rendezvous="?([^",}]+)', one.rest) if one is not None else None
    return f"meeting {found[1]}" if found else ""


def _is_start(one: Instruction) -> bool:
    starts = one.operation.endswith("-start") or one.operation == "send"
    return starts and not re.search(r'"is_sync":\s*true', one.rest)

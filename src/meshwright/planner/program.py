"""The plan of any jax program: what a device holds, sends and computes, and how long that takes.

The program is what XLA's partitioner made of it, which is the same for every machine; the machine's
figures and the constants of planner.efficiency make seconds of it.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from meshwright.audits import (
    Audit,
    Collective,
    SentCollective,
    collectives,
    read_program,
    short_source,
)
from meshwright.machines import Chip, Machine
from meshwright.planner import efficiency
from meshwright.planner.links import over, place_axes
from meshwright.planner.program_work import Matmul, ProgramWork, program_work, with_scatters
from meshwright.planner.result import Memory
from meshwright.present import (
    Column,
    Row,
    amount,
    bytes_text,
    count,
    mesh_text,
    percent,
    seconds_text,
    table_text,
)

COLLECTIVES_SHOWN = 20


@dataclasses.dataclass(frozen=True, repr=False)
class ProgramPlan:
    """What a program would hold, send and take on a machine; of one device and one run."""

    name: str  # of the function
    machine: Machine
    mesh: Mapping[str, int]
    memory: Memory
    audit: Audit  # every collective that the partitioner put in, with its source
    collectives: tuple[Collective, ...]  # the same with links and seconds; `what` is the source
    flops: float  # of matmuls
    memory_bytes: float  # read and written
    seconds: Mapping[str, float]  # matmuls, elementwise, waiting
    notes: tuple[str, ...] = ()

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def mfu(self) -> float:
        """Of the chip's peak in bfloat16."""
        peak = efficiency.peak(self.machine.chip)
        return self.flops / (self.step_seconds * peak) if self.flops else 0.0

    @property
    def fits(self) -> bool:
        return self.memory.fits

    @property
    def bound(self) -> str:
        """The part that takes longest: compute, memory, or the axes whose links are waited for."""
        parts = {"compute": self.seconds["matmuls"], "memory": self.seconds["elementwise"]}
        for one in self.collectives:
            axes = "+".join(one.axes)
            parts[axes] = parts.get(axes, 0.0) + one.exposed
        return max(parts, key=parts.__getitem__)

    def __repr__(self) -> str:
        return f"ProgramPlan({self._headline()})"

    def __str__(self) -> str:
        """Memory, time and collectives as tables."""
        parts = [self._headline(), "", table_text(*_memory_table(self.memory))]
        parts += ["", table_text(*self.time_table)]
        if self.collectives:
            parts += ["", table_text(*_collectives_table(self))]
        return "\n".join([*parts, *(f"note: {note}" for note in self.notes)])

    @property
    def time_table(self) -> tuple[list[Column], list[Row]]:
        """Seconds of a run by part."""
        what = {
            "matmuls": f"{amount(self.flops)} FLOPs",
            "elementwise": "all else that is read and written",
            "waiting": "collectives that nothing hides",
        }
        lines = [
            Row((part, seconds_text(seconds), percent(seconds / self.step_seconds), what[part]))
            for part, seconds in self.seconds.items()
            if seconds
        ]
        columns = [Column("time", right=False), Column(""), Column(""), Column("of", right=False)]
        return columns, lines

    def _headline(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        used = f"{bytes_text(self.memory.total)} of {bytes_text(self.memory.limit)} a device"
        on = f"{self.machine} ({count(self.machine.num_devices, 'device')})"
        mesh = f", mesh {mesh_text(self.mesh)}" if self.mesh else ""
        speed = f"{seconds_text(self.step_seconds)} a run, MFU {percent(self.mfu)}"
        return f"{verdict}: {used}; {self.name} on {on}{mesh}; {speed}, bound by {self.bound}"


def plan_partitioned(
    text: str, name: str, machine: Machine, mesh: Mapping[str, int], sizes: Mapping[str, int]
) -> ProgramPlan:
    """The plan of a partitioned program's text; `sizes` are jax's of arguments and outputs."""
    on_cpu = machine.chip.platform == "cpu"  # which compiled it
    program = read_program(text) if on_cpu else with_scatters(read_program(text))
    work = program_work(program)
    inserted = tuple(collectives(program, mesh)) if mesh else ()
    sent, seconds = timed(inserted, work, machine, mesh)
    kinds = {
        "arguments": sizes["argument"],
        "outputs beside them": sizes["output"] - sizes["alias"],
        "temporaries": sizes["temp"] if on_cpu else work.temporaries,
    }
    notes = []
    if work.unsure:
        notes.append("a loop does not say how often it runs, and is counted once")
    if work.unknown:
        kernels = ", ".join(sorted(work.unknown))
        notes.append(f"the work of these kernels is not counted: {kernels}")
    return ProgramPlan(
        name, machine, mesh,
        Memory({kind: size for kind, size in kinds.items() if size}, machine.usable_memory),
        Audit(mesh, inserted, (), ()), sent, work.flops,
        work.elementwise_bytes + sum(one.bytes * one.times for one in work.matmuls),
        seconds, tuple(notes),
    )  # fmt: skip


def timed(
    inserted: Sequence[SentCollective], work: ProgramWork, machine: Machine, mesh: Mapping[str, int]
) -> tuple[tuple[Collective, ...], dict[str, float]]:
    """Collectives with their links and seconds, and the seconds of a run by part."""
    chip = machine.chip
    matmuls = sum(one.times * _matmul_seconds(chip, one) for one in work.matmuls)
    bandwidth = efficiency.MEMORY * chip.memory_bandwidth / chip.cores_per_chip
    elementwise = work.elementwise_bytes / bandwidth
    found, able = [], []
    for one in inserted:
        if not one.counted:
            continue
        link = over(place_axes(machine, mesh), one.axes)
        seconds = one.times * link.seconds(one.operation, one.bytes)
        scatters = "all-gather" if one.operation == "all-gather" else "reduce-scatter"
        hides = efficiency.hides(chip, scatters, False) if one.name in work.prefetched else 0.0
        able.append(hides * seconds)
        found.append(
            Collective(
                one.operation, one.axes, one.bytes, one.times, one.phase, one.source,
                link=link.words, seconds=seconds,
            )
        )  # fmt: skip
    room = efficiency.HIDE_MOST * (matmuls + elementwise)
    share = efficiency.hidden_share(chip, room, sum(able)) if sum(able) else 0.0
    sent = tuple(one.changed(hidden=share * most) for one, most in zip(found, able, strict=True))
    waiting = sum(one.exposed for one in sent)
    return sent, {"matmuls": matmuls, "elementwise": elementwise, "waiting": waiting}


def _matmul_seconds(chip: Chip, one: Matmul) -> float:
    names = {"f32": "float32", "f64": "float32"}
    dtype = "fp8" if one.dtype.startswith("f8") else names.get(one.dtype, "bfloat16")
    peak = efficiency.peak(chip, dtype)
    compute = one.flops / (peak * efficiency.matmul(chip, one.side))
    return max(
        compute, one.bytes * chip.cores_per_chip / (efficiency.MEMORY * chip.memory_bandwidth)
    )


def _memory_table(memory: Memory) -> tuple[list[Column], list[Row]]:
    lines = [Row((kind, bytes_text(size))) for kind, size in memory.kinds.items()]
    lines.append(Row(("in all", bytes_text(memory.total))))
    return [Column("memory of a device", right=False), Column("bytes")], lines


def _collectives_table(plan: ProgramPlan) -> tuple[list[Column], list[Row]]:
    """Those of one line of source together, the slowest first."""
    groups: dict[tuple[object, ...], list[Collective]] = {}
    for one in plan.collectives:
        key = one.what, one.operation, one.axes, one.bytes, one.phase
        groups.setdefault(key, []).append(one)
    alike = sorted(groups.values(), key=lambda ones: -sum(one.seconds for one in ones))
    lines = [
        Row(
            (
                seconds_text(sum(one.seconds for one in ones)),
                seconds_text(sum(one.exposed for one in ones)),
                f"{sum(one.times for one in ones):,}", ones[0].operation, "+".join(ones[0].axes),
                bytes_text(ones[0].bytes), str(ones[0].phase), ones[0].link,
                short_source(ones[0].what),
            )
        )
        for ones in alike[:COLLECTIVES_SHOWN]
    ]  # fmt: skip
    names = ("seconds", "waits", "times", "collective", "axes", "bytes", "phase", "link", "source")
    right = ("seconds", "waits", "times", "bytes")
    return [Column(name, right=name in right) for name in names], lines

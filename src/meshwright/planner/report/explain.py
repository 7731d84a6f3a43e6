"""One mesh of a plan with its formulas filled in: memory, work, transfers, time, roofline."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshwright.errors import MeshwrightError
from meshwright.meshes import MeshSpec
from meshwright.models import family_of
from meshwright.planner.attention import keys_seen, splits_of
from meshwright.planner.memory import formulas, peak_bytes
from meshwright.planner.memory import memory as count_memory
from meshwright.planner.report import rates
from meshwright.planner.report.phrases import settings, short_mesh
from meshwright.planner.result import (
    RESERVE,
    Estimate,
    Memory,
    Plan,
    Refusal,
    Serving,
)
from meshwright.planner.serving import second_formulas
from meshwright.planner.step import StepModel
from meshwright.planner.time import byte_formulas
from meshwright.planner.work import flops_of_example
from meshwright.planner.workload import Choice, Workload
from meshwright.present import (
    Column,
    Row,
    aligned,
    amount,
    bar,
    count,
    gib,
    paragraph,
    percent,
    seconds_text,
)
from meshwright.training import overlap_text

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

BAR = 24
SMALL = 1e-3  # of a step: transfers that are named but not listed


def find_mesh(plan: Plan, text: str) -> Estimate | Refusal:
    """The estimate or the refusal of a mesh: `fsdp=-1,tp=4`; axes that are not named are 1."""
    spec = MeshSpec.parse(text).with_standard_axes()
    sizes = dict(spec.resolve(plan.machine.num_devices, where=f"in '{plan.machine}'").axes)
    if sizes.get("ep") == 1:  # which a plan does not name
        del sizes["ep"]
    wanted = plan.workload.schedule.mesh_sizes(sizes, text)
    looked_at: list[Estimate | Refusal] = [*plan.ranked, *plan.refused]
    for one in looked_at:
        if one.choice.sizes == wanted:
            return one
    some = ", ".join(f"'{short_mesh(one.choice)}'" for one in plan.ranked[:3])
    raise MeshwrightError(
        f"mesh {text!r} was not looked at: the constraints leave it out; looked at were {some} "
        f"and {len(plan.ranked) + len(plan.refused) - min(3, len(plan.ranked)):,} more"
    )


def explain(plan: Plan, found: Estimate | Refusal, width: int = 120) -> "Group":
    """Everything about one mesh; of a refused one, why."""
    from rich.console import Group
    from rich.text import Text

    warned = [paragraph(f"warning: {one}", width, 0, hanging=2) for one in plan.warnings]
    title = Text(f"{short_mesh(found.choice)} on {plan.machine}", style="bold")
    title.append(f": {settings(found.choice, plan.workload.kind)}", style="not bold")
    parts: list[RenderableType] = [title, *warned]
    if isinstance(found, Refusal):
        parts.append(paragraph(f"refused: {found.why}", width, 0, hanging=2, style="red"))
        if found.memory is not None:
            parts += _memory(plan, found.choice, found.memory, width)
        parts.append(Text(f"the best that fits is {short_mesh(plan.best.choice)}"))
        return Group(*parts)
    parts.append(paragraph(found.reason, width, 0))
    parts += _memory(plan, found.choice, found.memory, width)
    parts += _work(plan, found, width)
    parts += _transfers(plan, found, width)
    parts += _time(plan, found, width)
    parts += _roofline(plan, found, width)
    return Group(*parts)


def _heading(text: str, more: str = "") -> "list[RenderableType]":
    from rich.text import Text

    return [Text(""), Text(text, style="bold").append(more, style="not bold dim")]


def _memory(plan: Plan, choice: Choice, memory: Memory, width: int) -> "list[RenderableType]":
    columns = [
        Column("kind", right=False),
        Column("GiB"),
        Column("", right=False, importance=1, style="cyan"),
    ]
    step = StepModel(plan.workload, choice)
    # formulas are worked out anew: they are shown where they give these numbers
    is_theirs = count_memory(step) == memory
    said = formulas(step) if is_theirs else {}
    most = max([*memory.kinds.values(), 1])
    rows = [
        Row(
            (kind, gib(number), bar(number / most, BAR)),
            note=f"{said[kind]} = {number:,}" if kind in said else "",
        )
        for kind, number in memory.kinds.items()
        if number
    ]
    rows.append(Row(("together", gib(memory.total), ""), style="bold"))
    verdict = "fits" if memory.fits else f"{gib(memory.total - memory.limit)} GiB too much"
    if not memory.fits_host:
        verdict = "the host's memory is too small"
    if memory.fits and memory.tight:
        verdict = "fits, but tight: it needs some of the reserve"
    lines = [
        f"of {gib(memory.limit)} GiB that a device gives: {percent(memory.total / memory.limit)}, "
        f"{verdict}",
        f"reserve, for fragmentation and what is not counted: {percent(RESERVE)}, "
        f"{gib(memory.reserve)} GiB",
    ]
    if memory.host:
        limit = "" if memory.host_limit is None else f" of {gib(memory.host_limit)}"
        lines.append(f"in the memory of each host: {gib(memory.host)}{limit} GiB of activations")
    if is_theirs and plan.workload.kind == "train":
        found = peak_bytes(step)
        sizes = ", ".join(f"{moment} {gib(size)}" for moment, size in found.items())
        fullest = max(found, key=lambda moment: found[moment])
        lines.append(f"moments, in GiB: {sizes}; the fullest is {fullest}")
    return [
        *_heading("memory", " of a device at the fullest moment"),
        *aligned(columns, rows, width, indent=2),
        *(paragraph(line, width, hanging=4) for line in lines),
    ]


def _work(plan: Plan, estimate: Estimate, width: int) -> "list[RenderableType]":
    workload = plan.workload
    lines = []
    if workload.kind == "train":
        lines += _flops_of_tokens(workload, estimate.choice)
        parts = flops_of_example(workload)
        example = sum(parts.values())
        if len(parts) > 1:
            terms = " ".join(
                f"{'-' if flops < 0 else '+'} {amount(abs(flops), 'FLOP')} {name}"
                for name, flops in parts.items()
            )
            lines.append(f"an example: {terms.removeprefix('+ ')} = {amount(example, 'FLOP')}")
        lines.append(
            f"a device: {amount(example, 'FLOP')} × {workload.batch:,} sequences / "
            f"{count(estimate.choice.devices, 'device')} = {amount(estimate.flops, 'FLOP')}"
        )
        again = estimate.computed_flops / estimate.flops - 1
        lines.append(
            f"computed: {amount(estimate.computed_flops, 'FLOP')}"
            + (f", {percent(again)} more: remat computes again" if again > 0.005 else "")
        )
    else:
        lines.append(f"a device: {amount(estimate.computed_flops, 'FLOP')}")
    lines.append(f"memory: {amount(estimate.memory_bytes, 'B')} read and written")
    return [*_heading("work", " of a step"), *(paragraph(line, width, hanging=4) for line in lines)]


def _flops_of_tokens(workload: Workload, choice: Choice) -> list[str]:
    """FLOPs of a training step for each token of a stack."""
    sizes, lines = workload.sizes, []
    for stack in sizes.stacks:
        weights = stack.layers * stack.met
        if stack is sizes.stacks[-1]:
            weights += sizes.dims["vocab"] * sizes.embed
        parts = [f"6 × {amount(weights)} weights"]
        for other, attention, split in splits_of(workload, choice):
            keys = split.keys or split.length
            seen = keys_seen(attention, split.length, keys)
            size = (split.head_dim + (attention.value_dim or split.head_dim)) / 2
            heads = f"{stack.layers} layers × {sizes.dims['heads']} heads × {size:g}"
            text = f"6 × {heads} × {keys:,} keys"
            if seen != keys / 2:
                text = f"12 × {heads} × {seen:,.0f} keys seen" + " on average" * (seen != keys)
            parts += [text] if other is stack else []
        name = f" of the {stack.name}" if stack.name else ""
        lines.append(f"a token{name}: {' + '.join(parts)}")
    flops = family_of(workload.model).flops(workload.model, workload.lengths)
    if len(lines) == 1:
        tokens = workload.lengths["tokens"]
        lines[0] += (
            f" = {amount(flops / tokens, 'FLOP')}, of {tokens:,} tokens {amount(flops, 'FLOP')}"
        )
    else:
        lines.append(f"an example: {amount(flops, 'FLOP')}")
    if family_of(workload.model).keys_seen is not None:
        lines.append("keys of packed documents: fewer; train's MFU counts those of each batch")
    return lines


def _transfers(plan: Plan, estimate: Estimate, width: int) -> "list[RenderableType]":
    from rich.text import Text

    lines = _heading("transfers", " of a device; the longest first")
    if not estimate.collectives:
        return [*lines, Text("  none: one device, or nothing to exchange")]
    columns = [
        Column("operation", right=False),
        Column("axes", right=False),
        Column("bytes × times"),
        Column("over", right=False, importance=1),
        Column("time"),
        Column("hidden"),
    ]
    step = StepModel(plan.workload, estimate.choice)
    texts = byte_formulas(step, estimate.collectives)
    said = dict(zip(estimate.collectives, texts, strict=True))
    ordered = sorted(estimate.collectives, key=lambda one: -one.seconds)
    large = [one for one in ordered if one.seconds >= SMALL * estimate.step_seconds] or ordered[:3]
    rows = []
    for one in large:
        share = one.hidden / one.seconds if one.seconds else 0.0
        times = f"{amount(one.bytes, 'B')} × {one.times:,}"
        cells = [one.operation, "+".join(one.axes), times, one.link, seconds_text(one.seconds)]
        what = f"{one.what}, {one.phase}" + (f": {said[one]} = {one.bytes:,}" if said[one] else "")
        rows.append(Row([*cells, percent(share)], note=what))
    lines += aligned(columns, rows, width, indent=2)
    rest = ordered[len(large) :]
    if rest:
        whats = ", ".join(dict.fromkeys(one.what for one in rest))
        together = seconds_text(sum(one.seconds for one in rest))
        lines.append(paragraph(f"and {len(rest)} small ones, {together} in all: {whats}", width))
    return lines


def _time(plan: Plan, estimate: Estimate, width: int) -> "list[RenderableType]":
    columns = [
        Column("part", right=False),
        Column("time"),
        Column("share"),
        Column("", right=False, importance=1, style="cyan"),
    ]
    step = estimate.step_seconds
    said = second_formulas(StepModel(plan.workload, estimate.choice), estimate)
    rows = [
        Row(
            (part, seconds_text(seconds), percent(seconds / step), bar(seconds / step, BAR)),
            note=said.get(part, ""),
        )
        for part, seconds in estimate.seconds.items()
        if seconds
    ]
    rows.append(Row(("step", seconds_text(step), "100%", ""), style="bold"))
    lines = [] if estimate.serving is None else _served(plan, estimate.serving, said)
    if overlaps := plan.workload.schedule.overlaps(plan.workload):
        lines.append(overlaps)
    elif plan.machine.is_tpu and plan.workload.kind == "train":
        lines.append(overlap_text(plan.config.compute.overlap, plan.machine.chip))
    return [
        *_heading("time", f" of a step; {amount(plan.tokens_per_second(estimate))} tokens/s"),
        *aligned(columns, rows, width, indent=2),
        *(paragraph(line, width, hanging=4) for line in lines),
    ]


def _served(plan: Plan, served: Serving, said: Mapping[str, str]) -> list[str]:
    prompt = f"first token of a prompt of {count(plan.workload.seq, 'token')}"
    formula = f": {said['first token']}" if "first token" in said else ""
    return [
        f"{prompt}: {seconds_text(served.first_token_seconds)}{formula}",
        f"full, with {count(served.largest_batch, 'sequence')} of {plan.workload.seq:,} tokens: "
        f"a token takes {seconds_text(served.full_step_seconds)}, "
        f"{amount(served.full_tokens_per_second)} tokens/s",
    ]


def _roofline(plan: Plan, estimate: Estimate, width: int) -> "list[RenderableType]":
    floor = rates.roofline(plan, estimate)
    peak, speed = rates.peak_flops(plan), rates.memory_bandwidth(plan)
    roof = rates.roof_flops(plan, estimate)
    intensity = estimate.computed_flops / estimate.memory_bytes if estimate.memory_bytes else 0.0
    lines = [
        f"compute: {amount(estimate.computed_flops, 'FLOP')} / {amount(roof, 'FLOP/s')} = "
        f"{seconds_text(floor.compute)}",
        f"memory: {amount(estimate.memory_bytes, 'B')} / {amount(speed, 'B/s')} = "
        f"{seconds_text(floor.memory)} ({intensity:,.0f} FLOP a byte; the chip balances at "
        f"{roof / speed:,.0f})",
        f"links: {seconds_text(floor.links)}, {seconds_text(estimate.exposed)} of it exposed",
    ]
    for axes, time in rates.by_axis(estimate).items():
        lines.append(
            f"over {axes}: {amount(time.wire_bytes, 'B')} sent in {seconds_text(time.seconds)}, "
            f"{seconds_text(time.exposed)} exposed"
        )
    useful = estimate.flops / (estimate.step_seconds * peak)
    lines.append(f"bound: {estimate.bound}; longest alone: {floor.longest}")
    lines.append(
        f"MFU: {amount(estimate.flops, 'FLOP')} / ({seconds_text(estimate.step_seconds)} × "
        f"{amount(peak, 'FLOP/s')}) = {percent(useful)}"
    )
    lines_out = [paragraph(line, width, hanging=4) for line in lines]
    return [*_heading("roofline", ": the seconds each would need alone"), *lines_out]

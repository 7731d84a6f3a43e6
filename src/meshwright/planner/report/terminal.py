"""A plan in the terminal: the ranked meshes, what was refused, and what to type next."""

import dataclasses
import io
from collections.abc import Callable
from typing import TYPE_CHECKING

from meshwright.planner.memory import least_kept
from meshwright.planner.memory import memory as count_memory
from meshwright.planner.report import rates
from meshwright.planner.report.phrases import (
    folded,
    group_headings,
    groups_of,
    meshes,
    next_commands,
    short_mesh,
)
from meshwright.planner.result import Estimate, Memory, Plan, Serving
from meshwright.planner.step import StepModel
from meshwright.planner.workload import Workload
from meshwright.present import (
    Column,
    Row,
    aligned,
    amount,
    bar,
    bytes_text,
    count,
    duration_text,
    gib,
    paragraph,
    percent,
    seconds_text,
    table_html,
    text_html,
)
from meshwright.training import with_settings

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

BAR = 10  # characters
MAIN_REASONS = 4


def report(plan: Plan, width: int = 120, *, top: int = 8, refused: bool = False) -> "Group":
    """The whole report for a terminal of `width` columns: `console.print(report(plan))`."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [*_header(plan)]
    if overlaps := plan.workload.schedule.overlaps(plan.workload):
        parts.append(paragraph(overlaps, width, 0, hanging=2, style="dim"))
    parts.append(Text(""))
    for warning in plan.warnings:
        parts += [paragraph(f"warning: {warning}", width, 0, hanging=2, style="yellow"), Text("")]
    parts += _ranked(plan, width, top)
    hidden = len(plan.ranked) - top
    if hidden > 0:
        parts.append(Text(f"… and {meshes(hidden)} after these (more: --top N)", style="dim"))
    parts += [Text(""), *_refused(plan, width, refused), *_largest(plan, width), Text("")]
    parts.append(Text("next", style="bold"))
    commands = next_commands(plan, plan.best.choice)
    parts += [Text(folded(command, width), no_wrap=True) for command in commands]
    return Group(*parts)


def _header(plan: Plan) -> "list[RenderableType]":
    from rich.text import Text

    workload, machine = plan.workload, plan.machine
    title = Text()
    title.append(workload.config.model or "a model", style="bold")
    title.append(" on ")
    title.append(str(machine), style="bold")
    chips = count(machine.num_chips, "chip")
    if machine.num_devices != machine.num_chips:
        chips += f" ({count(machine.num_devices, 'device')})"
    title.append(f": {chips}")
    rows = f"batch {workload.batch:,} × {workload.seq:,} tokens"
    if workload.kind == "train":
        rows += f" = {amount(workload.batch * workload.seq)} tokens a step"
    compute = _compute(workload, plan.best.choice.tensor)
    kept = (
        f"{_optimizer(plan)}, parameters {workload.param_dtype}, compute {compute}"
        if workload.kind == "train"
        else f"serving, weights {workload.dtype}, "
        f"KV cache {plan.best.choice.cache or workload.dtype}"
    )
    if workload.config.trainable:
        kept += f", trains {' '.join(workload.config.trainable)}"
    if rank := workload.config.lora.rank:
        kept += f", LoRA of rank {rank} on frozen weights in {workload.layers_dtype}"
    if (sizes := workload.sizes).experts is not None:
        rows += f"; {amount(sizes.parameters)} parameters, {amount(sizes.active_parameters)} active"
        rows += f", imbalance {workload.imbalance:g}" if workload.imbalance != 1 else ""
    first = "fastest first" if plan.rank_by == "fastest" else f"best {plan.rank_by} first"
    if workload.kind == "serve" and plan.rank_by == "throughput":
        first = "most tokens a second with as many sequences as fit first"
    return [title, Text(rows), Text(f"{kept}; {first}", style="dim")]


def _compute(workload: Workload, tensor: int) -> str:
    """The dtype of matmuls; with fp8, of how many layers."""
    if workload.config.compute.matmul != "fp8":
        return workload.dtype
    stacks = [stack.layers for stack in workload.sizes.stacks]
    in_fp8 = sum(map(workload.fp8_layers, stacks))
    why = workload.experts_not_in_fp8(tensor)
    but = f" but not of experts: {why}" if why else ""
    return f"{workload.dtype}, fp8 in {in_fp8} of {count(sum(stacks), 'layer')}{but}"


def _optimizer(plan: Plan) -> str:
    """Its name and, where moments are not kept like the parameters, what that saves."""
    workload, best = plan.workload, plan.best
    name = workload.config.optimizer.name
    if workload.moments_dtype == workload.param_dtype:
        return name
    config = with_settings(workload.config, {"optimizer.moments": "auto"})
    like_parameters = dataclasses.replace(workload, config=config)
    more = count_memory(StepModel(like_parameters, best.choice)).kinds["optimizer"]
    saved = more - best.memory.kinds["optimizer"]
    verb = "saves" if saved > 0 else "takes"
    return (
        f"{name} with moments in {workload.moments_dtype} ({verb} {gib(abs(saved))} GiB of a "
        f"device{'' if saved > 0 else ' more'})"
    )


def plain_report(plan: Plan, width: int = 120) -> str:
    """The report as text: what `print(plan)` shows."""
    from rich.console import Console

    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as shown:
        console.print(report(plan, width))
    return "\n".join(line.rstrip() for line in shown.get().splitlines())


def notebook(plan: Plan, top: int = 8) -> str:
    """The ranked meshes and what to type next, as HTML."""
    lines = [str(line) for line in _header(plan)]
    hidden = len(plan.ranked) - top
    more = [f"… and {meshes(hidden)} after these"] if hidden > 0 else []
    more += [f"{meshes(len(plan.refused))} refused"] if plan.refused else []
    commands = next_commands(plan, plan.best.choice)
    warnings = [f"warning: {warning}" for warning in plan.warnings]
    return (
        text_html(*lines, *warnings)
        + table_html(*_ranked_table(plan, top))
        + text_html(*more, "next:", *commands)
    )


def _ranked(plan: Plan, width: int, top: int) -> "list[RenderableType]":
    return aligned(*_ranked_table(plan, top), width)


def _ranked_table(plan: Plan, top: int) -> tuple[list[Column], list[Row]]:
    shown = _columns(plan)
    headings = group_headings(plan)
    rows = [
        Row(
            [str(rank), *(cell(one) for _, cell in shown)],
            note=one.reason,
            style="green" if rank == 1 else "",
            heading=headings.pop(one.group, ""),  # above the first of its group
        )
        for rank, one in enumerate(plan.ranked[:top], 1)
    ]
    return [Column("#"), *(column for column, _ in shown)], rows


def _columns(plan: Plan) -> list[tuple[Column, Callable[[Estimate], str]]]:
    """Each column with what stands in it; narrow terminals leave out the less important."""
    training = plan.workload.kind == "train"
    columns: list[tuple[Column, Callable[[Estimate], str]]] = [
        (Column("mesh", right=False, style="bold"), lambda one: short_mesh(one.choice))
    ]
    if training:
        columns += [
            (Column("remat", right=False), lambda one: one.choice.remat),
            (Column("micro", importance=4), lambda one: str(one.choice.accumulation)),
        ]
    if plan.best.serving is not None:
        columns += [
            (Column("weights", right=False), lambda one: one.choice.weights or plan.workload.dtype),
            (
                Column("1st token", importance=7),
                _of_serving(lambda it: seconds_text(it.first_token_seconds)),
            ),
        ]
    columns += [
        (Column("step" if training else "a token"), lambda one: seconds_text(one.step_seconds)),
        (Column("tokens/s"), lambda one: amount(plan.tokens_per_second(one))),
        (Column("a chip", importance=2), lambda one: amount(rates.per_chip(plan, one))),
    ]
    if plan.best.serving is not None:
        columns += [
            (Column("full batch", importance=7), _of_serving(lambda it: f"{it.largest_batch:,}")),
            (
                Column("tokens/s", importance=7),
                _of_serving(lambda it: amount(it.full_tokens_per_second)),
            ),
        ]
    columns += [
        (Column("MFU", importance=0 if training else 1), lambda one: percent(one.mfu)),
        (Column(f"of {gib(plan.best.memory.limit)} GiB"), lambda one: _used(one.memory)),
        (
            Column("", right=False, importance=1, style="cyan"),
            lambda one: bar(one.memory.total / one.memory.limit, BAR),
        ),
    ]
    if plan.cost_per_hour is not None:
        columns.append(
            (
                Column("cost/T", importance=5),
                lambda one: amount(rates.cost_per_trillion(plan, one) or 0.0),
            )
        )
    columns.append((Column("bound", right=False, importance=3), lambda one: one.bound))
    return columns


def _of_serving(cell: Callable[[Serving], str]) -> Callable[[Estimate], str]:
    return lambda one: "" if one.serving is None else cell(one.serving)


def _used(memory: Memory) -> str:
    """With a sign where it needs some of the reserve."""
    sign = "!" if memory.tight else ""
    return f"{gib(memory.total)} {sign + percent(memory.total / memory.limit):>4}"


def _refused(plan: Plan, width: int, all_of_them: bool) -> "list[RenderableType]":
    from rich.text import Text

    if not plan.refused:
        return [Text("no mesh was refused")]
    hint = "" if all_of_them else " (all: --refused)"
    lines: list[RenderableType] = [Text(f"{meshes(len(plan.refused))} refused{hint}", style="bold")]
    if all_of_them:
        texts = [f"{short_mesh(one.choice)}: {one.why}" for one in plan.refused]
        return lines + [paragraph(text, width, hanging=4) for text in texts]
    groups = groups_of(plan.refused)
    for members, by_memory in groups[:MAIN_REASONS]:
        first, what = members[0], "for example "
        if by_memory:  # of those that need too much, the one that needs least says most
            first = min(members, key=lambda one: one.memory.total if one.memory else 0)
            what = "for memory; the nearest is "
        what = what if len(members) > 1 else ""
        text = f"{len(members):>4}  {what}{short_mesh(first.choice)}: {first.why}"
        lines.append(paragraph(text, width, hanging=6))
    rest = sum(len(members) for members, _ in groups[MAIN_REASONS:])
    if rest:
        lines.append(paragraph(f"{rest:>4}  for other reasons", width))
    return lines


def _beside(plan: Plan) -> list[str]:
    """What a run needs beside its steps, and how long all of it takes."""
    best, size = plan.best, rates.checkpoint(plan)
    rate = rates.data_rate(plan, best)
    if size is None or rate is None:
        return []
    hosts = plan.machine.num_hosts
    of_host = -(-size // hosts) + best.memory.host
    texts = [
        f"checkpoint {bytes_text(size)}; memory of each of {count(hosts, 'host')} to write it"
        f"{' and for activations' if best.memory.host else ''} {bytes_text(of_host)}; tokens read "
        f"{bytes_text(rate)}/s"
    ]
    quick = min(plan.ranked, key=lambda one: (one.memory.tight, one.step_seconds))
    slower = best.step_seconds / quick.step_seconds - 1
    if plan.rank_by == "throughput" and slower > 0.005:
        texts.append(
            f"the first is simpler and {percent(slower)} slower than {short_mesh(quick.choice)}; "
            "--rank-by fastest puts the fastest first"
        )
    run = rates.run(plan, best)
    if run is not None:
        assert plan.tokens is not None
        stops, chips = plan.long_run, plan.machine.num_chips
        between = duration_text(stops.between_failures(chips))
        cost = "" if run.cost is None else f", ${run.cost:,.0f} at ${plan.cost_per_hour:.4g}"
        cost += " a chip and hour" if cost else ""
        texts.append(
            f"{amount(plan.tokens)} tokens: {duration_text(run.seconds)}{cost}; goodput "
            f"{100 * run.goodput:.1f}%: a failure every {between}, "
            f"{duration_text(stops.restart)} to restart, a checkpoint of "
            f"{seconds_text(stops.writing(chips, size))} every "
            f"{duration_text(stops.interval(chips, size))}"
        )
    return texts


def _largest(plan: Plan, width: int) -> "list[RenderableType]":
    mesh = short_mesh(plan.best.choice)
    training = plan.workload.kind == "train"
    parts = []
    if plan.largest_batch is not None:
        batch = f"batch {plan.largest_batch:,}" + (" in one micro-batch" if training else "")
        parts.append(f"{batch}, of {plan.workload.seq:,} tokens")
    if plan.largest_seq is not None:
        remat = least_kept(plan.workload, plan.best.choice)
        how = f", one on each data rank, with remat {remat}" if training else ", one at a time"
        longest = plan.workload.model.max_seq
        own = f" (the model's own length is {longest:,})" if plan.largest_seq > longest else ""
        parts.append(f"sequences of {plan.largest_seq:,} tokens{how}{own}")
    texts = [f"largest that fits on {mesh}: {'; '.join(parts)}"] if parts else []
    texts += _beside(plan)
    cost = rates.cost_per_trillion(plan, plan.best)
    if cost is not None and plan.tokens is None:
        days = 1e12 / plan.tokens_per_second(plan.best) / 86400
        texts.append(
            f"a trillion tokens on {mesh}: {cost:,.0f} at {plan.cost_per_hour:g} a chip and hour, "
            f"{days:,.0f} days"
        )
    return [paragraph(text, width, 0, hanging=2) for text in texts]

"""One self-contained HTML page of a plan: its table, memory, time, roofline, the machine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.meshes import mesh as build_mesh
from meshwright.planner.machines_compared import Size
from meshwright.planner.report import rates
from meshwright.planner.report.comparison import curve_cells
from meshwright.planner.report.phrases import group_headings, next_commands, settings, short_mesh
from meshwright.planner.result import Estimate, Plan
from meshwright.planner.step import StepModel
from meshwright.planner.time import byte_formulas
from meshwright.present import (
    amount,
    bytes_text,
    count,
    duration_text,
    gib,
    percent,
    render,
    seconds_text,
)

TEMPLATE = Path(__file__).with_name("plan.html")
DETAILED = 40  # meshes whose every transfer is on the page; the others' are summed by axis
PLACED = 8  # meshes that are drawn on the machine: each lists all its devices


def page(plan: Plan, sizes: Sequence[Size] = ()) -> str:
    """The page's HTML; it needs nothing from outside.

    `sizes`: other numbers of chips and batches, to slide to; those of the plan's batch are drawn.
    """
    workload = plan.workload
    title = f"{workload.config.model or 'a model'} on {plan.machine}"
    size = f"batch {workload.batch:,} × {workload.seq:,} tokens"
    about = [size, f"best {plan.rank_by} first", count(plan.machine.num_chips, "chip")]
    optimizer = workload.config.optimizer.name
    return render(
        TEMPLATE,
        title=title,
        data=page_data(plan) | {"sizes": [_size(one) for one in sizes]},
        data_sizes=bool(sizes),
        curve=curve_cells([one for one in sizes if one.batch == plan.config.batch]),
        about=" · ".join(["serving" if workload.engine else optimizer, *about]),
        summary=_summary(plan),
        warnings=plan.warnings,
    )


def page_data(plan: Plan) -> dict[str, Any]:
    """What the page draws, smaller than `plan_data`."""
    machine = plan.machine
    # the longest list first: it has the order of them all
    memories = sorted((one.memory.kinds for one in plan.ranked), key=lambda kinds: -len(kinds))
    kinds = list(dict.fromkeys(kind for kinds in memories for kind in kinds))
    parts = list(dict.fromkeys(part for one in plan.ranked for part in one.seconds))
    return {
        "machine": {
            "text": str(machine),
            "platform": machine.chip.platform,
            "grid": list(machine.grid),
            "wraps": list(machine.wraps) if machine.is_tpu else [],
            "slices": machine.slices,
        },
        "chips": machine.num_chips,
        "batch": plan.config.batch,
        "peak": rates.roof_flops(plan, plan.best),
        "memoryBandwidth": rates.memory_bandwidth(plan),
        "linkBandwidth": rates.link_bandwidth(plan),
        "axes": list(plan.best.choice.sizes),
        "kinds": kinds,
        "parts": parts,
        "groups": group_headings(plan),
        "rows": [_row(plan, i, one, kinds, parts) for i, one in enumerate(plan.ranked)],
        "refused": [
            [short_mesh(one.choice), one.why, one.memory.total if one.memory else None]
            for one in plan.refused
        ],
    }


def _size(one: Size) -> dict[str, Any]:
    return {
        "machine": str(one.machine),
        "chips": one.machine.num_chips,
        "batch": one.batch,
        "mesh": short_mesh(one.estimate.choice),
        "tokens": one.tokens_per_second,
        "mfu": one.estimate.mfu,
        "step": one.estimate.step_seconds,
    }


def _row(
    plan: Plan, rank: int, estimate: Estimate, kinds: list[str], parts: list[str]
) -> dict[str, Any]:
    choice, memory = estimate.choice, estimate.memory
    axes = rates.by_axis(estimate)
    row = {
        "rank": rank + 1,
        "group": estimate.group,
        "mesh": short_mesh(choice),
        "sizes": list(choice.sizes.values()),
        "remat": choice.remat,
        "micro": choice.accumulation,
        "settings": settings(choice, plan.workload.kind),
        "weights": choice.weights or plan.workload.dtype,
        "step": estimate.step_seconds,
        "tokens": plan.tokens_per_second(estimate),
        "chip": rates.per_chip(plan, estimate),
        "mfu": estimate.mfu,
        "memory": [memory.kinds.get(kind, 0) for kind in kinds],
        "total": memory.total,
        "limit": memory.limit,
        "bound": estimate.bound,
        "reason": estimate.reason,
        "cost": rates.cost_per_trillion(plan, estimate),
        "seconds": [estimate.seconds.get(part, 0.0) for part in parts],
        "flops": estimate.computed_flops,
        "bytes": estimate.memory_bytes,
        "sent": sum(time.wire_bytes for time in axes.values()),
        "axes": [[name, time.seconds, time.hidden, time.wire_bytes] for name, time in axes.items()],
        "next": next_commands(plan, choice),
    }
    if estimate.serving is not None:
        row |= {
            "first": estimate.serving.first_token_seconds,
            "full": estimate.serving.largest_batch,
            "fullTokens": estimate.serving.full_tokens_per_second,
        }
    if rank < DETAILED:
        step = StepModel(plan.workload, choice)
        row["transfers"] = [
            [
                f"{one.what}, {one.phase}",
                one.operation,
                "+".join(one.axes),
                one.bytes,
                one.times,
                one.link,
                one.seconds,
                one.hidden,
                formula,
            ]
            for one, formula in sorted(
                zip(estimate.collectives, byte_formulas(step, estimate.collectives), strict=True),
                key=lambda pair: -pair[0].seconds,
            )
        ]
    if rank < PLACED:
        placed = build_mesh(choice.mesh, machine=plan.machine)
        row["order"] = [device.id for device in placed.devices.flat]  # in the mesh's order
        row["extents"] = [placed.axis_extent(axis) for axis in placed.axis_names]
    return row


def _summary(plan: Plan) -> list[tuple[str, str]]:
    best = plan.best
    cells = [
        ("best mesh", short_mesh(best.choice)),
        ("step" if plan.workload.kind == "train" else "a token", seconds_text(best.step_seconds)),
        ("tokens/s", amount(plan.tokens_per_second(best))),
        ("tokens/s a chip", amount(rates.per_chip(plan, best))),
        ("MFU", percent(best.mfu)),
        (f"GiB of {gib(best.memory.limit)}", gib(best.memory.total)),
    ]
    if best.serving is not None:
        first = seconds_text(best.serving.first_token_seconds)
        cells.insert(1, ("first token", first))
    if plan.largest_batch is not None:
        training = plan.workload.kind == "train"
        cells.append(
            ("largest micro-batch" if training else "largest batch", f"{plan.largest_batch:,}")
        )
    if plan.largest_seq is not None:
        longest = plan.workload.model.max_seq
        own = f"longest (model's: {longest:,})" if plan.largest_seq > longest else ""
        cells.append((own or "longest sequence", f"{plan.largest_seq:,}"))
    cost = rates.cost_per_trillion(plan, best)
    if cost is not None:
        cells.append(("cost of 1T tokens", amount(cost)))
    size, rate = rates.checkpoint(plan), rates.data_rate(plan, best)
    if size is not None and rate is not None:
        cells += [("checkpoint", bytes_text(size)), ("data", f"{bytes_text(rate)}/s")]
    run = rates.run(plan, best)
    if run is not None:
        cells += [("time", duration_text(run.seconds)), ("goodput", percent(run.goodput))]
        cells += [("cost", amount(run.cost))] if run.cost is not None else []
    return cells

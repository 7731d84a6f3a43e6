"""Meshes for serving, ranked: the time of a first and of each further token, what fits."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

from meshwright.ops import QUANTIZED_DTYPES
from meshwright.planner import efficiency
from meshwright.planner.constraints import Constraints
from meshwright.planner.memory import largest_batch, memory, within_budget
from meshwright.planner.result import Estimate, Memory, Refusal, Serving
from meshwright.planner.schedules.engine import places
from meshwright.planner.schedules.engine_time import prefill
from meshwright.planner.search import Candidate, allowed_meshes, groups, simplicity
from meshwright.planner.step import StepModel
from meshwright.planner.terms import term
from meshwright.planner.time import step_time
from meshwright.planner.workload import Choice, Workload
from meshwright.present import GIB, count

WEIGHTS = (None, *QUANTIZED_DTYPES)  # as EngineConfig.weights


def search_serving(
    workload: Workload, limits: Constraints, rank_by: str
) -> tuple[list[Estimate], list[Refusal]]:
    """Every mesh that serves a workload, the best first, and every one that does not, with why.

    By the time of a token (latency), or by tokens a second where each mesh serves as many sequences
    as it holds (throughput), or by memory. Times that cannot be told apart are one group
    (planner/search.py). Quantized weights change what a model says, so they come after those that
    are not. What needs more memory than an engine takes by default comes last.
    """
    found: list[tuple[float, Estimate]] = []
    refused: list[Refusal] = []
    for mesh in allowed_meshes(workload, limits):
        why = workload.schedule.refusal(workload, mesh)
        if why is not None:
            refused.append(Refusal(mesh, why))
            continue
        for choice in _choices(mesh, limits):
            step = StepModel(workload, choice)
            need, weights = memory(step), choice.weights
            if not need.fits:
                why = f"needs {need.total / GIB:.1f} of {need.limit / GIB:.1f} GiB"
                why += f" with weights in {weights}" if weights else ""
                refused.append(Refusal(choice, why, need))
                continue
            one = _estimate(Candidate(step, need))
            assert one.serving is not None
            rate = one.serving.full_tokens_per_second
            found.append((1 / rate if rank_by == "throughput" else one.step_seconds, one))
    ranked: list[Estimate] = []
    for held, weights in itertools.product((True, False), WEIGHTS):
        part = [
            (seconds, one) for seconds, one in found
            if (within_budget(one.memory, workload), one.choice.weights) == (held, weights)
        ]  # fmt: skip
        ranked += _ranked(part, rank_by, ranked)
    return ranked, refused


def serves(workload: Workload, mesh: Choice, limits: Constraints) -> bool:
    """Whether a mesh is not refused."""
    if workload.schedule.refusal(workload, mesh) is not None:
        return False
    choices = _choices(mesh, limits)
    return any(memory(StepModel(workload, choice)).fits for choice in choices)


def _choices(mesh: Choice, limits: Constraints) -> Iterator[Choice]:
    """A mesh with every way to keep the weights."""
    ways = (limits.fixed["weights"],) if "weights" in limits.fixed else WEIGHTS
    for weights in ways:
        yield dataclasses.replace(mesh, weights=weights, cache=limits.fixed.get("cache"))


def _ranked(
    found: list[tuple[float, Estimate]], rank_by: str, before: list[Estimate]
) -> list[Estimate]:
    if rank_by == "memory":
        found.sort(key=lambda pair: (pair[1].memory.total, pair[0]))
        return [one for _, one in found]
    ranked: list[Estimate] = []
    first = 1 + max((one.group for one in before), default=0)
    alike = groups(found, lambda pair: pair[0], lambda pair: pair[1].memory)
    for number, (_, members) in enumerate(alike, first):
        estimates = [dataclasses.replace(one, group=number) for _, one in members]
        ranked += sorted(estimates, key=lambda one: simplicity(one.choice, one.memory))
    return ranked


def second_formulas(step: StepModel, estimate: Estimate) -> dict[str, str]:
    """By part of a decode step, and for the `first token`, how its seconds came about.

    None where the formulas of this Meshwright do not give the estimate's numbers.
    """
    served = estimate.serving
    if served is None:
        return {}
    printed = StepModel(step.workload, step.choice, term)
    links = sum(one.seconds for one in estimate.collectives)
    numbers = {**printed.schedule.seconds(printed, links), "first token": prefill(printed)}
    wanted = {**estimate.seconds, "first token": served.first_token_seconds}
    if {part: number.value for part, number in numbers.items()} != wanted:
        return {}
    return {part: str(number) for part, number in numbers.items() if number}


def _estimate(candidate: Candidate) -> Estimate:
    step, timing = candidate.step, candidate.timing
    workload, choice = step.workload, step.choice
    chip, parts, work = step.machine.chip, timing.seconds, step.work
    peak = efficiency.peak(chip, workload.dtype)
    many = places(workload, choice)
    is_compute = work.flops / (peak * efficiency.matmul(chip, many)) == parts["weights"]
    bounds = {
        "weights": "compute" if is_compute else "memory", "cache": "memory",
        "gaps between kernels": "idle", "sequences": "idle", "idle": "idle",
        "waiting for links": "+".join(step.collectives[0].axes if step.collectives else ()),
    }  # fmt: skip
    by_bound: dict[str, float] = {}
    for part, seconds in parts.items():
        by_bound[bounds[part]] = by_bound.get(bounds[part], 0.0) + seconds
    full = largest_batch(workload, choice) or workload.batch
    filled = StepModel(workload.resized(full), choice)
    served = Serving(
        first_token_seconds=prefill(step),
        largest_batch=full,
        full_step_seconds=step_time(filled).step,
    )
    bound = max(by_bound, key=lambda name: by_bound[name])
    return candidate.estimate(bound, _reason(step, candidate.memory, parts, served), served)


def _reason(step: StepModel, need: Memory, parts: Mapping[str, float], served: Serving) -> str:
    workload = step.workload

    def ms(part: str) -> str:
        return f"{1e3 * parts.get(part, 0.0):.1f}"

    rest = parts["sequences"] + parts["gaps between kernels"] + parts.get("idle", 0.0)
    kept, cache = (need.kinds[kind] / GIB for kind in ("parameters", "key-value cache"))
    reason = (
        f"a token of {count(workload.batch, 'sequence')} takes {1e3 * sum(parts.values()):.1f} ms: "
        f"weights {ms('weights')}, cache {ms('cache')}, links {ms('waiting for links')}, "
        f"launching and sampling {1e3 * rest:.1f}; weights {kept:.1f} GiB, cache {cache:.1f}; "
        f"full, with {count(served.largest_batch, 'sequence')}, "
        f"{1e3 * served.full_step_seconds:.1f} ms"
    )
    if workload.engine is not None and not within_budget(need, workload):
        part = f"{workload.engine.memory_fraction:.0%} of memory"
        reason += f"; more than the {part} that an engine takes: --engine.memory-fraction"
    if need.tight:
        reason += f"; tight: {100 * need.total / need.limit:.0f}% of memory"
    return reason if step.padding is None else f"{reason}; {step.padding}"

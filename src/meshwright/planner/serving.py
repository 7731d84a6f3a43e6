"""Serving: how long a token takes. Weights and cache are read once for each; tp adds up blocks."""

import dataclasses

from meshwright.machines import Machine
from meshwright.models import family_of
from meshwright.planner import efficiency
from meshwright.planner.candidates import meshes, refusal
from meshwright.planner.constraints import Constraints
from meshwright.planner.largest import largest_batch
from meshwright.planner.links import over
from meshwright.planner.memory import cached_tokens, memory
from meshwright.planner.parts import item_bytes, padding
from meshwright.planner.ranking import groups, simplicity
from meshwright.planner.result import Choice, Estimate, Job, Memory, Refusal, Transfer
from meshwright.planner.shares import place_axes


def serving(
    job: Job, machine: Machine, limits: Constraints, objective: str
) -> tuple[list[Estimate], list[Refusal]]:
    """Every mesh of dp and tp: weights stay where they are used, so fsdp and sp are 1.

    The best first: by the time of a token (latency), or by tokens a second where each mesh serves
    as many sequences as it holds (throughput), or by memory. Times that cannot be told apart are
    one group (planner/ranking.py). Meshes that need some of memory's reserve come last.
    """
    found: list[tuple[float, Estimate]] = []
    refused: list[Refusal] = []
    for mesh in meshes(machine.num_devices):
        if mesh.fsdp > 1 or mesh.sp > 1 or not limits.allows(mesh):
            continue
        why = refusal(job, mesh)
        if why is not None:
            refused.append(Refusal(mesh, why))
            continue
        need = memory(job, mesh, machine)
        if not need.fits:
            why = f"needs {need.total / 2**30:.1f} of {need.limit / 2**30:.1f} GiB"
            refused.append(Refusal(mesh, why, need))
            continue
        one = _estimate(job, mesh, machine, need)
        sequences, rate = _full(job, mesh, machine)
        reason = f"{one.reason}; full, with {sequences:,} sequences, {rate:,.0f} tokens/s"
        if need.tight:
            reason += f"; tight: {100 * need.total / need.limit:.0f}% of memory"
        if (padded := padding(job, mesh)) is not None:
            reason += f"; {padded}"
        seconds = 1 / rate if objective == "throughput" else one.step_seconds
        found.append((seconds, dataclasses.replace(one, reason=reason)))
    if objective == "memory":
        found.sort(key=lambda pair: (pair[1].memory.total, pair[0]))
        return [one for _, one in found], refused
    ranked: list[Estimate] = []
    alike = groups(found, lambda pair: pair[0], lambda pair: pair[1].memory)
    for number, (_, members) in enumerate(alike, 1):
        estimates = [dataclasses.replace(one, group=number) for _, one in members]
        ranked += sorted(estimates, key=lambda one: simplicity(one.choice, one.memory))
    return ranked, refused


def _full(job: Job, choice: Choice, machine: Machine) -> tuple[int, float]:
    """The sequences that a mesh holds, and the tokens a second it makes of so many."""
    sequences = largest_batch(job, choice, machine) or job.batch
    filled = dataclasses.replace(job, batch=sequences)
    need = memory(filled, choice, machine)
    return sequences, sequences / _estimate(filled, choice, machine, need).step_seconds


def _estimate(job: Job, choice: Choice, machine: Machine, need: Memory) -> Estimate:
    sizes, chip, item = job.sizes, machine.chip, item_bytes(job.dtype)
    peak = chip.bf16_flops / chip.cores_per_chip
    bandwidth = chip.memory_bandwidth / chip.cores_per_chip * efficiency.MEMORY
    sequences = job.batch // choice.dp
    matmul_weights = sizes.last_weights
    weights = item * matmul_weights / choice.tp
    numbers = sum(stack.layers * seen for stack, seen in cached_tokens(job))
    per_token = 2 * sizes.dims["kv_heads"] * sizes.dims["head_dim"]
    cache = item * numbers * per_token * sequences / choice.tp
    flops = 2.0 * matmul_weights * sequences / choice.tp
    matmuls = max(weights / bandwidth, flops / (peak * efficiency.matmul(chip, sequences)))
    sent: tuple[Transfer, ...] = ()
    if choice.tp > 1:
        link = over(place_axes(machine, (choice.dp, 1, choice.tp, 1)), ("tp",))
        size, stack = item * sequences * sizes.embed, sizes.stacks[-1]
        times = len(stack.blocks) * stack.layers
        sent = (
            Transfer(
                "sums of a layer's blocks, for each token", "all-reduce", ("tp",), size, times,
                "forward", link=link.words, seconds=times * link.seconds("all-reduce", size),
            ),
        )  # fmt: skip
    # all prompts at once: a third of a training step
    known = job.lengths
    prompt = family_of(job.model).flops(job.model, known) / 3 * sequences / choice.tp
    prefill = prompt / (peak * efficiency.matmul(chip, sequences * job.seq))
    parts = {
        "weights": matmuls,
        "cache": cache / bandwidth,
        "waiting for links": sum(one.seconds for one in sent),
    }
    step = sum(parts.values())
    bound = max(parts, key=lambda name: parts[name])
    bound = {"weights": "memory", "cache": "memory", "waiting for links": "tp"}[bound]
    return Estimate(
        choice=choice,
        memory=need,
        flops=flops,
        computed_flops=flops,
        memory_bytes=weights + cache,
        transfers=sent,
        seconds=parts,
        step_seconds=step,
        mfu=flops / step / peak,
        bound=bound,
        reason=(
            f"a token of {job.batch} sequences takes {1e3 * step:.1f} ms: weights "
            f"{1e3 * matmuls:.1f}, cache {1e3 * parts['cache']:.1f}, links "
            f"{1e3 * parts['waiting for links']:.1f}; prompts of {job.seq} tokens "
            f"{prefill:.2f} s"
        ),
    )

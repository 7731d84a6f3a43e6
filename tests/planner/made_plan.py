"""A plan made by hand: every part of it is there, and its numbers are easy to follow."""

from meshwright.audits import Collective
from meshwright.machines import Machine
from meshwright.models import preset
from meshwright.planner.result import Estimate, Memory, Plan, Refusal
from meshwright.planner.workload import Choice
from meshwright.training import TrainConfig

GIB = 2**30


def transfer(
    what: str, operation: str, axes: tuple[str, ...], size: int, times: int, **rest: object
) -> Collective:
    said = {"phase": "forward", "link": "ICI x+y, closed", "seconds": 0.02, "hidden": 0.015}
    return Collective(operation, axes, size, times, what=what, **(said | rest))  # type: ignore[arg-type]


def estimate(choice: Choice, step: float, parameters: int, bound: str, reason: str) -> Estimate:
    transfers = (
        transfer(
            "weights of a layer", "all-gather", ("fsdp",), 436_207_616, 64,
        ),
        transfer(
            "gradients of a layer", "reduce-scatter", ("fsdp",), 436_207_616, 32,
            phase="backward", seconds=0.03, hidden=0.03,
        ),
        transfer(
            "sums of a block's outputs", "all-reduce", ("tp",), 134_217_728, 128,
            link="ICI z, closed", seconds=0.1, hidden=0.0,
        ),
    )  # fmt: skip
    kept = tuple(one for one in transfers if all(choice.sizes[axis] > 1 for axis in one.axes))
    flops = 6e14
    return Estimate(
        choice=choice,
        memory=Memory(
            {
                "parameters": parameters,
                "gradients": parameters,
                "optimizer": 2 * parameters,
                "activations": 9 * GIB,
                "all-gathered weights": GIB,
                "loss": GIB // 2,
                "reserve": GIB,
            },
            limit=94 * GIB,
        ),
        flops=flops,
        computed_flops=flops * (1.33 if choice.remat == "full" else 1.0),
        memory_bytes=1.1e12,
        collectives=kept,
        seconds={"matmuls": 0.7 * step, "attention": 0.1 * step, "exposed": 0.2 * step},
        step_seconds=step,
        mfu=flops / (step * 459e12),
        bound=bound,
        reason=reason,
    )


def made_plan(cost_per_hour: float | None = 4.2) -> Plan:
    ranked = (
        estimate(
            Choice.of(fsdp=64), 2.0, 2 * GIB, "compute",
            "compute-bound: gathers of weights hide under the layers' work",
        ),
        estimate(
            Choice.of(fsdp=16, tp=4, remat="full", accumulation=2, sequence_parallel=True), 2.5, 3 * GIB, "tp",
            "tp=4 is network-bound: 4 all-reduces × 134 MB a layer over one ICI dimension",
        ),
        estimate(
            Choice.of(dp=2, fsdp=8, sp=4, remat="mlp", context_parallel="ring", mlp_chunk=4096), 2.75, 4 * GIB,
            "sp", "sp=4 waits for keys: parts of 1,024 tokens are too short to hide a hop",
        ),
    )  # fmt: skip
    too_much = Memory({"parameters": 60 * GIB, "optimizer": 60 * GIB}, limit=94 * GIB)
    refused = (
        Refusal(Choice.of(dp=64), "needs 120.0 GiB of 94.0: optimizer 60.0", too_much),
        Refusal(Choice.of(tp=16, fsdp=4), "tp=16 does not divide kv_heads=8"),
        Refusal(Choice.of(tp=32, fsdp=2), "tp=32 does not divide kv_heads=8"),
        Refusal(Choice.of(sp=64), "seq=4096 is not divisible by 128"),
    )
    return Plan(
        config=TrainConfig("llama-3.1-8b", batch=256, seq=4096),
        model=preset("llama-3.1-8b"),
        engine=None,
        machine=Machine.parse("v5p:4x4x4"),
        rank_by="throughput",
        ranked=ranked,
        refused=refused,
        largest_batch=512,
        largest_seq=262144,
        cost_per_hour=cost_per_hour,
    )

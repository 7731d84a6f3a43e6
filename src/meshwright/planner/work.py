"""What one device computes in a step, and how long that takes if nothing is waited for."""

import dataclasses
import functools

from meshwright.machines import Machine
from meshwright.ops.attention import backward_kernels
from meshwright.planner import efficiency
from meshwright.planner.candidates import with_strategy
from meshwright.planner.kernels import attention_slowdown
from meshwright.planner.parts import (
    attention_weights,
    item_bytes,
    length,
    mlp_weights,
    strategy_of,
    tokens,
    vocab,
)
from meshwright.planner.result import Choice, Job


@dataclasses.dataclass(frozen=True)
class Work:
    """Of a device and a step; seconds of layers also by pass, for sends to hide under."""

    flops: float  # useful
    computed: float  # with what remat makes again
    memory_bytes: float
    seconds: dict[str, float]  # by part
    forward: float  # seconds of the layers
    backward: float
    attention_forward: float
    attention_backward: float


def work(job: Job, choice: Choice, machine: Machine) -> Work:
    """The work of a train step on each device."""
    if choice.strategy == "auto":
        choice = with_strategy(job, choice, machine)
    model, chip = job.model, machine.chip
    peak = chip.bf16_flops / chip.cores_per_chip
    memory = chip.memory_bandwidth / chip.cores_per_chip * efficiency.MEMORY
    item, rounds, tp = item_bytes(job.dtype), choice.accumulation, choice.tp
    here = tokens(job, choice)  # of a micro-batch
    total = here * rounds

    def matmul(weights: float, side: float, passes: float) -> tuple[float, float]:
        """FLOPs and seconds of all micro-batches with these weights on a device."""
        flops = 2.0 * weights * total * passes
        rate = peak * efficiency.matmul(chip, min(side, here))
        reading = item * weights * passes * rounds / memory
        return flops, max(flops / rate, reading)

    again = _made_again(choice.remat)
    d = model.head_dim
    attended = attention_weights(model) / tp
    lifted = mlp_weights(model) / tp
    side = min(model.heads * d / tp, model.embed)
    parts = [
        (attended, side, 1.0, 2.0 + again["projections"]),
        (lifted, min(model.mlp / tp, model.embed), 1.0, 2.0 + again["mlp"]),
    ]
    computed = forward = backward = 0.0
    for weights, smallest, ahead, back in parts:
        flops, sooner = matmul(weights, smallest, ahead)
        more, later = matmul(weights, smallest, back)
        computed += model.layers * (flops + more)
        forward += model.layers * sooner
        backward += model.layers * later
    vocab_here = vocab(job, choice) / tp
    head_flops, head_seconds = matmul(vocab_here * model.embed, vocab_here, 3.0)
    computed += head_flops
    matmuls = forward + backward + head_seconds

    # attention, by the causal count: 2 forward, 4 backward
    unit = model.layers * model.heads * d / tp * 2 * model.keys_seen(job.seq) * total
    rate = peak * efficiency.attention(chip, d, job.seq)
    if strategy_of(job, choice) in ("ring", "allgather"):
        rate *= efficiency.turns(length(job, choice))
    rate /= attention_slowdown(job, choice, machine)
    attention_forward = 2 * unit / rate
    slower = _two_kernels(machine, job.seq // choice.sp)
    attention_backward = (4 * slower + 2 * again["attention"]) * unit / rate
    computed += (6 + 2 * again["attention"]) * unit

    between = tp if choice.sequence_parallel else 1
    numbers = (
        efficiency.ELEMENTWISE_EMBED * model.embed / between
        + efficiency.ELEMENTWISE_HEADS * model.heads * d / tp
        + efficiency.ELEMENTWISE_MLP * model.mlp / tp
    )
    repeated = 1 + efficiency.ELEMENTWISE_AGAIN[choice.remat]
    elementwise = item * numbers * model.layers * total * repeated
    logits = item * efficiency.LOSS_LOGITS * vocab_here * total
    kept = _parameters(job) / (choice.fsdp * choice.sp * tp)
    update = efficiency.OPTIMIZER_BYTES[job.optimizer] * kept
    if rounds > 1:
        update += efficiency.ACCUMULATION_BYTES * kept * rounds
    scan = 1.0
    if job.scan:
        scan = efficiency.SCAN_TPU if machine.is_tpu else efficiency.SCAN_GPU
    seconds = {
        "matmuls": matmuls,
        "attention": attention_forward + attention_backward,
        "elementwise": elementwise / memory,
        "loss": logits / memory,
        "optimizer": update / memory,
    }
    layers = forward + backward + seconds["attention"] + seconds["elementwise"]
    seconds["loop over layers"] = (scan - 1) * layers
    seconds["idle"] = efficiency.IDLE_STEP
    weights_read = item * (attended + lifted) * model.layers * rounds * 3
    return Work(
        flops=model.flops_per_token(job.seq) * job.batch * job.seq / choice.devices,
        computed=computed,
        memory_bytes=elementwise + logits + update + weights_read,
        seconds=seconds,
        forward=forward + attention_forward + seconds["elementwise"] / 3,
        backward=backward + attention_backward + seconds["elementwise"] * 2 / 3,
        attention_forward=attention_forward,
        attention_backward=attention_backward,
    )


def _made_again(remat: str) -> dict[str, float]:
    """Of each part's forward, how much the backward pass makes again (see forward.REMAT)."""
    if remat == "full":  # the mlp's last matmul gives only what the next layer kept
        return {"projections": 1.0, "mlp": 2 / 3, "attention": 1.0}
    return {"projections": 0.0, "mlp": 2 / 3 if remat == "mlp" else 0.0, "attention": 0.0}


@functools.lru_cache(maxsize=64)
def _parameters(job: Job) -> int:
    model = job.model
    layer = attention_weights(model) + mlp_weights(model)
    ends = 1 if model.tied_embeddings else 2
    return model.layers * layer + ends * model.vocab * model.embed


def _two_kernels(machine: Machine, part: int) -> float:
    """On TPUs attention's backward pass over long parts of rows: 7 matmuls instead of 5."""
    return 7 / 5 if machine.is_tpu and backward_kernels(part) == 2 else 1.0

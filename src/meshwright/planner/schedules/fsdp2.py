"""The schedule of the PyTorch backend: FSDP2 and tensor parallelism.

Formulas only: PyTorch need not be installed. FSDP2 all-gathers a block's parameters before its
forward pass and again before its backward pass, and those of the root (embedding, last norm, LM
head) once; gradients are summed in float32. Tensor parallelism sends activations: an embedding's
sum, and of each block the inputs and sums of its attention and mlp. tests/torch compares all of
them with mw.torch.audit of real steps.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from meshwright.arithmetic import divisors
from meshwright.audits import Collective, Payload, Phase
from meshwright.errors import MeshwrightError
from meshwright.meshes import MeshSpec
from meshwright.models import TENSOR_DIMS, WITH_DIMS, family_of
from meshwright.planner import efficiency
from meshwright.planner.constraints import Constraints
from meshwright.planner.device import ITEM_BYTES
from meshwright.planner.sizes import array_leaves, sizes_of
from meshwright.planner.step import StepModel, Work
from meshwright.planner.terms import Number
from meshwright.planner.work import train_work
from meshwright.planner.workload import Choice, Workload
from meshwright.present import nearest_sizes_text

AXES = ("dp", "fsdp", "tp")
BACKWARD: Phase = "backward"


class Group(NamedTuple):
    """Parameters that FSDP2 all-gathers and scatters as one array, on a tensor rank.

    Dim 0 is cut as torch.chunk does, so shards may be padded.
    """

    shard: int  # numbers of the largest shard
    whole: int  # numbers of all shards, padded


@functools.lru_cache(maxsize=4096)
def group_of(model: Any, of_layer: bool, tp: int, shards: int) -> Group:
    """The parameters of a layer, or those of the root: embedding, last norm and LM head."""
    shard = 0
    for array in array_leaves(family_of(model).arrays(model)):
        if ("layers" in array.dims) != of_layer:
            continue
        named = [
            (dim, -(-size // tp) if dim in TENSOR_DIMS else size)
            for dim, size in zip(array.dims, array.shape, strict=True)
            if dim != "layers"
        ]
        sizes = dict(named)
        if "vocab" in sizes:  # an embedding and the LM head alike
            first, rest = sizes["vocab"], sizes["embed"]
        else:  # PyTorch's matrices have their outputs first
            rest = math.prod(size for _, size in named[: array.inputs])
            first = math.prod(size for _, size in named[array.inputs :])
        shard += -(-first // shards) * rest
    return Group(shard, shards * shard)


def collectives(step: StepModel) -> Iterator[Collective]:
    """What one optimizer step sends."""
    listed = _Step(step)
    for kind in (listed.weights, listed.blocks, listed.norms, listed.ends, listed.scalars):
        yield from kind()


class _Step:
    def __init__(self, step: StepModel) -> None:
        self.workload, self.choice, self.number = step.workload, step.choice, step.number
        (self.stack,) = step.sizes.stacks
        self.layers, self.dims = self.stack.layers, step.sizes.dims
        self.has_qk_norms = step.sizes.other_vectors.arrays > 0
        self.micro_batches = self.choice.accumulation
        self.item, self.four, self.embed = step.device.used, step.device.float32, step.device.embed
        self.tokens = self.number(step.device.tokens, "tokens")
        self.stream = self.item * self.tokens * self.embed
        self.tp = self.over("tp")

    def over(self, *axes: str) -> tuple[str, ...]:
        return tuple(axis for axis in axes if self.choice.sizes[axis] > 1)

    def weights(self) -> Iterator[Collective]:
        """All-gathers of parameters, and the sums of their gradients."""
        model, tp, shards = self.workload.model, self.choice.size("tp"), self.choice.size("fsdp")
        over, replicas = self.over("fsdp"), self.over("dp")
        for what, group, layers in (
            ("a block", group_of(model, True, tp, shards), self.layers),
            ("the root", group_of(model, False, tp, shards), 0),
        ):
            times = max(layers, 1) * self.micro_batches
            about = (1, layers)
            weights: Payload = "layer weights" if layers else "table"
            gradients: Payload = "layer gradients" if layers else "embedding gradient"
            size = self.item * self.number(group.whole)
            said = f"weights of {what}"
            yield Collective("all-gather", over, size, times, "forward", said, weights, *about)
            again = times if layers and self.workload.config.torch.reshard_after_forward else 0
            said += ", again"
            yield Collective("all-gather", over, size, again, BACKWARD, said, weights, *about)
            said = f"gradients of {what}"
            size = self.four * self.number(group.whole)
            yield Collective("reduce-scatter", over, size, times, BACKWARD, said, gradients, *about)
            size = self.four * self.number(group.shard)
            yield Collective("all-reduce", replicas, size, times, BACKWARD, said, gradients, *about)

    def blocks(self) -> Iterator[Collective]:
        """Activations of attention and mlp, whose heads and inner dim tp splits."""
        layers, along = self.layers, self.choice.sequence_parallel
        again = self.choice.remat == "full"
        inputs, sums = "inputs of attention and mlp", "sums of attention and mlp"
        kinds: list[tuple[str, str, int, Phase]]
        if along:
            kinds = [
                (inputs, "all-gather", 2, "forward"),
                (sums, "reduce-scatter", 2, "forward"),
                (f"gradients of the {sums}", "all-gather", 2, BACKWARD),
                (f"gradients of the {inputs}", "reduce-scatter", 2, BACKWARD),
                (f"{inputs}, computed again", "all-gather", 2 * again, BACKWARD),
                # the mlp's sum is the end of a block: nothing needs it again
                ("sums of attention, computed again", "reduce-scatter", int(again), BACKWARD),
            ]
        else:
            kinds = [
                (sums, "all-reduce", 2, "forward"),
                (f"gradients of the {inputs}", "all-reduce", 2, BACKWARD),
                ("sums of attention, computed again", "all-reduce", int(again), BACKWARD),
            ]
        for what, operation, times, phase in kinds:
            each = times * layers * self.micro_batches
            payload: Payload = "activations"
            yield Collective(operation, self.tp, self.stream, each, phase, what, payload, 1, layers)

    def norms(self) -> Iterator[Collective]:
        """Gradients of norms that see a part of the sequence, or of the heads."""
        times, layers = self.micro_batches, self.layers
        payload: Payload = "vector gradients"
        if self.choice.sequence_parallel:
            size, each = self.item * self.embed, (len(self.stack.blocks) * layers + 1) * times
            yield Collective(
                "all-reduce", self.tp, size, each, BACKWARD, "gradients of norms", payload
            )
        if self.has_qk_norms:
            size, each = self.item * self.number(self.dims["head_dim"]), 2 * layers * times
            what = "gradients of the norms of queries and keys"
            yield Collective("all-reduce", self.tp, size, each, BACKWARD, what, payload)

    def ends(self) -> Iterator[Collective]:
        """The embedding, the LM head and the loss, whose vocabulary tp splits."""
        times, along = self.micro_batches, self.choice.sequence_parallel

        def send(what: str, operation: str, size: Number, phase: Phase) -> Collective:
            payload: Payload = "activations"
            return Collective(operation, self.tp, size, times, phase, what, payload)

        yield send("sums of the embedding", "all-reduce", self.stream, "forward")
        if along:
            what = "gradients of the embedding's output"
            yield send(what, "all-gather", self.stream, BACKWARD)
            yield send("inputs of the LM head", "all-gather", self.stream, "forward")
        what, operation = "gradients of the LM head's input", "all-reduce"
        yield send(what, "reduce-scatter" if along else operation, self.stream, BACKWARD)
        if self.workload.config.torch.loss_parallel:
            size = self.four * self.tokens
            yield send("maxima over the vocabulary", operation, size, "forward")
            yield send("sums over the vocabulary", operation, 2 * size, "forward")
        else:
            logits = self.item * self.tokens * self.number(self.dims["vocab"])
            yield send("logits", "all-gather", logits, "forward")

    def scalars(self) -> Iterator[Collective]:
        """Numbers in float64 over all devices."""
        every, eight = self.over("dp", "fsdp", "tp"), self.number(8, "bytes")
        payload = "number of targets, their weight"
        yield Collective("all-reduce", every, 2 * eight, 1, "forward", payload)
        payload = "loss, norm of the gradient, keys that a query sees"
        yield Collective("all-reduce", every, 3 * eight, 1, "optimizer", payload)


def work(step: StepModel) -> Work:
    """Compiled blocks fuse as XLA's do; without torch.compile each operator moves its arrays."""
    workload, choice = step.workload, step.choice
    split = workload.config.torch.loss_parallel and choice.size("tp") > 1
    copied = {"copies of FSDP": _copied_bytes(step)}
    if workload.compiled:
        logits = efficiency.SPLIT_LOSS_LOGITS if split else efficiency.LOSS_LOGITS
        return train_work(step, loss_numbers=logits, copied=copied)
    eager = efficiency.EAGER_EMBED, efficiency.EAGER_HEADS, efficiency.EAGER_MLP
    logits = efficiency.EAGER_SPLIT_LOSS_LOGITS if split else efficiency.EAGER_LOSS_LOGITS
    return train_work(step, eager, logits, copied)


def _copied_bytes(step: StepModel) -> float:
    """What FSDP2 copies between parameters and the buffers that it sends, in a step.

    An all-gathered array is read and written into its parameters, a gradient into a buffer of
    float32.
    """
    workload, tp, shards = step.workload, step.choice.size("tp"), step.choice.size("fsdp")
    item, four = ITEM_BYTES[workload.dtype], 4
    block = group_of(workload.model, True, tp, shards).whole * step.sizes.stacks[0].layers
    root = group_of(workload.model, False, tp, shards).whole
    times = 2 if workload.config.torch.reshard_after_forward and shards > 1 else 1
    copies = (times * block + root) * 2 * item + (block + root) * (item + four)
    return float(copies * step.choice.accumulation)


def check(workload: Workload) -> None:
    """Raise if PyTorch cannot run a workload, on whatever mesh."""
    config, machine = workload.config, workload.machine
    if machine.is_tpu:
        raise MeshwrightError(
            f"'{machine}' is a TPU machine, and the PyTorch backend runs on GPUs and CPUs; plan "
            "for h100:8 or another GPU, or leave out --backend torch"
        )
    model_type = family_of(workload.model).hugging_face.write_config(workload.model)["model_type"]
    if model_type not in WITH_DIMS:
        raise MeshwrightError(
            f"{config.model or 'the model'} is a {model_type} model, and plans of the PyTorch "
            f"backend were compared with steps of {', '.join(WITH_DIMS)}; leave out --backend torch"
        )
    if config.lora.rank:
        raise MeshwrightError(
            f"lora.rank={config.lora.rank}: plans of the PyTorch backend do not count LoRA yet; "
            "name the mesh, or leave out --backend torch"
        )
    for setting, value, usual in (
        ("optimizer", config.optimizer.name, "adamw"),
        ("trainable", " ".join(config.trainable), ""),
        ("objective", "dpo" if workload.has_reference else "auto", "auto"),
        ("moments", config.optimizer.moments, "auto"),
        ("matmul", config.compute.matmul, "auto"),
        ("overlap", "on" if workload.overlap else "auto", "auto"),
        ("attention", config.compute.attention, "auto"),
    ):
        if value != usual:
            raise MeshwrightError(
                f"{setting}={value} is a setting of the JAX backend; with --backend torch leave "
                "it out"
            )


def meshes(devices: int) -> Iterator[Choice]:
    """Every (dp, fsdp, tp): weights are split over fsdp, and the same along dp (HSDP).

    A data axis alone is always the one that weights are split over.
    """
    for tp in divisors(devices):
        for dp in divisors(devices // tp):
            fsdp = devices // (tp * dp)
            if dp == 1 or fsdp > 1:
                yield Choice({"dp": dp, "fsdp": fsdp, "tp": tp, "sp": 1})


def narrowed(workload: Workload, limits: Constraints) -> Constraints:
    """The limits as PyTorch reads them: weights are split over a dp that stands alone.

    One micro-batch where parameters are bfloat16, as train requires.
    """
    axes = [axis for axis, _, _ in limits.limits]
    for axis, how, size in limits.limits:
        if axis not in AXES and size > 1 and how != "<=":
            raise MeshwrightError(
                f"{axis}{how}{size}: the PyTorch backend has no {axis} axis; its axes are dp, fsdp "
                "and tp"
            )
    fixed, of_axes = limits.fixed, limits.limits
    if "dp" in axes and "fsdp" not in axes:
        of_axes = tuple(
            ("fsdp" if axis == "dp" else axis, how, size) for axis, how, size in of_axes
        )
        of_axes = (("dp", "=", 1), *of_axes)
    if workload.param_dtype == "bfloat16":
        if fixed.get("accumulation", 1) > 1:
            raise MeshwrightError(
                f"accumulation={fixed['accumulation']} with parameters in bfloat16: the PyTorch "
                "backend would add up the gradients of micro-batches in bfloat16; leave one out"
            )
        fixed = {**fixed, "accumulation": 1}
    return Constraints(of_axes, fixed)


def mesh_sizes(sizes: Mapping[str, int], text: str) -> Mapping[str, int]:
    """The mesh that a text means: weights are split over a dp that stands alone."""
    if sizes["fsdp"] > 1 or sizes["dp"] == 1:
        return sizes
    if "fsdp" in MeshSpec.parse(text).names:
        raise MeshwrightError(
            f"mesh {text!r} has all weights on every rank, which the plan does not look at; "
            f"write dp={sizes['dp']} or fsdp={sizes['dp']}, over which they are split"
        )
    return {**sizes, "dp": 1, "fsdp": sizes["dp"]}


def overlaps(workload: Workload) -> str:
    """What PyTorch sends while it computes, and what it waits for."""
    compiled = "blocks compiled" if workload.compiled else "not compiled"
    return (
        f"PyTorch, {compiled}: FSDP2 all-gathers a block's weights while the block before it "
        "computes, and sums its gradients while the next one does; the first block, the root "
        "(embedding, LM head) and everything over tp is waited for"
    )


def refusal(workload: Workload, choice: Choice) -> str | None:
    """Why sizes do not divide, in a sentence; None if they do."""
    return indivisible(workload.model, choice, workload.batch, workload.seq)


def indivisible(model: Any, choice: Choice, batch: int, seq: int) -> str | None:
    """The same of a model, a batch and a length. What fsdp splits need not divide."""
    dims, tp, ranks = sizes_of(model).dims, choice.size("tp"), choice.size("dp", "fsdp")
    for dim in ("kv_heads", "heads", "mlp"):  # of the vocabulary the last rank may have less
        size = dims[dim]
        if size % tp:
            fits = divisors(math.gcd(*(dims[name] for name in ("kv_heads", "heads", "mlp"))))
            return f"{dim}={size} cannot be split in tp={tp}, but in {nearest_sizes_text(tp, fits)}"
    if choice.sequence_parallel and seq % tp:
        return f"seq={seq} cannot be split in tp={tp} by sequence parallelism"
    if batch % ranks:
        return f"batch={batch} is not divisible by dp·fsdp={ranks}"
    return None

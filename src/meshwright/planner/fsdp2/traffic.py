"""Every collective of a step of the PyTorch backend, in closed form.

FSDP2 all-gathers a block's parameters before its forward pass and again before its backward pass,
and those of the root (embedding, last norm, LM head) once; gradients are summed in float32. Tensor
parallelism sends activations: an embedding's sum, and of each block the inputs and sums of its
attention and mlp. tests/torch compares all of them with mw.torch.audit of real steps.
"""

from collections.abc import Iterator

from meshwright.planner.fsdp2.groups import block_group, root_group
from meshwright.planner.parts import item_bytes, tokens
from meshwright.planner.result import Choice, Job, Phase
from meshwright.planner.terms import MakeNumber, Number, plain
from meshwright.planner.traffic import Carries, Send

BACKWARD: Phase = "backward"


def sends(job: Job, choice: Choice, number: MakeNumber = plain) -> list[Send]:
    """The collectives of a step, those over more than one device."""
    step = _Step(job, choice, number)
    kinds = (step.weights(), step.blocks(), step.norms(), step.ends(), step.scalars())
    return [send for kind in kinds for send in kind if send.axes and send.times]


class _Step:
    def __init__(self, job: Job, choice: Choice, number: MakeNumber) -> None:
        self.job, self.choice, self.number = job, choice, number
        self.model, self.micro_batches = job.model, choice.accumulation
        self.item = number(item_bytes(job.dtype), "bytes")
        self.four = number(4, "bytes")
        self.tokens = number(tokens(job, choice), "tokens")
        self.stream = self.item * self.tokens * number(self.model.embed)
        self.tp = self.over("tp")

    def over(self, *axes: str) -> tuple[str, ...]:
        return tuple(axis for axis in axes if self.choice.sizes[axis] > 1)

    def weights(self) -> Iterator[Send]:
        """All-gathers of parameters, and the sums of their gradients."""
        model, shards = self.model, self.choice.fsdp
        over, replicas = self.over("fsdp"), self.over("dp")
        for what, group, layers in (
            ("a block", block_group(model, self.choice.tp, shards), model.layers),
            ("the root", root_group(model, self.choice.tp, shards), 0),
        ):
            times = max(layers, 1) * self.micro_batches
            about = (1, layers)
            weights = Carries.LAYER_WEIGHTS if layers else Carries.TABLE
            gradients = Carries.LAYER_GRADIENTS if layers else Carries.EMBEDDING_GRADIENT
            size = self.item * self.number(group.whole)
            said = f"weights of {what}"
            yield Send(said, "all-gather", over, size, times, "forward", weights, *about)
            again = times if layers and self.job.reshard_after_forward else 0
            said += ", again"
            yield Send(said, "all-gather", over, size, again, BACKWARD, weights, *about)
            said = f"gradients of {what}"
            size = self.four * self.number(group.whole)
            yield Send(said, "reduce-scatter", over, size, times, BACKWARD, gradients, *about)
            size = self.four * self.number(group.shard)
            yield Send(said, "all-reduce", replicas, size, times, BACKWARD, gradients, *about)

    def blocks(self) -> Iterator[Send]:
        """Activations of attention and mlp, whose heads and inner dim tp splits."""
        layers, along = self.model.layers, self.choice.sequence_parallel
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
            carries = Carries.ACTIVATIONS
            yield Send(what, operation, self.tp, self.stream, each, phase, carries, 1, layers)

    def norms(self) -> Iterator[Send]:
        """Gradients of norms that see a part of the sequence, or of the heads."""
        model, times = self.model, self.micro_batches
        carries = Carries.VECTOR_GRADIENTS
        if self.choice.sequence_parallel:
            size, each = self.item * self.number(model.embed), (2 * model.layers + 1) * times
            yield Send("gradients of norms", "all-reduce", self.tp, size, each, BACKWARD, carries)
        if model.qk_norm:
            size, each = self.item * self.number(model.head_dim), 2 * model.layers * times
            what = "gradients of the norms of queries and keys"
            yield Send(what, "all-reduce", self.tp, size, each, BACKWARD, carries)

    def ends(self) -> Iterator[Send]:
        """The embedding, the LM head and the loss, whose vocabulary tp splits."""
        times, along = self.micro_batches, self.choice.sequence_parallel

        def send(what: str, operation: str, size: Number, phase: Phase) -> Send:
            carries = Carries.ACTIVATIONS
            return Send(what, operation, self.tp, size, times, phase, carries)

        yield send("sums of the embedding", "all-reduce", self.stream, "forward")
        if along:
            what = "gradients of the embedding's output"
            yield send(what, "all-gather", self.stream, BACKWARD)
            yield send("inputs of the LM head", "all-gather", self.stream, "forward")
        what, operation = "gradients of the LM head's input", "all-reduce"
        yield send(what, "reduce-scatter" if along else operation, self.stream, BACKWARD)
        if self.job.loss_parallel:
            size = self.four * self.tokens
            yield send("maxima over the vocabulary", operation, size, "forward")
            yield send("sums over the vocabulary", operation, 2 * size, "forward")
        else:
            logits = self.item * self.tokens * self.number(self.model.vocab)
            yield send("logits", "all-gather", logits, "forward")

    def scalars(self) -> Iterator[Send]:
        """Numbers in float64 over all devices."""
        every, eight = self.over("dp", "fsdp", "tp"), self.number(8, "bytes")
        yield Send("number of targets", "all-reduce", every, eight, 1, "forward")
        what = "loss, norm of the gradient, keys that a query sees"
        yield Send(what, "all-reduce", every, 3 * eight, 1, "optimizer")

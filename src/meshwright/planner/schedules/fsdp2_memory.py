"""Bytes of a device at the moments of a step of the PyTorch backend, by kind.

What is there all the time: float32 shards of parameters and moments. What comes and goes:
- *loss*: everything that blocks save, the root's weights, logits in float32 and their gradient.
- *backward* of a block: its weights, those of the block before it (all-gathered meanwhile), its
  gradients so far, the buffer from which the gradients of the block after it are scattered, the LM
  head's gradient, which waits for the root's, and what the block computes with: while its mlp, its
  second norm, or its first one is computed.
- *scatter*: the gradients of the last block in both dtypes, before anything of it is freed.
- *root*: at the end, gradients of the embedding and the LM head, and the buffer for them.

A block's backward pass is counted for the last block, the one before it and the first two: between
them less and less is saved, and more and more gradients are there.

What a block of transformers saves, of a token: two norms, each with its input in float32, the
normed input, and its output; queries, keys, values, output and lse of flash attention; gate, its
activation, up and their product. Compiled, the norms keep their input as it is and the mlp computes
the activation again. tests/torch compares the sums with the tensors that live in real steps.
"""

from collections.abc import Iterator

from meshwright.planner.schedules.fsdp2 import group_of
from meshwright.planner.step import Kinds, StepModel
from meshwright.planner.terms import Number

KINDS = (
    "parameters", "optimizer", "gradients", "saved activations", "all-gathered weights",
    "gradients to be scattered", "working activations", "loss", "batch",
)  # fmt: skip
NORM_ARRAYS = 5  # in float32, in the backward pass of a norm that is not compiled
# bytes of a logit in the loss. Whole: log-softmax, its gradient and that of the logits, in float32.
# Split over tp: logits in both dtypes and two arrays of the softmax; compiled, the softmax, a copy
# of it and the gradient
WHOLE_LOSS = 12
SPLIT_LOSS = 14
SPLIT_LOSS_COMPILED = 10


class Fsdp2Device:
    """A device's share of a workload: sizes as numbers or, to be printed, as terms."""

    def __init__(self, step: StepModel) -> None:
        self.workload, self.choice, self.number = step.workload, step.choice, step.number
        workload, choice, number, device = self.workload, self.choice, self.number, step.device
        (self.stack,) = step.sizes.stacks
        self.dims, self.sizes = step.sizes.dims, step.sizes
        self.stored, self.used, self.tp = device.stored, device.used, device.tp
        self.four = device.float32  # in which gradients are summed
        tp, shards = choice.size("tp"), choice.size("fsdp")
        block = group_of(workload.model, True, tp, shards)
        root = group_of(workload.model, False, tp, shards)
        self.block, self.block_shard = number(block.whole), number(block.shard)
        self.root, self.root_shard = number(root.whole), number(root.shard)
        self.scattering = self.four * self.block if shards > 1 else 0  # of the block before
        self.layers = number(self.stack.layers, "layers")
        # weights of blocks are freed between their two passes; on one rank they never are
        self.reshards = workload.config.torch.reshard_after_forward and shards > 1
        on_device = device.tokens
        self.tokens = number(on_device, "tokens")
        # between blocks, where sequence parallelism splits them
        split = choice.sequence_parallel
        self.between = number(on_device // tp if split else on_device, "tokens")
        self.embed, self.mlp = device.embed, number(self.stack.mlp.inner) / self.tp
        self.table = number(self.dims["vocab"]) / self.tp * self.embed
        self.saved_block = self._norm() + self._attention() + self._norm() + self._mlp()
        if choice.remat == "full":
            self.saved = self.used * self.between * self.embed
        else:
            self.saved = self.saved_block

    @property
    def all_shards(self) -> Number:
        return self.layers * self.block_shard + self.root_shard

    def always(self) -> Kinds:
        """What is there all through the step."""
        kinds: Kinds = {
            "parameters": self.stored * self.all_shards,
            "optimizer": 2 * self.stored * self.all_shards,
            "batch": 2 * self.number(8, "bytes") * self.tokens,
        }
        if self.choice.accumulation > 1:
            kinds["gradients"] = self.stored * self.all_shards
        return kinds

    def _norm_input(self) -> Number:
        """What a norm saves of its input; the mean of squares too."""
        each = self.used if self.workload.compiled else self.four + self.used
        return self.between * (each * self.embed + self.four)

    def _norm(self) -> Number:
        """The output is what the matmuls after it save: of the whole sequence."""
        return self._norm_input() + self.used * self.tokens * self.embed

    def _attention(self) -> Number:
        dims, number = self.dims, self.number
        heads, kv_heads = number(dims["heads"], "heads"), number(dims["kv_heads"], "heads")
        head_dim = number(dims["head_dim"])
        each = self.used * (2 * heads + 2 * kv_heads) * head_dim + self.four * heads
        if self.sizes.other_vectors.arrays:
            # the norms of queries and keys; compiled, only what goes into them
            norms = self.used * head_dim
            if not self.workload.compiled:
                norms = norms + self.four * head_dim + self.four
            each = each + (heads + kv_heads) * norms
        return self.tokens * each / self.tp

    def _mlp(self) -> Number:
        inside = self.stack.mlp.arrays_inside
        arrays = inside + 1 if self.workload.compiled else 2 * inside
        return self.used * self.tokens * arrays * self.mlp

    def _after_blocks(self) -> Number:
        """What the last norm, which is not compiled, and the LM head save."""
        norm = self.between * ((self.four + self.used) * self.embed + self.four)
        return norm + self.used * self.tokens * self.embed

    def _loss(self) -> Number:
        logits = self.tokens * self.number(self.dims["vocab"])
        if self.workload.config.torch.loss_parallel and self.choice.size("tp") > 1:
            split = SPLIT_LOSS_COMPILED if self.workload.compiled else SPLIT_LOSS
            return self.number(split, "bytes") * logits / self.tp
        if self.workload.compiled:  # logits and their gradient
            return 2 * self.used * logits
        return self.number(WHOLE_LOSS, "bytes") * logits

    def peaks(self) -> Iterator[tuple[str, Kinds]]:
        layers, loss = self.stack.layers, self._after_blocks()
        yield "loss", {
            "saved activations": self.layers * self.saved + loss,
            "all-gathered weights": self._weights(0 if self.reshards else layers),
            "loss": self._loss(),
        }  # fmt: skip
        places = {"the last": 0, "the last but one": 1, "the second": layers - 2}
        places |= {"the first": layers - 1}
        seen = set()
        for name, done in places.items():
            if 0 <= done < layers and done not in seen:
                seen.add(done)
                fullest = max(self._backward(done), key=lambda kinds: sum(kinds.values()))
                yield f"backward of {name} block", fullest
        scattered = self._scattered(self.block, self.block_shard) + self.used * self.table
        scatter: Kinds = {
            "saved activations": self._saved_by(layers - 1),
            "all-gathered weights": self._weights(1 if self.reshards else layers - 1),
            "gradients to be scattered": scattered,
        }
        yield "scatter", scatter
        yield "root", self._root()

    def _saved_by(self, blocks: int) -> Number:
        """What so many blocks, the first ones, keep for the backward pass."""
        return self.number(blocks, "blocks") * self.saved if blocks else 0

    def _weights(self, blocks: int) -> Number:
        """Of the root and of so many blocks."""
        together = self.number(blocks, "blocks") * self.block if blocks else 0
        return self.used * (self.root + together)

    def _with_gradients(self, done: int, kinds: Kinds) -> Kinds:
        """With the shards of gradients of so many blocks."""
        if self.choice.accumulation == 1 and done:
            kinds["gradients"] = self.stored * self.number(done, "blocks") * self.block_shard
        return kinds

    def _backward(self, done: int) -> list[Kinds]:
        """The backward pass of a block after that of `done` others: its mlp, a norm, its end."""
        before = self.stack.layers - 1 - done
        used, stream = self.used, self.used * self.tokens * self.embed
        weights = self._weights(min(before, 1) + 1 if self.reshards else before + 1)
        waiting = used * self.table + (self.scattering if done else 0)
        recomputed = self.saved if self.choice.remat == "full" else 0  # from its input
        saved = self._saved_by(before) + recomputed
        # arrays of a norm's backward pass: in float32, or in one kernel
        norm = (
            used * 3 * self.between * self.embed
            if self.workload.compiled
            else self.four * NORM_ARRAYS * self.between * self.embed
        )
        matrix = self.mlp * self.embed
        first_norm = self._norm_input()
        rest = self._norm() + self._attention() + first_norm
        parts = [
            # its own saved activations, work, gradients of weights so far
            (self.saved_block, 2 * used * self.tokens * self.mlp + stream, matrix),
            (rest, norm + stream, len(self.stack.mlp.matrices) * matrix),
            (first_norm, norm + stream, self.block),
        ]
        return [
            self._with_gradients(
                done,
                {
                    "saved activations": saved + own,
                    "all-gathered weights": weights,
                    "gradients to be scattered": waiting + used * gradients,
                    "working activations": work,
                },
            )
            for own, work, gradients in parts
        ]

    def _root(self) -> Kinds:
        """The gradients of embedding and LM head; tied ones are added to a third array."""
        tables = 3 if self.sizes.is_tied else 2
        unscattered = self.used * tables * self.table + self.scattering
        scattered = self._scattered(self.root, self.root_shard)
        kinds: Kinds = {
            "gradients to be scattered": max(self.used * self.root + unscattered, scattered)
        }
        return self._with_gradients(self.stack.layers, kinds)

    def _scattered(self, group: Number, shard: Number) -> Number:
        """Gradients in both dtypes; or, when the first are freed, in float32 and their shard."""
        return self.four * group + max(self.used * group, self.four * shard)

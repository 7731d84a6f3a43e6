"""Every collective of the built-in train step, in closed form.

Each collective of the step is written out in models, train.step and ops, and stands here once more
as a formula over the model's declared work. Tests compare both with the compiled program.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from meshwright.audits import Collective, Payload, Phase
from meshwright.models import Experts
from meshwright.ops.attention import ring_steps_of, sequence_order
from meshwright.planner.attention import split_of
from meshwright.planner.schedules.jax_weights import PASSES, WeightCollectives, a_layer
from meshwright.planner.sizes import StackSizes
from meshwright.planner.step import StepModel
from meshwright.planner.terms import Number


def collectives(model: StepModel) -> Iterator[Collective]:
    """What one optimizer step sends, as it is written."""
    step = _Step(model)
    for kind in (
        step.layer_weights(), step.adapter(), step.blocks(), step.latents(), step.experts(),
        step.keys(),
        step.tables(), step.vectors(), step.vocabulary(), step.order_and_documents(),
        step.optimizer(), step.scalars(), step.router_sums(), step.reference(),
    ):  # fmt: skip
        yield from kind


class _Step(WeightCollectives):
    """A step whose collectives are listed."""

    def latents(self) -> Iterator[Collective]:
        """Latents for the heads along tp, and their gradients; and those of their norms."""
        tokens_over = self.over("dp", "fsdp", "sp", "ep")
        over, number, item = self.over("tp"), self.number, self.item
        saved = self.workload.remat[self.choice.remat]
        split = self.choice.sequence_parallel
        norms_over = self.over("dp", "fsdp", "tp", "sp", "ep") if split else tokens_over
        for stack in self.sizes.stacks:
            times, of = self.executions(stack), f"of {a_layer(stack)}"
            about: tuple[int, int, str] = (1, stack.layers, stack.name)
            on_device = number(self.device.sequences, "sequences")
            tokens = on_device * number(self.length(stack), "tokens")
            for matrix in (one for block in stack.blocks for one in block.matrices):
                if not matrix.is_latent:
                    continue
                size, what = item * tokens * number(matrix.outputs), f"latents {of}"
                kind: Payload = "activations"
                passes = PASSES if matrix.output not in saved else PASSES[:1]
                for phase in passes if split else ():
                    yield Collective("all-gather", over, size, times, phase, what, kind, *about)
                # of keys that all heads share the gradient is summed over heads
                summed = "all-reduce" if matrix.of_keys else self.reduce
                what = f"gradients of the {what}"
                yield Collective(summed, over, size, times, "backward", what, kind, *about)
            if stack.latent_norms:
                size, what = self.stored * number(stack.latent_norms), f"norms of latents {of}"
                what, gradients = f"gradients of the {what}", (2, stack.layers, stack.name)
                yield Collective(
                    "all-reduce", norms_over, size, times, "backward", what, "layer gradients",
                    *gradients,
                )  # fmt: skip

    def experts(self) -> Iterator[Collective]:
        """Tokens to the experts of other devices along ep, and what these make of them back."""
        for stack in self.sizes.stacks:
            if (experts := stack.experts) is None:
                continue

            def send(
                operation: str, over: tuple[str, ...], what: str, size: Number,
                passes: Sequence[int], stack: StackSizes = stack,
            ) -> Iterator[Collective]:  # fmt: skip
                payload: Payload = "activations"
                what, about = f"{what} of {a_layer(stack)}", (1, stack.layers, stack.name)
                for phase, many in zip(PASSES, passes, strict=True):
                    times = many * self.executions(stack)
                    yield Collective(operation, over, size, times, phase, what, payload, *about)

            number, tp, ep = self.number, self.over("tp"), self.over("ep")
            on_device = number(self.device.sequences, "sequences")
            tokens = on_device * number(self.length(stack), "tokens")
            chosen = self.four * tokens * number(experts.per_token, "experts")
            what = "experts of tokens, and their weights,"
            if self.choice.sequence_parallel:
                yield from send("all-gather", tp, what, 2 * chosen, (1, 1))
            yield from send(self.reduce, tp, "gradients of the weights of experts", chosen, (0, 1))
            if self.device.exchange == "ring":
                all_tokens = self.stream(stack) * self.ep
                yield from send("all-gather", ep, "tokens for the experts", all_tokens, (1, 1))
                yield from send("all-gather", ep, what, 2 * chosen * self.ep, (1, 1))
                sums = "sums of the experts"
                yield from send("reduce-scatter", ep, sums, all_tokens, (1, 0))
                yield from send("all-gather", ep, f"gradients of the {sums}", all_tokens, (0, 1))
                gradients = "gradients of the tokens for the experts"
                yield from send("reduce-scatter", ep, gradients, all_tokens, (0, 1))
                gradients = "gradients of the weights of experts of all tokens"
                yield from send("reduce-scatter", ep, gradients, chosen * self.ep, (0, 1))
            elif self.device.exchange == "all-to-all":
                # there and back; again for the gradients of weights; and their gradients
                tokens, what = self._exchanged(stack, experts), "tokens to experts and back"
                yield from send("all-to-all", ep, what, tokens, (2, 4))
                counts = self.four * self.ep * number(experts.count, "experts")
                yield from send("all-gather", ep, "number of tokens of each expert", counts, (1, 1))

    def _exchanged(self, stack: StackSizes, experts: Experts) -> Number:
        """Bytes of an all-to-all: ragged, or on a CPU with room for all that may be sent."""
        number = self.number
        if self.device.machine.chip.platform == "cpu":
            room = number(self.shares[stack].room, "experts")
            return self.stream(stack) * room * self.ep
        chosen = number(experts.per_token, "experts")
        most = self.workload.load_of_experts(stack, self.choice.size("ep"))
        return self.stream(stack) * chosen * number(most, name="imbalance")

    def blocks(self) -> Iterator[Collective]:
        """Blocks whose heads or mlp tp splits: partial sums added, inputs all-gathered."""
        over = self.over("tp")
        if not over:
            return

        for stack in self.sizes.stacks:
            size, of = self.stream(stack), f"of {a_layer(stack)}"

            def send(
                what: str, operation: str, times: int, phase: Phase, size: Number = size,
                stack: StackSizes = stack,
            ) -> Collective:  # fmt: skip
                each, about = times * self.executions(stack), (1, stack.layers, stack.name)
                payload: Payload = "activations"
                return Collective(operation, over, size, each, phase, what, payload, *about)

            chunks = self.shares[stack].mlp_chunks
            blocks = len(stack.blocks)
            inputs_of = sum(not block.is_beside for block in stack.blocks)
            # latent attention reads its input where it is
            elsewhere = sum(not block.splits_input for block in stack.blocks)
            whole = blocks if chunks == 1 else blocks - 1
            if self.choice.sequence_parallel:
                inputs, gather = f"inputs of the blocks {of}", "all-gather"
                yield send(inputs, gather, inputs_of - elsewhere, "forward")
                again = inputs_of - elsewhere
                if self.choice.remat == "none":  # gradients of weights alone need them
                    readers = (one for one in stack.blocks if not one.is_beside)
                    again = sum(one.has_gradients_of_inputs and one.splits_input for one in readers)
                yield send(f"{inputs}, again", gather, again, "backward")
                yield send(f"gradients of the blocks {of}", gather, inputs_of, "backward")
            yield send(f"sums of the blocks {of}", self.reduce, whole, "forward")
            what = f"gradients of the inputs of the blocks {of}"
            yield send(what, self.reduce, whole - elsewhere, "backward")
            if self.choice.repeats_layers:  # the last only if a norm of it is computed again
                what = f"sums of the blocks {of}, computed again"
                again = blocks if "output" in stack.mlp.saved else inputs_of - 1
                yield send(what, self.reduce, again, "backward")
            if chunks > 1:
                part = size // self.number(chunks, "chunks")
                what = f"sums of the mlp {of}, by chunks"
                yield send(what, "all-reduce", chunks, "forward", part)
                what = f"gradients of the input of the mlp {of}, by chunks"
                yield send(what, "all-reduce", chunks, "backward", part)
        yield from self._encoder_output(over)

    def _encoder_output(self, over: tuple[str, ...]) -> Iterator[Collective]:
        """A sequence that other layers attend to: its gradients are summed once for all of them."""
        fields = {
            block.attention.keys_from
            for stack in self.sizes.stacks
            for block in stack.blocks
            if block.attention and block.attention.keys_from
        }
        for stack in self.sizes.stacks:
            if stack.field in fields:
                what, size = f"output of the {stack.name}", self.stream(stack)
                times = self.micro_batches
                kind: Payload = "activations"
                if self.choice.sequence_parallel:
                    yield Collective("all-gather", over, size, times, "forward", what, kind)
                what = f"gradient of the {what}"
                yield Collective(self.reduce, over, size, times, "backward", what, kind)

    def vocabulary(self) -> Iterator[Collective]:
        """Embedding and loss, whose vocabulary tp splits."""
        over, times = self.over("tp"), self.micro_batches
        if not over:
            return
        for stack in {stack.field: stack for stack in self.sizes.stacks}.values():
            size = self.stream(stack)
            yield Collective(self.reduce, over, size, times, "forward", "embedded tokens")
            if self.choice.sequence_parallel and self.sizes.trains_embedding:
                what = "gradient of the embedded tokens"
                yield Collective("all-gather", over, size, times, "backward", what)
        size = self.stream(self.sizes.stacks[-1])
        yield Collective(self.reduce, over, size, times, "backward", "gradient of the loss's input")
        if self.choice.sequence_parallel:
            yield Collective("all-gather", over, size, times, "forward", "input of the loss")
        chunks, chunk = self.device.loss_chunks
        tokens = self.number(chunk, "tokens")
        for what, size, pieces in (
            ("maxima over the vocabulary", self.item * tokens, 1),
            ("sums over the vocabulary", 2 * self.four * tokens, 2),
        ):
            each = chunks * times
            yield Collective("all-reduce", over, size, each, "forward", what, pieces=pieces)

    def keys(self) -> Iterator[Collective]:
        """Attention over split sequences."""
        if self.over("sp"):
            for stack in self.sizes.stacks:
                yield from self._keys(stack)

    def _keys(self, stack: StackSizes) -> Iterator[Collective]:
        over = self.over("sp")
        split, strategy = split_of(self.workload, self.choice), self.device.strategy
        times, number = self.executions(stack), self.number
        tokens = number(self.device.sequences, "sequences") * number(split.part, "tokens")
        keys = 2 * tokens * number(split.kv_heads, "heads") * number(split.head_dim)
        gradients = "gradients of keys and values"

        def send(
            what: str, operation: str, size: Number, times: int, phase: Phase,
            payload: Payload = "activations", pieces: int = 1,
        ) -> Collective:  # fmt: skip
            return Collective(
                operation, over, size, times, phase, what, payload, pieces, stack.layers, stack.name
            )

        if strategy == "ring":
            steps = self._ring_exchanges()
            again = steps if self.choice.repeats_layers else 0
            # the first step of a ring that is computed again serves the backward pass too
            back = max(steps - 1, 0) if again else steps
            permute, size = "collective-permute", self.item * keys
            what = "keys and values to the next device"
            yield send(what, permute, size, steps * times, "forward")
            yield send(f"{what}, again", permute, size, (again + back) * times, "backward")
            many = (steps + 1) * times if steps else 0
            yield send(gradients, permute, self.four * keys, many, "backward", "key gradients")
        elif strategy == "allgather":
            for phase in PASSES:
                size = self.item * keys * self.sp
                yield send("keys and values of full sequences", "all-gather", size, times, phase)
            size = self.four * keys * self.sp
            payload: Payload = "key gradients"
            yield send(gradients, "reduce-scatter", size, times, "backward", payload)
        else:
            heads = 2 * split.heads + 2 * split.kv_heads
            size = self.item * tokens * number(heads, "heads") * number(split.head_dim)
            what, operation = (
                "queries, keys, values and outputs, from length to heads",
                "all-to-all",
            )
            yield send(what, operation, size, times, "forward", pieces=4)
            yield send(f"{what}, again", operation, size, times, "backward", pieces=4)
            yield send(f"gradients of {what}", operation, size, times, "backward", pieces=4)

    def order_and_documents(self) -> Iterator[Collective]:
        """The order in which devices hold sequences, and the document of each key."""
        over = self.over("sp")
        if not over:
            return
        split, strategy = split_of(self.workload, self.choice), self.device.strategy
        times, number = self.micro_batches, self.number
        on_device = number(self.device.sequences, "sequences")
        ids = self.four * on_device * number(split.part, "tokens")
        permute = "collective-permute"
        if sequence_order(split, strategy) == "zigzag":
            # half of four arrays, and with two devices only one half moves
            halves = (1 if self.choice.size("sp") == 2 else 2) * 4 * times
            what = "tokens, targets, segment ids and positions into zig-zag order"
            yield Collective(permute, over, ids // 2, halves, "forward", what)
        if strategy == "ring":
            exchanges = self._ring_exchanges()
            if not exchanges:
                return
            # what the first ring step needs is the same for all layers
            rest = self.sizes.layers * times * (exchanges - 1)
            what = "segment ids of the keys"
            yield Collective(permute, over, ids, times + rest, "forward", what)
            again = rest * (2 if self.choice.repeats_layers else 1)
            yield Collective(permute, over, ids, again, "backward", f"{what}, again")
        else:
            operation = "all-gather" if strategy == "allgather" else "all-to-all"
            what = "segment ids of full sequences"
            yield Collective(operation, over, ids * self.sp, times, "forward", what)

    def _ring_exchanges(self) -> int:
        """How often keys are sent around a ring."""
        split = split_of(self.workload, self.choice)
        order = sequence_order(split, "ring")
        return ring_steps_of(split.mask, order, self.choice.size("sp"), split.part).exchanges

    def reference(self) -> Iterator[Collective]:
        """The forward pass of a frozen model, and what the loss of pairs sends.

        What both models compute of the same arrays is computed once: the order of sequences, and
        embedded tokens where the embedding is frozen.
        """
        if not self.workload.has_reference:
            return
        shared = set() if self.sizes.trains_embedding else {"the embedding", "embedded tokens"}
        shared |= set() if self.sizes.trains_head else {"the LM head"}
        passes = self.layer_weights(), self.tables(), self.blocks(), self.latents()
        for one in itertools.chain(*passes, self.experts(), self.keys(), self.vocabulary()):
            if one.phase == "forward" and one.what not in shared:
                yield dataclasses.replace(one, what=f"{one.what}, of the reference")
        times, over = self.micro_batches, self.over("tp")
        chunks, chunk = self.device.loss_chunks
        what, size = "over the vocabulary, again", self.number(chunk, "tokens")
        for each in (f"maxima {what}", f"sums {what}"):
            item = self.item if each.startswith("maxima") else self.four
            yield Collective("all-reduce", over, item * size, chunks * times, "backward", each)
        yield from self._answers()

    def _answers(self) -> Iterator[Collective]:
        """Log-probabilities of tokens, and their sums over the answers of split sequences."""
        over = self.over("sp")
        if not over:
            return
        split, strategy = split_of(self.workload, self.choice), self.device.strategy
        times, number, permute = self.micro_batches, self.number, "collective-permute"
        on_device = number(self.device.sequences, "sequences")
        tokens = self.four * on_device * number(split.part, "tokens")
        if strategy == "ring":  # but for the first ring step, as the model's own
            rest = self.sizes.layers * times * max(self._ring_exchanges() - 1, 0)
            what = "segment ids of the keys, of the reference"
            yield Collective(permute, over, tokens, rest, "forward", what)
        if sequence_order(split, strategy) == "zigzag":
            halves = (1 if self.choice.size("sp") == 2 else 2) * times
            what = "log-probabilities into the order of the text"
            yield Collective(permute, over, tokens // 2, 2 * halves, "forward", what)
            what = f"gradient of the {what}"
            yield Collective(permute, over, tokens // 2, halves, "backward", what)
        what = "sums over answers: of targets, and of both models"
        yield Collective("all-reduce", over, tokens * self.sp, 3 * times, "forward", what)

    def router_sums(self) -> Iterator[Collective]:
        """What routers did with all tokens: how often they chose each expert, scores, squares."""
        experts = self.sizes.experts
        if experts is None:
            return
        along = ("tp",) if self.choice.sequence_parallel else ()
        over = self.over("dp", "fsdp", "sp", "ep", *along)
        mixtures = sum(stack.layers for stack in self.sizes.stacks if stack.experts)
        drops = bool(self.workload.config.compute.capacity)
        sums = self.number(2 * experts.count + 1 + drops)
        each = self.four * self.number(mixtures, "layers") * sums
        what, times = "sums over tokens of the routers", self.micro_batches
        yield Collective("all-reduce", over, each, times, "forward", what, pieces=3 + drops)
        for axes in (self.batch, self.over("sp")):
            what = "numbers of targets and tokens of a micro-batch"
            yield Collective("all-reduce", axes, self.four, 2 * times, "forward", what)

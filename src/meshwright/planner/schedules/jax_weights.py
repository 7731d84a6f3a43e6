"""Collectives of weights: all-gathered to be used, their gradients scattered and summed."""

import itertools
from collections.abc import Iterator

from meshwright.audits import Collective, Payload, Phase
from meshwright.models import family_of
from meshwright.planner.sizes import BlockSizes, StackSizes, Vectors, adapter_numbers
from meshwright.planner.step import StepModel
from meshwright.planner.terms import Number

PASSES: tuple[Phase, Phase] = ("forward", "backward")


class WeightCollectives:
    """A step whose collectives of weights are listed."""

    def __init__(self, step: StepModel) -> None:
        self.workload, self.choice, self.number = step.workload, step.choice, step.number
        self.sizes, sizes = step.sizes, step.choice.sizes
        self.nontrivial = [axis for axis, size in sizes.items() if size > 1]
        self.device = device = step.device
        self.shares = {stack.sizes: stack for stack in step.stacks}
        number = step.number
        self.item, self.stored, self.four = device.used, device.stored, device.float32
        self.tp, self.embed = device.tp, device.embed
        self.fsdp = number(self.choice.size("fsdp"), name="fsdp")
        self.sp = number(self.choice.size("sp"), name="sp")
        self.ep = device.ep
        self.shards = self.over("fsdp", "sp", "ep")  # of weights but experts
        self.tokens = self.over("dp", "fsdp", "sp", "ep")
        self.batch = self.over("dp", "fsdp", "ep")
        self.micro_batches = self.choice.accumulation
        # sums over tp, which sequence parallelism leaves split
        self.reduce = "reduce-scatter" if self.choice.sequence_parallel else "all-reduce"

    def over(self, *axes: str) -> tuple[str, ...]:
        """Those of the axes that have more than one device."""
        return tuple(axis for axis in self.nontrivial if axis in axes)

    def executions(self, stack: StackSizes) -> int:
        """How often a step runs a layer of a stack."""
        return stack.layers * self.micro_batches

    def length(self, stack: StackSizes) -> int:
        """Tokens of a stack's sequence on a device."""
        return self.shares[stack].length

    def stream(self, stack: StackSizes) -> Number:
        """Bytes of a stack's residual stream, replicated over tp."""
        number = self.number
        on_device = number(self.device.sequences, "sequences")
        return self.item * on_device * number(self.length(stack), "tokens") * self.embed

    def layer_weights(self) -> Iterator[Collective]:
        """A layer's matrices: all-gathered over the axes that split them and the tokens.

        Experts stay where they are along ep: tokens go to them.
        """
        for stack in self.sizes.stacks:
            for block in stack.blocks:
                for kind in ("matrix", "latent", "expert"):
                    yield from self._weights(stack, block, kind)
                yield from self._router(stack, block)

    def _weights(self, stack: StackSizes, block: BlockSizes, kind: str) -> Iterator[Collective]:
        latents = kind == "latent"
        matrices = [
            matrix
            for matrix in block.of_kind("matrix" if latents else kind)
            if matrix.is_latent == latents
        ]
        if not matrices:
            return
        with_gradients = [matrix for matrix in matrices if matrix.trained_layers]
        shards, parts, ways = self.shards, self.tp, self.fsdp * self.sp * self.ep
        name = block.name.replace("_", "-") if kind == "matrix" else kind
        replicas = self.over("dp")
        if kind == "expert":
            shards, parts, ways = self.over("fsdp", "sp"), self.tp * self.ep, self.fsdp * self.sp
        elif latents:
            # with sequence parallelism they are made of the tokens between blocks
            parts = self.number(1)
            replicas = self.over("dp", "tp") if self.choice.sequence_parallel else replicas
        times, of = self.executions(stack), f"of {a_layer(stack)}"
        in_fp8 = self.workload.fp8_layers(stack.layers, kind, self.choice.tensor)
        in_fp8 *= self.micro_batches
        number = self.number
        item = self.device.stored_layers if self.device.quantizes else self.item
        weights: Payload = "layer weights"
        gradient: Payload = "layer gradients"
        about = len(matrices), stack.layers, stack.name
        numbers = sum(matrix.weights for matrix in matrices)
        sends = [(item, times - in_fp8, f"{name} weights {of}")]
        if in_fp8:
            sends.append((number(1), in_fp8, f"{name} weights {of} in fp8"))
        for phase, (each, many, what) in itertools.product(PASSES, sends):
            size = each * number(numbers) // parts
            sizes = tuple(each * number(matrix.weights) // parts for matrix in matrices)
            yield Collective("all-gather", shards, size, many, phase, what, weights, *about, sizes)
        what = f"gradient of the {name} weights {of}"
        later: Phase = "backward"
        size = self.item * number(sum(matrix.weights for matrix in with_gradients)) // parts
        about = len(with_gradients), stack.layers, stack.name
        yield Collective("reduce-scatter", shards, size, times, later, what, gradient, *about)
        part = size // ways
        yield Collective("all-reduce", replicas, part, times, later, what, gradient, *about)

    def _router(self, stack: StackSizes, block: BlockSizes) -> Iterator[Collective]:
        """The router, in the dtype it is kept in: over the axes of embed, then over ep."""
        for matrix in block.of_kind("router"):
            size = self.stored * self.number(matrix.weights)
            what, times = f"router of {a_layer(stack)}", self.executions(stack)
            weights: Payload = "layer weights"
            gradient: Payload = "layer gradients"
            about, parts = (1, stack.layers, stack.name), (self.over("fsdp", "sp"), self.over("ep"))
            for phase in PASSES:
                for axes, each in zip(parts, (size // self.ep, size), strict=True):
                    yield Collective("all-gather", axes, each, times, phase, what, weights, *about)
            if not matrix.trained_layers:
                continue
            what = f"gradient of the {what}"
            summed = self.over("tp") if self.choice.sequence_parallel else ()
            for operation, axes, each in (
                ("all-reduce", summed, size),
                ("reduce-scatter", parts[1], size),
                ("reduce-scatter", parts[0], size // self.ep),
                ("all-reduce", self.over("dp"), size // (self.fsdp * self.sp * self.ep)),
            ):
                yield Collective(operation, axes, each, times, "backward", what, gradient, *about)

    def adapter(self) -> Iterator[Collective]:
        """The factors of LoRA: those with embed are sharded as their matrix is, the others not."""
        yield from self._factors("matrix", "ep")
        yield from self._factors("expert")  # a device has those of its own experts

    def _factors(self, kind: str, *also: str) -> Iterator[Collective]:
        """Those of a kind of matrices, which are sharded over fsdp, sp and these axes."""
        model, lora, tp = self.workload.model, self.workload.config.lora, self.choice.tensor
        if not lora.rank:
            return
        shards, every = self.over("fsdp", "sp", *also), self.over("dp", "fsdp", "sp", *also)
        parts = self.fsdp * self.sp * (self.ep if also else 1)
        times, layers = self.sizes.layers * self.micro_batches, self.sizes.layers
        stack = self.sizes.stacks[-1]
        about = sum(len(block.of_kind(kind)) for block in stack.blocks), layers  # one is sharded
        axes = (("tp", tp),) if also else (("tp", tp), ("ep", self.choice.size("ep")))
        numbers = adapter_numbers(model, lora, axes, (kind,))
        half = adapter_numbers(model, lora, (("fsdp", 2), *axes), (kind,))  # of what is sharded
        sharded, replicated = 2 * (numbers - half) // layers, (2 * half - numbers) // layers
        size, what = self.item * self.number(sharded), "factors of a layer"
        for phase in PASSES:
            weights: Payload = "layer weights"
            yield Collective("all-gather", shards, size, times, phase, what, weights, *about)
        gradients: tuple[tuple[str, tuple[str, ...], Number], ...] = (
            ("reduce-scatter", shards, size),
            ("all-reduce", self.over("dp"), size // parts),
            ("all-reduce", every, self.item * self.number(replicated)),
        )
        what = f"gradients of the {what}"
        for operation, over, each in gradients:
            payload: Payload = "layer gradients"
            yield Collective(operation, over, each, times, "backward", what, payload, *about)

    def tables(self) -> Iterator[Collective]:
        """The embedding and the LM head: all-gathered once, their gradients per micro-batch."""
        shards, replicas = self.shards, self.over("dp")
        size = self.item * (self.number(self.device.padded_vocab) * self.embed) // self.tp
        tables = ("the embedding",) if self.sizes.is_tied else ("the embedding", "the LM head")
        for what in tables:
            yield Collective("all-gather", shards, size, 1, "forward", what, "table")
        times = self.micro_batches
        tables_sent: tuple[tuple[str, Payload, bool], ...] = (
            ("embedding", "embedding gradient", self.sizes.trains_embedding),
            ("LM head", "LM head gradient", self.sizes.trains_head),
        )
        for table, payload, trained in tables_sent:
            if not trained:
                continue
            what = f"gradient of the {table}"
            yield Collective("reduce-scatter", shards, size, times, "backward", what, payload)
            part = size // (self.fsdp * self.sp * self.ep)
            yield Collective("all-reduce", replicas, part, times, "backward", what, payload)

    def vectors(self) -> Iterator[Collective]:
        """Norms and biases: replicated, their gradients added once for all layers."""
        tokens, every = self.tokens, self.over("dp", "fsdp", "tp", "sp", "ep")
        residual = every if self.choice.sequence_parallel else tokens
        kinds: tuple[tuple[str, Vectors, tuple[str, ...], Number, Payload], ...] = (
            ("norms", self.sizes.residual_vectors, residual, 1, "vector gradients"),
            ("biases", self.sizes.head_vectors, tokens, self.tp, "vector gradients"),
            (
                "norms of queries and keys", self.sizes.other_vectors, every, 1,
                "q/k norm gradients",
            ),
        )  # fmt: skip
        for what, vectors, axes, split, payload in kinds:
            size = self.stored * self.number(vectors.gradients) // split
            yield Collective(
                "all-reduce",
                axes,
                size,
                self.micro_batches,
                "backward",
                f"gradients of {what}",
                payload,
                vectors.gradient_arrays,
            )

        yield from self._vectors_of_experts()
        # those of relative positions are summed by distance, before distances share a bucket
        for stack in self.sizes.stacks:
            if stack.is_biased and self.sizes.position_vectors.gradients:
                heads = self.number(self.sizes.dims["heads"], "heads")
                distances = 2 * self.number(self.length(stack), "tokens")
                yield Collective(
                    "all-reduce",
                    tokens,
                    self.four * heads * distances // self.tp,
                    self.micro_batches,
                    "backward",
                    "gradients of the biases of relative positions",
                    "vector gradients",
                )

    def _vectors_of_experts(self) -> Iterator[Collective]:
        """Biases of experts, of which ep splits the experts: added in each iteration of a loop."""
        vectors, stack = self.sizes.expert_vectors, self.sizes.stacks[-1]
        together = stack.period if stack.layers % stack.period == 0 else 1
        yield Collective(
            "all-reduce",
            self.over("dp", "fsdp", "sp"),
            together * self.stored * self.number(vectors.gradients) // stack.layers // self.ep,
            self.executions(stack) // together,
            "backward",
            f"gradients of the biases of experts of {a_layer(stack)}",
            "layer gradients",
            vectors.gradient_arrays,
            stack.layers,
            stack.name,
        )

    def optimizer(self) -> Iterator[Collective]:
        """Muon needs full matrices: each device gets those of some layers."""
        over = self.over("fsdp", "tp", "sp", "ep")
        if self.workload.config.optimizer.name != "muon" or not over:
            return
        devices = self.choice.size("fsdp", "tp", "sp", "ep")
        for stack in self.sizes.stacks:
            trained = [matrix for block in stack.blocks for matrix in block.with_gradients]
            for count in sorted({matrix.trained_layers for matrix in trained}, reverse=True):
                layers = self.number(-(-count // devices), "layers a device")
                matrices = [matrix for matrix in trained if matrix.trained_layers == count]
                weights = self.number(sum(matrix.weights for matrix in matrices))
                what = f"full matrices of {a_layer(stack)}, there and back"
                yield Collective(
                    "all-to-all",
                    over,
                    self.four * weights * layers,
                    2,
                    "optimizer",
                    what,
                    pieces=len(matrices),
                )

    def scalars(self) -> Iterator[Collective]:
        """The loss, the number of targets, the keys seen, and the gradient's norm."""
        sizes, times = self.sizes, 2 * self.micro_batches
        tokens, batch, shards = self.tokens, self.batch, self.shards
        norm = "norm of the gradient"
        packed = int(family_of(self.workload.model).keys_seen is not None)
        of_heads = sizes.head_vectors.gradient_arrays + sizes.position_vectors.gradient_arrays
        trained = [
            one for stack in sizes.stacks for block in stack.blocks for one in block.with_gradients
        ]
        # split over ep and shards by two dims
        of_experts = sum(matrix.kind != "matrix" for matrix in trained)
        apart = of_experts if self.over("ep") else 0
        split = sizes.trained_matrices + of_heads - sum(matrix.whole for matrix in trained)
        of_pairs = 0
        if self.workload.has_reference:
            times, of_pairs = 0, 7 * self.micro_batches + 1
        for what, axes, many, phase in (
            ("loss and entropy", tokens, times, "forward"),
            ("loss and metrics of pairs", batch, of_pairs, "forward"),
            ("number of targets", batch, 1, "forward"),
            ("number of targets", self.over("sp"), 1, "forward"),
            ("keys that a query sees", batch, packed, "forward"),
            ("keys that a query sees", self.over("sp"), packed, "forward"),
            (norm, shards, sizes.trained_matrices - apart, "optimizer"),
            (norm, self.over("fsdp", "sp"), apart, "optimizer"),
            (norm, self.over("ep"), apart + sizes.expert_vectors.gradient_arrays, "optimizer"),
            (norm, self.over("tp"), split, "optimizer"),
        ):
            if axes and many:
                yield Collective("all-reduce", axes, self.four, many, phase, what)  # type: ignore[arg-type]


def a_layer(stack: StackSizes) -> str:
    return f"a layer of the {stack.name}" if stack.name else "a layer"

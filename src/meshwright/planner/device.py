"""A device's share of a workload: sizes of its model and activations, as numbers or as terms."""

import functools
import math
from typing import NamedTuple

from meshwright.arithmetic import divisors, round_up
from meshwright.lazy import cached_property
from meshwright.models import OFFLOAD
from meshwright.ops import NF4, NF4_BLOCK
from meshwright.ops.attention import BLOCK_QUERIES as PLAIN_QUERIES
from meshwright.ops.attention import query_gradients
from meshwright.planner.attention import (
    exchange_of,
    plain_attention,
    splits_of,
    strategy_of,
)
from meshwright.planner.efficiency import told_to_overlap
from meshwright.planner.sizes import ModelSizes, StackSizes
from meshwright.planner.terms import MakeNumber, Number, plain
from meshwright.planner.workload import Choice, Workload

LANES = 128  # a TPU's arrays are this wide at least: a last dim of 64 takes the room of 128
SUBLANES = 8  # and the dim before it is a multiple of this
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int8": 1}
LAYER_BYTES = ITEM_BYTES | {NF4: 0.5 + 4 / NF4_BLOCK}  # with the scales of blocks
IN_FLIGHT = 2  # layers whose offloaded inputs are on the device: one computes, one is sent


class Device:
    """A device's share of a workload: sizes as numbers or, to be printed, as terms."""

    def __init__(self, workload: Workload, choice: Choice, number: MakeNumber = plain) -> None:
        self.workload, self.choice, self.number = workload, choice, number
        self.machine = machine = workload.machine
        self.sizes = sizes = workload.sizes
        self.is_tpu, self.strategy = machine.is_tpu, strategy_of(workload, choice)
        self.stored = number(ITEM_BYTES[workload.param_dtype], "bytes")
        self.stored_layers = number(LAYER_BYTES[workload.layers_dtype], "bytes")
        self.quantizes = workload.config.lora.quantizes
        self.moment = number(ITEM_BYTES[workload.moments_dtype], "bytes")  # of an optimizer
        self.used = number(ITEM_BYTES[workload.dtype], "bytes")
        self.float32 = number(4, "bytes")
        self.cached = number(1, "bytes") if choice.cache else self.used  # in a KV cache
        self.tp = number(choice.tensor, name="tp")
        # an engine's weights are whole but along tp, and experts along ep
        split = choice.tensor if workload.engine else choice.shards * choice.tensor
        self.devices = number(split, "devices")
        self.is_sharded = choice.shards > 1
        self.casts = ITEM_BYTES[workload.param_dtype] != ITEM_BYTES[workload.dtype]
        # frozen weights of unrolled layers are copied out of the arrays that stack them, unless a
        # layer dequantizes them
        frozen = bool(workload.config.lora.rank) and not self.is_tpu and not workload.scan
        self.copies = self.casts or (frozen and not self.quantizes)
        # a GPU's compiler frees a layer's cast weights as its gradients come, but in a loop, or if
        # gradients are sent
        self.loops = workload.scan or choice.remat == OFFLOAD
        alone = machine.chip.platform == "gpu" and split * choice.size("dp") == 1
        self.frees_by_layer = alone and self.casts and not self.loops
        self.ep = number(choice.size("ep"), name="ep")
        self.exchange = exchange_of(workload, choice)
        self.embed = number(sizes.embed)
        self.padded_vocab = round_up(workload.model.vocab, choice.tensor)  # in memory
        self.vocab = number(self.padded_vocab)
        # of a micro-batch
        self.sequences = workload.batch // (workload.data_ranks(choice) * choice.accumulation)
        # a CPU's memory is the host's
        self.offloads = choice.remat == OFFLOAD and machine.chip.platform != "cpu"

    @property
    def tokens(self) -> int:
        """Of a micro-batch, those that meet the LM head."""
        return self.sequences * (self.workload.lengths["tokens"] // self.choice.context)

    @property
    def loss_chunks(self) -> tuple[int, int]:
        """How many chunks of tokens the loss takes, and the tokens of one."""
        size = min(self.workload.config.loss.chunk, self.tokens)
        return math.ceil(self.tokens / size), size

    @property
    def stores_queries_by_length(self) -> bool:
        """Whether a TPU's compiler saves queries with their length last, not a short head_dim.

        Read from a buffer assignment for v5e, where rotary embeddings write them; eleven recorded
        programs agree. One with micro-batches and one told to overlap do not, nor one of three over
        several slices: of such steps the larger size is counted.
        """
        overlaps = self.workload.overlap and told_to_overlap(self.machine.chip)
        return self.choice.accumulation == self.machine.slices == 1 and not overlaps

    @property
    def table(self) -> Number:
        """The embedding or the LM head, all-gathered."""
        return self.vocab * self.embed / self.tp


class DeviceStack:
    """A device's share of one stack of layers."""

    def __init__(self, device: Device, index: int, sizes: StackSizes) -> None:
        number, choice = device.number, device.choice
        self.device, self.index, self.sizes = device, index, sizes
        self.layers = number(sizes.layers, "layers")
        # of a layer, before tp divides them: as often as tp has devices, where it does not
        more = choice.tensor - 1
        self.weights = number(sizes.weights + more * sizes.whole_weights)
        self.gradient_weights = number(sizes.gradient_weights + more * sizes.whole_gradient_weights)
        self.attention_weights = number(
            sizes.attention_weights + more * sizes.whole_attention_weights
        )
        self.length = device.workload.lengths[sizes.field] // choice.context
        self.tokens = number(device.sequences * self.length, "tokens")

    @property
    def mlp_chunks(self) -> int:
        """In how many chunks the mlp takes its tokens: as ops.chunks cuts them."""
        chunk = 0 if self.sizes.experts else self.device.choice.mlp_chunk
        least = math.ceil(self.length / chunk) if chunk else 1
        return next(n for n in divisors(self.length) if n >= least) if chunk else 1

    @property
    def offloaded(self) -> Number:
        """Bytes in the host's memory."""
        return self.layers * self._saved_layer if self.device.offloads else 0

    @property
    def saved(self) -> Number:
        """Bytes that all layers save for the backward pass, on the device."""
        number, offloads = self.device.number, self.device.offloads
        in_flight = min(IN_FLIGHT, self.sizes.layers)
        layers = number(in_flight, "layers") if offloads else self.layers
        return layers * self._saved_layer + self.bias

    @property
    def stored_weights(self) -> Number:
        """Of a layer, before the devices that split all of it divide them."""
        choice = self.device.choice
        if self.device.workload.engine is None or choice.size("ep") == 1:
            return self.weights
        router = sum(matrix.weights for matrix in self.sizes.of_kind("router"))
        elsewhere = choice.tensor * (router - router // choice.size("ep"))
        return self._but_experts_elsewhere(self.weights) - self.device.number(elsewhere)

    @property
    def layer(self) -> Number:
        """Bytes of a layer's matrices, all-gathered; of experts, those of this device."""
        return self.device.used * self._but_experts_elsewhere(self.weights) / self.device.tp

    @property
    def experts(self) -> Number:
        """Bytes of a layer's experts on this device, all-gathered."""
        weights = self.device.number(self.sizes.expert_weights)
        return self.device.used * weights / (self.device.tp * self.device.ep)

    @property
    def layer_gradients(self) -> Number:
        """Bytes of the gradients of a layer's matrices, before they are scattered."""
        gradients = self._but_experts_elsewhere(self.gradient_weights)
        return self.device.used * gradients / self.device.tp

    def _but_experts_elsewhere(self, weights: Number) -> Number:
        """Of weights of a layer, which ep does not split, without those of experts elsewhere."""
        if self.device.choice.size("ep") == 1 or not self.sizes.experts or not weights:
            return weights
        number, experts = self.device.number, self.sizes.expert_weights
        ways = self.device.choice.size("ep")
        return weights - number(experts - experts // ways)

    @property
    def trained_weights(self) -> Number:
        """Weights of all layers that are trained, as `gradient_weights` counts them."""
        if self.sizes.trained_weights == self.sizes.layers * self.sizes.gradient_weights:
            return self.layers * self.gradient_weights
        more = self.device.choice.tensor - 1
        trained = self.sizes.trained_weights + more * self.sizes.whole_trained_weights
        return self.device.number(trained)

    @property
    def stream(self) -> Number:
        """Bytes of the residual stream."""
        return self.device.used * self.tokens * self.device.embed

    @cached_property
    def _saved_layer(self) -> Number:
        """Bytes that a layer saves for the backward pass."""
        device, choice = self.device, self.device.choice
        copies = 0 if device.exchange else self.token_copies  # an exchange saves none of them
        groups = _saved_numbers(
            device.sizes, self.index, device.workload.remat[choice.remat], choice.tensor,
            choice.sequence_parallel, self._stored_by, copies,
        )  # fmt: skip
        each: Number = 0
        for field, multiple, numbers, lse in groups:
            length = round_up(device.workload.lengths[field] // choice.context, multiple)
            of_token = device.used * device.number(numbers)
            if lse:
                of_token = of_token + device.float32 * device.number(lse)
            each = each + device.number(device.sequences * length, "tokens") * of_token
        return each

    @property
    def bias(self) -> Number:
        """Bytes of the bias that is added to scores: one for all layers and sequences."""
        device, total = self.device, 0
        if not self.sizes.is_biased:
            return 0
        for stack, attention, split in splits_of(device.workload, device.choice):
            if stack is self.sizes and attention.biased:
                heads = device.number(split.heads, "heads")
                queries = device.number(split.part, "queries")
                keys = device.number(split.keys or split.length, "keys")
                total = total + device.float32 * heads * queries * keys
        return total

    @property
    def _stored_by(self) -> "tuple[_Stored, ...]":
        """How the activations of each attention of a layer are stored."""
        device = self.device
        if not device.is_tpu:
            return tuple(_AS_IS for block in self.sizes.blocks if block.attention)
        slow = plain_attention(device.workload, device.choice)
        plain = [attention for stack, attention, _ in slow if stack is self.sizes]
        rotary = _QUERIES_LAST if device.stores_queries_by_length else _FUSED
        return tuple(
            # keys of another sequence have no positions to rotate queries by
            _LENGTH_LAST if attention in plain else _FUSED if attention.keys_from else rotary
            for attention in (block.attention for block in self.sizes.blocks)
            if attention
        )

    def working(self, arrays: int) -> Number:
        """Bytes that a layer's backward pass computes with: activations and their gradients."""
        device = self.device
        mlp = device.number(self.sizes.mlp.inner / device.choice.tensor / self.mlp_chunks)
        if (experts := self.sizes.experts) is None:
            return device.used * self.tokens * (arrays * mlp + 4 * device.embed)
        chosen = device.number(experts.per_token, "experts")
        copies, exchanged = device.number(self.token_copies, "experts"), chosen
        if device.exchange == "ring":  # of one device at a time; those of all, sums and gradients
            copies, exchanged = chosen, 3 * device.ep
        numbers = copies * (arrays * mlp / chosen + 3 * device.embed)
        return device.used * self.tokens * (numbers + (4 + exchanged) * device.embed)

    @property
    def token_copies(self) -> float:
        """Copies of tokens that a device's experts have room for, over its own tokens.

        One for each expert of a token: in a ring of all devices' tokens, in an all-to-all as many
        as others may send it.
        """
        experts, ways = self.sizes.experts, self.device.choice.size("ep")
        if experts is None:
            return 1
        if self.device.exchange is None:
            return experts.per_token
        if self.device.exchange == "ring":
            return ways * experts.per_token
        return ways * self.room

    @property
    def room(self) -> float:
        """Of an all-to-all: copies of a token that a device has room for from each other one."""
        return self.device.workload.expert_room(self.sizes, self.device.choice.size("ep"))

    @property
    def mlp_arrays(self) -> int:
        """Arrays of an mlp in its backward pass: with a gate 5."""
        return 2 * self.sizes.mlp.arrays_inside + 1

    @property
    def mlp_arrays_left(self) -> int:
        """Of those, the ones that are there while attention is computed."""
        if self.device.machine.chip.platform == "cpu":
            return 0  # it is done with the mlp before
        one_array = self.sizes.mlp.inner / self.mlp_chunks
        if self.device.is_tpu and self._query_gradients > one_array:
            return self.mlp_arrays  # those it is done with leave gaps that are too small
        return self.sizes.mlp.arrays_inside + (1 if self.device.is_tpu else 2)

    def heads(self, queries: int, keys: int) -> Number:
        """Numbers of so many arrays like the queries, and like the keys, of a token."""
        device, dims = self.device, self.device.sizes.dims
        per_head = device.number(dims["head_dim"]) / device.tp
        numbers = queries * device.number(dims["heads"]) + keys * device.number(dims["kv_heads"])
        return numbers * per_head

    @property
    def scores(self) -> Number:
        """Bytes of scores, attention weights and their gradients, in attention by plain JAX."""
        device, choice = self.device, self.device.choice
        largest: Number = 0
        for stack, _, split in plain_attention(device.workload, choice):
            if stack is not self.sizes:
                continue
            ring = device.strategy in ("ring", "allgather")
            keys = split.part if ring else split.keys or split.length
            heads = split.heads / (choice.context if device.strategy == "ulysses" else 1)
            numbers = device.number(device.sequences, "sequences") * device.number(
                min(PLAIN_QUERIES, split.part if ring else split.length), "queries"
            )
            numbers = numbers * device.number(heads, "heads") * device.number(keys, "keys")
            blocks = device.machine.chip.platform == "cpu" and split.length > PLAIN_QUERIES
            arrays = 5 if blocks and not ring else 3  # a CPU keeps two more from block to block
            largest = max(largest, arrays * device.float32 * numbers)
        return largest

    @property
    def context_parallel(self) -> Number:
        """Bytes of keys in flight, or all-gathered, and of their gradients."""
        device = self.device
        used, float32 = device.used, device.float32
        keys, queries = self.tokens * self.heads(0, 2), self.tokens * self.heads(1, 0)
        match device.strategy:
            case "ring":  # and the sums over ring steps, forward or backward, in float32
                return (2 * used + 3 * float32) * keys + 5 * float32 * queries
            case "allgather":
                return (used + float32) * keys * device.number(device.choice.context, name="sp")
            case "ulysses":
                return 3 * used * queries
            case _:
                return 0

    @property
    def gpu_arrays(self) -> tuple[int, int]:
        """Arrays as large as the queries, and as the keys, in attention's backward pass on GPUs.

        Queries, output, the gradients of both and copies of them; keys and values with their
        gradients, and in a ring two more pairs in flight and gradients in float32.
        """
        return 7, 12 if self.device.strategy == "ring" else 4

    @property
    def attention(self) -> Number:
        """Bytes of attention's backward pass beside the layer's other activations."""
        device = self.device
        if not self.sizes.attention_weights:
            return 0
        if device.is_tpu:
            return self.context_parallel + self.scores + self.bias + self.query_gradients
        all_gathered = 0 if device.strategy == "ring" else self.context_parallel
        return device.used * self.tokens * self.heads(*self.gpu_arrays) + all_gathered + self.scores

    @property
    def query_gradients(self) -> Number:
        """Bytes of the gradients of queries by a TPU's fused kernel, one for each block of keys."""
        device, numbers = self.device, self._query_gradients
        return device.used * self.tokens * device.number(numbers) / device.tp if numbers else 0

    @cached_property
    def _query_gradients(self) -> int:
        """Numbers of them for a token."""
        device, dims = self.device, self.device.sizes.dims
        if not self.sizes.attention_weights:
            return 0
        blocks = query_gradients(device.workload.lengths[self.sizes.field])
        if device.strategy in ("ring", "allgather") or device.exchange:
            return 0  # in parts; or in the place of what an exchange of experts is done with
        if blocks < 2 or plain_attention(device.workload, device.choice):
            return 0
        return blocks * dims["heads"] * round_up(dims["head_dim"], LANES)

    @property
    def recomputed_attention(self) -> Number:
        """Bytes of attention computed again on GPUs: input, queries, output, and copies of them.

        Keys and values are as many as in the backward pass.
        """
        device = self.device
        return device.used * self.tokens * (device.embed + self.heads(4, self.gpu_arrays[1]))


class _Stored(NamedTuple):
    """Multiples to which a device pads head_dim and the length of what attention saves."""

    head_dim: int
    length: int
    queries_last: bool = False  # the length is the last dim of queries, whatever it is of others


_AS_IS = _Stored(1, 1)
_FUSED = _Stored(LANES, SUBLANES)  # by a TPU's kernels: head_dim is the last dim
_LENGTH_LAST = _Stored(1, LANES)  # a TPU's compiler avoids a last dim that is shorter
_QUERIES_LAST = _FUSED._replace(queries_last=True)


@functools.lru_cache(maxsize=4096)
def _saved_numbers(
    sizes: ModelSizes,
    stack: int,
    policy: frozenset[str],
    tp: int,
    sequence_parallel: bool,
    stored_by: tuple[_Stored, ...],
    token_copies: float,
) -> tuple[tuple[str, int, float, float], ...]:
    """What a layer of a stack saves of a token, by the batch field of that token.

    Each with the multiple that its length is padded to, numbers in the dtype of the matmuls, and
    numbers in float32: the lse of attention.
    """
    found: dict[tuple[str, int], list[float]] = {}
    own, stored = sizes.stacks[stack].field, iter(stored_by)
    usual = SUBLANES if _AS_IS not in stored_by else 1
    for block in sizes.stacks[stack].blocks:
        how = next(stored) if block.attention else _AS_IS
        keys_from = block.attention.keys_from if block.attention else ""
        for name, dims in block.saved.items():
            if name not in policy:
                continue
            field, multiple = own, usual
            if dims == ("embed",):
                width = sizes.embed / (tp if sequence_parallel else 1)
            elif dims[-1] == "head_dim":
                array = _LENGTH_LAST if how.queries_last and name == "q" else how
                head_dim = round_up(sizes.dims["head_dim"], array.head_dim)
                width = sizes.dims[dims[0]] * head_dim / tp
                field = keys_from if keys_from and dims[0] == "kv_heads" else own
                multiple = array.length
            else:
                known = {**sizes.stacks[stack].dims, "chosen": token_copies}
                width = math.prod(known[dim] for dim in dims) / tp
            found.setdefault((field, multiple), [0.0, 0.0])[0] += width
        if block.attention and "attention" in policy:
            found.setdefault((own, usual), [0.0, 0.0])[1] += sizes.dims["heads"] / tp
    return tuple((*key, numbers[0], numbers[1]) for key, numbers in found.items())

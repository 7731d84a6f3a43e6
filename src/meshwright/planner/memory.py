"""Bytes of a device at the fullest moment of a step, by kind, from sizes alone.

Memory can be fullest at several moments of a step. *Loss*: all that the layers keep is there, and
with it the output head, its gradient and a chunk of logits. *Backward*: what the layers keep is
there, and one layer's weights, its gradients and all it computes with. *Attention*: the same layer
when its mlp is done but for the weights' gradients, and attention has its turn. *End*: what was
kept is gone, the gradients of all weights are there, and the embedding's lies whole. The largest
counts; tests hold the sum to the buffer assignments of the compilers for TPUs and GPUs and to a
GPU's measured peak.
"""

import math
from collections.abc import Mapping

from meshwright.machines import Machine
from meshwright.models.decoder import REMAT
from meshwright.ops import keeps_logit_gradients
from meshwright.ops.attention import BLOCK_QUERIES as PLAIN_QUERIES
from meshwright.ops.attention import sequence_order
from meshwright.planner.candidates import with_strategy
from meshwright.planner.efficiency import hides, told_to_overlap
from meshwright.planner.kernels import slow_attention
from meshwright.planner.parts import (
    LANES,
    attention_weights,
    item_bytes,
    length,
    loss_chunks,
    mlp_chunks,
    mlp_weights,
    rows,
    split_of,
    strategy_of,
    tokens,
    vocab,
)
from meshwright.planner.result import Choice, Job, Memory

TOKEN_FIELDS = 4  # tokens, targets, segments, positions: 4 bytes each
MLP_ARRAYS_LEFT = {True: 3, False: 4}  # by is_tpu: of the mlp's, there in attention's turn
AHEAD = 0.5  # of the output head, with overlap: steps compiled with it took -1.3 to 2.1 of it more
PROMPT = 8192  # tokens of a prompt that are taken at a time, serving
KINDS = (
    "parameters", "optimizer", "weights in bfloat16", "gradients", "saved activations",
    "gathered weights", "working activations", "loss", "attention", "batch",
)  # fmt: skip


def memory(job: Job, choice: Choice, machine: Machine) -> Memory:
    """What a device holds at the fullest moment, and what it has."""
    choice = _named(job, choice, machine)
    if job.kind == "serve":
        kinds = _serving(job, choice)
    else:
        always, moments = _always(job, choice, machine), _moments(job, choice, machine)
        fullest = max(moments.values(), key=lambda kinds: sum(kinds.values()))
        kinds = {kind: always.get(kind, 0) + fullest.get(kind, 0) for kind in KINDS}
    return Memory({k: math.ceil(v) for k, v in kinds.items() if v}, machine.usable_memory)


def moments(job: Job, choice: Choice, machine: Machine) -> dict[str, float]:
    """Total bytes at each moment, for `--explain`."""
    choice = _named(job, choice, machine)
    always = sum(_always(job, choice, machine).values())
    found = _moments(job, choice, machine)
    return {moment: always + sum(kinds.values()) for moment, kinds in found.items()}


def _named(job: Job, choice: Choice, machine: Machine) -> Choice:
    return with_strategy(job, choice, machine) if choice.strategy == "auto" else choice


def matrices(job: Job, choice: Choice) -> tuple[float, float]:
    """Numbers a device keeps of the layers' matrices, and of embedding and head."""
    model = job.model
    split = choice.tp * choice.fsdp * choice.sp
    layers = model.layers * (attention_weights(model) + mlp_weights(model)) / split
    ends = (1 if model.tied_embeddings else 2) * vocab(job, choice) * model.embed / split
    return layers, ends


def vectors(job: Job, choice: Choice) -> float:
    """Numbers in norms and biases; biases are split over tp with their heads."""
    model = job.model
    found = (2 * model.layers + 1) * model.embed
    if model.qkv_bias:
        found += model.layers * model.head_dim * (model.heads + 2 * model.kv_heads) // choice.tp
    if model.output_bias:
        found += model.layers * model.embed
    if model.qk_norm:
        found += 2 * model.layers * model.head_dim
    return found


def _always(job: Job, choice: Choice, machine: Machine) -> dict[str, float]:
    """What is there all through the step."""
    layers, ends = matrices(job, choice)
    small = vectors(job, choice)
    kept, used = item_bytes(job.param_dtype), item_bytes(job.dtype)
    whole = layers + ends + small
    moments = {
        "adamw": 2 * whole,
        "lion": whole,
        "adafactor": 0.01 * whole,  # a row and a column of each matrix
        "muon": layers + 2 * (ends + small),
    }
    each = rows(job, choice) * choice.accumulation * length(job, choice)
    always: dict[str, float] = {
        "parameters": kept * whole,
        "optimizer": kept * moments.get(job.optimizer, 2 * whole),
        "batch": 4 * each * (TOKEN_FIELDS if job.documents else 2),
    }
    if casts_kept(job, choice, machine):
        always["weights in bfloat16"] = used * ends
    if choice.accumulation > 1:
        always["gradients"] = 4 * (layers + ends)
    return always


def _moments(job: Job, choice: Choice, machine: Machine) -> dict[str, dict[str, float]]:
    model, used = job.model, item_bytes(job.dtype)
    layers, ends = matrices(job, choice)
    vocab_here = vocab(job, choice) / choice.tp
    table = vocab_here * model.embed
    stream = used * tokens(job, choice) * model.embed
    layer = used * (attention_weights(model) + mlp_weights(model)) / choice.tp
    is_split = choice.fsdp * choice.sp > 1
    head, logits = loss_numbers(job, choice, machine)
    loss = {
        "saved activations": _saved(job, choice, machine),
        "loss": head * table + used * logits * vocab_here + loss_streams(machine) * stream,
    }
    backward = {
        "saved activations": _saved(job, choice, machine),
        "gradients": used * layers,
        "gathered weights": 2 * layer if is_split else layer,
        "working activations": _working(job, choice, 5),
        "loss": used * ends
        if head_scattered(job, choice)
        else kept_head(job, choice, machine) * table,
    }
    # the embedding's gradient is summed in float32, then sent in the dtype of the matmuls
    end = {
        "gradients": used * (layers + ends) + 4 * table + used * table + stream,
        "gathered weights": layer if gradient_under_way(choice, machine) else 0.0,
    }
    if model.tied_embeddings:  # the head's is added to it there
        end["loss"] = kept_head(job, choice, machine) * table
    attention = backward | {
        "working activations": _working(job, choice, MLP_ARRAYS_LEFT[machine.is_tpu]),
        "attention": _attention_turn(job, choice, machine),
    }
    found = {"loss": loss, "backward": backward, "attention": attention, "end": end}
    if gap := gap_of_embedding(job, choice, machine):
        loss["gathered weights"] = used * gap / choice.tp
    if recomputes_early(choice, machine):
        loss["attention"] = _attention_forward(job, choice)
    if not machine.is_tpu:
        # the gradients of the layer before it are still to be scattered
        weights = used * attention_weights(model) / choice.tp
        attention["gathered weights"] = layer + weights if is_split else layer
    for name, moment in found.items():
        if item_bytes(job.param_dtype) != used and (name != "end" or casts_at_end(choice, machine)):
            moment["weights in bfloat16"] = used * layers
        if choice.accumulation > 1 and name != "loss":
            moment["gradients"] = max(moment["gradients"], used * (layers + ends))
        if gathers_ahead(job, choice, machine):
            moment["gathered weights"] = moment.get("gathered weights", 0) + AHEAD * used * table
    return found


def loss_numbers(job: Job, choice: Choice, machine: Machine) -> tuple[int, int]:
    """At the loss: bytes for each number of the output head, and how many tokens' logits there are.

    The head and, where it is summed over chunks, its gradient in float32; a chunk's logits and
    their gradients. Where the gradients of all logits are kept, those instead of the sum.
    """
    used = item_bytes(job.dtype)
    chunks, chunk = loss_chunks(job, choice)
    if not head_at_once(job, choice, machine):
        return used + 4, 2 * chunk
    return used, chunks * chunk + (2 * chunk if chunks > 1 else chunk)


def head_at_once(job: Job, choice: Choice, machine: Machine) -> bool:
    """Whether the output head's gradient is one matmul of all tokens, as ops.cross_entropy does."""
    chunks, chunk = loss_chunks(job, choice)
    tokens_filled = chunks * chunk
    embed, used = job.model.embed, item_bytes(job.dtype)
    return not machine.is_tpu and keeps_logit_gradients(tokens_filled, embed, used)


def head_scattered(job: Job, choice: Choice) -> bool:
    """Whether in the backward pass a device has only its part of the output head's gradient.

    That of a tied one waits, whole, for the embedding's.
    """
    return choice.fsdp * choice.sp > 1 and not job.model.tied_embeddings


def gap_of_embedding(job: Job, choice: Choice, machine: Machine) -> int:
    """Numbers of the embedding, gathered, in whose place there is nothing at the loss.

    A TPU's buffers are placed in the order of its program. Where gathers go on while others compute
    and tokens are sent to their places first, the embedding is gathered meanwhile; what the layers
    save is placed above it and stays there. One chunk's logits fit into the gap.
    """
    by_itself = machine.is_tpu and hides(machine.chip, "all-gather", overlap=False) > 0
    sent = sequence_order(split_of(job, choice), strategy_of(job, choice)) == "zigzag"
    if not (by_itself and sent) or job.model.tied_embeddings:  # a tied one is the head at the loss
        return 0
    _, chunk = loss_chunks(job, choice)
    left = job.model.embed - (chunk if chunk <= job.model.embed else 0)
    return left * vocab(job, choice)


def kept_head(job: Job, choice: Choice, machine: Machine) -> int:
    """Bytes for each number of the output head's gradient, through the backward pass.

    With more than one device of tokens it is summed over them, in the dtype of the matmuls, before
    that pass. Alone, a GPU keeps what it summed until the update.
    """
    used = item_bytes(job.dtype)
    alone = choice.dp * choice.fsdp * choice.sp == 1
    summed = alone and not machine.is_tpu and not head_at_once(job, choice, machine)
    return 4 if summed else used


def casts_kept(job: Job, choice: Choice, machine: Machine) -> bool:
    """Whether embedding and head, cast, stay from one micro-batch to the next.

    They are cast before the loop, and gathered in it. A TPU casts them anew.
    """
    cast = item_bytes(job.param_dtype) != item_bytes(job.dtype)
    return choice.accumulation > 1 and cast and not machine.is_tpu


def casts_at_end(choice: Choice, machine: Machine) -> bool:
    """Whether the layers' cast matrices are still there at the end of the step.

    A GPU has no use for them then, unless another micro-batch follows.
    """
    return machine.is_tpu or choice.accumulation > 1


def gradient_under_way(choice: Choice, machine: Machine) -> bool:
    """Whether the gradient of the last layer is still to be scattered when the embedding's is made.

    In XLA's loop for GPUs each layer's is scattered while that of the next is computed.
    """
    return not machine.is_tpu and choice.fsdp * choice.sp > 1 and choice.accumulation == 1


def recomputes_early(choice: Choice, machine: Machine) -> bool:
    """Whether the last layer's attention is computed again while the loss is.

    XLA for GPUs fills the time of gathering the output head with it: it waits for nothing else.
    """
    is_split = choice.fsdp * choice.sp > 1
    return not machine.is_tpu and is_split and "attention" not in REMAT[choice.remat]


def loss_streams(machine: Machine) -> int:
    """Arrays as large as the residual stream at the loss: hidden states, their gradient.

    And on GPUs the stream before the last norm.
    """
    return 2 if machine.is_tpu else 3


def gathers_ahead(job: Job, choice: Choice, machine: Machine) -> bool:
    """Whether what is split is gathered before it is needed because overlap was asked for."""
    return job.overlap and told_to_overlap(machine.chip) and choice.fsdp * choice.sp > 1


def _lanes(size: float, machine: Machine) -> float:
    """A last dim as a TPU stores it."""
    return LANES * math.ceil(size / LANES) if machine.is_tpu else size


def _saved(job: Job, choice: Choice, machine: Machine) -> float:
    """What all layers keep for the backward pass."""
    numbers, sums = saved_of_token(job, choice, machine)
    each = item_bytes(job.dtype) * numbers + 4 * sums
    return job.model.layers * tokens(job, choice) * each


def saved_of_token(job: Job, choice: Choice, machine: Machine) -> tuple[float, float]:
    """Numbers that a layer keeps of a token: what remat's policy names.

    And those that are kept in float32: the sums of attention's softmax.
    """
    model = job.model
    wide = _lanes(model.head_dim, machine)
    heads, kv_heads = model.heads / choice.tp * wide, model.kv_heads / choice.tp * wide
    mlp = model.mlp / choice.tp
    between = model.embed / (choice.tp if choice.sequence_parallel else 1)
    widths: Mapping[str, float] = {
        "input": between,
        "normed": 2 * between,
        "q": heads,
        "k": kv_heads,
        "v": kv_heads,
        "attention": heads,
        "middle": between,
        "gate": mlp,
        "up": mlp,
        "activated": mlp,
    }
    kept = sum(widths[name] for name in REMAT[choice.remat])
    sums = model.heads / choice.tp if "attention" in REMAT[choice.remat] else 0.0
    return kept, sums


def _working(job: Job, choice: Choice, of_mlp: int) -> float:
    """What one layer's backward pass computes with: its activations and their gradients."""
    model, used = job.model, item_bytes(job.dtype)
    here = tokens(job, choice)
    mlp = model.mlp / choice.tp / mlp_chunks(job, choice)
    return used * here * (of_mlp * mlp + 4 * model.embed)


def _attention_turn(job: Job, choice: Choice, machine: Machine) -> float:
    """What attention's backward pass has beside the layer's other activations."""
    scores = _scores(job, choice, machine)
    if machine.is_tpu:
        return _attention(job, choice) + scores
    return _attention_backward(job, choice) + scores


def _attention(job: Job, choice: Choice) -> float:
    """Keys under way and their gradients; the gathered ones where they are gathered."""
    model, used = job.model, item_bytes(job.dtype)
    here = tokens(job, choice)
    keys = 2 * here * model.kv_heads / choice.tp * model.head_dim
    match strategy_of(job, choice):
        case "ring":  # and the sums over turns, forward or backward, in float32
            queries = here * model.heads / choice.tp * model.head_dim
            return keys * (2 * used + 3 * 4) + 5 * 4 * queries
        case "allgather":
            return keys * choice.sp * (used + 4)
        case "ulysses":
            return 3 * used * here * model.heads / choice.tp * model.head_dim
        case _:
            return 0.0


def scores_shape(job: Job, choice: Choice, machine: Machine) -> tuple[int, int, float, int]:
    """Of attention in plain JAX: rows, queries at a time, heads and keys; all 0 in fused kernels.

    Three such arrays of float32 are there at once: scores, weights and their gradients.
    """
    if slow_attention(job, choice, machine) is None:
        return 0, 0, 0, 0
    strategy, heads = strategy_of(job, choice), job.model.heads / choice.tp
    keys = length(job, choice) if strategy in ("ring", "allgather") else job.seq
    heads = heads / choice.sp if strategy == "ulysses" else heads
    return rows(job, choice), min(PLAIN_QUERIES, keys), heads, keys


def _scores(job: Job, choice: Choice, machine: Machine) -> float:
    return 3 * 4 * math.prod(scores_shape(job, choice, machine))


def attention_arrays(job: Job, choice: Choice) -> tuple[int, int]:
    """Arrays as large as the queries, and as the keys, in attention's backward pass on GPUs.

    Queries, output, the gradients of both and what is cut from or put together to them; keys and
    values with their gradients, and in a ring two more pairs under way and gradients in float32.
    """
    return 7, 12 if strategy_of(job, choice) == "ring" else 4


def _attention_forward(job: Job, choice: Choice) -> float:
    """Of attention computed again on GPUs: its input, queries, output and what is cut from them.

    Keys and values are as many as in the backward pass.
    """
    model, used = job.model, item_bytes(job.dtype)
    _, keys = attention_arrays(job, choice)
    heads = (4 * model.heads + keys * model.kv_heads) / choice.tp * model.head_dim
    return used * tokens(job, choice) * (model.embed + heads)


def _attention_backward(job: Job, choice: Choice) -> float:
    """Of attention's backward pass on GPUs."""
    model, used = job.model, item_bytes(job.dtype)
    queries, keys = attention_arrays(job, choice)
    numbers = (queries * model.heads + keys * model.kv_heads) / choice.tp * model.head_dim
    gathered = 0.0 if strategy_of(job, choice) == "ring" else _attention(job, choice)
    return used * tokens(job, choice) * numbers + gathered


def _serving(job: Job, choice: Choice) -> dict[str, float]:
    """Weights in the dtype they are multiplied in, the cache, and a prompt's activations."""
    model, used = job.model, item_bytes(job.dtype)
    rows_here = math.ceil(job.batch / choice.dp)
    seen = min(job.seq, model.sliding_window or job.seq)
    cache = 2 * model.layers * rows_here * seen * model.kv_heads / choice.tp * model.head_dim
    layers, ends = matrices(job, choice)
    prompt = min(job.seq, PROMPT) * (2 * model.mlp / choice.tp + 4 * model.embed)
    return {
        "parameters": used * (layers + ends + vectors(job, choice)),
        "key-value cache": used * cache,
        "working activations": used * prompt + 4 * rows_here * vocab(job, choice) / choice.tp,
    }

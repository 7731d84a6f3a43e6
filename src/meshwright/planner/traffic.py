"""Every collective of the built-in train step, in closed form.

    for one in traffic(job, choice):
        print(one.operation, one.axes, one.bytes, one.times, one.what)

The step sends nothing by itself: each exchange is written out in models.decoder.forward, train.step
and ops, and stands here once more as a formula. Tests hold both to the compiled program.
"""

from collections.abc import Callable, Iterator
from typing import Literal

from meshwright.meshes import STANDARD_AXES
from meshwright.ops.attention import ring_steps_of, sequence_order
from meshwright.planner.parts import (
    attention_weights,
    item_bytes,
    length,
    loss_chunks,
    mlp_chunks,
    mlp_weights,
    rows,
    split_of,
    strategy_of,
    vocab,
)
from meshwright.planner.result import Choice, Job, Phase, Transfer

FLOAT, INT = 4, 4
PASSES: tuple[Phase, Phase] = ("forward", "backward")
KEY_GRADIENTS = "gradients of keys and values"
EMBEDDING, HEAD = "gradient of the embedding", "gradient of the output head"


# what it belongs to: a layer's weights, which may be sent while another layer computes; a layer's
# activations, which are needed at once; or the whole step
Part = Literal["weights", "activations", "step"]
# the first seven fields of a Transfer, and its formula
Sent = tuple[str, str, tuple[str, ...], int, int, Phase, int, str]
Row = tuple[str, str, tuple[str, ...], int, int, Phase, int, str, Part]


def traffic(job: Job, choice: Choice) -> tuple[Transfer, ...]:
    """What one optimizer step sends; links and seconds are filled in by plan.time."""
    return tuple(Transfer(*row[:7], formula=row[7]) for row in rows_of(job, choice))


def rows_of(job: Job, choice: Choice) -> list[Row]:
    """The same as plain tuples: hundreds of choices are compared in a second."""
    found: list[Row] = []
    for part, kinds in _PARTS.items():
        for kind in kinds:
            found += [(*row, part) for row in kind(job, choice) if row[2] and row[3] and row[4]]
    return found


def _wide(choice: Choice, *axes: str) -> tuple[str, ...]:
    """Those of the axes that have more than one device."""
    return tuple(axis for axis in STANDARD_AXES if axis in axes and getattr(choice, axis) > 1)


def _layer_weights(job: Job, choice: Choice) -> Iterator[Sent]:
    """A layer's matrices: gathered over axes that split them and the tokens; gradients back."""
    model, item = job.model, item_bytes(job.dtype)
    over, copies = _wide(choice, "fsdp", "sp"), _wide(choice, "dp")
    ways = choice.fsdp * choice.sp
    each = model.layers * choice.accumulation
    e, d, tp = model.embed, model.head_dim, choice.tp
    groups = (
        (
            "attention weights", attention_weights(model), 4,
            f"2·{e}·{d}·({model.heads} + {model.kv_heads}) / tp {tp}",
        ),
        ("mlp weights", mlp_weights(model), 3, f"3·{e}·{model.mlp} / tp {tp}"),
    )  # fmt: skip
    for what, numbers, pieces, words in groups:
        size = item * numbers // tp
        words = f"{item} bytes · {words}"
        for phase in PASSES:
            yield f"{what} of a layer", "all-gather", over, size, each, phase, pieces, words
        gradient = f"gradient of a layer's {what}"
        yield gradient, "reduce-scatter", over, size, each, "backward", pieces, words
        yield (
            gradient, "all-reduce", copies, size // ways, each, "backward", pieces,
            f"{words} / (fsdp {choice.fsdp} · sp {choice.sp})",
        )  # fmt: skip


def _ends(job: Job, choice: Choice) -> Iterator[Sent]:
    """The embedding and the output head, in the same way."""
    model, item = job.model, item_bytes(job.dtype)
    over, copies = _wide(choice, "fsdp", "sp"), _wide(choice, "dp")
    ways = choice.fsdp * choice.sp
    end = item * vocab(job, choice) * model.embed // choice.tp
    words = f"{item} bytes · {vocab(job, choice)}·{model.embed} / tp {choice.tp}"
    # the same for all micro-batches: gathered once; tied, both ends are one array
    ends = ("the embedding",) if model.tied_embeddings else ("the embedding", "the output head")
    for what in ends:
        yield what, "all-gather", over, end, 1, "forward", 1, words
    for gradient in (EMBEDDING, HEAD):
        times = choice.accumulation
        yield gradient, "reduce-scatter", over, end, times, "backward", 1, words
        yield (
            gradient, "all-reduce", copies, end // ways, times, "backward", 1,
            f"{words} / (fsdp {choice.fsdp} · sp {choice.sp})",
        )  # fmt: skip


def _vectors(job: Job, choice: Choice) -> Iterator[Sent]:
    """Norms and biases: whole everywhere, their gradients added once for all layers."""
    model, item = job.model, item_bytes(job.param_dtype)
    tokens_over = _wide(choice, "dp", "fsdp", "sp")
    everywhere = _wide(choice, "dp", "fsdp", "tp", "sp")
    residual = everywhere if choice.sequence_parallel else tokens_over
    times = choice.accumulation
    norms = 2 + model.output_bias
    yield (
        "gradients of norms", "all-reduce", residual,
        item * (norms * model.layers + 1) * model.embed, times, "backward", norms + 1,
        f"{item} bytes · ({norms}·{model.layers} + 1)·{model.embed}",
    )  # fmt: skip
    if model.qkv_bias:
        heads = (model.heads + 2 * model.kv_heads) // choice.tp
        yield (
            "gradients of biases", "all-reduce", tokens_over,
            item * model.layers * heads * model.head_dim, times, "backward", 3,
            f"{item} bytes · {model.layers}·{heads}·{model.head_dim}",
        )  # fmt: skip
    if model.qk_norm:
        yield (
            "gradients of norms of queries and keys", "all-reduce", everywhere,
            item * 2 * model.layers * model.head_dim, times, "backward", 2,
            f"{item} bytes · 2·{model.layers}·{model.head_dim}",
        )  # fmt: skip


def _blocks(job: Job, choice: Choice) -> Iterator[Sent]:
    """Blocks whose heads or mlp tp splits: partial sums added, inputs gathered."""
    over = _wide(choice, "tp")
    if not over:
        return
    size, words = _stream(job, choice)
    each = job.model.layers * choice.accumulation
    chunks = mlp_chunks(job, choice)
    cut = chunks > 1
    blocks = 1 if cut else 2
    sums, again = "sums of a layer's blocks", "a block's sums, made again"
    back = "gradients of the inputs of a layer's blocks"
    add = "reduce-scatter" if choice.sequence_parallel else "all-reduce"
    if choice.sequence_parallel:
        inputs, gather = "inputs of a layer's blocks", "all-gather"
        gradients = "gradients of a layer's blocks"
        yield inputs, gather, over, size, 2 * each, "forward", 1, words
        yield f"{inputs}, again", gather, over, size, 2 * each, "backward", 1, words
        yield gradients, gather, over, size, 2 * each, "backward", 1, words
    yield sums, add, over, size, blocks * each, "forward", 1, words
    yield back, add, over, size, blocks * each, "backward", 1, words
    if choice.remat == "full":
        yield again, add, over, size, each, "backward", 1, words
    if cut:
        part, times, words = size // chunks, each * chunks, f"{words} / {chunks} chunks"
        what = "sums of the mlp, by chunks"
        yield what, "all-reduce", over, part, times, "forward", 1, words
        what = "gradients of the mlp's input, by chunks"
        yield what, "all-reduce", over, part, times, "backward", 1, words


def _ends_over_tp(job: Job, choice: Choice) -> Iterator[Sent]:
    """Embedding and loss, whose vocabulary tp splits."""
    over = _wide(choice, "tp")
    if not over:
        return
    item, once = item_bytes(job.dtype), choice.accumulation
    size, words = _stream(job, choice)
    add = "reduce-scatter" if choice.sequence_parallel else "all-reduce"
    yield "rows of the embedding", add, over, size, once, "forward", 1, words
    yield "gradient of the loss's input", add, over, size, once, "backward", 1, words
    if choice.sequence_parallel:
        what = "gradient of the embedding's rows"
        yield what, "all-gather", over, size, once, "backward", 1, words
        yield "input of the loss", "all-gather", over, size, once, "forward", 1, words
    many, few = loss_chunks(job, choice)
    yield (
        "maxima over the vocabulary", "all-reduce", over, item * few, many * once, "forward", 1,
        f"{item} bytes · {few} tokens",
    )  # fmt: skip
    yield (
        "sums over the vocabulary", "all-reduce", over, 2 * FLOAT * few, many * once, "forward", 2,
        f"2 · {FLOAT} bytes · {few} tokens",
    )  # fmt: skip


def _stream(job: Job, choice: Choice) -> tuple[int, str]:
    """Bytes of what goes from layer to layer, whole over tp, and how they come about."""
    item, e = item_bytes(job.dtype), job.model.embed
    r, t = rows(job, choice), length(job, choice)
    return item * r * t * e, f"{item} bytes · {r} rows · {t} tokens · {e}"


def _keys(job: Job, choice: Choice) -> Iterator[Sent]:
    """Attention over split rows."""
    over = _wide(choice, "sp")
    if not over:
        return
    model, item = job.model, item_bytes(job.dtype)
    split, strategy = split_of(job, choice), strategy_of(job, choice)
    r, part = rows(job, choice), split.part
    each = model.layers * choice.accumulation
    kv, d = split.kv_heads, model.head_dim
    keys = 2 * r * part * kv * d
    words = f"2 · {r} rows · {part} tokens · {kv} heads · {d}"
    if strategy == "ring":
        hops = _hops(job, choice)
        again = hops if choice.remat == "full" else 0
        # the first hop of a ring that is made again serves the backward pass too
        back = max(hops - 1, 0) if again else hops
        permute = "collective-permute"
        size = item * keys
        yield (
            "keys and values to the next device", permute, over, size, hops * each, "forward", 1,
            f"{item} bytes · {words}",
        )  # fmt: skip
        yield (
            "keys and values again", permute, over, size, (again + back) * each, "backward", 1,
            f"{item} bytes · {words}",
        )  # fmt: skip
        yield (
            KEY_GRADIENTS, permute, over, FLOAT * keys, (hops + 1) * each if hops else 0,
            "backward", 1, f"{FLOAT} bytes · {words}",
        )  # fmt: skip
    elif strategy == "allgather":
        whole = f"{words} · sp {choice.sp}"
        for phase in PASSES:
            yield (
                "keys and values of whole rows", "all-gather", over, item * keys * choice.sp, each,
                phase, 1, f"{item} bytes · {whole}",
            )  # fmt: skip
        yield (
            KEY_GRADIENTS, "reduce-scatter", over, FLOAT * keys * choice.sp, each, "backward", 1,
            f"{FLOAT} bytes · {whole}",
        )  # fmt: skip
    else:
        heads = 2 * split.heads + 2 * kv
        size = item * r * part * heads * d
        words = f"{item} bytes · {r} rows · {part} tokens · {heads} heads · {d}"
        what = "queries, keys, values and outputs between rows and heads"
        yield what, "all-to-all", over, size, each, "forward", 4, words
        yield f"{what}, again", "all-to-all", over, size, each, "backward", 4, words
        yield f"gradients of {what}", "all-to-all", over, size, each, "backward", 4, words


def _rows_over_sp(job: Job, choice: Choice) -> Iterator[Sent]:
    """The order in which devices hold rows, and which document each key is of."""
    over = _wide(choice, "sp")
    if not over:
        return
    split, strategy = split_of(job, choice), strategy_of(job, choice)
    r, part, ways = rows(job, choice), split.part, choice.sp
    once = choice.accumulation
    each = job.model.layers * once
    documents = INT * r * part if job.documents else 0
    words = f"{INT} bytes · {r} rows · {part} tokens"
    if sequence_order(split, strategy) == "zigzag":
        arrays = 4 if job.documents else 3
        # half of them, and with two devices only one half moves
        yield (
            "tokens, targets, documents and positions into zig-zag order", "collective-permute",
            over, INT * r * part // 2, (1 if ways == 2 else 2) * arrays * once, "forward", 1,
            f"{words} / 2",
        )  # fmt: skip
    if strategy == "ring":
        hops = _hops(job, choice)
        if not hops:
            return
        # what the first turn needs is the same for all layers
        rest = each * (hops - 1)
        yield (
            "documents of the keys", "collective-permute", over, documents, once + rest, "forward",
            1, words,
        )  # fmt: skip
        yield (
            "documents of the keys again", "collective-permute", over, documents,
            rest * (2 if choice.remat == "full" else 1), "backward", 1, words,
        )  # fmt: skip
    else:
        by = "all-gather" if strategy == "allgather" else "all-to-all"
        what, words = "documents of whole rows", f"{words} · sp {ways}"
        yield what, by, over, documents * ways, once, "forward", 1, words


def _hops(job: Job, choice: Choice) -> int:
    """How far keys travel around a ring."""
    split = split_of(job, choice)
    return ring_steps_of(split.mask, sequence_order(split, "ring"), choice.sp, split.part).exchanges


def _optimizer(job: Job, choice: Choice) -> Iterator[Sent]:
    """Muon makes layers' matrices whole, each device its own."""
    over = _wide(choice, "fsdp", "tp", "sp")
    if job.optimizer != "muon" or not over:
        return
    devices = choice.fsdp * choice.tp * choice.sp
    rounds = -(-job.model.layers // devices)
    numbers = attention_weights(job.model) + mlp_weights(job.model)
    yield (
        "whole matrices of a layer, there and back", "all-to-all", over, FLOAT * rounds * numbers,
        2, "optimizer", 7, f"{FLOAT} bytes · {numbers} · {rounds} layers a device",
    )  # fmt: skip


def _scalars(job: Job, choice: Choice) -> Iterator[Sent]:
    """The loss, how many tokens count, and the gradient's norm."""
    model, words = job.model, f"{FLOAT} bytes"
    matrices = 7 + (1 if model.tied_embeddings else 2)
    biases = 3 if model.qkv_bias else 0
    yield (
        "loss and entropy", "all-reduce", _wide(choice, "dp", "fsdp", "sp"), FLOAT,
        2 * choice.accumulation, "forward", 1, words,
    )  # fmt: skip
    yield (
        "tokens that count",
        "all-reduce",
        _wide(choice, "dp", "fsdp"),
        INT,
        1,
        "forward",
        1,
        words,
    )
    yield "tokens that count", "all-reduce", _wide(choice, "sp"), INT, 1, "forward", 1, words
    split = _wide(choice, "fsdp", "sp")
    yield "norm of the gradient", "all-reduce", split, FLOAT, matrices, "optimizer", 1, words
    over = _wide(choice, "tp")
    yield (
        "norm of the gradient",
        "all-reduce",
        over,
        FLOAT,
        matrices + biases,
        "optimizer",
        1,
        words,
    )


_PARTS: dict[Part, tuple[Callable[[Job, Choice], Iterator[Sent]], ...]] = {
    "weights": (_layer_weights,),
    "activations": (_blocks, _keys),
    "step": (_ends, _vectors, _ends_over_tp, _rows_over_sp, _optimizer, _scalars),
}

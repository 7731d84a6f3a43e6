"""A device's part of a job under a choice: its rows, tokens, and how its rows are split."""

import functools
import math

from meshwright.arithmetic import round_up
from meshwright.errors import MeshwrightError
from meshwright.models import DecoderConfig, decoder_rules, describe_padding
from meshwright.ops.attention import Mask, Split
from meshwright.planner.result import Choice, Job

LANES = 128  # a TPU's arrays are this wide at least: a last dim of 64 takes the room of 128
_ITEM = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


def item_bytes(dtype: str) -> int:
    """Bytes of a number."""
    return _ITEM[dtype]


def rows(job: Job, choice: Choice) -> int:
    """Rows of a micro-batch on a device."""
    return job.batch // (choice.dp * choice.fsdp * choice.accumulation)


def length(job: Job, choice: Choice) -> int:
    """Tokens of a row on a device."""
    return job.seq // choice.sp


def tokens(job: Job, choice: Choice) -> int:
    """Tokens of a micro-batch on a device."""
    return rows(job, choice) * length(job, choice)


def attention_weights(model: DecoderConfig) -> int:
    """Numbers in the matrices of a layer's attention."""
    return 2 * model.embed * model.head_dim * (model.heads + model.kv_heads)


def mlp_weights(model: DecoderConfig) -> int:
    """Numbers in the matrices of a layer's mlp."""
    return 3 * model.embed * model.mlp


def vocab(job: Job, choice: Choice) -> int:
    """The vocabulary in memory, padded to a multiple of tp."""
    return round_up(job.model.vocab, choice.tp)


def padding(job: Job, choice: Choice) -> str | None:
    """What is padded, in words: `vocab 128257 padded to 128258 for tp=2`."""
    return describe_padding(job.model, decoder_rules(sp=True), choice.sizes)


def split_of(job: Job, choice: Choice) -> Split:
    """How attention is split over sp."""
    return _split(job.model, job.seq, choice.tp, choice.sp)


@functools.lru_cache(maxsize=4096)
def _split(model: DecoderConfig, seq: int, tp: int, sp: int) -> Split:
    return Split(
        ways=sp,
        length=seq,
        heads=model.heads // tp,
        kv_heads=model.kv_heads // tp,
        head_dim=model.head_dim,
        mask=Mask(window=model.sliding_window).within(seq, seq),
    )


def strategy_of(job: Job, choice: Choice) -> str:
    """The strategy of attention over sp; none where rows are whole. It is not checked.

    `auto` depends on the machine: candidates.with_strategy makes it one of the others first.
    """
    if choice.sp == 1:
        return "none"
    if choice.strategy == "auto":
        raise MeshwrightError(
            f"'{choice.mesh}' leaves the strategy of attention over sp to the machine; "
            "plan.candidates.with_strategy(job, choice, machine) names it"
        )
    return choice.strategy


def mlp_chunks(job: Job, choice: Choice) -> int:
    """In how many chunks the mlp takes a device's tokens: as ops.chunks cuts them."""
    part = length(job, choice)
    if not choice.mlp_chunk:
        return 1
    least = math.ceil(part / choice.mlp_chunk)
    return next(n for n in range(least, part + 1) if part % n == 0)


def loss_chunks(job: Job, choice: Choice) -> tuple[int, int]:
    """How many chunks of tokens the loss takes, and the tokens of one."""
    here = tokens(job, choice)
    size = min(job.loss_chunk, here)
    return math.ceil(here / size), size

"""Our own GPU kernels beside what they replace: time, and error against float32.

    python benchmarks/gpu_kernels.py                  # prints a table; needs a Hopper GPU
    python benchmarks/gpu_kernels.py --write          # and puts it into RESULTS.md
    python benchmarks/gpu_kernels.py --check          # attention with every mask: errors alone

The shapes are those of benchmarks/train_step.py. The other way is the one taken where a kernel
refuses: cuDNN. Both are timed in turns, medians of 5 rounds of 10
calls each; errors are the largest, over the largest number, against the same in float32.
"""

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.ops.attention.block import Block, Gradients, Partial, merge
from meshwright.ops.attention.cudnn import cudnn
from meshwright.ops.attention.hopper import hopper
from meshwright.ops.attention.mask import Mask
from meshwright.ops.mosaic import HOPPER, unavailable
from results import write_section

WORST = 0.012  # error of bfloat16 attention, over the largest number


class Case(NamedTuple):
    name: str
    ours: Callable[..., Any]
    other: Callable[..., Any]
    arguments: tuple[Any, ...]
    right: Callable[..., Any] | None  # in float32; None where it would not fit


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    numbers = jax.random.normal(jax.random.key(seed), shape, jnp.float32) * scale
    return numbers.astype(jnp.bfloat16)


def places(documents: int, batch: int, length: int) -> jax.Array | None:
    """Numbers of documents that begin anywhere, as many in each row; None where there is one."""
    if documents == 1:
        return None
    rng = np.random.default_rng(documents)
    starts = [np.sort(rng.choice(length - 1, documents - 1, replace=False)) for _ in range(batch)]
    return jnp.asarray([np.searchsorted(row, np.arange(length)) for row in starts], jnp.int32)


def attention_in_float32(block: Block, mask: Mask, given: jax.Array) -> tuple[Partial, Gradients]:
    """By plain softmax, differentiated by jax."""
    (_, queries, heads, head_dim), (_, keys, kv_heads, _) = block.q.shape, block.k.shape
    seen = mask.seen(jnp.arange(queries), jnp.arange(keys))
    seen = jnp.ones((1, 1, queries, keys), bool) if seen is None else seen[None, None]
    if block.q_segments is not None and block.k_segments is not None:
        seen = seen & (block.q_segments[:, None, :, None] == block.k_segments[:, None, None, :])

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> Partial:
        k, v = (jnp.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") * head_dim**-0.5
        most = jnp.max(jnp.where(seen, scores, -1e30), axis=-1, keepdims=True)
        weights = jnp.where(seen, jnp.exp(scores - most), 0)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        some = jnp.where(total == 0, 1, total)  # queries that see nothing
        out = jnp.einsum("bhqk,bkhd->bqhd", weights / some, v, precision="highest")
        lse = jnp.where(total == 0, -jnp.inf, jnp.log(some) + most)[..., 0]
        return Partial(out, jnp.swapaxes(lse, 1, 2))

    q, k, v, given = (x.astype(jnp.float32) for x in (*block[:3], given))
    found, gradients = jax.vjp(attend, q, k, v)
    return found, Gradients(*gradients(Partial(given, jnp.zeros_like(found.lse))))


def attention(batch: int, length: int, head_dim: int, documents: int) -> list[Case]:
    """Forward and backward; 32 heads share 8 of keys."""
    q, given = (normal(seed, batch, length, 32, head_dim) for seed in (7, 8))
    k, v = (normal(seed, batch, length, 8, head_dim) for seed in (9, 10))
    segments = places(documents, batch, length)
    block = Block(q, k, v, segments, segments)
    whole = jax.jit(lambda block: cudnn.forward(block, Mask()))(block)
    name = f"attention, {batch} x {length}, head_dim {head_dim}"
    name += f", {documents} documents" if documents > 1 else ""
    small = length <= 1024

    def right_forward(block: Block) -> Partial:
        return attention_in_float32(block, Mask(), block.q)[0]

    def right_backward(block: Block, whole: Partial, given: jax.Array) -> Gradients:
        return attention_in_float32(block, Mask(), given)[1]

    return [
        Case(
            f"forward of {name}",
            lambda block: hopper.forward(block, Mask()),
            lambda block: cudnn.forward(block, Mask()),
            (block,),
            right_forward if small else None,
        ),
        Case(
            f"backward of {name}",
            lambda block, whole, given: hopper.backward(block, Mask(), whole, given),
            lambda block, whole, given: cudnn.backward(block, Mask(), whole, given),
            (block, whole, given),
            right_backward if small else None,
        ),
    ]


class Check(NamedTuple):
    """Attention with a mask, to be held to float32."""

    name: str
    mask: Mask
    queries: int = 640
    keys: int = 640
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    documents: str = "one"  # packed: in no order; apart: many keys that no query sees, and back


CHECKS = [
    check._replace(head_dim=head_dim, documents=documents)
    for check in (
        Check("causal", Mask()),
        Check("full", Mask(causal=False), queries=384),
        Check("window", Mask(window=200), heads=2),
        Check("block-causal", Mask(block=96), heads=4, kv_heads=1),
        Check("window of a later part", Mask(window=300, offset=256), queries=256, keys=256),
    )
    for head_dim in (64, 128)
    for documents in ("one", "packed")
] + [
    Check("full", Mask(causal=False), queries=384, head_dim=head_dim, documents="apart")
    for head_dim in (64, 128)
]


def numbers_of(check: Check) -> tuple[jax.Array | None, jax.Array | None]:
    """Documents of queries and keys, in two rows."""
    if check.documents == "one":
        return None, None
    if check.documents == "packed":
        order = jnp.asarray([4, 0, 6, 2, 5, 1, 3], jnp.int32)
        both = (places(5, 2, length) for length in (check.queries, check.keys))
        return tuple(order[x] for x in both if x is not None)
    of_queries = np.zeros((2, check.queries), np.int32)
    of_keys = np.full((2, check.keys), 9, np.int32)  # nobody sees the first row's keys
    of_keys[1, 256:] = 0  # of the second row's, whole runs; and its first queries see nothing
    of_queries[1, :200] = 7
    return jnp.asarray(of_queries), jnp.asarray(of_keys)


def checked(check: Check) -> str:
    """The largest error of both passes, in a line; an exit if it is too large."""
    q, given = (normal(seed, 2, check.queries, check.heads, check.head_dim) for seed in (11, 12))
    k, v = (normal(seed, 2, check.keys, check.kv_heads, check.head_dim) for seed in (13, 14))
    block = Block(q, k, v, *numbers_of(check))
    right, gradients = jax.jit(lambda *x: attention_in_float32(x[0], check.mask, x[1]))(
        block, given
    )
    found = jax.jit(lambda block: hopper.forward(block, check.mask))(block)
    whole = Partial(right.out.astype(q.dtype), right.lse)
    back = jax.jit(lambda *x: hopper.backward(x[0], check.mask, *x[1:]))(block, whole, given)
    unseen = jnp.isneginf(right.lse)
    alike = bool(jnp.all(unseen == jnp.isneginf(found.lse)))
    sums = [jnp.where(unseen, 0.0, x.lse) for x in (found, right)]
    worst = error((found.out, sums[0], *back), (right.out, sums[1], *gradients))
    documents = "" if check.documents == "one" else f", documents {check.documents}"
    name = f"{check.name}, {check.heads}/{check.kv_heads} heads of {check.head_dim}{documents}"
    return _held(name, worst, alike, f"{int(jnp.sum(unseen[..., 0]))} queries see nothing")


def checked_in_parts(head_dim: int) -> str:
    """Full attention by halves of the keys, as in a ring: outputs merged, gradients added."""
    q, given = (normal(seed, 2, 384, 8, head_dim) for seed in (11, 12))
    k, v = (normal(seed, 2, 640, 2, head_dim) for seed in (13, 14))
    everything = Mask(causal=False)
    right, gradients = jax.jit(lambda *x: attention_in_float32(Block(*x[:3]), everything, x[3]))(
        q, k, v, given
    )
    halves = [Block(q, k[:, at], v[:, at]) for at in (slice(0, 256), slice(256, 640))]
    forward = jax.jit(lambda block: hopper.forward(block, everything, jnp.float32))
    whole = merge(*(forward(block) for block in halves))
    backward = jax.jit(lambda *x: hopper.backward(x[0], everything, *x[1:], jnp.float32))
    first, second = (backward(block, whole, given) for block in halves)
    keys = (jnp.concatenate(pair, axis=1) for pair in zip(first[1:3], second[1:3], strict=True))
    back = (first.q.astype(jnp.float32) + second.q.astype(jnp.float32), *keys)
    worst = error((*whole, *back), (*right, *gradients[:3]))
    return _held(f"full, by halves of the keys, head_dim {head_dim}", worst, True, "")


def _held(name: str, worst: float, alike: bool, more: str) -> str:
    if not (alike and worst < WORST):
        raise SystemExit(f"{name}: error {worst:.1e}, sees nothing where it should: {alike}")
    return f"{name}: {worst:.1e}" + (f", {more}" if more else "")


def error(found: Any, right: Any) -> float:
    """The largest of all arrays, over the largest number of each."""

    def one(x: jax.Array, y: jax.Array) -> float:
        y = y.astype(jnp.float32)
        return float(jnp.max(jnp.abs(x.astype(jnp.float32) - y)) / jnp.max(jnp.abs(y)))

    return max(jax.tree.leaves(jax.tree.map(one, tuple(found), tuple(right))))


def measured(case: Case) -> str:
    ways = {"ours": jax.jit(case.ours), "other": jax.jit(case.other)}
    found = {name: jax.block_until_ready(way(*case.arguments)) for name, way in ways.items()}
    if case.right is None:
        errors = [f"{error(found['ours'], found['other']):.1e} from each other", ""]
    else:
        right = jax.jit(case.right)(*case.arguments)
        as_tuple = (lambda x: x) if isinstance(right, tuple) else (lambda x: (x,))
        errors = [
            f"{error(as_tuple(found[way]), as_tuple(right)):.1e}" for way in ("ours", "other")
        ]
    seconds: dict[str, list[float]] = {"ours": [], "other": []}
    for _ in range(5):
        for name, way in ways.items():
            start = time.perf_counter()
            results = [way(*case.arguments) for _ in range(10)]
            jax.block_until_ready(results[-1])
            seconds[name].append((time.perf_counter() - start) / 10)
    ours, other = (statistics.median(seconds[name]) * 1e3 for name in ("ours", "other"))
    return f"| {case.name} | {ours:.3f} | {other:.3f} | {ours / other:.2f} | {' | '.join(errors)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true", help="attention with every mask: errors")
    options = parser.parse_args()
    why = unavailable(HOPPER)
    if why is not None:
        raise SystemExit(f"our kernels cannot be used here: {why}")
    if options.check:
        for check in CHECKS:
            print(checked(check), flush=True)
        for head_dim in (64, 128):
            print(checked_in_parts(head_dim), flush=True)
        return
    conditions = (
        f"`python benchmarks/gpu_kernels.py --write`, {datetime.date.today()}, one "
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}; bfloat16."
    )
    lines = [
        "| kernel | ours, ms | other way, ms | ours / other | error | other's error |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join([conditions, *lines]), flush=True)
    small, short, long = (2, 1024), (8, 2048), (4, 8192)
    attentions = [
        *((*shape, 64, documents) for documents in (1, 4) for shape in (small, short, long)),
        *((*long, 128, 1), (*small, 128, 4), (*long, 128, 4)),
    ]
    for sizes in attentions:
        for case in attention(*sizes):
            lines.append(measured(case))
            print(lines[-1], flush=True)
    if options.write:
        write_section("Kernels of our own", conditions, lines)


if __name__ == "__main__":
    main()

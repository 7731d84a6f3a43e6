"""How evenly the work of a causal ring lies.

    python benchmarks/ring_balance.py [--check] [--write]

In contiguous order a sequence is cut into one chunk for each device, in zig-zag order into two. A
block is a chunk of queries and a chunk of keys; it is useful if the mask lets any of it through.
Useful blocks, and useful pairs of a query and a key, are counted for every ring step and device by
going through all places, from the definitions of the mask and the orders alone. Beside them stands
what the ring steps of meshwright.ops.attention compute, as seen by a kernel that notes which
queries and keys it is given. No device is needed. `--check` fails if zig-zag is not even, computes
a pair that is not useful, or misses one.
"""

import argparse
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.ops.attention.block import Block, Gradients, Kernel, Method, Partial
from meshwright.ops.attention.kernels import KERNELS
from meshwright.ops.attention.mask import Mask
from meshwright.ops.attention.ring_steps import Keys, RingStep, add_ring_step, ring_steps_of
from results import here, write_section

CHUNK = 4  # tokens; no ratio depends on it
WAYS = (2, 4, 8)
Pairs = Counter[tuple[int, int]]  # places of a query and a key, and how often


class Visit(NamedTuple):
    """What one device does at one ring step."""

    blocks: int  # useful ones
    useful: Pairs
    computed: Pairs


def places_of(order: str, ways: int) -> list[list[int]]:
    """The positions of a sequence that each device holds, by the definition of the order."""
    chunks = [[i, 2 * ways - 1 - i] if order == "zigzag" else [i] for i in range(ways)]
    return [[c * CHUNK + i for c in held for i in range(CHUNK)] for held in chunks]


def visits(order: str, ways: int) -> list[list[Visit]]:
    """Every ring step's visits, one of each device."""
    held = places_of(order, ways)
    return [[visit(order, held, step, device) for device in range(ways)] for step in range(ways)]


def visit(order: str, held: list[list[int]], step: int, device: int) -> Visit:
    queries, keys = held[device], held[(device - step) % len(held)]
    useful = Counter((q, k) for q in queries for k in keys if k <= q)
    blocks = {(q // CHUNK, k // CHUNK) for q, k in useful}
    return Visit(len(blocks), useful, computed(order, queries, keys, step, device, len(held)))


def computed(
    order: str, queries: list[int], keys: list[int], number: int, device: int, ways: int
) -> Pairs:
    """The pairs that a kernel is given at a ring step; tokens have their positions as values."""
    noted: Pairs = Counter()

    def note(block: Block, mask: Mask, dtype: object) -> Partial:
        seen = mask.seen(jnp.arange(block.q.shape[1]), jnp.arange(block.k.shape[1]))
        q_places, k_places = (np.asarray(x[..., 0, 0], int) for x in (block.q, block.k))
        for row_q, row_k in zip(q_places, k_places, strict=True):
            table = np.ones((len(row_q), len(row_k))) if seen is None else np.asarray(seen)
            noted.update((int(row_q[i]), int(row_k[j])) for i, j in np.argwhere(table))
        return Partial(jnp.zeros_like(block.q), jnp.zeros(block.q.shape[:3], jnp.float32))

    def tokens(places: list[int]) -> jnp.ndarray:
        return jnp.array(places, jnp.float32)[None, :, None, None]

    mine = Block(tokens(queries), tokens(queries), tokens(queries))
    steps = ring_steps_of(Mask(), order, ways, len(queries))
    done = Partial(jnp.zeros_like(mine.q), jnp.zeros(mine.q.shape[:3])) if number else None
    mask = None if number else steps.first
    KERNELS["noting"] = Kernel(note, _no_backward, lambda call: None)
    try:
        both, step = jnp.stack([tokens(keys)] * 2), RingStep(jnp.int32(device), number, ways)
        with jax.disable_jit():  # so that the kernel is given numbers, and of a branch only its own
            add_ring_step(done, mine, Keys(both, None), steps, step, mask, Method("noting"))
    finally:
        del KERNELS["noting"]
    return noted


def _no_backward(*_: object) -> Gradients:
    raise NotImplementedError


def unevenness(counts: Iterable[int]) -> float:
    """The most over the mean: how much longer all wait than they would with equal work."""
    counts = list(counts)
    return max(counts) * len(counts) / sum(counts)


def wrong(order: str, steps: list[list[Visit]]) -> list[str]:
    """What is not as zig-zag order promises."""
    found = []
    for number, step in enumerate(steps):
        if unevenness(v.blocks for v in step) != 1 or unevenness(len(v.useful) for v in step) != 1:
            found.append(f"{order} over {len(step)}: step {number} is uneven")
        if any(v.computed != v.useful for v in step):
            found.append(f"{order} over {len(step)}: step {number} computes other pairs")
    return found


def rows_of(order: str, steps: list[list[Visit]]) -> list[str]:
    """Lines of the table: every ring step, and all together."""
    total = [sum(step[device].blocks for step in steps) for device in range(len(steps))]
    pairs = [sum(len(step[device].useful) for step in steps) for device in range(len(steps))]
    made = sum(v.computed.total() for step in steps for v in step)
    lines = [
        f"| {order} | {number} | {' '.join(str(v.blocks) for v in step)} | "
        f"{unevenness(v.blocks for v in step):.2f} | |"
        for number, step in enumerate(steps)
    ]
    wasted = 1 - sum(pairs) / made
    lines.append(
        f"| {order} | all | {' '.join(map(str, total))} ({max(total)} : {min(total)}) | "
        f"{unevenness(total):.2f} | {wasted:.0%} |"
    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="fail if zig-zag is not even")
    parser.add_argument("--write", action="store_true", help="write into benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    rows = ["| order | step | useful blocks of device 0, 1, .. | max / mean | computed in vain |"]
    rows += ["|---|---|---|---|---|"]
    mistakes = []
    for ways in WAYS:
        for order in ("contiguous", "zigzag"):
            steps = visits(order, ways)
            lines = rows_of(f"{order}, sp={ways}", steps)
            rows += lines if ways == max(WAYS) else lines[-1:]
            mistakes += wrong(order, steps) if order == "zigzag" else []
    about = f"`python benchmarks/ring_balance.py --write`, {here()}; counted, causal mask."
    print("\n".join([about, "", *rows]))
    if arguments.write:
        write_section("Balance of a causal ring", about, rows)
    if arguments.check and mistakes:
        raise SystemExit("; ".join(mistakes))


if __name__ == "__main__":
    main()

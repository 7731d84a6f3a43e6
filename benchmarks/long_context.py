"""Long sequences on one GPU: a device's share of ring attention, and the longest that trains.

    python benchmarks/long_context.py                # the share, checked and timed
    python benchmarks/long_context.py --longest      # the longest row, ours and the peer's
    python benchmarks/long_context.py --write        # puts the table into RESULTS.md

The share: a causal row of T tokens lies in zig-zag order over n devices. One of them, in the
middle, does its turns one after the other, forward and backward, as it would in the ring; the keys
of the others, and the sums of gradients that come with them, are there already, so nothing is sent.
It is measured against jax's single call of cuDNN for the same total work: the whole row with one
n-th of the heads. Both have 14 · heads · head_dim · T²/2n useful FLOPs (4 forward and 10 backward
for each pair of a query and a key it sees); the ratio is between these two. The single call of all
heads, n times the work, stands beside them where it is quick. First the numbers of both are
compared with a plain softmax in float32.

Every line is printed as soon as it is known; what fails is said and passed over.
"""

import argparse
import datetime
import functools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import longest_sequence
from results import write_section

LENGTHS = (32768, 131072, 524288)
HEADS, KV_HEADS = 32, 8
WANTED = 0.80  # of the single call's FLOP/s
ALL_HEADS_UP_TO = 131072  # above this the single call of all heads takes too long
SIDES = ("share", "single", "all heads")

Report = Callable[..., None]


def flops(length: int, ways: int, heads: int, head_dim: int) -> float:
    """Useful FLOPs of a device, both passes, for a causal sequence over `ways` devices."""
    return 14.0 * heads * head_dim * length * length / 2 / ways


def share(ways: int, kernel: str) -> Callable[..., Any]:
    """One device's turns, forward then backward, as ops.attention.around makes them."""
    import jax.numpy as jnp
    from jax import lax

    from meshwright.ops.attention.block import Block, Method
    from meshwright.ops.attention.mask import Mask
    from meshwright.ops.attention.ring_steps import (
        Keys,
        add_ring_step,
        gradients_of_ring_step,
        ring_steps_of,
        unrolled,
    )

    def run(device: Any, q: Any, own: Any, others: Any, passing: Any, given: Any) -> Any:
        """`own` and `others`: Keys, those of turns 1, 2, .. stacked; `passing`: gradient sums."""
        turns = ring_steps_of(Mask(), "zigzag", ways, q.shape[1])
        here = Block(q, own.both[0], own.both[1], own.segments, own.segments)
        at_home = turns, jnp.bool_(True), turns.first, Method(kernel)
        numbers = jnp.arange(1, ways)

        def forward(done: Any, met: Any) -> Any:
            keys, turn = met
            here_too = turns, device >= turn, None, Method(kernel)
            return add_ring_step(done, here, Keys(*keys), *here_too)

        written_out = unrolled(ways - 1, q)
        whole, _ = lax.scan(
            forward,
            add_ring_step(None, here, own, *at_home)[0],
            (others, numbers),
            unroll=written_out,
        )
        whole = whole._replace(out=whole.out.astype(q.dtype))

        def backward(of_q: Any, met: Any) -> Any:
            keys, sums, turn = met
            more_q, more, _ = gradients_of_ring_step(
                whole, given, here, Keys(*keys), turns, device >= turn, None, Method(kernel)
            )
            return of_q + more_q, sums + more

        of_q, of_own, _ = gradients_of_ring_step(whole, given, here, own, *at_home)
        of_q, of_others = lax.scan(backward, of_q, (others, passing, numbers), unroll=written_out)
        return whole.out, of_q.astype(q.dtype), of_own, of_others

    return run


def single(q: Any, k: Any, v: Any, given: Any, segments: Any = None) -> Any:
    """jax's own call of cuDNN and its gradient."""
    import jax

    mask = None
    if segments is not None:
        mask = segments[:, None, :, None] == segments[:, None, None, :]
    call = functools.partial(
        jax.nn.dot_product_attention, mask=mask, is_causal=True, implementation="cudnn"
    )
    out, back = jax.vjp(lambda q, k, v: call(q, k, v), q, k, v)
    return out, *back(given)


def check(report: Report) -> None:
    """The largest error of each way against a plain softmax in float32."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from meshwright.ops.attention import kernels
    from meshwright.ops.attention.block import Block
    from meshwright.ops.attention.mask import Mask
    from meshwright.ops.attention.ring_steps import Keys

    ways, length, heads, kv_heads, head_dim = 4, 4096, 8, 2, 128
    rng = np.random.default_rng(0)
    shapes = [(1, length, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, given = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes)
    cuts = np.sort(rng.integers(0, length, 9))
    packed = np.searchsorted(cuts, np.arange(length), side="right").astype("i")[None] + 1
    packed[:, -50:] = 0  # padding
    packed[:, length // 4 + 10 : length // 2 + 100] = 77  # one over several devices
    segments = jnp.asarray(packed)

    def plain(q: Any, k: Any, v: Any, given: Any, segments: Any, mask: Mask) -> Any:
        def call(q: Any, k: Any, v: Any) -> Any:
            return kernels.one_call(Block(q, k, v, segments, segments), mask, "blockwise")

        with jax.default_matmul_precision("highest"):
            out, back = jax.vjp(call, *(x.astype(jnp.float32) for x in (q, k, v)))
            return out, *back(given.astype(jnp.float32))

    def around(kernel: str, segments: Any) -> Any:
        """All devices' shares, put together."""
        chunks = np.arange(length).reshape(2 * ways, -1)
        held = [np.concatenate([chunks[i], chunks[2 * ways - 1 - i]]) for i in range(ways)]
        keys = [
            Keys(jnp.stack([k[:, at], v[:, at]]), None if segments is None else segments[:, at])
            for at in held
        ]
        run = jax.jit(share(ways, kernel))
        out, of_q = jnp.zeros_like(q), jnp.zeros_like(q)
        of_keys = jnp.zeros((2, *k.shape), jnp.float32)
        for device, at in enumerate(held):
            met = [(device - turn) % ways for turn in range(1, ways)]
            others = jax.tree.map(lambda *x: jnp.stack(x), *(keys[other] for other in met))
            passing = jnp.zeros(others.both.shape, jnp.float32)
            found = run(device, q[:, at], keys[device], others, passing, given[:, at])
            out, of_q = out.at[:, at].set(found[0]), of_q.at[:, at].set(found[1])
            of_keys = of_keys.at[:, :, at].add(found[2])
            for other, more in zip(met, found[3], strict=True):
                of_keys = of_keys.at[:, :, held[other]].add(more)
        return out, of_q, of_keys[0], of_keys[1]

    def one_call(mask: Mask) -> Any:
        def call(q: Any, k: Any, v: Any) -> Any:
            return kernels.one_call(Block(q, k, v), mask, "cudnn")

        out, back = jax.vjp(call, q, k, v)
        return out, *back(given)

    reference = jax.jit(plain, static_argnums=5)
    near = Mask(window=300)
    compared: list[tuple[str, Any, Mask, Callable[[], Any]]] = [
        ("single call", None, Mask(), lambda: jax.jit(single)(q, k, v, given)),
        ("ring", None, Mask(), lambda: around("cudnn", None)),
        ("documents, single", segments, Mask(), lambda: jax.jit(single)(q, k, v, given, segments)),
        ("documents, ring", segments, Mask(), lambda: around("cudnn", segments)),
        ("window", None, near, lambda: jax.jit(one_call, static_argnums=0)(near)),
    ]
    for name, of, mask, found in compared:
        start = time.perf_counter()
        try:
            errors = differences(found(), reference(q, k, v, given, of, mask))
        except Exception as problem:
            failed(f"check of {name}", problem)
        else:
            report("check", name, errors, seconds=time.perf_counter() - start)


def differences(found: Any, wanted: Any) -> dict[str, float]:
    """The largest difference of output and gradients, each over the largest number there."""
    import numpy as np

    largest = {}
    for name, got, want in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        got, want = (np.asarray(x, np.float32) for x in (got, want))
        largest[name] = float(np.abs(got - want).max() / np.abs(want).max())
    return largest


def random_share(length: int, ways: int, head_dim: int, kernel: str) -> Any:
    """A share and its arguments."""
    import jax
    import jax.numpy as jnp

    from meshwright.ops.attention.ring_steps import Keys

    part, middle = length // ways, ways // 2
    q = random(1, part, HEADS, head_dim)
    keys = random(ways, 2, 1, part, KV_HEADS, head_dim)
    own, others = Keys(keys, None), Keys(keys, None)
    own, others = jax.tree.map(lambda x: x[0], own), jax.tree.map(lambda x: x[1:], others)
    passing = jnp.zeros(others.both.shape, jnp.float32)
    return share(ways, kernel), (jnp.int32(middle), q, own, others, passing, q)


def random_call(length: int, part_of_heads: int, head_dim: int) -> Any:
    q = random(1, length, HEADS // part_of_heads, head_dim)
    k = random(1, length, KV_HEADS // part_of_heads, head_dim)
    return single, (q, k, k, q)


def random(*shape: int) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)


def medians(name: str, sides: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Seconds of each side, run in turn for a few seconds; a side that fails is left out."""
    import jax

    programs = {}
    for side, make in sides.items():
        start = time.perf_counter()
        try:
            function, arguments = make()
            program = jax.jit(function).lower(*arguments).compile()
            jax.block_until_ready(program(*arguments))
        except Exception as problem:
            failed(f"{name}, {side}", problem)
        else:
            programs[side] = functools.partial(program, *arguments)
            print(f"{name}, {side}: ready in {time.perf_counter() - start:.1f} s", flush=True)
    seconds: dict[str, list[float]] = {side: [] for side in programs}
    start, rounds = time.perf_counter(), 0
    while programs and (rounds < 2 or (rounds < 30 and time.perf_counter() - start < 2)):
        rounds += 1
        turn = list(programs.items())
        for side, ready in turn if rounds % 2 else turn[::-1]:
            begin = time.perf_counter()
            jax.block_until_ready(ready())
            seconds[side].append(time.perf_counter() - begin)
    return {side: statistics.median(times) for side, times in seconds.items()}


def time_shares(length: int, ways: int, head_dim: int, report: Report) -> None:
    """The share of a sequence and single calls."""
    sides = {
        "share": lambda: random_share(length, ways, head_dim, "cudnn"),
        "single": lambda: random_call(length, ways, head_dim),
    }
    name = f"{length:,} over {ways}, head_dim {head_dim}"
    seconds = medians(name, sides)
    if length <= ALL_HEADS_UP_TO:  # by itself: it heats the chip, which then runs slower
        seconds |= medians(name, {"all heads": lambda: random_call(length, 1, head_dim)})
    speeds = {
        side: flops(length, 1 if side == "all heads" else ways, HEADS, head_dim) / taken
        for side, taken in seconds.items()
    }
    report("time", name, speeds, seconds=seconds)


def failed(what: str, problem: Exception) -> None:
    lines = str(problem).strip().splitlines() or [""]
    print(f"{what}: failed: {type(problem).__name__}: {lines[0][:300]}", flush=True)
    traceback.print_exc(limit=8, file=sys.stderr)


def in_words(kind: str, name: str, numbers: dict[str, float]) -> str:
    if kind == "check":
        return f"check, {name}: " + ", ".join(f"{of} {n:.1e}" for of, n in numbers.items())
    said = ", ".join(f"{of} {n / 1e12:.0f} TFLOP/s" for of, n in numbers.items())
    if {"share", "single"} <= numbers.keys():
        said += f"; share / single {ratio(numbers):.3f} (wanted {WANTED})"
    return f"{name}: {said}"


def ratio(speeds: dict[str, float]) -> float:
    """The share's speed over that of the single call of the same work."""
    return speeds["share"] / speeds["single"]


def table(found: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| sequence, over devices | share, TFLOP/s | single call | of all heads | share / single |",
        "|---|---|---|---|---|",
    ]
    for one in found:
        speeds = one["numbers"]
        if one["kind"] == "time" and {"share", "single"} <= speeds.keys():
            cells = [f"{speeds[side] / 1e12:.0f}" if side in speeds else "" for side in SIDES]
            wanted = f"{ratio(speeds):.3f} (wanted {WANTED})"
            lines.append(f"| {one['name']} | {' | '.join(cells)} | {wanted} |")
    lines += [
        "",
        "Largest error over the largest number, against a plain softmax in float32; bfloat16, "
        "4,096 tokens over 4 devices:",
        "",
        "| way | output | dq | dk | dv |",
        "|---|---|---|---|---|",
    ]
    for one in found:
        if one["kind"] == "check":
            cells = [f"{number:.1e}" for number in one["numbers"].values()]
            lines.append(f"| {one['name']} | {' | '.join(cells)} |")
    return lines


def run_shares(options: argparse.Namespace) -> None:
    import jax

    found: list[dict[str, Any]] = []

    def report(kind: str, name: str, numbers: dict[str, float], **more: Any) -> None:
        found.append({"kind": kind, "name": name, "numbers": numbers, **more})
        print(in_words(kind, name, numbers), flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1))

    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}", flush=True)
    if not options.no_check:
        check(report)
    lengths = [int(word) for word in options.lengths.split(",")]
    for head_dim in map(int, options.head_dims.split(",")):
        for length in lengths:
            time_shares(length, options.ways, head_dim, report)
    if options.profile:
        import train_step

        function, arguments = random_share(lengths[0], options.ways, 128, "cudnn")
        program = jax.jit(function)
        train_step.profile(options.profile, lambda: program(*arguments)[0].ravel()[0])
    conditions = (
        f"`python benchmarks/long_context.py --write`, {datetime.date.today()}, one {device}, jax "
        f"{jax.__version__}; {HEADS} heads, {KV_HEADS} key heads, batch 1, bfloat16, forward and "
        "backward, medians."
    )
    lines = table(found)
    if options.write:
        print("\n".join([conditions, "", *lines]))
        write_section("One device's share of ring attention", conditions, lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--ways", type=int, default=8, help="devices of the ring")
    parser.add_argument("--head-dims", default="128")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--profile", help="folder for a kernel profile of the shortest share")
    parser.add_argument("--longest", action="store_true", help="the longest sequence that trains")
    parser.add_argument("--sides", default="peer,ours", help="of --longest")
    parser.add_argument("--side", choices=longest_sequence.SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=120, help="seconds for each of them")
    parser.add_argument("--out", type=Path, help="a file for all numbers, as JSON")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.side:
        longest_sequence.SIDES[options.side](options.limit)
    elif options.longest:
        longest_sequence.run(options)
    else:
        run_shares(options)


if __name__ == "__main__":
    main()

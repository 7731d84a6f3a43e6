"""Our own GPU kernels beside what they replace: time, and error against float32.

    python benchmarks/gpu_kernels.py                  # prints a table; needs a Hopper GPU
    python benchmarks/gpu_kernels.py --write          # and puts it into RESULTS.md

The shapes are those of benchmarks/train_step.py. The other way is the one taken where a kernel
refuses: XLA's own passes, cuDNN's backward pass. Both are timed in turns, medians of 5 rounds of 10
calls each; errors are the largest, over the largest number, against the same in float32.
"""

import argparse
import datetime
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.ops import row_kernels
from meshwright.ops.attention import fused, hopper
from meshwright.ops.attention.block import Partial
from results import write_section

EPS = 1e-5


class Case(NamedTuple):
    name: str
    ours: Callable[..., Any]
    other: Callable[..., Any]
    arguments: tuple[jax.Array, ...]
    right: Callable[..., Any] | None  # in float32; None where it would not fit


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    numbers = jax.random.normal(jax.random.key(seed), shape, jnp.float32) * scale
    return numbers.astype(jnp.bfloat16)


def loss_rows() -> Case:
    """The log-sum of a chunk of logits."""

    def ours(x: jax.Array) -> jax.Array:
        most, total = row_kernels.log_sums(x)
        return jnp.log(total) + most

    def other(x: jax.Array) -> jax.Array:
        most = jnp.max(x, axis=-1).astype(jnp.float32)
        return jnp.log(jnp.sum(jnp.exp(x.astype(jnp.float32) - most[:, None]), axis=-1)) + most

    def right(x: jax.Array) -> jax.Array:
        return jax.nn.logsumexp(x.astype(jnp.float32), axis=-1)

    return Case(
        "log-sums of 4096 x 128256", ours, other, (normal(0, 4096, 128256, scale=3),), right
    )


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    shrink = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPS)
    return (wide * shrink * scale[None]).astype(x.dtype)


def norm_forward() -> Case:
    def both(x: jax.Array, update: jax.Array, scale: jax.Array) -> Any:
        return x + update, norm(x + update, scale)

    def right(x: jax.Array, update: jax.Array, scale: jax.Array) -> Any:
        return both(x.astype(jnp.float32), update.astype(jnp.float32), scale)

    scale = jnp.linspace(0.5, 2, 2048)
    arguments = (normal(1, 16384, 2048), normal(2, 16384, 2048), scale)
    return Case(
        "sum and norm, 16384 x 2048",
        lambda x, update, scale: row_kernels.add_and_norm(x, update, scale, EPS),
        both, arguments, right,
    )  # fmt: skip


def norm_backward() -> Case:
    """With the residual's gradient and those of two uses of the norm."""

    def other(x: jax.Array, scale: jax.Array, on: jax.Array, *uses: jax.Array) -> Any:
        x_slope, scale_slope = jax.vjp(norm, x, scale)[1](sum(uses[1:], uses[0]))
        return on + x_slope, scale_slope

    def right(*given: jax.Array) -> Any:
        return other(*(x.astype(jnp.float32) for x in given))

    slopes = [normal(seed, 16384, 2048) for seed in (3, 4, 5)]
    arguments = (normal(6, 16384, 2048), jnp.linspace(0.5, 2, 2048), *slopes)
    return Case(
        "gradient of a norm, 16384 x 2048",
        lambda x, scale, *slopes: row_kernels.norm_gradient(x, scale, EPS, *slopes),
        other, arguments, right,
    )  # fmt: skip


def attention_in_float32(q: Any, k: Any, v: Any, out: Any, log_sum: Any, given: Any) -> Any:
    """By plain softmax, differentiated by jax."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") * q.shape[-1] ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v, precision="highest")

    q, k, v, given = (x.astype(jnp.float32) for x in (q, k, v, given))
    return jax.vjp(attend, q, k, v)[1](given)


def attention_backward(batch: int, length: int) -> Case:
    q, given = (normal(seed, batch, length, 32, 64) for seed in (7, 8))
    k, v = (normal(seed, batch, length, 8, 64) for seed in (9, 10))
    whole = jax.jit(lambda q, k, v: fused.forward(fused.Rows(q, k, v, causal=True)))(q, k, v)

    def ours(q: Any, k: Any, v: Any, out: Any, log_sum: Any, given: Any) -> Any:
        return hopper.backward(q, k, v, Partial(out, log_sum), given, causal=True)

    def other(q: Any, k: Any, v: Any, out: Any, log_sum: Any, given: Any) -> Any:
        return fused.backward(fused.Rows(q, k, v, causal=True), Partial(out, log_sum), given)

    name = f"backward of attention, {batch} x {length}"
    right = attention_in_float32 if length <= 1024 else None
    return Case(name, ours, other, (q, k, v, *whole, given), right)


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
    options = parser.parse_args()
    why = hopper.refuses(2048, 2048, 64, causal=True)
    if why is not None:
        raise SystemExit(f"our kernels cannot be used here: {why}")
    conditions = (
        f"`python benchmarks/gpu_kernels.py --write`, {datetime.date.today()}, one "
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}; bfloat16."
    )
    lines = [
        "| kernel | ours, ms | other way, ms | ours / other | error | other's error |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join([conditions, *lines]), flush=True)
    sizes = ((2, 1024), (8, 2048), (4, 8192))
    cases: list[Callable[[], Case]] = [
        loss_rows, norm_forward, norm_backward,
        *(functools.partial(attention_backward, *size) for size in sizes),
    ]  # fmt: skip
    for case in cases:
        lines.append(measured(case()))
        print(lines[-1], flush=True)
    if options.write:
        write_section("Kernels of our own", conditions, lines)


if __name__ == "__main__":
    main()

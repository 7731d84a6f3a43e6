"""The parts of a decode step on a GPU with fp8 units: matmuls, and attention over pages.

    python benchmarks/serve_parts.py                       # prints four tables
    python benchmarks/serve_parts.py --cpu --matmuls       # tiny matmuls: a smoke test

Each matmul is timed as a program of eight with weights of their own, so that neither the launch nor
the cache on the chip counts. The peer of our attention kernel is cuDNN over bfloat16 pages; errors
are the largest difference to it. Limits are bytes over the chip's bandwidth. The matmuls of layers
stand between norms and activations, with which XLA fuses the rounding of activations to fp8.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.machines import chip_of_kind
from meshwright.ops.quantized import Quantized, einsum, quantize, rounded_einsum, scaled
from meshwright.serving import generation_mesh

WEIGHTS = 8
MATMULS = ((4096, 6144), (4096, 28672), (14336, 4096))  # of the 8B shape
TOKENS = (1, 16, 32, 128, 256, 2048)
# sequences, tokens of each, heads, kv heads, head_dim
PAGED = ((256, 1536, 32, 8, 128), (128, 640, 32, 8, 64))
# sequences, tokens of each, kv heads (of 32 heads), pages of a table
FEW = (
    (1, 512, 8, 16), (2, 512, 4, 16), (2, 4096, 4, 128), (2, 30000, 8, 512), (4, 512, 8, 128),
    (8, 512, 8, 128), (8, 4096, 8, 128), (16, 512, 8, 128), (16, 2048, 4, 128), (32, 512, 8, 16),
    (32, 2048, 8, 128), (128, 600, 8, 16), (128, 2048, 8, 64),
)  # fmt: skip
LAYERS = 16  # with a pool each, one after the other
PAGE = 64


def microseconds(function: Callable[..., Any], *arguments: Any, calls: int = 30) -> float:
    jax.block_until_ready(function(*arguments))
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*arguments)
        jax.block_until_ready(result)
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def matmul_table(shapes: Any, tokens: Any, bandwidth: float) -> list[str]:
    lines = [
        "| matmul | tokens | bfloat16, µs | fp8 converted inside | fp8 × fp8 | limits |",
        "|---|---|---|---|---|---|",
    ]
    for inputs, outputs in shapes:
        keys = jax.random.split(jax.random.key(0), WEIGHTS)
        plain = [jax.random.normal(key, (inputs, outputs), jnp.bfloat16) * 0.02 for key in keys]
        fp8 = [quantize(weight, 1, "fp8") for weight in plain]

        def all_of(x: jax.Array, weights: Any) -> list[jax.Array]:
            return [scaled(einsum("ni,io->no", x, weight), weight) for weight in weights]

        def converted(x: jax.Array, weights: Any) -> list[jax.Array]:
            products = [jnp.einsum("ni,oi->no", x, w.values.astype(x.dtype)) for w in weights]
            return [scaled(y, weight) for y, weight in zip(products, weights, strict=True)]

        for count in tokens:
            x = jax.random.normal(keys[0], (count, inputs), jnp.bfloat16)
            times = [
                microseconds(jax.jit(function), x, weights) / WEIGHTS
                for function, weights in ((all_of, plain), (converted, fp8), (all_of, fp8))
            ]
            limits = [size * inputs * outputs / bandwidth * 1e6 for size in (2, 1)]
            lines.append(
                f"| {inputs:,} × {outputs:,} | {count:,} | "
                + " | ".join(f"{each:.1f}" for each in times)
                + f" | {limits[0]:.1f}, {limits[1]:.1f} |"
            )
            print(lines[-1], flush=True)
    return lines


def layer_table(count: int = 6) -> list[str]:
    """Matmuls of a layer of the 8B shape, with activations rounded to fp8 and as they are."""
    sizes = (4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)
    keys = iter(jax.random.split(jax.random.key(0), count * len(sizes)))
    plain = [
        [jax.random.normal(next(keys), size, jnp.bfloat16) * 0.02 for size in sizes]
        for _ in range(count)
    ]
    fp8 = [[quantize(weight, 1, "fp8") for weight in layer] for layer in plain]

    def rounded(x: jax.Array, weight: Quantized) -> jax.Array:
        return scaled(rounded_einsum("ni,oi->no", 1, x, weight.values), weight)

    def converted(x: jax.Array, weight: Quantized) -> jax.Array:
        return scaled(jnp.einsum("ni,oi->no", x, weight.values.astype(x.dtype)), weight)

    def norm(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True))
        return wide.astype(x.dtype)

    def layers(product: Any, x: jax.Array, weights: Any) -> jax.Array:
        for qkv, output, gate_up, down in weights:
            x = x + product(product(norm(x), qkv)[:, :4096], output)
            gate, up = jnp.split(product(norm(x), gate_up), 2, axis=1)
            x = x + product(jax.nn.silu(gate) * up, down)
        return x

    lines = [
        "| tokens | bfloat16, µs a layer | fp8 converted inside | fp8 × fp8 |",
        "|---|---|---|---|",
    ]
    ways = (jnp.matmul, plain), (converted, fp8), (rounded, fp8)
    for tokens in (2, 16, 32, 64):
        x = jax.random.normal(jax.random.key(1), (tokens, 4096), jnp.bfloat16)
        times = [
            microseconds(jax.jit(functools.partial(layers, product)), x, weights) / count
            for product, weights in ways
        ]
        lines.append(f"| {tokens} | " + " | ".join(f"{each:.1f}" for each in times) + " |")
        print(lines[-1], flush=True)
    return lines


def by_cudnn(q: jax.Array, pool: jax.Array, tables: jax.Array, lengths: jax.Array) -> jax.Array:
    from meshwright.ops.attention import fused

    counts, values = (jnp.ones_like(lengths), lengths), tables + pool.shape[0] // 2
    inputs = fused.Inputs(q[:, None], pool, pool, counts=counts, tables=(tables, values))
    return fused.output(inputs)[:, 0]


def by_triton(q: jax.Array, pool: jax.Array, tables: jax.Array, lengths: jax.Array) -> jax.Array:
    from meshwright.ops.attention.paged_triton import paged_decode

    return paged_decode(q, pool, tables, lengths)[0]


def paged_table(bandwidth: float) -> list[str]:
    lines = [
        "| sequences × tokens, dim | cuDNN, bf16, µs | ours, bf16 | ours, fp8 | error | limit |",
        "|---|---|---|---|---|---|",
    ]
    for batch, length, heads, kv_heads, head_dim in PAGED:
        width = length // PAGE + 1
        pages = batch * width + 1
        rng = np.random.default_rng(0)
        q = jnp.asarray(rng.normal(size=(batch, heads, head_dim)), jnp.bfloat16)
        pool = jax.random.normal(
            jax.random.key(1), (2 * pages, PAGE, kv_heads, head_dim), jnp.bfloat16
        )
        order = rng.permutation(pages - 1)[: batch * width].reshape(batch, width) + 1
        tables, lengths = jnp.asarray(order, jnp.int32), jnp.full((batch,), length, jnp.int32)

        ours, theirs = jax.jit(by_triton), jax.jit(by_cudnn)
        eighth = pool.astype(jnp.float8_e4m3fn)
        right = theirs(q, eighth.astype(jnp.bfloat16), tables, lengths)
        error = jnp.abs((ours(q, eighth, tables, lengths) - right).astype(jnp.float32)).max()
        times = [
            microseconds(function, q, pages, tables, lengths)
            for function, pages in ((theirs, pool), (ours, pool), (ours, eighth))
        ]
        size = 2 * batch * length * kv_heads * head_dim
        limits = [item * size / bandwidth * 1e6 for item in (2, 1)]
        lines.append(
            f"| {batch} × {length:,}, {head_dim} | "
            + " | ".join(f"{each:.0f}" for each in times)
            + f" | {float(error):.4f} | {limits[0]:.0f}, {limits[1]:.0f} |"
        )
        print(lines[-1], flush=True)
    return lines


def few_table() -> list[str]:
    """Decode in a program of layers, by cuDNN and by ours, to choose where sequences are few."""
    lines = [
        "| sequences × tokens, kv heads, table | cuDNN, µs | ours | ratio |",
        "|---|---|---|---|",
    ]
    for batch, length, kv_heads, width in FEW:
        used = -(-length // PAGE)
        tables = np.zeros((batch, width), np.int32)
        order = np.random.default_rng(0).permutation(batch * used) + 1
        tables[:, :used] = order.reshape(batch, used)
        shape = (2 * (batch * used + 1), PAGE, kv_heads, 128)
        keys = jax.random.split(jax.random.key(0), LAYERS + 1)
        pools = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys[1:]]
        q = jax.random.normal(keys[0], (batch, 32, 128), jnp.bfloat16)
        times = []
        for decode in (by_cudnn, by_triton):

            def layers(q: jax.Array, pools: Any, *where: jax.Array, decode: Any = decode) -> Any:
                for pool in pools:
                    q = q + 0.01 * decode(q, pool, *where)
                return q

            where = jnp.asarray(tables), jnp.full((batch,), length, jnp.int32)
            times.append(microseconds(jax.jit(layers), q, pools, *where, calls=5) / LAYERS)
        ratio = f"{times[0]:.1f} | {times[1]:.1f} | {times[1] / times[0]:.2f}"
        lines.append(f"| {batch} × {length:,}, {kv_heads}, {width} pages | {ratio} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--matmuls", action="store_true", help="these alone")
    parser.add_argument("--attention", action="store_true", help="its two tables alone")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    if args.cpu:
        jax.config.update("jax_platforms", "cpu")
    device = jax.devices()[0]
    bandwidth = chip_of_kind(device.device_kind, device.platform).memory_bandwidth
    shapes, tokens = (((64, 128),), (1, 16)) if args.cpu else (MATMULS, TOKENS)
    lines: list[str] = []
    if not args.attention:
        with jax.set_mesh(generation_mesh()):
            lines += matmul_table(shapes, tokens, bandwidth)
            if not args.matmuls:
                lines += ["", *layer_table()]
    if not args.matmuls:
        lines += ["", *paged_table(bandwidth), "", *few_table()]
    print("\n".join(["", device.device_kind, "", *lines]))


if __name__ == "__main__":
    main()

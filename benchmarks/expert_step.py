"""Speed of one training step of a mixture of experts on one GPU, transformers beside it.

    python benchmarks/expert_step.py              # prints the tables
    python benchmarks/expert_step.py --write      # and puts them into RESULTS.md
    python benchmarks/expert_step.py --model mixtral-8x7b --layers 2 --sides kernels,ours,fp8
    python benchmarks/expert_step.py --sides ours --profile /tmp/profile

The model is a stack of layers of qwen3-30b-a3b (128 experts, 8 for a token, 2048 → 768) with random
weights, 4 sequences of 4,096 tokens. `ours` runs the step of the settings that `meshwright train`
reads from the same flags: AdamW with float32 master weights, bfloat16 matmuls. Its sequences have
segment ids, as all that `train` packs, which the peer's have not; `without documents` has none
either; `bfloat16 moments` keeps AdamW's moments in bfloat16, as the peer does; `fp8` multiplies in
fp8, experts of 1,024 and wider too. With `--model mixtral-8x7b` the layers are of that model (8
experts, 2 for a token, 4096 → 14336), which the peer is not. The peer is
transformers' Qwen3MoeForCausalLM with SDPA, torch._grouped_mm for the experts, torch.compile and
fused AdamW, its weights and moments in bfloat16: in float32 it multiplies the experts one by one.
FLOPs are those of the experts that tokens choose. `kernels` multiplies 131,072 rows with gate, up
and down alone, forward, and forward and backward, in groups of even and uneven sizes; in fp8 with
all that this takes (largest numbers, casts, transposes). The errors of fp8 are relative ones of a
product and its gradients against float32 products of the same rounded operands, also of groups of
no rows and of one tile. `tokamax` is its ragged_dot for Hopper GPUs with tiles of 128 × 192 × 64.
Each side runs in its own process.
"""

import argparse
import datetime
import functools
import json
import os
import statistics
import subprocess
import sys
import time
import types
from typing import Any

import train_step
from results import write_section
from train_step import step_time

SHAPE = (4, 4096)
EXPERTS, PER_TOKEN, EMBED, MLP = 128, 8, 2048, 768
MODELS = {
    "qwen3-30b-a3b": (EXPERTS, PER_TOKEN, EMBED, MLP),
    "olmoe-1b-7b": (64, 8, 2048, 1024),
    "qwen3-235b-a22b": (128, 8, 4096, 1536),
    "mixtral-8x7b": (8, 2, 4096, 14336),
}
LIMIT = 1.3  # of the peer
PEER = (
    "The peer is transformers with torch._grouped_mm and torch.compile, its weights and moments in "
    "bfloat16. Ours masks documents, as `train` does; the peer has none. "
)
LEAST = 430  # TFLOP/s of the kernels, forward and backward, uneven groups


def ours(options: argparse.Namespace, plain: bool = False) -> dict[str, Any]:
    train_step.SHAPES["experts"] = SHAPE
    options.words = (options.model, "--override", f"layers={options.layers}")
    options.documents, options.plain = 1, plain
    return train_step.ours("experts", options)


def without_documents(options: argparse.Namespace) -> dict[str, Any]:
    return ours(options, plain=True)


def with_bfloat16_moments(options: argparse.Namespace) -> dict[str, Any]:
    options.flags += " --optimizer.moments bfloat16"
    return ours(options)


def in_fp8(options: argparse.Namespace) -> dict[str, Any]:
    options.flags += " --compute.matmul fp8"
    return ours(options)


def peer(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    batch, seq = SHAPE
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=151936, hidden_size=EMBED, num_hidden_layers=options.layers,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, moe_intermediate_size=MLP,
        num_experts=EXPERTS, num_experts_per_tok=PER_TOKEN, norm_topk_prob=True,
        max_position_embeddings=seq, attn_implementation="sdpa",
        experts_implementation="grouped_mm", use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.Qwen3MoeForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    compiled = torch.compile(model)
    tokens = torch.randint(0, 151936, (batch, seq), device="cuda")
    start = time.perf_counter()

    def step() -> Any:
        loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    first = float(step())
    compile_seconds = time.perf_counter() - start
    seconds = step_time(step, lambda loss: loss.item(), options.steps)
    return {
        "seconds": seconds, "compile": compile_seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(), "losses": [first, float(step())],
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }  # fmt: skip


def kernels(options: argparse.Namespace) -> dict[str, Any]:
    """TFLOP/s of each way to multiply, by (groups, passes)."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from meshwright.ops import group_alignment, grouped_matmul

    experts, per_token, embed, mlp_size = MODELS[options.model]
    rows = SHAPE[0] * SHAPE[1] * per_token
    alignment, why = group_alignment(jnp.bfloat16)
    ways = {
        "ours": (functools.partial(grouped_matmul, alignment=alignment), alignment),
        "ours, fp8": (functools.partial(fp8_matmul, alignment=alignment), alignment),
    }
    if options.tokamax:
        ways["tokamax"] = (tokamax_matmul(), 1)
    flops = 3 * 2 * rows * embed * mlp_size
    found: dict[str, Any] = {"why": why, "errors": fp8_errors()}
    for groups in ("even", "uneven"):
        share = np.ones(experts) if groups == "even" else np.arange(1, experts + 1) ** -0.3
        sizes = np.random.default_rng(0).multinomial(rows, share / share.sum())
        for name, (multiply, align) in ways.items():
            aligned = -(-sizes // align) * align
            total = -(-(rows + (align - 1) * experts) // align) * align
            starts = np.cumsum(aligned) - aligned
            real = np.zeros((total, 1), bool)
            for start, size in zip(starts, sizes, strict=True):
                real[start : start + size] = True
            keys = jax.random.split(jax.random.key(0), 4)
            x = jnp.where(real, jax.random.normal(keys[0], (total, embed), jnp.bfloat16), 0)
            gate, up = (
                0.02 * jax.random.normal(key, (experts, embed, mlp_size), jnp.bfloat16)
                for key in keys[1:3]
            )
            down = 0.02 * jax.random.normal(keys[3], (experts, mlp_size, embed), jnp.bfloat16)

            def mlp(x: Any, gate: Any, up: Any, down: Any, sizes: Any, multiply: Any = multiply):
                hidden = multiply(x, gate, sizes) * multiply(x, up, sizes)
                return multiply(hidden, down, sizes)

            def backward(*arrays: Any, mlp: Any = mlp) -> Any:
                out, pull = jax.vjp(lambda *a: mlp(*a, arrays[4]), *arrays[:4])
                return pull(out)

            arrays = (x, gate, up, down, jnp.asarray(aligned, jnp.int32))
            for passes, function, times in (("forward", mlp, 1), ("both", backward, 3)):
                seconds = timed(jax.jit(function), arrays)
                found[f"{name} {groups} {passes}"] = times * flops / seconds / 1e12
    return found


def fp8_matmul(x: Any, weights: Any, sizes: Any, alignment: int) -> Any:
    from meshwright.ops.fp8 import Fp8Weight, scale_of
    from meshwright.ops.grouped import fp8_groups, grouped_matmul

    groups = fp8_groups(Fp8Weight(weights, scale_of(weights)), lambda array: array)
    return grouped_matmul(x, groups, sizes, alignment)


def fp8_errors() -> dict[str, float]:
    """Of a product and its gradients, of groups of no rows, of one tile and of more."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from meshwright.ops.fp8 import E4M3, E5M2, once, power_of_two, quantized

    sizes = np.array([0, 128, 128, 640, 0, 256, 128, 0], np.int32)
    total, inputs, outputs = int(sizes.sum()), 384, 512
    groups = jnp.asarray(np.repeat(np.arange(len(sizes)), sizes))
    keys = jax.random.split(jax.random.key(4), 3)
    x = jax.random.normal(keys[0], (total, inputs), jnp.bfloat16)
    g = jax.random.normal(keys[1], (total, outputs), jnp.bfloat16) * 1e-3
    weights = 0.02 * jax.random.normal(keys[2], (len(sizes), inputs, outputs), jnp.bfloat16)
    of_none = jnp.full((256, inputs), jnp.nan, x.dtype), jnp.full((256, outputs), jnp.nan, g.dtype)

    @jax.jit
    def run(x: Any, weights: Any, g: Any, sizes: Any) -> Any:
        y, pull = jax.vjp(lambda x, w: fp8_matmul(x, w, sizes, 128), x, weights)
        dx, dw = pull(g)
        return y[:total], dx[:total], dw

    @jax.jit
    def exact(x: Any, weights: Any, g: Any) -> Any:
        def rounded(array: Any, dtype: Any) -> Any:
            scale = power_of_two(jnp.max(jnp.abs(array)), dtype)
            # held apart: XLA would leave out that a number is rounded and converted back
            return once(quantized(array, scale, dtype)).astype(jnp.float32) * scale

        x, w, g = rounded(x, E4M3), rounded(weights, E4M3), rounded(g, E5M2)
        of_group = jax.nn.one_hot(groups, len(sizes), dtype=jnp.float32)
        with jax.default_matmul_precision("highest"):
            y = jnp.einsum("ri,rg,gio->ro", x, of_group, w)
            return (
                y,
                jnp.einsum("ro,rg,gio->ri", g, of_group, w),
                jnp.einsum("ri,rg,ro->gio", x, of_group, g),
            )

    arrays = (jnp.concatenate([one, none]) for one, none in zip((x, g), of_none, strict=True))
    padded_x, padded_g = arrays
    found = run(padded_x, weights, padded_g, jnp.asarray(sizes))
    errors = {}
    for name, ours, right in zip(["y", "dx", "dw"], found, exact(x, weights, g), strict=True):
        difference = ours.astype(jnp.float32) - right
        errors[name] = float(jnp.linalg.norm(difference) / jnp.linalg.norm(right))
    return errors


def timed(function: Any, arrays: Any) -> float:
    import jax

    jax.block_until_ready(function(*arrays))
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(5):
            out = function(*arrays)
        jax.block_until_ready(out)
        rounds.append((time.perf_counter() - start) / 5)
    return statistics.median(rounds)


def tokamax_matmul() -> Any:
    """tokamax's ragged_dot with the best tiles that were found; its benchmarks' imports stubbed."""
    for name in ("xprof", "xprof.cli", "xprof.cli.tools", "tensorboardX"):
        sys.modules.setdefault(name, types.ModuleType(name))
    tools: Any = sys.modules["xprof.cli.tools"]
    tools.get_kernel_stats_tool = None
    from tokamax._src.ops.ragged_dot import base, pallas_mosaic_gpu
    from tokamax._src.ops.ragged_dot import pallas_mosaic_gpu_common as common

    config = common.Config(
        block_m=128, block_n=192, block_k=64, num_stages=4, split_k=1, persistent=True,
        grid_minor_dim=common.MatmulDimension.N, grid_tile_width=4,
    )  # fmt: skip

    def once(*arrays: Any, **options: Any) -> Any:
        return pallas_mosaic_gpu.PallasMosaicGpuRaggedDot(config=config)(*arrays, **options)

    vjp = functools.partial(base.vjp, dlhs_ragged_dot=once, drhs_ragged_dot=once)
    run = pallas_mosaic_gpu.PallasMosaicGpuRaggedDot(config=config, vjp=vjp)
    return lambda x, weights, sizes: run(x, weights, group_sizes=sizes)


SIDES = {
    "kernels": kernels,
    "ours": ours,
    "without documents": without_documents,
    "bfloat16 moments": with_bfloat16_moments,
    "fp8": in_fp8,
    "peer": peer,
}


def run_side(side: str, options: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own, which has the whole GPU."""
    words = [sys.executable, __file__, "--only", side, *options.given]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        return {"failed": done.stderr.strip().splitlines()[-1][:200] if done.stderr else "?"}
    if options.profile:
        print(done.stderr[-6000:])
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--model", default="qwen3-30b-a3b", choices=list(MODELS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--flags", default="")
    parser.add_argument("--profile")
    parser.add_argument("--tokamax", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.given = [word for word in sys.argv[1:] if word != "--write"]
    if options.only:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
        print(json.dumps(SIDES[options.only](options)))
        return
    found = {side: run_side(side, options) for side in options.sides.split(",")}
    for title, intro, lines in tables(found, options):
        print(f"{title}\n{intro}\n" + "\n".join(lines), flush=True)
        if options.write:
            write_section(title, intro, lines)
    for miss in missed(found):
        print(miss)


def missed(found: dict[str, dict[str, Any]]) -> list[str]:
    """Which of the limits were not reached."""
    misses = []
    medians = {
        side: statistics.median(result["seconds"])
        for side, result in found.items()
        if "seconds" in result
    }
    for side in sorted(medians.keys() - {"peer", "fp8"}):
        if {side, "peer"} <= medians.keys() and medians["peer"] / medians[side] < LIMIT:
            ratio = medians["peer"] / medians[side]
            misses.append(f"missed: {side}, {ratio:.2f} of the peer's speed, {LIMIT} asked")
    rate = found.get("kernels", {}).get("ours uneven both")
    if rate is not None and rate < LEAST:
        misses.append(f"missed: {rate:.0f} TFLOP/s of uneven groups, {LEAST} asked")
    return misses


def tables(
    found: dict[str, dict[str, Any]], options: argparse.Namespace
) -> list[tuple[str, str, list[str]]]:
    where = f"one H200, {datetime.date.today()}. benchmarks/expert_step.py."
    steps = {side: result for side, result in found.items() if side != "kernels"}
    medians = {
        side: statistics.median(result["seconds"])
        for side, result in steps.items()
        if "seconds" in result
    }
    base, name = ("peer", "the peer") if "peer" in medians else ("ours", "ours")
    lines = [
        f"| side | step | tokens/s | TFLOP/s | of {name} | memory | compile | versions |",
        "|---|---|---|---|---|---|---|---|",
    ]
    flops = max((result.get("flops", 0.0) for result in steps.values()), default=0.0)
    for side, seconds in medians.items():
        result = steps[side]
        ratio = medians[base] / seconds if base in medians else float("nan")
        lines.append(
            f"| {side} | {seconds * 1e3:.1f} ms | {SHAPE[0] * SHAPE[1] / seconds:,.0f} | "
            f"{flops / seconds / 1e12:.0f} | {ratio:.2f} | {result['peak_bytes'] / 2**30:.1f} GiB "
            f"| {result['compile']:.0f} s | {result['versions']} |"
        )
    lines += [f"{side}: {result['failed']}" for side, result in steps.items() if "failed" in result]
    intro = (
        f"{options.layers} layers of {options.model}, {SHAPE[0]} × {SHAPE[1]:,} tokens; {where} "
        + PEER * (base == "peer")
        + "Ours has float32 master weights, and float32 moments unless a row says otherwise. FLOPs "
        "of the experts that tokens choose."
    )
    of_model = "" if options.model == "qwen3-30b-a3b" else f", {options.model}"
    made = [(f"Mixture of experts: a step on one GPU{of_model}", intro, lines)] if steps else []
    if "kernels" not in found:
        return made
    lines = [
        "| kernel | groups | forward | forward and backward |",
        "|---|---|---|---|",
    ]
    for name in ("ours", "ours, fp8", "tokamax"):
        for groups in ("even", "uneven"):
            rates = [found["kernels"].get(f"{name} {groups} {p}") for p in ("forward", "both")]
            if None not in rates:
                lines.append(f"| {name} | {groups} | {rates[0]:.0f} | {rates[1]:.0f} |")
    errors = ", ".join(f"{name} {e:.1e}" for name, e in found["kernels"]["errors"].items())
    lines += ["", f"Relative errors of fp8 against the same rounded operands: {errors}."]
    experts, per_token, embed, mlp = MODELS[options.model]
    intro = (
        f"TFLOP/s of gate, up and down: {SHAPE[0] * SHAPE[1] * per_token:,} rows, {experts} "
        f"experts, {embed} → {mlp}, bfloat16; {where} tokamax 0.0.17 with tiles of 128 × 192 × 64."
    )
    return [*made, (f"Grouped matmuls of experts on one GPU{of_model}", intro, lines)]


if __name__ == "__main__":
    main()

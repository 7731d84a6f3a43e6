"""Speed of one training step on one GPU, the peer beside it on the same machine.

    python benchmarks/train_step.py                  # both shapes, prints a table
    python benchmarks/train_step.py --write          # and puts it into RESULTS.md

The model has 16 layers, embed 2048, 32 heads and 8 key heads of 64, mlp 8192, vocabulary 128256,
untied; AdamW, float32 master weights, bfloat16 compute. The peer is transformers' LlamaForCausalLM
with SDPA, torch.compile, fused AdamW and bfloat16 autocast. FLOPs are counted as 6 · (matmul
parameters, output head included, embedding lookup not) · tokens + 6 · layers · heads · head_dim ·
seq · tokens, for both. The ceiling is the best of a few large bfloat16 matmuls of random numbers.
Each side runs in its own process.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from results import write_section

SHAPES = {"8x2048": (8, 2048), "4x8192": (4, 8192)}
LIMITS = {"8x2048": (0.70, 1.25), "4x8192": (0.68, 1.65)}  # of the ceiling, of the peer
SIZES = {
    "vocab": 128256, "layers": 16, "embed": 2048, "heads": 32, "kv_heads": 8, "head_dim": 64,
    "mlp": 8192,
}  # fmt: skip


def flops(batch: int, seq: int) -> float:
    """Of one step; the formula above, from the sizes alone."""
    s = SIZES
    attention = 2 * s["embed"] * s["head_dim"] * (s["heads"] + s["kv_heads"])
    matmul = s["layers"] * (attention + 3 * s["embed"] * s["mlp"]) + s["embed"] * s["vocab"]
    per_token = 6 * matmul + 6 * s["layers"] * s["heads"] * s["head_dim"] * seq
    return float(per_token) * batch * seq


def step_time(step: Callable[[], Any], wait: Callable[[Any], Any], steps: int) -> list[float]:
    """Seconds from the end of one step to the end of the next, after three to warm up.

    A step is started before the one before it is waited for, as a training loop does.
    """
    ahead = step()
    for _ in range(3):
        ahead, done = step(), ahead
        wait(done)
    seconds = []
    end = time.perf_counter()
    for _ in range(steps):
        ahead, done = step(), ahead
        wait(done)
        start, end = end, time.perf_counter()
        seconds.append(end - start)
    wait(ahead)
    return seconds


def ours(batch: int, seq: int, steps: int, options: argparse.Namespace) -> dict[str, Any]:
    import jax
    import numpy as np

    import meshwright as mw
    from meshwright.models import DecoderConfig
    from meshwright.train.abstract_step import abstract_step
    from meshwright.train.config import ComputeConfig, TrainConfig, with_settings
    from meshwright.train.state import new_state

    model = DecoderConfig(**SIZES, max_seq=seq)
    mesh = mw.mesh("dp=1,fsdp=1,tp=1,sp=1", devices=jax.devices()[:1], axis_types="explicit")
    compute = ComputeConfig(dtype="bfloat16", remat=options.remat, scan=options.scan)
    config = TrainConfig("", batch=batch, seq=seq, compute=compute)
    abstract = abstract_step(with_settings(config, {"loss.chunk": options.chunk}), mesh, model)
    functions = abstract.functions
    state = new_state(abstract.arrays, abstract.state, abstract.optimizer, mesh)
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab"], (1, batch, seq), dtype=np.int32)
    data = {
        "tokens": jax.device_put(tokens, functions.batch_sharding),
        "targets": jax.device_put(np.roll(tokens, -1, -1), functions.batch_sharding),
    }
    if options.documents > 1:  # packed sequences: that many documents in each
        places = np.arange(seq, dtype=np.int32) * options.documents // seq
        whole = np.broadcast_to(places + 1, tokens.shape)
        data["segments"] = jax.device_put(np.ascontiguousarray(whole), functions.batch_sharding)
    start = time.perf_counter()
    losses: list[float] = []
    holder = [state]
    del state

    def step() -> Any:
        holder[0], report = functions.train(holder[0], data)
        return report["loss"]

    losses.append(float(step()))
    compile_seconds = time.perf_counter() - start
    seconds = step_time(step, lambda loss: losses.append(float(loss)), steps)
    if options.profile:
        profile(options.profile, step)
    peak = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    return {
        "seconds": seconds, "compile": compile_seconds, "peak_bytes": peak,
        "losses": [losses[0], losses[-1]], "versions": f"jax {jax.__version__}",
    }  # fmt: skip


def profile(folder: str, step: Callable[[], Any]) -> None:
    """Kernel times of three steps, summed by name."""
    import glob
    from collections import Counter

    import jax

    with jax.profiler.trace(folder):
        for _ in range(3):
            float(step())
    (file,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    total: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for plane in jax.profiler.ProfileData.from_file(file).planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                total[event.name] += event.duration_ns / 3e6
                calls[event.name] += 1
    print(f"kernels, ms a step: {sum(total.values()):.2f}", file=sys.stderr)
    for name, milliseconds in total.most_common(60):
        print(f"{milliseconds:9.3f} {calls[name] / 3:7.1f} {name[:150]}", file=sys.stderr)


def peer(batch: int, seq: int, steps: int, options: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    config = transformers.LlamaConfig(
        vocab_size=SIZES["vocab"], hidden_size=SIZES["embed"], intermediate_size=SIZES["mlp"],
        num_hidden_layers=SIZES["layers"], num_attention_heads=SIZES["heads"],
        num_key_value_heads=SIZES["kv_heads"], max_position_embeddings=seq,
        tie_word_embeddings=False, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    compiled = torch.compile(model)
    tokens = torch.randint(0, SIZES["vocab"], (batch, seq), device="cuda")
    start = time.perf_counter()

    def step() -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    first = float(step())
    compile_seconds = time.perf_counter() - start
    seconds = step_time(step, lambda loss: loss.item(), steps)
    return {
        "seconds": seconds, "compile": compile_seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(), "losses": [first, float(step())],
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }  # fmt: skip


def ceiling(batch: int, seq: int, steps: int, options: argparse.Namespace) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    best = 0.0
    for m, k, n in ((8192, 8192, 8192), (16384, 8192, 8192), (16384, 16384, 16384)):
        a, b = jnp.ones((m, k), jnp.bfloat16), jnp.ones((k, n), jnp.bfloat16)
        a = jax.random.normal(jax.random.key(0), a.shape, jnp.bfloat16)
        b = jax.random.normal(jax.random.key(1), b.shape, jnp.bfloat16)
        multiply = jax.jit(jnp.matmul)
        jax.block_until_ready(multiply(a, b))
        rounds = []
        for _ in range(10):
            start = time.perf_counter()
            for _ in range(10):
                c = multiply(a, b)
            jax.block_until_ready(c)
            rounds.append((time.perf_counter() - start) / 10)
        best = max(best, 2 * m * k * n / statistics.median(rounds))
    return {"flops": best, "device": jax.devices()[0].device_kind}


SIDES = {"ours": ours, "peer": peer, "ceiling": ceiling}


def run(side: str, shape: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """One side in its own process; None if it failed, with its message shown."""
    command = [sys.executable, __file__, "--side", side, "--shapes", shape, *options.passed]
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if options.profile or done.returncode:
        print(done.stderr[-9000:], file=sys.stderr)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--sides", default="ceiling,peer,ours")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--remat", default="none")
    parser.add_argument("--scan", action="store_true")
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--documents", type=int, default=1, help="in each sequence of ours")
    parser.add_argument("--profile", help="folder for a kernel profile of ours")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.side:
        batch, seq = SHAPES[options.shapes]
        print(json.dumps(SIDES[options.side](batch, seq, options.steps, options)))
        return
    given = {
        "--steps": options.steps,
        "--remat": options.remat,
        "--chunk": options.chunk,
        "--documents": options.documents,
    }
    options.passed = [str(word) for pair in given.items() for word in pair]
    options.passed += ["--scan"] * options.scan
    options.passed += ["--profile", options.profile] if options.profile else []
    sides = options.sides.split(",")
    top = run("ceiling", "8x2048", options) if "ceiling" in sides else None
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for shape in options.shapes.split(","):
        for side in ("peer", "ours"):
            result = run(side, shape, options) if side in sides else None
            if result is not None:
                found[shape, side] = result
                print(line(shape, side, result, top), flush=True)
            elif side in sides:
                print(f"{shape} {side}: failed", flush=True)
    if top is not None:
        report(found, top, options)


def speed(shape: str, result: dict[str, Any]) -> float:
    """FLOP/s of the median step."""
    return flops(*SHAPES[shape]) / statistics.median(result["seconds"])


def line(shape: str, side: str, result: dict[str, Any], top: dict[str, Any] | None) -> str:
    share = f" {speed(shape, result) / top['flops']:.3f} of ceiling" if top else ""
    times = [seconds * 1e3 for seconds in result["seconds"]]
    return (
        f"{shape} {side}: {statistics.median(times):.2f} ms ({min(times):.1f}-{max(times):.1f}), "
        f"{speed(shape, result) / 1e12:.1f} TFLOP/s{share}, "
        f"{result['peak_bytes'] / 2**30:.1f} GiB, compile {result['compile']:.0f} s, "
        f"losses {result['losses']}, {result['versions']}"
    )


def report(
    found: dict[tuple[str, str], dict[str, Any]], top: dict[str, Any], options: argparse.Namespace
) -> None:
    """A table of both sides; with --write into RESULTS.md."""
    lines = [
        "| batch × seq | side | ms a step | TFLOP/s | of ceiling | of peer | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for (shape, side), result in found.items():
        peer_speed = speed(shape, found[shape, "peer"]) if (shape, "peer") in found else None
        least_share, least_ratio = LIMITS[shape]
        share = f"{speed(shape, result) / top['flops']:.3f}"
        ratio = "" if peer_speed is None else f"{speed(shape, result) / peer_speed:.2f}×"
        if side == "ours":
            share += f" (wanted {least_share})"
            ratio += f" (wanted {least_ratio}×)"
        lines.append(
            f"| {shape} | {side} | {statistics.median(result['seconds']) * 1e3:.1f} | "
            f"{speed(shape, result) / 1e12:.0f} | {share} | {ratio} | "
            f"{result['peak_bytes'] / 2**30:.1f} GiB |"
        )
    versions = "; ".join(dict.fromkeys(result["versions"] for result in found.values()))
    conditions = (
        f"`python benchmarks/train_step.py --write`, {datetime.date.today()}, one {top['device']}, "
        f"{versions}; median of {options.steps} steps, one step in flight; ceiling "
        f"{top['flops'] / 1e12:.0f} TFLOP/s."
    )
    print("\n".join([conditions, "", *lines]))
    if options.write:
        write_section("Training step on one GPU", conditions, lines)


if __name__ == "__main__":
    main()

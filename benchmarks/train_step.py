"""Speed of one training step on one GPU, the peer beside it on the same machine.

    python benchmarks/train_step.py                  # both shapes, prints a table
    python benchmarks/train_step.py --write          # and puts it into RESULTS.md
    python benchmarks/train_step.py --sides ours --flags="--compute.layers scan"

The model is llama-3.2-1b with an LM head of its own: 16 layers, embed 2048, 32 heads and 8 key
heads of 64, mlp 8192, vocabulary 128256; AdamW, float32 master weights, bfloat16 compute. `ours`
runs the step of the settings that `meshwright train` reads from the same flags; `command` is that
command itself, on one long document, timed by its metrics.jsonl, and `torch` the same with
--backend torch. `fp8` is ours with
--compute.matmul fp8; `8b` and `8b-fp8` are layers of llama-3.1-8b. The peer is transformers'
LlamaForCausalLM with SDPA, torch.compile, fused AdamW and bfloat16 autocast, `torchao` the same
with float8 linear layers. FLOPs are counted as
6 · (matmul parameters, output head included, embedding lookup not) · tokens + 12 · layers · heads ·
head_dim · keys that a query sees · tokens. The ceiling is the best of a few large bfloat16 matmuls
of random numbers. Each side runs in its own process.
"""

import argparse
import datetime
import glob
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from results import write_section

SHAPES = {"8x2048": (8, 2048), "4x8192": (4, 8192)}
# of the peer; of 8B-shaped layers, of our own bfloat16
LIMITS = {
    ("8x2048", "ours"): 1.25, ("8x2048", "command"): 1.25, ("8x2048", "fp8"): 1.45,
    ("4x8192", "ours"): 1.65, ("4x8192", "command"): 1.65, ("4x8192", "fp8"): 1.85,
    ("8x2048", "torch"): 1.0, ("4x8192", "torch"): 1.0, ("8x2048", "8b-fp8"): 1.30,
}  # fmt: skip
ONE_B = ("llama-3.2-1b", "--override", "tied_embeddings=false")
# 16 of 32 layers, with AdamW in float32 on one GPU of 139 GiB
EIGHT_B = ("llama-3.1-8b", "--override", "layers=16")
# wider layers, as many as fit; of a small vocabulary, so that the layers are most of the step
SEVENTY_B = ("llama-3.1-70b", "--override", "layers=4", "vocab=32000")
FOUR_HUNDRED_B = ("llama-3.1-405b", "--override", "layers=1", "vocab=32000")
LIBRARIES = ("torch ", "transformers ", "jax ")
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


def flags(shape: str, options: argparse.Namespace, extra: Sequence[str] = ()) -> list[str]:
    """The words of `meshwright train` for a shape."""
    batch, seq = SHAPES[shape]
    words = list(options.words)
    # as many steps in all sides: the schedule of the learning rate is part of the program
    words += ["--batch", str(batch), "--seq", str(seq), "--steps", "100000"]
    return [*words, *shlex.split(options.flags), *extra]


def ours(
    shape: str,
    options: argparse.Namespace,
    extra: Sequence[str] = (),
    attention: str | None = None,
) -> dict[str, Any]:
    """`attention`: a kernel, also one that the command does not offer."""
    import dataclasses

    import jax
    import numpy as np

    from meshwright.cli.train import settings
    from meshwright.launch import keep_compiled_programs
    from meshwright.models import layer_count
    from meshwright.training.abstract_step import abstract_step
    from meshwright.training.state import new_state

    keep_compiled_programs()  # as the command does: it then finds the program of this step
    config = settings(flags(shape, options, extra))
    if attention is not None:
        compute: Any = dataclasses.replace(config.compute, attention=attention)
        config = dataclasses.replace(config, compute=compute)
    abstract = abstract_step(config)
    functions, (batch, seq) = abstract.functions, SHAPES[shape]
    state = new_state(abstract.arrays, abstract.state, abstract.optimizer, abstract.mesh)
    vocab = abstract.model.vocab
    tokens = np.random.default_rng(0).integers(0, vocab, (1, batch, seq), dtype=np.int32)
    # documents of equal length, as the loader makes them
    length = -(-seq // options.documents)
    places = np.arange(seq, dtype=np.int32)
    fields = {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, -1),
        "segments": np.broadcast_to(places // length + 1, tokens.shape),
        "positions": np.broadcast_to(places % length, tokens.shape),
    }
    if options.plain:  # no documents at all: the attention kernel gets no segments
        del fields["segments"], fields["positions"]
    data = {
        name: jax.device_put(np.ascontiguousarray(field, np.int32), functions.batch_sharding)
        for name, field in fields.items()
    }
    start = time.perf_counter()
    compiled = functions.train.lower(state, data).compile()
    compile_seconds = time.perf_counter() - start
    planned = compiled.memory_analysis()
    in_fp8 = compiled.as_text().count('custom_call_target="__cublas$lt$matmul$f8"')
    losses: list[float] = []
    holder = [state]
    del state

    def step() -> Any:
        holder[0], report = compiled(holder[0], data)
        return report["loss"]

    losses.append(float(step()))
    seconds = step_time(step, lambda loss: losses.append(float(loss)), options.steps)
    if options.profile:
        profile(options.profile, step)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    seen = None if options.plain else float((places % length + 1).mean())
    return {
        "seconds": seconds, "compile": compile_seconds, "peak_bytes": peak,
        "losses": [losses[0], losses[-1]],
        "versions": f"jax {jax.__version__}, {layer_count(abstract.model)} layers, "
        f"{in_fp8} fp8 matmuls",
        "flops": abstract.work.flops_per_token(seen) * batch * seq,
        "compiled_bytes": planned.argument_size_in_bytes + planned.temp_size_in_bytes,
    }  # fmt: skip


def fp8(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    return ours(shape, options, ["--compute.matmul", "fp8"])


def command(shape: str, options: argparse.Namespace, extra: Sequence[str] = ()) -> dict[str, Any]:
    """`meshwright train` in a process of its own, ended as soon as enough steps are timed."""
    import random

    from meshwright.data import ByteTokenizer, pack

    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        # one document, so that attention has as much to do as in the step that is timed alone
        text.write_text("".join(random.Random(0).choices("abcdefgh ", k=4_000_000)))
        pack([text], Path(folder, "text.store"), ByteTokenizer())
        places = ["--data", f"{folder}/text.store", "--run", f"{folder}/run"]
        words = flags(shape, options, [*places, *extra])
        code = "from meshwright.cli.main import main; main()"
        program = [sys.executable, "-c", code, "train", *words]
        start = time.perf_counter()
        log = Path(folder, "log")
        with log.open("w") as out, subprocess.Popen(program, stdout=out, stderr=out) as process:
            records: list[dict[str, Any]] = []
            while process.poll() is None and len(records) < options.steps + 8:
                time.sleep(0.2)
                file = Path(folder, "run", "metrics.jsonl")
                lines = file.read_text().splitlines() if file.exists() else []
                records = [json.loads(line) for line in lines[:-1]]
                records = [record for record in records if "step_seconds" in record]
            took = time.perf_counter() - start
            process.kill()
        if not records:
            raise SystemExit(log.read_text()[-4000:])
        print(log.read_text()[-3000:], file=sys.stderr)
    return {
        "seconds": [records[-1]["step_seconds"]], "compile": took,
        "peak_bytes": records[-1].get("memory_bytes", 0),
        "losses": [records[0]["loss"], records[-1]["loss"]],
        "versions": "the command",
        "flops": records[-1]["tflops_per_device"] * 1e12 * records[-1]["step_seconds"],
    }  # fmt: skip


def torch_command(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    return command(shape, options, ["--backend", "torch"])


def kernel_times(folder: str) -> tuple[Counter[str], Counter[str]]:
    """Microseconds and calls of each GPU kernel in the profile of a folder, by its name."""
    import jax

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
                total[event.name] += event.duration_ns / 1e3
                calls[event.name] += 1
    return total, calls


def profile(folder: str, step: Callable[[], Any]) -> None:
    """Kernel times of three steps, summed by name."""
    import jax

    with jax.profiler.trace(folder):
        for _ in range(3):
            float(step())
    total, calls = kernel_times(folder)
    print(f"kernels, ms a step: {sum(total.values()) / 3e3:.2f}", file=sys.stderr)
    for name, micros in total.most_common(60):
        print(f"{micros / 3e3:9.3f} {calls[name] / 3:7.1f} {name[:150]}", file=sys.stderr)


def torchao_peer(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """The peer with torchao's float8 training: every linear layer but the LM head."""
    from torchao.float8 import convert_to_float8_training

    def convert(model: Any) -> Any:
        return convert_to_float8_training(
            model, module_filter_fn=lambda module, name: "lm_head" not in name
        )

    return peer(shape, options, convert)


def peer(
    shape: str, options: argparse.Namespace, convert: Callable[[Any], Any] | None = None
) -> dict[str, Any]:
    import torch
    import transformers

    (batch, seq), steps = SHAPES[shape], options.steps
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    config = transformers.LlamaConfig(
        vocab_size=SIZES["vocab"], hidden_size=SIZES["embed"], intermediate_size=SIZES["mlp"],
        num_hidden_layers=SIZES["layers"], num_attention_heads=SIZES["heads"],
        num_key_value_heads=SIZES["kv_heads"], max_position_embeddings=seq,
        tie_word_embeddings=False, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).cuda()
    if convert is not None:
        model = convert(model)
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


def ceiling(shape: str, options: argparse.Namespace) -> dict[str, Any]:
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
    date = str(datetime.date.today())
    return {"flops": best, "device": jax.devices()[0].device_kind, "date": date}


def layers_of(words: tuple[str, ...], side: Callable[..., dict[str, Any]]) -> Any:
    """A side that runs layers of a larger model."""

    def run(shape: str, options: argparse.Namespace) -> dict[str, Any]:
        options.words = words
        return side(shape, options)

    return run


SIDES = {
    "peer": peer, "torchao": torchao_peer, "ours": ours, "command": command, "fp8": fp8,
    "torch": torch_command, "ceiling": ceiling,
    "8b": layers_of(EIGHT_B, ours), "8b-fp8": layers_of(EIGHT_B, fp8),
    "70b": layers_of(SEVENTY_B, ours), "70b-fp8": layers_of(SEVENTY_B, fp8),
    "405b": layers_of(FOUR_HUNDRED_B, ours), "405b-fp8": layers_of(FOUR_HUNDRED_B, fp8),
}  # fmt: skip


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
    parser.add_argument("--flags", default="", help="of meshwright train, for our sides")
    parser.add_argument("--documents", type=int, default=1, help="in each sequence of ours")
    parser.add_argument("--plain", action="store_true", help="ours without segment ids")
    parser.add_argument("--profile", help="folder for a kernel profile of ours")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--record", type=Path, help="add results to this file, a line each")
    parser.add_argument("--tabulate", action="store_true", help="what --record has; run nothing")
    options = parser.parse_args()
    options.words = ONE_B
    if options.side:
        print(json.dumps(SIDES[options.side](options.shapes, options)))
        return
    options.passed = [f"--steps={options.steps}", f"--documents={options.documents}"]
    options.passed += [f"--flags={options.flags}"] + ["--plain"] * options.plain
    options.passed += ["--profile", options.profile] if options.profile else []
    sides = options.sides.split(",")
    for given, known in ((sides, SIDES), (options.shapes.split(","), SHAPES)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"{', '.join(unknown)}: choose from {', '.join(known)}")
    if options.tabulate and not (options.record and options.record.exists()):
        parser.error("--tabulate needs --record FILE, a file that a run with --record has written")
    if options.tabulate:
        lines = map(json.loads, options.record.read_text().splitlines())
        found = {(line["shape"], line["side"]): line["result"] for line in lines}
    else:
        with tempfile.TemporaryDirectory() as fresh:  # so that no program was compiled before
            os.environ.setdefault("MESHWRIGHT_CACHE", fresh)
            found = measured(sides, options)
    top = found.pop(("", "ceiling"), None)
    if top is None and (options.tabulate or options.write):
        parser.error("a table needs the ceiling: run --sides ceiling,… too")
    if top is not None:
        report(found, top, options)


def measured(
    sides: Sequence[str], options: argparse.Namespace
) -> dict[tuple[str, str], dict[str, Any]]:
    """Results by shape and side; the ceiling's shape is ""."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    if "ceiling" in sides:
        measure("", "ceiling", found, options)
    for shape in options.shapes.split(","):
        for side in (name for name in SIDES if name in sides and name != "ceiling"):
            measure(shape, side, found, options)
    return found


def measure(
    shape: str, side: str, found: dict[tuple[str, str], Any], options: argparse.Namespace
) -> None:
    """Add one side to what was found, and to the record."""
    result = run(side, shape or next(iter(SHAPES)), options)
    if result is None:
        print(f"{shape} {side}: failed", flush=True)
        return
    found[shape, side] = result
    if side != "ceiling":
        print(line(shape, side, result, found.get(("", "ceiling"))), flush=True)
    if options.record:
        with options.record.open("a") as file:
            file.write(json.dumps({"shape": shape, "side": side, "result": result}) + "\n")


def speed(shape: str, result: dict[str, Any]) -> float:
    """FLOP/s of the median step."""
    return result.get("flops", flops(*SHAPES[shape])) / statistics.median(result["seconds"])


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
    every = [(shape, side) for shape in SHAPES for side in SIDES]
    for shape, side in sorted(found, key=every.index):
        result = found[shape, side]
        share = f"{speed(shape, result) / top['flops']:.3f}"
        ratio = ""
        wide, is_wide = side.removesuffix("-fp8"), side[0].isdigit()
        of = ("" if side == wide else wide) if is_wide else "peer"
        if (shape, of) in found:
            seconds = [statistics.median(found[shape, one]["seconds"]) for one in (of, side)]
            ratio = f"{seconds[0] / seconds[1]:.2f}×" + (f" of {of}" if is_wide else "")
        if (shape, side) in LIMITS:
            ratio += f" (wanted {LIMITS[shape, side]}×)"
        lines.append(
            f"| {shape} | {side} | {statistics.median(result['seconds']) * 1e3:.1f} | "
            f"{speed(shape, result) / 1e12:.0f} | {share} | {ratio} | "
            f"{result['peak_bytes'] / 2**30:.1f} GiB |"
        )
    parts = (part for result in found.values() for part in result["versions"].split(", "))
    versions = ", ".join(dict.fromkeys(part for part in parts if part.startswith(LIBRARIES)))
    sides = list(dict.fromkeys(side for _, side in sorted(found, key=every.index)))
    conditions = (
        f"`python benchmarks/train_step.py --sides ceiling,{','.join(sides)}`, "
        f"{top.get('date', datetime.date.today())}, one {top['device']}, {versions}; medians of "
        f"steps, one step in flight; ceiling {top['flops'] / 1e12:.0f} TFLOP/s."
    )
    print("\n".join([conditions, "", *lines]))
    if options.write:
        write_section("Training step on one GPU", conditions, lines)


if __name__ == "__main__":
    main()

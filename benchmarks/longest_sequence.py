"""The longest sequence a 1B model trains on: `python benchmarks/long_context.py --longest`.

The model is that of train_step.py, in batches of one row; AdamW, float32 master weights, bfloat16
compute, each layer's forward made again in the backward pass. Ours: remat full, the mlp in chunks
of tokens. The peer: transformers' LlamaForCausalLM with SDPA and gradient checkpointing, bfloat16
autocast. Lengths are powers of two and one and a half times those. The peer does one step of each,
until it is out of memory. Of ours the compiler says what a step takes, which has been what it
then took; a step is run of the longest compiled that fits into the time. Each side runs in its own
process and prints a line of JSON for each length.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from results import write_section
from train_step import SIZES, flops

LENGTHS = sorted([2**n for n in range(15, 22)] + [3 * 2**n for n in range(14, 20)])
PROBES = (131072, 262144)  # lengths whose memory tells that of longer ones
MLP_CHUNK = 8192


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def expected_seconds(seq: int) -> float:
    """Of a step: everything forward twice, at what one GPU did in train_step.py."""
    return 1.5 * flops(1, seq) / 350e12


class Step(NamedTuple):
    """Our step for sequences of one length, compiled."""

    run: Callable[[Any, Any], Any]
    new_state: Callable[[], Any]
    batch_sharding: Any
    bytes: int  # at its peak


def compile_step(seq: int, device: Any) -> Step:
    import jax

    import meshwright as mw
    from meshwright.models import DecoderConfig
    from meshwright.training.abstract_step import abstract_step
    from meshwright.training.config import ComputeConfig, TrainConfig
    from meshwright.training.state import new_state

    model = DecoderConfig(**SIZES, max_seq=seq)
    mesh = mw.mesh("dp=1,fsdp=1,tp=1,sp=1", devices=[device], axis_types="explicit")
    compute = ComputeConfig(dtype="bfloat16", remat="full", mlp_chunk=MLP_CHUNK)
    step = abstract_step(TrainConfig("", batch=1, seq=seq, compute=compute), mesh, model)
    batch = {name: step.batch[name] for name in ("tokens", "targets")}
    compiled = step.functions.train.lower(step.state, batch).compile()

    memory = compiled.memory_analysis()

    def run(state: Any, batch: Any) -> Any:
        with jax.set_mesh(mesh):
            return compiled(state, batch)

    return Step(
        run=run,
        new_state=lambda: new_state(step.arrays, step.state, step.optimizer, mesh),
        batch_sharding=step.functions.batch_sharding,
        bytes=memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
    )


def ours(limit: float) -> None:
    import jax
    import numpy as np

    start = time.perf_counter()
    device = jax.devices()[0]
    room = memory_of(device, "bytes_limit")
    steps: dict[int, Step] = {}

    def left() -> float:
        return limit - (time.perf_counter() - start)

    def compile_one(seq: int) -> None:
        steps[seq] = compile_step(seq, device)
        fits = steps[seq].bytes <= room
        say(how="compiled", seq=seq, bytes=steps[seq].bytes, room=room, fits=fits, left=left())

    def in_time() -> list[int]:
        return [
            seq
            for seq, step in steps.items()
            if step.bytes <= room and expected_seconds(seq) < left() - 10
        ]

    for seq in PROBES:
        compile_one(seq)
    first, second = (steps[seq].bytes for seq in PROBES)
    a_token = (second - first) / (PROBES[1] - PROBES[0])
    by_line = [seq for seq in LENGTHS if first + a_token * (seq - PROBES[0]) <= room]
    say(how="line", seq=max(by_line), bytes_a_token=a_token, device=device.device_kind)
    for seq in reversed(by_line):  # most often the first fits; not if it leaves no time to run one
        if seq in steps or not in_time() or left() < 40:
            break
        compile_one(seq)
        if steps[seq].bytes <= room:
            break
    if not in_time():
        say(how="no time left to run a step", seq=0)
        return
    seq = max(in_time())
    step = steps[seq]
    steps.clear()
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab"], (1, 1, seq), dtype=np.int32)
    batch = {
        "tokens": jax.device_put(tokens, step.batch_sharding),
        "targets": jax.device_put(np.roll(tokens, -1, -1), step.batch_sharding),
    }
    state = jax.block_until_ready(step.new_state())
    begin = time.perf_counter()
    state, report = step.run(state, batch)
    loss = float(report["loss"])
    seconds, peak = time.perf_counter() - begin, memory_of(device, "peak_bytes_in_use")
    versions = f"jax {jax.__version__}"
    say(how="run", seq=seq, seconds=seconds, bytes=peak, loss=loss, versions=versions)


def memory_of(device: Any, what: str) -> int:
    """From the device's own count, which a CPU does not keep."""
    return int((device.memory_stats() or {}).get(what, 2**37))


def peer(limit: float) -> None:
    import torch
    import transformers

    start = time.perf_counter()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    config = transformers.LlamaConfig(
        vocab_size=SIZES["vocab"], hidden_size=SIZES["embed"], intermediate_size=SIZES["mlp"],
        num_hidden_layers=SIZES["layers"], num_attention_heads=SIZES["heads"],
        num_key_value_heads=SIZES["kv_heads"], max_position_embeddings=max(LENGTHS),
        tie_word_embeddings=False, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config)
    model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)

    def step(seq: int) -> float:
        tokens = torch.randint(0, SIZES["vocab"], (1, seq), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    step(1024)  # optimizer state is made in the first
    for seq in LENGTHS:
        if time.perf_counter() - start + 2 * expected_seconds(seq) > limit:
            say(how="no time left", seq=seq)
            return
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        try:
            loss = step(seq)
        except RuntimeError as problem:
            if "out of memory" not in str(problem):
                raise
            say(how="out of memory", seq=seq)
            return
        seconds, peak = time.perf_counter() - begin, torch.cuda.max_memory_allocated()
        say(how="run", seq=seq, seconds=seconds, bytes=peak, loss=loss, versions=versions)


SIDES: dict[str, Callable[[float], None]] = {"ours": ours, "peer": peer}


def one_side(side: str, limit: float) -> list[dict[str, Any]]:
    """What a side said in its own process, shown; also where it was stopped or failed."""
    script = Path(__file__).with_name("long_context.py")
    command = [sys.executable, str(script), "--side", side, "--limit", str(limit)]
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
    environment |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    said, rest = [], []
    with subprocess.Popen(
        ["timeout", str(int(limit) + 30), *command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                said.append(json.loads(line))
                print(f"{side}: {line.strip()}", flush=True)
            else:
                rest.append(line)
    if process.returncode:
        print(f"{side}: ended with {process.returncode}\n{''.join(rest)[-3000:]}", flush=True)
    return said


def run(options: argparse.Namespace) -> None:
    found = {}
    for side in options.sides.split(","):
        found[side] = one_side(side, options.limit)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1))
    lines = ["| side | sequence | how it is known | s a step | memory |", "|---|---|---|---|---|"]
    for side, said in found.items():
        for one in (best(said, "run"), best(said, "compiled"), best(said, "out of memory")):
            if one is not None:
                seconds = f"{one['seconds']:.1f}" if "seconds" in one else ""
                memory = f"{one['bytes'] / 2**30:.1f} GiB" if "bytes" in one else ""
                lines.append(f"| {side} | {one['seq']:,} | {one['how']} | {seconds} | {memory} |")
    words = {one[key] for said in found.values() for one in said for key in WORDS if key in one}
    conditions = (
        f"`python benchmarks/long_context.py --longest --write`, {datetime.date.today()}, "
        f"{'; '.join(sorted(words))}; one step of one sequence. `compiled`: the longest whose "
        "compiled step fits by the compiler's own count; `run`: the longest whose step was run."
    )
    print("\n".join([conditions, "", *lines]))
    if options.write:
        write_section("The longest sequence a 1B model trains on, on one GPU", conditions, lines)


WORDS = ("device", "versions")


def best(said: list[dict[str, Any]], how: str) -> dict[str, Any] | None:
    """The longest known in that way, of those that fit."""
    fits = [one for one in said if one["how"] == how and one.get("fits", True)]
    return max(fits, key=lambda one: int(one["seq"]), default=None)

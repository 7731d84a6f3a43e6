"""Speed of one step of LoRA on one GPU, PEFT beside it on the same machine.

    python benchmarks/lora_step.py              # prints a table
    python benchmarks/lora_step.py --write      # and puts it into RESULTS.md
    python benchmarks/lora_step.py --sides ours --flags="--compute.remat elementwise"

The model is llama-3.1-8b with random weights: bfloat16 frozen weights, rank 16 on all linear layers
of the layers, 4 sequences of 2,048 tokens, AdamW on the factors, nothing recomputed. `ours` runs
the step of the settings that `meshwright train` reads from the same flags. The peer is
transformers' LlamaForCausalLM with SDPA, PEFT's LoRA, torch.compile, fused AdamW and bfloat16
autocast. Each side runs in its own process.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import train_step
from results import write_section
from train_step import step_time

SHAPE, RANK = (4, 2048), 16
WORDS = ("llama-3.1-8b", "--lora.rank", str(RANK), "--lora.alpha", "32")
LIMIT = 1.15  # of the peer


def ours(options: argparse.Namespace) -> dict[str, Any]:
    train_step.SHAPES["lora"] = SHAPE
    options.words, options.documents, options.plain, options.profile = WORDS, 1, False, None
    return train_step.ours("lora", options)


def peer(options: argparse.Namespace) -> dict[str, Any]:
    import peft
    import torch
    import transformers

    batch, seq = SHAPE
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=seq,
        rope_theta=500000.0, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    adapter = peft.LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0)
    adapted = peft.get_peft_model(model, adapter)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-4, weight_decay=0.1, fused=True)
    compiled = torch.compile(adapted)
    tokens = torch.randint(0, 128256, (batch, seq), device="cuda")
    start = time.perf_counter()

    def step() -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    first = float(step())
    compile_seconds = time.perf_counter() - start
    seconds = step_time(step, lambda loss: loss.item(), options.steps)
    return {
        "seconds": seconds, "compile": compile_seconds, "losses": [first, float(step())],
        "peak_bytes": torch.cuda.max_memory_allocated(), "device": torch.cuda.get_device_name(),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"peft {peft.__version__}",
    }  # fmt: skip


SIDES = {"peer": peer, "ours": ours}


def run(side: str, options: argparse.Namespace) -> dict[str, Any]:
    """One side in its own process."""
    command = [sys.executable, __file__, "--side", side, f"--steps={options.steps}"]
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
    done = subprocess.run(
        [*command, f"--flags={options.flags}"], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise SystemExit(done.stderr[-6000:])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def row(side: str, result: dict[str, Any], peer: dict[str, Any] | None) -> str:
    median = statistics.median(result["seconds"])
    tokens = SHAPE[0] * SHAPE[1] / median
    ratio = "" if peer is None else f"{statistics.median(peer['seconds']) / median:.2f}"
    memory = result.get("compiled_bytes") or result["peak_bytes"]
    return (
        f"| {side} | {median * 1e3:.1f} ms | {tokens:,.0f} | {ratio} | {memory / 2**30:.1f} GiB | "
        f"{result['compile']:.0f} s | {result['versions']} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--sides", default="peer,ours")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--flags", default="", help="of meshwright train, for ours")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.side:
        print(json.dumps(SIDES[options.side](options)))
        return
    found = {side: run(side, options) for side in options.sides.split(",")}
    lines = [
        "| side | step | tokens/s | of the peer | memory | compile | versions |",
        "|---|---|---|---|---|---|---|",
        *(row(side, result, found.get("peer")) for side, result in found.items()),
    ]
    print("\n".join(lines))
    if not {"ours", "peer"} <= found.keys():
        return
    medians = {side: statistics.median(result["seconds"]) for side, result in found.items()}
    ratio = medians["peer"] / medians["ours"]
    print(f"{ratio:.2f} of the peer; the limit is {LIMIT}")
    if options.write:
        write_section(
            "LoRA: one step on one GPU",
            f"llama-3.1-8b, rank {RANK} on all linear layers, {SHAPE[0]} × {SHAPE[1]:,} tokens; "
            f"{found['peer']['device']}, {datetime.date.today()}. benchmarks/lora_step.py. Memory: "
            "ours by the compiler's account, the peer's peak of allocated memory.",
            lines,
        )


if __name__ == "__main__":
    main()

"""Speed of one step of LoRA on one GPU, PEFT beside it on the same machine.

    python benchmarks/lora_step.py              # prints a table
    python benchmarks/lora_step.py --write      # and puts it into RESULTS.md
    python benchmarks/lora_step.py --sides ours --flags="--compute.remat elementwise"
    python benchmarks/lora_step.py --base nf4 --write    # frozen weights in 4 bits, or int8
    python benchmarks/lora_step.py --bases --write       # ours with each, and 70B: no peer

The model is llama-3.1-8b with random weights: bfloat16 frozen weights, rank 16 on all linear layers
of the layers, 4 sequences of 2,048 tokens, AdamW on the factors, nothing recomputed. `ours` runs
the step of the settings that `meshwright train` reads from the same flags. The peer is
transformers' LlamaForCausalLM with SDPA, PEFT's LoRA, torch.compile, fused AdamW and bfloat16
autocast. With `--base nf4` or `int8` its linear layers are those of bitsandbytes: Linear4bit
without double quantization, Linear8bitLt. Each side runs in its own process.
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
WORDS = ("--lora.rank", str(RANK), "--lora.alpha", "32")
# of --bases: model, frozen weights, sequences of 2,048 tokens, flags
CASES = (
    ("llama-3.1-8b", "bfloat16", 4, ""),
    ("llama-3.1-8b", "int8", 4, ""),
    ("llama-3.1-8b", "nf4", 4, ""),
    ("llama-3.1-70b", "nf4", 1, "--compute.remat full"),
)
LIMIT = 1.15  # of the peer


def ours(options: argparse.Namespace) -> dict[str, Any]:
    train_step.SHAPES["lora"] = options.batch, SHAPE[1]
    base = () if options.base == "bfloat16" else ("--lora.base", options.base)
    words = (options.model, *WORDS, *base)
    options.words, options.documents, options.plain, options.profile = words, 1, False, None
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
    if options.base != "bfloat16":
        quantize_layers(model, options.base)
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
        f"peft {peft.__version__}{bitsandbytes_version(options.base)}",
    }  # fmt: skip


def quantize_layers(model: Any, base: str) -> None:
    """Put layers of bitsandbytes in place of a model's linear ones, but for the LM head."""
    import bitsandbytes as bnb
    import torch

    for name, linear in list(model.named_modules()):
        if not isinstance(linear, torch.nn.Linear) or name == "lm_head":
            continue
        sizes, weight = (linear.in_features, linear.out_features), linear.weight.data.cpu()
        if base == "nf4":
            made = bnb.nn.Linear4bit(
                *sizes, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4",
                compress_statistics=False,
            )  # fmt: skip
            made.weight = bnb.nn.Params4bit(
                weight, requires_grad=False, quant_type="nf4", compress_statistics=False
            )
        else:
            made = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
            made.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        model.set_submodule(name, made.to("cuda"))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = base == "nf4", base == "int8"


def bitsandbytes_version(base: str) -> str:
    if base == "bfloat16":
        return ""
    import bitsandbytes

    return f", bitsandbytes {bitsandbytes.__version__}"


SIDES = {"peer": peer, "ours": ours}
CHILD = ("base", "flags", "model", "batch")  # options that each side's process gets


def run(side: str, options: argparse.Namespace) -> dict[str, Any]:
    """One side in its own process."""
    command = [sys.executable, __file__, "--side", side, f"--steps={options.steps}"]
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
    done = subprocess.run(
        [*command, *(f"--{name}={getattr(options, name)}" for name in CHILD)],
        capture_output=True,
        text=True,
        env=environment,
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


def compare_bases(options: argparse.Namespace) -> None:
    lines = [
        "| model | frozen weights | tokens | flags | step | memory | planned |",
        "|---|---|---|---|---|---|---|",
    ]
    for model, base, batch, flags in CASES:
        named = {"model": model, "base": base, "batch": batch, "flags": flags}
        result = run("ours", argparse.Namespace(steps=options.steps, **named))
        median = statistics.median(result["seconds"])
        lines.append(
            f"| {model} | {base} | {batch} × {SHAPE[1]:,} | {f'`{flags}`' if flags else ''} | "
            f"{median * 1e3:.0f} ms | {result['compiled_bytes'] / 2**30:.1f} GiB | "
            f"{planned(model, base, batch, flags)} |"
        )
        print(lines[-1], flush=True)
    if options.write:
        write_section(
            "LoRA: frozen weights in 16, 8 and 4 bits on one GPU",
            f"Rank {RANK} on all linear layers; one H200, {datetime.date.today()}, "
            f"{result['versions'].partition(',')[0]}. benchmarks/lora_step.py --bases. Memory: by "
            "the compiler's account. Planned: `meshwright plan --on h200:1` with these settings.",
            lines,
        )


def planned(model: str, base: str, batch: int, flags: str) -> str:
    """The time and memory that `plan` expects of one H200."""
    import meshwright as mw

    remat = flags.partition("--compute.remat ")[2] or "none"
    found = mw.plan(
        model, "h200:1", batch, SHAPE[1], mesh="fsdp=1,tp=1,sp=1", remat=remat, accumulation=1,
        mlp_chunk=0, lora_rank=RANK, lora_base=base,
    ).best  # fmt: skip
    return f"{found.step_seconds * 1e3:.0f} ms, {found.memory.total / 2**30:.1f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--sides", default="peer,ours")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--base", choices=("bfloat16", "int8", "nf4"), default="bfloat16")
    parser.add_argument("--flags", default="", help="of meshwright train, for ours")
    parser.add_argument("--model", default="llama-3.1-8b", help="of ours")
    parser.add_argument("--batch", type=int, default=SHAPE[0], help="of ours")
    parser.add_argument(
        "--bases", action="store_true", help="ours with frozen weights of each kind"
    )
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.side:
        print(json.dumps(SIDES[options.side](options)))
        return
    if options.bases:
        compare_bases(options)
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
    limit = f"; the limit is {LIMIT}" if options.base == "bfloat16" else ""
    print(f"{ratio:.2f} of the peer{limit}")
    if options.write:
        beside = "" if options.base == "bfloat16" else f", frozen weights in {options.base}"
        write_section(
            f"LoRA: one step on one GPU{beside}",
            f"llama-3.1-8b, rank {RANK} on all linear layers, {SHAPE[0]} × {SHAPE[1]:,} tokens; "
            f"{found['peer']['device']}, {datetime.date.today()}. benchmarks/lora_step.py"
            f"{'' if not beside else f' --base {options.base}'}. Memory: "
            "ours by the compiler's account, the peer's peak of allocated memory.",
            lines,
        )


if __name__ == "__main__":
    main()

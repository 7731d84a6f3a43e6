"""Speed of the inference engine on one device, with transformers beside it.

    python benchmarks/serve.py                              # 8b and 1.5b, prints tables
    python benchmarks/serve.py --models 8b --batches --offline 384 --max-batch 384 \
        --weights fp8 --cache fp8 --no-peer                 # the offline run alone
    python benchmarks/serve.py --models tiny --batches 1 4 --offline 8 --cpu    # a smoke test

Random weights, bfloat16, greedy. Decode: `batch` requests with prompts of `--context` tokens, the
difference between a run of few and one of many new tokens (prompts come from the prefix cache), so
tokens/s are those of decode steps through the whole engine. The limit is the time to read all
matmul weights and the KV cache of the average step once, at the chip's bandwidth. Prefill: prompts
of 1,024 tokens and one new token. Offline: requests of 1,024 input and 1,024 output tokens.
The peer is transformers' LlamaForCausalLM with a static cache, in its own process. With
--continuous N both also run N requests of 1,024 + 256 tokens, transformers by its continuous
batching (paged attention by PyTorch).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

from results import here, write_section

DIMS = ("vocab", "layers", "embed", "heads", "kv_heads", "head_dim", "mlp")
SIZES = {
    name: dict(zip(DIMS, sizes, strict=True))
    for name, sizes in {
        "8b": (128256, 32, 4096, 32, 8, 128, 14336),
        "1.5b": (128256, 16, 2048, 32, 8, 64, 8192),
        "tiny": (512, 2, 64, 4, 2, 16, 128),
        "30b-a3b": (151936, 48, 2048, 32, 4, 128, 768),
    }.items()
}
SIZES["30b-a3b"] |= {"experts": 128, "experts_per_token": 8}
LIMITS = {
    "8b": {1: 0.72, 32: 0.72, 128: 0.68},
    "1.5b": {1: 0.40, 32: 0.53, 128: 0.53},
    "30b-a3b": {1: 0.5, 32: 0.5, 128: 0.5},
}
FEW = 16  # new tokens of the shorter of two runs


def matmul_params(s: dict[str, int], tokens: int = 1) -> float:
    """Weights that a step of so many tokens reads; of experts, those that any of them chooses.

    Their number is what is expected if every expert is as likely.
    """
    attention = 2 * s["embed"] * s["head_dim"] * (s["heads"] + s["kv_heads"])
    mlps = 1.0
    if experts := s.get("experts"):
        mlps = experts * (1 - (1 - s["experts_per_token"] / experts) ** tokens)
    return s["layers"] * (attention + mlps * 3 * s["embed"] * s["mlp"]) + s["embed"] * s["vocab"]


def limit(
    s: dict[str, int], batch: int, length: float, bandwidth: float, items: tuple[int, int]
) -> float:
    """Tokens/s if a step only read its weights and keys once; `items`: bytes of each number."""
    cache = 2 * s["layers"] * s["kv_heads"] * s["head_dim"] * batch * length
    read = items[0] * matmul_params(s, batch) + items[1] * cache
    return batch / (read / bandwidth)


class AnyTokens:
    """A tokenizer of a vocabulary without words."""

    kind, identity = "none", "none"

    def __init__(self, vocab: int) -> None:
        self.vocab, self.missing, self.end_of_document = vocab, (), 0

    def decode(self, ids: Any, special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


def engine_of(name: str, dtype: str, tokenizer: Any = None, **settings: Any) -> Any:
    import jax.numpy as jnp

    from meshwright.layouts import create
    from meshwright.models import DecoderConfig, abstract_arrays
    from meshwright.serving import Engine, EngineConfig, Source, generation_mesh, load_weights

    config = DecoderConfig(**SIZES[name], max_seq=8192)

    def read(targets: Any) -> Any:
        import jax

        def made(spec: Any, target: Any) -> Any:  # one at a time: random numbers are float32 first
            array = create({"it": spec}, {"it": target.sharding})["it"].astype(dtype)
            return jax.block_until_ready(array.astype(target.dtype))  # numbers as files have them

        return jax.tree.map(made, abstract_arrays(config, jnp.dtype(dtype)), targets)

    tokenizer = tokenizer or AnyTokens(config.vocab)
    source = Source(config, tokenizer, frozenset(), False, name, read)
    model = load_weights(source, generation_mesh(), jnp.dtype(dtype))
    start = time.perf_counter()

    def progress(text: str) -> None:
        print(f"  {time.perf_counter() - start:5.1f} s  {text}", flush=True)

    engine = Engine(
        model, EngineConfig(prompt_logprobs=False, **settings), progress=progress, release=True
    )
    print(f"  {time.perf_counter() - start:5.1f} s  ready: {engine.stats().pages_total} pages, "
          f"paged attention by {engine.kernel}")  # fmt: skip
    return engine


def requests(
    count: int, length: int, new: int, vocab: int, seed: int, temperature: float = 0
) -> list[Any]:
    import numpy as np

    from meshwright.serving import Request, Sampling

    tokens = np.random.default_rng(seed).integers(0, vocab, (count, length)).tolist()
    sampling = Sampling(temperature=temperature)
    return [Request(tuple(prompt), sampling, new, ignore_end=True) for prompt in tokens]


def seconds(engine: Any, wanted: list[Any]) -> float:
    start = time.perf_counter()
    done = engine.generate(wanted)
    took = time.perf_counter() - start
    assert all(len(each.tokens) == one.max_new for each, one in zip(done, wanted, strict=True))
    return took


def decode_speed(engine: Any, name: str, batch: int, context: int, new: int) -> tuple[float, float]:
    """Tokens/s of decode, and the average length of a sequence in it.

    Greedy sequences of random weights become alike, and choose the same experts. So several
    sequences of a model with experts are sampled.
    """
    vocab = SIZES[name]["vocab"]
    temperature = float("experts" in SIZES[name] and batch > 1)
    few, many = (requests(batch, context, n, vocab, batch, temperature) for n in (FEW, FEW + new))
    seconds(engine, few)  # fills the prefix cache
    pairs = [(seconds(engine, few), seconds(engine, many)) for _ in range(5)]
    before, after = (min(times) for times in zip(*pairs, strict=True))
    return batch * new / (after - before), context + FEW + new / 2


def ours(args: argparse.Namespace, name: str) -> dict[str, Any]:
    import jax

    from meshwright.machines import chip_of_kind

    device = jax.devices()[0]
    bandwidth = chip_of_kind(device.device_kind, device.platform).memory_bandwidth
    item = 4 if args.cpu else 2
    items = (1 if args.weights else item, 1 if args.cache else item)
    dtype = "float32" if args.cpu else "bfloat16"
    result: dict[str, Any] = {"device": device.device_kind, "decode": {}}
    page = {"page_size": args.page_size, "weights": args.weights, "cache": args.cache}
    if args.batches:
        print(f"{name}: decode", flush=True)
        length = args.context + FEW + args.new
        with engine_of(
            name, dtype, max_batch=max(args.batches), max_length=length,
            batch_buckets=tuple(sorted({max(batch, 2) for batch in args.batches})),
            chunk=args.chunk,
            chunk_shapes=((1, args.chunk), (args.chunk // 64, 64)), **page,
        ) as engine:  # fmt: skip
            for batch in args.batches:
                speed, mean = decode_speed(engine, name, batch, args.context, args.new)
                most = limit(SIZES[name], batch, mean, bandwidth, items)
                result["decode"][batch] = {"tokens_per_s": speed, "of_limit": speed / most}
                print(f"  batch {batch}: {speed:,.0f} tok/s, {speed / most:.2f} of the limit "
                      f"({engine.stats().steps} steps)", flush=True)  # fmt: skip
            assert engine.stats().compilations_after_ready == 0
    if args.offline:
        size = 1024 if not args.cpu else 64
        print(f"{name}: prefill and offline, {args.offline} requests", flush=True)
        largest = min(args.max_batch, args.offline)
        with engine_of(
            name, dtype, max_batch=largest, max_length=2 * size, batch_buckets=(largest,),
            chunk=2 * size, chunk_shapes=((2, size),), prefix_cache=False, compile_first=False,
            **page,
        ) as engine:  # fmt: skip
            vocab = SIZES[name]["vocab"]
            seconds(engine, requests(4, size, 4, vocab, 1))
            count = max(args.offline // 8, 4)
            took = seconds(engine, requests(count, size, 1, vocab, 2))
            attention = 2 * SIZES[name]["layers"] * SIZES[name]["heads"] * SIZES[name]["head_dim"]
            each = 2 * matmul_params(SIZES[name]) + attention * size
            result["prefill_tflops"] = count * size * each / took / 1e12
            result["prefill_tokens_per_s"] = count * size / took
            took = seconds(engine, requests(args.offline, size, size, vocab, 3))
            result["offline_tokens_per_s"] = args.offline * size / took
            result["preemptions"] = engine.stats().preemptions
            if args.continuous:
                new = size // 4
                took = seconds(engine, requests(args.continuous, size, new, vocab, 4))
                result["continuous_tokens_per_s"] = args.continuous * new / took
            print(f"  prefill {result['prefill_tokens_per_s']:,.0f} tok/s "
                  f"({result['prefill_tflops']:.0f} TFLOP/s); offline "
                  f"{result['offline_tokens_per_s']:,.0f} output tok/s", flush=True)  # fmt: skip
    return result


def peer(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """transformers with a static cache."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    s = SIZES[name]
    config = LlamaConfig(
        vocab_size=s["vocab"], num_hidden_layers=s["layers"], hidden_size=s["embed"],
        num_attention_heads=s["heads"], num_key_value_heads=s["kv_heads"], head_dim=s["head_dim"],
        intermediate_size=s["mlp"], max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    device = "cpu" if args.cpu else "cuda"
    torch.set_default_dtype(torch.float32 if args.cpu else torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval()
    result: dict[str, Any] = {"decode": {}}
    for batch in args.batches:
        prompt = torch.randint(1, s["vocab"], (batch, args.context), device=device)

        def run(new: int, prompt: Any = prompt) -> float:
            start = time.perf_counter()
            out = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new,
                min_new_tokens=new, do_sample=False, cache_implementation="static",
                pad_token_id=0,
            )  # fmt: skip
            assert out.shape[1] == args.context + new
            out.cpu()
            return time.perf_counter() - start

        for new in (FEW, FEW + args.new):
            run(new)  # compiles
        best = min(run(FEW + args.new) - run(FEW) for _ in range(2))
        result["decode"][batch] = {"tokens_per_s": batch * args.new / best}
        print(f"  transformers, batch {batch}: {batch * args.new / best:,.0f} tok/s", flush=True)
    if args.continuous:
        result["continuous_tokens_per_s"] = _continuous(args, model, s["vocab"])
    return result


def _continuous(args: argparse.Namespace, model: Any, vocab: int) -> float:
    """Output tokens/s of transformers' continuous batching."""
    import torch
    from transformers import GenerationConfig

    size = 1024 if not args.cpu else 64
    model.set_attn_implementation("paged|sdpa")
    prompts = torch.randint(1, vocab, (args.continuous, size)).tolist()

    def run(prompts: list[list[int]], new: int) -> float:
        wanted = GenerationConfig(
            max_new_tokens=new, do_sample=False, eos_token_id=vocab, pad_token_id=0
        )
        start = time.perf_counter()
        done = model.generate_batch(prompts, generation_config=wanted, progress_bar=False)
        took = time.perf_counter() - start
        assert all(len(each.generated_tokens) == new for each in done.values())
        return took

    run(prompts[:2], 4)
    took = run(prompts, size // 4)
    print(f"  transformers, continuous: {args.continuous * size / 4 / took:,.0f} tok/s", flush=True)
    return args.continuous * size / 4 / took


def in_child(kind: str, name: str, argv: list[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, *argv, "--child", kind, name]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            lines.append(line)
            if not line.startswith("{"):
                print(line, end="", flush=True)
    if process.returncode:
        raise SystemExit(f"{kind} of {name} ended with {process.returncode}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def table(name: str, found: dict[str, Any], other: dict[str, Any] | None) -> list[str]:
    lines = [
        "| | tok/s | of the limit | goal | transformers | times as fast |",
        "|---|---|---|---|---|---|",
    ]
    for batch, row in found["decode"].items():
        goal = LIMITS.get(name, {}).get(int(batch), "")
        theirs = other["decode"][batch]["tokens_per_s"] if other else None
        beside = f"{theirs:,.0f} | {row['tokens_per_s'] / theirs:.1f}" if theirs else " | "
        lines.append(
            f"| {name}, batch {batch} | {row['tokens_per_s']:,.0f} | {row['of_limit']:.2f} | "
            f"{goal} | {beside} |"
        )
    if "offline_tokens_per_s" in found:
        lines += [
            "",
            f"Prefill: {found['prefill_tokens_per_s']:,.0f} tok/s, "
            f"{found['prefill_tflops']:.0f} TFLOP/s. Offline: "
            f"{found['offline_tokens_per_s']:,.0f} output tok/s.",
        ]
    if "continuous_tokens_per_s" in found:
        lines[-1] += f" 1,024 + 256 tokens: {found['continuous_tokens_per_s']:,.0f} output tok/s"
        theirs = (other or {}).get("continuous_tokens_per_s")
        lines[-1] += f", transformers' continuous batching {theirs:,.0f}." if theirs else "."
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["8b", "1.5b"], choices=list(SIZES))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 32, 128])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--new", type=int, default=128, help="decode steps that are timed")
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--weights", choices=["int8", "fp8"], help="quantize the weights")
    parser.add_argument("--cache", choices=["fp8"], help="of 8 bits")
    parser.add_argument("--offline", type=int, default=0, help="requests of 1,024 + 1,024 tokens")
    parser.add_argument("--max-batch", type=int, default=256, help="of the offline run")
    parser.add_argument("--continuous", type=int, default=0, help="requests of 1,024 + 256 tokens")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--write", action="store_true", help="put the tables into RESULTS.md")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        kind, name = args.child
        if args.cpu and kind == "ours":
            import jax

            jax.config.update("jax_platforms", "cpu")
        print(json.dumps({"ours": ours, "peer": peer}[kind](args, name)), flush=True)
        return
    argv = sys.argv[1:]
    lines: list[str] = []
    device = ""
    for name in args.models:
        found = in_child("ours", name, argv)
        device = found["device"]
        other = None
        if not args.no_peer:
            import importlib.util

            if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
                other = in_child("peer", name, argv)
        lines += [*table(name, found, other), ""]
    print("\n".join(lines))
    if args.write:
        write_section("Serving on one device", f"{device}, {here()}", lines)


if __name__ == "__main__":
    main()

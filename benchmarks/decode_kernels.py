"""The kernels of one layer of a decode step on a GPU, and how long each takes.

    XLA_FLAGS=--xla_gpu_enable_command_buffer= python benchmarks/decode_kernels.py --model 30b-a3b

Without command buffers, of which profiles show no kernels. Two engines with `--layers` and twice as
many layers are profiled; a layer is the difference of their steps over `--layers`, so that neither
the embedding nor the LM head counts. Gaps between kernels do not count either: in a command buffer
they are about a microsecond less each than what a profile has.
"""

import argparse
import re
import tempfile
from collections import Counter

from serve import FEW, SIZES, engine_of, requests, seconds
from train_step import kernel_times

STEPS = 64
CONTEXT = 512


def kernels(name: str, batch: int, weights: str | None) -> tuple[Counter[str], Counter[str]]:
    """Microseconds and calls of each kernel in a decode step, by the kernel's name."""
    import jax

    vocab = SIZES[name]["vocab"]
    few, many = (requests(batch, CONTEXT, new, vocab, batch) for new in (FEW, FEW + STEPS))
    total: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    with engine_of(
        name, "bfloat16", max_batch=batch, max_length=CONTEXT + FEW + STEPS, chunk=64,
        batch_buckets=(max(batch, 2),), chunk_shapes=((1, 64),), page_size=64, weights=weights,
    ) as engine:  # fmt: skip
        seconds(engine, many)
        for wanted, sign in ((few, -1), (many, 1)):
            seconds(engine, wanted)
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    seconds(engine, wanted)
                micros, times = kernel_times(folder)
            for sums, by_event in ((total, micros), (calls, times)):
                for event, value in by_event.items():
                    sums[re.sub(r"[_.]?\d+$", "", event)] += sign * value / STEPS
    return total, calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="30b-a3b", choices=list(SIZES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--weights", choices=["int8", "fp8"])
    args = parser.parse_args()
    found = []
    for layers in (args.layers, 2 * args.layers):
        SIZES[args.model]["layers"] = layers
        found.append(kernels(args.model, args.batch, args.weights))
    (less, fewer), (more, oftener) = found
    more.subtract(less)
    oftener.subtract(fewer)
    each = {name: more[name] / args.layers for name in more if oftener[name] > 0.5}
    count = sum(oftener[name] for name in each) / args.layers
    print(f"{args.model}, batch {args.batch}: {sum(each.values()):.1f} µs in {count:.0f} kernels")
    print("| kernel | of a layer | µs |\n|---|---|---|")
    for name, micros in sorted(each.items(), key=lambda pair: -pair[1]):
        print(f"| {name[:70]} | {oftener[name] / args.layers:.1f} | {micros:.2f} |")


if __name__ == "__main__":
    main()

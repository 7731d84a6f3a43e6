"""What slots of LoRA adapters cost a decode step.

    python benchmarks/serve_adapters.py                    # a model of 8B, prints a table
    python benchmarks/serve_adapters.py --cpu              # a tiny one: a smoke test

The peer is the same engine without slots, which serves one adapter merged into the weights. All
tokens of a step have an adapter; the mix of adapters does not change what is computed.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.data import ByteTokenizer
from meshwright.models import ADAPTER, preset
from meshwright.serving import EngineConfig, Source, generation_mesh, load_weights
from meshwright.serving.program_inputs import Shape
from meshwright.serving.programs import Programs

SLOTS = ((0, 16), (1, 16), (8, 16), (8, 64), (32, 16))  # adapters, rank
BATCHES = (1, 32, 128)
LENGTH = 1024


def zeros(targets: Any) -> Any:
    return jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype, device=one.sharding), targets)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    small = parser.parse_args().cpu
    config = preset("tiny") if small else preset("llama-3.1-8b")
    batches, slots = ((2,), SLOTS[:2]) if small else (BATCHES, SLOTS)
    source = Source(config, ByteTokenizer(), frozenset(), False, "zeros", zeros)
    model = load_weights(source, generation_mesh(), jnp.bfloat16)
    length = min(LENGTH, config.max_seq)
    print(
        f"| adapters | rank | GiB of slots | {' | '.join(f'{b} sequences, ms' for b in batches)} |"
    )
    print(f"|---|---|---|{'---|' * len(batches)}")
    for count, rank in slots:
        engine = EngineConfig(
            max_batch=batches[-1], max_adapters=count, max_adapter_rank=rank, pages=256,
            batch_buckets=batches, compile_first=False,
        )  # fmt: skip
        programs = Programs(model, engine, length, False)
        held = sum(array.nbytes for array in jax.tree.leaves(programs.weights.get(ADAPTER)))
        times = [1e3 * programs._seconds(Shape(batch)) for batch in batches]
        cells = " | ".join(f"{each:.2f}" for each in times)
        print(f"| {count or 'none'} | {rank if count else ''} | {held / 2**30:.2f} | {cells} |")
        del programs


if __name__ == "__main__":
    main()

"""Matmuls in bfloat16, fp8 and int8, compiled for TPUs: the compiler's estimate of their cycles.

    python benchmarks/tpu_fp8.py            # prints a table
    python benchmarks/tpu_fp8.py --write    # and puts it into RESULTS.md

Needs libtpu and no TPU. Operands are in 8 bits already: what it takes to quantize them is not in
the cycles.
"""

import argparse
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import SingleDeviceSharding

from meshwright.machines import CHIPS, Machine
from meshwright.proofs.target import absent_devices
from results import here, write_section

SLICES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "7x:2x2x1")
SHAPES = {"1.5B": (2048, 8192), "8B": (4096, 14336)}  # contracted, outputs
TOKENS = 4096
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
WAYS: dict[str, tuple[Any, Any, bool]] = {  # dtypes of operands; scaled in bfloat16 first
    "bfloat16": (jnp.bfloat16, jnp.bfloat16, False),
    "e4m3": (E4M3, E4M3, False),
    "e5m2 × e4m3": (E5M2, E4M3, False),
    "e4m3, scaled in bfloat16": (E4M3, E4M3, True),
    "int8": (jnp.int8, jnp.int8, False),
}


def cycles(device: Any, shape: tuple[int, int], way: tuple[Any, Any, bool]) -> int:
    left, right, scaled_first = way
    contract = (((1,), (1,)), ((), ()))

    def matmul(a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
        if scaled_first:  # the form that GPUs take
            a, b = (x.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16) for x in (a, b))
            return lax.dot_general(a, b, contract, preferred_element_type=jnp.bfloat16)
        wide = jnp.int32 if left == jnp.int8 else jnp.float32
        y = lax.dot_general(a, b, contract, preferred_element_type=wide)
        return (y.astype(jnp.float32) * scale).astype(jnp.bfloat16)

    def array(dtype: Any, *sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=SingleDeviceSharding(device))

    contracted, outputs = shape
    operands = array(left, TOKENS, contracted), array(right, outputs, contracted)
    text = jax.jit(matmul).lower(*operands, array(jnp.float32)).compile().as_text()
    return sum(map(int, re.findall(r'"estimated_cycles":"?(\d+)', text)))


def table() -> list[str]:
    others = list(WAYS)[1:]
    lines = [f"| TPU | sizes of | bfloat16, cycles | {' | '.join(others)} | fp8 over bf16, peaks |"]
    lines.append("|" + "---|" * (len(others) + 4))
    for slice_name in SLICES:
        chip = CHIPS[slice_name.partition(":")[0]]
        device = absent_devices(Machine.parse(slice_name))[0]
        for name, shape in SHAPES.items():
            found = [cycles(device, shape, way) for way in WAYS.values()]
            cells = [chip.name, name, f"{found[0]:,}", *(f"{found[0] / x:.2f}×" for x in found[1:])]
            peak = f"{chip.fp8_flops / chip.bf16_flops:.0f}" if chip.fp8_flops else "no fp8"
            lines.append(f"| {' | '.join(cells)} | {peak} |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    settings = parser.parse_args()
    lines = table()
    if settings.write:
        conditions = (
            f"`python benchmarks/tpu_fp8.py --write`, {here()}: {TOKENS:,} tokens, no TPU. Times "
            "as fast as in bfloat16, by the compiler's estimate."
        )
        write_section("Matmuls in 8 bits, compiled for TPUs", conditions, lines)


if __name__ == "__main__":
    main()

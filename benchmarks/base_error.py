"""How far frozen weights in 8 and 4 bits are from what they round, for LoRA's --lora.base.

    python benchmarks/base_error.py           # prints a table
    python benchmarks/base_error.py --write   # and puts it into RESULTS.md

Normal numbers in the shape of llama-3.1-8b's `up` matrix, 4,096 × 14,336. The error is the root
mean square of the difference over that of the weights, and of the products with normal inputs.
Beside the 16-bit float and, where it is installed, bitsandbytes' nf4. No accelerator is needed.
"""

import argparse
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.ops import NF4, dequantize_nf4, quantize
from results import here, write_section

INPUTS, OUTPUTS, TOKENS = 4096, 14336, 64


def dequantized(weight: jax.Array, base: str) -> tuple[np.ndarray, float]:
    """The weight [inputs, outputs] as a matmul meets it, and the bits that a number takes."""
    if base == "bfloat16":
        return np.asarray(weight.astype(jnp.bfloat16).astype(jnp.float32)), 16.0
    if base == "bitsandbytes nf4":
        return by_bitsandbytes(np.asarray(weight))
    found = jax.jit(quantize, static_argnums=(1, 2))(weight, 1, base)
    bits = 8 * (found.values.nbytes + found.scale.nbytes) / weight.size
    if base == NF4:
        with jax.set_mesh(jax.make_mesh((1,), ("tp",), (jax.sharding.AxisType.Explicit,))):
            numbers = jax.jit(lambda w: dequantize_nf4(w, (INPUTS,), jnp.float32))(found)
    else:
        numbers = found.values.astype(jnp.float32) * found.scale[:, None]
    return np.asarray(numbers).T, bits


def by_bitsandbytes(weight: np.ndarray) -> tuple[np.ndarray, float]:
    import torch
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(torch.tensor(weight.T.copy()), quant_type="nf4")
    bits = 8 * (packed.nbytes + state.absmax.nbytes) / weight.size
    return functional.dequantize_4bit(packed, state).numpy().T, bits


def row(base: str, weight: jax.Array, x: jax.Array) -> str:
    numbers, bits = dequantized(weight, base)
    exact = np.asarray(weight)

    def relative(found: Any, wanted: Any) -> float:
        return float(np.sqrt(np.mean(np.square(found - wanted)) / np.mean(np.square(wanted))))

    of_products = relative(x @ numbers, x @ exact)
    return f"| {base} | {bits:.2f} | {relative(numbers, exact):.2%} | {of_products:.2%} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    keys = jax.random.split(jax.random.key(0))
    weight = 0.02 * jax.random.normal(keys[0], (INPUTS, OUTPUTS))
    x = np.asarray(jax.random.normal(keys[1], (TOKENS, INPUTS)))
    bases = ["bfloat16", "int8", NF4]
    if importlib.util.find_spec("bitsandbytes") is not None:
        bases.append("bitsandbytes nf4")
    lines = [
        "| frozen weights | bits a weight | error of weights | error of products |",
        "|---|---|---|---|",
        *(row(base, weight, x) for base in bases),
    ]
    print("\n".join(lines))
    if options.write:
        said = (
            f"Normal numbers, {INPUTS:,} × {OUTPUTS:,}; root mean squares. "
            f"benchmarks/base_error.py, {here()}."
        )
        write_section("LoRA: error of frozen weights in 8 and 4 bits", said, lines)


if __name__ == "__main__":
    main()

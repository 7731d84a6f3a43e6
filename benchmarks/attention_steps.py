"""Whole training steps with each attention kernel: does a kernel of ours earn its code?

    python benchmarks/attention_steps.py            # prints a table; needs a Hopper GPU
    python benchmarks/attention_steps.py --write    # and puts it into RESULTS.md

Layers of two models, 4 sequences of 8192 tokens, without documents and with 4 and 64 to a sequence.
`hopper` is our kernel. `cudnn` is cuDNN as jax calls it, and with documents its packed layout
(offsets of the documents), with room for exactly as many documents as there are, which a data set
does not promise. `tokamax` is tokamax's Mosaic kernel, where a document is the first key that each
of its queries may see. jax's own attention_mgpu has no backward pass for a causal mask. A kernel of
ours stays where the step is at least 3% faster, or where the other does not fit. `memory` is what
the compiler plans for the step. Layers run in a loop, which compiles faster than the default.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp

import train_step
from meshwright.ops.attention.block import Block, Call, Gradients, Kernel, Partial
from meshwright.ops.attention.fused import _PASSES, _backward_arguments, _jax
from meshwright.ops.attention.kernels import KERNELS
from meshwright.ops.attention.mask import Mask
from meshwright.ops.collectives import varying_like
from results import write_section

SHAPE, DOCUMENTS = "4x8192", (0, 4, 64)
MODELS = {
    "llama-3.2-1b": ["llama-3.2-1b", "--override", "tied_embeddings=false"],
    "8 layers of llama-3.1-8b": ["llama-3.1-8b", "--override", "layers=8"],
}
KEPT = 1.03  # of the other's time over ours


def packed(room: int) -> Kernel:
    """cuDNN's packed layout, for at most `room` documents in each sequence."""

    def bind(name: str, block: Block, more: tuple[jax.Array, ...], **options: Any) -> Any:
        assert block.q_segments is not None
        lengths, offsets = places(block.q_segments, room)
        unused = jnp.zeros(0, block.q.dtype)
        if "score_mod" in _backward_arguments():
            options["score_mod"] = None
        arrays = (block.q, block.k, block.v, unused, lengths, lengths, offsets, offsets)
        arrays += (unused, unused, *more)
        return getattr(_jax(), name).bind(
            *(varying_like(x, *arrays) for x in arrays),
            scale=block.q.shape[-1] ** -0.5, seed=42, dropout_rate=0.0,
            variadic_args=(False, False), mask_type=_jax().MaskType.PADDING_CAUSAL,
            layout=_jax().AttentionLayout.BTNH.value, sliding_window_length=None, **options,
        )  # fmt: skip

    def forward(block: Block, mask: Mask, dtype: Any = None) -> Partial:
        out, lse = bind(_PASSES[0], block, (), is_training=True)  # lse: [batch * room, heads, q]
        batch, queries = block.q.shape[:2]
        lse = jnp.moveaxis(lse.reshape(batch, -1, queries), 1, 2)
        return Partial(out, lse)

    def backward(
        block: Block, mask: Mask, output: Partial, dout: jax.Array, dtype: Any = None
    ) -> Gradients:
        _, queries, heads, _ = block.q.shape
        lse = jnp.moveaxis(output.lse, 2, 1).reshape(-1, heads, queries)
        return Gradients(*bind(_PASSES[1], block, (lse, output.out, dout)))

    def refuses(call: Call) -> str | None:
        return None if call.segmented and call.mask.causal else "it is for packed documents"

    return Kernel(forward, backward, refuses)


def places(segments: jax.Array, room: int) -> tuple[jax.Array, jax.Array]:
    """Lengths [batch, room] and offsets [batch, room + 1] of documents; -1 where there is none."""
    starts = segments[:, 1:] != segments[:, :-1]
    index = jnp.pad(jnp.cumsum(starts, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    lengths = jnp.sum(index[:, :, None] == jnp.arange(room)[None, None], axis=1, dtype=jnp.int32)
    offsets = jnp.cumsum(lengths, axis=1, dtype=jnp.int32) - lengths
    lengths, offsets = (jnp.where(lengths > 0, x, -1) for x in (lengths, offsets))
    return lengths, jnp.pad(offsets, ((0, 0), (0, 1)), constant_values=-1)


def tokamax() -> Kernel:
    """tokamax's Mosaic kernel for Hopper GPUs."""
    from tokamax._src.ops.attention import base
    from tokamax._src.ops.attention.pallas_mosaic_gpu import PallasMosaicGpuFlashAttention

    attention = PallasMosaicGpuFlashAttention()

    def mask_of(block: Block, mask: Mask) -> Any:
        return base.Mask(is_causal=mask.causal, k_start=first_keys(block.q_segments))

    def forward(block: Block, mask: Mask, dtype: Any = None) -> Partial:
        out, (highest, total) = attention(
            *block[:3], mask=mask_of(block, mask), return_residuals=True
        )
        return Partial(out, jnp.moveaxis(highest + jnp.log(total), 1, 2))

    def backward(
        block: Block, mask: Mask, output: Partial, dout: jax.Array, dtype: Any = None
    ) -> Gradients:
        settings = dict(attention.bind(*block[:3], mask=mask_of(block, mask)).kwargs)
        del settings["return_residuals"]
        lse = jnp.moveaxis(output.lse, 2, 1)
        softmax = (lse, jnp.ones_like(lse))  # as if the highest score had been the log-sum-exp
        found = attention.vjp(softmax, output.out, dout, *block[:3], **settings)
        return Gradients(found["q"], found["k"], found["v"])

    return Kernel(forward, backward, lambda call: None)


def first_keys(segments: jax.Array | None) -> jax.Array | None:
    """[batch, 1, queries]: the first position of each query's document."""
    if segments is None:
        return None
    at = jnp.arange(segments.shape[1], dtype=jnp.int32)[None]
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return jax.lax.cummax(jnp.where(begins, at, 0), axis=1)[:, None]


def kernels(documents: int) -> dict[str, str]:
    """Names in the table, and those of the kernels."""
    cudnn = f"packed {documents}" if documents else "cudnn"
    return {"hopper": "hopper", "cudnn": cudnn, "tokamax": "tokamax"}


def cells(model: str, steps: int) -> None:
    """Every step of a model, a line of JSON each."""
    KERNELS.update({f"packed {count}": packed(count) for count in DOCUMENTS if count})
    KERNELS["tokamax"] = tokamax()
    pairs = [(count, *names) for count in DOCUMENTS for names in kernels(count).items()]
    # the first program of a process runs slower than later ones: it is timed again at its turn
    for turn, (documents, name, kernel) in enumerate([pairs[0], *pairs]):
        options = argparse.Namespace(
            words=MODELS[model], flags="--compute.layers scan", documents=documents or 1,
            plain=not documents, steps=steps, profile=None,
        )  # fmt: skip
        cell: dict[str, Any] = {"model": model, "documents": documents, "kernel": name}
        try:
            found = train_step.ours(SHAPE, options, attention=kernel)
            cell |= {
                "ms": statistics.median(found["seconds"]) * 1e3,
                "bytes": found["compiled_bytes"], "loss": found["losses"][0],
            }  # fmt: skip
        except Exception as error:
            cell["failed"] = str(error)[:300]
        if turn:
            print(json.dumps(cell), flush=True)


def table(found: list[dict[str, Any]]) -> list[str]:
    """Of the cells; the last column is the 3% rule."""
    lines = ["| model | documents | kernel | ms a step | memory | its time over hopper's |"]
    lines.append("|---|---|---|---|---|---|")
    for cell in found:
        if "failed" in cell:
            spoken = cell["failed"].splitlines()[0][:60]
            ms, memory, ratio = "failed", spoken, ""
        else:
            same = [
                one for one in found if one["kernel"] == "hopper" and "ms" in one
                and (one["model"], one["documents"]) == (cell["model"], cell["documents"])
            ]  # fmt: skip
            ms, memory = f"{cell['ms']:.1f}", f"{cell['bytes'] / 2**30:.1f} GiB"
            ratio = ""
            if same and cell["kernel"] != "hopper":
                over = cell["ms"] / same[0]["ms"]
                ratio = f"{over:.3f}" + (" (keep ours)" if over >= KEPT else "")
        lines.append(
            f"| {cell['model']} | {cell['documents'] or 'none'} | {cell['kernel']} | {ms} | "
            f"{memory} | {ratio} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, help="one alone, as lines of JSON")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.model:
        cells(options.model, options.steps)
        return
    found: list[dict[str, Any]] = []
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
    for model in MODELS:
        command = [sys.executable, __file__, "--model", model, f"--steps={options.steps}"]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, env=environment, check=True
        )
        found += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        print(done.stdout, file=sys.stderr, flush=True)
    lines = table(found)
    conditions = (
        f"`python benchmarks/attention_steps.py --write`, {datetime.date.today()}, one "
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}; batch × seq {SHAPE}, median of "
        f"{options.steps} steps."
    )
    print("\n".join([conditions, "", *lines]))
    if options.write:
        write_section("Training steps with each attention kernel", conditions, lines)


if __name__ == "__main__":
    main()

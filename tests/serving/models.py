"""Kinds of decoders, and the logits of whole sequences by the forward pass of training."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from meshwright.arithmetic import round_up
from meshwright.models import Compute
from meshwright.models.decoder import DecoderConfig, decoder_rules, logits
from meshwright.ops.rope import Llama3Scaling, Rope, YarnScaling
from meshwright.serving.generate import stream
from meshwright.serving.sampling import Sampling
from meshwright.serving.source import Model, generation_mesh

BASE = DecoderConfig(64, 2, 32, 8, 4, 8, 64, max_seq=256)
KINDS = {
    "llama": dataclasses.replace(
        BASE, rope=Rope(5e5, Llama3Scaling(8.0, 1.0, 4.0, 16)), tied_embeddings=True
    ),
    "llama with biases and yarn": dataclasses.replace(
        BASE, qkv_bias=True, output_bias=True, rope=Rope(1e4, YarnScaling(4.0, 16))
    ),
    "mistral": dataclasses.replace(BASE, sliding_window=5),
    "window of one": dataclasses.replace(BASE, sliding_window=1),
    "qwen 2.5": dataclasses.replace(BASE, qkv_bias=True, tied_embeddings=True),
    "odd vocabulary": dataclasses.replace(BASE, vocab=61),
    "qwen 3": dataclasses.replace(BASE, qk_norm=True, kv_heads=8, norm_eps=1e-6),
}

forward = jax.jit(logits, static_argnums=(2, 3))
COMPUTE = Compute(decoder_rules())


def whole_logits(params: Any, config: DecoderConfig, rows: list[list[int]]) -> np.ndarray:
    """Logits of all whole rows, by the forward pass of training on one device."""
    length = max(map(len, rows))
    # one compiled program serves many lengths; no token sees those after it
    tokens = np.zeros((len(rows), round_up(length, 64)), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    with jax.set_mesh(generation_mesh()):
        params, batch = jax.tree.map(np.asarray, params), {"tokens": tokens}
        return np.asarray(forward(params, batch, config, COMPUTE))[:, :length]


class Continuation(NamedTuple):
    tokens: tuple[int, ...]  # without the end token
    ended: bool


def generate(
    model: Model, prompts: Sequence[Sequence[int]], max_new: int, sampling: Sampling | None = None
) -> list[Continuation]:
    """The continuation of each prompt."""
    generated: list[list[int]] = [[] for _ in prompts]
    for index, token in stream(model, prompts, max_new, sampling):
        generated[index].append(token)
    ended = [tokens[-1] in model.source.ends for tokens in generated]
    return [
        Continuation(tuple(tokens[: len(tokens) - end]), end)
        for tokens, end in zip(generated, ended, strict=True)
    ]

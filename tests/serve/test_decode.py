"""A token at a time over the cache computes what the whole sequence computes at once."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from meshwright.arithmetic import round_up
from meshwright.models import Compute
from meshwright.models.decoder import DecoderConfig, decoder_rules, logits
from meshwright.ops.rope import Llama3Scaling, Rope, YarnScaling
from meshwright.serve.generate import model_functions, padded
from meshwright.serve.load import Model, generation_mesh, load_for_generation

RandomModel = Callable[..., Model]
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
PROMPTS = [[5, 9, 2, 60, 33, 7, 7, 1, 0, 12, 50], [3], [8, 30] * 33]
NEW = 6


def cached_logits(
    params: Any, config: DecoderConfig, mesh: Mesh, prompts: list[list[int]], new: int
) -> tuple[np.ndarray, list[list[int]]]:
    """Logits [new, prompts, vocab] of greedy steps over the cache, and the tokens they gave."""

    room = max(map(len, prompts)) + new
    start, advance = model_functions(config, mesh, room)
    rows = [list(prompt) for prompt in prompts]
    found = []
    now, cache = start(params, *padded(prompts, config, mesh))
    for i in range(new):
        found.append(np.asarray(now))
        tokens = found[-1].argmax(-1).astype(np.int32)
        for row, token in zip(rows, tokens, strict=False):  # there may be rows that fill up
            row.append(int(token))
        if i + 1 < new:
            now, cache = advance(params, cache, jnp.asarray(tokens))
    return np.stack(found)[:, : len(prompts)], rows


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


def check(params: Any, config: DecoderConfig, mesh: Mesh) -> None:
    found, rows = cached_logits(params, config, mesh, PROMPTS, NEW)
    assert np.abs(found).max() > 1  # so that 1e-4 says something
    whole = whole_logits(params, config, rows)
    for i, prompt in enumerate(PROMPTS):
        expected = whole[i, len(prompt) - 1 : len(prompt) - 1 + NEW]
        np.testing.assert_allclose(found[:, i], expected, rtol=0, atol=1e-4)
        assert rows[i][len(prompt) :] == expected.argmax(-1).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_gives_the_logits_of_the_whole_sequence(
    kind: str, random_model: RandomModel
) -> None:
    mesh = generation_mesh()
    check(random_model(KINDS[kind], mesh).params, KINDS[kind], mesh)


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("llama with biases and yarn", "fsdp=2,tp=2,sp=2"),
        ("qwen 3", "dp=2,tp=4"),
        ("odd vocabulary", "fsdp=2,tp=4"),
        pytest.param("qwen 2.5", "sp=2,fsdp=4", marks=pytest.mark.slow),
        pytest.param("mistral", "tp=2,dp=1,fsdp=2", marks=pytest.mark.slow),
    ],
)
def test_so_it_does_on_a_mesh(kind: str, mesh: str, random_model: RandomModel) -> None:
    placed = generation_mesh(mesh)
    check(random_model(KINDS[kind], placed).params, KINDS[kind], placed)


@pytest.mark.parametrize("name", ["mistral-window", "qwen2.5-tied"])
def test_prompts_give_the_logits_of_transformers(name: str, letters: Path) -> None:
    folder = Path(__file__).parents[1] / "models" / "hf_reference" / name
    mesh = generation_mesh("fsdp=2,tp=2")
    tokens, expected = np.load(folder / "tokens.npy"), np.load(folder / "logits.npy")
    model = load_for_generation(folder, mesh, tokenizer=str(letters))
    prompts = [tokens[0, :1], tokens[0, :8], tokens[1, :5], tokens[1]]
    found, _ = cached_logits(model.params, model.config, mesh, [p.tolist() for p in prompts], 1)
    rows = [(0, 0), (0, 7), (1, 4), (1, tokens.shape[1] - 1)]
    np.testing.assert_allclose(found[0], [expected[at] for at in rows], rtol=0, atol=1e-4)


def test_a_step_sends_activations_and_no_weights(random_model: RandomModel) -> None:
    config = dataclasses.replace(BASE, embed=256, mlp=512, head_dim=32)
    mesh = generation_mesh("fsdp=4,tp=2")
    params = random_model(config, mesh).params
    start, advance = model_functions(config, mesh, 64)
    tokens, lengths = padded([[1]], BASE, mesh)
    _, cache = start(params, tokens, lengths)
    with jax.set_mesh(mesh):
        lowered = advance.__wrapped__.lower(params, cache, lengths)  # type: ignore[attr-defined]
        compiled = lowered.compile()
    sent = collectives(compiled.as_text())
    assert sent  # the partial sums
    smallest = config.embed * config.kv_heads * config.head_dim // mesh.size
    assert max(sent) < smallest  # matrix, what a device holds of it
    held = cache.keys.addressable_shards[0].data.nbytes
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * held  # written where it lies


def collectives(hlo: str) -> list[int]:
    """Elements of each array that a compiled program gets from other devices."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return [
        int(np.prod([int(size) for size in dims.split(",") if size]))
        for made in re.findall(rf"= (.*?) (?:{kinds})(?:-start)?\(", hlo)
        for dims in re.findall(r"\w+\[([\d,]*)\]", made)
    ]

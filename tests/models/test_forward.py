"""The forward pass: against a decoder written out in NumPy, and itself in its other forms."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.models import Compute, activation_layouts
from meshwright.models.decoder import (
    REMAT,
    DecoderConfig,
    abstract_arrays,
    decoder_rules,
    logits,
    t5x_rules,
)
from meshwright.ops.rope import Rope

PLAIN = DecoderConfig(
    vocab=40, layers=2, embed=32, heads=8, kv_heads=4, head_dim=8, mlp=48, rope=Rope(100.0)
)
CONFIGS = {
    "llama": PLAIN,
    "tied": dataclasses.replace(PLAIN, tied_embeddings=True),
    "mistral": dataclasses.replace(PLAIN, sliding_window=5),
    "qwen 2.5": dataclasses.replace(PLAIN, qkv_bias=True),
    "qwen 3": dataclasses.replace(PLAIN, qk_norm=True, tied_embeddings=True),
    "everything": dataclasses.replace(
        PLAIN, qkv_bias=True, output_bias=True, qk_norm=True, sliding_window=7
    ),
}
ONE = "dp=1,fsdp=1,tp=1,sp=1"
EIGHT = "dp=1,fsdp=2,tp=2,sp=2"


@functools.cache
def weights(config: DecoderConfig) -> Any:
    """Random everywhere, also where a model starts with ones and zeros."""
    rng = np.random.default_rng(0)

    def values(spec: mw.ArraySpec) -> np.ndarray:
        drawn = rng.normal(size=spec.shape).astype("f")
        return 1 + 0.3 * drawn if "norm" in spec.dims or spec.ndim == 2 else 0.3 * drawn

    return jax.tree.map(values, abstract_arrays(config))


def in_float64(params: Any, tokens: np.ndarray, config: DecoderConfig) -> np.ndarray:
    """One document of tokens [length] to logits [length, vocab], written out."""
    p = jax.tree.map(lambda x: x.astype("f8"), params)
    length, half = len(tokens), config.head_dim // 2

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * scale

    angles = np.arange(length)[:, None] * config.rope.theta ** (-np.arange(half) / half)

    def turn(x: np.ndarray) -> np.ndarray:  # [length, heads, head_dim]
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
        return np.concatenate([turned.real, turned.imag], -1)

    x = p["embedding"][tokens]
    back = np.arange(length)[:, None] - np.arange(length)
    seen = (back >= 0) & (back < (config.sliding_window or length))
    for layer in range(config.layers):
        w = {name: a[layer] for name, a in p["layers"]["attention"].items()}
        h = norm(x, w["norm"])
        q, k, v = (np.einsum("le,ehd->lhd", h, w[f"w{name}"]) for name in "qkv")
        if config.qkv_bias:
            q, k, v = q + w["bq"], k + w["bk"], v + w["bv"]
        if config.qk_norm:
            q, k = norm(q, w["q_norm"]), norm(k, w["k_norm"])
        group = config.heads // config.kv_heads
        q, k, v = turn(q), np.repeat(turn(k), group, 1), np.repeat(v, group, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(config.head_dim)
        scores = np.where(seen, scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd,hde->qe", shares, v, w["wo"]) + w.get("bo", 0)
        w = {name: a[layer] for name, a in p["layers"]["mlp"].items()}
        h = norm(x, w["norm"])
        gate = h @ w["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
    head = p["embedding"].T if config.tied_embeddings else p["output"]
    return norm(x, p["norm"]) @ head


def ours(
    config: DecoderConfig, tokens: np.ndarray, text: str = ONE, rules: mw.Rules | None = None,
    segments: np.ndarray | None = None, positions: np.ndarray | None = None, **compute: Any,
) -> np.ndarray:  # fmt: skip
    rules = decoder_rules(sp=True) if rules is None else rules
    size = math.prod(mw.MeshSpec.parse(text).sizes)
    mesh = mw.mesh(text, devices=jax.devices()[:size], axis_types="explicit")
    run = jax.jit(logits, static_argnums=(2, 3))
    with jax.set_mesh(mesh):
        shardings = mw.shardings(abstract_arrays(config), rules, mesh=mesh)
        params = jax.device_put(weights(config), shardings)
        fields = {"tokens": tokens, "segments": segments, "positions": positions}
        batch = {name: x for name, x in fields.items() if x is not None}
        return np.asarray(run(params, batch, config, Compute(rules, **compute)))


def some_tokens(batch: int = 4, length: int = 16) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 40, (batch, length)).astype("i")


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_a_decoder_written_out(name: str) -> None:
    config, tokens = CONFIGS[name], some_tokens()
    expected = np.stack([in_float64(weights(config), row, config) for row in tokens])
    assert np.abs(expected).max() > 1
    # alternating, so that each family also runs on a mesh in one of its forms
    text = EIGHT if name in ("everything", "tied") else ONE
    np.testing.assert_allclose(ours(config, tokens, text), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("text", [ONE, EIGHT])
def test_packed_documents_have_the_logits_they_have_alone(scan: bool, text: str) -> None:
    config = CONFIGS["everything"]
    tokens = some_tokens()
    cuts = [(0, 5, 16), (0, 9, 12), (0, 1, 15), (0, 16, 16)]
    segments, positions = np.zeros_like(tokens), np.zeros_like(tokens)
    expected = np.full((*tokens.shape, config.vocab), np.nan)
    for row, ends in enumerate(cuts):  # what is left at the end is padding
        for number, (a, b) in enumerate(itertools.pairwise(ends), start=1):
            segments[row, a:b], positions[row, a:b] = number, np.arange(b - a)
            if b > a:
                expected[row, a:b] = in_float64(weights(config), tokens[row, a:b], config)
    found = ours(config, tokens, text, segments=segments, positions=positions, scan=scan)
    counted = segments > 0
    np.testing.assert_allclose(found[counted], expected[counted], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("dp=2,fsdp=2,tp=2,sp=1", decoder_rules(sequence_parallel=True)),
        pytest.param(EIGHT, decoder_rules(sp=True, sequence_parallel=True), marks=pytest.mark.slow),
        *(
            pytest.param(
                "dp=2,fsdp=2,tp=2,sp=1", t5x_rules(a, b), marks=pytest.mark.slow, id=f"t5x {a} {b}"
            )
            for a in (1, 2)
            for b in (1, 2)
        ),
    ],
)
def test_logits_do_not_depend_on_rules(text: str, rules: mw.Rules) -> None:
    config, tokens = CONFIGS["everything"], some_tokens()
    expected = np.stack([in_float64(weights(config), row, config) for row in tokens])
    np.testing.assert_allclose(ours(config, tokens, text, rules), expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_is_within_rounding() -> None:
    tokens = some_tokens()
    expected = np.stack([in_float64(weights(PLAIN), row, PLAIN) for row in tokens])
    found = ours(PLAIN, tokens, EIGHT, dtype=jnp.bfloat16)
    assert found.dtype == np.float32
    assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


def test_an_unknown_way_to_compute_is_guessed_at() -> None:
    assert set(REMAT) == {"none", "elementwise", "mlp", "full", "offload"}
    with pytest.raises(MeshwrightError, match=r"remat='ful' is not a policy; did you mean 'full'"):
        ours(PLAIN, some_tokens(), remat="ful")
    with pytest.raises(MeshwrightError, match=r"attention='dens' is not a kernel.*'dense'"):
        ours(PLAIN, some_tokens(), kernel="dens")


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([("kv_heads", None)], "query heads must be with their key heads: split both alike"),
        ([("head_dim", "tp"), ("heads", None), ("kv_heads", None)], r"attention needs it whole: \('head_dim', None\)"),
        ([("embed", "dp")], "put the rule for batch first"),
        ([("mlp", "dp")], "inside a block batch and length must go the same way"),
    ],
)  # fmt: skip
def test_rules_that_would_break_a_block_are_refused(rules: list[Any], words: str) -> None:
    standard = [("batch", ("dp", "fsdp")), ("heads", "tp"), ("kv_heads", "tp"), ("mlp", "tp"), ("vocab", "tp"), ("length", None), ("embed", None), ("head_dim", None)]  # fmt: skip
    ours_first = mw.Rules([*rules, *standard])
    with pytest.raises(MeshwrightError, match=words):
        activation_layouts(ours_first, frozenset({"dp", "fsdp", "tp"}))

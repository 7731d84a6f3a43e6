"""The blocks of a decode step of few tokens, in interpret mode, beside those of any step."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.files import log_once
from meshwright.models import Compute, DecoderConfig, serving_of
from meshwright.models.decoder import decode_step
from meshwright.models.decoder.decode_step import DecodeStep, attention_block, experts_block
from meshwright.models.decoder.kinds import with_fields
from meshwright.models.decoder.layer import TokenContext, run_layer
from meshwright.models.states import PagedCache
from meshwright.ops import NormKind, PartialSums
from meshwright.ops.attention import PagedTokens
from meshwright.serving import generation_mesh

EMBED, PAGE, WIDTH, TOKENS = 256, 16, 8, 3
CONFIG = DecoderConfig(
    vocab=64, layers=1, embed=EMBED, heads=4, kv_heads=2, head_dim=32, mlp=128, max_seq=128,
    qk_norm=True, experts=64, experts_per_token=4,
)  # fmt: skip
KIND = CONFIG.pattern[0]


def _layer(rng: np.random.Generator, dtype: Any) -> Any:
    def drawn(*shape: int, inputs: int = EMBED) -> jax.Array:
        # numbers of bfloat16 in either dtype
        return jnp.asarray(rng.normal(size=shape) / inputs**0.5, jnp.bfloat16).astype(dtype)

    def scale(size: int) -> jax.Array:
        return jnp.asarray(1 + rng.normal(size=size) / 4, jnp.bfloat16).astype(dtype)

    return {
        "attention": {
            "norm": scale(EMBED), "q_norm": scale(32), "k_norm": scale(32),
            "wqkv": drawn(EMBED, 2, 4, 32), "wo": drawn(4, 32, EMBED, inputs=128),
        },
        "mlp": {
            "norm": scale(EMBED), "router": 4 * drawn(EMBED, 64),
            "gate": drawn(64, EMBED, 128), "up": drawn(64, EMBED, 128),
            "down": drawn(64, 128, EMBED, inputs=128),
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "has_norms"), [pytest.param(0, True, marks=pytest.mark.slow), (1, False), (3, True)]
)
def test_they_compute_what_a_layer_does(parts: int, has_norms: bool) -> None:
    kind = with_fields(KIND, {"qk_norm": has_norms})
    rng = np.random.default_rng(parts)
    state = rng.bit_generator.state
    w = _layer(rng, jnp.bfloat16)
    rng.bit_generator.state = state
    exact = _layer(rng, jnp.float32)
    x = jnp.asarray(rng.normal(size=(1, TOKENS, EMBED)), jnp.bfloat16)
    update: Any = None
    if parts:
        update = jnp.asarray(rng.normal(size=(parts, TOKENS, EMBED)), jnp.float32)
    pool = jnp.asarray(rng.normal(size=(2 * (1 + TOKENS * WIDTH), PAGE, 2, 32)), jnp.bfloat16)
    tables = 1 + rng.permutation(TOKENS * WIDTH).reshape(TOKENS, WIDTH).astype(np.int32)
    tables[2] = 0  # a token of nobody
    nothing = jnp.zeros(0, jnp.int32)
    tokens = PagedTokens(
        jnp.asarray(tables), jnp.asarray([70, 15, 0], jnp.int32),
        jnp.zeros((0, WIDTH), jnp.int32), nothing, nothing, 0, first=False, kernel="plain",
    )  # fmt: skip
    with jax.set_mesh(generation_mesh("dp=1")):
        cache = PagedCache([pool.astype(jnp.float32)], tokens)
        rope = KIND.attention.rope
        assert rope is not None
        at = rope.tables(cache.positions(), 32)
        context = TokenContext(
            lambda q, k, v, sinks, pool: cache.attend(q, k, v, pool, None),
            functools.partial(rope.rotate, cos=at[0], sin=at[1]), cache.padding(),
        )  # fmt: skip
        rules = serving_of(CONFIG).rules(False)
        plain = Compute(rules, jnp.float32, scan=False, stationary=True)
        before = None if update is None else PartialSums(update)
        run = functools.partial(run_layer, kind=kind, context=context, compute=plain)
        there = jax.jit(run)(x.astype(jnp.float32), before, exact, cache.layers[0])
        compute = dataclasses.replace(plain, dtype=jnp.bfloat16)

        def both(interpret: bool, x: jax.Array, update: Any, w: Any, pool: jax.Array) -> Any:
            step = DecodeStep(tokens, at)
            x, added, pool = attention_block(
                x, update, w["attention"], pool, step, kind, compute, interpret
            )
            x, more = experts_block(x, added, w["mlp"], cache.padding(), kind, interpret)
            return x, more.total()[None], pool

        arrays = x, before, w, pool
        found = jax.jit(functools.partial(both, True))(*arrays)
        if jax.__version_info__ < (0, 12):  # later ones ask for a GPU to lower Triton's kernels
            kernels = jax.jit(functools.partial(both, False)).trace(*arrays)
            text = kernels.lower(lowering_platforms=("cuda",)).as_text()
            for name in ("scale_for_norm", "write_heads", "top_experts"):
                assert name in text
    own = slice(0, 2)
    for ours, theirs in zip(found[:2], there[:2], strict=True):
        ours, theirs = (np.asarray(each, np.float32)[0, own] for each in (ours, theirs))
        assert np.linalg.norm(ours - theirs) < 0.01 * np.linalg.norm(theirs)
    # page 0 is nobody's
    half = len(pool) // 2
    written, expected = (
        np.delete(np.asarray(each, np.float32), [0, half], axis=0) for each in (found[2], there[2])
    )
    np.testing.assert_allclose(written, expected, rtol=0.01, atol=0.02)


def test_a_layer_that_they_do_not_support_has_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decode_step, "few_tokens_unavailable", lambda *_: None)
    log_once.cache_clear()
    caplog.set_level("INFO", "meshwright")
    w = _layer(np.random.default_rng(0), jnp.bfloat16)
    nothing = jnp.zeros(0, jnp.int32)
    tokens = PagedTokens(
        jnp.zeros((2, WIDTH), jnp.int32), jnp.zeros(2, jnp.int32),
        jnp.zeros((0, WIDTH), jnp.int32), nothing, nothing, 0, first=False, kernel="cudnn",
    )  # fmt: skip
    pool = jnp.zeros((2, PAGE, 2, 32), jnp.bfloat16)
    compute = Compute(serving_of(CONFIG).rules(False), jnp.bfloat16, scan=False, stationary=True)
    step = DecodeStep(tokens, (jnp.zeros(0), jnp.zeros(0)))
    assert step.runs_attention(w["attention"], pool, KIND, compute)
    assert step.runs_experts(w["mlp"], KIND, compute)
    layers = dataclasses.replace(KIND, norm=NormKind(kind="layer"))
    assert not step.runs_attention(w["attention"], pool, layers, compute)
    assert not step.runs_attention(w["attention"], pool.astype(jnp.float8_e4m3fn), KIND, compute)
    assert not step.runs_experts({**w["mlp"], "up": None}, KIND, compute)
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "no kernels of their own for attention: its norm is not an RMS norm",
        "no kernels of their own for attention: pages are float8_e4m3fn",
        "no kernels of their own for experts: weights are adapted, quantized, apart or of another "
        "dtype",
    ]
    assert DecodeStep.of(tokens, step.tables) is None  # this is no GPU

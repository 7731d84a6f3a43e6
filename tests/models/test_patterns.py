"""Decoders whose layers differ: the pattern, its fields by name, and the loop over its periods."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw
from meshwright import MeshwrightError
from meshwright.models import Compute, model_from_dict, model_to_dict, override, preset
from meshwright.models.decoder import DecoderConfig, abstract_arrays, decoder_rules, logits

TINY = DecoderConfig(48, 5, 32, heads=4, kv_heads=2, head_dim=8, mlp=64, max_seq=64)
LOCAL, GLOBAL = {"sliding_window": 5}, {"rope": None}


def mixed(*pattern: dict[str, Any], layers: int = 5) -> DecoderConfig:
    return DecoderConfig(48, layers, 32, 4, 2, 8, 64, max_seq=64, pattern=pattern)


# what a run of an earlier version has in its config.json
SAVED: dict[str, Any] = {
    "family": "decoder", "vocab": 128256, "layers": 16, "embed": 2048, "heads": 32, "kv_heads": 8,
    "head_dim": 64, "mlp": 8192, "tied_embeddings": True, "max_seq": 131072,
    "rope": {
        "theta": 500000.0,
        "scaling": {
            "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_seq": 8192, "kind": "Llama3Scaling",
        },
    },
    "norm_eps": 1e-05, "qkv_bias": False, "output_bias": False, "qk_norm": False,
    "sliding_window": None,
}  # fmt: skip


def test_what_an_earlier_version_saved_is_read_and_written_alike() -> None:
    assert model_from_dict(SAVED) == preset("llama-3.2-1b")
    assert model_to_dict(preset("llama-3.2-1b")) == SAVED


def test_a_pattern_is_saved_and_read() -> None:
    config = mixed(LOCAL, LOCAL, GLOBAL)
    assert model_from_dict(model_to_dict(config)) == config
    assert eval(repr(config), {"DecoderConfig": DecoderConfig}) == config


@given(st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=6), st.integers(1, 30))
def test_the_pattern_is_the_shortest_that_gives_the_same_layers(
    names: list[str], layers: int
) -> None:
    kinds = {"a": LOCAL, "b": GLOBAL}
    config = mixed(*(kinds[name] for name in names), layers=layers)
    windows = [kind.attention.window for kind in config.pattern]
    wanted = [5 if names[i % len(names)] == "a" else None for i in range(layers)]
    assert [windows[i % len(windows)] for i in range(layers)] == wanted
    shorter = [
        p for p in range(1, len(windows)) if all(x == wanted[i % p] for i, x in enumerate(wanted))
    ]
    assert not shorter
    assert sum(config.kinds.values()) == layers


def test_a_field_is_read_and_changed_where_layers_agree() -> None:
    config = mixed(LOCAL, GLOBAL)
    assert (config.heads, config.mlp, config.qk_norm) == (4, 64, False)
    with pytest.raises(
        MeshwrightError, match="layers of this model differ in sliding_window: 5, None"
    ):
        _ = config.sliding_window
    with pytest.raises(AttributeError, match="'adapters' is not a field"):
        _ = config.adapters
    assert [
        kind.attention.window for kind in override(config, ["sliding_window=9"], 64).pattern
    ] == [9, 9]
    assert override(TINY, ["heads=8", "gated=false", "layers=2"], 64).pattern[0].mlp.gated is False
    assert dataclasses.replace(config, layers=1).pattern == mixed(LOCAL).pattern


def test_layers_with_other_arrays_cannot_be_stacked_yet() -> None:
    with pytest.raises(MeshwrightError, match="arrays of different shapes"):
        abstract_arrays(mixed({"mlp": 96}, {"mlp": 64}))


@pytest.mark.parametrize("pattern", [(LOCAL, LOCAL, GLOBAL), (LOCAL, GLOBAL, LOCAL, LOCAL, GLOBAL)])
def test_a_loop_over_periods_computes_what_unrolled_layers_do(pattern: Any) -> None:
    config, rules = mixed(*pattern), decoder_rules()
    mesh = mw.mesh("dp=1,fsdp=2,tp=2,sp=1", devices=jax.devices()[:4], axis_types="explicit")
    tokens = np.random.default_rng(0).integers(0, 48, (2, 16)).astype(np.int32)
    with jax.set_mesh(mesh):
        arrays = abstract_arrays(config)
        params = mw.create(arrays, mw.shardings(arrays, rules, mesh=mesh), seed=0)
        run = jax.jit(logits, static_argnums=(2, 3))
        looped, unrolled = (
            np.asarray(run(params, {"tokens": tokens}, config, Compute(rules, scan=scan)))
            for scan in (True, False)
        )
    np.testing.assert_allclose(looped, unrolled, rtol=0, atol=1e-6)


def test_arrays_say_what_they_are() -> None:
    config = dataclasses.replace(TINY, qkv_bias=True, mlp_bias=True, norm="layer", norm_bias=True)
    arrays = abstract_arrays(config)
    kinds = {one.kind for one in jax.tree.leaves(arrays)}
    assert kinds == {"matrix", "norm", "bias", "embedding"}
    for one in jax.tree.leaves(arrays["layers"]):
        assert bool(one.activation) == (one.kind in ("norm", "bias")) == (not one.is_matrix)

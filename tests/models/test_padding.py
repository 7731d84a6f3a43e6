"""A vocabulary that the mesh does not divide: padded in memory, and seen by nobody."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import meshwright as mw
from meshwright import MeshwrightError
from meshwright.models import Compute, describe_padding, padded_vocab, save_hf
from meshwright.models.decoder import (
    DecoderConfig,
    abstract_arrays,
    decoder_rules,
    logits,
    t5x_rules,
)

CONFIG = DecoderConfig(vocab=61, layers=1, embed=32, heads=8, kv_heads=4, head_dim=8, mlp=64)
RULES = decoder_rules()


@pytest.mark.parametrize(
    ("mesh", "size", "words"),
    [
        ({"dp": 2, "fsdp": 2, "tp": 1}, 61, None),
        ({"fsdp": 2, "tp": 2}, 62, "vocab 61 padded to 62 for tp=2"),
        ({"fsdp": 2, "tp": 4}, 64, "vocab 61 padded to 64 for tp=4"),
    ],
)
def test_the_vocabulary_is_padded_to_the_least_multiple(
    mesh: dict[str, int], size: int, words: str | None
) -> None:
    for rules in (RULES, t5x_rules(2, 2)):
        assert padded_vocab(CONFIG, rules, mesh) == size
        assert describe_padding(CONFIG, rules, mesh) == words


def test_it_follows_the_axes_that_the_rules_give_it() -> None:
    rules = mw.Rules([("vocab", ("tp", "fsdp")), ("embed", None)])
    assert padded_vocab(CONFIG, rules, {"fsdp": 4, "tp": 4}) == 64
    words = describe_padding(CONFIG, rules, {"fsdp": 4, "tp": 4})
    assert words == "vocab 61 padded to 64 for tp=4 · fsdp=4"


def test_a_vocabulary_that_divides_is_described_as_before() -> None:
    assert abstract_arrays(CONFIG, vocab=61) == abstract_arrays(CONFIG)


def test_placing_arrays_of_ones_own_is_as_strict_as_before() -> None:
    with pytest.raises(MeshwrightError, match=r"dim 'vocab' of size 61 cannot be split in 2"):
        mw.shardings(abstract_arrays(CONFIG), RULES, mesh="fsdp=8,tp=2")


def values(config: DecoderConfig) -> Any:
    random = np.random.default_rng(0)
    arrays = abstract_arrays(config)
    return jax.tree.map(lambda a: random.normal(scale=0.3, size=a.shape).astype("f"), arrays)


def padded_on(mesh: jax.sharding.Mesh, config: DecoderConfig, fill: float = 0.0) -> Any:
    """The values on a mesh, whatever is in the padding."""
    arrays = abstract_arrays(config, vocab=padded_vocab(config, RULES, mesh.shape))

    def pad(spec: mw.ArraySpec, value: np.ndarray) -> np.ndarray:
        missing = [(0, size - have) for size, have in zip(spec.shape, value.shape, strict=True)]
        return np.pad(value, missing, constant_values=fill)

    numbers = jax.tree.map(pad, arrays, values(config))
    return jax.device_put(numbers, mw.shardings(arrays, RULES, mesh=mesh))


@pytest.mark.parametrize("tied", [False, True])
def test_logits_have_the_models_vocabulary_and_are_those_of_one_device(tied: bool) -> None:
    config = dataclasses.replace(CONFIG, tied_embeddings=tied)
    tokens = np.arange(32, dtype=np.int32).reshape(2, 16) + 28
    found = []
    for text, fill in (("dp=1,fsdp=1,tp=1,sp=1", 0.0), ("dp=1,fsdp=2,tp=4,sp=1", 7.0)):
        count = 1 if fill == 0 else 8
        mesh = mw.mesh(text, devices=jax.devices()[:count], axis_types="explicit")
        with jax.set_mesh(mesh):
            params = padded_on(mesh, config, fill)
            forward = jax.jit(logits, static_argnums=(2, 3))
            found.append(np.asarray(forward(params, {"tokens": tokens}, config, Compute(RULES))))
    assert found[1].shape == (2, 16, 61)
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_a_hugging_face_folder_has_the_models_vocabulary(tied: bool, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, tied_embeddings=tied)
    mesh = mw.mesh("fsdp=2,tp=4", devices=jax.devices()[:8], axis_types="explicit")
    expected = save_hf(tmp_path / "one", values(config), config, dtype=jnp.float32)
    found = save_hf(tmp_path / "mesh", padded_on(mesh, config), config, dtype=jnp.float32)
    for file in ("config.json", "model.safetensors"):
        assert (found / file).read_bytes() == (expected / file).read_bytes()
    assert load_file(found / "model.safetensors")["model.embed_tokens.weight"].shape == (61, 32)


def test_an_array_with_more_tokens_than_the_config_is_not_taken_for_padding(
    tmp_path: Path,
) -> None:
    mesh = mw.mesh("fsdp=2,tp=4", devices=jax.devices()[:8], axis_types="explicit")
    params = padded_on(mesh, CONFIG, fill=1.0)
    with pytest.raises(MeshwrightError, match=r"'embedding' has shape \(64, 32\), the config says"):
        save_hf(tmp_path / "model", params, CONFIG)

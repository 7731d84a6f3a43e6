"""Generation with a cache: what transformers generates, and what the forward pass computes."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.models.t5.test_logits import FOLDERS, REFERENCE, by_name

import meshwright as mw
from meshwright.models import Compute, load_hf
from meshwright.models.t5 import abstract_arrays, from_hf_config, t5_rules
from meshwright.models.t5 import logits as whole_logits
from meshwright.models.t5.generation import generation_rules
from meshwright.serve.generate import model_functions, padded


def greedy(folder: Path, mesh_text: str, new: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [batch, new] as transformers gives them, and the logits of each."""
    config = from_hf_config(folder)
    size = math.prod(mw.MeshSpec.parse(mesh_text).sizes)
    mesh = mw.mesh(mesh_text, devices=jax.devices()[:size], axis_types="explicit")
    with jax.set_mesh(mesh):
        shardings = mw.shardings(abstract_arrays(config), generation_rules(), mesh=mesh)
        params = load_hf(folder, config, shardings)
    start, advance = model_functions(config, mesh, room=20)
    prompts = [row[row != 0].tolist() for row in np.load(folder / "encoder_tokens.npy")]
    logits, cache = start(params, *padded(prompts, config, mesh))
    tokens, all_logits = [], []
    for _ in range(new):
        all_logits.append(np.asarray(logits)[: len(prompts)])
        tokens.append(all_logits[-1].argmax(-1).astype(np.int32))
        following = np.pad(tokens[-1], (0, len(logits) - len(prompts)))
        logits, cache = advance(params, cache, jnp.asarray(following))
    ids = np.stack(tokens, axis=1)
    ended = np.cumsum(ids == 1, axis=1) - (ids == 1) > 0
    return np.where(ended, 0, ids), np.stack(all_logits, axis=1)


@by_name
def test_greedy_generation_is_that_of_transformers(folder: Path) -> None:
    expected = np.load(folder / "generated.npy")
    assert (expected[:, 0] == 0).all()  # the start token
    tokens, _ = greedy(folder, "dp=1,fsdp=1,tp=1,sp=1", expected.shape[1] - 1)
    np.testing.assert_array_equal(tokens, expected[:, 1:])


def test_some_generations_change_from_token_to_token() -> None:
    changes = [
        np.count_nonzero(np.diff(row[1:]))
        for folder in FOLDERS
        for row in np.load(folder / "generated.npy")
    ]
    assert max(changes) > 8


@pytest.mark.parametrize("mesh", ["dp=2,fsdp=2,tp=2,sp=1", "dp=1,fsdp=1,tp=4,sp=2"])
def test_logits_of_a_step_are_the_same_on_a_mesh(mesh: str) -> None:
    folder = REFERENCE / "t5-1.1"
    tokens, logits = greedy(folder, mesh, 4)
    expected, right = greedy(folder, "dp=1,fsdp=1,tp=1,sp=1", 4)
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_allclose(logits, right, rtol=0, atol=1e-4)


def test_a_step_has_the_logits_of_the_whole_sequence() -> None:
    folder = REFERENCE / "ul2"
    tokens, found = greedy(folder, "dp=1,fsdp=1,tp=1,sp=1", 12)
    config, inputs = from_hf_config(folder), np.load(folder / "encoder_tokens.npy")
    batch: dict[str, Any] = {
        "encoder_tokens": jnp.asarray(inputs),
        "encoder_segments": jnp.asarray((inputs != 0).astype(np.int32)),
        "tokens": jnp.asarray(np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]),
    }
    mesh = mw.mesh("dp=1,fsdp=1,tp=1,sp=1", devices=jax.devices()[:1], axis_types="explicit")
    with jax.set_mesh(mesh):
        run = jax.jit(whole_logits, static_argnums=(2, 3))
        expected = run(load_hf(folder), batch, config, Compute(t5_rules()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)

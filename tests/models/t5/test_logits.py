"""T5s read from Hugging Face's files compute what transformers computes, on every mesh.

The folders are made by tools/make_t5_reference.py: weights, tokens, and what transformers gives.
"""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import meshwright as mw
from meshwright import MeshwrightError
from meshwright.models import Compute, load_hf, save_hf
from meshwright.models.t5 import (
    abstract_arrays,
    from_hf_config,
    logits,
    t5_rules,
)

REFERENCE = Path(__file__).parents[1] / "t5_reference"
FOLDERS = sorted(path for path in REFERENCE.iterdir() if path.is_dir())
by_name = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def batch_of(folder: Path) -> dict[str, jax.Array]:
    inputs = np.load(folder / "encoder_tokens.npy")
    return {
        "encoder_tokens": jnp.asarray(inputs),
        "encoder_segments": jnp.asarray((inputs != 0).astype(np.int32)),
        "tokens": jnp.asarray(np.load(folder / "tokens.npy")),
    }


def our_logits(folder: Path, mesh_text: str, **options: Any) -> np.ndarray:
    config = from_hf_config(folder)
    size = math.prod(mw.MeshSpec.parse(mesh_text).sizes)
    mesh = mw.mesh(mesh_text, devices=jax.devices()[:size], axis_types="explicit")
    rules = t5_rules(
        sp=mesh.shape["sp"] > 1, sequence_parallel=options.pop("sequence_parallel", False)
    )
    with jax.set_mesh(mesh):
        shardings = mw.shardings(abstract_arrays(config), rules, mesh=mesh)
        params = load_hf(folder, config, shardings)
        compute = Compute(rules, **options)
        run = jax.jit(logits, static_argnums=(2, 3))
        return np.asarray(run(params, batch_of(folder), config, compute))


@by_name
def test_logits_are_those_of_transformers(folder: Path) -> None:
    expected = np.load(folder / "logits.npy")
    assert np.abs(expected).max() > 1  # so that 1e-4 says something
    got = our_logits(folder, "dp=1,fsdp=1,tp=1,sp=1")
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


def test_a_folder_of_each_kind_is_read() -> None:
    configs = {folder.name: from_hf_config(folder) for folder in FOLDERS}
    assert {c.activation for c in configs.values()} == {"relu", "gelu", "silu"}
    # in the fields of transformers before and after version 5
    for name, tied in (("t5-1.0", 1), ("t5-1.0-new", 1), ("t5-1.1", 0), ("flan-t5", 0)):
        assert configs[name].tied_embeddings == configs[name].scaled_output == bool(tied)


@by_name
@pytest.mark.parametrize("dtype", [jnp.float32, None], ids=["float32", "as stored"])
def test_the_round_trip_is_bit_equal(folder: Path, dtype: Any, tmp_path: Path) -> None:
    config = from_hf_config(folder)
    theirs = load_file(folder / "model.safetensors")
    stored = jnp.dtype(theirs["shared.weight"].dtype)
    params = load_hf(folder, config, dtype=dtype or stored)
    save_hf(tmp_path / "again", params, config)
    assert from_hf_config(tmp_path / "again") == config
    ours = load_file(tmp_path / "again" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor.astype(dtype or stored))


@by_name
def test_transformers_reads_what_is_written(folder: Path, tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch", reason="the outside reader needs torch")
    transformers: Any = pytest.importorskip("transformers", reason="the outside reader")
    config = from_hf_config(folder)
    save_hf(tmp_path / "model", load_hf(folder, config), config, dtype=jnp.float32)
    inputs, tokens = (
        torch.as_tensor(np.load(folder / f"{name}.npy"), dtype=torch.int64)
        for name in ("encoder_tokens", "tokens")
    )
    expected, got = (
        transformers.T5ForConditionalGeneration.from_pretrained(
            place, dtype=torch.float32, attn_implementation="eager"
        )
        .eval()(inputs, (inputs != 0).long(), tokens)
        .logits.detach()
        .numpy()
        for place in (folder, tmp_path / "model")
    )
    np.testing.assert_array_equal(got, expected)


MESHES: dict[str, dict[str, Any]] = {
    "dp=2,fsdp=1,tp=1,sp=1": {},
    "dp=1,fsdp=2,tp=2,sp=1": {},
    "dp=1,fsdp=4,tp=1,sp=1": {"scan": False},
    "dp=1,fsdp=1,tp=4,sp=1": {"sequence_parallel": True},
    "dp=1,fsdp=2,tp=2,sp=2": {},
    "dp=2,fsdp=1,tp=1,sp=4": {"context_parallel": "ulysses"},
}


SLOW = ("dp=2,fsdp=1,tp=1,sp=1", "dp=1,fsdp=2,tp=2,sp=1")


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=[pytest.mark.slow] * (mesh in SLOW)) for mesh in MESHES]
)
def test_logits_are_the_same_on_every_mesh(mesh: str) -> None:
    folder = REFERENCE / "ul2"
    got = our_logits(folder, mesh, **MESHES[mesh])
    np.testing.assert_allclose(got, np.load(folder / "logits.npy"), rtol=0, atol=1e-4)


def test_a_ring_is_refused_since_it_adds_no_bias() -> None:
    with pytest.raises(MeshwrightError, match="'ring' is not possible: it adds no bias"):
        our_logits(REFERENCE / "ul2", "dp=1,fsdp=1,tp=1,sp=2", context_parallel="ring")

"""Models of every family, read from Hugging Face's files, compute what transformers computes.

The folders are made by tools/make_hf_reference.py: weights, tokens and transformers' logits.
"""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.models import Compute, load_hf, save_hf
from meshwright.models.decoder import abstract_arrays, decoder_rules, logits
from meshwright.models.decoder.hf_config import from_hf_config

REFERENCE = Path(__file__).parent / "hf_reference"
FOLDERS = sorted(path for path in REFERENCE.iterdir() if path.is_dir())
by_name = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def our_logits(folder: Path, mesh_text: str, tokens: np.ndarray) -> np.ndarray:
    config = from_hf_config(folder)
    size = math.prod(mw.MeshSpec.parse(mesh_text).sizes)
    mesh = mw.mesh(mesh_text, devices=jax.devices()[:size], axis_types="explicit")
    rules = decoder_rules()
    with jax.set_mesh(mesh):
        shardings = mw.shardings(abstract_arrays(config), rules, mesh=mesh)
        params = load_hf(folder, config, shardings)
        compute = Compute(rules)
        run = jax.jit(logits, static_argnums=(2, 3))
        return np.asarray(run(params, {"tokens": tokens}, config, compute))


def test_every_family_has_a_reference() -> None:
    families = {folder.name.split("-")[0] for folder in FOLDERS}
    assert families == {"llama", "mistral", "qwen2", "qwen2.5", "qwen3"}


@by_name
def test_logits_are_those_of_transformers(folder: Path) -> None:
    expected = np.load(folder / "logits.npy")
    assert np.abs(expected).max() > 1  # so that 1e-4 says something
    got = our_logits(folder, "dp=1,fsdp=1,tp=1,sp=1", np.load(folder / "tokens.npy"))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


def test_logits_are_those_of_transformers_on_a_mesh_too() -> None:
    folder = REFERENCE / "qwen3-biases"
    got = our_logits(folder, "dp=1,fsdp=2,tp=2,sp=1", np.load(folder / "tokens.npy"))
    np.testing.assert_allclose(got, np.load(folder / "logits.npy"), rtol=0, atol=1e-4)


@by_name
def test_a_model_written_and_read_again_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    config = from_hf_config(folder)
    params = load_hf(folder, config)
    save_hf(tmp_path / "again", params, config, dtype=jnp.float32, max_file_bytes=30_000)
    assert from_hf_config(tmp_path / "again") == config
    again = load_hf(tmp_path / "again")
    jax.tree.map(np.testing.assert_array_equal, params, again)


@by_name
def test_transformers_reads_what_is_written(folder: Path, tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch", reason="the outside reader needs torch")
    transformers: Any = pytest.importorskip("transformers", reason="the outside reader")
    config = from_hf_config(folder)
    save_hf(
        tmp_path / "model",
        load_hf(folder, config),
        config,
        dtype=jnp.float32,
        max_file_bytes=30_000,
    )
    tokens = torch.as_tensor(np.load(folder / "tokens.npy"), dtype=torch.int64)
    expected, got = (
        transformers.AutoModelForCausalLM.from_pretrained(
            place, dtype=torch.float32, attn_implementation="eager"
        )
        .eval()(tokens)
        .logits.detach()
        .numpy()
        for place in (folder, tmp_path / "model")
    )
    np.testing.assert_array_equal(got, expected)
    before, after = (
        transformers.AutoConfig.from_pretrained(place).to_dict()
        for place in (folder, tmp_path / "model")
    )
    for field in ("dtype", "_name_or_path"):
        del before[field], after[field]
    assert after == before

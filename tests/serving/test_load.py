"""A model is read from a run or a Hugging Face folder onto any mesh, or a message says why not."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.checkpoint import Checkpoints
from meshwright.models import model_to_dict, save_hf
from meshwright.models.decoder import DecoderConfig
from meshwright.ops.rope import Llama3Scaling, Rope
from meshwright.serving.abstract_weights import check_fits
from meshwright.serving.defaults import defaults_of
from meshwright.serving.engine import Engine
from meshwright.serving.request import Request
from meshwright.serving.settings import EngineConfig
from meshwright.serving.source import Model, generation_mesh, load_weights, model_source

RandomModel = Callable[..., Model]
CONFIG = DecoderConfig(
    320, 2, 32, 8, 4, 8, 64, max_seq=256, rope=Rope(5e5, Llama3Scaling(8.0, 1.0, 4.0, 64))
)


@pytest.fixture(scope="module")
def model(random_model: RandomModel) -> Model:
    return random_model(CONFIG, generation_mesh("fsdp=4,tp=2"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: Model) -> Path:
    """A run's folder, as training leaves it, with two checkpoints that differ."""
    folder = tmp_path_factory.mktemp("run")
    with Checkpoints(folder / "checkpoints") as checkpoints:
        for step, params in ((10, jax.tree.map(jnp.zeros_like, model.params)), (20, model.params)):
            state = {"step": jnp.int32(step), "params": params, "optimizer": (jnp.ones(3),)}
            checkpoints.save(step, state, {}, wait=True)
    settings = {
        "model": "mine",
        "model_config": model_to_dict(CONFIG),
        "hf_config": {"eos_token_id": 256},
    }
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer_state.json").write_text(json.dumps({"kind": "bytes"}))
    return folder


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,fsdp=2,tp=4"])
def test_the_last_checkpoint_of_a_run_is_read_onto_any_mesh(
    run: Path, model: Model, mesh: str
) -> None:
    read = load_weights(model_source(run), generation_mesh(mesh))
    assert read.config == CONFIG
    assert read.config.hf_config == {"eos_token_id": 256}  # for who writes it as such a model
    jax.tree.map(np.testing.assert_array_equal, read.params, model.params)
    assert read.source.name == f"step 20 of {run}"
    assert read.source.ends == {256}
    assert read.source.encode("Hi!") == [72, 105, 33]


def test_a_hugging_face_folder_goes_through_a_mesh_that_does_not_divide_its_vocabulary(
    random_model: RandomModel, tmp_path: Path
) -> None:
    config = dataclasses.replace(CONFIG, vocab=321, rope=Rope())
    alone = random_model(config, generation_mesh())
    folder = save_hf(tmp_path / "alone", alone.params, config, dtype=jnp.float32)
    read = load_weights(model_source(folder, tokenizer="bytes"), generation_mesh("fsdp=2,tp=4"))
    assert read.params["embedding"].shape == (324, 32)
    again = save_hf(tmp_path / "again", read.params, config, dtype=jnp.float32)
    weights = "model.safetensors"
    assert (again / weights).read_bytes() == (folder / weights).read_bytes()


def test_a_step_can_be_chosen_and_weights_cast(run: Path) -> None:
    mesh = generation_mesh()
    assert not load_weights(model_source(run, step=10), mesh).params["embedding"].any()
    read = load_weights(model_source(run), mesh, jnp.bfloat16).params
    assert read["output"].dtype == jnp.bfloat16
    assert read["norm"].dtype == jnp.float32


@pytest.mark.slow
def test_bfloat16_continues_about_as_float32(run: Path) -> None:
    """Its log-probabilities, next to those of float32: rounding alone is between them."""
    mesh = generation_mesh()
    found = []
    for dtype in (jnp.float32, jnp.bfloat16):
        model = load_weights(model_source(run), mesh, dtype)
        with Engine(model, EngineConfig(max_batch=1, compile_first=False)) as engine:
            assert engine._executor.programs.pools[0].dtype == dtype
            [done] = engine.generate([Request((1, 2, 3, 5, 6), max_new=0, prompt_logprobs=0)])
        found.append(np.array([each.logprob for each in done.prompt_logprobs[1:] if each]))
    size = np.abs(found[0]).max()
    assert 0 < np.abs(found[1] - found[0]).max() < 0.05 * size


def test_a_hugging_face_folder_is_read_with_its_tokenizer(
    tmp_path: Path, model: Model, letters: Path
) -> None:
    folder = save_hf(tmp_path / "hf", model.params, CONFIG, dtype=jnp.float32)
    letters.rename(folder / "tokenizer.json")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 17], "top_p": 0.5}')
    read = load_weights(model_source(folder), generation_mesh("fsdp=2,tp=2"))
    jax.tree.map(np.testing.assert_array_equal, read.params, model.params)
    assert read.source.ends == {1, 17}
    assert str(defaults_of(read.source.generation_config)) == "top_p 0.5"
    assert read.source.encode("ab") == [0, 4, 5]  # begin-of-text first


def rewrite(file: Path, **fields: Any) -> None:
    content = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def test_what_is_missing_or_wrong_in_a_run_is_said(run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(run, tmp_path / "run"))

    def refused(*words: str, path: Path = run, **options: Any) -> None:
        with pytest.raises(mw.MeshwrightError) as error:
            model_source(path, **options)
        for word in words:
            assert word in str(error.value)

    refused("nowhere does not exist", path=tmp_path / "nowhere")
    refused("holds no config.json", path=tmp_path)
    refused(
        "holds no config.json", f"the folder is part of the run {run}", path=run / "checkpoints"
    )
    refused("no checkpoint of step 15", "10, 20", step=15)
    refused("tokenizer 'gpt'", tokenizer="gpt")
    (run / "tokenizer_state.json").write_text('{"kind": "words"}')
    refused("tokenizer of kind 'words' is not known")
    (run / "tokenizer_state.json").write_text("[1]")
    refused("does not describe a tokenizer")
    (run / "tokenizer_state.json").unlink()
    refused("tokenizer_state.json does not exist", "--tokenizer")
    assert model_source(run, tokenizer="bytes").config == CONFIG
    rewrite(run / "config.json", model_config=model_to_dict(CONFIG) | {"vocab": 200})
    refused("the tokenizer has 257 tokens", "200", tokenizer="bytes")
    rewrite(run / "config.json", model_config={"vocab": 200})
    refused("'model_config' does not match this version")
    rewrite(run / "config.json", model_config=None)
    refused("belongs neither to a run", "nor to Hugging Face")
    (run / "config.json").write_text("{")
    refused("is not readable JSON")
    (run / "config.json").write_text("[]")
    refused("is not a JSON object")


def test_a_run_without_a_checkpoint_says_so(run: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_state.json"):
        shutil.copy(run / name, tmp_path)
    with pytest.raises(mw.MeshwrightError, match="holds no complete checkpoint"):
        model_source(tmp_path)


def test_a_hugging_face_folder_without_a_tokenizer_says_so(tmp_path: Path, model: Model) -> None:
    folder = save_hf(tmp_path / "hf", model.params, CONFIG, dtype=jnp.float32)
    with pytest.raises(mw.MeshwrightError, match=r"no tokenizer\.json; name one with --tokenizer"):
        model_source(folder)
    with pytest.raises(mw.MeshwrightError, match="which has no step 3"):
        model_source(folder, step=3)
    assert model_source(folder, tokenizer="bytes").ends == {256}


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("tp=16", "tp=16 does not divide the model's heads=8; tp=2, 4 or 8 would fit"),
        (
            "fsdp=3,sp=2",
            "fsdp=3 · sp=2 does not divide the model's embed=32; fsdp=2, 4 or 8 would fit",
        ),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_is_refused(run: Path, mesh: str, words: str) -> None:
    with pytest.raises(mw.MeshwrightError, match=words):
        load_weights(model_source(run), generation_mesh(mesh))


def test_tp_divides_the_kv_heads_or_is_a_multiple_of_them() -> None:
    config = dataclasses.replace(CONFIG, heads=12, kv_heads=6, mlp=96)
    for tensor in (1, 2, 3, 6, 12):
        check_fits(config, generation_mesh(f"tp={tensor}"))
    with pytest.raises(
        mw.MeshwrightError,
        match="tp=4 neither divides the model's kv_heads=6 nor is a multiple of them; tp=2, 3 or 6 would",
    ):
        check_fits(config, generation_mesh("tp=4"))


def test_each_kv_head_is_held_by_as_many_devices_as_tp_has_for_it(run: Path) -> None:
    alone, split = (
        load_weights(model_source(run), generation_mesh(text)) for text in ("tp=1", "tp=8")
    )
    for name in ("wk", "wv"):
        heads = np.asarray(alone.params["layers"]["attention"][name])
        array = split.params["layers"]["attention"][name]
        for shard in array.addressable_shards:
            [head] = range(8)[shard.index[2]]
            np.testing.assert_array_equal(shard.data[:, :, 0], heads[:, :, head // 2])
    assert (alone.config.kv_heads, split.config.kv_heads) == (4, 8)
    assert split.source.config == CONFIG


def test_a_mesh_takes_the_first_devices_and_axes_of_one() -> None:
    mesh = generation_mesh("tp=2,fsdp=2")
    assert dict(mesh.shape) == {"tp": 2, "fsdp": 2, "dp": 1, "sp": 1}
    assert mesh.devices.flatten().tolist() == jax.devices()[:4]
    assert generation_mesh("fsdp=-1").size == 16
    assert generation_mesh().size == 1
    with pytest.raises(mw.MeshwrightError, match="needs 32 devices, 16 are here"):
        generation_mesh("fsdp=32")
    with pytest.raises(mw.MeshwrightError, match="no pipeline stages, so pp must be 1"):
        generation_mesh("pp=2")

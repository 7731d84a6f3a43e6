"""A run remembers the Hugging Face model it came from, so that it can be written as one again."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.word_tokenizer import word_tokenizer

from meshwright.data import load_tokenizer, pack
from meshwright.models import model_from_dict, model_to_dict
from meshwright.models.decoder.hf_config import from_hf_config, to_hf_config
from meshwright.training.config import TrainConfig
from meshwright.training.prepare import Setup, prepare
from meshwright.training.setup import weights_folder

MISTRAL = Path(__file__).parents[1] / "models/hf_reference/mistral-wide-heads"
SPECIAL = {"bos_token_id": 1, "eos_token_id": [0, 2], "pad_token_id": 0}
TOKENIZER = word_tokenizer({"</s>": 0, "a": 1, "b": 2}, special=["</s>"])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(MISTRAL, folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | SPECIAL))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return folder


def prepared(tmp_path: Path, model: Path, tokenizer: Any, **settings: Any) -> Setup:
    (tmp_path / "a.txt").write_text("a b " * 2000)
    store = tmp_path / "a.store"
    pack([tmp_path / "a.txt"], store, tokenizer, overwrite=True)
    config = TrainConfig(
        str(model),
        data=str(store),
        mesh="dp=16",
        batch=16,
        seq=16,
        run=tmp_path / "run",
        **settings,
    )
    return prepare(config)


def test_a_run_from_weights_keeps_their_architecture_tokens_and_folder(
    tmp_path: Path, model: Path
) -> None:
    setup = prepared(tmp_path, model, load_tokenizer(model), init_from=model)
    assert setup.model.hf_config is not None
    assert setup.model.hf_config["_name_or_path"] == str(model)
    fields = to_hf_config(setup.model)
    assert fields["architectures"] == ["MistralForCausalLM"]
    assert fields.items() >= SPECIAL.items()


def test_a_folder_with_weights_is_what_a_run_starts_from(tmp_path: Path, model: Path) -> None:
    assert weights_folder(TrainConfig(str(model))) == model
    assert weights_folder(TrainConfig(str(model), init_from=tmp_path)) == tmp_path
    assert weights_folder(TrainConfig(str(model / "config.json"))) is None
    (model / "model.safetensors").unlink()
    assert weights_folder(TrainConfig(str(model))) is None


def test_the_tokens_of_another_tokenizer_are_not_kept(tmp_path: Path, model: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    words = word_tokenizer({"</s>": 0, "a": 2, "b": 1}, special=["</s>"])
    (other / "tokenizer.json").write_text(json.dumps(words))
    setup = prepared(tmp_path, model / "config.json", load_tokenizer(other))
    assert setup.weights is None
    fields = to_hf_config(setup.model)
    assert fields["architectures"] == ["MistralForCausalLM"]
    assert "pad_token_id" not in fields or fields["pad_token_id"] is None
    assert fields["eos_token_id"] == 0
    assert setup.model.hf_config is not None
    assert "_name_or_path" not in setup.model.hf_config


def test_what_a_model_came_from_is_not_compared_when_a_run_resumes(model: Path) -> None:
    config = from_hf_config(model)
    assert "hf_config" not in model_to_dict(config)
    assert model_from_dict(model_to_dict(config)) == config

"""Files that are packed when they are first trained on."""

import json
from pathlib import Path

import pytest
from tests.word_tokenizer import word_tokenizer

from meshwright.data import Mixture, open_or_pack
from meshwright.errors import MeshwrightError
from meshwright.training import TrainConfig
from meshwright.training.setup import mixture_of

WORDS = word_tokenizer({"</s>": 0, "a": 1, "b": 2})


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    file = tmp_path / "sums.jsonl"
    file.write_text('{"prompt": "1+1=", "completion": "2"}\n')
    return file


def test_a_file_is_packed_once(sums: Path) -> None:
    said: list[str] = []
    store = open_or_pack(str(sums), say=said.append)
    assert store.text(0) == "1+1=2"
    assert store.path is not None
    assert store.path.parent == sums.parent
    assert open_or_pack(str(sums), say=said.append).path == store.path
    assert said == [
        f"packed {sums} on first use, into {store.name} beside it: 1 example, 6 tokens, bytes "
        "tokenizer; format: completion"
    ]
    mixture = Mixture.parse(f"{sums}:0.5,embedded:0.5", open_or_pack)
    assert mixture.stores[0].identity == store.identity
    assert sorted(sums.parent.iterdir()) == [sums, store.path], "no lock or rest is left"


def test_another_content_tokenizer_or_template_is_packed_again(sums: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    stores = [open_or_pack(str(sums)).name]
    sums.write_text('{"prompt": "1+1=", "completion": "3"}\n')
    stores.append(open_or_pack(str(sums)).name)
    (model / "tokenizer.json").write_text(json.dumps(WORDS))
    (model / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    stores.append(open_or_pack(str(sums), str(model)).name)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    stores.append(open_or_pack(str(sums), str(model)).name)
    assert len(set(stores)) == 4


def test_the_tokenizer_is_that_of_the_model(sums: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text(json.dumps(WORDS))
    (model / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    for settings, kind in (
        (TrainConfig("tiny", data=str(sums)), "bytes"),
        (TrainConfig("tiny", data=str(sums), init_from=model), "huggingface"),
        (TrainConfig(str(model), data=str(sums)), "huggingface"),
    ):
        assert mixture_of(settings).tokenizer.kind == kind


def test_what_cannot_be_packed_is_told_with_the_command(sums: Path) -> None:
    sums.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    with pytest.raises(MeshwrightError, match=r"no chat template.*--data sums.store.*data pack "):
        open_or_pack(str(sums))
    assert list(sums.parent.iterdir()) == [sums]
    with pytest.raises(MeshwrightError, match="does not exist"):
        open_or_pack(str(sums.with_name("other.jsonl")))


def test_a_file_that_is_not_there_is_called_a_file(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match=r"data file '.*chat.jsonl' does not exist"):
        open_or_pack(str(tmp_path / "chat.jsonl"))
    with pytest.raises(MeshwrightError, match=r"token store '.*chat.store' does not exist"):
        open_or_pack(str(tmp_path / "chat.store"))


def test_conversations_without_a_template_are_told_the_whole_command(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file.write_text(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(MeshwrightError, match=r"--out chat\.store --chat-template chatml$"):
        open_or_pack(str(file))

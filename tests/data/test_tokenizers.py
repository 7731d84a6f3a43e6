"""Tokenizers: text to ids and back, whatever the text or the ids."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from meshwright.data import (
    ByteTokenizer,
    decode_stream,
    embedded_text,
    load_tokenizer,
    tokenizer_files,
    tokenizer_from_json,
)
from meshwright.errors import MeshwrightError

TEXT = "The hare — née Häsin — said: 你好, 🙂!"


@pytest.fixture(scope="module")
def library() -> Library:
    """A small byte-level BPE, trained here."""
    tokenizer = Library(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([embedded_text()[:20_000]], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def folder(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    library.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    return path


def test_bytes_are_the_ids_of_utf8() -> None:
    ids = ByteTokenizer().encode(TEXT)
    assert ids.dtype == np.int32
    assert bytes(ids.tolist()) == TEXT.encode()
    assert ByteTokenizer().decode([*ids, 256]) == TEXT


def test_a_hugging_face_tokenizer_gives_the_ids_of_its_library(
    library: Library, folder: Path
) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode(TEXT).tolist() == library.encode(TEXT, add_special_tokens=False).ids
    assert (
        tokenizer.encode_batch([TEXT], special_tokens=True)[0].tolist() == library.encode(TEXT).ids
    )
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.vocab == library.get_vocab_size() == 400
    assert tokenizer.end_of_document == 1


def test_a_tokenizer_survives_being_saved(folder: Path) -> None:
    for tokenizer in (load_tokenizer("bytes"), load_tokenizer(folder)):
        again = tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json())))
        assert again.identity == tokenizer.identity
        assert again.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
        assert again.end_of_document == tokenizer.end_of_document


def test_the_identity_follows_what_the_tokenizer_does(folder: Path, tmp_path: Path) -> None:
    definition = json.loads((folder / "tokenizer.json").read_text())
    file = tmp_path / "tokenizer.json"

    def identity(change: dict[str, Any], end_token: str = "</s>") -> str:
        file.write_text(json.dumps(definition | change, indent=3))
        return load_tokenizer(file, end_token).identity

    same = load_tokenizer(folder).identity
    assert identity({}) == same  # written in another way
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    assert identity({"truncation": cut}) == same
    assert identity({}, end_token="<s>") != same
    assert identity({"normalizer": {"type": "Lowercase"}}) != same


def test_a_length_limit_in_the_file_does_not_cut_documents(folder: Path, tmp_path: Path) -> None:
    definition = json.loads((folder / "tokenizer.json").read_text())
    definition["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    tokenizer = load_tokenizer(tmp_path, "</s>")
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


@given(st.lists(st.integers(-5, 500)))
def test_any_ids_decode_to_some_text(folder: Path, ids: list[int]) -> None:
    for tokenizer in (ByteTokenizer(), load_tokenizer(folder)):
        for text in (tokenizer.decode(ids), "".join(decode_stream(tokenizer, ids))):
            text.encode()  # no half characters


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_stream_of_bytes_gives_the_text_in_whole_characters(text: str) -> None:
    pieces = list(decode_stream(ByteTokenizer(), text.encode()))
    assert "".join(pieces) == text
    assert "\N{REPLACEMENT CHARACTER}" in text or not any("\N{REPLACEMENT CHARACTER}" in p for p in pieces)  # fmt: skip


def test_a_stream_of_a_hugging_face_tokenizer_gives_the_text(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    pieces = list(decode_stream(tokenizer, tokenizer.encode(TEXT)))
    assert "".join(pieces) == TEXT
    assert len(pieces) > 5


def test_tokens_have_bytes(folder: Path) -> None:
    for tokenizer in (ByteTokenizer(), load_tokenizer(folder)):
        parts = [tokenizer.token_bytes(token) for token in tokenizer.encode(TEXT).tolist()]
        assert b"".join(part or b"" for part in parts) == TEXT.encode()


def test_a_stream_of_broken_bytes_does_not_wait_for_ever() -> None:
    stream = decode_stream(ByteTokenizer(), iter([0xFF] * 100))
    assert "\N{REPLACEMENT CHARACTER}" in next(stream)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"tokenizer_config.json": {"eos_token": "</s>"}}, 1),
        ({"special_tokens_map.json": {"eos_token": {"content": "<s>"}}}, 0),
        ({"tokenizer_config.json": {"eos_token": None}}, 1),  # the only usual one: </s>
        ({}, 1),
    ],
)
def test_the_end_of_a_document_is_found(
    folder: Path, tmp_path: Path, config: dict[str, Any], found: int
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    for name, value in config.items():
        (tmp_path / name).write_text(json.dumps(value))
    assert load_tokenizer(tmp_path).end_of_document == found


def test_mistakes_are_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text('{"a": 1}')
    definition = json.loads((folder / "tokenizer.json").read_text())
    definition["added_tokens"] = []
    (tmp_path / "alone.json").write_text(json.dumps(definition))
    cases = [
        (lambda: load_tokenizer("nowhere"), "file 'nowhere' does not exist"),
        (lambda: load_tokenizer(tmp_path), "give 'bytes', a tokenizer.json or a folder"),
        (lambda: load_tokenizer(tmp_path / "broken.json"), "cannot be read"),
        (
            lambda: load_tokenizer(tmp_path / "other.json", "x"),
            "library cannot read tokenizer.json",
        ),
        (lambda: load_tokenizer(tmp_path / "alone.json"), "--end-token"),
        (lambda: load_tokenizer(folder, "</p>"), "did you mean '</s>'"),
        (lambda: load_tokenizer("bytes", "</s>"), "leave it out"),
        (lambda: tokenizer_from_json({"kind": "byte"}), "did you mean 'bytes'"),
        (lambda: ByteTokenizer().encode("\ud800"), "unpaired surrogate"),
        (lambda: load_tokenizer(folder).encode("\ud800"), "unpaired surrogate"),
    ]
    for mistake, words in cases:
        with pytest.raises(MeshwrightError) as said:
            mistake()
        assert words in str(said.value)


def test_the_tokenizer_of_bytes_is_the_same_in_a_folder(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for name, content in tokenizer_files(ByteTokenizer()).items():
        (tmp_path / name).write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).identity == ByteTokenizer.identity
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = "né <|endoftext|>\n\t“ü”"
    ids = theirs(text).input_ids
    assert ids == [*"né ".encode(), 256, *"\n\t“ü”".encode()]
    assert theirs.decode(ids) == text
    assert theirs.eos_token_id == 256

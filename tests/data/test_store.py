"""Packing and opening stores: what goes in comes out, damage is noticed, nothing is half written."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.word_tokenizer import word_tokenizer

from meshwright.data import (
    ByteTokenizer,
    Encoding,
    Mixture,
    Reading,
    TokenStore,
    load_tokenizer,
    pack,
)
from meshwright.data.packing import StoreWriter
from meshwright.errors import MeshwrightError

BYTES = ByteTokenizer()
STORIES = ["One.", "Two é.", "", "  \n ", "Three.\n"]


def jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return pack([jsonl(tmp_path / "a.jsonl", STORIES)], tmp_path / "a.store", BYTES).store


def test_documents_come_out_as_they_went_in(tmp_path: Path) -> None:
    done = pack([jsonl(tmp_path / "a.jsonl", STORIES)], tmp_path / "a.store", BYTES)
    store = done.store
    assert [store.text(i) for i in range(store.documents)] == ["One.", "Two é.", "Three.\n"]
    assert (done.empty, done.bad, done.files) == (2, 0, 1)
    raw = np.fromfile(tmp_path / "a.store/tokens.bin", "<u2").tolist()
    assert raw == [*b"One.", 256, *"Two é.".encode(), 256, *b"Three.\n", 256]
    assert store.document(0).tolist() == [*b"One.", 256]
    store.verify()


@settings(max_examples=40)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1))
def test_a_packed_store_equals_one_made_in_memory(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    texts = [*texts, "x"]
    folder = tmp_path_factory.mktemp("pack")
    packed = pack([jsonl(folder / "a.jsonl", texts)], folder / "a.store", BYTES).store
    kept = [text for text in texts if text.strip()]
    made = TokenStore.of_documents(kept, BYTES, name="made")
    assert packed.tokens[:].tolist() == made.tokens[:].tolist()
    assert packed.offsets[:].tolist() == made.offsets[:].tolist()
    assert packed.identity == made.identity


def test_packing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", STORIES)
    for name in ("a.store", "b.store"):
        pack([source], tmp_path / name, BYTES)
    for file in os.listdir(tmp_path / "a.store"):
        assert (tmp_path / "a.store" / file).read_bytes() == (
            tmp_path / "b.store" / file
        ).read_bytes()


def test_many_small_batches_give_what_one_large_one_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"story {i} " * (i % 7 + 1) for i in range(100)]
    source = jsonl(tmp_path / "a.jsonl", texts)
    whole = pack([source], tmp_path / "whole.store", BYTES).store
    monkeypatch.setattr("meshwright.data.packing.BATCH_CHARACTERS", 50)
    progress: list[tuple[int, int]] = []
    cut = pack(
        [source], tmp_path / "cut.store", BYTES, progress=lambda *at: progress.append(at)
    ).store
    assert cut.identity == whole.identity
    assert len(progress) > 20
    assert progress[-1] == (100, len(cut.tokens))


def test_a_vocabulary_beyond_two_bytes_takes_four(tmp_path: Path) -> None:
    words = {f"w{i}": i for i in range(70_000)} | {"</s>": 70_000}
    definition = word_tokenizer(words, unknown="w0")
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    tokenizer = load_tokenizer(tmp_path, "</s>")
    done = pack([jsonl(tmp_path / "a.jsonl", ["w69999 w3"])], tmp_path / "a.store", tokenizer)
    assert done.store.tokens.dtype == np.uint32
    assert TokenStore.open(tmp_path / "a.store").document(0).tolist() == [69_999, 3, 70_000]
    assert TokenStore.open(tmp_path / "a.store").text(0) == "w69999 w3 </s>"


def test_bad_documents_stop_packing_or_are_counted(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "one"}\n{"tex\n{"text": "two"}\n')
    with pytest.raises(MeshwrightError, match=r"line 2 is not JSON.*--skip-bad"):
        pack([source], tmp_path / "a.store", BYTES)
    assert os.listdir(tmp_path) == ["a.jsonl"]
    done = pack([source], tmp_path / "a.store", BYTES, skip_bad=True)
    assert (done.bad, done.store.documents) == (1, 2)
    assert "line 2" in done.first_bad[0]
    assert done.store.meta["bad"] == 1


def test_a_store_is_not_overwritten_unless_asked(tmp_path: Path, store: TokenStore) -> None:
    other = jsonl(tmp_path / "b.jsonl", ["Other."])
    with pytest.raises(MeshwrightError, match="--overwrite"):
        pack([other], tmp_path / "a.store", BYTES)
    assert TokenStore.open(tmp_path / "a.store").identity == store.identity
    assert pack([other], tmp_path / "a.store", BYTES, overwrite=True).store.text(0) == "Other."
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "a.store", "b.jsonl"]


def test_a_store_is_written_where_a_link_leads(tmp_path: Path, store: TokenStore) -> None:
    (tmp_path / "disk").mkdir()
    store.path.rename(tmp_path / "disk/a.store")
    (tmp_path / "a.store").symlink_to("disk/a.store")
    other = jsonl(tmp_path / "b.jsonl", ["Other."])
    assert pack([other], tmp_path / "a.store", BYTES, overwrite=True).store.text(0) == "Other."
    assert (tmp_path / "a.store").is_symlink()
    assert os.listdir(tmp_path / "disk") == ["a.store"]


def test_a_mount_point_is_refused_before_anything_is_written(
    tmp_path: Path, store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "disk")
    (tmp_path / "disk").mkdir()
    with pytest.raises(MeshwrightError, match=r"disk' is a mount point.* give a new folder in it"):
        pack([tmp_path / "a.jsonl"], tmp_path / "disk", BYTES)
    assert os.listdir(tmp_path / "disk") == []


def test_a_damaged_store_can_be_packed_again_over_itself(tmp_path: Path, store: TokenStore) -> None:
    (tmp_path / "a.store/meta.json").write_text("{")
    again = pack([tmp_path / "a.jsonl"], tmp_path / "a.store", BYTES, overwrite=True)
    assert again.store.identity == store.identity


def test_a_folder_that_is_no_store_is_never_overwritten(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    with pytest.raises(MeshwrightError, match="is not overwritten"):
        pack([precious], precious, BYTES, overwrite=True)
    assert (precious / "thesis.txt").read_text() == "years of work"


def test_a_failure_in_the_middle_leaves_the_old_store_and_no_rest(
    tmp_path: Path, store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(StoreWriter, "finish", full)
    with pytest.raises(MeshwrightError, match=r"cannot be written: No space left"):
        pack([tmp_path / "a.jsonl"], tmp_path / "a.store", BYTES, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "a.store"]
    assert TokenStore.open(tmp_path / "a.store").identity == store.identity


def test_nothing_to_pack_is_said(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match="give files or folders"):
        pack([], tmp_path / "a.store", BYTES)
    with pytest.raises(MeshwrightError, match="2 empty documents"):
        pack([jsonl(tmp_path / "a.jsonl", ["", " "])], tmp_path / "a.store", BYTES)
    with pytest.raises(MeshwrightError, match="would be empty"):
        TokenStore.of_documents([""], BYTES, name="nothing")


def test_a_document_that_is_not_there_is_named(store: TokenStore) -> None:
    for number in (3, -1):
        with pytest.raises(MeshwrightError, match="it holds 3 documents"):
            store.document(number)


def test_the_tokenizer_may_add_its_own_special_tokens_once(tmp_path: Path) -> None:
    words = word_tokenizer({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, special=["<s>", "</s>"])
    definition = words | {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}},
                       {"SpecialToken": {"id": "</s>", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]}
                               for i, token in ((0, "<s>"), (1, "</s>"))},
        },
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    tokenizer = load_tokenizer(tmp_path)
    source = tmp_path / "a.txt"
    source.write_text("a b\nb\n")
    for special, expected in ((True, [[0, 2, 3, 1], [0, 3, 1]]), (False, [[2, 3, 1], [3, 1]])):
        done = pack(
            [source], tmp_path / "a.store", tokenizer, Reading(split_on="\n"),
            Encoding(special_tokens=special), overwrite=True,
        )  # fmt: skip
        assert [done.store.document(i).tolist() for i in range(2)] == expected

    # by default, what is put before a text alone
    definition["post_processor"]["single"].pop()  # type: ignore[index]
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    tokenizer = load_tokenizer(tmp_path)
    done = pack([source], tmp_path / "b.store", tokenizer, Reading(split_on="\n"))
    assert [done.store.document(i).tolist() for i in range(2)] == [[0, 2, 3, 1], [0, 3, 1]]
    assert Mixture.of([done.store]).special_tokens
    plain = pack([source], tmp_path / "c.store", tokenizer, encoding=Encoding(special_tokens=False))
    assert not Mixture.of([done.store, plain.store]).special_tokens


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").touch()
    with pytest.raises(MeshwrightError, match=r"nothing to pack: '.*none\.jsonl' is empty"):
        pack([tmp_path / "none.jsonl"], tmp_path / "a.store", BYTES)

"""A damaged store is an error that says where, and never other tokens than those packed."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.cli.main import main
from meshwright.data import (
    FIELDS,
    ByteTokenizer,
    Mixture,
    TokenStore,
    pack,
    read_sequences,
    sequence_count,
    training_loader,
    upgrade,
)
from meshwright.data.store import hash_of_meta
from meshwright.errors import MeshwrightError

BYTES = ByteTokenizer()
SEQ = 16
STORIES = [f"Story {i} of the mill{'.' * (i % 9)}" for i in range(40)]
FILES = (
    "tokens.bin", "offsets.bin", "tokens.crc", "offsets.crc", "saved_tokenizer.json", "meta.json"
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 tokens or 8 offsets in a block: a small store has many."""
    monkeypatch.setattr("meshwright.data.blocks.BLOCK_BYTES", 64)


def write(folder: Path, stories: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": story}) + "\n" for story in stories)
    (folder / "a.jsonl").write_text(lines)
    pack([folder / "a.jsonl"], folder / "a.store", BYTES, overwrite=True)
    return folder / "a.store"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write(tmp_path, STORIES)


def everything(path: Path) -> dict[str, Any]:
    """All that training could read of a store."""
    store = TokenStore.open(path)
    sequences = read_sequences(store, range(sequence_count(store, SEQ)), SEQ)
    parts = read_sequences(store, range(sequence_count(store, SEQ)), SEQ, 3, 9)
    texts = [store.text(i) for i in range(store.documents)]
    return {name: (sequences[name].tolist(), parts[name].tolist()) for name in FIELDS} | {
        "identity": store.identity,
        "texts": texts,
    }


def test_sequences_of_a_store_in_many_blocks_equal_those_in_memory(store: Path) -> None:
    opened, made = TokenStore.open(store), TokenStore.of_documents(STORIES, BYTES, name="made")
    assert os.path.getsize(store / "offsets.crc") == 4 * 6  # 41 offsets, 8 in a block
    for seq in (1, 7, 16, 33, 1000):
        sequences = range(sequence_count(made, seq))
        for start, stop in ((0, seq), (seq // 3, seq // 2 + 1)):
            read, expected = (
                read_sequences(one, sequences, seq, start, stop) for one in (opened, made)
            )
            for name in FIELDS:
                np.testing.assert_array_equal(read[name], expected[name])
    opened.verify()


DAMAGES: dict[str, Callable[[bytearray, int, int], bytearray]] = {
    "flip": lambda data, at, by: data[:at] + bytes([data[at] ^ by]) + data[at + 1 :],
    "cut": lambda data, at, by: data[:at],
    "grow": lambda data, at, by: data + bytes([by]) * (at + 1),
    "zero": lambda data, at, by: data[:at] + bytes(min(by, len(data) - at)) + data[at + by :],
    "zero all": lambda data, at, by: bytearray(len(data)),
    "drop": lambda data, at, by: data[:at] + data[at + 1 :],
    "swap": lambda data, at, by: data[at:] + data[:at],
    "repeat": lambda data, at, by: (data[:at] + data[:at] + data)[: len(data)],
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.data.blocks.BLOCK_BYTES", 64)
        return write(tmp_path_factory.mktemp("fuzz"), STORIES)


@settings(max_examples=300, deadline=None)
@given(
    file=st.sampled_from(FILES),
    damage=st.sampled_from(["flip", "flip", "flip", *DAMAGES]),
    where=st.floats(0, 1, exclude_max=True),
    by=st.integers(1, 255),
)
def test_damage_anywhere_is_an_error_or_changes_no_token(
    packed: Path, file: str, damage: str, where: float, by: int
) -> None:
    expected = everything(packed)
    whole = (packed / file).read_bytes()
    try:
        (packed / file).write_bytes(DAMAGES[damage](bytearray(whole), int(where * len(whole)), by))
        with contextlib.suppress(MeshwrightError):
            assert everything(packed) == expected
    finally:
        (packed / file).write_bytes(whole)


def change(folder: Path, file: str, offset: int, data: bytes) -> None:
    with (folder / file).open("r+b") as stream:
        stream.seek(offset)
        stream.write(data)


def test_an_id_outside_the_vocabulary_names_store_block_and_offset(store: Path) -> None:
    change(store, "tokens.bin", 2 * 70, (60_000).to_bytes(2, "little"))
    opened = TokenStore.open(store)
    with pytest.raises(MeshwrightError) as said:
        read_sequences(opened, [4], SEQ)  # tokens 64 to 80
    assert f"'{store}' is damaged: block 2 of tokens.bin (bytes 128 to 192)" in str(said.value)
    assert "token id 60000 at offset 70 is outside the vocabulary of 257" in str(said.value)
    assert read_sequences(opened, [0], SEQ)["tokens"].size == SEQ  # other blocks can be read
    with pytest.raises(MeshwrightError, match="block 2 of tokens"):
        opened.verify()


def test_an_id_outside_the_vocabulary_under_a_right_checksum_is_an_error(store: Path) -> None:
    change(store, "tokens.bin", 2 * 70, (60_000).to_bytes(2, "little"))
    sign(store)
    with pytest.raises(MeshwrightError) as said:
        read_sequences(TokenStore.open(store), [4], SEQ)
    assert "token id 60000 at offset 70 is outside the vocabulary of 257 (block 2" in str(
        said.value
    )


def test_offsets_that_do_not_increase_under_a_right_checksum_are_an_error(store: Path) -> None:
    change(store, "offsets.bin", 8 * 20, (3).to_bytes(8, "little"))
    sign(store)
    with pytest.raises(MeshwrightError, match=r"document offset 20 is not larger.*block 2 of offs"):
        everything(store)


def sign(store: Path) -> None:
    """Give a changed store the checksums and hashes of what it holds now."""
    meta = to_version_1(store)
    for name in ("tokens.bin", "offsets.bin"):
        found = hashlib.sha256((store / name).read_bytes()).hexdigest()
        meta["files"][name]["sha256"] = found
    hashes = " ".join(meta["files"][name]["sha256"] for name in ("tokens.bin", "offsets.bin"))
    meta["identity"] = hashlib.sha256(f"{BYTES.identity} {hashes}".encode()).hexdigest()[:32]
    (store / "meta.json").write_text(json.dumps(meta))
    upgrade(store)


def to_version_1(store: Path) -> dict[str, Any]:
    """The store as an older meshwright wrote it."""
    meta: dict[str, Any] = json.loads((store / "meta.json").read_text())
    del meta["sha256"]
    for name in ("tokens.crc", "offsets.crc"):
        (store / name).unlink()
        del meta["files"][name]
    meta["version"] = 1
    (store / "meta.json").write_text(json.dumps(meta))
    return meta


def test_a_store_without_checksums_is_upgraded_on_request(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(store)
    meta = to_version_1(store)
    with pytest.raises(
        MeshwrightError, match=f"without block checksums.*meshwright data upgrade {store}"
    ):
        TokenStore.open(store)
    main(["data", "upgrade", str(store)])
    assert "tokens match their hashes" in capsys.readouterr().out
    assert everything(store) == before
    assert TokenStore.open(store).meta["sources"] == meta["sources"]
    with pytest.raises(MeshwrightError, match="already has version 2"):
        upgrade(store)


@pytest.mark.parametrize("file", ["tokens.bin", "offsets.bin", "saved_tokenizer.json"])
def test_a_damaged_store_is_not_upgraded(store: Path, file: str) -> None:
    to_version_1(store)
    change(store, file, 5, b"\x01")
    names = sorted(os.listdir(store))
    with pytest.raises(MeshwrightError, match=f"{file} differs from what was packed"):
        upgrade(store)
    assert sorted(os.listdir(store)) == names


def test_facts_that_contradict_the_files_are_not_upgraded(store: Path) -> None:
    meta = to_version_1(store)
    (store / "meta.json").write_text(json.dumps(meta | {"identity": "0" * 32}))
    with pytest.raises(MeshwrightError, match=r"meta.json contradicts the other files"):
        upgrade(store)


def test_files_of_another_store_are_noticed(store: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", [story.replace("mill", "lake") for story in STORIES])
    shutil.copy(other / "tokens.bin", store / "tokens.bin")
    with pytest.raises(MeshwrightError, match=r"block 0 of tokens.bin"):
        everything(store)
    shutil.copy(other / "tokens.crc", store / "tokens.crc")
    with pytest.raises(MeshwrightError, match=r"tokens.crc differs from what was packed"):
        TokenStore.open(store)


def test_what_changes_while_a_store_is_open_is_noticed(store: Path) -> None:
    opened = TokenStore.open(store)
    read_sequences(opened, [4], SEQ)
    change(store, "tokens.bin", 2 * 70, b"x")
    with pytest.raises(MeshwrightError, match=r"block 2 of tokens.bin"):
        read_sequences(opened, [4], SEQ)
    os.truncate(store / "tokens.bin", 80)
    with pytest.raises(MeshwrightError, match=r"tokens.bin was truncated while it was read"):
        read_sequences(opened, [4], SEQ)
    os.truncate(store / "offsets.bin", 80)
    with pytest.raises(MeshwrightError, match=r"offsets.bin was truncated while it was read"):
        read_sequences(opened, [0], SEQ)


def test_a_file_that_may_not_be_read_is_said(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refused(file: Any, *rest: Any) -> int:
        if str(file).endswith("tokens.bin"):
            raise PermissionError(errno.EACCES, "Permission denied", file)
        return real(file, *rest)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(MeshwrightError, match=r"tokens.bin cannot be read: Permission denied$"):
        TokenStore.open(store)


def test_a_disk_that_fails_is_said(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = TokenStore.open(store)

    def broken(*_: Any) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(MeshwrightError, match=r"tokens.bin cannot be read: Input/output error$"):
        read_sequences(opened, [0], SEQ)


def cut(folder: Path) -> None:
    os.truncate(folder / "tokens.bin", 100)


def grow(folder: Path) -> None:
    with (folder / "offsets.bin").open("ab") as file:
        file.write(b"12345678")


def change_meta(**changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        meta = json.loads((folder / "meta.json").read_text()) | changes
        (folder / "meta.json").write_text(json.dumps(meta | {"sha256": hash_of_meta(meta)}))

    return edit


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, "tokens.bin has 100 bytes instead of 1,9"),
        (grow, "offsets.bin has 336 bytes instead of 328: bytes were appended"),
        (lambda folder: (folder / "tokens.bin").unlink(), "tokens.bin is missing"),
        (lambda folder: (folder / "tokens.crc").unlink(), "tokens.crc is missing"),
        (lambda folder: (folder / "meta.json").unlink(), "is not a token store"),
        (lambda folder: (folder / "meta.json").write_text("{"), "meta.json cannot be read"),
        (lambda folder: (folder / "meta.json").write_text("[]"), "has another format"),
        (lambda folder: (folder / "meta.json").write_bytes(b"\xff"), "meta.json cannot be read"),
        (lambda folder: change(folder, "meta.json", 60, b"0"), "meta.json "),
        (change_meta(version=4), "has version 4, this meshwright reads versions 2 and 3"),
        (change_meta(tokens=20), "contradicts itself about tokens.bin"),
        (change_meta(files={}), "has missing or wrong fields"),
        (change_meta(tokens="many"), "has missing or wrong fields"),
        (change_meta(identity="me"), "has missing or wrong fields"),
        (change_meta(tokenizer={}), "is not the tokenizer that made the tokens"),
        (shutil.rmtree, "does not exist; make one with: meshwright data pack"),
    ],
)
def test_damage_is_noticed_at_open(store: Path, damage: Any, words: str) -> None:
    damage(store)
    with pytest.raises(MeshwrightError) as said:
        TokenStore.open(store)
    assert words in str(said.value)
    assert "\n" not in str(said.value)


def test_a_loader_gives_the_batches_before_the_damage_and_then_the_error(
    store: Path,
) -> None:
    change(store, "tokens.bin", 2 * 300, b"\x07")
    loader = training_loader(Mixture.parse(str(store)), batch=2, seq=SEQ, seed=None)
    sharding = NamedSharding(Mesh(jax.devices()[:1], ("fsdp",)), PartitionSpec())
    batches = loader.iterate(0, sharding)
    # block 9 is tokens 288 to 319; the target of the last token of step 8 is its first
    assert [next(batches)[0] for _ in range(8)] == list(range(8))
    with pytest.raises(MeshwrightError, match=r"block 9 of tokens.bin"):
        next(batches)


class Wrong(ByteTokenizer):
    """Gives an id that it should not."""

    def __init__(self, wrong: int) -> None:
        self.wrong = wrong

    def encode_batch(self, texts: Any, special_tokens: bool = False) -> Any:
        return [np.array([1, self.wrong], np.int32) for _ in texts]


@pytest.mark.parametrize("wrong", [-1, 257, 70_000])
def test_ids_outside_the_vocabulary_are_not_packed(tmp_path: Path, wrong: int) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(MeshwrightError, match=f"returned the id {wrong}, outside its vocabulary"):
        pack([tmp_path / "a.txt"], tmp_path / "a.store", Wrong(wrong))
    assert not (tmp_path / "a.store").exists()
    with pytest.raises(MeshwrightError, match=f"returned the id {wrong}, outside its vocabulary"):
        TokenStore.of_documents(["x"], Wrong(wrong), name="x")

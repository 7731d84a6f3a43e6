"""Splits of a dataset's folder: those of Hugging Face's datasets, and never mixed by accident."""

from pathlib import Path, PurePath

import pytest

from meshwright.data import ByteTokenizer, Reading, TokenStore, pack
from meshwright.data.readers import find_files
from meshwright.data.splits import split_of
from meshwright.errors import MeshwrightError


@pytest.mark.parametrize(
    ("path", "split"),
    [
        # the examples of huggingface.co/docs/hub/datasets-file-names-and-splits
        ("train.csv", "train"),
        ("my_train_file.csv", "train"),
        ("train1.csv", "train"),
        ("validation.csv", "validation"),
        ("my_validation_file.csv", "validation"),
        ("validation1.csv", "validation"),
        ("test.csv", "test"),
        ("my_test_file.csv", "test"),
        ("test1.csv", "test"),
        ("testfile.csv", None),
        ("data/train/bees.csv", "train"),
        ("data/test/more/bees.csv", "test"),
        ("data/train-00000-of-00003.csv", "train"),
        ("data/validation-00000-of-00001-9b1f.parquet", "validation"),
        ("data/random-00000-of-00003.csv", "random"),
        # other words, as datasets.data_files has them
        ("dev.jsonl", "validation"),
        ("valid/a.txt", "validation"),
        ("val.jsonl.gz", "validation"),
        ("eval.jsonl", "test"),
        ("evaluation/x.txt", "test"),
        ("training_set.txt", "train"),
        ("Test.TXT", "test"),
        ("en/c4-train.00000-of-01024.json.gz", "train"),
        ("20231101.en/train-00000-of-00041.parquet", "train"),
        ("data/train_sft-00000-of-00003.parquet", "train_sft"),
        ("test/part-00000-of-00001.parquet", "test"),
        # words inside of words, and other shards
        ("latest.txt", None),
        ("contest/trains.txt", None),
        ("books-00000-of-00002.jsonl", None),
        ("development.txt", None),
    ],
)
def test_a_path_names_the_split_that_hugging_face_takes_it_for(
    path: str, split: str | None
) -> None:
    assert split_of(PurePath(path)) == split


def made(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def found(folder: Path, split: str | None = None) -> list[str]:
    return [str(file.relative_to(folder)) for file in find_files(folder, split)[0]]


SNAPSHOT = ["data/test-00000-of-00001.parquet", "data/train-00000-of-00002.parquet"]
SNAPSHOT += ["data/train-00001-of-00002.parquet"]


def test_a_snapshot_with_a_test_split_is_not_packed_without_a_choice(tmp_path: Path) -> None:
    made(tmp_path, *SNAPSHOT, "README.md", ".cache/test.txt")
    with pytest.raises(MeshwrightError) as error:
        found(tmp_path)
    assert str(error.value) == (
        f"data '{tmp_path}' holds several splits: test (1 file: test-00000-of-00001.parquet), train "
        "(2 files: train-00000-of-00002.parquet, …); choose one, as in --split train, or --split "
        "all to pack them together"
    )
    assert found(tmp_path, "train") == SNAPSHOT[1:]
    assert found(tmp_path, "test") == SNAPSHOT[:1]
    assert found(tmp_path, "all") == SNAPSHOT


@pytest.mark.parametrize(
    ("names", "split", "chosen"),
    [
        (["train.jsonl", "dev.jsonl"], "validation", ["dev.jsonl"]),
        (["train.jsonl", "dev.jsonl"], "dev", ["dev.jsonl"]),
        (["train/a.txt", "validation/a.txt"], "train", ["train/a.txt"]),
        (["data.jsonl", "test.jsonl"], "test", ["test.jsonl"]),
        (
            ["data/test_sft-00000-of-00001.parquet", "data/train_gen-00000-of-00001.parquet",
             "data/train_sft-00000-of-00001.parquet"],
            "train_sft",
            ["data/train_sft-00000-of-00001.parquet"],
        ),
        (["test/data-00000-of-00001.arrow", "train/data-00000-of-00001.arrow"], "train",
         ["train/data-00000-of-00001.arrow"]),
    ],
)  # fmt: skip
def test_the_files_of_the_split_are_chosen_and_without_it_there_is_an_error(
    names: list[str], split: str, chosen: list[str], tmp_path: Path
) -> None:
    made(tmp_path, *names)
    assert found(tmp_path, split) == chosen
    with pytest.raises(MeshwrightError, match="holds several splits"):
        found(tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ["a.txt", "b/c.txt"],
        ["train-00000-of-00001.parquet"],
        ["test.jsonl"],
        ["notes.txt", "train.jsonl"],
        ["data/books-00000-of-00001.parquet", "data/web-00000-of-00001.parquet"],
        ["contest.txt", "latest.txt"],
    ],
)
def test_where_no_test_data_would_be_mixed_in_there_is_nothing_to_choose(
    names: list[str], tmp_path: Path
) -> None:
    assert found(made(tmp_path, *names)) == names


def test_a_split_that_is_not_there_is_refused(tmp_path: Path) -> None:
    made(tmp_path / "a", "train.txt", "test.txt")
    made(tmp_path / "b", "one.txt")
    with pytest.raises(MeshwrightError, match=r"--split tset: .*did you mean 'test'"):
        found(tmp_path / "a", "tset")
    with pytest.raises(MeshwrightError, match=r"its files name none: leave --split out"):
        found(tmp_path / "b", "train")


def test_configurations_are_given_as_folders(tmp_path: Path) -> None:
    shard = "train-00000-of-00001.parquet"
    made(tmp_path, f"main/{shard}", f"socratic/{shard}", "main/test-00000-of-00001.parquet")
    with pytest.raises(MeshwrightError, match=r"holds 2 configurations: main, socratic; give the"):
        found(tmp_path, "train")
    assert found(tmp_path / "main", "train") == [shard]
    assert len(found(tmp_path, "all")) == 3


def test_a_file_that_two_sources_name_is_not_packed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made(tmp_path, "books/train.txt", "books/test.txt"))
    with pytest.raises(MeshwrightError, match=r"'books' and './books/train.txt' both name .*train"):
        pack(["books", "./books/train.txt"], "a.store", ByteTokenizer(), Reading(split="train"))
    pack(["books"], "a.store", ByteTokenizer(), Reading(split="train"))
    assert TokenStore.open("a.store").text(0) == "books/train.txt"


def packed(sources: list[str], split: str | None = None) -> list[str]:
    """The texts of a store of these sources, each of which is its file's name."""
    store = pack(sources, "a.store", ByteTokenizer(), Reading(split=split), overwrite=True).store
    return [store.text(number) for number in range(store.documents)]


def test_files_of_several_splits_are_not_packed_without_a_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ["data/more.txt", "data/test.txt", "data/train.txt"]
    monkeypatch.chdir(made(tmp_path, *files))
    with pytest.raises(MeshwrightError) as error:
        packed(files)
    assert str(error.value) == (
        "the sources are of several splits: test (1 file: test.txt), train (1 file: train.txt); "
        "give only those of one split, or --split train, or --split all to pack them together"
    )
    assert packed(files, "train") == ["data/more.txt", "data/train.txt"]
    assert packed(files, "all") == files
    with pytest.raises(MeshwrightError, match="--split dev: none of the files is of this split"):
        packed(files[1:], "dev")


@pytest.mark.parametrize(
    "sources",
    [
        ["train/a.txt", "test/a.txt"],
        ["train", "test"],  # of train/ and test/
        ["train", "test/a.txt"],
        ["dev.jsonl", "train.jsonl"],
        ["train_sft-00000-of-00001.txt", "train_gen-00000-of-00001.txt"],
    ],
)
def test_sources_are_judged_together(
    sources: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path, "train/a.txt", "test/a.txt", "dev.jsonl", "train.jsonl",
         "train_sft-00000-of-00001.txt", "train_gen-00000-of-00001.txt")  # fmt: skip
    with pytest.raises(MeshwrightError, match="the sources are of several splits") as error:
        packed(sources)
    # a folder within which no name says train has no such split
    assert ("--split train" in str(error.value)) == all(Path(name).is_file() for name in sources)


@pytest.mark.parametrize(
    "sources",
    [
        ["test.txt"],
        ["test/a.txt", "test/test.txt"],
        ["more.txt", "test.txt"],
        ["data"],
        ["data", "more.txt"],
    ],
)
def test_sources_of_one_split_are_packed(
    sources: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = ("data/books-00000-of-00001.txt", "data/web-00000-of-00001.txt")
    monkeypatch.chdir(tmp_path)
    made(tmp_path, "test.txt", "test/a.txt", "test/test.txt", "more.txt", *shards)
    assert packed(sources)

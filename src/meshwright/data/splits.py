"""The splits of a dataset's folder by its file names, as Hugging Face's datasets library has them.

data/train-00000-of-00002.parquet     train: the name of a shard
data/test_sft-00000-of-00001.parquet  test_sft
train/a.jsonl                         train: a folder
my_dev_set.jsonl                      validation: a word of the file's name
"""

import os
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.present import count

ALL = "all"
TO_TRAIN = "to train on"  # what `split_to_train_on` chooses
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_OF_WORD = {word: split for split, words in _WORDS.items() for word in words}
# words are between these, as in train1.csv and my-test_file.txt
_SEPARATORS = re.compile(r"[-._ 0-9]+")
_SHARD = re.compile(r"(?P<split>\w+(\.\w+)*)-\d{5}-of-\d{5}.*")


def choose_split(source: str | Path, files: Sequence[Path], split: str | None) -> list[Path]:
    """The files of one split of a folder, or all where there is nothing to choose.

    `split`: its name, 'all', `TO_TRAIN`, or None, which is a mistake where test data would be mixed
    in.
    """
    if split == ALL:
        return list(files)
    splits = splits_of(Path(source), files)
    named = {name: found for name, found in splits.items() if name is not None}
    split = split_to_train_on(split, named)
    if split is None:
        if len(splits) > 1 and named.keys() != {"train"}:
            raise MeshwrightError(
                f"data '{source}' holds several splits: {_listed(splits)}; choose one, as in "
                f"--split {_likely(named)}, or --split {ALL} to pack them together"
            )
        chosen = list(files)
    else:
        name = split if split in named else _SPLIT_OF_WORD.get(split.lower(), split)
        if name not in named:
            hint = (
                did_you_mean(name, named) if named else "; its files name none: leave --split out"
            )
            raise MeshwrightError(f"--split {split}: data '{source}' has no such split{hint}")
        chosen = named[name]
    _check_configurations(source, chosen)
    return chosen


def sources_of_split(files_of: Mapping[str, Sequence[Path]], split: str | None) -> list[str]:
    """The sources to pack together: all but files that `split` leaves out by their names.

    A shell gives the files of `data/*.jsonl` one by one. Without `split`, sources of several splits
    are a mistake. One that is given alone is packed, whatever its name says.

    Arguments:
        files_of: source → its files; of a folder those that `choose_split` has chosen
        split: as for `choose_split`
    """
    local = [source for source in files_of if os.path.exists(source)]  # not of the Hub
    if split == ALL or len(files_of) == 1 or not local:
        return list(files_of)
    base = os.path.commonpath([Path(source).absolute().parent for source in local])
    splits: dict[str | None, list[Path]] = {}
    split_of_file: dict[str, str | None] = {}  # of sources that are files
    for source in local:
        by_source = _known(split_of(Path(source).absolute().relative_to(base)))
        if os.path.isfile(source):
            split_of_file[source] = by_source
        for file in files_of[source]:
            by_file = None if file == Path(source) else split_of(file.relative_to(source))
            splits.setdefault(_known(by_file) or by_source, []).append(file)
    named = {name: files for name, files in splits.items() if name is not None}
    split = split_to_train_on(split, named)
    if split is None:
        if len(named) > 1:
            only_files = len(split_of_file) == len(files_of)
            choice = f"or --split {_likely(named)}, " if only_files else ""
            raise MeshwrightError(
                f"the sources are of several splits: {_listed(named)}; give only those of one "
                f"split, {choice}or --split {ALL} to pack them together"
            )
        return list(files_of)
    name = split if split in named else _SPLIT_OF_WORD.get(split.lower(), split)
    kept = [source for source in files_of if split_of_file.get(source) in (None, name)]
    if not kept:
        raise MeshwrightError(
            f"--split {split}: none of the files is of this split; there are {_listed(named)}"
        )
    return kept


def split_to_train_on(split: str | None, names: Container[str]) -> str | None:
    """Of `TO_TRAIN`: train, where a dataset has it; any other split stays."""
    if split != TO_TRAIN:
        return split
    return "train" if "train" in names else None


def splits_of(folder: Path, files: Sequence[Path]) -> dict[str | None, list[Path]]:
    """Split → its files, in order; None: files that name no split. Empty if none does."""
    splits: dict[str | None, list[Path]] = {}
    for file in files:
        splits.setdefault(split_of(file.relative_to(folder)), []).append(file)
    # shards of other names are splits only beside a known one: books-00000-of-00002 is none
    if not any(_in_words(name) for name in splits if name is not None):
        return {}
    return splits


def split_of(file: PurePath) -> str | None:
    """The split that a path inside a dataset's folder names.

    >>> split_of(PurePath("data/dev-00000-of-00001.parquet")), split_of(PurePath("latest.txt"))
    ('validation', None)
    """
    shard = _SHARD.fullmatch(file.name)
    if shard is not None and _in_words(shard["split"]):
        return _SPLIT_OF_WORD.get(shard["split"].lower(), shard["split"])
    for part in file.parts[:-1]:
        if split := _in_words(part):
            return split
    if shard is not None and file.parent.name == "data":
        return shard["split"]
    return _in_words(file.name)


def _in_words(name: str) -> str | None:
    words = (_SPLIT_OF_WORD.get(word) for word in _SEPARATORS.split(name.lower()))
    return next(filter(None, words), None)


def _known(name: str | None) -> str | None:
    return name if name and _in_words(name) else None


def _likely(names: Iterable[str]) -> str:
    return min(names, key=lambda name: _in_words(name) != "train")


def _listed(splits: Mapping[Any, Sequence[Path]]) -> str:
    return ", ".join(
        f"{name or 'no split named'} ({count(len(files), 'file')}: {files[0].name}"
        + (", …)" if len(files) > 1 else ")")
        for name, files in splits.items()
    )


def _check_configurations(source: str | Path, files: Sequence[Path]) -> None:
    """Folders that each hold the shards of a split are configurations: often the same texts."""
    shards = ((file, _SHARD.fullmatch(file.name)) for file in files)
    folders = list(
        dict.fromkeys(file.parent for file, shard in shards if shard and _in_words(shard["split"]))
    )
    if len(folders) > 1:
        names = ", ".join(folder.name for folder in folders[:6]) + ", …" * (len(folders) > 6)
        raise MeshwrightError(
            f"data '{source}' holds {len(folders)} configurations: {names}; give the folders to "
            f"pack, such as {folders[0]}, or --split {ALL} to pack them together"
        )

"""Models and datasets by their name on the Hugging Face Hub: the files needed, from its cache.

folder = local_folder("meta-llama/Llama-3.2-1B", MODEL)
"""

import contextlib
import functools
import glob
import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

from meshwright.errors import MeshwrightError, did_you_mean, not_installed
from meshwright.files import cannot_be_written, print_line
from meshwright.present import bytes_text, count

Kind = Literal["model", "dataset"]
Choose = Callable[[Sequence[str]], Sequence[str]]

CONFIG = ("config.json",)
# with * for what differs in name: tokenizer.model.v3, additional_chat_templates/tool_use.jinja
TOKENIZER = (
    "tokenizer.json", "tokenizer.model*", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/*.jinja", "generation_config.json",
)  # fmt: skip
WEIGHTS = ("model.safetensors", "model-?????-of-?????.safetensors")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")  # of PEFT
MODEL = (*CONFIG, *TOKENIZER, *WEIGHTS, "model.safetensors.index.json")

_WORD = r"[A-Za-z0-9](?:[\w.-]{0,94}\w)?"
# runs/NAME is a run, which may not be there, and never a name on the Hub
_NAME = re.compile(rf"(?!runs/)({_WORD}/{_WORD})(?:@([\w./-]+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# a name that ends so is that of a file or token store which is not there
_FILE = re.compile(r"\.(jsonl?|txt|md|gz|zst|parquet|arrow|store|safetensors|jinja|bin)", re.I)
_SNAPSHOT = re.compile(r"(?:models|datasets)--(.+?)--(.+)")
_PLAIN_EVERY_S = 10.0


class HubName(NamedTuple):
    """`org/name` or `org/name@revision`."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def hub_name(text: str | os.PathLike[str]) -> HubName | None:
    """The name that a text is; None for a path. A file or folder that is here comes first.

    >>> hub_name("meta-llama/Llama-3.2-1B@main"), hub_name("./meta-llama/Llama-3.2-1B")
    (HubName(repo='meta-llama/Llama-3.2-1B', revision='main'), None)
    """
    match = _NAME.fullmatch(text) if isinstance(text, str) else None  # pathlib drops the ./
    if match is None or _FILE.fullmatch(Path(match[1]).suffix) or Path(text).exists():
        return None
    return HubName(match[1], match[2])


def check_folder(folder: Path) -> None:
    """Raise if a folder of a run or of a model is not one."""
    if not folder.is_dir():
        why = "is a file" if folder.exists() else "does not exist"
        raise MeshwrightError(
            f"{folder} {why}; give the folder of a run (as in meshwright train --run FOLDER) or of "
            "a Hugging Face model"
        )


def local_folder(path: str | os.PathLike[str], files: Sequence[str]) -> Path:
    """The folder of a model: the path itself, or for a Hub name that of its files in the cache.

    `files` are patterns of what is needed, such as CONFIG or MODEL; the rest is not downloaded.
    Where an adapter of PEFT is named instead of a model, its files are.
    """
    name = hub_name(path)
    if name is None:
        return Path(path)

    def choose(names: Sequence[str]) -> Sequence[str]:
        is_adapter = ADAPTER[0] in names and CONFIG[0] not in names
        needed = (*ADAPTER, *TOKENIZER) if is_adapter and set(WEIGHTS) <= set(files) else files
        _check_holds(name, names, needed)
        return [one for one in names if any(fnmatchcase(one, pattern) for pattern in needed)]

    return _folder(name, "model", choose)


def dataset_folder(path: str | os.PathLike[str], choose: Choose) -> Path:
    """The folder of a dataset: the path itself, or for a Hub name that of its files in the cache.

    `choose` picks the files to download from the names of all.
    """
    name = hub_name(path)
    return Path(path) if name is None else _folder(name, "dataset", choose)


def pinned(path: str, kind: Kind = "model") -> str:
    """A Hub name with its commit, so that it means the same weights or data for ever."""
    name = hub_name(path)
    return path if name is None else f"{name.repo}@{_commit(name, kind)}"


def name_of_snapshot(folder: Path) -> HubName | None:
    """The name of what a folder of the Hub's cache holds; None for any other folder."""
    repo = _SNAPSHOT.fullmatch(folder.parent.parent.name)
    if repo is None or folder.parent.name != "snapshots" or not _COMMIT.fullmatch(folder.name):
        return None
    return HubName(f"{repo[1]}/{repo[2]}", folder.name)


def _check_holds(name: HubName, names: Sequence[str], files: Sequence[str]) -> None:
    """Raise if a repository has no config.json, or no weights, where they are needed."""
    kinds = (CONFIG, "config.json"), (WEIGHTS, "weights in safetensors files")
    for needed, what in (*kinds, (ADAPTER[:1], f"adapter of PEFT ({ADAPTER[0]})")):
        wanted = set(needed) <= set(files)
        if wanted and not any(fnmatchcase(one, pattern) for one in names for pattern in needed):
            if _library(name, "model").is_offline_mode():
                raise MeshwrightError(_not_cached(name, "model"))
            there = ", ".join([one for one in names if not one.startswith(".")][:8])
            raise MeshwrightError(f"{str(name)!r} on the Hub has no {what}; it has {there}")


def _folder(name: HubName, kind: Kind, choose: Choose) -> Path:
    library, commit = _library(name, kind), _commit(name, kind)
    cache = Path(library.constants.HF_HUB_CACHE).expanduser().resolve()
    repo = library.file_download.repo_folder_name(repo_id=name.repo, repo_type=kind)
    folder = cache / repo / "snapshots" / commit
    with _errors_in_one_line(name, kind):
        sizes = _tree(name, commit, kind, folder)
        wanted = list(choose(list(sizes)))
        missing = [file for file in wanted if not (folder / file).is_file()]
        if not missing:
            return folder
        if library.is_offline_mode():
            raise MeshwrightError(_not_cached(name, kind))
        total = sum(sizes[file] for file in missing)
        print_line(
            f"downloading {name.repo} ({commit[:8]}): {count(len(missing), 'file')}, "
            f"{bytes_text(total)}, to {cache}",
            sys.stderr,
        )
        with _progress(name.repo, total, library) as bar:
            library.snapshot_download(
                name.repo, repo_type=kind, revision=commit, tqdm_class=bar,
                allow_patterns=[glob.escape(file) for file in missing],
            )  # fmt: skip
        _verify(name, kind, commit, folder)
    return folder


@functools.cache  # one revision for all that a process reads
def _commit(name: HubName, kind: Kind) -> str:
    library = _library(name, kind)
    with _errors_in_one_line(name, kind):
        return str(
            _api(library)
            .resolve_revision(
                name.repo, repo_type=kind, revision=name.revision,
                local_files_only=library.is_offline_mode(),
            )
            .resolved
        )  # fmt: skip


def _tree(name: HubName, commit: str, kind: Kind, folder: Path) -> dict[str, int]:
    """The files of a repository and their sizes; if the Hub does not tell, those in the cache."""
    library = _library(name, kind)
    at = {"repo_type": kind, "revision": commit}
    with contextlib.suppress(library.errors.CachedRepoTreeNotFoundError):
        return {file.path: file.size for file in library.get_cached_repo_tree(name.repo, **at)}
    try:
        entries = _api(library).list_repo_tree(name.repo, recursive=True, **at)
        return {entry.path: entry.size for entry in entries if hasattr(entry, "size")}
    except (OSError, library.errors.HTTPError):
        files = [file for file in folder.rglob("*") if file.is_file()]
        if not files:
            raise
        return {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}


def _verify(name: HubName, kind: Kind, commit: str, folder: Path) -> None:
    """Raise if what came is not what the Hub has; it is deleted."""
    library = _library(name, kind)
    result = _api(library).verify_repo_checksums(name.repo, repo_type=kind, revision=commit)
    for mismatch in result.mismatches:
        file = folder / mismatch["path"]
        for path in (file.resolve(), file):
            path.unlink(missing_ok=True)
    if result.mismatches:
        damaged = ", ".join(mismatch["path"] for mismatch in result.mismatches[:4])
        raise MeshwrightError(
            f"{damaged} of {name.repo!r} came with another checksum than the Hub names, and was "
            f"deleted; run the command again, or download by hand: {_by_hand(name, kind)}"
        )


def _library(name: HubName, kind: Kind) -> Any:
    try:
        library = importlib.import_module("huggingface_hub")
        importlib.import_module("huggingface_hub.errors")
    except ImportError:
        raise MeshwrightError(
            f"{str(name)!r} is not a folder here, and names of the Hugging Face Hub need "
            f"huggingface_hub, which is not installed: {not_installed('hub')}; or download by "
            f"hand: {_by_hand(name, kind)}"
        ) from None
    return library


def _api(library: Any) -> Any:
    return library.HfApi(library_name="meshwright")


def _by_hand(name: HubName, kind: Kind) -> str:
    revision = "" if name.revision is None else f" --revision {name.revision}"
    dataset = " --repo-type dataset" if kind == "dataset" else ""
    return f"hf download {name.repo}{dataset}{revision} --local-dir DIR, then give ./DIR"


def _not_cached(name: HubName, kind: Kind) -> str:
    return (
        f"{str(name)!r} is not a folder here, and not all of it is in the cache of the Hugging "
        "Face Hub, while HF_HUB_OFFLINE forbids downloads; unset it, or where there is a network: "
        f"{_by_hand(name, kind)}"
    )


@contextlib.contextmanager
def _errors_in_one_line(name: HubName, kind: Kind) -> Iterator[None]:
    library = _library(name, kind)
    errors = library.errors
    try:
        yield
    except MeshwrightError:
        raise
    except OSError as reason:
        if reason.errno is not None and not isinstance(reason, ConnectionError):
            raise cannot_be_written(Path(library.constants.HF_HUB_CACHE), reason) from None
        raise MeshwrightError(_explained(reason, name, kind, library)) from None
    except (errors.HTTPError, errors.RevisionResolutionError, ValueError) as reason:
        raise MeshwrightError(_explained(reason, name, kind, library)) from None


def _explained(reason: Exception, name: HubName, kind: Kind, library: Any) -> str:
    """What to do about an error of huggingface_hub."""
    errors, by_hand = library.errors, _by_hand(name, kind)
    page = "/".join([library.constants.ENDPOINT, *(["datasets"] * (kind == "dataset")), name.repo])
    log_in = "log in with `hf auth login`, or set HF_TOKEN"
    status = getattr(getattr(reason, "response", None), "status_code", None)
    if isinstance(reason, errors.GatedRepoError):
        return f"{name.repo!r} is gated: accept its terms at {page}, and {log_in}"
    if isinstance(reason, errors.RepositoryNotFoundError):
        return (
            f"{name.repo!r} is neither a folder here nor a {kind} on the Hugging Face Hub"
            f"{_similar(name.repo, kind, library)}; if it is private, {log_in}"
        )
    if isinstance(reason, errors.RevisionNotFoundError):
        return f"{name.repo!r} on the Hub has no revision {name.revision!r}; see {page}/tree/main"
    if status in (401, 403):
        return f"the Hub refuses the token for {name.repo!r} ({status}): {log_in} to another one"
    if library.is_offline_mode():
        return _not_cached(name, kind)
    if isinstance(reason, errors.RevisionResolutionError):
        return (
            f"{str(name)!r} is not a folder here, and the Hugging Face Hub cannot be reached "
            f"({_first_line(reason.__cause__ or reason)}); try again, or where there is a network: "
            f"{by_hand}"
        )
    return (
        f"the download of {str(name)!r} failed ({_first_line(reason)}); run the command again, "
        f"files that are complete are kept; or download by hand: {by_hand}"
    )


def _first_line(reason: BaseException) -> str:
    return str(reason).strip().partition("\n")[0].rstrip(".") or type(reason).__name__


def _similar(repo: str, kind: Kind, library: Any) -> str:
    """The end of a sentence: a name on the Hub like this one, of the same owner or any."""
    owner, _, name = repo.partition("/")
    api = _api(library)
    search = api.list_models if kind == "model" else api.list_datasets
    try:
        repos = [*search(author=owner, limit=200), *search(search=name, limit=20)]
    except (OSError, library.errors.HTTPError, ValueError):
        return ""
    hint = did_you_mean(repo, [similar.id for similar in repos])
    return f" ({hint.removeprefix('; ')})" if "did you mean" in hint else ""


@contextlib.contextmanager
def _progress(repo: str, total: int, library: Any) -> Iterator[type]:
    """A class that huggingface_hub takes for tqdm: one line of ours says how much has come."""
    from rich.console import Console

    console, done, printed_at = Console(stderr=True), 0, time.monotonic()
    status = console.status(f"downloading {repo}") if console.is_terminal else None

    class Bar(library.utils.tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, name: str | None = None, **named: Any) -> None:
            self._is_bytes = name == "huggingface_hub.snapshot_download"
            super().__init__(*args, **(named | {"disable": True}))

        def update(self, n: float | None = 1) -> None:
            nonlocal done, printed_at
            if not self._is_bytes:
                return
            done += int(n or 0)
            text = f"downloading {repo}: {bytes_text(done)} of {bytes_text(total)}"
            if status is not None:
                status.update(text)
            elif time.monotonic() - printed_at > _PLAIN_EVERY_S:
                printed_at = time.monotonic()
                print_line(text, sys.stderr)

    with status or contextlib.nullcontext():
        yield Bar

"""Data files and datasets that are packed when they are first trained on.

chat.jsonl                    what `--data` names
chat.jsonl.1a2b3c4d.store     its token store, for this content, tokenizer and chat template

org/name                      a dataset on the Hugging Face Hub, whose train split it is
./name.1a2b3c4d.store         its token store, in the working directory
"""

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from meshwright.data.examples import Encoding
from meshwright.data.packing import NoTemplateError, Packed, pack
from meshwright.data.readers import Reading, find_files, kind_of
from meshwright.data.splits import TO_TRAIN
from meshwright.data.store import TokenStore
from meshwright.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_folder
from meshwright.errors import MeshwrightError, sentence
from meshwright.files import cannot_be_written
from meshwright.hub import hub_name, pinned
from meshwright.present import count

PACKING = 2  # a new number packs every file again


def open_or_pack(
    path: str,
    tokenizer: str | Tokenizer = "bytes",
    say: Callable[[str], None] = print,
    *,
    template: Path | None = None,
) -> TokenStore:
    """The token store in that folder, or that of a data file, which is packed on first use.

    Arguments:
        path: a token store, a file that `meshwright data pack` takes, or a dataset on the Hub.
        tokenizer: itself, or as `load_tokenizer` takes it: its folder may hold a template.
        say: told when it is packed.
        template: the folder of the chat template, if it is another, or the tokenizer has none.
    """
    file, on_hub = Path(path), hub_name(path)
    if kind_of(file) is not None and not file.exists():
        raise MeshwrightError(f"data file '{file}' does not exist")
    if on_hub is None and (not file.is_file() or kind_of(file) is None):
        return TokenStore.open(path)
    from meshwright.data.chat_templates import load_chat_template  # needs jinja2

    folder = template
    if isinstance(tokenizer, str):
        folder = folder or tokenizer_folder(tokenizer)
        tokenizer = load_tokenizer(tokenizer)
    encoding = Encoding()
    if folder is not None:
        encoding = Encoding(template=load_chat_template(folder), template_name=str(folder))
    if on_hub is None:
        source, content = path, _content(file)
    else:  # the commit says what it holds
        source = content = pinned(path, "dataset")
        file = Path(on_hub.repo.partition("/")[2])
    store = file.with_name(f"{file.name}.{_digest(content, tokenizer, encoding)}.store")
    if not store.exists():
        with _alone(store):
            if not store.exists():  # another process of the run was faster
                done = _pack(source, store, tokenizer, encoding)
                said, where = source, "beside it"
                if on_hub is not None:
                    files = [one.name for one in find_files(source, TO_TRAIN)[0]]
                    more = ", …" if len(files) > 3 else ""
                    said, where = f"{source} ({', '.join(files[:3])}{more})", "here"
                say(_told(said, where, done))
    return TokenStore.open(store)


def _pack(source: str, store: Path, tokenizer: Tokenizer, encoding: Encoding) -> Packed:
    try:
        reading = Reading(split=TO_TRAIN)
        return pack([source], store, tokenizer, reading, encoding)
    except MeshwrightError as mistake:
        name = Path(source.partition("@")[0]).stem
        template = " --chat-template chatml" if isinstance(mistake, NoTemplateError) else ""
        raise MeshwrightError(
            f"{sentence(str(mistake))} '{source}' is packed on first use; to train with "
            f"--data {name}.store, pack it with other settings: meshwright data pack "
            f"{source} --out {name}.store{template}"
        ) from None


def _content(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as reason:
        raise MeshwrightError(f"data '{file}' cannot be read: {reason.strerror}") from None


def _digest(content: str, tokenizer: Tokenizer, encoding: Encoding) -> str:
    """Of all that decides the tokens."""
    used = encoding.template
    template = "" if used is None else json.dumps([used.text, used.tool_text, used.tokens])
    decides = "\n".join((str(PACKING), content, tokenizer.identity, template))
    return hashlib.sha256(decides.encode()).hexdigest()[:8]


def _told(source: str, where: str, done: Packed) -> str:
    noun = "document" if done.store.weights is None else "example"
    return (
        f"packed {source} on first use, into {done.store.name} {where}: "
        f"{count(done.store.documents, noun)}, {len(done.store.tokens):,} tokens, "
        f"{done.store.tokenizer.kind} tokenizer"
        + "".join(f"; format: {words}" for words in done.formats)
    )


@contextlib.contextmanager
def _alone(store: Path) -> Iterator[None]:
    """One process of this host at a time."""
    lock = store.with_name(f".{store.name}.lock")
    try:
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
    except OSError as reason:
        raise cannot_be_written(store, reason) from None

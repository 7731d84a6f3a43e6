"""Data files that are packed when they are first trained on.

chat.jsonl                    what `--data` names
chat.jsonl.1a2b3c4d.store     its token store, for this content, tokenizer and chat template
"""

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from meshwright.data.examples import Encoding
from meshwright.data.packing import Packed, pack
from meshwright.data.readers import kind_of
from meshwright.data.store import TokenStore
from meshwright.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_folder
from meshwright.errors import MeshwrightError, sentence
from meshwright.present import count

PACKING = 2  # a new number packs every file again


def open_or_pack(
    path: str, tokenizer_name: str = "bytes", say: Callable[[str], None] = print
) -> TokenStore:
    """The token store in that folder, or that of a data file, which is packed on first use.

    Arguments:
        path: a token store, or a file that `meshwright data pack` takes.
        tokenizer_name: as `load_tokenizer` takes it; its folder may hold a chat template.
        say: told when a file is packed.
    """
    file = Path(path)
    if kind_of(file) is not None and not file.exists():
        raise MeshwrightError(f"data file '{file}' does not exist")
    if not file.is_file() or kind_of(file) is None:
        return TokenStore.open(path)
    from meshwright.data.chat_templates import load_chat_template  # needs jinja2

    tokenizer = load_tokenizer(tokenizer_name)
    folder = tokenizer_folder(tokenizer_name)
    encoding = Encoding(template=load_chat_template(folder), template_name=str(folder))
    store = file.with_name(f"{file.name}.{_digest(file, tokenizer, encoding)}.store")
    if not store.exists():
        with _alone(store):
            if not store.exists():  # another process of the run was faster
                say(_told(file, _pack(file, store, tokenizer, encoding)))
    return TokenStore.open(store)


def _pack(file: Path, store: Path, tokenizer: Tokenizer, encoding: Encoding) -> Packed:
    try:
        return pack([file], store, tokenizer, encoding=encoding)
    except MeshwrightError as mistake:
        raise MeshwrightError(
            f"{sentence(str(mistake))} '{file}' is packed on first use; to train with "
            f"--data {file.stem}.store, pack it with other settings: meshwright data pack "
            f"{file} --out {file.stem}.store"
        ) from None


def _digest(file: Path, tokenizer: Tokenizer, encoding: Encoding) -> str:
    """Of all that decides the tokens."""
    try:
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as reason:
        raise MeshwrightError(f"data '{file}' cannot be read: {reason.strerror}") from None
    used = encoding.template
    template = "" if used is None else json.dumps([used.text, used.tool_text, used.tokens])
    decides = "\n".join((str(PACKING), content, tokenizer.identity, template))
    return hashlib.sha256(decides.encode()).hexdigest()[:8]


def _told(file: Path, done: Packed) -> str:
    noun = "document" if done.store.weights is None else "example"
    return (
        f"packed {file} on first use, into {done.store.name} beside it: "
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
        raise MeshwrightError(f"'{store}' cannot be written: {reason.strerror or reason}") from None

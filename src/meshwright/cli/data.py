"""`meshwright data`: text, or rows to find needles in, into a token store; what is in one."""

import codecs
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from meshwright.data import (
    EMBEDDED,
    Needles,
    Packed,
    Reading,
    TokenStore,
    embedded_corpus,
    load_tokenizer,
    sequence_count,
    upgrade,
    write_needles,
)
from meshwright.data import pack as pack_store
from meshwright.errors import MeshwrightError
from meshwright.present import count


@dataclass(frozen=True)
class Pack:
    """Turn text into a packed token store to train on.

    meshwright data pack books/ --out books.store --tokenizer llama/tokenizer.json
    """

    sources: tyro.conf.Positional[tuple[str, ...]]
    """Files (.txt, .jsonl, .parquet, .arrow; .txt.gz, .jsonl.gz) and folders of them."""
    out: Path
    """The folder to write the store to."""
    tokenizer: str = "bytes"
    """"bytes", a Hugging Face tokenizer.json, or a folder that holds one."""
    end_token: str | None = None
    """The token that ends each document; by default the tokenizer's eos_token."""
    field: str = "text"
    """The field of a JSON line, or the column, that holds the text."""
    split_on: str | None = None
    """What stands between documents in text files, such as '\\n\\n'; else each file is one."""
    special_tokens: bool = False
    """Also add what the tokenizer puts around a text, such as begin-of-text."""
    skip_bad: bool = False
    """Leave out and count documents that cannot be read, instead of stopping."""
    overwrite: bool = False
    """Replace the store if there is one."""


@dataclass(frozen=True)
class Needle:
    """Make rows that hide `!key value` pairs in hay and ask for them at the end.

    meshwright data needle needle.store --rows 10000 --seq 256
    """

    out: tyro.conf.Positional[Path]
    """The folder to write the store to; train on it with the same --seq."""
    rows: int
    """How many."""
    seq: int
    """Tokens of a row."""
    needles: int = Needles.needles
    """Pairs hidden in a row, each with a key of its own."""
    questions: int | None = None
    """How many of them are asked for, each once; by default all."""
    key_length: int = Needles.key_length
    """Letters of a key."""
    value_length: int = Needles.value_length
    """Letters of a value."""
    seed: int = 0
    """The same seed gives the same rows."""
    overwrite: bool = False
    """Replace the store if there is one."""


@dataclass(frozen=True)
class Info:
    """Show what a token store holds."""

    store: tyro.conf.Positional[str]
    """The folder of a store, or "embedded"."""
    seq: int = 2048
    """Tokens in a row, to say how many rows there are."""
    document: int | None = None
    """Print the text of this document instead; the first is 0."""
    verify: bool = False
    """Read the whole store and compare it with its checksums and hashes."""


@dataclass(frozen=True)
class Upgrade:
    """Check a store packed by an older version and add the checksums of its blocks.

    meshwright data upgrade books.store
    """

    store: tyro.conf.Positional[Path]
    """The folder of the store; its tokens and its identity stay as they are."""


def data(
    # what is asked for, not the work itself: tyro would dress the work's errors as its own
    command: tyro.conf.OmitSubcommandPrefixes[
        Annotated[Pack, tyro.conf.subcommand("pack")]
        | Annotated[Needle, tyro.conf.subcommand("needle")]
        | Annotated[Info, tyro.conf.subcommand("info")]
        | Annotated[Upgrade, tyro.conf.subcommand("upgrade")]
    ],
) -> None:
    """Make token stores, and look into them."""
    if isinstance(command, Pack):
        pack(command)
    elif isinstance(command, Needle):
        needle(command)
    elif isinstance(command, Upgrade):
        store = upgrade(command.store)
        print(f"upgraded {command.store}: {len(store.tokens):,} tokens match their hashes")
    else:
        info(command)


def pack(asked: Pack) -> None:
    """Pack, show how far it is on a terminal, and say what was done."""
    split_on = None if asked.split_on is None else _unescaped(asked.split_on)
    tokenizer = load_tokenizer(asked.tokenizer, asked.end_token)
    started = time.monotonic()
    with Console(stderr=True).status("packing") as status:
        done = pack_store(
            asked.sources,
            asked.out,
            tokenizer,
            Reading(asked.field, split_on),
            special_tokens=asked.special_tokens,
            skip_bad=asked.skip_bad,
            overwrite=asked.overwrite,
            progress=lambda documents, tokens: status.update(
                f"packing: {documents:,} documents, {tokens:,} tokens, "
                f"{tokens / max(time.monotonic() - started, 1e-3) / 1e6:.1f} M tokens/s"
            ),
        )
    print(_summary(done, asked.out))
    for problem in done.first_bad:
        print(f"  left out: {problem}", file=sys.stderr)


def needle(asked: Needle) -> None:
    """Write the rows and say how to go on."""
    settings = Needles(asked.needles, asked.questions, asked.key_length, asked.value_length)
    store = write_needles(settings, asked.out, asked.rows, asked.seq, asked.seed, asked.overwrite)
    print(
        f"wrote {asked.out}: {count(store.documents, 'row')} of {asked.seq:,} tokens, each "
        f"{count(settings.needles, 'needle')} and {count(settings.asked, 'question')}; train with "
        f"--data {asked.out} --seq {asked.seq}"
    )


def info(asked: Info) -> None:
    """Print a store's facts, or one of its documents."""
    if asked.seq < 1:
        raise MeshwrightError(f"--seq {asked.seq} must be at least 1")
    store = embedded_corpus() if asked.store == EMBEDDED else TokenStore.open(asked.store)
    if asked.verify:
        store.verify()
    if asked.document is not None:
        print(store.text(asked.document))
        return
    Console().print(_facts(store, asked.seq, asked.verify))


def _summary(done: Packed, out: Path) -> str:
    store = done.store
    left_out = [
        count(number, what)
        for number, what in ((done.empty, "empty document"), (done.bad, "bad document"))
        if number
    ]
    lines = [
        f"wrote {out}: {len(store.tokens):,} tokens, {count(store.documents, 'document')} of "
        f"{count(done.files, 'file')}"
        + (f"; left out {' and '.join(left_out)}" if left_out else "")
    ]
    if done.other_files:
        names = ", ".join(Path(name).name for name in done.other_files[:4])
        more = ", …" if len(done.other_files) > 4 else ""
        lines.append(f"not read, of another kind: {names}{more}")
    return "\n".join(lines)


def _facts(store: TokenStore, seq: int, verified: bool) -> Table:
    tokenizer = store.tokenizer
    lengths = len(store.tokens) / store.documents
    table = Table(box=None, pad_edge=False, show_header=False)
    end = tokenizer.end_of_document
    facts = {
        "store": store.name,
        "tokens": f"{len(store.tokens):,} ({store.tokens.dtype.name})",
        "documents": f"{store.documents:,}, {lengths:,.0f} tokens each on average",
        "rows": f"{sequence_count(store, seq):,} of {seq:,} tokens",
        "tokenizer": f"{tokenizer.kind}, vocabulary {tokenizer.vocab:,}, document ends with {end}",
        "left out": ", ".join(
            f"{store.meta[why]:,} {why}" for why in ("empty", "bad") if store.meta.get(why)
        ),
        "sources": ", ".join(source["path"] for source in store.meta.get("sources", [])),
        "identity": store.identity,
        "checksums": "as packed" if verified else "",
    }
    for name, fact in facts.items():
        if fact:
            table.add_row(name, fact)
    return table


def _unescaped(text: str) -> str:
    """`\\n` as typed in a shell becomes a line end; other characters stay as they are."""
    try:
        value = codecs.decode(text.encode("latin-1", "backslashreplace"), "unicode_escape")
    except UnicodeDecodeError as reason:
        raise MeshwrightError(f"--split-on {text!r} is not readable: {reason.reason}") from None
    if not value:
        raise MeshwrightError("--split-on is empty; give what stands between two documents")
    return value

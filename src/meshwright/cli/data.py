"""`meshwright data`: make token stores from text, and inspect them."""

import codecs
import dataclasses
import sys
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.data import (
    EMBEDDED,
    Base64Dtype,
    Encoding,
    Fields,
    LossOn,
    Packed,
    Reading,
    Tokenizer,
    TokenStore,
    Weigh,
    documents_page,
    embedded_corpus,
    load_chat_template,
    load_tokenizer,
    sequence_count,
    sequence_table,
    shown_documents,
    special_tokens,
    tokenizer_folder,
)
from meshwright.data import pack as pack_store
from meshwright.data import upgrade as upgrade_store
from meshwright.errors import MeshwrightError
from meshwright.present import count, write_page


@dataclasses.dataclass(frozen=True)
class Pack:
    """What to read, and how to encode it."""

    sources: tuple[str, ...]
    """Input files (.txt, .md, .jsonl, .json, all also with .gz or .zst, .parquet, .arrow), folders
    of them, or datasets on the Hugging Face Hub (org/name, org/name@revision)."""
    out: Path = dataclasses.field(kw_only=True)
    """Folder of the new token store."""
    tokenizer: str = "bytes"
    """Tokenizer: "bytes", a Hugging Face tokenizer.json, a folder that contains one, or a model on
    the Hub."""
    end_token: str | None = None
    """Token that ends each document; the tokenizer's eos_token by default."""
    field: str | None = None
    """JSON field or table column that contains the text; without it, records of examples are
    recognized, and otherwise it is "text"."""
    format: str | None = None
    """Format of records of examples: messages, sharegpt, preference, completion, instruction or
    inputs-targets; recognized by default."""
    chat_template: Path | None = None
    """Chat template (jinja2) instead of that of the tokenizer's folder, or "chatml"."""
    loss_on: LossOn = "answers"
    """Tokens of examples that have loss: the assistant's answers and completions, or all."""
    weigh: Weigh = "tokens"
    """What counts equally in the loss: every token, or every example however long."""
    weight_field: str | None = None
    """Field that contains the weight of an example; by default each has 1."""
    fields: str = ""
    """EasyLM's fields: "[prompt],answer" has loss on the answer alone; also <|bos|>, <|17|>, {ids},
    a+b."""
    fields_from_example: str = ""
    """EasyLM: field that contains the fields of its record."""
    subfield_separator: str = " "
    """EasyLM: text between fields that are joined with +."""
    prepend_text: str = ""
    """EasyLM: text before the first field."""
    add_bos_token: bool = True
    """EasyLM: begin with the tokenizer's BOS token, without loss."""
    add_eos_token: bool = True
    """EasyLM: end with the tokenizer's end-of-document token, with loss."""
    base64_token_dtype: Base64Dtype = "int32"
    """EasyLM: type of base64-encoded tokens."""
    split: str | None = None
    """Split of a dataset's folder or of several files, such as train (data/train-*.parquet, train/,
    train.jsonl); "all" packs every file."""
    split_on: str | None = None
    """Separator between documents in text files, such as '\\n\\n'; without it, a file is one."""
    special_tokens: bool = True
    """Add what the tokenizer itself puts around texts and prompts, such as begin-of-text."""
    skip_bad: bool = False
    """Skip and count unreadable documents instead of stopping."""
    overwrite: bool = False
    """Replace an existing token store."""


@dataclasses.dataclass(frozen=True)
class Info:
    """Which store, and what of it."""

    store: str
    """Folder of a token store, or "embedded"."""
    seq: int = 2048
    """Sequence length, used to count the sequences in the store."""
    document: int | None = None
    """Print the text of this document instead, counted from 0."""
    verify: bool = False
    """Read the whole store and verify its checksums and hashes."""


@dataclasses.dataclass(frozen=True)
class Show:
    """Which documents of a store."""

    store: str
    """Folder of a token store, or "embedded"."""
    document: int = 0
    """Document to begin with, counted from 0."""
    count: int = 3
    """How many documents to show."""
    html: Path | None = None
    """Write a self-contained HTML page to this file instead."""


@dataclasses.dataclass(frozen=True)
class Upgrade:
    """Which store."""

    store: Path
    """Folder of the token store; its tokens and identity do not change."""


def pack(asked: Pack) -> None:
    """Tokenize text and pack it into a token store for training.

    meshwright data pack books/ --out books.store --tokenizer llama/tokenizer.json
    """
    split_on = None if asked.split_on is None else _unescaped(asked.split_on)
    tokenizer = load_tokenizer(asked.tokenizer, asked.end_token)
    encoding = _encoding(asked, tokenizer)
    started = time.monotonic()
    with Console(stderr=True).status("packing") as status:
        done = pack_store(
            asked.sources,
            asked.out,
            tokenizer,
            Reading(asked.field, split_on, asked.split, asked.format),
            encoding,
            skip_bad=asked.skip_bad,
            overwrite=asked.overwrite,
            progress=lambda documents, tokens: status.update(
                f"packing: {documents:,} documents, {tokens:,} tokens, "
                f"{tokens / max(time.monotonic() - started, 1e-3) / 1e6:.1f} M tokens/s"
            ),
        )
    print(_summary(done, asked.out))
    for problem in done.first_bad:
        print(f"  skipped: {problem}", file=sys.stderr)


def _encoding(asked: Pack, tokenizer: Tokenizer) -> Encoding:
    folder = tokenizer_folder(asked.tokenizer)
    fields = None
    if asked.fields or asked.fields_from_example:
        bos = special_tokens(folder).get("bos_token")
        fields = Fields(
            asked.fields,
            asked.fields_from_example,
            asked.subfield_separator,
            asked.prepend_text,
            asked.add_bos_token,
            asked.add_eos_token,
            asked.base64_token_dtype,
            None if bos is None else int(tokenizer.encode(bos)[0]),
        )
    return Encoding(
        special_tokens=asked.special_tokens,
        template=load_chat_template(folder, asked.chat_template),
        template_name=str(asked.chat_template or folder),
        loss_on=asked.loss_on,
        weigh=asked.weigh,
        weight_field=asked.weight_field,
        fields=fields,
    )


def upgrade(asked: Upgrade) -> None:
    """Verify a store packed by an older version, and add block checksums.

    meshwright data upgrade books.store
    """
    store = upgrade_store(asked.store)
    print(f"upgraded {asked.store}: {len(store.tokens):,} tokens match their hashes")


def info(asked: Info) -> None:
    """Show the contents of a token store.

    meshwright data info books.store
    """
    if asked.seq < 1:
        raise MeshwrightError(f"--seq {asked.seq} must be at least 1")
    store = _open(asked.store)
    if asked.verify:
        store.verify()
    if asked.document is not None:
        print(store.text(asked.document))
        return
    Console().print(_facts(store, asked.seq, asked.verify))


def show(asked: Show) -> None:
    """Show documents of a token store, with the tokens that have loss in colour.

    meshwright data show chat.store --html chat.html
    """
    store = _open(asked.store)
    documents = shown_documents(store, asked.document, asked.count)
    if asked.html is not None:
        write_page(asked.html, documents_page(store, documents))
        print(f"wrote {asked.html}")
        return
    console = Console(highlight=False)
    in_colour = console.color_system is not None
    for shown in documents:
        console.print(Text(shown.title, style="bold"))
        text = Text()
        for run in shown.runs:
            if not run.weight:
                text.append(run.text, style="dim")
            else:
                text.append(run.text if in_colour else f"⟦{run.text}⟧", style="black on green")
        console.print(text, soft_wrap=True)


def _open(store: str) -> TokenStore:
    return embedded_corpus() if store == EMBEDDED else TokenStore.open(store)


def _summary(done: Packed, out: Path) -> str:
    store = done.store
    noun = "document" if store.weights is None else "example"
    numbers = {f"empty {noun}": done.empty, f"bad {noun}": done.bad}
    skipped = [count(number, kind) for kind, number in numbers.items() if number]
    if done.without_loss:
        skipped.append(f"{count(done.without_loss, noun)} without loss")
    lines = [f"format: {words}" for words in done.formats]
    lines += [
        f"wrote {out}: {len(store.tokens):,} tokens, {count(store.documents, noun)} from "
        f"{count(done.files, 'file')}" + (f"; skipped {' and '.join(skipped)}" if skipped else "")
    ]
    if store.weights is not None:
        lengths = np.diff(store.offsets[:])
        lines.append(
            f"loss on {store.share_with_loss():.0%} of the tokens; the longest example has "
            f"{lengths.max():,}"
        )
    if done.other_files:
        names = ", ".join(Path(name).name for name in done.other_files[:4])
        more = ", …" if len(done.other_files) > 4 else ""
        lines.append(f"ignored files of other types: {names}{more}")
    return "\n".join(lines)


def _facts(store: TokenStore, seq: int, verified: bool) -> Table:
    tokenizer = store.tokenizer
    lengths = len(store.tokens) / store.documents
    table = Table(box=None, pad_edge=False, show_header=False)
    end = tokenizer.end_of_document
    examples = store.weights is not None
    sequences = sequence_table(store, seq)
    cut = f"; {sequences.cut:,} are longer, and cut" if sequences and sequences.cut else ""
    noun = "examples" if examples else "documents"
    facts = {
        "store": store.name,
        "tokens": f"{len(store.tokens):,} ({store.tokens.dtype.name})",
        noun: f"{store.documents:,}, {lengths:,.0f} tokens on average",
        "sequences": f"{sequence_count(store, seq):,} of {seq:,} tokens" + cut,
        "loss": _loss_text(store) if examples else "",
        "tokenizer": f"{tokenizer.kind}, vocabulary {tokenizer.vocab:,}, end of document {end}",
        "skipped": ", ".join(
            f"{store.meta[why]:,} {why}" for why in ("empty", "bad") if store.meta.get(why)
        ),
        "sources": ", ".join(source["path"] for source in store.meta.get("sources", [])),
        "identity": store.identity,
        "checksums": "verified" if verified else "",
    }
    for name, fact in facts.items():
        if fact:
            table.add_row(name, fact)
    return table


def _loss_text(store: TokenStore) -> str:
    about = store.meta.get("examples", {})
    words = [f"on {store.share_with_loss():.0%} of the tokens", *about.get("formats", ())]
    if store.holds_pairs:
        words.append("pairs of chosen and rejected")
    if about.get("weigh") == "examples":
        words.append("examples count equally")
    return ", ".join(words)


def _unescaped(text: str) -> str:
    """Interpret escapes such as `\\n`; other characters do not change."""
    try:
        value = codecs.decode(text.encode("latin-1", "backslashreplace"), "unicode_escape")
    except UnicodeDecodeError as reason:
        raise MeshwrightError(f"--split-on {text!r} cannot be read: {reason.reason}") from None
    if not value:
        raise MeshwrightError("--split-on is empty; give the separator between documents")
    return value

"""A token store of real text: documentation and source code of packages, fetched by name.

Each package's sdist comes from the Python package index and is checked against the index's SHA-256.
Documents are the files of KINDS, without tests, translations and copies of other projects; equal
texts are taken once. They are shuffled by a hash of their text, so the same versions always give
the same store. The last documents are short ones: evaluation takes its sequences from the end of
the store, and then sees many documents. Of the one that the boundary cuts, training has a part.
"""

import hashlib
import json
import re
import tarfile
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshwright.data import TokenStore, load_tokenizer, pack

INDEX = "https://pypi.org/simple"
PACKAGES = {
    "django": "6.1.3",
    "sqlalchemy": "2.1.8",
    "numpy": "2.5.4",
    "scikit-learn": "1.9.1",
    "twisted": "26.10.0",
    "celery": "5.7.0",
}
KINDS = (".rst", ".md", ".txt", ".py")
LEFT_OUT = {"tests", "test", "testing", "locale", "_vendor", "vendor", "vendored", "external"}
SIZES = range(200, 400_001)  # bytes of a document; larger files are tables and generated code
SHORT, SHORT_DOCUMENTS = 16_000, 150  # bytes of one; how many of them end the store
VOCAB = 16_384
SAMPLED = 4  # the tokenizer is trained on each fourth document
END = "<|endoftext|>"
STORE = "text.store"


def build(folder: Path) -> TokenStore:
    """Fetch, deduplicate, train the tokenizer and pack; gives back the store in `folder`."""
    documents = dict[str, str]()  # by hash, which is also their order
    total = 0
    for package, version in PACKAGES.items():
        before = len(documents)
        for text in sdist_documents(package, version):
            total += 1
            documents.setdefault(hashlib.sha256(" ".join(text.split()).encode()).hexdigest(), text)
        print(f"{package} {version}: {len(documents) - before:,} documents", flush=True)
    ordered = in_order(documents)
    size = sum(len(text.encode()) for text in ordered)
    print(f"{len(ordered):,} documents of {total:,} are left, {size / 1e6:.1f} MB", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        tokenizer, lines = Path(temporary, "tokenizer.json"), Path(temporary, "documents.jsonl")
        train_tokenizer(ordered[::SAMPLED]).save(str(tokenizer))
        with lines.open("w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in ordered)
        store = folder / STORE
        return pack([lines], store, load_tokenizer(tokenizer, END), overwrite=True).store


def in_order(documents: dict[str, str]) -> list[str]:
    """Documents by hash, those that end the store moved there."""
    hashes = sorted(documents)
    short = [one for one in hashes if len(documents[one].encode()) <= SHORT][-SHORT_DOCUMENTS:]
    last = set(short)
    return [documents[one] for one in [*(one for one in hashes if one not in last), *short]]


def sdist_documents(package: str, version: str) -> Iterator[str]:
    """The texts of a package's sdist."""
    with tempfile.TemporaryFile() as file:
        file.write(fetch_sdist(package, version))
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r:gz") as archive:
            for member in archive:
                path = PurePosixPath(member.name)
                wanted = member.isfile() and path.suffix in KINDS and member.size in SIZES
                if not wanted or LEFT_OUT & set(path.parts):
                    continue
                data = archive.extractfile(member)
                assert data is not None  # it is a file
                try:
                    text = data.read().decode()
                except UnicodeDecodeError:  # an example of another encoding
                    continue
                yield text.replace("\r\n", "\n")


def fetch_sdist(package: str, version: str) -> bytes:
    """The archive, as the index has it."""
    page = f"{INDEX}/{package}/"
    with urllib.request.urlopen(page, timeout=60) as answer:
        listing = answer.read().decode()
    name = re.escape(package).replace(r"\-", "[-_.]")
    link = rf'href="([^"#]*/{name}-{re.escape(version)}\.tar\.gz)#sha256=(\w+)"'
    found = re.search(link, listing, re.IGNORECASE)
    if found is None:
        raise SystemExit(f"{page} lists no sdist of version {version}")
    with urllib.request.urlopen(urllib.parse.urljoin(page, found[1]), timeout=300) as answer:
        data = bytes(answer.read())
    if hashlib.sha256(data).hexdigest() != found[2]:
        raise SystemExit(f"{package} {version} is not what the index says: its SHA-256 differs")
    return data


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE, as GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer

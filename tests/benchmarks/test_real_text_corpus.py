"""The corpus of real text: which files of an sdist are documents, and their order."""

import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

import real_text_corpus as corpus


def archive(**files: bytes) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as made:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    return data.getvalue()


def test_documents_are_texts_of_the_package_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"a sentence of some words\r\n" * 20
    files = {
        "p-1/docs/a.rst": text + b"a",
        "p-1/p/b.py": text + b"b",
        "p-1/p/tests/c.py": text + b"c",
        "p-1/p/_vendor/d.py": text + b"d",
        "p-1/p/e.png": text + b"e",
        "p-1/short.md": b"too short",
        "p-1/latin.txt": text + "é".encode("latin-1"),
    }
    monkeypatch.setattr(corpus, "fetch_sdist", lambda package, version: archive(**files))
    found = list(corpus.sdist_documents("p", "1"))
    assert [one[-1] for one in found] == ["a", "b"]
    assert "\r" not in found[0]


def test_short_documents_end_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "SHORT_DOCUMENTS", 2)
    long = "x" * (corpus.SHORT + 1)
    documents = {"c": "third", "a": "first", "e": long + "e", "b": long + "b", "d": "fourth"}
    assert [one[-1] for one in corpus.in_order(documents)] == ["t", "b", "e", "d", "h"]


def served(monkeypatch: pytest.MonkeyPatch, pages: dict[str, bytes]) -> None:
    def urlopen(address: str, timeout: float) -> Any:
        return io.BytesIO(pages[address])

    monkeypatch.setattr(corpus.urllib.request, "urlopen", urlopen)


def test_an_archive_is_what_the_index_says_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    page, data = f"{corpus.INDEX}/scikit-learn/", b"an archive"
    link = '<a href="../../files/scikit_learn-1.2.tar.gz#sha256={}">it</a>'
    right = link.format(hashlib.sha256(data).hexdigest()).encode()
    place = str(Path(corpus.INDEX).parent / "files/scikit_learn-1.2.tar.gz").replace(":/", "://")
    served(monkeypatch, {page: right, place: data})
    assert corpus.fetch_sdist("scikit-learn", "1.2") == data
    with pytest.raises(SystemExit, match=r"lists no sdist of version 1\.20"):
        corpus.fetch_sdist("scikit-learn", "1.20")
    served(monkeypatch, {page: right, place: b"another"})
    with pytest.raises(SystemExit, match="its SHA-256 differs"):
        corpus.fetch_sdist("scikit-learn", "1.2")

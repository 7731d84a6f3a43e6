"""The small corpus that ships with the package, so that a first run downloads nothing.

>>> corpus = embedded_corpus()
>>> corpus.name, corpus.tokenizer.kind
('embedded', 'bytes')
"""

import functools
import gzip
from importlib import resources

from meshwright.data.store import TokenStore
from meshwright.data.tokenizers import ByteTokenizer

EMBEDDED = "embedded"


def embedded_text() -> str:
    """All stories, a blank line between two; written by tools/make_corpus.py."""
    file = resources.files("meshwright.data") / "corpus" / "stories.txt.gz"
    return gzip.decompress(file.read_bytes()).decode("utf-8")


@functools.cache
def embedded_corpus() -> TokenStore:
    """The stories as a store in memory, one document each, as bytes."""
    stories = embedded_text().strip("\n").split("\n\n")
    return TokenStore.of_documents(stories, ByteTokenizer(), name=EMBEDDED)

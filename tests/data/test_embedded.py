"""The corpus in the package: there, readable, ours."""

import re
import subprocess
import sys
from pathlib import Path

from meshwright.data import embedded_corpus, embedded_text

ROOT = Path(__file__).parents[2]


def test_the_corpus_is_small_plain_english() -> None:
    text = embedded_text()
    assert 200_000 < len(text) < 400_000
    assert text.isascii()
    words = set(re.findall(r"[a-z]+", text.lower()))
    assert 400 < len(words) < 1500
    assert not re.search(r"[{}|\\]|  | an? an? |\b[Aa] [aeio]", text)


def test_its_documents_are_its_stories() -> None:
    store = embedded_corpus()
    stories = [store.text(i) for i in range(store.documents)]
    assert "\n\n".join(stories) + "\n" == embedded_text()
    assert len(set(stories)) == len(stories) == 640
    for story in stories:
        assert re.match(r'["A-Z]', story)
        assert re.search(r'[.?!]"?$', story)


def test_the_script_writes_the_corpus_that_is_in_the_package() -> None:
    code = "import make_corpus, sys; sys.stdout.write(make_corpus.corpus())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "tools", capture_output=True, text=True
    )
    assert done.stdout == embedded_text(), done.stderr


def test_data_needs_neither_tokenizers_nor_pyarrow() -> None:
    """The embedded corpus trains on a machine that has jax and numpy only."""
    code = """
import sys
for name in ("tokenizers", "pyarrow", "tyro", "rich", "jinja2", "optax", "orbax"):
    sys.modules[name] = None
from meshwright.data import Mixture, training_loader
print(training_loader(Mixture.parse("embedded"), batch=2, seq=8).host_batch(0)["tokens"].shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "(1, 2, 8)\n", done.stderr

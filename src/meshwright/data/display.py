"""Documents of a token store as text, in runs of tokens that have loss and that have none."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.data.store import TokenStore
from meshwright.errors import MeshwrightError
from meshwright.present import count, render

TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens of equal weight."""

    text: str
    tokens: int
    weight: float


@dataclass(frozen=True)
class Shown:
    """A document, in runs."""

    title: str
    runs: tuple[Run, ...]


def shown_documents(store: TokenStore, first: int, number: int) -> list[Shown]:
    """`number` documents from `first` on, or as many as there are.

    >>> from meshwright.data.tokenizers import ByteTokenizer
    >>> store = TokenStore.of_examples([(list(b"2+2=4"), [0, 0, 0, 0, 1])], ByteTokenizer(), "sums")
    >>> for run in shown_documents(store, 0, 1)[0].runs: print(run)
    Run(text='2+2=', tokens=4, weight=0.0)
    Run(text='4', tokens=1, weight=1.0)
    """
    if not 0 <= first < store.documents or number < 1:
        raise MeshwrightError(
            f"store '{store.name}' holds {count(store.documents, 'document')}, the first is 0; "
            f"{number} from {first} on were asked for"
        )
    last = min(first + number, store.documents)
    return [_shown(store, i) for i in range(first, last)]


def _shown(store: TokenStore, number: int) -> Shown:
    ids, weights = store.document(number), store.document_weights(number)
    with_loss = int(np.count_nonzero(weights))
    name = f"{'document' if store.weights is None else 'example'} {number}"
    if store.holds_pairs:
        name = f"pair {number // 2}, {('chosen', 'rejected')[number % 2]}"
    title = f"{name}: {count(len(ids), 'token')}, {with_loss:,} with loss"
    edges = [0, *(np.flatnonzero(np.diff(weights)) + 1).tolist(), len(ids)]
    runs, before = [], ""
    for start, stop in itertools.pairwise(edges):
        # the text of tokens depends on those before them: spaces, parts of a character
        text = store.tokenizer.decode(ids[:stop], special_tokens=True)
        whole = text.startswith(before)
        own = store.tokenizer.decode(ids[start:stop], special_tokens=True)
        runs.append(Run(text[len(before) :] if whole else own, stop - start, float(weights[start])))
        before = text
    return Shown(title, tuple(runs))


def page(store: TokenStore, documents: list[Shown]) -> str:
    """One self-contained HTML page of the documents."""
    data = [
        {"title": one.title, "runs": [[run.text, run.tokens, run.weight] for run in one.runs]}
        for one in documents
    ]
    summary = (
        f"{count(store.documents, 'document')}, {len(store.tokens):,} tokens, loss on "
        f"{store.share_with_loss():.0%} of them"
    )
    return render(TEMPLATE, title=store.name, data=data, summary=summary)

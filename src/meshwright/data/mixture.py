"""A weighted mixture of token stores: `a.store` or `a.store:0.7,b.store:0.3`."""

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from meshwright.data.embedded import EMBEDDED, embedded_corpus
from meshwright.data.schedule import Schedule
from meshwright.data.store import TokenStore
from meshwright.data.tokenizers import Tokenizer, added_tokens
from meshwright.errors import MeshwrightError

GRAMMAR = (
    "data is a token store (a.store), a file (chat.jsonl), a dataset on the Hub (org/name), "
    "'embedded', or several with weights (a.store:0.7,b.store:0.3)"
)
_WEIGHT = re.compile(r"(?P<path>.+):\s*(?P<weight>[-+]?[0-9.][0-9.eE+-]*)")


@dataclass(frozen=True, eq=False)
class Mixture:
    """Token stores with the same tokenizer, each with a weight.

    >>> mixture = Mixture.parse("embedded")
    >>> mixture.vocab, [store.name for store in mixture.stores]
    (257, ['embedded'])
    """

    stores: tuple[TokenStore, ...]
    schedule: Schedule

    @classmethod
    def parse(
        cls, text: str, open_store: Callable[[str], TokenStore] = TokenStore.open
    ) -> "Mixture":
        """Open the stores that the text names; the default weights are token counts."""
        parts = [_source(part, text) for part in text.split(",")]
        weights = [weight for _, weight in parts if weight is not None]
        if weights and len(weights) != len(parts):
            without = next(path for path, weight in parts if weight is None)
            raise MeshwrightError(
                f"data {text!r}: '{without}' has no weight but others have; give every store a "
                "weight, or none"
            )
        stores = [embedded_corpus() if path == EMBEDDED else open_store(path) for path, _ in parts]
        path_of: dict[str, str] = {}  # by content: ./a.store, a link or a copy is the same store
        for store, (path, _) in zip(stores, parts, strict=True):
            if (other := path_of.get(store.identity)) is not None:
                again = "twice" if other == path else f"and again as '{path}'"
                raise MeshwrightError(
                    f"data {text!r} names '{other}' {again}; give it once with the sum of its "
                    "weights"
                )
            path_of[store.identity] = path
        return cls.of(stores, weights or None)

    @classmethod
    def of(
        cls, stores: Sequence[TokenStore], weights: Sequence[str | float] | None = None
    ) -> "Mixture":
        """A mixture of open stores; the default weights are token counts."""
        if not stores:
            raise MeshwrightError(f"a mixture needs at least one store; {GRAMMAR}")
        if weights is not None and len(weights) != len(stores):
            raise MeshwrightError(
                f"{len(weights)} weights for {len(stores)} stores; give one per store"
            )
        first = stores[0]
        for other in stores[1:]:
            if other.tokenizer.identity != first.tokenizer.identity:
                raise MeshwrightError(
                    f"stores '{first.name}' and '{other.name}' were packed with different "
                    f"tokenizers ({_named(first)} and {_named(other)}); pack both with one of them"
                )
        sizes = [Fraction(len(store.tokens)) for store in stores]
        return cls(tuple(stores), Schedule.of_weights(sizes if weights is None else weights))

    @property
    def tokenizer(self) -> Tokenizer:
        return self.stores[0].tokenizer

    @property
    def vocab(self) -> int:
        """The smallest vocabulary size a model needs."""
        return self.tokenizer.vocab

    @functools.cached_property
    def shares(self) -> tuple[float, ...]:
        """The fraction of samples that comes from each store."""
        return tuple(quota / self.schedule.period for quota in self.schedule.quotas)

    def template_files(self) -> dict[str, str]:
        """The files of the chat template that all conversations were packed with, as in a
        Hugging Face folder; none if there are several."""
        facts = [store.meta.get("examples", {}) for store in self.stores]
        used = [one for one in facts if "chat_template" in one]
        if len({one["chat_template"] for one in used}) != 1:
            return {}
        special = json.dumps(used[0].get("special", {}), indent=2) + "\n"
        return {"chat_template.jinja": used[0]["chat_template"], "special_tokens_map.json": special}

    @property
    def special_tokens(self) -> bool:
        """Whether documents begin with what the tokenizer itself puts before a text."""
        before, _ = added_tokens(self.tokenizer)
        begins = (store.tokens[: len(before)].tolist() == before for store in self.stores)
        return bool(before) and all(begins)

    def describe(self) -> dict[str, Any]:
        """Plain data that determines the order of tokens; kept with a checkpoint."""
        return {
            "tokenizer": self.tokenizer.identity,
            "vocab": self.vocab,
            "sources": [
                {"name": store.name, "identity": store.identity, "share": quota}
                for store, quota in zip(self.stores, self.schedule.quotas, strict=True)
            ],
        }


def with_sources(text: str, change: Callable[[str], str]) -> str:
    """The text of a mixture with other names of its sources.

    >>> with_sources("a.store:0.7,b.store:0.3", str.upper)
    'A.STORE:0.7,B.STORE:0.3'
    """
    parts = (_source(part, text) for part in text.split(","))
    return ",".join(
        change(path) if weight is None else f"{change(path)}:{weight}" for path, weight in parts
    )


def _source(part: str, text: str) -> tuple[str, str | None]:
    part = part.strip()
    if not part:
        raise MeshwrightError(f"data {text!r} names an empty source; {GRAMMAR}")
    match = _WEIGHT.fullmatch(part)
    return (part, None) if match is None else (match["path"].strip(), match["weight"])


def _named(store: TokenStore) -> str:
    return f"{store.tokenizer.kind}, vocabulary {store.tokenizer.vocab:,}"

"""Log-probabilities in OpenAI's two forms."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from meshwright.data import REPLACEMENT, Tokenizer
from meshwright.serving.request import Completion, Delta, TokenLogprobs

_LONGEST_CHARACTER = 4  # tokens


class LogprobWriter:
    """Writes log-probabilities with the texts of a tokenizer's tokens, which it keeps.

    Lists of candidates are iterators, which are written when they are encoded.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.texts = TokenTexts(tokenizer)
        self.named_texts = TokenTexts(tokenizer, special_tokens=True)
        self._bytes = functools.lru_cache(maxsize=65536)(tokenizer.token_bytes)

    def _name(self, token: int) -> str:
        # a part of a character has no text of its own: it is shown as its id, so that names differ
        return self.named_texts.of(token) or f"token_id:{token}"

    def completion(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        offsets: Sequence[int],
    ) -> dict[str, Any]:
        """`logprobs` of /v1/completions; `offsets` are those of TextOffsets."""
        names = [self._name(token) for token in tokens]
        return {
            "tokens": names,
            "token_logprobs": [None if each is None else each.logprob for each in logprobs],
            "top_logprobs": (self._by_name(*each) for each in zip(names, logprobs, strict=True)),
            "text_offset": list(offsets),
        }

    def prompt(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], count: int
    ) -> Iterator[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: of each token and of the `count` most probable, by id."""
        return (
            None if each is None else self._ranked(token, each)
            for token, each in zip(tokens, first_of(logprobs, count), strict=True)
        )

    def _ranked(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        ranks = {token: (logprobs.logprob, logprobs.rank + 1)}
        for rank, (candidate, logprob) in enumerate(logprobs.top, 1):
            ranks.setdefault(candidate, (logprob, rank))
        return {
            str(each): {"logprob": logprob, "rank": rank, "decoded_token": self._name(each)}
            for each, (logprob, rank) in ranks.items()
        }

    def _by_name(self, name: str, logprobs: TokenLogprobs | None) -> dict[str, float] | None:
        if logprobs is None:
            return None
        found: dict[str, float] = {}
        for token, logprob in logprobs.top:
            found.setdefault(self._name(token), logprob)
        return {name: logprobs.logprob} | found

    def chat(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """`logprobs` of /v1/chat/completions."""
        content = (
            self._entry(token, each.logprob)
            | {"top_logprobs": [self._entry(*candidate) for candidate in each.top]}
            for token, each in zip(tokens, logprobs, strict=True)
        )
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._name(token)
        # of a name, not of the token alone, whose space the tokenizer may drop
        own = self._bytes(token) if name.startswith("token_id:") else name.encode()
        return {"token": name, "logprob": logprob, "bytes": None if own is None else list(own)}


def written_entries(results: Iterable[Completion | Delta], candidates: int | None) -> int:
    """How many tokens and candidates the answer to results has at most."""
    tokens = sum(len(each.tokens) + len(each.prompt_logprobs) for each in results)
    return tokens * (1 + (candidates or 0))


def first_of(
    logprobs: Sequence[TokenLogprobs | None], count: int
) -> tuple[TokenLogprobs | None, ...]:
    """With the first `count` of the most probable tokens at each position."""
    return tuple(each and dataclasses.replace(each, top=each.top[:count]) for each in logprobs)


class TokenTexts:
    """The text that a token adds to a text before it; None for a part of a character.

    Texts are kept: most tokens of a text are decoded once for all requests.
    """

    def __init__(self, tokenizer: Tokenizer, special_tokens: bool = False) -> None:
        """`special_tokens`: they have their names as texts, else none."""

        def decode(tokens: Sequence[int]) -> str:
            return tokenizer.decode(tokens, special_tokens)

        # some tokenizers drop the space of the first token
        before = [int(token) for token in tokenizer.encode("a")]
        known = len(decode(before))

        def text(token: int) -> str | None:
            added = decode([*before, token])[known:]
            return None if REPLACEMENT in added else added

        self.decode = decode
        self.of = functools.lru_cache(maxsize=65536)(text)


class TextOffsets:
    """Where the text of each token begins; tokens that share a character begin at the same place.

    >>> from meshwright.data import ByteTokenizer
    >>> offsets = TextOffsets(TokenTexts(ByteTokenizer()))
    >>> [offsets.add(token) for token in "néa".encode()]
    [0, 1, 1, 2]
    """

    def __init__(self, texts: TokenTexts, begin: int = 0, before: Sequence[int] = ()) -> None:
        """`begin`: where the text of the first token begins; `before`: tokens it continues."""
        self._texts = texts
        self._next = begin
        self._first = not (texts.decode(before) or any(map(texts.of, before)))
        self._part: list[int] = []  # tokens of a character that is not complete

    def add(self, token: int) -> int:
        begin, own = self._next, self._texts.of(token)
        if own is not None and not self._part and not self._first:
            self._next += len(own)
            return begin
        self._part.append(token)
        text = self._texts.decode(self._part)
        self._first &= not (text or own)
        if not text.endswith(REPLACEMENT) or len(self._part) > _LONGEST_CHARACTER:
            self._next += len(text)
            self._part = []
        return begin

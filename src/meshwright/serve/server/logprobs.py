"""Log-probabilities in OpenAI's two forms."""

import functools
from collections.abc import Sequence
from typing import Any

from meshwright.data import Tokenizer
from meshwright.serve.request import TokenLogprobs

_CUT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4  # tokens


class LogprobWriter:
    """Writes log-probabilities with the texts of a tokenizer's tokens, which it keeps."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # a part of a character has no text of its own: it is shown as its id, so that names differ
        def name(token: int) -> str:
            text = tokenizer.token_text(token)
            return f"token_id:{token}" if not text or _CUT in text else text

        self._name = functools.lru_cache(maxsize=65536)(name)
        self.lengths = TokenLengths(tokenizer)

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
            "top_logprobs": [self._by_name(*each) for each in zip(names, logprobs, strict=True)],
            "text_offset": list(offsets),
        }

    def _by_name(self, name: str, logprobs: TokenLogprobs | None) -> dict[str, float] | None:
        if logprobs is None:
            return None
        found: dict[str, float] = {}
        for token, logprob in logprobs.top:
            found.setdefault(self._name(token), logprob)
        return found or {name: logprobs.logprob}

    def chat(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """`logprobs` of /v1/chat/completions."""
        content = [
            self._entry(token, each.logprob)
            | {"top_logprobs": [self._entry(*candidate) for candidate in each.top]}
            for token, each in zip(tokens, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._name(token)
        text = None if name.startswith("token_id:") else list(name.encode())
        return {"token": name, "logprob": logprob, "bytes": text}


class TokenLengths:
    """How many characters a token adds to a text; None for a part of a character.

    Lengths are kept: most tokens of a text are decoded once for all requests.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.decode = tokenizer.decode
        # some tokenizers drop the space of the first token
        before = [int(token) for token in tokenizer.encode("a")]
        known = len(tokenizer.decode(before))

        def length(token: int) -> int | None:
            text = tokenizer.decode([*before, token])
            return None if text.endswith(_CUT) else len(text) - known

        self.of = functools.lru_cache(maxsize=65536)(length)


class TextOffsets:
    """Where the text of each token begins; tokens that share a character begin at the same place.

    >>> from meshwright.data import ByteTokenizer
    >>> offsets = TextOffsets(TokenLengths(ByteTokenizer()))
    >>> [offsets.add(token) for token in "néa".encode()]
    [0, 1, 1, 2]
    """

    def __init__(self, lengths: TokenLengths) -> None:
        self._lengths = lengths
        self._next = 0
        self._first = True
        self._part: list[int] = []  # tokens of a character that is not complete

    def add(self, token: int) -> int:
        begin, length = self._next, self._lengths.of(token)
        if length is not None and not self._part and not self._first:
            self._next += length
            return begin
        self._part.append(token)
        text = self._lengths.decode(self._part)
        self._first &= not text
        if not text.endswith(_CUT) or len(self._part) > _LONGEST_CHARACTER:
            self._next += len(text)
            self._part = []
        return begin

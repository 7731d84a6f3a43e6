"""Log-probabilities in OpenAI's two forms."""

import functools
from collections.abc import Sequence
from typing import Any

from meshwright.data import Tokenizer
from meshwright.serve.request import TokenLogprobs

_CUT = "\N{REPLACEMENT CHARACTER}"


class LogprobWriter:
    """Writes log-probabilities with the texts of a tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # a part of a character has no text of its own: it is shown as its id, so that names differ
        def name(token: int) -> str:
            text = tokenizer.token_text(token)
            return f"token_id:{token}" if not text or _CUT in text else text

        self._name = functools.lru_cache(maxsize=65536)(name)

    def completion(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        offset: int,
    ) -> dict[str, Any]:
        """`logprobs` of /v1/completions; `offset` is where the first token's text begins."""
        names = [self._name(token) for token in tokens]
        offsets = []
        for name in names:
            offsets.append(offset)
            offset += len(name)
        return {
            "tokens": names,
            "token_logprobs": [None if each is None else each.logprob for each in logprobs],
            "top_logprobs": [self._by_name(*each) for each in zip(names, logprobs, strict=True)],
            "text_offset": offsets,
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

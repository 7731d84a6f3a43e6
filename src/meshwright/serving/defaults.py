"""Settings of requests that name none, as a folder's generation_config.json has them."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshwright.arithmetic import whole_number
from meshwright.data import Tokenizer
from meshwright.errors import MeshwrightError
from meshwright.serving.sampling import Sampling

if TYPE_CHECKING:
    from meshwright.data import ChatTemplate

CALM = Sampling(0.8, top_p=0.95)
"""Sampling of what a person types (generate, chat, the chat page), where the folder names none."""
_OTHER_ENDS = ("<|call|>",)  # of an answer of gpt-oss that is a call
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True)
class Defaults:
    named: Sampling | None = None
    """Sampling as the folder says; None: it says nothing."""
    max_new: int | None = None
    """Maximum number of tokens of a chat's answer; None: what the context has room for."""
    greedy: bool = False
    """The folder says do_sample: false, which transformers' generate follows and vLLM does not."""

    @property
    def sampling(self) -> Sampling:
        """Of requests to the server's API: else OpenAI's defaults, as in vLLM."""
        return self.named or Sampling()

    @property
    def typed(self) -> Sampling:
        """Of what a person types."""
        if self.greedy:
            return dataclasses.replace(self.sampling, temperature=0)
        return self.named or CALM

    def __str__(self) -> str:
        """
        >>> str(Defaults(Sampling(0.6, top_p=0.9)))
        'temperature 0.6, top_p 0.9'
        """
        values = {name: getattr(self.sampling, name) for name in _SAMPLING}
        values["max_new_tokens"] = self.max_new
        plain = {name: getattr(Sampling(), name) for name in _SAMPLING}
        changed = (name for name in values if values[name] != plain.get(name))
        return ", ".join(f"{name} {values[name]:g}" for name in changed)


def answer_stops(
    template: "ChatTemplate", tokenizer: Tokenizer
) -> tuple[frozenset[int], tuple[str, ...]]:
    """The tokens that end an answer by the chat template, or the text if it is no single token."""
    text = template.end_of_answer()
    ends = [text, *(mark for mark in _OTHER_ENDS if mark in template.text)]
    tokens = {end: tokenizer.encode(end).tolist() for end in ends if end}
    single = frozenset(ids[0] for ids in tokens.values() if len(ids) == 1)
    return single, (text,) if text and len(tokens[text]) != 1 else ()


def defaults_of(fields: Mapping[str, Any]) -> Defaults:
    """The defaults in the fields of a generation_config.json, those that vLLM uses too."""
    given = {name: fields[name] for name in _SAMPLING if fields.get(name) is not None}
    if given.get("top_k") in (0, -1):  # all tokens
        del given["top_k"]
    limit = fields.get("max_new_tokens")
    try:
        if limit is not None and whole_number(limit, "max_new_tokens") < 1:
            raise MeshwrightError(f"max_new_tokens={limit} must be at least 1")
        named = Sampling(**given) if given else None
        return Defaults(named, limit, greedy=fields.get("do_sample") is False)
    except MeshwrightError as reason:
        raise MeshwrightError(
            f"generation_config.json: {reason}; correct it there (serve can ignore it: "
            "--generation-config none)"
        ) from None

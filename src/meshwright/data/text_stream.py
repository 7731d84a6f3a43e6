"""Tokens to text as they come."""

import functools
from collections.abc import Iterable, Iterator, Sequence

from meshwright.data.tokenizers import REPLACEMENT, Tokenizer

_LONGEST = 16  # tokens that may wait for the rest of a character


def last_character(
    tokenizer: Tokenizer, prompt: Sequence[int], special_tokens: bool = False
) -> tuple[int, ...]:
    """The last tokens of a prompt, which make up its last character; none if that is cut.

    The text that continues it is decoded after them: tokenizers of SentencePiece drop the space of
    a first token. `special_tokens`: they are shown by name.
    """
    end, text = tuple(prompt), ""
    for size in range(1, min(len(prompt), _LONGEST) + 1):
        end = tuple(prompt[-size:])
        text = tokenizer.decode(end, special_tokens)
        if text and not text.endswith(REPLACEMENT):
            return end
    return () if text else end


def added_text(
    tokenizer: Tokenizer, before: Sequence[int], tokens: Sequence[int], special_tokens: bool = False
) -> str:
    """What tokens add to the text of those before."""
    text = tokenizer.decode([*before, *tokens], special_tokens)
    return text[len(tokenizer.decode(before, special_tokens)) :]


class TextStream:
    """The text that each token completes; half a character waits for its other half.

    >>> from meshwright.data import ByteTokenizer
    >>> stream = TextStream(ByteTokenizer())
    >>> [stream.add(token) for token in "né".encode()]
    ['n', '', 'é']
    """

    def __init__(
        self, tokenizer: Tokenizer, special_tokens: bool = False, before: Sequence[int] = ()
    ) -> None:
        """`special_tokens`: they are shown by name; `before`: tokens that the text continues."""
        self._decode = functools.partial(tokenizer.decode, special_tokens=special_tokens)
        self._tokens = [*before]
        self._before = 0  # first token that is decoded again, for its effect on those after
        self._done = len(self._tokens)  # tokens whose text was given

    def add(self, token: int) -> str:
        self._tokens.append(token)
        return self._text(len(self._tokens) - self._done > _LONGEST)

    def end(self) -> str:
        """What still waits."""
        return self._text(True)

    def _text(self, anyway: bool) -> str:
        given = self._decode(self._tokens[self._before : self._done])
        text = self._decode(self._tokens[self._before :])
        if len(text) <= len(given) or (text.endswith(REPLACEMENT) and not anyway):
            return ""
        self._before, self._done = self._done, len(self._tokens)
        return text[len(given) :]


def decode_stream(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Yield text as ids arrive; a character is complete before it is yielded.

    >>> from meshwright.data import ByteTokenizer
    >>> list(decode_stream(ByteTokenizer(), "né".encode()))
    ['n', 'é']
    """
    stream = TextStream(tokenizer)
    yield from filter(None, (stream.add(int(each)) for each in ids))
    yield from filter(None, [stream.end()])

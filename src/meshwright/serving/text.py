"""Tokens to text as they come, and the texts that end a generation."""

import functools
from collections.abc import Sequence

from meshwright.data import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST = 16  # tokens that may wait for the rest of a character
_LONGEST_CHARACTER = 4  # tokens


def last_character(tokenizer: Tokenizer, prompt: Sequence[int]) -> tuple[int, ...]:
    """The last tokens of a prompt, which make up its last character; none if that is cut.

    The text that continues it is decoded after them: tokenizers of SentencePiece drop the space of
    a first token. After a special token a text begins anew.
    """
    ends = (tuple(prompt[-size:]) for size in range(1, min(len(prompt), _LONGEST_CHARACTER) + 1))
    return next((end for end in ends if not tokenizer.decode(end).endswith(_REPLACEMENT)), ())


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
        if len(text) <= len(given) or (text.endswith(_REPLACEMENT) and not anyway):
            return ""
        self._before, self._done = self._done, len(self._tokens)
        return text[len(given) :]


class StopTexts:
    """Text up to the first of some stop texts; what may be the start of one is held back.

    >>> stops = StopTexts(("END",))
    >>> stops.add("abc E"), stops.add("Nx"), stops.add(" END of")
    ('abc ', 'ENx', ' ')
    >>> stops.found
    True
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include`: the text ends after the stop text, not before it."""
        self._stops, self._include = tuple(stop for stop in stops if stop), include
        self._held = ""
        self._exempt = 0  # characters at the start of what is held back that end no stop text
        self.found = False

    def add(self, text: str, exempt: bool = False) -> str:
        """What is certain of the text so far; `exempt`: no stop text ends in the new part."""
        if not self._stops:
            return text
        text, self._held = self._held + text, ""
        exempt_length = len(text) if exempt else self._exempt
        places = [
            (at, at + len(stop))
            for stop in self._stops
            if (at := text.find(stop, max(exempt_length - len(stop) + 1, 0))) >= 0
        ]
        if places:
            self.found = True
            begin, end = min(places)
            return text[: end if self._include else begin]
        held = self._start_of_stop(text)
        certain = len(text) - held
        self._held, self._exempt = text[certain:], max(exempt_length - certain, 0)
        return text[:certain]

    def _start_of_stop(self, text: str) -> int:
        """How many characters at the end of a text may begin a stop text."""
        longest = max(map(len, self._stops)) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0

    def end(self) -> str:
        """What was held back, if no stop text was found."""
        held, self._held = self._held, ""
        return "" if self.found else held

"""Tokens to text as they come, and the texts that end a generation."""

from collections.abc import Sequence

from meshwright.data import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST = 16  # tokens that may wait for the rest of a character


class TextStream:
    """The text that each token completes; half a character waits for its other half.

    >>> from meshwright.data import ByteTokenizer
    >>> stream = TextStream(ByteTokenizer())
    >>> [stream.add(token) for token in "né".encode()]
    ['n', '', 'é']
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._before = 0  # first token that is decoded again, for its effect on those after
        self._done = 0  # tokens whose text was given

    def add(self, token: int) -> str:
        self._tokens.append(token)
        return self._text(len(self._tokens) - self._done > _LONGEST)

    def end(self) -> str:
        """What still waits."""
        return self._text(True)

    def _text(self, anyway: bool) -> str:
        given = self._tokenizer.decode(self._tokens[self._before : self._done])
        text = self._tokenizer.decode(self._tokens[self._before :])
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

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        if not self._stops:
            return text
        text, self._held = self._held + text, ""
        starts = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if starts:
            self.found = True
            return text[: min(starts)]
        longest = max(map(len, self._stops)) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                self._held = text[-size:]
                return text[:-size]
        return text

    def end(self) -> str:
        """What was held back, if no stop text was found."""
        held, self._held = self._held, ""
        return "" if self.found else held

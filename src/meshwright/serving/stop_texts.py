"""The texts that end a generation."""

from collections.abc import Sequence


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

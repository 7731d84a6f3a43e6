"""Flags of a command that takes train's settings too: taken out of the words before those."""

from meshwright.errors import MeshwrightError


def take(words: list[str], flag: str) -> str | None:
    """The last value of a flag, taken out of the words."""
    values = take_all(words, flag)
    return values[-1] if values else None


def take_all(words: list[str], flag: str) -> list[str]:
    """Every value of a flag, taken out of the words: `--flag value` or `--flag=value`."""
    values = []
    place = 0
    while place < len(words):
        name, equals, value = words[place].partition("=")
        if name != flag:
            place += 1
            continue
        del words[place]
        if not equals:
            if place >= len(words):
                raise MeshwrightError(f"{flag} needs a value")
            value = words.pop(place)
        values.append(value)
    return values


def take_switch(words: list[str], flag: str) -> bool:
    """Whether a flag without a value is there, taken out of the words."""
    there = flag in words
    words[:] = [word for word in words if word != flag]
    return there

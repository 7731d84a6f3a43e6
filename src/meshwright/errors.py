"""MeshwrightError, which every mistake of a user raises, and phrases of its messages.

Every message says what was given, which rule it broke and what would fit:

    mesh 'dp=2,tp=3' needs 6 devices, 8 are here; 'dp=2,tp=4' or 'dp=4,tp=2' would fit
"""

import difflib
from collections.abc import Iterable


class MeshwrightError(ValueError):
    """A mistake that a person can fix; the message says how."""


class UnsupportedModelError(MeshwrightError):
    """A Hugging Face config of a model that is in no family here."""


def install_command(extra: str) -> str:
    """How to install an extra; in the clone of the repository, since no package index has it."""
    return f"pip install -e '.[{extra}]'"


def not_installed(extra: str) -> str:
    """The end of a sentence about a missing package: the command, and where it works."""
    return f"{install_command(extra)} (in the clone of Meshwright) installs it"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence: `"; did you mean 'fsdp'?"` if one is close, else all known names."""
    known = list(dict.fromkeys(known))
    likeness = {other: _likeness(str(name).lower(), other.lower()) for other in known}
    best = max(likeness.values(), default=0.0)
    if best >= 0.6:
        close = [other for other in known if likeness[other] >= best - 0.01][:2]
        return f"; did you mean {one_of(close)}?"
    if not known:
        return "."
    return f"; known: {', '.join(known[:16])}{', …' if len(known) > 16 else ''}."


def sentence(text: str) -> str:
    """The text with a full stop, if it does not end a sentence yet."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _likeness(one: str, other: str) -> float:
    if len(one) > 2 and other.startswith(one):
        return 0.99  # 'a100' for 'a100-80'
    if sorted(one) == sorted(other):
        return 0.98  # 'pt' for 'tp'
    return difflib.SequenceMatcher(None, one, other).ratio()


def one_of(options: Iterable[str]) -> str:
    """`"'a', 'b' or 'c'"`."""
    quoted = [f"'{option}'" for option in options]
    if len(quoted) < 2:
        return "".join(quoted)
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}"

"""MeshwrightError, which every mistake of a user raises, and phrases of its messages.

Every message says what was given, which rule it broke and what would fit:

    mesh 'dp=2,tp=3' needs 6 devices, 8 are here; 'dp=2,tp=4' or 'dp=4,tp=2' would fit
"""

import difflib
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T", bound=Callable[..., Any])


class MeshwrightError(ValueError):
    """A mistake that a person can fix; the message says how."""


class UnsupportedModelError(MeshwrightError):
    """A Hugging Face config of a model that is in no family here."""


def install_command(extra: str) -> str:
    """How to install an extra; in the clone of the repository, since no package index has it."""
    return f"pip install -e '.[{extra}]'"


def not_installed(extra: str) -> str:
    """The end of a sentence about a missing package: the command, and where it works."""
    large = (
        "; with CUDA that is gigabytes, docs/install.md has the CPU's" if extra == "torch" else ""
    )
    return f"{install_command(extra)} (in the clone of Meshwright) installs it{large}"


def did_you_mean(name: str, known: Iterable[str], at_least: float = 0.6) -> str:
    """The end of a sentence: `"; did you mean 'fsdp'?"` if one is close, else all known names.

    `at_least`: how close, from 0 to 1.
    """
    known = list(dict.fromkeys(known))
    likeness = {other: _likeness(str(name).lower(), other.lower()) for other in known}
    best = max(likeness.values(), default=0.0)
    if best >= at_least:
        close = [other for other in known if likeness[other] >= best - 0.01][:2]
        return f"; did you mean {one_of(close)}?"
    if not known:
        return "."
    return f"; known: {', '.join(known[:16])}{', …' if len(known) > 16 else ''}."


def sentence(text: str) -> str:
    """The text with a full stop, if it does not end a sentence yet."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _likeness(name: str, known: str) -> float:
    name, known = name.lstrip("-"), known.lstrip("-")  # which all flags have in common
    if len(name) > 2 and known.startswith(name):
        return 0.99  # 'a100' for 'a100-80'
    if sorted(name) == sorted(known):
        return 0.98  # 'pt' for 'tp'
    return difflib.SequenceMatcher(None, name, known).ratio()


def one_of(options: Iterable[str]) -> str:
    """`"'a', 'b' or 'c'"`."""
    quoted = [f"'{option}'" for option in options]
    if len(quoted) < 2:
        return "".join(quoted)
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def explained(example: str) -> Callable[[_T], _T]:
    """Make a function or a dataclass answer arguments that it does not take with a call that works.

    mw.TrainConfig("tiny", step=3)
    → MeshwrightError: TrainConfig has no 'step'; did you mean 'steps'? Write mw.TrainConfig(…)
    """

    def decorate(function: _T) -> _T:
        call: Any = function.__dict__["__init__"] if isinstance(function, type) else function

        @functools.wraps(call)
        def checked(*args: Any, **named: Any) -> Any:
            try:
                return call(*args, **named)
            except (TypeError, AttributeError) as mistake:
                problem = _call_problem(function, call, args, named)
                if problem is None:  # the mistake is inside
                    raise
                raise MeshwrightError(f"{sentence(problem)} Write {example}") from mistake

        if not isinstance(function, type):
            return checked  # type: ignore[return-value]
        function.__init__ = checked  # type: ignore[misc]
        return function

    return decorate


def _call_problem(function: Any, call: Any, args: Any, named: Any) -> str | None:
    """What is wrong with the arguments of a call; None if nothing is."""
    import inspect
    import types
    import typing
    from pathlib import Path

    name, signature = function.__name__, inspect.signature(call)
    try:
        hints = typing.get_type_hints(call)
    except NameError:  # of types that are imported for checkers alone
        hints = {}
    known = [other for other in signature.parameters if other != "self"]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    for given in () if takes_any else named:
        if given in known:
            continue
        for group in known:
            if given in getattr(hints.get(group), "__dataclass_fields__", ()):
                inner = f"{group}={hints[group].__name__}({given}=…)"
                return f"{name} has no {given!r}; it is in {group}: {inner}"
        return f"{name} has no {given!r}{did_you_mean(given, known)}"
    try:
        values = signature.bind(*args, **named).arguments
    except TypeError as mistake:
        return f"{name} is {mistake}" if "missing" in str(mistake) else f"{name}: {mistake}"
    for given, value in values.items():
        hint = hints.get(given, Any)
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        options = typing.get_args(hint) if is_union else (hint,)
        kinds = [typing.get_origin(kind) or kind for kind in options]
        kinds += [int] * (float in kinds) + [str] * (Path in kinds)
        plain = all(isinstance(kind, type) and kind is not Any for kind in kinds)
        if plain and not isinstance(value, tuple(kinds)):
            return f"{name}: {given}={value!r:.60} must be {kinds[0].__name__}"
    return None

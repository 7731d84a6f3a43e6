"""What all commands read alike: numbers, flags given once, and flags before train's settings."""

import itertools
import math
import re
from collections.abc import Sequence

from meshwright.errors import MeshwrightError

REPEATABLE = frozenset({"--array", "--prompt", "--expect", "--api-key", "--allow-origin"})
_SUFFIXES = {"k": 1, "m": 2, "b": 3, "g": 3, "t": 4}  # the power of 1000, or of 1024


# sizes that are usually powers of two: of them 4k is 4096
LENGTHS = frozenset({
    "batch", "body_bytes", "chunk", "greedy_until_max_length", "input_length", "max_length",
    "max_new", "mlp_chunk", "output", "page_size", "prompt", "seq", "seq_length",
})  # fmt: skip


def integer(text: str, thousand: int = 1000) -> int:
    """A whole number as people write it; `thousand` is what k means, 1024 for lengths.

    >>> integer("4096"), integer("8_192"), integer("1e12"), integer("1.5M"), integer("4k", 1024)
    (4096, 8192, 1000000000000, 1500000, 4096)
    """
    word = text.strip().replace("_", "")
    if re.fullmatch(r"[+-]?[0-9]{1,30}", word):
        return int(word)
    if found := re.fullmatch(r"([+-]?[0-9]{1,15})(?:\.([0-9]{1,15}))?[eE][+]?([0-9]{1,2})", word):
        digits, fraction, power = found[1], (found[2] or "").rstrip("0"), int(found[3])
        if len(fraction) <= power:
            return int(digits + fraction.ljust(power, "0"))
    if found := re.fullmatch(r"([0-9]{1,12})(?:\.([0-9]{1,12}))?([kmbgt])(i?)", word, re.I):
        unit = (1024 if found[4] else thousand) ** _SUFFIXES[found[3].lower()]
        fraction = found[2] or ""
        number, rest = divmod(int(found[1] + fraction) * unit, 10 ** len(fraction))
        if not rest:
            return number
    raise MeshwrightError(f"{text[:40]!r} is not a whole number, such as 4096, 8_192, 4k or 1e12")


def quantity(text: str) -> float:
    """An amount of tokens or money as people write it: letters are powers of 1000.

    >>> [quantity(text) for text in ("15T", "100k", "2.5e6", "1_000")]
    [15000000000000.0, 100000.0, 2500000.0, 1000.0]
    """
    found = re.fullmatch(r"[$]?([0-9_]*[.]?[0-9]+(?:[eE][+]?[0-9]{1,2})?)([kmbgt]?)", text, re.I)
    number = float(found[1].replace("_", "")) if found else 0.0
    number *= 1000.0 ** _SUFFIXES.get(found[2].lower(), 0) if found else 1
    if not 0 < number < math.inf:
        raise MeshwrightError(f"{text[:40]!r} is not an amount, such as 15T, 4M, 100k or 1e12")
    return number


_UNITS = {"ms": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def seconds(text: str) -> float:
    """A time as people write it.

    >>> [seconds(text) for text in ("30d", "12h", "1.5h", "10m", "50ms")]
    [2592000.0, 43200.0, 5400.0, 600.0, 0.05]
    """
    found = re.fullmatch(rf"([0-9]*[.]?[0-9]+)({'|'.join(_UNITS)})", text.strip().lower())
    number = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < number < math.inf:
        raise MeshwrightError(f"{text[:40]!r} is not a time, such as 30d, 12h, 90m or 500ms")
    return number


def check_given_once(words: Sequence[str]) -> None:
    """Raise for a flag that is given twice: the value given first would be dropped silently."""
    values: dict[str, str] = {}
    for word, after in itertools.zip_longest(words, words[1:], fillvalue=""):
        flag, equals, value = word.partition("=")
        name = flag.replace("_", "-")
        if not re.match(r"--[a-zA-Z]", flag) or name in REPEATABLE:
            continue
        value = value if equals else after
        if name in values:
            first = f"{name} {values[name]}" if values[name] else name
            raise MeshwrightError(f"{name} is given twice; give it once, as in {first}")
        values[name] = "" if value.startswith("--") else value


def named_settings(words: Sequence[str]) -> set[str]:
    """The dotted names of the settings that a command line gives.

    >>> sorted(named_settings(["tiny", "--batch", "8", "--compute.no-sequence-parallel"]))
    ['batch', 'compute.sequence_parallel']
    """
    flags = (word.partition("=")[0] for word in words if word.startswith("--"))
    return {flag[2:].replace("-", "_").replace(".no_", ".") for flag in flags}


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
            if place >= len(words) or words[place].startswith("--"):
                raise MeshwrightError(f"{flag} needs a value")
            value = words.pop(place)
        values.append(value)
    return values


def take_switch(words: list[str], flag: str) -> bool:
    """Whether a flag without a value is there, taken out of the words."""
    if any(word.startswith(f"{flag}=") for word in words):
        raise MeshwrightError(f"{flag} takes no value; write it alone")
    there = flag in words
    words[:] = [word for word in words if word != flag]
    return there


def take_integer(words: list[str], flag: str, least: int = 0) -> int | None:
    """The value of a flag that is a whole number, taken out of the words."""
    text = take(words, flag)
    if text is None:
        return None
    try:
        number = integer(text, 1024 if flag[2:] in LENGTHS else 1000)
    except MeshwrightError as mistake:
        raise MeshwrightError(f"{flag}: {mistake}") from None
    if number < least:
        raise MeshwrightError(f"{flag} {number} must be a whole number from {least}")
    return number


def name_axes(words: list[str]) -> list[str]:
    """The words with `--axes dp,tp` put into the mesh: `--mesh 8,32` is dp=8,tp=32."""
    if not any(word.partition("=")[0] == "--axes" for word in words):
        return words
    rest = list(words)
    axes, mesh = take(rest, "--axes"), take(rest, "--mesh")
    if mesh is None:
        raise MeshwrightError(f"--axes {axes} names the sizes of --mesh; give it, as in --mesh 8,4")
    from meshwright.meshes import MeshSpec

    return [*rest, "--mesh", str(MeshSpec.parse(mesh, axes=str(axes).split(",")).by_role())]


def simulate(devices: int | None) -> None:
    """Prepare jax for CPU devices, `devices` of them if it is a number."""
    from meshwright.launch import make_room_for_cpu_collectives, simulate_devices

    make_room_for_cpu_collectives()
    if devices is not None:
        simulate_devices(devices)

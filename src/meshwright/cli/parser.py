"""A command line read as settings: a dataclass is a command's flags, and its docs their help.

A field is a flag of its name, one of a nested dataclass with the group before it, as in
`--lora.rank`. A field without a default is positional unless it is `kw_only`; so is one with
`metadata=POSITIONAL`.
"""

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import shutil
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from meshwright.cli.flags import LENGTHS, REPEATABLE, integer, seconds
from meshwright.errors import MeshwrightError, did_you_mean, one_of
from meshwright.present import wrapped

POSITIONAL = {"positional": True}
NUMBERS = (
    "Numbers: 4096, 8_192, 1e9, 4k, 2M. k and M are 1,000 and 1,000,000, for lengths and batches "
    "1,024 and 1,048,576."
)
_T = TypeVar("_T")
# what is to be written, by the last word of a name
_METAVARS = {
    "adapter": "ADAPTER", "adapters": "NAME=FOLDER", "array": "ARRAY", "axes": "NAMES",
    "batch": "SEQUENCES", "body_bytes": "BYTES", "catalogue": "FILE", "chat_template": "FILE",
    "chip": "CHIP", "chunk": "TOKENS", "coordinator": "HOST:PORT", "data": "DATA",
    "end_token": "TOKEN", "every": "STEPS", "field": "FIELD", "hang_timeout": "SECONDS",
    "host": "ADDRESS", "html": "FILE", "init_from": "MODEL", "input_length": "TOKENS",
    "keep_every": "STEPS", "learning_rate": "RATE", "max_length": "TOKENS", "max_new": "TOKENS",
    "mesh": "MESH", "mlp_chunk": "TOKENS", "model": "MODEL", "num_partitions": "DEVICES",
    "cpu_devices": "DEVICES", "on": "MACHINE", "out": "FOLDER", "override": "NAME=VALUE",
    "page_size": "TOKENS", "port": "PORT", "prompts": "TEXT", "rules": "RULES", "run": "FOLDER",
    "seq": "TOKENS", "seq_length": "TOKENS", "sequences": "SEQUENCES",
    "steps": "STEPS", "step": "STEP", "stop_at": "STEP", "store": "STORE", "submesh": "X,Y,Z,CORES",
    "targets": "NAME", "tasks": "TASKS", "tokenizer": "TOKENIZER", "trainable": "REGEX",
    "wandb": "PROJECT", "warmup_steps": "STEPS", "api_key_file": "FILE", "allow_origin": "ORIGIN",
    "api_key": "KEY", "choices": "FILE", "resume_from": "STEP", "runs": "FOLDER",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Setting:
    """A field of a settings type, or of one that is nested in it."""

    name: str  # dotted
    kind: Any  # its type without None
    default: Any  # MISSING: it must be given
    optional: bool  # None is a value of it
    positional: bool
    doc: str
    group_doc: str

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def group(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def switch_off(self) -> str:
        group = f"{self.group}." if self.group else ""
        return f"--{group}no-{self.last}".replace("_", "-")

    @property
    def element(self) -> Any:
        """The type of one value: of a tuple, that of its elements."""
        return typing.get_args(self.kind)[0] if self.is_tuple else self.kind

    @property
    def is_tuple(self) -> bool:
        return typing.get_origin(self.kind) is tuple

    @property
    def metavar(self) -> str:
        """What is to be written: choices, a word for what it means, or its type."""
        if self.positional:
            return {"sources": "FILES"}.get(self.last, self.last.upper())
        if typing.get_origin(self.element) is typing.Literal:
            return "|".join(map(str, typing.get_args(self.element)))
        by_type = {int: "N", float: "X", Path: "PATH"}
        return _METAVARS.get(self.last) or by_type.get(self.element, "TEXT")

    @property
    def usage(self) -> str:
        return self.metavar if self.positional else f"{self.flag} {self.metavar}"

    def read(self, text: str) -> Any:
        """The value that a word means, or argparse's own error."""
        try:
            return self.value(text)
        except MeshwrightError as mistake:
            raise argparse.ArgumentTypeError(str(mistake)) from None

    def value(self, text: str) -> Any:
        """The value that a word means."""
        if self.optional and (text == "None" or (self.element is not str and text == "none")):
            return None
        return self._value(text)

    def _value(self, text: str) -> Any:
        kind = self.element
        if typing.get_origin(kind) is typing.Literal:
            choices = typing.get_args(kind)
            if text not in choices:
                raise MeshwrightError(f"{text[:40]!r} is not known{did_you_mean(text, choices)}")
            return text
        if self.last == "port" and not text.isdecimal():
            raise MeshwrightError(
                f"{text[:40]!r} is not a port: a number from 1 to 65535, or 0 for a free one"
            )
        if kind is int or typing.get_origin(kind) is tuple:  # a tuple of numbers is of pairs
            return integer(text, 1024 if self.last in LENGTHS else 1000)
        if kind is Path and not text.strip():
            raise MeshwrightError("the path is empty; . is the folder you are in")
        if kind is not float:
            return kind(text)
        try:
            return float(text)
        except ValueError:
            if _METAVARS.get(self.last) == "SECONDS" or self.last.endswith("_seconds"):
                return seconds(text)
        raise MeshwrightError(f"{text[:40]!r} is not a number, such as 0.5 or 3e-4")


def read(
    settings: type[_T],
    words: Sequence[str],
    prog: str,
    about: str,
    *,
    default: _T | None = None,
    first: Sequence[str] = (),
) -> _T:
    """The settings that a command line gives; `--help` prints what it takes, and ends.

    Arguments:
        about: What the command does, in its help.
        default: Settings that the words change; then none must be given.
        first: Names of the options that are used most, which the help lists first.
    """
    wants_help = "-h" in words or "--help" in words
    known = list(_settings(settings, wants_help))
    if wants_help:
        print(_help(known, prog, about, first))
        raise SystemExit(0)
    _check_switches(words, known)
    values, rest = _parser(known).parse_known_args(_joined(words, known))
    flags = {name: value for name, value in vars(values).items() if value is not _NOT_GIVEN}
    flags |= _positional_values(rest, known, prog)
    missing = [
        setting.usage
        for setting in known
        if setting.default is dataclasses.MISSING and setting.name not in flags and default is None
    ]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        needed = " ".join(s.usage for s in known if s.default is dataclasses.MISSING)
        raise MeshwrightError(
            f"{' and '.join(missing)} {are} missing; write {prog} {needed}, and see {prog} --help"
        )
    return _built(settings, flags, default)


def _settings(
    kind: Any, with_docs: bool, prefix: str = "", group_doc: str = ""
) -> Iterator[Setting]:
    hints = typing.get_type_hints(kind)
    docs = _field_docs(kind) if with_docs else {}
    for field in dataclasses.fields(kind):
        hint, name = hints[field.name], prefix + field.name
        if dataclasses.is_dataclass(hint):
            yield from _settings(hint, with_docs, f"{name}.", _own_doc(hint))
            continue
        options = typing.get_args(hint)
        optional = type(None) in options
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            hint = next(option for option in options if option is not type(None))
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        required = default is dataclasses.MISSING and not field.kw_only
        positional = required or "positional" in field.metadata
        doc = docs.get(field.name, "")
        yield Setting(name, hint, default, optional, positional, doc, group_doc)


def _own_doc(kind: Any) -> str:
    doc = kind.__doc__ or ""
    return "" if doc.startswith(f"{kind.__name__}(") else doc.partition("\n")[0]


def _field_docs(kind: Any) -> dict[str, str]:
    """The texts below the fields of a class."""
    body = _classes(str(sys.modules[kind.__module__].__file__)).get(kind.__name__, [])
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


@functools.cache
def _classes(file: str) -> Mapping[str, list[ast.stmt]]:
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        flag, colon, reason = message.removeprefix("argument ").partition(": ")
        flag = flag.partition("/")[0]
        if reason.startswith("expected"):
            raise MeshwrightError(f"{flag} needs a value")
        if reason.startswith("ignored explicit"):
            raise MeshwrightError(f"{flag} takes no value; write it alone")
        raise MeshwrightError(f"{flag}{colon}{reason}")


_NOT_GIVEN = object()


def _parser(known: Sequence[Setting]) -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=_NOT_GIVEN)
    for setting in known:
        if setting.positional:
            continue
        options: dict[str, Any] = {"dest": setting.name}
        if setting.kind is bool:
            parser.add_argument(setting.flag, action="store_const", const=True, **options)
            parser.add_argument(setting.switch_off, action="store_const", const=False, **options)
            continue
        if setting.flag in REPEATABLE:
            options |= {"action": _Append}
        elif setting.is_tuple:
            options |= {"nargs": "*"}
        parser.add_argument(setting.flag, type=setting.read, **options)
    return parser


class _Append(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*([] if before is _NOT_GIVEN else before), values])


def _joined(words: Sequence[str], known: Sequence[Setting]) -> list[str]:
    """Words with flags in their own spelling, and values that begin with `-` next to their flag."""
    takes_one = {
        setting.flag for setting in known if setting.kind is not bool and not setting.positional
    }
    joined: list[str] = []
    for word in words:
        flag, equals, value = word.partition("=")
        if word == "--":  # nothing here needs it
            continue
        if joined and joined[-1] in takes_one and word[:1] == "-" and word[:2] != "--":
            joined[-1] += f"={word}"
        elif word.startswith("--"):
            joined.append(flag.replace("_", "-") + equals + value)
        else:
            joined.append(word)
    return joined


def _check_switches(words: Sequence[str], known: Sequence[Setting]) -> None:
    """Raise for a switch that is given yes or no, with how it is turned on and off."""
    switches = {setting.flag: setting for setting in known if setting.kind is bool}
    for word, after in itertools.zip_longest(words, words[1:], fillvalue=""):
        flag, equals, value = word.partition("=")
        setting = switches.get(flag.replace("_", "-"))
        value = (value if equals else after).lower()
        if setting is not None and value in _YES_NO:
            meant = setting.flag if _YES_NO[value] else setting.switch_off
            raise MeshwrightError(f"{setting.flag} takes no value; write {meant}")


_YES_NO = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}


def _positional_values(rest: list[str], known: Sequence[Setting], prog: str) -> dict[str, Any]:
    """The words that no flag takes, by the settings that they are; or what is wrong with them."""
    words: list[str] = []
    unknown: list[str] = []
    previous = ""
    for word in rest:
        if word.startswith("-") and word != "-":
            unknown.append(word.partition("=")[0])
        elif not (previous.startswith("-") and "=" not in previous):
            words.append(word)
        previous = word
    if unknown:
        raise MeshwrightError("; ".join(_unknown(flag, known, prog) for flag in unknown))
    values: dict[str, Any] = {}
    positional = [setting for setting in known if setting.positional]
    for setting in positional:
        if setting.is_tuple:
            values |= {setting.name: [setting.value(word) for word in words]} if words else {}
            words = []
        elif words:
            values[setting.name] = setting.value(words.pop(0))
    if words:
        takes = " ".join([prog, *(setting.metavar for setting in positional)])
        raise MeshwrightError(
            f"{' '.join(words)!r} is too much: write {takes} and options, which --help lists"
        )
    return values


def _unknown(flag: str, known: Sequence[Setting], prog: str) -> str:
    options = [setting for setting in known if not setting.positional]
    last = flag.lstrip("-").rpartition(".")[2].replace("-", "_")
    same = [setting.flag for setting in options if setting.last == last]
    if same:
        return f"{prog} has no option {flag}; did you mean {one_of(same[:2])}?"
    close = did_you_mean(flag, [setting.flag for setting in options])
    if "did you mean" not in close:
        close = f"; {prog} --help lists its options"
    return f"{prog} has no option {flag}{close}"


def _built(kind: Any, given: Mapping[str, Any], default: Any, prefix: str = "") -> Any:
    """A settings value with what is given; the rest is the default's."""
    values: dict[str, Any] = {}
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            if any(key.startswith(f"{name}.") for key in given):
                before = None if default is None else getattr(default, field.name)
                values[field.name] = _built(hint, given, before, f"{name}.")
        elif name in given:
            values[field.name] = _of_type(given[name], hint)
    return kind(**values) if default is None else dataclasses.replace(default, **values)


def _of_type(value: Any, hint: Any) -> Any:
    """A list of words as a tuple, of pairs where the type says so."""
    if not isinstance(value, list):
        return value
    options = [hint, *typing.get_args(hint)]
    element = typing.get_args(next(o for o in options if typing.get_origin(o) is tuple))[0]
    if typing.get_origin(element) is not tuple:
        return tuple(value)
    if len(value) % 2:
        raise MeshwrightError(f"{len(value)} numbers are no pairs, such as 1 512 4 128")
    return tuple(zip(value[::2], value[1::2], strict=True))


def _help(known: Sequence[Setting], prog: str, about: str, first: Sequence[str]) -> str:
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    needed = [setting.usage for setting in known if setting.default is dataclasses.MISSING]
    lines = [f"usage: {' '.join([prog, *needed])} [options]", "", inspect.cleandoc(about), ""]
    lines += _option_lines([setting for setting in known if setting.positional], width)
    options = [setting for setting in known if not setting.positional]
    by_name = {setting.name: setting for setting in options}
    often = [by_name[name] for name in first]
    rest = [setting for setting in options if setting.name not in first]
    groups: dict[str, list[Setting]] = {"most used" if often else "options": often}
    for setting in rest:
        groups.setdefault(setting.group or ("more" if often else "options"), []).append(setting)
    for group, members in groups.items():
        if members:
            doc = members[0].group_doc if group == members[0].group else ""
            lines += ["", f"{group}: {doc}" if doc else f"{group}:", *_option_lines(members, width)]
    return "\n".join([*lines, "", wrapped(NUMBERS, width)])


def _option_lines(settings: Sequence[Setting], width: int, column: int = 24) -> list[str]:
    """A table of settings: what is to be written, what it means, its default."""
    lines = []
    for setting in settings:
        written = setting.usage
        if setting.kind is bool:
            off = (
                "" if setting.default is False and not setting.group else f", {setting.switch_off}"
            )
            written = setting.flag + off
        text = wrapped(setting.doc + _default_text(setting), width, column)
        if len(written) <= column - 4:
            lines.append(f"  {written:<{column - 2}}{text.lstrip()}".rstrip())
        else:
            lines += [f"  {written}", *([text] if text else [])]
    return lines


def _default_text(setting: Setting) -> str:
    default = setting.default
    if default is dataclasses.MISSING or default in (None, (), "") or default is False:
        return ""
    return f" (default: {'on' if default is True else default})"

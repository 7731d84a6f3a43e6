"""A command line is read as settings: a dataclass is its flags."""

import dataclasses
from pathlib import Path
from typing import Literal

import pytest

from meshwright import MeshwrightError
from meshwright.cli.parser import POSITIONAL, read


@dataclasses.dataclass(frozen=True)
class Inner:
    """Settings of the inner part."""

    rank: int = 0
    """Rank of it."""
    kind: Literal["plain", "fancy"] = "plain"
    """How it is done."""


@dataclasses.dataclass(frozen=True)
class Settings:
    model: str
    """A model."""
    out: Path = dataclasses.field(kw_only=True)
    """Where to."""
    seq: int = 512
    """Length."""
    rate: float | None = 0.5
    """How fast."""
    pack: bool = True
    """Packs them."""
    names: tuple[str, ...] = ()
    """Some names."""
    shapes: tuple[tuple[int, int], ...] | None = None
    """Pairs of numbers."""
    prompt: tuple[str, ...] = ()
    """Repeatable."""
    extra: str | None = dataclasses.field(default=None, metadata=POSITIONAL)
    """One more word."""
    inner: Inner = dataclasses.field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.seq < 1:
            raise MeshwrightError(f"seq={self.seq} must be at least 1")


def parse(*words: str, default: Settings | None = None) -> Settings:
    return read(Settings, words, "meshwright try", "Try it.", default=default, first=("seq",))


def test_flags_are_fields() -> None:
    words = (
        "m more --out=there --seq 4k --rate none --no-pack --names a b --shapes 1 512 4 128 "
        "--inner.rank 1_6 --inner.kind fancy --prompt x --prompt y"
    )
    assert parse(*words.split()) == Settings(
        "m", out=Path("there"), seq=4096, rate=None, pack=False, names=("a", "b"),
        shapes=((1, 512), (4, 128)), prompt=("x", "y"), extra="more", inner=Inner(16, "fancy"),
    )  # fmt: skip


def test_words_may_stand_anywhere_and_begin_with_a_dash() -> None:
    read_settings = parse(
        "--out", "there", "m", "--prompt", "- one", "--prompt", "-", "--inner.rank", "-1"
    )
    assert read_settings.model == "m"
    assert read_settings.prompt == ("- one", "-")
    assert read_settings.inner.rank == -1


def test_given_settings_are_changed() -> None:
    given = Settings("m", out=Path("a"), inner=Inner(4, "fancy"))
    assert parse("--inner.rank", "8", default=given) == dataclasses.replace(
        given, inner=Inner(8, "fancy")
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "MODEL and --out FOLDER are missing; write meshwright try MODEL --out FOLDER"),
        ("m --out x --sq 5", "meshwright try has no option --sq; did you mean '--seq'?"),
        ("m --out x --rank 5", "has no option --rank; did you mean '--inner.rank'?"),
        ("m --out x --zzz", "has no option --zzz; meshwright try --help lists its options"),
        (
            "m --out x --sq 5 --zzz 4",
            "--sq; did you mean '--seq'?; meshwright try has no option --zzz",
        ),
        ("m --out x --seq", "--seq needs a value"),
        ("m --out x --seq 0", "seq=0 must be at least 1"),
        ("m --out x --seq 1.5", "--seq: '1.5' is not a whole number"),
        ("m --out x --rate fast", "--rate: 'fast' is not a number, such as 0.5"),
        (
            "m --out x --inner.kind fancier",
            "--inner.kind: 'fancier' is not known; did you mean 'fancy'?",
        ),
        ("m --out x --pack=yes", "--pack takes no value; write --pack"),
        ("m more most --out x", "'most' is too much: write meshwright try MODEL EXTRA and options"),
        ("m --out x --shapes 1 2 3", "3 numbers are no pairs"),
    ],
)
def test_every_mistake_is_one_sentence(words: str, says: str) -> None:
    with pytest.raises(MeshwrightError) as mistake:
        parse(*words.split())
    assert says in str(mistake.value)
    assert "\n" not in str(mistake.value)


def test_help_lists_the_most_used_options_first_and_names_what_to_write(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        parse("--help")
    assert not ended.value.code
    shown = capsys.readouterr().out
    for line in (
        "usage: meshwright try MODEL --out FOLDER [options]",
        "  MODEL                 A model.",
        "most used:\n  --seq TOKENS          Length. (default: 512)",
        "  --rate X              How fast. (default: 0.5)",
        "  --pack, --no-pack     Packs them. (default: on)",
        "inner: Settings of the inner part.\n  --inner.rank N        Rank of it. (default: 0)",
        "  --inner.kind plain|fancy\n                        How it is done. (default: plain)",
    ):
        assert line in shown
    assert max(map(len, shown.splitlines())) <= 80

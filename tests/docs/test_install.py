"""How to install: one command everywhere, extras that exist, systems that have packages."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import meshwright as mw
from meshwright.errors import install_command

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
TEXTS = [
    file
    for pattern in ("*.md", "docs/**/*.md", "src/**/*.py", "examples/*.py", "benchmarks/*")
    for file in ROOT.glob(pattern)
    if file.suffix in (".md", ".py") and file.name != "CHANGELOG.md"
]


def test_no_text_names_a_package_that_no_index_has() -> None:
    """Meshwright is on no package index: it is installed from a clone."""
    wrong = [
        (str(file.relative_to(ROOT)), found)
        for file in TEXTS
        for found in re.findall(r"pip install [^`\n]*?\bmeshwright\b[^`\n]*", file.read_text())
    ]
    assert not wrong


def test_every_install_command_of_ours_is_the_one_command_with_an_extra_that_exists() -> None:
    commands = [
        (str(file.relative_to(ROOT)), command, extras)
        for file in TEXTS
        for command, extras in re.findall(
            r"(pip install[^`\n]*?'?\.\[([\w,{}]+)\]'?)", file.read_text()
        )
    ]
    assert len(commands) > 5
    for file, command, extras in commands:
        assert command == install_command(extras), file
        assert extras == "{extra}" or set(extras.split(",")) <= EXTRAS.keys(), file


def test_the_page_about_installing_names_every_extra_for_pip_and_uv() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    for extra in EXTRAS:
        assert f"`{extra}`" in page, extra
    for extras in ("serve", "serve,cuda", "serve,tpu", "serve,cuda,torch"):
        assert f"| `{install_command(extras)}` | `uv {install_command(extras)}` |" in page


@pytest.mark.parametrize(
    ("extra", "system", "processor", "installs"),
    [
        ("tpu", "linux", "x86_64", True),
        ("tpu", "linux", "aarch64", False),
        ("tpu", "darwin", "arm64", False),
        ("cuda", "linux", "x86_64", True),
        ("cuda", "linux", "aarch64", True),
        ("cuda", "darwin", "arm64", False),
    ],
)
def test_a_compiler_is_installed_where_there_is_a_package_of_it(
    extra: str, system: str, processor: str, installs: bool
) -> None:
    where = {"sys_platform": system, "platform_machine": processor}
    markers = [Requirement(text).marker for text in EXTRAS[extra]]
    assert [marker is None or marker.evaluate(where) for marker in markers] == [installs]


def test_the_citation_names_the_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {mw.__version__}\n" in citation
    assert PROJECT["dynamic"] == ["version"]


def test_contributing_names_every_package() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    folders = {path.parent.name for path in (ROOT / "src" / "meshwright").glob("*/__init__.py")}
    assert set(re.findall(r"\b(\w+)/  +\w", text)) == folders


def test_the_demo_does_not_install_what_only_tests_need() -> None:
    makefile = (ROOT / "Makefile").read_text()
    rule = re.search(r"^\$\(DEMO\):.*?\n\n", makefile, re.MULTILINE | re.DOTALL)
    assert rule
    extra = re.search(r"-e '\.\[(\w+)\]'", rule[0])
    assert extra
    wanted = [*PROJECT["dependencies"], *EXTRAS[extra[1]]]
    names = {Requirement(text).name for text in wanted}
    assert names & {"jax", "starlette"} == {"jax", "starlette"}
    assert not names & {"torch", "transformers", "mypy", "pytest", "flax", "meshwright"}
    for target in ("demo", "serve", "demo-layout"):
        assert re.search(rf"^{target}: \$\(DEMO\)$", makefile, re.MULTILINE)

"""The site that `make docs` builds: every name, command and page is in it, every link leads on."""

import dataclasses
import importlib
import importlib.util
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import meshwright as mw
from meshwright.cli.commands import COMMANDS
from meshwright.models import FAMILIES, PRESETS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def _tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SITE = _tool("docs_site")


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    return SITE.generated_pages()


def _directives(page: str) -> set[str]:
    return set(re.findall(r"^::: (\S+)$", page, re.MULTILINE))


def test_every_public_name_is_in_the_reference(generated: dict[str, str]) -> None:
    page = generated["reference/python/meshwright.md"]
    assert {f"meshwright.{name}" for name in mw.__all__} <= _directives(page)


@pytest.mark.parametrize(
    "name", sorted(path.parent.name for path in SITE.SOURCE.glob("*/__init__.py"))
)
def test_every_name_that_a_package_exports_is_in_the_reference(
    name: str, generated: dict[str, str]
) -> None:
    if name == "torch":
        pytest.importorskip("torch")
    package = importlib.import_module(f"meshwright.{name}")
    exports = getattr(package, "__all__", [])
    page = generated.get(f"reference/python/meshwright.{name}.md", "")
    linked = set(re.findall(r"\[`mw\.(\w+)`\]\[meshwright\.\1\]", page))
    described = {path.removeprefix(f"meshwright.{name}.") for path in _directives(page)}
    assert set(exports) <= linked | described
    assert linked <= set(mw.__all__)


def test_every_command_is_in_the_reference_with_its_options(generated: dict[str, str]) -> None:
    for name, command in COMMANDS.items():
        page = generated[SITE.command_address(name)]
        assert page.startswith(f"# meshwright {name}\n")
        assert command.summary in page
        assert "```text\n```" not in page
    for field in dataclasses.fields(mw.TrainConfig):
        if field.name != "model":
            flag = "--" + field.name.replace("_", "-")
            assert flag in generated["reference/commands/train.md"], flag
    assert re.search("^## ", generated["reference/commands/train.md"], re.MULTILINE)
    assert "--explain MESH" in generated["reference/commands/plan.md"]
    of_data = [page for name, page in generated.items() if name.startswith("reference/commands/da")]
    assert any("# meshwright data pack" in page and "--loss-on" in page for page in of_data)


def test_every_architecture_and_preset_is_in_the_table_of_models(generated: dict[str, str]) -> None:
    page = generated["reference/models.md"]
    for family in FAMILIES:
        for architecture in family.hugging_face.architectures:
            assert f"| {architecture} |" in page
    for name in PRESETS:
        assert f"| `{name}` |" in page
    assert "| `llama-3.1-405b` | 406B |" in page
    assert "| `qwen3-30b-a3b` | 30.5B |" in page


def test_every_chip_is_in_the_catalogue_of_the_reference(generated: dict[str, str]) -> None:
    page = generated["reference/machines.md"]
    assert {line.split(" ")[0] for line in page.splitlines()} >= {*mw.CHIPS}


def test_every_name_of_ours_in_a_page_exists() -> None:
    text = "\n".join(file.read_text() for file in (ROOT / "README.md", *DOCS.rglob("*.md")))
    for name in set(re.findall(r"\bmw\.(\w+)", text)):
        assert hasattr(mw, name) or name == "torch", name


def test_every_page_is_in_the_navigation_once(generated: dict[str, str]) -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = list(_pages(SITE.with_folders(nav, generated)))
    committed = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(listed) == sorted({*committed, *generated})


def _pages(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        target = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(target, list):
            yield from _pages(target)
        else:
            yield target


def test_every_link_leads_to_a_file_of_the_repository() -> None:
    """Pages are read there too, where what `make docs` generates is not. It checks the anchors."""
    wrong = []
    for file in (*ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md"), *DOCS.rglob("*.md")):
        text = re.sub(r"^```.*?^```$", "", file.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            aim = Path(os.path.normpath(file.parent / target))
            if "://" not in target and not aim.exists():
                wrong.append((str(file.relative_to(ROOT)), target))
    assert not wrong


def test_lists_and_tables_begin_after_an_empty_line() -> None:
    """Without one mkdocs makes them a part of the paragraph before, where others do not."""
    wrong = []
    for file in (*DOCS.rglob("*.md"), *(ROOT / name for name in SITE.ROOT_PAGES)):
        text = re.sub(r"^```.*?^```$", "", file.read_text(), flags=re.MULTILINE | re.DOTALL)
        for before, line in itertools.pairwise(text.splitlines()):
            begins = re.match(r"- |\d+\. |\|", line)
            if begins and before.strip() and not re.match(r"\s*(- |\d+\. |\|)|  |#", before):
                wrong.append(f"{file.relative_to(ROOT)}: {line[:60]}")
    assert not wrong


def test_a_link_to_a_file_outside_of_the_site_becomes_its_name() -> None:
    page = DOCS / "plan" / "plan.md"
    text = "See [the code](../../src/meshwright/api.py), [results](../../benchmarks/RESULTS.md#a)."
    assert SITE.in_site(text, page) == (
        "See the code (`src/meshwright/api.py`), [results](../results.md#a)."
    )


def test_the_figures_are_those_that_the_script_draws() -> None:
    """After a change: python tools/draw_figures.py."""
    figures = _tool("draw_figures").FIGURES
    assert {path.name for path in (DOCS / "images").glob("concept-*.svg")} == {*figures}
    for name, draw in figures.items():
        assert draw().svg() == (DOCS / "images" / name).read_text(), name

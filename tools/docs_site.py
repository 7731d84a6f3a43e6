"""The generated pages of the documentation: a hook of mkdocs, and what tests ask of it.

`make docs` runs it. The reference of Python names is a list of directives that mkdocstrings fills
from the sources; the reference of commands is what each prints for --help; the table of models is
read from the families. Nothing of it is committed.
"""

import ast
import contextlib
import io
import os
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "meshwright"

# pages outside of docs/ that are part of the site, and their address in it
ROOT_PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/RESULTS.md": "results.md",
}
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


# --- the reference of Python names


def exported(package: Path) -> list[str]:
    """The names in `__all__` of a package, read without importing it."""
    for node in ast.parse(package.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def packages() -> dict[str, list[str]]:
    """The importable packages of Meshwright that export names, the whole of it first."""
    found = {"meshwright": exported(SOURCE / "__init__.py")}
    for init in sorted(SOURCE.glob("*/__init__.py")):
        if names := exported(init):
            found[f"meshwright.{init.parent.name}"] = names
    return found


def python_pages() -> Iterator[tuple[str, str]]:
    """A page for each package: each of its names as a directive for mkdocstrings."""
    for package, names in packages().items():
        above = exported_from(package)  # which are on the page of `meshwright`
        lines = [f"# {package}", ""]
        if package == "meshwright":
            lines += ["`import meshwright as mw`. These names are what most programs need.", ""]
        else:
            lines += [f"::: {package}", "    options:", "      members: false"]
            lines += ["      show_root_heading: false", ""]
        if above:
            links = (f"[`mw.{name}`][meshwright.{name}]" for name in sorted(above, key=str.lower))
            lines += [f"In `meshwright` itself: {', '.join(links)}.", ""]
        for name in sorted(names, key=str.lower):
            if name not in above:
                lines += [f"::: {package}.{name}", ""]
        yield f"reference/python/{package}.md", "\n".join(lines)


def exported_from(package: str) -> set[str]:
    """The names of a package that `meshwright` exports too."""
    for node in ast.parse((SOURCE / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_MODULES":
            return set(ast.literal_eval(node.value).get(package, ()))
    return set()


# --- the reference of commands


def printed_by(words: list[str], width: int = 88) -> str:
    """What a command prints, so many characters wide and without colours."""
    from meshwright.cli.commands import run

    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR")}
    os.environ.update(COLUMNS=str(width), NO_COLOR="1")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            run(words)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return re.sub(r"\x1b\[[0-9;]*m| +$", "", printed.getvalue(), flags=re.MULTILINE)


def subcommands(help_text: str) -> list[str]:
    """Those that the usage of a command names: `usage: meshwright data [-h] {pack,info}`."""
    found = re.search(r"^usage: .*\{([a-z,-]+)\}\s*$", help_text.split("\n\n")[0], re.MULTILINE)
    return found[1].split(",") if found else []


# the heading of a group of options: underlined, or a line of its own with a colon
GROUP = r"^(?: (\S.*)\n -{20,}|([a-z][\w ]*):)\n"


def help_page(words: list[str], level: int = 1) -> str:
    """The help of a command as Markdown: a heading for each group of options."""
    text = printed_by([*words, "--help"])
    usage, *groups = re.split(GROUP, text, flags=re.MULTILINE)
    lines = [f"{'#' * level} meshwright {' '.join(words)}", "", fence(usage)]
    for underlined, named, options in zip(*(groups[start::3] for start in range(3)), strict=True):
        title = (underlined or named).capitalize()
        lines += [f"{'#' * (level + 1)} {title}", "", fence(options)]
    parts = [help_page([*words, name], level + 1) for name in subcommands(text)]
    return "\n".join([*lines, *parts])


def fence(text: str) -> str:
    """Preformatted text; longer lines are broken."""
    lines = (textwrap.wrap(line, 100) or [""] for line in textwrap.dedent(text).strip().split("\n"))
    return "\n".join(["```text", *(part for parts in lines for part in parts), "```", ""])


def command_pages() -> Iterator[tuple[str, str]]:
    """A page for each command."""
    from meshwright.cli.commands import COMMANDS

    for name, command in COMMANDS.items():
        title, _, rest = help_page(name.split()).partition("\n")
        yield command_address(name), f"{title}\n\n{command.summary}\n{rest}"


def command_address(name: str) -> str:
    return f"reference/commands/{name.replace(' ', '-')}.md"


# --- the table of models


def model_page() -> str:
    """Every architecture and every preset, from the families' own tables."""
    from meshwright.models import BY_TRANSFORMERS, FAMILIES, parameter_counts, to_hf_config
    from meshwright.present import count_text

    lines = [MODELS_INTRODUCTION]
    presets = ["", "## Presets", "", "| preset | parameters | longest sequence | architecture |"]
    presets += ["|---|---|---|---|"]
    for family in FAMILIES:
        for architecture, kind in family.hugging_face.architectures.items():
            torch = "yes" if kind in {*BY_TRANSFORMERS, *OWN_TORCH} else "no"
            lines.append(f"| {architecture} | `{kind}` | {family.name} | {torch} |")
        for name, config in family.presets.items():
            architecture = to_hf_config(config)["architectures"][0]
            size = count_text(parameter_counts(config)[0])
            presets.append(f"| `{name}` | {size} | {config.max_seq:,} | {architecture} |")
    for kind in BY_TRANSFORMERS:
        if not any(kind in f.hugging_face.architectures.values() for f in FAMILIES):
            lines.append(f"| network of transformers | `{kind}` | PyTorch alone | yes |")
    return "\n".join([*lines, *presets, ""])


def machine_page() -> str:
    """The catalogue of chips, as `meshwright machines` prints it."""
    return f"{MACHINES_INTRODUCTION}\n{fence(printed_by(['machines'], 100))}"


MACHINES_INTRODUCTION = """# Chips and prices

The catalogue of this version, as `meshwright machines` prints it; `meshwright machines CHIP` gives
the source of each figure and all prices with their dates. How to name a machine of these chips:
[machines](../notation/machines.md). Chips and prices of your own go into a file:
[compare machines](../plan/compare-machines.md#prices).
"""

OWN_TORCH = ("llama", "mistral", "qwen2", "qwen3")  # --backend torch, and JAX resumes their runs
MODELS_INTRODUCTION = """# Supported models

Made from the tables of the code when this site is built. Each line of the families `decoder` and
`t5` trains, plans, audits, generates, serves, and reads and writes Hugging Face folders, in JAX.
The column `--backend torch` says what the PyTorch backend of `meshwright train` takes; other models
of transformers are split by [`mw.torch.parallelize`](../coming-from/pytorch-2d.md). A model without
a preset is used by its folder or its name on the Hub
([Hugging Face models](../train/hugging-face.md)). One that is not here is
[added](../add-a-model.md) by a table of fields and tensor names, or as a family of its own.

## Architectures

| architecture | `model_type` | family | `--backend torch` |
|---|---|---|---|"""


# --- the site


def generated_pages() -> dict[str, str]:
    """Every page that is not a file of docs/, by its address in the site."""
    pages = {"reference/models.md": model_page(), "reference/machines.md": machine_page()}
    pages |= dict(command_pages()) | dict(python_pages())
    for file, address in ROOT_PAGES.items():
        pages[address] = (ROOT / file).read_text()
    return pages


def link_in_site(target: str, file: Path) -> str | None:
    """Where a relative link of a file leads in the site; None: to a file that is not part of it."""
    path, hash_mark, anchor = target.partition("#")
    if not path or "://" in path or path.startswith("mailto:"):
        return target
    aim = Path(os.path.normpath(file.parent / path))
    here = page_address(file)
    if aim.is_relative_to(DOCS):
        there = aim.relative_to(DOCS).as_posix()
    elif str(aim.relative_to(ROOT)) in ROOT_PAGES:
        there = ROOT_PAGES[str(aim.relative_to(ROOT))]
    elif aim == ROOT / "README.md":
        there = "README.md"
    else:
        return None
    relative = os.path.relpath(there, PurePosixPath(here).parent)
    return PurePosixPath(relative).as_posix() + hash_mark + anchor


def page_address(file: Path) -> str:
    """The address of a page's source in the site."""
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    return ROOT_PAGES[str(file.relative_to(ROOT))]


def in_site(text: str, file: Path) -> str:
    """A page whose links to files outside of the site are the names of these files."""

    def link(found: re.Match[str]) -> str:
        there = link_in_site(found[2], file)
        if there is not None:
            return f"[{found[1]}]({there})"
        name = os.path.relpath(os.path.normpath(file.parent / found[2]), ROOT)
        return f"`{name}`" if found[1] in name else f"{found[1]} (`{name}`)"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def with_folders(nav: list[Any], pages: Iterable[str]) -> list[Any]:
    """The navigation of mkdocs.yml, in which a folder stands for all generated pages in it."""
    expanded: list[Any] = []
    for entry in nav:
        title, target = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
        if isinstance(target, list):
            expanded.append({title: with_folders(target, pages)})
        elif target.endswith("/"):
            inside = [page for page in pages if page.startswith(target)]
            expanded.append({title: [{PurePosixPath(page).stem: page} for page in inside]})
        else:
            expanded.append(entry)
    return expanded


def on_config(config: Any) -> Any:
    """mkdocs: make the generated pages, and put them into the navigation."""
    _made.update(generated_pages())
    config.nav = with_folders(config.nav, _made)
    return config


_made: dict[str, str] = {}


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: add the generated pages."""
    from mkdocs.structure.files import File

    for address, text in _made.items():
        files.append(File.generated(config, address, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs: links between files become links between pages."""
    address = page.file.src_uri
    source = {there: file for file, there in ROOT_PAGES.items()}.get(address)
    file = ROOT / source if source else DOCS / address
    return in_site(markdown, file) if file.exists() else markdown

"""Every snippet of every page runs, and prints what the page shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])


# pages whose commands take a minute and more
LONG = ("docs/train/long-context.md", "docs/plan/prove.md")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow) if name in LONG else page
        for page, name in ((page, str(page.relative_to(ROOT))) for page in PAGES)
    ],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_snippet_of_the_page_runs(page: Path, tmp_path: Path) -> None:
    runner = Path(__file__).with_name("run_page.py")
    # a cache of its own: what was compiled before says less
    environment = os.environ | {"MESHWRIGHT_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, runner, page], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    has_snippets = re.search(r"^```(python|console)$", page.read_text(), re.MULTILINE)
    assert not has_snippets or not done.stdout.startswith("0 snippets")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_the_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target

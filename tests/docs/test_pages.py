"""Every snippet of every page runs, and prints what the page shows."""

import os
import re
from pathlib import Path

import pytest
from tests.forked import Commands

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])


# pages whose commands take half a minute and more; tests/test_fine_tune.py goes the way of those of
# fine-tuning, and test_commands.py reads every command
LONG = (
    "docs/train/long-context.md", "docs/plan/prove.md", "docs/train/fine-tune.md",
    "docs/train/lora.md", "docs/train/dpo.md", "docs/tutorial.md", "docs/train/experts.md",
    "docs/train/conversations.md", "docs/plan/your-own-program.md",
)  # fmt: skip
# pages that decode with an engine of the usual length: fusions in LLVM's IR compile quickly, and
# take seconds a step there
DECODING = ("docs/train/generate.md", "docs/serve/engine.md")
SLOW_FUSIONS = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow) if name in LONG else page
        for page, name in ((page, str(page.relative_to(ROOT))) for page in PAGES)
    ],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_snippet_of_the_page_runs(
    page: Path, commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not re.search(r"^```(python|console)$", page.read_text(), re.MULTILINE):
        return
    runner, said = Path(__file__).with_name("run_page.py"), tmp_path / "said"
    # a cache of its own: what was compiled before says less
    environment = {"MESHWRIGHT_CACHE": str(tmp_path / "cache")}
    if str(page.relative_to(ROOT)) in DECODING:
        environment["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace(SLOW_FUSIONS, "")
    folder = tmp_path / "page"
    folder.mkdir()
    monkeypatch.chdir(folder)
    code = commands.run_script(runner, [str(page)], said, environment)
    assert code == 0, said.read_text()
    assert not re.search("^0 snippets", said.read_text(), re.MULTILINE)

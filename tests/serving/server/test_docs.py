"""The curl examples of docs/serve/server.md are run, and print what the page shows."""

import doctest
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.docs.run_page import FENCE, ByLine
from tests.patience import PATIENCE_S
from tests.serving.server.serving import serving

PAGE = Path(__file__).parents[3] / "docs" / "serve" / "server.md"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_examples_print_what_the_page_shows() -> None:
    blocks = [body for _, body in FENCE.findall(PAGE.read_text()) if "$ curl" in body]
    examples = [each for block in blocks for each in re.split(r"^\$ ", block, flags=re.M) if each]
    assert len(examples) >= 9
    with serving(name="first") as server:
        for example in examples:
            command, _, shown = example.partition("\n")
            command = command.replace("http://127.0.0.1:8000", server.url)
            done = subprocess.run(
                command, shell=True, capture_output=True, text=True, timeout=PATIENCE_S
            )
            alike = ByLine().check_output(shown, done.stdout, doctest.ELLIPSIS)
            assert alike, (
                f"{command} printed\n{done.stdout}{done.stderr}\nbut the page shows\n{shown}"
            )

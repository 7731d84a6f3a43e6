"""A page's script, run by node on stand-ins for the browser's elements."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.patience import PATIENCE_S

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="runs a page's script: node is not installed")


def run_script(text: str, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the script drew, and then what every listener of it did; fails where one throws."""
    assert NODE is not None
    file = folder / "page.html"
    file.write_text(text, encoding="utf-8")
    command = [NODE, str(Path(__file__).with_name("stand_in.js")), str(file)]
    done = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    return told["drawn"], told["fired"]


def of(drawn: list[dict[str, Any]], tag: str, kind: str = "") -> list[dict[str, Any]]:
    """The elements of a tag, and of a class where one is said."""
    return [
        one
        for one in drawn
        if one["tag"] == tag and (not kind or kind in one.get("class", "").split())
    ]

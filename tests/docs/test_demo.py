"""The demo prints commands that a shell takes back as they were run."""

import importlib.util
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def demo() -> Any:
    spec = importlib.util.spec_from_file_location("train_demo", ROOT / "examples/train_demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("on_path", [True, False])
def test_every_command_can_be_copied(
    demo: Any,
    on_path: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(demo.subprocess, "run", lambda command, check: ran.append(list(command)))
    folder = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{folder if on_path else tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "argv", ["train_demo.py", "--run", str(tmp_path / "my run")])
    demo.main()
    shown = capsys.readouterr().out
    assert [shlex.split(line[2:]) for line in shown.splitlines() if line[:2] == "$ "] == ran
    assert [command[-1] for command in ran if "<|endoftext|>" in command] == [r"\n\n"]
    assert any("The old" in command for command in ran)
    # those to try next, too
    offered = re.findall(r"^  (\S*meshwright .*)$", shown, re.MULTILINE)
    assert len(offered) == 3
    for line in [*offered, shlex.join(ran[0])]:
        assert shutil.which(shlex.split(line)[0]), line
    assert shlex.split(offered[0])[1:] == ["serve", str(tmp_path / "my run")]

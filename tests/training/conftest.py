"""Runs through the command line."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.forked import Commands

TrainCommand = Callable[..., str]


@pytest.fixture
def train_command(commands: Commands, tmp_path: Path) -> TrainCommand:
    """Runs `meshwright train` with arguments, and gives what it printed."""

    def run(*arguments: str, expect: int = 0) -> str:
        said = tmp_path / "said"
        code = commands.run(["train", *arguments], said)
        assert code == expect, said.read_text()
        return said.read_text()

    return run

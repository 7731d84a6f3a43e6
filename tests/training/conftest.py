"""Runs through the command line."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.forked import Commands

TrainCommand = Callable[..., str]


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    with contextlib.closing(Commands()) as commands:
        yield commands


@pytest.fixture
def train_command(commands: Commands, tmp_path: Path) -> TrainCommand:
    """Runs `meshwright train` with arguments, and gives what it printed."""

    def run(*arguments: str, expect: int = 0) -> str:
        said = tmp_path / "said"
        code = commands.run(["train", *arguments], said)
        assert code == expect, said.read_text()
        return said.read_text()

    return run

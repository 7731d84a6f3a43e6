"""`meshwright board`: the runs of a folder on one live page."""

import dataclasses
from pathlib import Path

from meshwright.cli.parser import POSITIONAL


@dataclasses.dataclass(frozen=True)
class BoardSettings:
    runs: tuple[Path, ...] = dataclasses.field(default=(Path("runs"),), metadata=POSITIONAL)
    """Folders that hold runs, up to 4 folders deep, or runs themselves."""
    port: int = 6007
    """Port on this machine; 0: a free one. From another machine, use ssh -L."""


def board(settings: BoardSettings) -> None:
    """Show the runs of a folder on one page, live, and compare them.

    meshwright board runs
    """
    from meshwright.training.run import Board  # here, after the settings are read: it imports jax

    with Board(settings.runs, settings.port) as server:
        print(f"board of {', '.join(map(str, settings.runs))}: {server.url}", flush=True)
        print("Ctrl-C ends it", flush=True)
        server.serve()

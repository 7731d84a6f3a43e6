"""`meshwright board`: the runs of a folder on one live page."""

from pathlib import Path

import tyro

from meshwright.training.run import Board


def board(runs: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs"),), port: int = 6007) -> None:
    """Show the runs of a folder on one page, live, and compare them.

    meshwright board runs

    Args:
        runs: Folders that hold runs, at any depth up to 4, or runs themselves.
        port: Port on this machine; 0: a free one. From another machine, use ssh -L.
    """
    with Board(runs, port) as server:
        print(f"board of {', '.join(map(str, runs))}: {server.url}", flush=True)
        print("Ctrl-C ends it")
        server.serve()

"""One run at a time in a folder."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from meshwright.errors import MeshwrightError

FILE = ".lock"


@contextlib.contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Hold the folder while inside; the lock goes with the process, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / FILE).open("a+")
    except OSError as reason:
        raise MeshwrightError(
            f"run folder {str(folder)!r} cannot be written: {reason.strerror}"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise MeshwrightError(
                f"another run is writing to {str(folder)!r} ({file.read().strip() or 'unknown'}); "
                "stop it, or give --run another folder"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield

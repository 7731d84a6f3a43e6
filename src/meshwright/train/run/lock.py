"""One run at a time in a folder."""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.files import cannot_be_written

FILE = ".lock"


@contextlib.contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Hold the folder while inside; the lock goes with the process, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # unbuffered: closing has nothing left to write that could fail
        file = (folder / FILE).open("ab+", buffering=0)
    except OSError as reason:
        raise cannot_be_written(folder, reason) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().decode(errors="replace").strip() or "unknown"
            raise MeshwrightError(
                f"another run is writing to {str(folder)!r} ({owner}); "
                "stop it, or give --run another folder"
            ) from None
        except OSError as reason:
            raise MeshwrightError(
                f"run folder {str(folder)!r} cannot be locked: {reason.strerror}; give --run a "
                "folder on a file system with locks"
            ) from None
        try:
            owner_line = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
            file.truncate(0)
            if file.write(owner_line) != len(owner_line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as reason:
            raise cannot_be_written(folder, reason) from None
        yield

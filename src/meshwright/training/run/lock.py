"""One run at a time in a folder, for as long as the folder is the one it locked."""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from meshwright.errors import MeshwrightError
from meshwright.files import HeldPath, cannot_be_written
from meshwright.interrupt import before_end

FILE = ".lock"


class LostFolderError(MeshwrightError):
    """The folder is no longer this run's: the run must neither write nor delete there."""


@contextlib.contextmanager
def only_run_in(folder: Path) -> Iterator[Callable[[], None]]:
    """Hold the folder while inside; the lock goes with the process, however it ends.

    Gives a function to call before each write or deletion in the folder; it raises
    LostFolderError. A lock belongs to a file, not to its path: after `rm -rf` or `mv` of the
    folder, another run may hold a lock at the same path.

    A run that fails before it wrote anything leaves nothing behind: neither a new lock nor folders
    that were made for it.
    """
    try:
        created = [path for path in (folder / FILE, folder, *folder.parents) if not path.exists()]
        before = set(folder.iterdir()) if folder.is_dir() else set()
        folder.mkdir(parents=True, exist_ok=True)
        # unbuffered: closing has nothing left to write that could fail
        file = (folder / FILE).open("ab+", buffering=0)
    except OSError as reason:
        raise cannot_be_written(folder, reason) from None
    with file, contextlib.ExitStack() as held:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MeshwrightError(
                f"another run is writing to {str(folder)!r} ({_owner(file)}); "
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
            paths = [held.enter_context(HeldPath(path)) for path in (folder, folder / FILE)]
        except OSError as reason:
            raise cannot_be_written(folder, reason) from None

        def leave() -> None:
            with contextlib.suppress(OSError):
                if all(path.is_there() for path in paths):
                    _remove_unused(folder, created, before)

        try:
            with before_end(leave):  # a signal before the first step
                yield lambda: _check_owned(*paths)
        except BaseException:
            leave()
            raise


def _remove_unused(folder: Path, created: Sequence[Path], before: set[Path]) -> None:
    """Remove the lock and the folders that were created for it, if nothing else was added."""
    if set(folder.iterdir()) <= before | {folder / FILE}:
        for path in created:  # the innermost first; a folder that is not empty stays
            path.unlink() if path.name == FILE else path.rmdir()


def _check_owned(folder: HeldPath, lock: HeldPath) -> None:
    own_folder = folder.is_there()
    if own_folder and lock.is_there():
        return
    lost = f"lock {lock.path}" if own_folder else f"folder {folder.path}"
    try:
        with lock.path.open("rb") as file:
            change = f"replaced by that of {_owner(file)}"
            remedy = "Start it again with another --run"
    except OSError:
        change = "deleted" if own_folder else "deleted or moved"
        remedy = "The same command starts it again" + (
            "" if own_folder else "; first move the folder back, if it was moved"
        )
    raise LostFolderError(
        f"the run's {lost} was {change}. The run ended without another save, and left alone what "
        f"is there now. {remedy}"
    )


def owner(folder: Path) -> tuple[int | None, str]:
    """The process that locked the folder last, and its machine; it may be gone."""
    try:
        words = (folder / FILE).read_text(encoding="utf-8").split()
        return int(words[1]), words[3]
    except (OSError, ValueError, IndexError):
        return None, ""


def _owner(lock: IO[bytes]) -> str:
    lock.seek(0)
    return lock.read().decode(errors="replace").strip() or "unknown"

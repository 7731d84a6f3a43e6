"""One run at a time in a folder, for as long as the folder is the one it locked."""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from meshwright.errors import MeshwrightError
from meshwright.files import HeldPath, cannot_be_written
from meshwright.interrupt import before_end

FILE = ".lock"
TRIES = 100  # to lock a folder that other runs remove meanwhile


class LostFolderError(MeshwrightError):
    """The folder is no longer this run's: the run must neither write nor delete there."""


@contextlib.contextmanager
def only_run_in(folder: Path) -> Iterator[Callable[[], None]]:
    """Hold the folder while inside; the lock goes with the process, however it ends.

    Gives a function to call before each write or deletion in the folder; it raises
    LostFolderError. A lock belongs to a file, not to its path: after `rm -rf` or `mv` of the
    folder, another run may hold a lock at the same path.

    A run that fails before it wrote anything removes the folders that it made, with the lock. In a
    folder that was there before, the lock stays.
    """
    folder = Path(os.path.abspath(folder))  # the same after a chdir
    made: list[Path] = []
    paths: list[HeldPath] = []

    def leave() -> None:
        """Remove what this run made, if nothing else is there; the lock must still be held."""
        with contextlib.suppress(OSError):
            is_own = folder in made and bool(paths) and all(path.is_there() for path in paths)
            if is_own and list(folder.iterdir()) == [folder / FILE]:
                (folder / FILE).unlink()
            for path in reversed(made):
                path.rmdir()  # fails if it is not empty

    with contextlib.ExitStack() as held, before_end(leave):  # a signal before the first step
        try:
            try:
                file = held.enter_context(_locked(folder, made))
                paths += [held.enter_context(HeldPath(path)) for path in (folder, folder / FILE)]
                owner_line = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
                file.truncate(0)
                if file.write(owner_line) != len(owner_line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as reason:
                raise cannot_be_written(folder, reason) from None
            yield lambda: _check_owned(*paths)
        except BaseException:
            leave()
            raise


def _locked(folder: Path, made: list[Path]) -> IO[bytes]:
    """The lock, held; folders that are made for it are added to `made`.

    A run that fails removes its folders and its lock, between any two lines here: then try again.
    """
    for _ in range(TRIES):
        with contextlib.ExitStack() as opened:
            try:
                _make(folder, made)
                # unbuffered: closing has nothing left to write that could fail
                file = opened.enter_context((folder / FILE).open("ab+", buffering=0))
                _lock(file, folder)
                if os.path.samestat(os.fstat(file.fileno()), os.stat(folder / FILE)):
                    opened.pop_all()
                    return file
            except FileNotFoundError:
                continue
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def _make(folder: Path, made: list[Path]) -> None:
    """Make the folder and those above it; a folder that another process made first is not ours."""
    missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
            made.append(path)


def _lock(file: IO[bytes], folder: Path) -> None:
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

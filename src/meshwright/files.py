"""Files of a run: written whole or not at all; a disk that fails is one line, not a traceback."""

import contextlib
import errno
import functools
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, TextIO

from meshwright.errors import MeshwrightError

_log = logging.getLogger("meshwright")

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_WRITING = _FULL | {errno.EROFS, errno.EFBIG}
# what another place would not do
_PLACE = frozenset({
    errno.EACCES, errno.EISDIR, errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.EROFS,
})  # fmt: skip
# what a disk does, however right the program: full, over quota, read-only, broken, forbidden
_DISK = _WRITING | {errno.EIO, errno.EACCES, errno.EPERM}

_CHUNK = 1 << 20  # bytes
_OUTPUT = "output"
_warned: set[str] = set()  # what there was a warning about


def cannot_be_written(path: Path | str, reason: OSError) -> MeshwrightError:
    """The error of a file or folder that cannot be written, and what to do where that is known."""
    return MeshwrightError(f"{_name(path)} cannot be written: {_why(reason)}")


def _name(path: Path | str) -> str:
    return path if isinstance(path, str) else repr(str(path))


def _why(reason: OSError) -> str:
    hint = "; free some space, or use another disk" if reason.errno in _FULL else ""
    hint = "; give a place where you can write" if reason.errno in _PLACE else hint
    return f"{reason.strerror or reason}{hint}"


@contextlib.contextmanager
def disk_errors_in_one_line() -> Iterator[None]:
    """An error of the disk inside that nothing else took care of is a MeshwrightError."""
    try:
        yield
    except OSError as reason:
        if reason.errno not in _DISK:
            raise
        # without a name: what was open already, such as the output
        path = "the output" if reason.filename is None else Path(os.fsdecode(reason.filename))
        if reason.errno in _WRITING:
            raise cannot_be_written(path, reason) from None
        raise MeshwrightError(f"{_name(path)} cannot be read or written: {_why(reason)}") from None


def final_folder(folder: Path) -> Path:
    """Where a folder is moved to once it is complete: of a link, what it points to."""
    return Path(os.path.realpath(folder)) if folder.is_symlink() else folder.absolute()


def check_no_mount_point(folder: Path) -> None:
    """Raise if no finished folder can be moved there."""
    if os.path.ismount(folder):
        raise MeshwrightError(
            f"{_name(folder)} is a mount point, to which no finished folder can be moved; give a "
            f"new folder in it, such as {_name(folder / 'new')}"
        )


def write_whole(file: Path, content: str | bytes) -> None:
    """Write the file so that at every moment the old or the new content stands there in full."""
    new = file.with_name(f".{file.name}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with new.open("wb") as out:
            out.write(content.encode() if isinstance(content, str) else content)
            out.flush()
            os.fsync(out.fileno())
        new.replace(file)
    except OSError as reason:
        with contextlib.suppress(OSError):
            new.unlink()
        raise cannot_be_written(file, reason) from None


def check_room(folder: Path, size: int) -> None:
    """Raise if the folder's disk does not take so many bytes more: what a run writes at its start.

    They are written and deleted again: a quota or a limit does not show in what a disk has free.
    """
    probe = folder / ".room"
    try:
        with probe.open("wb", buffering=0) as out:
            for start in range(0, size, _CHUNK):
                # random: zeros take no space on a disk that compresses
                data = os.urandom(min(_CHUNK, size - start))
                if out.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(out.fileno())
    except OSError as reason:
        raise cannot_be_written(folder, reason) from None
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def print_line(text: str, file: TextIO | None = None) -> None:
    """Print a line at once; if the output cannot be written, warn once and continue."""
    with _output_may_fail():
        print(text, file=file or sys.stdout, flush=True)


class TerminalOutput:
    """A terminal for rich that may go away, as with a lost connection: the run outlives it."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with _output_may_fail():
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with _output_may_fail():
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextlib.contextmanager
def _output_may_fail() -> Iterator[None]:
    try:
        yield
    except OSError as reason:
        text = f"the output cannot be written: {reason.strerror}; the command continues"
        warn_once(_OUTPUT, text)


@contextlib.contextmanager
def output_is_written() -> Iterator[None]:
    """At the end, output that could not be written is an error; Python would only mention it.

    An error inside comes first; lines of a run that print_line() warned about are none. Nor is a
    reader that went away (`| head`): it has enough.
    """
    try:
        yield
    except BrokenPipeError:
        _flush_output()
        return
    except BaseException as ended:
        reason = None if ended.__suppress_context__ else ended.__context__
        if isinstance(ended, SystemExit) and isinstance(reason, BrokenPipeError):
            return  # so ends rich
        _flush_output()
        raise
    if (lost := _flush_output()) and _OUTPUT not in _warned:
        raise cannot_be_written("the output", lost)


@contextlib.contextmanager
def status_of(failed: bool) -> Iterator[None]:
    """Exit with status 1 after the output inside, if a check failed: also where nobody reads it.

    Output that cannot be written is an error as in other commands, with its own status.
    """
    try:
        yield
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # so ends rich
        if not failed:
            raise
    if failed:
        raise SystemExit(1) from None


def _flush_output() -> OSError | None:
    """Why standard output lost something, if it did."""
    lost = None
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as reason:
            # what is left in the buffer goes nowhere, or Python's exit would try it again
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if stream is sys.stdout and not isinstance(reason, BrokenPipeError):
                lost = reason
    return lost


def warn_once(about: str, text: str) -> None:
    """A warning on standard error, the first time there is one `about` this."""
    if about not in _warned:
        _warned.add(about)
        with contextlib.suppress(OSError):
            print(f"warning: {text}", file=sys.stderr, flush=True)


@functools.lru_cache(maxsize=256)
def log_once(text: str) -> None:
    """Log a line of information, the first time."""
    _log.info(text)


class HeldPath:
    """A file or folder that is kept open, so that no later one gets its inode number.

    After `rm -rf`, `mv` or a changed link, a path leads nowhere or to something else, which must
    not be taken for what was there.

    >>> held = HeldPath(Path("."))
    >>> held.is_there()
    True
    >>> held.close()
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))
        self._descriptor: int | None = os.open(path, os.O_RDONLY)
        self._stat = os.fstat(self._descriptor)

    def is_there(self) -> bool:
        """Whether the path leads to it; True if the disk does not tell."""
        try:
            return os.path.samestat(os.stat(self.path), self._stat)
        except OSError as reason:
            return reason.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def not_a_model(folder: Path) -> str:
    """What a folder without a config.json is, where that shows, and what to give instead of it."""
    if (folder / "tokens.bin").is_file():
        return "the folder is a token store, which --data takes; give a model"
    if (folder / "adapter_config.json").is_file():
        return (
            "the folder is an adapter of PEFT; the whole model is written by meshwright export "
            f"{folder} OUT --merge"
        )
    if runs := sorted(path.parent for path in folder.glob("*/checkpoints")):
        return f"the folder holds runs; give one, such as {runs[0]}"
    above = next((up for up in folder.resolve().parents if (up / "checkpoints").is_dir()), None)
    if above is not None:
        return f"the folder is part of the run {above}; give that"
    return "give the folder of a run (meshwright train --run FOLDER) or of a Hugging Face model"

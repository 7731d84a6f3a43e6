"""Files of a run: written whole or not at all; a disk that fails is one line, not a traceback."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from meshwright.errors import MeshwrightError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_WRITING = _FULL | {errno.EROFS, errno.EFBIG}
# what a disk does, however right the program: full, over quota, read-only, broken, forbidden
_DISK = _WRITING | {errno.EIO, errno.EACCES, errno.EPERM}

_OUTPUT = "output"
_warned: set[str] = set()  # what there was a warning about


def cannot_be_written(path: Path | str, reason: OSError) -> MeshwrightError:
    """The error of a file or folder that cannot be written, and what to do where that is known."""
    return MeshwrightError(f"{_name(path)} cannot be written: {_why(reason)}")


def _name(path: Path | str) -> str:
    return path if isinstance(path, str) else repr(str(path))


def _why(reason: OSError) -> str:
    hint = "; free some space, or use another disk" if reason.errno in _FULL else ""
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


def print_line(text: str, file: TextIO | None = None) -> None:
    """Print a line at once; if the output cannot be written, warn once and continue."""
    try:
        print(text, file=file or sys.stdout, flush=True)
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
    except BaseException:
        _flush_output()
        raise
    if (reason := _flush_output()) and _OUTPUT not in _warned:
        raise cannot_be_written("the output", reason)


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

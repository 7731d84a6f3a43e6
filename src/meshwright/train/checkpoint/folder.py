"""Where checkpoints lie, and the one rename that makes a checkpoint exist.

    run/checkpoints/
      step-00000100/       complete: it got this name after everything in it was written
        checkpoint.json    what is in it, with a checksum
        arrays/            Orbax
      .saving-00000200/    being written, or left by a process that was killed
      .deleting-00000050/  being deleted

A folder named `step-…` is complete at every moment of its life: it gets the name last, by a rename,
and loses it first, by a rename. A leading dot is never looked at, and cleared before the next save.
"""

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError

ARRAYS = "arrays"  # the part that Orbax writes
_COMPLETE = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.(saving|deleting)-\d{8,}")


def checked_folder(folder: Any) -> Path:
    """`folder` as an absolute Path; it need not exist yet."""
    if not isinstance(folder, str | os.PathLike) or not str(folder):
        raise MeshwrightError(f"checkpoint folder {folder!r} is not a path")
    if "://" in str(folder):
        raise MeshwrightError(
            f"checkpoint folder {str(folder)!r} is not on a file system; a checkpoint becomes "
            "complete by renaming its folder, which object stores cannot do; save to a disk that "
            "all processes share"
        )
    path = Path(os.path.abspath(folder))
    if path.exists() and not path.is_dir():
        raise MeshwrightError(f"checkpoint folder {path} is a file; give a folder")
    return path


def complete_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def saving_folder(folder: Path, step: int) -> Path:
    return folder / f".saving-{step:08d}"


def complete_steps(folder: Path) -> list[int]:
    """The steps of all complete checkpoints, in order."""
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise MeshwrightError(f"checkpoint folder {folder} cannot be read: {error}") from None
    found = [match for entry in entries if (match := _COMPLETE.fullmatch(entry.name))]
    return sorted(int(match[1]) for match in found if (folder / match[0]).is_dir())


def clear_leftovers(folder: Path) -> None:
    """Delete what killed saves and killed deletions left; nothing else is touched."""
    for entry in list(os.scandir(folder)):
        if _LEFTOVER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write into."""
    folder.mkdir(parents=True, exist_ok=True)
    clear_leftovers(folder)
    saving = saving_folder(folder, step)
    saving.mkdir()
    return saving


def complete(folder: Path, step: int) -> None:
    """What was written becomes a checkpoint: the rename happens or does not, nothing between."""
    flush(saving_folder(folder, step))
    os.rename(saving_folder(folder, step), complete_folder(folder, step))
    flush(folder)


def flush(path: Path) -> None:
    """Have the disk hold what was written to `path`, a file or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def give_up(folder: Path, step: int) -> None:
    """Delete a save that failed, to give its space back."""
    shutil.rmtree(saving_folder(folder, step), ignore_errors=True)


def delete(folder: Path, step: int) -> None:
    deleting = folder / f".deleting-{step:08d}"
    with contextlib.suppress(FileNotFoundError):  # deleted by hand meanwhile: what was wanted
        os.rename(complete_folder(folder, step), deleting)
        shutil.rmtree(deleting)


def steps_to_delete(steps: list[int], keep_last: int | None, keep_every: int | None) -> list[int]:
    """Which of `steps` are neither among the last nor at a round number.

    >>> steps_to_delete([10, 20, 30, 40, 50], keep_last=2, keep_every=20)
    [10, 30]
    """
    if keep_last is None:
        return []
    older = sorted(steps)[:-keep_last]
    return [step for step in older if keep_every is None or step % keep_every]

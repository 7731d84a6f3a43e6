"""The checkpoint folder, and the rename that completes a checkpoint.

    run/checkpoints/
      step-00000100/       complete: it gets this name after everything in it is written
        checkpoint.json    its contents, with a checksum
        arrays/            Orbax
        healthy            an empty file: a training step from these weights was finite
      set-aside-1/         checkpoints after the step that a run was resumed from, never read
      .saving-00000200/    being written, or left by a process that was killed
      .deleting-00000050/  being deleted

A folder named `step-…` is always complete: it gets the name last, by a rename, and loses it first,
by a rename. Folders with a leading dot are never read, and deleted before the next save.
"""

import contextlib
import itertools
import os
import re
import shutil
import stat
import types
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.files import HeldPath

ARRAYS = "arrays"  # the part that Orbax writes
RECORD = "checkpoint.json"
_HEALTHY = "healthy"
_COMPLETE = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.(saving|deleting)-\d{8,}")

CheckOwned = Callable[[], None]  # raises if the folder is no longer this run's


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
    if problem := not_a_folder(path):
        raise MeshwrightError(f"checkpoint folder {path} {problem}")
    return path


def not_a_folder(path: Path) -> str:
    """Why `path` cannot be a folder, '' if it can; completes the sentence "folder PATH …"."""
    for place in (path, *path.parents):
        try:
            mode = os.stat(place).st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as reason:  # a name too long, a parent without permission
            return f"cannot be used: {reason.strerror}"
        if stat.S_ISDIR(mode):
            return ""
        inside = "" if place == path else f"inside {place}, which is "
        return f"is {inside}a file; give a folder"
    return ""


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
    steps = [int(match[1]) for match in found if (folder / match[0]).is_dir()]
    # extra zeros make another name, which complete_folder() would not find
    return sorted(step for step in steps if complete_folder(folder, step).is_dir())


def misnamed(folder: Path) -> list[str]:
    """Folders that hold a checkpoint but do not have the name of a step."""
    if not folder.is_dir():
        return []
    steps = {complete_folder(folder, step).name for step in complete_steps(folder)}
    return sorted(
        entry.name
        for entry in os.scandir(folder)
        if not entry.name.startswith(".")
        and entry.name not in steps
        and (folder / entry.name / RECORD).is_file()
    )


def others(folder: Path, but: int | None = None) -> str:
    """The end of a sentence: the complete checkpoints."""
    steps = [str(step) for step in complete_steps(folder) if step != but]
    none = "there is no complete checkpoint" if but is None else "there is no other"
    text = f"complete checkpoints there: {', '.join(steps[-8:])}" if steps else none
    if names := misnamed(folder):
        text += f"; renamed ones, which are not read: {', '.join(names[:4])}"
    return text


def why_not_saved(folder: Path, size: int, error: BaseException) -> str:
    """Why a save of up to `size` bytes failed, what to do, and which checkpoints there are."""
    text = " ".join(str(error).split())
    needed = f"up to {size / 1e9:.2f} GB needed); free some space or lower keep_last"
    if "No space left" in text:
        why = f"the disk of {folder} is full ({_free(folder)}{needed}"
    elif "quota exceeded" in text.lower():
        why = f"the disk quota for {folder} is used up ({needed}"
    else:
        why = f"{type(error).__name__}: {text[:600]}"
    return f"{why}; {others(folder)}"


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e9:.2f} GB free, "
    except OSError:
        return ""


def existing_folder(folder: Path, step: int) -> Path:
    """The folder of a complete checkpoint; an error that lists the others if there is none."""
    place = complete_folder(folder, step)
    if not place.is_dir():
        raise MeshwrightError(
            f"{folder} has no checkpoint of step {step}; {others(folder, but=step)}"
        )
    return place


def mark_healthy(folder: Path, step: int) -> None:
    """Record on disk that a training step from this checkpoint was finite."""
    place = complete_folder(folder, step)
    (place / _HEALTHY).touch()
    flush(place)


def healthy_steps(folder: Path) -> list[int]:
    """The complete checkpoints that are marked as healthy, in order."""
    steps = complete_steps(folder)
    return [step for step in steps if (complete_folder(folder, step) / _HEALTHY).exists()]


def set_aside(folder: Path, steps: list[int], copied: Path) -> Path:
    """Move checkpoints, with a copy of a file, into a new folder where they are never read."""
    numbers = itertools.count(1)
    place = next(p for n in numbers if not (p := folder / f"set-aside-{n}").exists())
    place.mkdir()
    try:
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(copied, place / copied.name)
    except OSError:  # a full disk: undo
        shutil.rmtree(place, ignore_errors=True)
        raise
    for step in sorted(steps, reverse=True):  # newest first, so that the rest has no gap
        os.rename(complete_folder(folder, step), complete_folder(place, step))
    flush(place)
    flush(folder)
    return place


def clear_leftovers(folder: Path) -> None:
    """Delete only what interrupted saves and deletions left."""
    for path in [folder / entry.name for entry in os.scandir(folder)]:
        if _LEFTOVER.fullmatch(path.name) and not _delete_link(path):
            shutil.rmtree(path, ignore_errors=True)


class Saving:
    """A checkpoint that is being written: `complete` makes it one, `give_up` deletes it.

    Writers create again a folder that was deleted under them, without what they wrote before. That
    one is neither completed nor deleted: it may be another run's.
    """

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        clear_leftovers(folder)
        self.folder, self.step, self.path = folder, step, saving_folder(folder, step)
        self.path.mkdir()
        self._held = HeldPath(self.path)

    def complete(self) -> None:
        """Turn the written folder into a checkpoint by an atomic rename."""
        if not self._held.is_there():
            raise MeshwrightError(
                f"step {self.step} was not saved: {self.path} was deleted or moved; "
                f"{others(self.folder)}"
            )
        flush(self.path)
        os.rename(self.path, complete_folder(self.folder, self.step))
        flush(self.folder)
        self._held.close()

    def give_up(self) -> None:
        """Delete a failed save, to free its space."""
        if self._held.is_there():
            shutil.rmtree(self.path, ignore_errors=True)
        self._held.close()


def flush(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete(folder: Path, step: int) -> str:
    """Delete a checkpoint. Of one that is a link, only the link; gives back what is left then."""
    deleting = folder / f".deleting-{step:08d}"
    target = complete_folder(folder, step).resolve()
    with contextlib.suppress(FileNotFoundError):  # already deleted by hand
        os.rename(complete_folder(folder, step), deleting)
        if _delete_link(deleting):
            return f"step {step} was a link, which is deleted; what it led to is left: {target}"
        shutil.rmtree(deleting)
    return ""


def _delete_link(path: Path) -> bool:
    """Whether it was a symbolic link, which rmtree refuses."""
    if not path.is_symlink():
        return False
    path.unlink()
    return True


def delete_old(
    folder: Path,
    step: int,
    keep_last: int | None,
    keep_every: int | None,
    confirmed: Collection[int] = (),
    losses: Mapping[int, float] = types.MappingProxyType({}),
    check_owned: CheckOwned = lambda: None,
) -> str:
    """Delete what need not be kept once `step` is saved; the warning if one cannot be, else ''.

    `confirmed`: healthy ones that may not be marked. `losses`: by step; that with the lowest is
    kept. `check_owned`: called before each deletion.
    """
    which, left = "older ones", []
    try:
        healthy = {*healthy_steps(folder), *confirmed}
        for old in steps_to_delete(complete_steps(folder), keep_last, keep_every, healthy, losses):
            which = f"step {old}"
            check_owned()
            left.append(delete(folder, old))
    except (OSError, MeshwrightError) as error:
        return f"step {step} is saved, but {which} cannot be deleted: {error}"
    return "; ".join(filter(None, left))


def steps_to_delete(
    steps: list[int],
    keep_last: int | None,
    keep_every: int | None,
    healthy: Collection[int] = (),
    losses: Mapping[int, float] = types.MappingProxyType({}),
) -> list[int]:
    """Steps that are neither among the last, nor multiples of keep_every, nor the newest healthy,
    nor have the lowest loss.

    >>> steps_to_delete([10, 20, 30, 40, 50], keep_last=2, keep_every=20)
    [10, 30]
    >>> steps_to_delete([10, 20, 30, 40, 50], keep_last=2, keep_every=None, healthy=[10, 20])
    [10, 30]
    >>> steps_to_delete([10, 20, 30, 40, 50], 2, None, losses={10: 2.5, 20: 1.5, 30: 1.75})
    [10, 30]
    """
    if keep_last is None:
        return []
    best = lowest_loss(steps, losses)
    newest_healthy = max((step for step in steps if step in healthy), default=None)
    older = sorted(steps)[:-keep_last]
    return [
        step
        for step in older
        if step not in (newest_healthy, best) and (keep_every is None or step % keep_every)
    ]


def lowest_loss(steps: Collection[int], losses: Mapping[int, float]) -> int | None:
    """The first of the steps that has the lowest loss; None if no loss is known."""
    known = sorted(step for step in steps if step in losses)
    return min(known, key=losses.__getitem__, default=None)

"""The record of a checkpoint, and what to do when one is damaged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.arithmetic import whole_number
from meshwright.checkpoint.folder import complete_folder, complete_steps, existing_folder
from meshwright.checkpoint.record import Record, check_files, read_record
from meshwright.errors import MeshwrightError

_SHOWN = 6


Command = Callable[[int], str]  # step → the shell command that uses it, for messages


def read_step(folder: Path, step: Any, command: Command | None = None) -> Record:
    """The record of a checkpoint; a MeshwrightError if there is none."""
    step = whole_number(step, "step")
    place = existing_folder(folder, step)
    try:
        record = read_record(place)
    except MeshwrightError as error:
        raise MeshwrightError(f"{error}. {advice(folder, step, command)}") from None
    if record.step != step:
        right = complete_folder(folder, record.step)
        there = " (which also exists)" if right.exists() else ""
        raise MeshwrightError(
            f"{place} holds the checkpoint of step {record.step}: the folder was renamed or "
            f"copied. Rename it to {right.name}{there}, or move it out of {folder}"
        )
    return record


def read_intact_step(folder: Path, step: Any, command: Command | None = None) -> Record:
    """The record of a checkpoint whose files are there and have their sizes."""
    record = read_step(folder, step, command)
    try:
        check_files(complete_folder(folder, record.step), record.files)
    except MeshwrightError as error:
        raise MeshwrightError(f"{error}. {advice(folder, record.step, command)}") from None
    return record


def advice(folder: Path, damaged: int, command: Command | None = None) -> str:
    """A sentence: the other intact checkpoints, and how to use the newest of them."""
    steps = [step for step in complete_steps(folder) if step != damaged][-_SHOWN:]
    intact = [step for step in steps if _looks_intact(folder, step)]
    if not intact:
        return f"No other checkpoint in {folder} is intact"
    listed = ", ".join(map(str, intact))
    use = "" if command is None else f". To use step {intact[-1]}: {command(intact[-1])}"
    return f"Intact checkpoints (their records and file sizes were checked): {listed}{use}"


def _looks_intact(folder: Path, step: int) -> bool:
    """Check everything but the values of the arrays, without reading these."""
    place = complete_folder(folder, step)
    try:
        record = read_record(place)
        check_files(place, record.files)
    except MeshwrightError:
        return False
    return record.step == step

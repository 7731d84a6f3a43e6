"""Reading a checkpoint: compared with what is asked for, read, and verified, in this order."""

import math
from pathlib import Path
from typing import Any

import jax

from meshwright.errors import MeshwrightError, whole_number
from meshwright.train.checkpoint.agreement import Channel
from meshwright.train.checkpoint.compare import check_same_arrays, check_targets
from meshwright.train.checkpoint.fingerprint import fingerprint, fingerprint_text
from meshwright.train.checkpoint.folder import ARRAYS, complete_folder, complete_steps
from meshwright.train.checkpoint.leaves import as_wanted, stored_target, without_elements
from meshwright.train.checkpoint.names import like, named_leaves
from meshwright.train.checkpoint.orbax_arrays import read_arrays
from meshwright.train.checkpoint.record import Record, SavedArray, check_files, read_record

_SHOWN = 6


def read_step(folder: Path, step: Any) -> Record:
    """The record of a checkpoint that must be there."""
    place = complete_folder(folder, whole_number(step, "step"))
    if not place.is_dir():
        raise MeshwrightError(
            f"{folder} has no checkpoint of step {step}; {others(folder, but=step)}"
        )
    return read_record(place)


def others(folder: Path, but: int | None = None) -> str:
    """Ends a sentence: which complete checkpoints there are."""
    steps = [str(step) for step in complete_steps(folder) if step != but]
    return f"complete checkpoints there: {', '.join(steps[-8:])}" if steps else "there is no other"


def restore_tree(folder: Path, step: int, targets: Any, cast: bool, channel: Channel) -> Any:
    """The checkpoint in the layout of `targets`; all processes succeed or all raise."""
    wanted: dict[str, Any] = {}
    saved: dict[str, SavedArray] = {}
    problem = ""
    try:
        wanted = named_leaves(targets, "targets")
        check_targets(wanted)
        record = read_step(folder, step)
        saved = record.arrays
        place = complete_folder(folder, record.step)
        check_same_arrays(f"checkpoint {place}", saved, wanted, cast)
        if jax.process_index() == 0:
            check_files(place, record.files)
    except MeshwrightError as error:
        problem = str(error)
    channel.check(problem, about=f"restoring step {step}")

    stored = {name: stored_target(target, saved[name]) for name, target in wanted.items()}
    read: dict[str, jax.Array] = {}
    try:
        filled = {name: target for name, target in stored.items() if math.prod(target.shape)}
        read = read_arrays(place / ARRAYS, filled) if filled else {}
    except MeshwrightError as error:
        problem = f"checkpoint {place} {error}; {others(folder, but=step)}"
    channel.check(problem)

    _verify(read, saved, f"checkpoint {place}", others(folder, but=step))
    for name, target in wanted.items():
        array = read[name] if name in read else without_elements(stored[name])
        read[name] = as_wanted(array, target, saved[name])
    return like(targets, read)


def _verify(
    read: dict[str, jax.Array], saved: dict[str, SavedArray], where: str, advice: str
) -> None:
    """The values are those that were saved. All processes see the same sums, so all agree."""
    sums = {name: fingerprint(array) for name, array in read.items()}
    wrong = [
        name for name, sum_ in sums.items() if fingerprint_text(sum_) != saved[name].fingerprint
    ]
    if wrong:
        shown = ", ".join(repr(name) for name in wrong[:_SHOWN])
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise MeshwrightError(
            f"{where} is damaged: {shown}{more} came back with other values than were saved; "
            f"data was lost or altered on disk; {advice}"
        )

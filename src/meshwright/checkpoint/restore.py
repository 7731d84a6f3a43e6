"""Restore a checkpoint: compare with the targets, read, verify."""

import math
from pathlib import Path
from typing import Any

import jax

from meshwright.checkpoint.compare import check_same_arrays, check_targets
from meshwright.checkpoint.damage import Command, advice, read_step
from meshwright.checkpoint.fingerprint import fingerprint, fingerprint_text
from meshwright.checkpoint.folder import ARRAYS, complete_folder
from meshwright.checkpoint.leaves import as_wanted, stored_target, without_elements
from meshwright.checkpoint.names import like, named_leaves
from meshwright.checkpoint.orbax_arrays import read_arrays
from meshwright.checkpoint.record import SavedArray, altered, check_files
from meshwright.errors import MeshwrightError
from meshwright.launch import Agreement


def restore_tree(
    folder: Path,
    step: int,
    targets: Any,
    cast: bool,
    agreement: Agreement,
    command: Command | None = None,
) -> Any:
    """The checkpoint in the shardings of `targets`; all processes succeed or all raise."""
    wanted: dict[str, Any] = {}
    saved: dict[str, SavedArray] = {}
    problem = ""
    try:
        wanted = named_leaves(targets, "targets")
        check_targets(wanted)
        record = read_step(folder, step, command)
        saved = record.arrays
        place = complete_folder(folder, record.step)
        check_same_arrays(f"checkpoint {place}", saved, wanted, cast)
        if jax.process_index() == 0:
            try:
                check_files(place, record.files)
            except MeshwrightError as error:
                problem = f"{error}. {advice(folder, step, command)}"
    except MeshwrightError as error:
        problem = str(error)
    agreement.check(problem, about=f"restoring step {step}")

    stored = {name: stored_target(target, saved[name]) for name, target in wanted.items()}
    read: dict[str, jax.Array] = {}
    try:
        filled = {name: target for name, target in stored.items() if math.prod(target.shape)}
        read = read_arrays(place / ARRAYS, filled) if filled else {}
    except MeshwrightError as error:
        problem = f"checkpoint {place} {error}. {advice(folder, step, command)}"
    agreement.check(problem)

    wrong = _other_values(read, saved)
    if wrong:
        raise MeshwrightError(f"{altered(place, wrong)}. {advice(folder, step, command)}")
    for name, target in wanted.items():
        array = read[name] if name in read else without_elements(stored[name])
        read[name] = as_wanted(array, target, saved[name])
    return like(targets, read)


def _other_values(read: dict[str, jax.Array], saved: dict[str, SavedArray]) -> list[str]:
    """Arrays whose values differ from those saved; the same in all processes."""
    sums = {name: fingerprint(array) for name, array in read.items()}
    return [
        name for name, sum_ in sums.items() if fingerprint_text(sum_) != saved[name].fingerprint
    ]

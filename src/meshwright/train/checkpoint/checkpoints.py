"""Checkpoints of a run: saved in the background, complete or absent, verified when they are read.

    checkpoints = Checkpoints("run/checkpoints", keep_last=3, keep_every=1000)
    checkpoints.save(step, {"params": params, "optimizer": state}, {"data": position})
    …
    state = checkpoints.restore(checkpoints.latest(), targets)  # on this mesh or any other

Under jax.distributed every process makes the same calls, on a folder that all of them see.
"""

import shutil
import sys
import threading
import types
import weakref
from pathlib import Path
from typing import Any, Self

import jax

from meshwright.errors import MeshwrightError, whole_number
from meshwright.train.checkpoint import folder as folders
from meshwright.train.checkpoint.agreement import TIMEOUT, Channel
from meshwright.train.checkpoint.fingerprint import fingerprint, fingerprint_text
from meshwright.train.checkpoint.leaves import as_stored, check_leaf, key_kind
from meshwright.train.checkpoint.names import named_leaves
from meshwright.train.checkpoint.orbax_arrays import Writer
from meshwright.train.checkpoint.record import (
    Record,
    SavedArray,
    as_json,
    list_files,
    write_record,
)
from meshwright.train.checkpoint.restore import others, read_step, restore_tree


class Checkpoints:
    """The checkpoints in one folder.

    Kept are the last `keep_last` (None: all) and every step that is a multiple of `keep_every`.
    Opening a folder changes nothing in it, so a running training can be read from.
    """

    def __init__(
        self, folder: Any, keep_last: int | None = 3, keep_every: int | None = None
    ) -> None:
        self.folder: Path = folders.checked_folder(folder)
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and whole_number(value, name) == 0:
                raise MeshwrightError(f"{name}=0 would keep nothing; give 1 or more, or None")
        self.keep_last, self.keep_every = keep_last, keep_every
        self._ahead, self._behind = Channel("foreground"), Channel("background")
        self._writer: Writer | None = None
        self._thread: threading.Thread | None = None
        self._met = False  # whether this process told the others that its part is written
        self._failure: list[str] = []  # at most one, not yet raised
        weakref.finalize(self, _say_unraised, self._failure)

    # saving

    def save(self, step: int, tree: Any, meta: dict[str, Any], wait: bool = False) -> None:
        """Save `tree`, a pytree of jax arrays, and `meta`, a JSON-able dict, as checkpoint `step`.

        Returns once the arrays are copied off the devices; they may be donated then. The rest
        happens in the background, unless `wait`. First waits for the save before, and raises what
        went wrong with it: nothing was begun then, and the same call may be made again.
        """
        self.wait()
        step = whole_number(step, "step")
        if not isinstance(meta, dict):
            raise MeshwrightError(f"meta is a {type(meta).__name__}; give a dict")
        meta = as_json(meta)
        leaves = named_leaves(tree)
        if not leaves:
            raise MeshwrightError("tree holds no arrays; there is nothing to save")
        for name, leaf in leaves.items():
            check_leaf(name, leaf)
        self._ahead.check(self._begin(step), about=f"saving step {step}")
        saving = folders.saving_folder(self.folder, step)
        unseen = (
            f"{saving}, which process 0 made, is not seen by this process; "
            "the checkpoint folder must be on a disk that all processes share"
        )
        self._ahead.check("" if saving.is_dir() else unseen)
        arrays = {name: as_stored(leaf) for name, leaf in leaves.items()}
        size = sum(array.nbytes for array in arrays.values())
        sums = {name: fingerprint(array) for name, array in arrays.items()}
        self._met = False
        try:
            if self._writer is None:
                self._writer = Writer(self._meet, TIMEOUT)
            # Orbax refuses arrays without elements; their shape says all there is to say
            self._writer.start(saving / folders.ARRAYS, {n: a for n, a in arrays.items() if a.size})
        except Exception as error:
            if jax.process_index() == 0:
                folders.give_up(self.folder, step)
            raise MeshwrightError(self._why_not_saved(step, size, error)) from error
        described = {
            name: (tuple(leaf.shape), str(leaf.dtype), key_kind(leaf))
            for name, leaf in leaves.items()
        }
        self._thread = threading.Thread(
            target=self._finish, args=(step, described, sums, meta, size), name="meshwright-save"
        )
        self._thread.start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Return when the last save is complete; raise if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure:
            raise MeshwrightError(self._failure.pop())

    def close(self) -> None:
        """Wait, and end. Call it: a failure that nobody waits for is only printed at exit."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()

    def _begin(self, step: int) -> str:
        if jax.process_index():
            return ""
        try:
            if step in self.steps():
                return f"step {step} is already saved in {self.folder}; delete it to replace it"
            folders.begin(self.folder, step)
        except (OSError, MeshwrightError) as error:
            return f"step {step} cannot be saved in {self.folder}: {error}"
        return ""

    def _meet(self) -> None:
        self._met = True
        self._behind.check("")

    def _finish(
        self,
        step: int,
        described: dict[str, tuple[tuple[int, ...], str, str | None]],
        sums: dict[str, jax.Array],
        meta: dict[str, Any],
        size: int,
    ) -> None:
        """In the background: wait for Orbax, complete the checkpoint, delete old ones."""
        try:
            problem = ""
            try:
                assert self._writer is not None
                self._writer.wait()
            except Exception as error:
                problem = self._why_not_saved(step, size, error)
                if not self._met:
                    self._behind.agree(problem)
            if not problem and jax.process_index() == 0:
                try:
                    saving = folders.saving_folder(self.folder, step)
                    arrays = {
                        name: SavedArray(shape, dtype, fingerprint_text(sums[name]), key)
                        for name, (shape, dtype, key) in described.items()
                    }
                    write_record(saving, Record(step, arrays, meta, list_files(saving)))
                    folders.complete(self.folder, step)
                except Exception as error:
                    problem = self._why_not_saved(step, size, error)
                else:
                    problem = self._delete_old(step)
            verdict = self._behind.agree(problem)
            if verdict and jax.process_index() == 0:
                folders.give_up(self.folder, step)
        except BaseException as error:
            verdict = str(error) or type(error).__name__
        if verdict:
            self._failure.append(verdict)

    def _delete_old(self, step: int) -> str:
        for old in folders.steps_to_delete(self.steps(), self.keep_last, self.keep_every):
            try:
                folders.delete(self.folder, old)
            except OSError as error:
                return f"step {step} is saved, but step {old} cannot be deleted: {error}"
        return ""

    def _why_not_saved(self, step: int, size: int, error: BaseException) -> str:
        if isinstance(error, MeshwrightError):
            return str(error)
        text = str(error)
        if "No space left" in text or "quota exceeded" in text:
            free = shutil.disk_usage(self.folder).free
            why = (
                f"the disk of {self.folder} is full ({free / 1e9:.2f} GB free, up to "
                f"{size / 1e9:.2f} GB needed); free some space or lower keep_last"
            )
        else:
            why = f"{type(error).__name__}: {text[:600]}"
        return f"step {step} was not saved: {why}; {others(self.folder)}"

    # reading

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order."""
        return folders.complete_steps(self.folder)

    def latest(self) -> int | None:
        """The last complete checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def meta(self, step: int) -> dict[str, Any]:
        """What was saved beside the arrays."""
        return read_step(self.folder, step).meta

    def arrays(self, step: int) -> dict[str, SavedArray]:
        """Name → shape and dtype of every array in the checkpoint."""
        return read_step(self.folder, step).arrays

    def restore(self, step: int, targets: Any, cast: bool = False) -> Any:
        """Read a checkpoint into the layout `targets` asks for, on any mesh and process count.

        `targets` is a tree of jax.ShapeDtypeStruct with shardings, like the tree that was saved, or
        some of its first-level parts: `{"params": …}`. Everything under those parts must be there
        with the same shapes, and dtypes unless `cast`. Each process reads what its devices need;
        then the values are checked against what was saved, on the devices.
        """
        self.wait()
        return restore_tree(self.folder, step, targets, cast, self._ahead)


def _say_unraised(failure: list[str]) -> None:
    for text in failure:
        print(f"meshwright: error: {text}", file=sys.stderr)

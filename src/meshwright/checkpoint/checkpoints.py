"""Checkpoints of a run: saved in the background, complete or absent, verified when they are read.

    checkpoints = Checkpoints("run/checkpoints", keep_last=3, keep_every=1000)
    checkpoints.save(step, {"params": params, "optimizer": state}, {"data": position})
    …
    state = checkpoints.restore(checkpoints.latest(), targets)  # on this mesh or any other

Under jax.distributed every process makes the same calls, on a shared folder.
"""

import contextlib
import sys
import threading
import types
import weakref
from pathlib import Path
from typing import Any, Self

import jax

from meshwright.arithmetic import whole_number
from meshwright.checkpoint import folder as folders
from meshwright.checkpoint.damage import Command, read_step
from meshwright.checkpoint.fingerprint import fingerprint, fingerprint_text
from meshwright.checkpoint.leaves import as_stored, check_leaf, key_kind
from meshwright.checkpoint.names import named_leaves
from meshwright.checkpoint.orbax_arrays import Writer
from meshwright.checkpoint.record import (
    Record,
    SavedArray,
    as_json,
    list_files,
    write_record,
)
from meshwright.checkpoint.restore import restore_tree
from meshwright.errors import MeshwrightError, explained
from meshwright.launch import TIMEOUT_S, StoreAgreement


class Checkpoints:
    """The checkpoints in one folder.

    It keeps the last `keep_last` (None: all), every multiple of `keep_every`, the newest healthy
    one (see `confirm`), and that with the lowest of `losses`. Opening a folder changes nothing in
    it, so checkpoints of a running job can be read. `command`: the shell command that
    uses a step, for messages.
    """

    def __init__(
        self,
        folder: Any,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        command: Command | None = None,
    ) -> None:
        self.folder: Path = folders.checked_folder(folder)
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and whole_number(value, name) == 0:
                raise MeshwrightError(f"{name}=0 would keep nothing; give 1 or more, or None")
        self.keep_last, self.keep_every = keep_last, keep_every
        self.losses: dict[int, float] = {}  # of evaluations, by step
        self.check_owned: folders.CheckOwned = lambda: None  # before each write and deletion
        self._command = command
        self._confirmed: set[int] = set()  # by this process; maybe not marked on disk yet
        self._ahead, self._behind = StoreAgreement("foreground"), StoreAgreement("background")
        self._writer: Writer | None = None
        self._saving: folders.Saving | None = None  # in process 0
        self._thread: threading.Thread | None = None
        self._met = False  # whether this process has reported that its part is written
        self._failure: list[str] = []  # at most one, not yet raised
        weakref.finalize(self, _say_unraised, self._failure)

    # saving

    def save(self, step: int, tree: Any, meta: dict[str, Any], wait: bool = False) -> None:
        """Save `tree`, a pytree of jax arrays, and `meta`, a JSON-able dict, as checkpoint `step`.

        Returns when the arrays are copied off the devices, so they may be donated. The rest runs in
        the background, unless `wait`. First waits for the previous save, and raises its error; in
        that case nothing was started, and the call may be repeated.
        """
        self.wait()
        step = whole_number(step, "step")
        if not isinstance(meta, dict):
            raise MeshwrightError(f"meta is a {type(meta).__name__}; give a dict")
        meta = as_json(meta)
        leaves = named_leaves(tree)
        if not leaves:
            raise MeshwrightError("the tree has no arrays; there is nothing to save")
        for name, leaf in leaves.items():
            check_leaf(name, leaf)
        self._ahead.check(self._begin(step), about=f"saving step {step}")
        saving = folders.saving_folder(self.folder, step)
        unseen = (
            f"{saving}, which process 0 created, is not visible to this process; "
            "the checkpoint folder must be on a disk that all processes share"
        )
        self._ahead.check("" if saving.is_dir() else unseen)
        arrays = {name: as_stored(leaf) for name, leaf in leaves.items()}
        size = sum(array.nbytes for array in arrays.values())
        sums = {name: fingerprint(array) for name, array in arrays.items()}
        self._met = False
        problem = ""
        try:
            if self._writer is None:
                self._writer = Writer(self._barrier, TIMEOUT_S)
            # Orbax refuses arrays without elements; their shape is enough
            self._writer.start(saving / folders.ARRAYS, {n: a for n, a in arrays.items() if a.size})
        except Exception as error:  # reported to the other processes in the background
            problem = self._why_not_saved(step, size, error)
        specs = {
            name: (tuple(leaf.shape), str(leaf.dtype), key_kind(leaf))
            for name, leaf in leaves.items()
        }
        self._thread = threading.Thread(
            target=self._finish,
            args=(step, specs, sums, meta, size, problem),
            name="meshwright-save",
        )
        self._thread.start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until the last save is complete; raise if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure:
            raise MeshwrightError(self._failure.pop())

    def close(self) -> None:
        """Wait for the last save and close. Otherwise its failure is only printed at exit."""
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
            self.check_owned()
            if step in self.steps():
                return f"step {step} is already saved in {self.folder}; delete it to replace it"
            self._saving = folders.Saving(self.folder, step)
        except (OSError, MeshwrightError) as error:
            return f"step {step} cannot be saved in {self.folder}: {error}"
        return ""

    def _barrier(self) -> None:
        self._met = True
        self._behind.check("")

    def _finish(
        self,
        step: int,
        specs: dict[str, tuple[tuple[int, ...], str, str | None]],
        sums: dict[str, jax.Array],
        meta: dict[str, Any],
        size: int,
        problem: str,
    ) -> None:
        """In the background: wait for Orbax, complete the checkpoint, delete old ones."""
        try:
            if jax.process_index() == 0:
                self._delete_old(step)  # those kept until a later one was healthy
            try:
                if not problem:
                    assert self._writer is not None
                    self._writer.wait()
            except Exception as error:
                problem = self._why_not_saved(step, size, error)
            if problem and not self._met:
                self._behind.agree(problem)
            if not problem and self._saving is not None:
                try:
                    arrays = {
                        name: SavedArray(shape, dtype, fingerprint_text(sums[name]), key)
                        for name, (shape, dtype, key) in specs.items()
                    }
                    self.check_owned()
                    files = list_files(self._saving.path)
                    write_record(self._saving.path, Record(step, arrays, meta, files))
                    self._saving.complete()
                    self._mark_confirmed()
                except Exception as error:
                    problem = self._why_not_saved(step, size, error)
                else:
                    if warning := self._delete_old(step):  # the step is saved all the same
                        print(f"warning: {warning}", file=sys.stderr, flush=True)
            verdict = self._behind.agree(problem)
            if verdict and self._saving is not None:
                self._saving.give_up()
        except BaseException as error:
            verdict = str(error) or type(error).__name__
        if verdict:
            self._failure.append(verdict)

    def _delete_old(self, step: int) -> str:
        return folders.delete_old(
            self.folder, step, self.keep_last, self.keep_every,
            self._confirmed, dict(self.losses), self.check_owned,
        )  # fmt: skip

    def _why_not_saved(self, step: int, size: int, error: BaseException) -> str:
        if isinstance(error, MeshwrightError):
            return str(error)
        return f"step {step} was not saved: {folders.why_not_saved(self.folder, size, error)}"

    # which are healthy

    def confirm(self, step: int) -> None:
        """Mark checkpoint `step` as healthy: a step from it had a finite loss and gradient.

        The newest healthy checkpoint is never deleted. Its save may still run in the background; a
        mark that cannot be written now is written with the next one.
        """
        self._confirmed.add(whole_number(step, "step"))
        self._mark_confirmed()

    def healthy(self) -> list[int]:
        """The steps of all complete checkpoints that are known to be healthy, in order."""
        known = set(folders.healthy_steps(self.folder)) | self._confirmed
        return [step for step in self.steps() if step in known]

    def _mark_confirmed(self) -> None:
        if jax.process_index():
            return
        self.check_owned()
        marked = folders.healthy_steps(self.folder)
        for step in self._confirmed.intersection(self.steps()).difference(marked):
            with contextlib.suppress(OSError):  # a full disk: this process still knows
                folders.mark_healthy(self.folder, step)

    # reading

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order."""
        return folders.complete_steps(self.folder)

    def latest(self) -> int | None:
        """The last complete checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def meta(self, step: int) -> dict[str, Any]:
        """The `meta` that was saved with the arrays."""
        return read_step(self.folder, step, self._command).user_meta

    def arrays(self, step: int) -> dict[str, SavedArray]:
        """Name → shape and dtype of every array in the checkpoint."""
        return read_step(self.folder, step, self._command).arrays

    @explained(
        "checkpoints.restore(checkpoints.latest(), targets), with targets like what was saved"
    )
    def restore(self, step: int, targets: Any, cast: bool = False) -> Any:
        """Read a checkpoint into the shardings of `targets`, on any mesh and number of processes.

        `targets` is a tree of jax.ShapeDtypeStruct with shardings, like the tree that was saved, or
        some of its first-level parts: `{"params": …}`. Everything under those parts must exist
        with the same shapes, and the same dtypes unless `cast`. Each process reads what its devices
        need; then the fingerprints of the values are verified on the devices.
        """
        self.wait()
        return restore_tree(self.folder, step, targets, cast, self._ahead, self._command)

    def set_aside_after(self, step: int, copied: Path) -> tuple[list[int], Path] | None:
        """Move the checkpoints after `step` to a separate folder, where they are not read.

        A run resumed from `step` would mistake them for its own. `copied`: a file to copy there, if
        it exists. Process 0 returns the steps and the folder, if there are any.
        """
        self.wait()
        problem, moved = "", None
        if jax.process_index() == 0:
            try:
                if later := [other for other in self.steps() if other > step]:
                    self.check_owned()
                    moved = later, folders.set_aside(self.folder, later, copied)
            except MeshwrightError as error:
                problem = str(error)
            except OSError as error:
                problem = (
                    f"checkpoints after step {step} cannot be set aside in {self.folder}: "
                    f"{error.strerror}"
                )
        self._ahead.check(problem, about=f"setting aside what is after step {step}")
        return moved


def _say_unraised(failure: list[str]) -> None:
    for text in failure:
        print(f"meshwright: error: {text}", file=sys.stderr)

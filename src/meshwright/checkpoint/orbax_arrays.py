"""Write and read named arrays with Orbax, without its log output."""

import contextlib
import functools
import logging
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from meshwright.checkpoint.names import nested
from meshwright.errors import MeshwrightError

# A reader on another mesh needs a part of what one device wrote, and decodes complete chunks.
_CHUNK_BYTES = 64 << 20


class Writer:
    """Writes one set of arrays at a time, in the background.

    `barrier` is called in every process when its own part is on disk, before process 0 commits;
    it raises if another process failed.
    """

    def __init__(self, barrier: Callable[[], None], timeout: float) -> None:
        ocp = _orbax()

        def barrier_sync(*, key: str, timeout_ms: int) -> None:
            if "write_complete" in key:  # we handle the other barrier, after the commit
                barrier()

        self._checkpointer = ocp.AsyncCheckpointer(
            # weights compress by 8% only, and zstd takes three times as long as writing
            ocp.PyTreeCheckpointHandler(use_compression=False),
            async_options=ocp.options.AsyncOptions(
                timeout_secs=int(timeout), barrier_sync_fn=barrier_sync
            ),
        )

    def start(self, folder: Path, arrays: dict[str, jax.Array]) -> None:
        """Copy the arrays off the devices, then write in the background."""
        ocp = _orbax()
        tree = nested(arrays)
        chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
        self._checkpointer.save(folder, args=ocp.args.PyTreeSave(tree, save_args=chunks))

    def wait(self) -> None:
        self._checkpointer.wait_until_finished()

    def close(self) -> None:
        """Close; `wait` has raised any error of the last save."""
        with contextlib.suppress(Exception):
            self._checkpointer.close()


def read_arrays(folder: Path, targets: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Read each array in its target's sharding; a process reads what its own devices need.

    Processes do not synchronize here, so an error is local to this process.
    """
    ocp = _orbax()
    from etils import epath  # type: ignore[import-untyped]

    wanted = {
        name: ocp.ArrayRestoreArgs(
            restore_type=jax.Array,
            sharding=target.sharding,
            global_shape=target.shape,
            dtype=target.dtype,
            strict=True,
        )
        for name, target in targets.items()
    }
    try:
        restored = ocp.PyTreeCheckpointHandler().restore(
            epath.Path(folder),
            args=ocp.args.PyTreeRestore(
                item=nested(dict(targets)), restore_args=nested(wanted), partial_restore=True
            ),
        )
    except Exception as error:
        text = str(error)
        reason = text.split(" See full TensorStore")[0].split("\n")[0][:300]
        raise MeshwrightError(
            f"is damaged, {_blamed(text, targets)} cannot be read: {reason or type(error).__name__}"
        ) from error
    return {name: _at(restored, name) for name in targets}


def _at(tree: Any, name: str) -> Any:
    return functools.reduce(lambda place, part: place[part], name.split("/"), tree)


def _blamed(text: str, names: dict[str, Any]) -> str:
    """The array that a TensorStore error is about; it quotes the path, 'params.embed/'."""
    for name in names:
        if re.search(rf"['\"/]{re.escape(name.replace('/', '.'))}/", text):
            return f"array {name!r}"
    return "an array"


@functools.cache
def _orbax() -> Any:
    import orbax.checkpoint as ocp

    # progress messages, tracebacks of errors that we raise
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    logging.getLogger("asyncio").addFilter(lambda record: not _left_by_orbax(record))
    _drop_stragglers()
    return ocp


def _left_by_orbax(record: logging.LogRecord) -> bool:
    """Whether asyncio tells of a task or future of a failed save, whose first error we raise.

    Orbax gives up its other tasks then, and asyncio logs their errors when they are collected as
    garbage. The text names the function of a task, and the traceback of a future is from Orbax.
    """
    trace = None if record.exc_info is None else record.exc_info[2]
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
    return any("orbax" in text for text in (record.getMessage(), *files))


def _drop_stragglers() -> None:
    """After one failed read or write, do not print the errors of the others.

    Orbax closes its event loop at the first failure. Reads in flight then end in Python's
    unraisable hook: as unfinished coroutines of Orbax, and as calls from TensorStore's native
    threads (which have no object) into the closed loop.
    """
    others = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        half_done = code is not None and "orbax" in code.co_filename
        too_late = unraisable.object is None and str(unraisable.exc_value) == "Event loop is closed"
        if not half_done and not too_late:
            others(unraisable)

    sys.unraisablehook = hook

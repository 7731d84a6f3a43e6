"""Where faults are injected: real training processes, a folder to break, and what is left of it.

A `Stage` is a copy of a run of four steps with checkpoints of steps 2 and 4. A fault starts
`meshwright` commands on it, breaks something, and waits for the end. `lost` then reads every
checkpoint that must still be there, checks each array's fingerprint, and names what is gone.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-m", "meshwright.cli.main")
SIZES = ("--batch", "4", "--seq", "32", "--checkpoint.every", "2")
# a learning rate that does not depend on the length of the run, so that losses can be compared
SIZES += ("--optimizer.schedule", "inverse_sqrt", "--optimizer.warmup-steps", "2")
ONE = ("--cpu-devices", "2", "--mesh", "fsdp=2")
PATIENCE = 240.0  # seconds for anything to happen
# most of a toy's time is compiling: what one command compiled, the next ones read
CACHE = tempfile.TemporaryDirectory()
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": CACHE.name,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


class FaultError(Exception):
    """Something that the fault waits for did not happen."""


@dataclasses.dataclass(frozen=True)
class End:
    """How a command ended after the fault."""

    code: int
    seconds: float  # from the fault to the end
    output: str

    @property
    def message(self) -> str:
        """The line that says what went wrong, or the last one."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        errors = [line for line in lines if "error: " in line]
        return (errors or lines or ["nothing was printed"])[-1]

    @property
    def traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.output


class Command:
    """A `meshwright` command that runs, with everything it prints."""

    def __init__(
        self,
        arguments: list[str],
        environment: Mapping[str, str] | None = None,
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed by `end`
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
        )
        self.began = time.monotonic()

    @property
    def output(self) -> str:
        position = os.lseek(self._output.fileno(), 0, os.SEEK_CUR)
        return os.pread(self._output.fileno(), position, 0).decode(errors="replace")

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until the condition holds; the process must not end before."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if self.process.poll() is not None and not condition():
                raise FaultError(f"ended too early:\n{self.output[-2000:]}")
            if time.monotonic() > deadline:
                raise FaultError(f"waited in vain:\n{self.output[-2000:]}")
            time.sleep(0.01)

    def wait_for_text(self, text: str) -> None:
        self.wait_for(lambda: text in self.output)

    def signal(self, number: int) -> None:
        self.began = time.monotonic()  # the fault happens now
        self.process.send_signal(number)

    def end(self, patience: float = PATIENCE) -> End:
        """Wait for the end; the clock runs from the last signal, or from the start."""
        try:
            code = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise FaultError(f"never ended:\n{self.output[-2000:]}") from None
        finally:
            seconds = time.monotonic() - self.began
            output = self.output
            self._output.close()
        return End(code, seconds, output)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A folder with a run in it, for one fault."""

    folder: Path
    layout: tuple[str, ...] = ONE  # how a plain command runs

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"

    def train(self, *more: str, steps: int = 6, layout: tuple[str, ...] | None = None) -> list[str]:
        """The arguments of `meshwright train`; of a flag that comes twice the last value."""
        words = ["--run", str(self.run), "--steps", str(steps), *SIZES]
        words += [*(self.layout if layout is None else layout), *more]
        settings = dict(zip(words[::2], words[1::2], strict=True))
        return ["train", "tiny", *itertools.chain.from_iterable(settings.items())]

    def start(self, *more: str, steps: int = 6, cached: bool = True) -> Command:
        environment = {"JAX_ENABLE_COMPILATION_CACHE": "true" if cached else "false"}
        return Command(self.train(*more, steps=steps), environment)

    def pair(self, *of_second: str, both: tuple[str, ...] = (), steps: int = 6) -> list[Command]:
        """The same run in two processes; `of_second` are settings of the second one alone."""
        port = free_port()
        found = []
        for process in range(2):
            layout = ("--mesh", "fsdp=2", "--coordinator", f"127.0.0.1:{port}")
            layout += ("--processes", "2", "--process-id", str(process))
            arguments = self.train(
                *both, *(of_second if process else ()), steps=steps, layout=layout
            )
            found.append(Command(arguments, {"JAX_NUM_CPU_DEVICES": "1"}))
        return found

    def complete(self) -> list[int]:
        """Steps of the checkpoints that are complete by their names."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(
                int(path.name.removeprefix("step-")) for path in self.checkpoints.glob("step-*")
            )
        return []

    def array_file(self, step: int) -> Path:
        """The largest file of a checkpoint."""
        files = (self.checkpoints / f"step-{step:08d}").rglob("*")
        return max((path for path in files if path.is_file()), key=lambda path: path.stat().st_size)

    def losses(self) -> dict[int, float]:
        """Step → loss, as the run has logged them."""
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        return {row["step"]: row["loss"] for row in rows if "loss" in row}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def small_disk(stage: Stage, free_bytes: int) -> Iterator[Path]:
    """The stage's run on a file system of its own with so many bytes free; gives the filler.

    Needs the right to mount; FaultError where there is none.
    """
    aside = stage.folder / "aside"
    stage.run.rename(aside)
    stage.run.mkdir()
    size = sum(path.stat().st_size for path in aside.rglob("*") if path.is_file())
    size += 64 * 2**20
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(stage.run)]
    if subprocess.run(mount, capture_output=True).returncode:
        raise FaultError("cannot mount a file system here")
    try:
        shutil.copytree(aside, stage.run, dirs_exist_ok=True)
        filler = stage.run / "filler"
        fill(filler, free_bytes)
        yield filler
        # what is left must be looked at after the file system is gone
        filler.unlink(missing_ok=True)
        shutil.rmtree(aside)
        shutil.copytree(stage.run, aside)
    finally:
        subprocess.run(["umount", "--lazy", str(stage.run)], check=True)
    stage.run.rmdir()
    aside.rename(stage.run)


def fill(filler: Path, free_bytes: int) -> None:
    """Write until only so many bytes are free."""
    free = shutil.disk_usage(filler.parent).free
    with contextlib.suppress(OSError), filler.open("wb") as file:
        file.write(bytes(max(0, free - free_bytes)))


def damage(path: Path, change: Callable[[bytearray], bytearray | bytes]) -> None:
    path.write_bytes(change(bytearray(path.read_bytes())))


def flip(content: bytearray) -> bytearray:
    """One bit in the middle."""
    content[len(content) // 2] ^= 1
    return content


def intact(checkpoints: Path, step: int) -> bool:
    """Whether a checkpoint can be read, and every array is what was saved."""
    if any((checkpoints / f"step-{step:08d}").glob("*.safetensors")):
        return _pieces_intact(checkpoints, step)
    import jax
    import numpy as np

    from meshwright import MeshwrightError
    from meshwright.checkpoint import Checkpoints

    here = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    with Checkpoints(checkpoints) as opened:
        try:
            targets: dict[str, Any] = {}
            for name, saved in opened.arrays(step).items():
                *parents, leaf = name.split("/")
                place = targets
                for parent in parents:
                    place = place.setdefault(parent, {})
                dtype = np.dtype(saved.dtype)
                place[leaf] = jax.ShapeDtypeStruct(saved.shape, dtype, sharding=here)
            opened.restore(step, targets)
        except MeshwrightError:
            return False
    return True


def _pieces_intact(checkpoints: Path, step: int) -> bool:
    """The same of a checkpoint that PyTorch wrote."""
    import numpy as np
    from safetensors.numpy import load_file

    from meshwright import MeshwrightError
    from meshwright.checkpoint import (
        check_files,
        fingerprint_of,
        read_pieces,
        read_step,
        sums_of_bits,
    )

    try:
        record = read_step(checkpoints, step)
        place = checkpoints / f"step-{step:08d}"
        check_files(place, record.files)
        files = {path.name: load_file(path) for path in place.glob("*.safetensors")}
        for name, pieces in read_pieces(place).items():
            sums = []
            for piece in pieces:
                values = np.ascontiguousarray(files[piece.file][piece.key])
                bits = values.view(f"u{values.itemsize}")
                sums.append(sums_of_bits(bits, piece.start, record.arrays[name].shape))
            if fingerprint_of(sums) != record.arrays[name].fingerprint:
                return False
    except MeshwrightError:
        return False
    return True

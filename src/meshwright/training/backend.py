"""What the training loop asks of a framework and its devices."""

import abc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from meshwright.data import Loader
from meshwright.training.config import TrainConfig
from meshwright.training.run import Memory
from meshwright.training.work import StepWork

Say = Callable[[str], None]


class SavedSteps(Protocol):
    """The checkpoints of a run, whatever is in them; every process makes the same calls."""

    folder: Path
    check_owned: Callable[[], None]
    """Called before each write and deletion; raises where the folder is another run's by now."""

    losses: dict[int, float]
    """Evaluation losses by step; the checkpoint with the lowest is kept."""

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order."""

    def latest(self) -> int | None:
        """The last complete checkpoint."""

    def meta(self, step: int) -> dict[str, Any]:
        """What `Backend.save` was given besides the state."""

    def confirm(self, step: int) -> None:
        """Mark a checkpoint as healthy: a step from it was finite."""

    def healthy(self) -> list[int]:
        """Those that are known to be healthy, in order."""

    def set_aside_after(self, step: int, copied: Path) -> tuple[list[int], Path] | None:
        """Move later checkpoints to a folder where they are not read, with a copy of a file."""

    def wait(self) -> None:
        """Wait until the last save is complete; raise if it failed."""

    def close(self) -> None:
        """Wait, and release what saving needs."""


class Backend(abc.ABC):
    """A model on devices, with its optimizer and data; it holds the state of training."""

    lag: int  # steps that are started before the result of one is looked at
    config: TrainConfig
    process_id: int
    processes: int
    model: Any  # its config, with what `save_hf` needs
    loader: Loader
    eval_loader: Loader | None
    checkpoints: SavedSteps
    mesh_shape: Mapping[str, int]
    num_devices: int
    device_kind: str
    num_parameters: int
    work: StepWork

    @abc.abstractmethod
    def from_first(self, text: str) -> str:
        """The text of process 0, in every process."""

    @abc.abstractmethod
    def placement_lines(self) -> Iterator[str]:
        """Where parameters, gradients and moments are."""

    @abc.abstractmethod
    def compute_lines(self) -> Iterator[str]:
        """How a step is computed, and remarks."""

    @abc.abstractmethod
    def check_memory(self) -> None:
        """Raise if the state cannot fit."""

    @abc.abstractmethod
    def start(self, saved: int | None) -> None:
        """The state of a checkpoint, or that of a new run."""

    @abc.abstractmethod
    def compile(self, say: Say) -> None:
        """What must be compiled before the first step."""

    @abc.abstractmethod
    def batches(self, first: int) -> Iterator[tuple[int, Any]]:
        """(step, this process's part of its batch) from step `first` on, without end."""

    @abc.abstractmethod
    def step(self, batch: Any) -> Any:
        """Begin an optimizer step; gives back its report, which may not be there yet."""

    @abc.abstractmethod
    def values(self, report: Any) -> dict[str, Any]:
        """Wait for a report: train.step's STEP_VALUES, and the metrics of the loss by name."""

    @abc.abstractmethod
    def evaluate(self) -> dict[str, tuple[float, float]]:
        """The sum and count of each metric over the held-out tokens; `loss` is among them."""

    def continuations(self) -> list[str]:
        """The text that the current weights give after each of --eval.prompts."""
        raise NotImplementedError

    @abc.abstractmethod
    def is_finite(self) -> bool:
        """Whether all weights are finite numbers."""

    @abc.abstractmethod
    def save(self, step: int, meta: dict[str, Any], wait: bool = False) -> None:
        """Save the state; it may continue in the background unless `wait`."""

    @abc.abstractmethod
    def peak_flops(self) -> float | None:
        """The bf16 FLOP/s of one device, if it is known."""

    @abc.abstractmethod
    def memory(self) -> Memory | None:
        """Of the fullest device of this process, where the runtime tells."""

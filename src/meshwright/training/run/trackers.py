"""Where numbers go besides metrics.jsonl: TensorBoard and W&B, imported when asked for."""

import importlib
import importlib.util
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, not_installed
from meshwright.files import write_whole


def check_trackers(tensorboard: bool, wandb: bool) -> None:
    """Raise if what is asked for is not installed; before anything slow."""
    asked = {"TensorBoard": ("tensorboard", tensorboard), "W&B": ("wandb", wandb)}
    for name, (package, wanted) in asked.items():
        if wanted and importlib.util.find_spec(package) is None:
            raise _missing(name)


class TensorBoard:
    """Event files by the tensorboard package alone: neither TensorFlow nor PyTorch is needed."""

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        try:
            event_pb2 = importlib.import_module("tensorboard.compat.proto.event_pb2")
            summary_pb2 = importlib.import_module("tensorboard.compat.proto.summary_pb2")
            writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        except ImportError:
            raise _missing("TensorBoard") from None
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = writer.EventFileWriter(str(folder))
        if resume_step is not None:
            # TensorBoard then hides what an earlier run wrote past this step
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            event = event_pb2.Event(step=resume_step + 1, wall_time=time.time(), session_log=start)
            self._writer.add_event(event)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()
        ]
        self._writer.add_event(
            self._event(step=step, wall_time=time.time(), summary=self._summary(value=values))
        )

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One W&B run for one run folder: its id is kept there, and a resumed run continues it."""

    def __init__(self, folder: Path, settings: str | Mapping[str, Any]) -> None:
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError:
            raise _missing("W&B") from None
        arguments = {"project": settings} if isinstance(settings, str) else dict(settings)
        remembered = folder / "wandb-id.txt"
        if remembered.exists():
            arguments = {"id": remembered.read_text().strip(), "resume": "allow"} | arguments
        try:
            self._run = wandb.init(**({"dir": str(folder), "name": folder.name} | arguments))
        except Exception as reason:  # a missing key, no network: many types, one answer
            raise MeshwrightError(
                f"W&B could not start: {reason}. `wandb login` first, or WANDB_MODE=offline"
            ) from None
        write_whole(remembered, f"{self._run.id}\n")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


def _missing(name: str) -> MeshwrightError:
    return MeshwrightError(f"{name} is not installed: {not_installed('track')}")

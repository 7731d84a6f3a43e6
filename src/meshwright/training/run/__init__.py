"""What stands around the training loop: processes, signals, the watchdog, metrics, the run page."""

from meshwright.files import check_room, disk_errors_in_one_line, print_line
from meshwright.training.run.board import Board
from meshwright.training.run.live import LiveLine, waiting_line
from meshwright.training.run.lock import LostFolderError, only_run_in
from meshwright.training.run.metrics import ENDED, RESUMED, Metrics, MetricsLog, read_metrics
from meshwright.training.run.page import LivePage, write_run_page
from meshwright.training.run.status import RunStatus, run_status
from meshwright.training.run.throughput import (
    Memory,
    StepClock,
    Throughput,
    chip_peak_flops,
    memory,
    peak_flops,
    throughput,
)

__all__ = [
    "ENDED", "RESUMED", "Board", "LiveLine", "LivePage", "LostFolderError", "Memory", "Metrics",
    "MetricsLog", "RunStatus", "StepClock", "Throughput", "check_room", "chip_peak_flops",
    "disk_errors_in_one_line", "memory", "only_run_in", "peak_flops", "print_line", "read_metrics",
    "run_status", "throughput", "waiting_line", "write_run_page",
]  # fmt: skip

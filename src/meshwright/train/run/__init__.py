"""What stands around the training loop: processes, signals, the watchdog, metrics, the run page."""

from meshwright.train.run.comparison import Fact, compare_processes
from meshwright.train.run.coordinator import CoordinatorLostError, Store, coordinator_store
from meshwright.train.run.description import write_description
from meshwright.train.run.ending import EXIT_CODE, AgreedError, ends_together
from meshwright.train.run.files import disk_errors_in_one_line, print_line
from meshwright.train.run.live import LiveLine
from meshwright.train.run.lock import only_run_in
from meshwright.train.run.metrics import Metrics, MetricsLog, read_metrics
from meshwright.train.run.page import write_run_page
from meshwright.train.run.processes import Joined, join
from meshwright.train.run.signals import Stop, agree, stop_on_signals
from meshwright.train.run.throughput import (
    Memory,
    StepClock,
    Throughput,
    memory,
    peak_flops,
    throughput,
)
from meshwright.train.run.watchdog import HANG_TIMEOUT_S, Watchdog, pause_timeout_s

__all__ = [
    "EXIT_CODE",
    "HANG_TIMEOUT_S",
    "AgreedError",
    "CoordinatorLostError",
    "Fact",
    "Joined",
    "LiveLine",
    "Memory",
    "Metrics",
    "MetricsLog",
    "StepClock",
    "Stop",
    "Store",
    "Throughput",
    "Watchdog",
    "agree",
    "compare_processes",
    "coordinator_store",
    "disk_errors_in_one_line",
    "ends_together",
    "join",
    "memory",
    "only_run_in",
    "pause_timeout_s",
    "peak_flops",
    "print_line",
    "read_metrics",
    "stop_on_signals",
    "throughput",
    "write_description",
    "write_run_page",
]

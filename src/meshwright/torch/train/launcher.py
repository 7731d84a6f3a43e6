"""Start the processes of a run on this host, as torchrun does."""

import logging
import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshwright.errors import MeshwrightError
from meshwright.interrupt import hangup_is_ignored, signal_calls
from meshwright.launch import EXIT_CODE
from meshwright.training import TrainConfig

RUN_ID = "meshwright"
LONGEST_STOP_S = 600  # for the last step and its save, after a signal


def starts_processes(config: TrainConfig) -> bool:
    """Whether this process is to start the others; under torchrun it is one of them."""
    if config.processes is not None and config.processes < 1:
        raise MeshwrightError(f"--processes {config.processes}: a run has at least one process")
    if "RANK" not in os.environ:
        return config.processes is not None and config.processes > 1
    if "WORLD_SIZE" not in os.environ:
        raise MeshwrightError(
            "RANK is set in the environment and WORLD_SIZE is not; start the processes with "
            "torchrun, which sets both, or unset RANK and give --processes"
        )
    there = int(os.environ["WORLD_SIZE"])
    if config.processes not in (None, there):
        raise MeshwrightError(
            f"--processes {config.processes}, and torchrun started {there}; leave it out"
        )
    return False


def by_torchrun() -> bool:
    """Whether something else than `start_processes` started this process as one of several."""
    return "RANK" in os.environ and os.environ.get("TORCHELASTIC_RUN_ID") != RUN_ID


def start_processes(processes: int, arguments: Sequence[str]) -> None:
    """Run `meshwright train` in so many processes; exit with the code of the first that failed."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=RUN_ID,
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=LONGEST_STOP_S,
        # which are passed on to the ranks; SIGHUP stays ignored under nohup
        signals_to_handle="SIGTERM,SIGINT,SIGQUIT" + ("" if hangup_is_ignored() else ",SIGHUP"),
    )
    command = ("-m", "meshwright.cli.main", "train", *arguments)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its warnings come from every process
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # ranks say more
    try:
        # Ctrl-C goes to the ranks, which save; without a taker it would end this process at once
        with signal_calls(signal.SIGINT, lambda: True):
            elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as failed:
        _, first = failed.get_first_failure()
        sys.exit(first.exitcode if first.exitcode > 0 else EXIT_CODE)
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)

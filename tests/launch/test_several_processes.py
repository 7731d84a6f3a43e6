"""Real processes: one hangs, fails, is stopped or is asked to stop, and all of them end."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S
from tests.processes import free_port

PROGRAM = """
import os, signal, sys, time
process, port, mode, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
from meshwright.launch import (
    Watchdog, agree, coordinator_store, ends_together, join, stop_on_signals
)
joined = join(f"127.0.0.1:{port}", 2, process, patience_s=60)
store = coordinator_store()

def next_batch(step):
    if step == 6 and process == 1 and mode == "hang":
        time.sleep(100_000)
    if step == 6 and mode == f"stopped {process}":
        os.kill(os.getpid(), signal.SIGSTOP)
    if step == 6 and process == 1 and mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 6 and process == 1 and mode == "raise":
        raise OSError("rows 40 to 80 cannot be read")
    if step == 6 and (mode == "all" or (process == 1 and mode == "mistake")):
        from meshwright.errors import MeshwrightError
        raise MeshwrightError("token store 'a.store' is damaged")
    time.sleep(0.05)

with ends_together(store, joined.process_id, 2, poll_s=0.25), stop_on_signals() as stop:
    mesh = jax.make_mesh((2,), ("dp",))
    split, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (["dp"], []))
    x = jax.jit(lambda: jnp.ones(2), out_shardings=split)()
    train_step = jax.jit(lambda x: x.sum(), out_shardings=whole)
    hangs = mode == "hang" or mode.startswith("stopped")
    with Watchdog(folder, timeout_s=4 if hangs else 1200, pause_timeout_s=1200, poll_s=0.25, store=store,
                  process_id=joined.process_id, processes=joined.processes) as watchdog:
        for step in range(1, 2000):
            if agree(stop, step, store, lag=0):
                break
            next_batch(step)
            watchdog.beat(step)
            train_step(x).block_until_ready()
            if step == 5:
                print("at step 5", flush=True)
    print(f"stopped before step {step}: {stop.reason}", flush=True)
"""


def start(mode: str, folder: Path) -> list[subprocess.Popen[str]]:
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, "-u", "-c", PROGRAM, str(i), port, mode, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]


def wait_for_step_five(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdout is not None
        while (line := process.stdout.readline().strip()) != "at step 5":
            if not line and process.poll() is not None:
                assert process.stderr is not None
                pytest.fail(process.stderr.read()[-3000:])


def test_a_process_that_hangs_is_named_and_the_run_ends(tmp_path: Path) -> None:
    processes = start("hang", tmp_path)
    wait_for_step_five(processes)
    ends = [process.communicate(timeout=PATIENCE_S) for process in processes]
    assert [process.returncode for process in processes] == [75, 75]
    said = (
        r"step 6 has not finished for \d+ s: process 1 \(\S+\) was last seen at step 5, in "
        r"<string>:\d+ next_batch; the other waits in step 6"
    )
    assert sum(len(re.findall(said, err)) for _, err in ends) == 1, ends  # one of them says it
    assert len(re.findall(said, (tmp_path / "watchdog.txt").read_text())) == 2
    assert "in next_batch" in (tmp_path / "watchdog-stacks-1.txt").read_text()


def test_a_signal_to_one_process_stops_all_before_the_same_step(tmp_path: Path) -> None:
    processes = start("run", tmp_path)
    wait_for_step_five(processes)
    processes[1].send_signal(signal.SIGTERM)
    ends = [process.communicate(timeout=PATIENCE_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ends
    said = [re.search(r"stopped before step (\d+): (.*)", out) for out, _ in ends]
    assert said[0] is not None
    assert said[1] is not None
    assert said[0][1] == said[1][1]
    assert (said[0][2], said[1][2]) == ("SIGTERM in another process", "SIGTERM")
    assert not (tmp_path / "watchdog.txt").exists()


def test_an_error_in_one_process_ends_the_others_and_is_told_once(tmp_path: Path) -> None:
    processes = start("raise", tmp_path)
    wait_for_step_five(processes)
    ends = [process.communicate(timeout=PATIENCE_S) for process in processes]
    assert [process.returncode for process in processes] == [75, 1]
    assert "rows 40 to 80" not in ends[0][1]
    assert "OSError: rows 40 to 80 cannot be read" in ends[1][1]
    assert ends[1][1].count("error: process 1 failed: rows 40 to 80 cannot be read") == 1


def test_a_mistake_in_one_process_ends_all_with_the_code_of_a_mistake(tmp_path: Path) -> None:
    """Damaged data would be met again by another try, which 75 asks for."""
    processes = start("mistake", tmp_path)
    wait_for_step_five(processes)
    ends = [process.communicate(timeout=PATIENCE_S) for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert "a.store" not in ends[0][1]
    assert ends[1][1].count("error: process 1 stopped: token store 'a.store' is damaged") == 1
    assert "Traceback" not in ends[0][1] + ends[1][1]


def test_a_mistake_of_all_processes_is_told_by_one(tmp_path: Path) -> None:
    processes = start("all", tmp_path)
    wait_for_step_five(processes)
    ends = [process.communicate(timeout=PATIENCE_S) for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert sum(err.count("a.store' is damaged") for _, err in ends) == 1, ends


@pytest.mark.slow
def test_a_process_that_is_killed_is_named(tmp_path: Path) -> None:
    processes = start("killed", tmp_path)
    wait_for_step_five(processes)
    processes[1].wait()
    time.sleep(0.3)
    processes[0].send_signal(signal.SIGTERM)  # as torchrun and Slurm do then
    ends = [process.communicate(timeout=PATIENCE_S) for process in processes]
    assert [process.returncode for process in processes] == [75, -signal.SIGKILL], ends[0][1]
    assert re.search(r"process 1 \(\S+\) is gone, last seen at step \d \(", ends[0][1]), ends


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stopped", "said"),
    [
        (1, r"process 1 \(\S+\) has not reported for \d+ s: it is stopped"),
        (0, r"process 0, the coordinator, has not responded for \d+ s"),
    ],
)
def test_a_process_that_is_stopped_is_named(tmp_path: Path, stopped: int, said: str) -> None:
    processes = start(f"stopped {stopped}", tmp_path)
    other = processes[1 - stopped]
    try:
        wait_for_step_five(processes)
        _, err = other.communicate(timeout=PATIENCE_S)
    finally:
        processes[stopped].kill()
        processes[stopped].communicate()
    assert other.returncode == 75
    assert re.search(said, err), err[-2000:]

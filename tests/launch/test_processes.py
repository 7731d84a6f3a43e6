"""Joining: what is given is checked before anything waits, and waiting ends in a sentence."""

import socket
import subprocess
import sys

import pytest
from tests.patience import PATIENCE_S
from tests.processes import free_port

from meshwright import MeshwrightError
from meshwright.launch import Joined, join
from meshwright.launch.processes import VARIABLES


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    "given", [{}, {"processes": 1}, {"processes": 1, "process_id": 0, "coordinator": "a:1"}]
)
def test_one_process_joins_nothing(given: dict[str, object]) -> None:
    assert join(**given) == Joined(0, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"coordinator": "h:1", "processes": 2}, r"coordinator=h:1 and processes=2 was given: add --process-id I \(or JAX_PROCESS_ID\)"),
        ({"process_id": 1}, r"add --coordinator HOST:PORT \(or JAX_COORDINATOR_ADDRESS\) and --processes N"),
        ({"processes": 2, "process_id": 1}, r"--coordinator auto finds all three"),
        ({"coordinator": "h:1", "processes": 2, "process_id": 2}, r"numbered 0 to 1"),
        ({"coordinator": "h:1", "processes": 2, "process_id": -1}, r"numbered 0 to 1"),
        ({"coordinator": "h:1", "processes": 1, "process_id": 1}, r"numbered 0 to 0"),
        ({"coordinator": "h:1", "processes": 0, "process_id": 0}, r"at least one process"),
        ({"coordinator": "h", "processes": 2, "process_id": 0}, r"'h' is not HOST:PORT.*10\.0\.0\.1:1234"),
        ({"coordinator": "h:99999", "processes": 2, "process_id": 0}, r"is not HOST:PORT"),
        ({"coordinator": ":1234", "processes": 2, "process_id": 0}, r"is not HOST:PORT"),
        ({"coordinator": "auto", "processes": 2}, r"leave out --processes and --process-id"),
    ],
)  # fmt: skip
def test_a_wrong_combination_is_told_before_anything_waits(
    given: dict[str, object], said: str
) -> None:
    with pytest.raises(MeshwrightError, match=said):
        join(**given)  # type: ignore[arg-type]


def test_the_environment_fills_what_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "h:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "4")
    with pytest.raises(MeshwrightError, match="processes=4 was given: add --process-id"):
        join()
    monkeypatch.setenv("JAX_PROCESS_ID", "7")
    with pytest.raises(MeshwrightError, match="--process-id 7 with --processes 4"):
        join()
    with pytest.raises(MeshwrightError, match="--process-id 7 with --processes 5"):
        join(processes=5)
    monkeypatch.setenv("JAX_NUM_PROCESSES", "four")
    with pytest.raises(MeshwrightError, match="JAX_NUM_PROCESSES='four' is not a whole number"):
        join()


def test_devices_that_are_in_use_cannot_be_joined_any_more() -> None:
    import jax

    jax.devices()
    with pytest.raises(MeshwrightError, match="before anything uses a device"):
        join(f"127.0.0.1:{free_port()}", 2, 0, patience_s=20)


def told(arguments: str) -> str:
    program = f"""
import os
from meshwright import MeshwrightError
from meshwright.launch import join
try:
    join({arguments})
except MeshwrightError as mistake:
    print(mistake, flush=True)
    os._exit(2)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert "Traceback" not in done.stderr
    assert "Check failure" not in done.stderr
    return done.stdout


def test_a_coordinator_that_is_not_there_is_told_after_the_time_given() -> None:
    port = free_port()
    said = told(f"'127.0.0.1:{port}', 2, 1, patience_s=2")
    assert f"the coordinator 127.0.0.1:{port} could not be reached in 2 s" in said


def test_processes_that_do_not_come_are_told_after_the_time_given() -> None:
    said = told(f"'127.0.0.1:{free_port()}', 3, 0, patience_s=2")
    assert "not all 3 processes joined" in said
    assert "with --process-id 0 to 2, each once" in said


def test_auto_without_a_cluster_says_what_to_give() -> None:
    said = told("'auto', patience_s=20")
    assert "--coordinator auto found no Slurm, Open MPI, Kubernetes or Cloud TPU here" in said
    assert "give --coordinator HOST:PORT, --processes N, --process-id I" in said


def test_a_port_that_is_taken_is_told() -> None:
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert "Address already in use): choose another" in told(
            f"'127.0.0.1:{port}', 2, 0, patience_s=20"
        )


@pytest.mark.slow
def test_different_numbers_of_processes_are_told() -> None:
    port = free_port()
    program = "import sys; from meshwright.launch import join; join(*eval(sys.argv[1]))"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, f"('127.0.0.1:{port}', {number}, {i})"],
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, number in enumerate((2, 3))
    ]
    errors = [process.communicate(timeout=PATIENCE_S)[1] for process in processes]
    assert sum("every process needs the same number" in error for error in errors) == 1

"""Things computed in several processes."""

import json
import os
import subprocess
import sys

import pytest

from meshwright.machines import CHIPS
from meshwright.planner import Run, compare
from meshwright.planner.report import comparison_data
from meshwright.training import TrainConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux")

SCRIPT = """
import json, os, threading
from meshwright.errors import MeshwrightError
from meshwright.planner import processes

processes._cpus = lambda: 2

def run(n):
    if n == 13:
        raise MeshwrightError("no 13")
    return n, os.getpid()

def pids(things):
    found = list(processes.in_processes(run, things))
    assert [n for n, _ in found] == list(things)
    return {pid for _, pid in found}

forked, one = pids(range(12)), pids([5])
done = threading.Event()
waiting = threading.Thread(target=done.wait)
waiting.start()
beside_a_thread = pids(range(12))
done.set()
waiting.join()
try:
    pids([1, 13, 3])
except MeshwrightError as mistake:
    said = str(mistake)
import jax
jax.devices()
print(json.dumps({
    "own": os.getpid(), "forked": [*forked], "one": [*one], "beside": [*beside_a_thread],
    "said": said, "initialized": [*pids(range(12))],
}))
"""

COMPARED = """
import json
from meshwright.machines import CHIPS
from meshwright.planner import Run, compare, processes
from meshwright.planner.report import comparison_data
from meshwright.training import TrainConfig

processes._cpus = lambda: 2
config = TrainConfig("llama-3.2-1b", batch=64, seq=2048)
chips = [CHIPS[name] for name in ("v5e", "h100", "l4")]
print(json.dumps(comparison_data(compare(config, chips, Run(1e9, within=1e6)))))
"""


AWKWARD = """
import json, multiprocessing, os, signal, time
from meshwright.planner import processes

processes._cpus = lambda: 2
own = os.getpid()

def kills_itself(n):
    if n == 5 and os.getpid() != own:
        os.kill(os.getpid(), signal.SIGKILL)
    return n

def in_one(_):
    return list(processes.in_processes(abs, range(4)))

def fails(n):
    if n == 0:
        raise ValueError("at once")
    time.sleep(600)

real_fork, forks = os.fork, []

def fork():
    forks.append(0)
    if len(forks) == 2:
        raise OSError("no memory")
    return real_fork()

with multiprocessing.get_context("fork").Pool(1) as pool:
    [in_daemon] = pool.map(in_one, [0])
signal.signal(signal.SIGTERM, lambda number, frame: None)
killed = list(processes.in_processes(kills_itself, range(9)))
try:
    in_one(list(processes.in_processes(fails, range(4))))
except ValueError as error:
    raised = str(error)
os.fork = fork
found = {"killed": killed, "daemon": in_daemon, "raised": raised, "refused": in_one(0)}
print(json.dumps(found | {"forks": len(forks), "handled": in_one(0)}))
"""

ORPHANED = """
import os, time
from meshwright.planner import processes

processes._cpus = lambda: 2

def run(n):
    if n > 1:
        time.sleep(600)
    return os.getpid()

for pid in processes.in_processes(run, range(4)):
    print(pid, flush=True)
"""


def _printed(script: str) -> dict[str, object]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_processes_are_forked_only_where_that_is_safe() -> None:
    found = _printed(SCRIPT)
    own = [found["own"]]
    assert found["own"] not in found["forked"]  # type: ignore[operator]
    assert found["one"] == found["beside"] == found["initialized"] == own
    assert found["said"] == "no 13"


def test_processes_that_are_killed_refused_or_daemons_do_not_matter() -> None:
    same = list(range(4))
    assert _printed(AWKWARD) == {
        "killed": list(range(9)), "daemon": same, "raised": "at once", "refused": same, "forks": 2,
        "handled": same,
    }  # fmt: skip


def test_processes_end_with_the_one_that_started_them() -> None:
    command = [sys.executable, "-c", ORPHANED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert {int(first.stdout.readline()) for _ in range(2)} != {first.pid}
        first.kill()
        assert first.stdout.read() == ""  # returns when no process holds the other end


def test_machines_compared_in_processes_are_compared_as_in_one() -> None:
    config = TrainConfig("llama-3.2-1b", batch=64, seq=2048)
    chips = [CHIPS[name] for name in ("v5e", "h100", "l4")]
    here = comparison_data(compare(config, chips, Run(1e9, within=1e6)))
    assert _printed(COMPARED) == json.loads(json.dumps(here))

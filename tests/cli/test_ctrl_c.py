"""Ctrl-C prints one line and ends the process, wherever it is."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S

LLAMA = Path(__file__).parents[1] / "models" / "hf_reference" / "llama-mha"

# ends the process by Ctrl-C when the import of a module begins
AT_IMPORT = """
import os, signal, sys

class AtImport:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, AtImport())
sys.argv = ["meshwright", "train", "tiny", "--steps", "1", "--run", {run!r}]
from meshwright.cli.main import main
main()
"""


def ended(code: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )
    return done.returncode, without_waiting(done.stdout + done.stderr)


def without_waiting(text: str) -> str:
    """What was printed, but for the line that a slow machine sees while jax is imported."""
    return text.removeprefix("tiny: importing jax …\n")


@pytest.mark.parametrize(
    "module", ["meshwright.interrupt", "numpy", "jax", "jax._src.core", "optax", "meshwright.training.loop"]
)  # fmt: skip
def test_ctrl_c_during_the_imports_is_one_line(module: str, tmp_path: Path) -> None:
    assert ended(AT_IMPORT.format(module=module, run=str(tmp_path / "run"))) == (130, "stopped\n")


def test_importing_the_command_line_loads_nothing_slow() -> None:
    code = "import sys, meshwright.cli.main; print([m for m in ('jax', 'numpy', 'tyro') if m in sys.modules])"
    assert ended(code) == (0, "[]\n")


START = """
import gc, hashlib, os, signal, threading, time
from meshwright.interrupt import before_end, ctrl_c_says, end_on_ctrl_c

def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)

end_on_ctrl_c()
"""


def test_ctrl_c_in_a_garbage_collector_callback_is_not_swallowed() -> None:
    code = f"{START}\ngc.callbacks.append(lambda phase, info: ctrl_c())\ngc.collect()\ntime.sleep(100_000)"
    assert ended(code) == (130, "stopped\n")


def test_ctrl_c_while_the_main_thread_is_in_a_library_ends_the_process() -> None:
    """As in a compiler: C code that does not look for signals, and lets go of Python's lock."""
    code = f"{START}\nthreading.Timer(0.3, ctrl_c).start()\nhashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"
    assert ended(code) == (130, "stopped\n")


def test_ctrl_c_cleans_up_and_says_what_was_asked_for() -> None:
    code = f"""{START}
with ctrl_c_says(lambda: "stopped after 3 files"), before_end(lambda: print("cleaned up", flush=True)):
    ctrl_c()
    time.sleep(100_000)
"""
    assert ended(code) == (130, "cleaned up\nstopped after 3 files\n")


def test_a_second_ctrl_c_does_not_wait_for_the_clean_up() -> None:
    code = f"""{START}
cleaning = threading.Event()
with before_end(lambda: (cleaning.set(), time.sleep(100_000))):
    ctrl_c()
    cleaning.wait()
    ctrl_c()
    time.sleep(100_000)
"""
    assert ended(code) == (130, "stopped\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_the_first_step_ends_a_run_without_a_checkpoint(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "meshwright.cli.main", "train", "tiny", "--cpu-devices", "1"]
    with subprocess.Popen(
        [*command, "--run", str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("tiny on mesh")  # it has yet to compile
        process.send_signal(number)
        assert process.wait(timeout=PATIENCE_S) == code
        assert without_waiting(process.stderr.read()) == "stopped before the first step\n"
    assert not (run / "checkpoints").exists()


def test_importing_meshwright_leaves_ctrl_c_to_the_program() -> None:
    code = """
import os, signal
import meshwright as mw
from meshwright.cli.main import main
from meshwright.training import train
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""
    assert ended(code) == (0, "interrupted\n")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_packing_leaves_nothing_half_written_behind(
    number: signal.Signals, status: int, tmp_path: Path
) -> None:
    code = f"""{START}
from meshwright.data.packing import new_store
from meshwright.data.tokenizers import ByteTokenizer
with new_store({str(tmp_path / "a.store")!r}, ByteTokenizer()):
    os.kill(os.getpid(), {int(number)})
    time.sleep(100_000)
"""
    assert ended(code) == (status, "stopped\n")
    assert os.listdir(tmp_path) == []


def test_an_export_leaves_nothing_half_written_behind(tmp_path: Path) -> None:
    code = f"""{START}
from meshwright.models import load_hf, save_hf
from meshwright.models.decoder.hf_config import from_hf_config
from meshwright.models.huggingface import save
def stopped(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(100_000)
save.write_index = stopped  # after the weights
save_hf({str(tmp_path / "model")!r}, load_hf({str(LLAMA)!r}), from_hf_config({str(LLAMA)!r}))
"""
    assert ended(code) == (143, "stopped\n")
    assert os.listdir(tmp_path) == []

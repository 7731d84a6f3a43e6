"""A run whose terminal goes away, as with a lost ssh connection: it saves, and ends well."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.training.test_loop import MODEL

from meshwright.checkpoint import Checkpoints
from meshwright.training.run import read_metrics

# the terminal becomes that of a new session, which gets SIGHUP when it goes away
IN_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", "meshwright.cli.main", *sys.argv[1:]])
"""


def test_a_run_whose_terminal_goes_away_saves_and_ends_with_zero(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    run = tmp_path / "run"
    arguments = ["train", str(tmp_path / "config.json"), "--run", str(run), "--steps", "100000"]
    arguments += ["--batch", "4", "--seq", "32", "--cpu-devices", "1"]
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, *arguments],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env=os.environ | {"TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    os.set_blocking(ours, False)
    shown = b""
    while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").stat().st_size:
        assert process.poll() is None, shown.decode()
        try:
            shown += os.read(ours, 1 << 16)
        except BlockingIOError:
            time.sleep(0.05)
    os.close(ours)
    assert process.wait() == 0
    steps, _ = read_metrics(run).column("loss")
    assert Checkpoints(run / "checkpoints").latest() == steps[-1]
    assert (run / "run.html").is_file()

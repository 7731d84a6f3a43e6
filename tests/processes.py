"""What tests of several processes share."""

import dataclasses
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from tests.patience import PATIENCE_S


def free_port() -> str:
    """A port nobody listens on, for a coordinator on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def hear_signals() -> None:
    """Let this process and those it starts hear signals that a background shell or nohup ignores.

    An ignored signal stays ignored in children; one that has a handler here is the default there.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # nohup still keeps this process


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


# in one process, which saves importing jax for each command
_PROGRAM = """
import contextlib, io, json, resource, signal, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
from meshwright.cli.main import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
ended = []
for arguments in json.loads(sys.argv[1]):
    out, err, code = io.StringIO(), io.StringIO(), 0
    if arguments[0] == "[limit]":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(arguments[1]), hard))
        continue
    if arguments[0] == "[python]":
        exec(arguments[1])
        continue
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    ended.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(ended))
"""


def run_commands(*commands: Sequence[str]) -> list[Ended]:
    """`meshwright COMMAND` for each, one after the other in one process with one CPU device.

    `("[limit]", bytes)` limits the size of files the next command may write, as a full disk does;
    `("[python]", code)` runs code in between.
    """
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps([list(command) for command in commands])],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [Ended(*ended) for ended in json.loads(done.stdout.splitlines()[-1])]

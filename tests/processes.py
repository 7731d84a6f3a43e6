"""What tests of several processes share."""

import dataclasses
import json
import signal
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.forked import shared_commands

SEVERAL_COMMANDS = Path(__file__).with_name("several_commands.py")


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


def run_commands(*commands: Sequence[str]) -> list[Ended]:
    """`meshwright COMMAND` for each, one after the other in one process with one CPU device.

    `("[limit]", bytes)` limits the size of files the next command may write, as a full disk does;
    `("[python]", code)` runs code in between.
    """
    with tempfile.TemporaryDirectory() as folder:
        said, out = Path(folder, "said"), Path(folder, "ended.json")
        arguments = [json.dumps([list(command) for command in commands]), str(out)]
        code = shared_commands().run_script(SEVERAL_COMMANDS, arguments, said)
        assert code == 0, said.read_text()
        return [Ended(*ended) for ended in json.loads(out.read_text())]

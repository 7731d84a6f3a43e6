"""`meshwright serve`: its settings, what it prints, and that signals end it."""

import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.patience import PATIENCE_S
from tests.serving.server.bigram_engine import BigramEngine
from tests.serving.server.serving import source

import meshwright.serving.server
from meshwright.cli.commands import run
from meshwright.errors import MeshwrightError
from meshwright.launch import EXIT_CODE
from meshwright.serving import ServeConfig
from meshwright.serving import start as serving_start
from meshwright.serving.server import HttpServer, bind, longest_shutdown
from meshwright.serving.settings import LimitsConfig

ROOT = Path(__file__).parents[2]
# the command with the engine of the tests, in a process of its own
PROGRAM = """
import sys
from tests.serving.server.bigram_engine import BigramEngine
from tests.serving.server.serving import source
from meshwright.serving import start as serving_start
from meshwright.cli.main import main
serving_start.model_source = lambda *_, **__: source()
serving_start._engine = lambda *_: BigramEngine(delay=0.01)
sys.argv = ["meshwright", "serve", "bigram", "--port", "0", *sys.argv[1:]]
main()
"""


@pytest.fixture
def ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server gets a signal as soon as it waits for one."""
    waits = HttpServer.wait
    ended: list[HttpServer] = []

    def wait(server: HttpServer, seconds: float = math.inf) -> bool:
        if server not in ended:
            ended.append(server)
            os.kill(os.getpid(), signal.SIGTERM)
        return waits(server, seconds)

    monkeypatch.setattr(HttpServer, "wait", wait)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[ServeConfig]:
    """The settings that commands are read as; nothing is served."""
    read: list[ServeConfig] = []
    monkeypatch.setattr("meshwright.serving.serve", read.append)
    return read


def test_flags_are_settings(settings: list[ServeConfig]) -> None:
    run(
        ["serve", "first", "--mesh", "tp=2", "--port", "9", "--limits.requests", "7", "--api-key", "a",
         "--api-key", "b", "--easylm.chat-user-prefix", "U:", "--no-access-log"]
    )  # fmt: skip
    (config,) = settings
    assert (config.model, config.mesh, config.port, config.limits.requests) == (
        "first",
        "tp=2",
        9,
        7,
    )
    assert (config.api_key, config.easylm.chat_user_prefix) == (("a", "b"), "U:")
    assert (config.host, config.access_log, config.served_name) == ("127.0.0.1", False, "first")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "70000"], "port=70000"),
        (["--limits.requests", "0"], "limits.requests"),
        (["--easylm.input-length", "4000"], "easylm.seq_length=2048"),
        (["--tp", "2"], "--mesh"),
    ],
)
def test_wrong_settings_are_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["serve", "first", *flags])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_what_is_wrong_is_said_before_the_weights_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        run(["serve", str(tmp_path / "none")])
    assert "does not exist" in capsys.readouterr().err
    monkeypatch.setattr(serving_start, "model_source", lambda *_, **__: source())
    monkeypatch.setattr(serving_start, "_engine", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(SystemExit):
        run(["serve", str(tmp_path), "--api-key-file", str(tmp_path / "none")])
    assert "--api-key-file" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit):
        run(["serve", str(tmp_path), "--port", str(taken.getsockname()[1])])
    assert "is used by another program" in capsys.readouterr().err


@pytest.mark.usefixtures("ends_at_once")
def test_the_engine_is_closed_at_the_end(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    engine = BigramEngine()
    monkeypatch.setattr(serving_start, "model_source", lambda *_, **__: source())
    monkeypatch.setattr(serving_start, "_engine", lambda *_: engine)
    run(["serve", "bigram", "--port", "0", "--host", "0.0.0.0"])
    assert engine.closed
    shown = capsys.readouterr()
    assert re.search(r"bigram is served at http://127\.0\.0\.1:\d+/v1", shown.out)
    assert "no chat template" in shown.out
    assert "can use this server" in shown.err


@pytest.mark.usefixtures("ends_at_once")
def test_default_sampling_is_shown_and_can_be_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"temperature": 0.6, "top_k": 20, "eos_token_id": 256}
    folder = dataclasses.replace(source(), generation_config=given)
    monkeypatch.setattr(serving_start, "model_source", lambda *_, **__: folder)
    monkeypatch.setattr(serving_start, "_engine", lambda *_: BigramEngine())

    def shown(*flags: str) -> str:
        run(["serve", "bigram", "--port", "0", *flags])
        return capsys.readouterr().out

    assert "default sampling, by generation_config.json: temperature 0.6, top_k 20\n" in shown()
    assert "default sampling" not in shown("--generation-config", "none")
    given["temperature"] = -1.0
    with pytest.raises(SystemExit):
        run(["serve", "bigram"])
    message = capsys.readouterr().err
    assert "generation_config.json: temperature=-1.0 must be" in message
    assert "--generation-config none" in message


def start(
    program: str = PROGRAM, flags: Sequence[str] = (), **streams: Any
) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, "-c", program, *flags], cwd=ROOT, text=True, **pipes | streams,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
    )  # fmt: skip


def test_clients_are_told_what_the_server_does_while_it_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also the errors of a start that fails reach the command line as before."""
    answers: list[Any] = []
    ports: list[int] = []

    def bind_and_note(*address: Any) -> socket.socket:
        bound = bind(*address)
        ports.append(bound.getsockname()[1])
        return bound

    def engine(*arguments: Any) -> Any:
        *_, progress = arguments
        for text in ("", "compiling 2 of 5: decode 16"):
            if text:
                progress(text)
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/health", timeout=PATIENCE_S)
            answers.append((refused.value.code, json.load(refused.value)["error"]["message"]))
        raise MeshwrightError("out of memory")

    monkeypatch.setattr(serving_start, "model_source", lambda *_, **__: source())
    monkeypatch.setattr(serving_start, "_engine", engine)
    monkeypatch.setattr(meshwright.serving.server, "bind", bind_and_note)
    with pytest.raises(SystemExit):
        run(["serve", "bigram", "--port", "0"])
    (first, reading), (second, compiling) = answers
    assert first == second == 503
    assert "the server is starting: reading the weights" in reading
    assert "the server is starting: compiling 2 of 5: decode 16" in compiling
    assert capsys.readouterr().err == "compiling 2 of 5: decode 16\nerror: out of memory\n"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_log_on_a_full_disk_does_not_end_the_server(stream: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with open("/dev/full", "w") as full:
        flags = ["--host", "0.0.0.0", "--port", port]  # a warning on standard error
        process = start(PROGRAM.replace('"--port", "0", ', ""), flags, **{stream: full})
    try:
        answered = False
        while not answered:
            assert process.poll() is None, process.communicate()
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=PATIENCE_S)
                answered = True
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, output
    assert "Traceback" not in f"{output}"
    if stream == "stdout":
        assert "warning: the output cannot be written: No space left on device" in output[1]


def test_a_long_stream_does_not_outlive_the_time_to_finish() -> None:
    process = start(flags=["--limits.shutdown-seconds", "0.5"])
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        body = b'{"prompt": "a", "max_tokens": 500, "ignore_eos": true, "stream": true}'
        with urllib.request.urlopen(f"{url}/completions", body, timeout=PATIENCE_S) as response:
            response.readline()  # it runs
            process.send_signal(signal.SIGTERM)
            *_, last, _ = response.read().split(b"\n\n")
        process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0
    assert "shutting down" in json.loads(last.removeprefix(b"data: "))["error"]["message"]


def test_a_step_that_does_not_end_does_not_keep_the_process() -> None:
    stuck = "import time\nBigramEngine.close = lambda _: time.sleep(1000)\n"
    stuck += "import meshwright.serving.server.run as server_run\nserver_run._CLOSING_SECONDS = 0\n"
    program = PROGRAM.replace("sys.argv = ", f"{stuck}sys.argv = ")
    process = start(program, ["--limits.shutdown-seconds", "0"])
    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == EXIT_CODE
    assert "the server did not end within 2 s of the signal" in errors


def test_kubernetes_waits_longer_than_a_shutdown_takes() -> None:
    assert (
        longest_shutdown(LimitsConfig()) < 30
    )  # terminationGracePeriodSeconds, if a pod does not set it


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_what_runs_and_ends_the_process(number: int) -> None:
    process = start()
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        body = b'{"prompt": "a", "max_tokens": 40, "ignore_eos": true, "stream": true}'
        with urllib.request.urlopen(f"{url}/completions", body, timeout=PATIENCE_S) as response:
            response.readline()  # it runs
            process.send_signal(number)
            assert response.read().endswith(b"data: [DONE]\n\n")
        _, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, errors
    assert "POST /v1/completions 200" in errors
    assert "Traceback" not in errors

"""A server over several processes: it answers as one process does, and tells of one that is gone."""

import contextlib
import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.patience import PATIENCE_S, eventually
from tests.processes import free_port

from meshwright.models import (
    ADAPTER,
    LoraConfig,
    abstract_arrays,
    from_hf_config,
    save_adapter,
    with_adapter,
)
from meshwright.serving import (
    EngineConfig,
    Request,
    Sampling,
    generation_mesh,
    model_source,
    start_engine,
)

HERE = socket.gethostname()
REFERENCE = Path(__file__).parents[1] / "models" / "hf_reference" / "llama-mha"
ENGINE = EngineConfig(
    max_batch=2, max_length=64, page_size=8, chunk=16, batch_buckets=(2,), compile_first=False
)
FLAGS = [
    "--engine.max-batch",
    "2",
    "--engine.max-length",
    "64",
    "--engine.page-size",
    "8",
    "--engine.chunk",
    "16",
    "--engine.batch-buckets",
    "2",
    "--engine.no-compile-first",
    "--end-token",
    "</s>",
]
GREEDY = {"prompt": "abc", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
SAMPLED = {
    "prompt": "the quick fox", "max_tokens": 12, "temperature": 0.9, "seed": 7, "top_p": 0.9,
    "ignore_eos": True, "frequency_penalty": 0.5, "logit_bias": {"5": 1.5},
}  # fmt: skip
LONG = {"prompt": "abc", "max_tokens": 50, "temperature": 0, "ignore_eos": True, "n": 100}


@pytest.fixture
def model(letters: Path, tmp_path: Path) -> Path:
    """A tiny Hugging Face folder."""
    folder = shutil.copytree(REFERENCE, tmp_path / "model")
    shutil.copy(letters, folder / "tokenizer.json")
    return folder


class Server:
    """The processes of a server."""

    def __init__(
        self,
        model: Path,
        mesh: str,
        devices: int,
        others: Sequence[str] = (),
        processes: int = 2,
        first: Sequence[str] = (),
    ) -> None:
        """`others`: what the processes other than process 0 are started with, instead of `mesh`;
        `first`: what process 0 is."""
        coordinator, self.port = free_port(), int(free_port())
        self.processes = [
            subprocess.Popen(
                [
                    sys.executable, "-u", "-m", "meshwright.cli.main", "serve", str(model),
                    "--cpu-devices", str(devices), "--coordinator", f"127.0.0.1:{coordinator}",
                    "--processes", str(processes), "--process-id", str(i),
                    "--port", str(self.port), *FLAGS,
                    *((others if i else first) or ("--mesh", mesh)),
                ],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for i in range(processes)
        ]  # fmt: skip

    def wait_until_ready(self) -> None:
        out = self.processes[0].stdout
        assert out is not None
        while "is served at" not in (line := out.readline()):
            if not line:
                pytest.fail(self.processes[0].communicate(timeout=PATIENCE_S)[1])

    def ends(self) -> list[str]:
        """What each process has said on standard error, when all have ended."""
        return [process.communicate(timeout=PATIENCE_S)[1] for process in self.processes]

    def post(self, body: dict[str, Any], path: str = "/v1/completions") -> tuple[int, Any]:
        with self.connection() as connection:
            connection.request("POST", path, json.dumps(body))
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def get(self, path: str) -> tuple[int, str]:
        with self.connection() as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def connection(self) -> "contextlib.closing[http.client.HTTPConnection]":
        return contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        )


@contextlib.contextmanager
def serving(*arguments: Any, **settings: Any) -> Iterator[Server]:
    server = Server(*arguments, **settings)
    try:
        yield server
    finally:
        for process in server.processes:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def streaming(server: Server, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
    """A stream of which an event has come."""
    with server.connection() as connection:
        connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}))
        response = connection.getresponse()
        assert response.status == 200
        assert response.readline().startswith(b"data: {")
        yield response


def tokens_of_one_process(model: Path) -> list[str]:
    """The texts of the two requests, by an engine of this process with one device."""
    source = model_source(model, end_token="</s>")
    sampling = Sampling(
        SAMPLED["temperature"], top_p=SAMPLED["top_p"], seed=SAMPLED["seed"],
        frequency_penalty=SAMPLED["frequency_penalty"], logit_bias=((5, 1.5),),
    )  # fmt: skip
    requests = [
        Request(tuple(source.encode(body["prompt"])), how, body["max_tokens"], ignore_end=True)
        for body, how in ((GREEDY, Sampling(0.0)), (SAMPLED, sampling))
    ]
    with start_engine(source, generation_mesh(), config=ENGINE) as engine:
        return [done.text for done in engine.generate(requests)]


def check_answers(server: Server, expected: list[str]) -> None:
    for body, text in zip((GREEDY, SAMPLED), expected, strict=True):
        status, data = server.post(body)
        assert status == 200, data
        assert data["choices"][0]["text"] == text


def wait_for_metric(server: Server, line: str) -> None:
    eventually(lambda: line in server.get("/metrics")[1])


def test_two_processes_answer_as_one_and_stop_on_a_signal_to_either(model: Path) -> None:
    expected = tokens_of_one_process(model)
    with serving(model, "tp=2", 1) as server:
        server.wait_until_ready()
        check_answers(server, expected)
        with streaming(server, LONG):
            pass  # the client leaves
        wait_for_metric(server, "meshwright_requests_running 0.0")
        wait_for_metric(server, 'finished_total{reason="cancelled"}')
        check_answers(server, expected)
        with streaming(server, {**GREEDY, "max_tokens": 50}) as running:
            server.processes[1].send_signal(signal.SIGTERM)
            assert running.read().endswith(b"data: [DONE]\n\n")
        ends = server.ends()
        assert [process.returncode for process in server.processes] == [0, 0], ends
        assert not any("error" in text for text in ends), ends


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2"])
def test_processes_have_the_adapters_that_they_start_with(
    model: Path, tmp_path: Path, mesh: str
) -> None:
    config, lora = from_hf_config(model), LoraConfig(2)
    factors = with_adapter(abstract_arrays(config), lora, np.float32)[ADAPTER]
    random = np.random.default_rng(0)
    values = jax.tree.map(lambda one: random.normal(size=one.shape).astype(np.float32), factors)
    adapter = save_adapter(tmp_path / "adapter", {ADAPTER: values}, config, lora, str(model))
    merged = model_source(model, end_token="</s>", adapter=adapter)
    prompt = tuple(merged.encode(GREEDY["prompt"]))
    with start_engine(merged, generation_mesh(), config=ENGINE) as engine:
        [expected] = engine.generate([Request(prompt, Sampling(0.0), 12, ignore_end=True)])
    flags = ("--mesh", mesh, "--adapters", f"one={adapter}", "--adapter-loading")
    flags += ("--engine.max-adapters", "2")
    with serving(model, mesh, 1, flags, first=flags) as server:
        server.wait_until_ready()
        status, data = server.post({**GREEDY, "model": "one", "n": 4})
        assert status == 200, data
        assert {choice["text"] for choice in data["choices"]} == {expected.text}
        assert server.post(GREEDY)[1]["choices"][0]["text"] != expected.text
        body = {"lora_name": "two", "lora_path": str(adapter)}
        status, data = server.post(body, "/v1/load_lora_adapter")
        assert status == 400
        assert "takes adapters at its start" in data["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "processes", "devices"),
    [("fsdp=2,tp=4", 2, 4), ("dp=2,tp=4", 2, 4), ("dp=2,tp=2", 4, 1)],
)
def test_so_they_do_on_larger_meshes(model: Path, mesh: str, processes: int, devices: int) -> None:
    """With dp, the second replica has no device of process 0 and sends its tokens there."""
    expected = tokens_of_one_process(model)
    with serving(model, mesh, devices, processes=processes) as server:
        server.wait_until_ready()
        check_answers(server, expected)
        status, data = server.post({**GREEDY, "n": 8, "logprobs": 3, "echo": True})
        assert status == 200, data
        assert {choice["text"] for choice in data["choices"]} == {"abc" + expected[0]}
        server.processes[0].send_signal(signal.SIGTERM)
        ends = server.ends()
        assert [process.returncode for process in server.processes] == [0] * processes, ends


def test_a_worker_that_is_killed_is_named_to_clients(model: Path) -> None:
    with serving(model, "tp=2", 1) as server:
        server.wait_until_ready()
        said = f"process 1 ({HERE}) is gone: it was killed or has crashed"
        with streaming(server, LONG) as running:
            server.processes[1].kill()
            last = running.read().decode().splitlines()[-2]
        assert said in json.loads(last.removeprefix("data: "))["error"]["message"]
        status, data = server.post(GREEDY)
        assert (status, said in data["error"]["message"]) == (503, True)
        assert server.get("/health")[0] == 503
        err = server.ends()[0]
        assert server.processes[0].returncode == 75
        assert f"error: {said}; see its log, and start every process again" in err


def test_when_process_0_is_killed_the_others_end_and_name_it(model: Path) -> None:
    with serving(model, "tp=2", 1) as server:
        server.wait_until_ready()
        server.processes[0].kill()
        _, err = server.processes[1].communicate(timeout=PATIENCE_S)
        assert server.processes[1].returncode == 75
        assert f"error: process 0 ({HERE}) is gone: it was killed or has crashed; see" in err


@pytest.mark.slow
def test_a_worker_that_is_stopped_is_named(model: Path) -> None:
    with serving(model, "tp=2", 1) as server:
        server.wait_until_ready()
        with streaming(server, LONG) as running:
            server.processes[1].send_signal(signal.SIGSTOP)
            last = running.read().decode().splitlines()[-2]
        assert f"process 1 ({HERE}) has not responded for 20 s" in last
        server.processes[1].kill()
        assert server.ends()
        assert server.processes[0].returncode == 75


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (
            ["--mesh", "fsdp=2", "--engine.pages", "40"],
            r"--mesh: tp=2 in process 0, fsdp=2 in process 1; --engine.pages: None in process 0, "
            "40 in process 1. Start every process with the same command, except for --process-id",
        ),
    ],
)
def test_processes_with_different_settings_are_refused(
    model: Path, others: list[str], said: str
) -> None:
    with serving(model, "tp=2", 1, others) as server:
        ends = "".join(server.ends())
        assert [process.returncode for process in server.processes] == [2, 2]
        assert len(re.findall(f"different settings: {said}", ends)) == 1, ends  # one says it

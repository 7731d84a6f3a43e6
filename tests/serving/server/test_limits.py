"""Limits, keys, clients that leave, and the end of the server."""

import asyncio
import contextlib
import http.client
import itertools
import json
import logging
import math
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S, eventually
from tests.serving.server.bigram_engine import BigramEngine
from tests.serving.server.serving import Answer, Running, config, serving, source

from meshwright.errors import MeshwrightError
from meshwright.serving.request import Delta, EngineStoppedError, Request
from meshwright.serving.server import run
from meshwright.serving.server.run import HttpServer, bind
from meshwright.serving.server.service import Service
from meshwright.serving.settings import EngineConfig, LimitsConfig

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "a", "max_tokens": 500, "ignore_eos": True}


@contextlib.contextmanager
def in_background(call: Callable[[], Answer]) -> Iterator[list[Answer]]:
    """`call` in a thread; its answer is in the list at the end."""
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    yield answers
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def request_bytes(body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    return (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    ).encode() + data


# ---- sizes and times ----------------------------------------------------------------------------


def test_a_body_that_is_too_large_is_refused() -> None:
    with serving(limits=LimitsConfig(body_bytes=1000)) as server:
        answer = server.post(COMPLETIONS, prompt="a" * 2000)
        assert (answer.status, "1,000 bytes" in answer.message) == (413, True)
        # also where it does not say how large it will be
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request("POST", COMPLETIONS, iter([b"x" * 600] * 2), encode_chunked=True)
            assert connection.getresponse().status == 413


def test_a_body_that_does_not_arrive_is_a_timeout() -> None:
    with (
        serving(limits=LimitsConfig(body_seconds=0.2)) as server,
        socket.create_connection(("127.0.0.1", server.port)) as client,
    ):
        client.sendall(request_bytes({"prompt": "a"})[:-3])
        assert b"408" in client.recv(100)


def test_a_request_that_takes_too_long_is_cancelled() -> None:
    limits = LimitsConfig(request_seconds=1.5)
    with serving(BigramEngine(held_after=5), limits=limits) as server:
        answer = server.post(COMPLETIONS, **LONG)
        assert (answer.status, answer.headers["x-should-retry"]) == (504, "false")
        eventually(lambda: not server.engine.active)
        *_, last = server.post(COMPLETIONS, **LONG, stream=True).events
        assert "longer than 1.5 s" in last["error"]["message"]
        eventually(lambda: not server.engine.active)


class Occupied(BigramEngine):
    """Gives the first sequence its tokens, and none to the others, however late they come."""

    first: Request | None = None

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        if self.first is None:
            self.first = request
        if request is not self.first:
            self.active[request.id] = request
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                del self.active[request.id]
        async for delta in super().stream(request):
            yield delta


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, LONG),
        (COMPLETIONS, LONG | {"stream": True, "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True}),
        ("/loglikelihood", {"text": ["a"]}),
    ],
)
def test_a_request_that_waits_too_long_for_others_is_told_to_try_again(
    path: str, body: dict[str, object]
) -> None:
    limits = LimitsConfig(request_seconds=1.0)
    with serving(Occupied(delay=0.02), limits=limits) as server:
        with in_background(lambda: server.post(COMPLETIONS, **LONG)) as first:
            eventually(lambda: bool(server.engine.active))
            answer = server.post(path, **body)
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert "x-should-retry" not in answer.headers
        assert "send it again later" in answer.message
        assert "fewer tokens" not in answer.message
        # the one that ran is told what it can do itself
        assert (first[0].status, "fewer tokens" in first[0].message) == (504, True)


def test_more_than_the_server_takes_is_refused_until_there_is_room() -> None:
    with serving(BigramEngine(held_after=1), limits=LimitsConfig(requests=2)) as server:
        answer = server.post(COMPLETIONS, prompt="a", n=3)
        assert (answer.status, "smaller n" in answer.message) == (400, True)
        with in_background(lambda: server.post(COMPLETIONS, **LONG, n=2)) as first:
            eventually(lambda: len(server.engine.active) == 2)
            answer = server.post(COMPLETIONS, prompt="a")
            assert answer.status == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.data["error"]["type"] == "rate_limit_error"
            server.engine.release()
        assert first[0].status == 200
        assert server.post(COMPLETIONS, prompt="a").status == 200


def test_more_sequences_than_the_server_ever_takes_are_refused_before_any_work() -> None:
    with serving() as server:
        for prompts in ([[1]] * 5000, ["a"] * 5000):
            answer = server.post(COMPLETIONS, prompt=prompts, n=128, max_tokens=1)
            assert (answer.status, "640,000 sequences" in answer.message) == (400, True)
        assert not server.engine.seen


def test_a_model_that_is_not_ready_is_unavailable() -> None:
    with serving(BigramEngine(is_ready=False)) as server:
        for answer in (
            server.get("/health"),
            server.get("/ready"),
            server.post(COMPLETIONS, prompt="a"),
        ):
            assert (answer.status, answer.headers["retry-after"]) == (503, "5")
        assert server.get("/v1/models").status == 200
        server.engine.is_ready = True
        assert server.get("/health").data == {"status": "ok"}


def test_every_route_says_that_the_server_starts() -> None:
    service = Service(None, source(), config(), None, starting="compiling 2 of 5: decode 16")
    with HttpServer(service) as http_server:
        engine = BigramEngine()
        server = Running(http_server, engine)
        paths = ("/", "/v1/models", "/tokenizer_info", "/health", "/ready", "/no/such/path")
        gets = {path: server.get(path) for path in paths}
        bodies = (COMPLETIONS, "/v1/chat/completions", "/tokenize", "/generate", "/loglikelihood")
        posts = {path: server.post(path, prompt="a") for path in bodies}
        for path, answer in (gets | posts).items():
            assert (answer.status, answer.headers["retry-after"]) == (503, "5"), path
            assert "the server is starting: compiling 2 of 5: decode 16" in answer.message
            assert answer.data["error"]["type"] == "service_unavailable_error"
        assert gets["/"].headers["refresh"] == "5"  # a browser loads the page again
        # the process is alive, which is what Kubernetes must not restart
        assert server.get("/live").status == server.get("/metrics").status == 200
        service.loaded_engine = engine
        for path in ("/", "/v1/models", "/health", "/ready", "/live"):
            assert server.get(path).status == 200
        assert server.post(COMPLETIONS, prompt="a").status == 200
        assert "meshwright_generated_tokens_total" in server.get("/metrics").text


def test_an_engine_that_has_stopped_says_why_and_ends_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = BigramEngine()
    reason = "process 1 (node-1) is gone"
    with serving(engine) as server:
        raised: list[str] = []

        def wait() -> None:
            try:
                run.run_until_stopped(server.server, lambda: None, lambda: None)
            except EngineStoppedError as error:
                raised.append(str(error))

        waits = server.server.wait
        told = threading.Event()

        def wait_to_the_end(seconds: float = math.inf) -> bool:
            if seconds == run._FAILED_SECONDS:  # the time in which clients are told, however long
                told.wait(PATIENCE_S)
                return True
            return waits(seconds)

        monkeypatch.setattr(server.server, "wait", wait_to_the_end)
        waiting = threading.Thread(target=wait)
        waiting.start()
        engine.failure, engine.fails = reason, reason
        for answer in (server.get("/health"), server.post(COMPLETIONS, prompt="a")):
            assert (answer.status, answer.message) == (503, reason)
        told.set()
        waiting.join(PATIENCE_S)
        assert raised == [reason]


def test_a_failure_of_the_engine_is_told() -> None:
    with serving(BigramEngine(fails="out of memory")) as server:
        answer = server.post(COMPLETIONS, prompt="a")
        assert (answer.status, answer.message) == (500, "out of memory")
        for n in (1, 2):
            *_, last = server.post(COMPLETIONS, prompt="a", n=n, stream=True).events
            assert last["error"]["message"] == "out of memory"


# ---- clients that leave -------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_cancels_its_request(stream: bool, n: int) -> None:
    with serving(BigramEngine(held_after=5)) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(request_bytes({**LONG, "stream": stream, "n": n}))
            eventually(lambda: len(server.engine.active) == n)
        eventually(lambda: not server.engine.active)
        assert server.engine.finished == {"cancelled": n}
        eventually(lambda: server.server.service.in_flight == 0)
        assert 'status="499"' in server.get("/metrics").text


def test_a_client_that_does_not_read_is_dropped() -> None:
    class Talkative(BigramEngine):
        def _deltas(self, request: Request) -> list[Delta]:
            return [Delta((1,), "x" * 100_000)] * 2000

    with serving(Talkative(), limits=LimitsConfig(send_seconds=0.3)) as server:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with client:
            client.connect(("127.0.0.1", server.port))
            client.sendall(request_bytes({"prompt": "a", "stream": True}))
            eventually(lambda: server.engine.finished == {"cancelled": 1})


def test_a_client_that_does_not_read_a_large_answer_is_dropped() -> None:
    class Talkative(BigramEngine):
        def _deltas(self, request: Request) -> list[Delta]:
            return [Delta((1,), "x" * 40_000_000, finish_reason="stop")]

    with (
        serving(Talkative(), limits=LimitsConfig(send_seconds=0.3)) as server,
        socket.create_connection(("127.0.0.1", server.port)) as client,
    ):
        client.sendall(request_bytes({"prompt": "a"}))
        eventually(lambda: 'status="499"' in server.get("/metrics").text)


# ---- keys and browsers --------------------------------------------------------------------------


def test_keys_come_from_the_flag_the_file_and_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("two\nthree\n")
    monkeypatch.setenv("MESHWRIGHT_API_KEY", "four")
    settings = config(api_key=("one",), api_key_file=file)
    assert sorted(settings.api_keys()) == ["four", "one", "three", "two"]
    assert "'one'" not in repr(settings)
    file.write_text("\n")
    monkeypatch.delenv("MESHWRIGHT_API_KEY")
    with pytest.raises(MeshwrightError, match="holds no key"):
        config(api_key_file=file).api_keys()
    with pytest.raises(MeshwrightError, match="cannot be read"):
        config(api_key_file=file / "none").api_keys()
    with pytest.raises(MeshwrightError, match="is empty"):
        config(api_key=(" ",)).api_keys()


def test_a_server_with_keys_needs_one_and_never_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with serving(api_key=("sesame-1", "sesame-2")) as server:
        for path in ("/v1/models", "/metrics", "/tokenizer_info"):
            assert server.get(path).status == 401
            assert server.get(path, Authorization="Bearer sesame").status == 401
            assert server.get(path, Authorization="Basic sesame-1").status == 401
            assert server.get(path, Authorization="Bearer sesame-2").status == 200
            assert server.get(path, **{"X-API-Key": "sesame-1"}).status == 200
        answer = server.post(COMPLETIONS + "?key=sesame-1", prompt="a")
        assert (answer.status, answer.data["error"]["code"]) == (401, "invalid_api_key")
        assert (
            server.get(
                "/v1/models", Authorization="Bearer sesame-é".encode().decode("latin-1")
            ).status
            == 401
        )
        assert server.get("/health").status == server.get("/").status == 200
    assert "POST /v1/completions 401" in caplog.text
    assert "sesame" not in caplog.text


def test_pages_of_other_sites_cannot_use_a_server_on_this_machine() -> None:
    with serving(allow_origin=("https://chat.example.org",)) as server:
        own = f"http://127.0.0.1:{server.port}"
        assert server.get("/v1/models", Origin=own).status == 200
        for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://["):
            assert server.get("/v1/models", Origin=origin).status == 403
        allowed = server.get("/v1/models", Origin="https://chat.example.org")
        assert allowed.headers["access-control-allow-origin"] == "https://chat.example.org"
        # a name that another site made point to this machine
        for host, status in (
            ("evil.example", 403),
            ("localhost", 200),
            ("[::1]:80", 200),
            ("[", 403),
        ):
            assert server.get("/v1/models", Host=host).status == status
        preflight = {"Origin": "https://chat.example.org", "Access-Control-Request-Method": "POST"}
        assert server.send("OPTIONS", COMPLETIONS, None, preflight).status == 200


def test_the_names_of_the_loopback_address_are_one_origin() -> None:
    with serving() as server:
        hosts = [f"{name}:{server.port}" for name in ("localhost", "127.0.0.1", "[::1]")]
        for host, page in itertools.product(hosts, hosts):
            headers = {"Host": host, "Origin": f"http://{page}"}
            answer = server.send("GET", "/v1/models", None, headers)
            assert answer.status == 200, headers
            # a browser reads the answer only if it is told that it may
            if host != page:
                assert answer.headers["access-control-allow-origin"] == headers["Origin"]
                asked = headers | {
                    "Access-Control-Request-Method": "POST",
                    "Access-Control-Request-Headers": "content-type",
                }
                assert server.send("OPTIONS", COMPLETIONS, None, asked).status == 200
            # another program of this machine, and names that only look alike
            for other in (
                f"http://localhost:{server.port + 1}",
                "http://localhost",
                f"http://localhost.evil.example:{server.port}",
                f"http://evil.example:{server.port}",
            ):
                answer = server.send("GET", "/v1/models", None, {"Host": host, "Origin": other})
                assert answer.status == 403, (host, other)
                assert "access-control-allow-origin" not in answer.headers


def test_a_loopback_page_is_foreign_to_a_server_of_another_machine() -> None:
    with serving(host="0.0.0.0") as server:
        page = {"Host": f"10.0.0.5:{server.port}", "Origin": f"http://localhost:{server.port}"}
        assert server.send("GET", "/v1/models", None, page).status == 403


def test_the_access_log_has_one_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "meshwright.access")
    with serving() as server:
        server.post(COMPLETIONS, prompt="abc", max_tokens=4, ignore_eos=True)
        server.get("/nothing%0Ahere?secret=1")
    lines = [record.getMessage() for record in caplog.records if record.name == "meshwright.access"]
    assert re.fullmatch(
        r"127\.0\.0\.1 POST /v1/completions 200 \d+\.\d{3}s prompt=3 generated=4 req-\w+", lines[0]
    )
    assert lines[1].startswith("127.0.0.1 GET /nothing%0Ahere 404 ")
    assert len(lines) == 2


def test_metrics_are_prometheus_text() -> None:
    with serving(BigramEngine(delay=0.001)) as server:
        server.post(COMPLETIONS, prompt="abc", max_tokens=4, ignore_eos=True)
        answer = server.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        lines = answer.text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        for name, value in {
            "meshwright_requests_running": 0,
            "meshwright_requests_waiting": 0,
            "meshwright_cache_usage_ratio": 0,
            "meshwright_prompt_tokens_total": 3,
            "meshwright_generated_tokens_total": 4,
            'meshwright_requests_finished_total{reason="length"}': 1,
            "meshwright_time_to_first_token_seconds_count": 1,
            "meshwright_inter_token_latency_seconds_count": 3,
            "meshwright_request_duration_seconds_count": 1,
            'meshwright_http_responses_total{route="/v1/completions",status="200"}': 1,
        }.items():
            assert float(values[name]) == value, name
        assert "meshwright_generated_tokens_per_second" in values


# ---- the end ------------------------------------------------------------------------------------


def test_a_server_that_stops_finishes_what_runs_and_refuses_what_is_new() -> None:
    with serving(BigramEngine(held_after=5)) as server:
        body = {**LONG, "max_tokens": 100}
        with (
            in_background(lambda: server.post(COMPLETIONS, **body)) as once,
            in_background(lambda: server.post(COMPLETIONS, **body, stream=True)) as streamed,
        ):
            eventually(lambda: len(server.engine.active) == 2)
            server.server.stop()
            eventually(lambda: server.get("/health").status == 503)
            answer = server.post(COMPLETIONS, prompt="a")
            assert (answer.status, "shutting down" in answer.message) == (503, True)
            server.engine.release()
        server.server.wait()
        assert once[0].data["usage"]["completion_tokens"] == 100
        assert streamed[0].events[-1] == "[DONE]"
        with pytest.raises(ConnectionRefusedError):
            server.get("/health")


def test_what_does_not_finish_in_time_is_ended_with_an_error() -> None:
    limits = LimitsConfig(shutdown_seconds=0.2)
    with serving(BigramEngine(held_after=1), limits=limits) as server:
        with (
            in_background(lambda: server.post(COMPLETIONS, **LONG)) as once,
            in_background(lambda: server.post(COMPLETIONS, **LONG, stream=True)) as streamed,
        ):
            eventually(lambda: len(server.engine.active) == 2)
            server.server.stop()
        assert once[0].status == 503
        assert "shutting down" in streamed[0].events[-1]["error"]["message"]


def test_a_port_that_is_taken_is_an_error() -> None:
    with serving() as server:
        taken = config()
        object.__setattr__(taken, "port", server.port)
        service = server.server.service
        with pytest.raises(MeshwrightError, match=f"^port {server.port} of 127.0.0.1 is used"):
            HttpServer(Service(service.engine, service.source, taken, None))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: config(limits=LimitsConfig(requests=0)), "limits.requests"),
        (lambda: LimitsConfig(send_seconds=-1), "limits.send_seconds"),
        (lambda: LimitsConfig(shutdown_seconds=-1), "shutdown_seconds=-1 must be 0 or more"),
        (lambda: EngineConfig(kernel="cudn"), "did you mean 'cudnn'"),
        (lambda: EngineConfig(max_length=0), "max_length=0"),
        (lambda: config(allow_origin=("http://[",)), "--allow-origin"),
        (lambda: config(allow_origin=("chat.example.org",)), "https://chat.example.org"),
        (lambda: config(allow_origin=("https://a.org/page",)), "--allow-origin"),
        (lambda: bind("no.such.host.invalid", 0), "--host no.such.host.invalid is not"),
        (lambda: bind("192.0.2.1", 0), "not an address of this machine"),
    ],
)
def test_settings_that_cannot_be_are_errors(make: Callable[[], object], message: str) -> None:
    with pytest.raises(MeshwrightError, match=message):
        make()


def test_running(server: Running) -> None:
    assert server.get("/health").data == {"status": "ok"}

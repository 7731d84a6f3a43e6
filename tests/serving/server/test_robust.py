"""Whatever clients send or leave out: no failure, nothing left in the engine, flat memory."""

import asyncio
import collections
import contextlib
import gc
import json
import logging
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.patience import PATIENCE_S, eventually
from tests.serving.server.bigram_engine import BigramEngine
from tests.serving.server.serving import Running, serving

from meshwright.serving.request import Request
from meshwright.serving.sampling import Sampling
from meshwright.serving.settings import LimitsConfig

KEY = "sesame"
LARGEST = 1 << 16
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
# every field of every body, with a value that is right
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "bigram", "prompt": "ab", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5,
        "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1,
        "logit_bias": {"65": 1}, "seed": 1, "n": 2, "stop": ["x"], "stop_token_ids": [5], "ignore_eos": False,
        "stream": False, "stream_options": {"include_usage": True}, "echo": True, "logprobs": 2, "best_of": 2,
        "suffix": None, "user": "me", "add_special_tokens": True, "response_format": {"type": "text"},
        "min_tokens": 1, "include_stop_str_in_output": True, "prompt_logprobs": 1, "bad_words": ["x"],
        "truncate_prompt_tokens": 1, "allowed_token_ids": [65], "cache_salt": "s", "priority": 0,
    },
    "/v1/chat/completions": {
        "model": "bigram", "messages": [{"role": "system", "content": "s"}, *HI], "max_tokens": 3, "n": 1,
        "max_completion_tokens": 2, "logprobs": True, "top_logprobs": 2, "tools": [TOOL], "tool_choice": "auto",
        "parallel_tool_calls": False, "add_generation_prompt": True, "continue_final_message": False,
        "chat_template_kwargs": {"x": 1}, "reasoning_effort": "low", "modalities": ["text"], "stream": True,
        "stop": "x", "metadata": {}, "seed": None, "skip_special_tokens": False, "guided_choice": ["a"],
    },
    "/tokenize": {"prompt": "ab", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [65, 66]},
    "/generate": {"prefix_text": ["ab"], "temperature": 1.0},
    "/greedy-until": {"prefix_text": ["ab"], "until": [["x"]]},
    "/loglikelihood": {"prefix_text": ["ab"], "text": ["cd"]},
    "/loglikelihood-rolling": {"text": ["cd"]},
    "/chat": {"prompt": "Hi", "context": "", "temperature": 1.0},
}  # fmt: skip
WRONG: list[Any] = [
    None, True, -1, 0, 10**9, 2**63, 2**70, 1.5, -1e308, "", "x", "\u0000", "\ud800", "x" * 5000, [], {}, [[]],
    [None], [{}], [-1], [2**40], ["a", 1, [1]], {"a": 1}, {"type": "json_object"}, [{"role": 1, "content": {}}],
    [{"role": "user", "content": [{"type": "text", "text": 3}]}], [{"role": "assistant", "tool_calls": 5}],
]  # fmt: skip
NOT_JSON = [
    b"", b" ", b"{", b"[]", b"7", b"null", b'"x"', b"{'a': 1}", b'{"prompt": NaN}', b'{"prompt": "\xff"}',
    b'{"prompt": "a"} x', b"\x00" * 50, b"[" * 30_000, b'{"a":' * 10_000, b'{"prompt": "\\ud800"}',
    b'{"prompt": 1e999}', b"1" * 10_000, b"\xef\xbb\xbf{}",
]  # fmt: skip
NOT_HTTP = [
    b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"POST /chat HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
    b"POST /chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
    b"POST /chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    b"POST /chat HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /%ff%00%0a HTTP/1.1\r\nHost: localhost\r\n\r\n", b"DELETE / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /v1/models/../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
]  # fmt: skip
EXPECTED = {200, 400, 401, 403, 404, 405, 408, 413, 422, 429, 431}


class Clients:
    """Sends one request of a kind each time, and counts the statuses of the answers."""

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.random = port, random.Random(seed)
        self.statuses: collections.Counter[int | None] = collections.Counter()
        self.kinds: list[Callable[[], Awaitable[int | None]]] = [
            self.valid, self.wrong_field, self.wrong_field, self.not_json, self.not_http,
            self.too_large, self.wrong_key, self.leaves, self.reads_slowly,
        ]  # fmt: skip

    async def run(self, number: int) -> None:
        limit = asyncio.Semaphore(24)

        async def one(index: int) -> None:
            async with limit:
                kind = self.kinds[index % len(self.kinds)]
                try:
                    status = await asyncio.wait_for(kind(), PATIENCE_S)
                except (ConnectionError, asyncio.IncompleteReadError):
                    status = None  # the server may close on what is not HTTP
                assert status is None or status in EXPECTED, (kind.__name__, status)
                self.statuses[status] += 1

        async with asyncio.TaskGroup() as group:
            for index in range(number):
                group.create_task(one(index))

    def body(self) -> tuple[str, dict[str, Any]]:
        path = self.random.choice(list(BODIES))
        return path, dict(BODIES[path])

    async def valid(self) -> int | None:
        path, body = self.body()
        return await self.send(request(path, json.dumps(body).encode()))

    async def wrong_field(self) -> int | None:
        path, body = self.body()
        body[self.random.choice([*body, "unknown"])] = self.random.choice(WRONG)
        if self.random.random() < 0.2:
            body.pop(self.random.choice(list(body)))
        return await self.send(request(path, json.dumps(body).encode()))

    async def not_json(self) -> int | None:
        path, _ = self.body()
        status = await self.send(request(path, self.random.choice(NOT_JSON)))
        assert status == refused(path)
        return status

    async def not_http(self) -> int | None:
        return await self.send(self.random.choice(NOT_HTTP), end=True)

    async def too_large(self) -> int | None:
        status = await self.send(request("/tokenize", b'{"prompt": "' + b"x" * LARGEST + b'"}'))
        assert status in (413, None)  # the server may close before it has read all
        return status

    async def wrong_key(self) -> int | None:
        status = await self.send(request("/chat", b'{"prompt": "a"}', key="sesam"))
        assert status == 401
        return status

    async def leaves(self) -> int | None:
        """Closes after a part of the request, or of the answer."""
        stream = self.random.random() < 0.5
        body = {"prompt": "ab", "max_tokens": 200, "ignore_eos": True, "stream": stream, "n": 2}
        data = request("/v1/completions", json.dumps(body).encode())
        if self.random.random() < 0.3:
            data = data[: self.random.randrange(len(data))]
        async with self.connected() as (_, writer):
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(self.random.random() * 0.02)
            if self.random.random() < 0.5:
                writer.transport.abort()  # a reset, not an end
        return None

    async def reads_slowly(self) -> int | None:
        body = {"prompt": "ab", "max_tokens": 40, "stream": True, "ignore_eos": True, "logprobs": 5}
        async with self.connected() as (reader, writer):
            writer.write(request("/v1/completions", json.dumps(body).encode()))
            status = await read_status(reader)
            for _ in range(20):
                await asyncio.sleep(0.002)
                if not await reader.read(200):
                    break
        return status

    async def send(self, data: bytes, end: bool = False) -> int | None:
        async with self.connected() as (reader, writer):
            writer.write(data)
            if end:
                writer.write_eof()
            status = await read_status(reader)
            await reader.read()
            return status

    @contextlib.asynccontextmanager
    async def connected(self) -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def request(path: str, body: bytes, key: str = KEY) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def refused(path: str) -> int:
    """The status of a bad body: EasyLM's routes have FastAPI's."""
    return 400 if path.startswith("/v1/") or "tokenize" in path else 422


async def read_status(reader: asyncio.StreamReader) -> int | None:
    line = await reader.readline()
    return int(line.split()[1]) if line else None


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def is_idle(server: Running) -> bool:
    return not server.engine.active and not server.server.service.in_flight


def attacked(number: int, rounds: int, caplog: pytest.LogCaptureFixture) -> None:
    """`rounds` times `number` requests of every kind, many at once."""
    limits = LimitsConfig(
        requests=12,
        body_bytes=LARGEST,
        body_seconds=0.5,
        request_seconds=PATIENCE_S,
        send_seconds=2,
    )
    sizes = []
    with serving(BigramEngine(delay=0.0005), limits=limits, api_key=(KEY,)) as server:
        for seed in range(rounds):
            clients = Clients(server.port, seed)
            asyncio.run(clients.run(number))
            assert {200, 400, 401, 413} <= set(clients.statuses)
            eventually(lambda: is_idle(server))
            assert server.get("/health").status == 200
            assert all(server.engine.finished[reason] for reason in ("length", "cancelled"))
            sizes.append(resident_bytes())
        metrics = server.get("/metrics", Authorization=f"Bearer {KEY}").text
        assert 'status="500"' not in metrics
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    if rounds > 2:
        grown = sizes[-1] - sizes[1]  # after the first two: imports, caches
        assert grown < 16 * 2**20, [size >> 20 for size in sizes]


def test_hundreds_of_bad_requests_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    attacked(360, 1, caplog)


@pytest.mark.slow
def test_ten_thousand_bad_requests_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    attacked(1008, 10, caplog)


def test_three_hundred_streams_at_once_each_give_their_own_text(server: Running) -> None:
    async def text(seed: int) -> str:
        body = {"prompt": f"{seed}", "seed": seed, "max_tokens": 12, "stream": True}
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request("/v1/completions", json.dumps(body).encode()))
        lines = (await reader.read()).decode().splitlines()
        writer.close()
        events = [json.loads(line[6:]) for line in lines if line.startswith('data: {"id"')]
        assert "data: [DONE]" in lines
        return "".join(event["choices"][0]["text"] for event in events)

    async def together() -> list[str]:
        return await asyncio.gather(*map(text, range(300)))

    for seed, shown in enumerate(asyncio.run(together())):
        alone = server.engine._deltas(
            Request(tuple(f"{seed}".encode()), Sampling(seed=seed), max_new=12)
        )
        assert shown == "".join(delta.text for delta in alone)


def test_a_wrong_type_in_any_field_is_refused(server: Running) -> None:
    """None means that the field is left out, so it may be right."""
    for path, body in BODIES.items():
        for field in body:
            if field in ("user", "metadata"):
                continue  # anything goes
            answer = server.post(path, **{**body, field: {"not": ["the", "type"]}})
            loose = field in ("chat_template_kwargs", "response_format")
            assert answer.status == refused(path) or loose, (path, field, answer.text)
            assert answer.status != 500

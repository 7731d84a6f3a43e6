"""The real engine behind the server: streams at once equal requests alone, scores equal direct ones."""

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterator

import pytest
from tests.serving.models import BASE
from tests.serving.server.serving import Running, config

from meshwright.serving import Engine, EngineConfig, Model, generation_mesh
from meshwright.serving.server import HttpServer, Service

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def real(random_model: Callable[..., Model]) -> Iterator[Running]:
    model = random_model(dataclasses.replace(BASE, vocab=320), generation_mesh())
    settings = EngineConfig(
        max_length=256, page_size=8, chunk=64, chunk_shapes=((4, 16), (1, 64)),
        batch_buckets=(1, 32),
    )  # fmt: skip
    with (
        Engine(model, settings) as engine,
        HttpServer(Service(engine, model.source, config(access_log=False), None)) as server,
    ):
        yield Running(server, engine)
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
        assert stats.compilations_after_ready == 0


def body(seed: int, **settings: object) -> dict[str, object]:
    size = 1 + seed * 7 % 60
    prompt = [(seed * 31 + i) % 256 for i in range(size)]
    return {
        "prompt": prompt,
        "seed": seed,
        "max_tokens": 4 + seed % 12,
        "ignore_eos": True,
        **settings,
    }


def test_three_hundred_streams_equal_requests_alone(real: Running) -> None:
    async def streamed(seed: int) -> str:
        data = json.dumps(body(seed, stream=True)).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", real.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
        writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + data)
        lines = (await reader.read()).decode().splitlines()
        writer.close()
        assert "data: [DONE]" in lines
        events = [json.loads(line[6:]) for line in lines if line.startswith('data: {"id"')]
        return "".join(event["choices"][0]["text"] for event in events)

    async def together() -> list[str]:
        return await asyncio.gather(*map(streamed, range(300)))

    for seed, text in enumerate(asyncio.run(together())):
        (alone,) = real.post("/v1/completions", **body(seed)).data["choices"]
        assert text == alone["text"], seed


def test_scores_of_two_routes_are_equal(real: Running) -> None:
    text = "The old man and the sea"
    (choice,) = real.post(
        "/v1/completions", prompt=text, echo=True, logprobs=1, max_tokens=1, temperature=0
    ).data["choices"]
    scores = choice["logprobs"]["token_logprobs"]
    assert len(scores) == len(text) + 1
    data = real.post("/loglikelihood", prefix_text=[text[:7]], text=[text[7:]]).data
    assert data["log_likelihood"] == pytest.approx([sum(scores[7:-1])], abs=1e-4)


def test_clients_that_leave_leave_nothing(real: Running) -> None:
    async def leave(seed: int) -> None:
        data = json.dumps(body(seed, max_tokens=150, n=2, stream=bool(seed % 2))).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", real.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
        writer.write(f"{head}\r\n\r\n".encode() + data)
        await asyncio.sleep(0.05 * (seed % 5))
        writer.transport.abort()

    async def all_leave() -> None:
        await asyncio.gather(*map(leave, range(30)))

    asyncio.run(all_leave())
    assert real.post("/v1/completions", **body(1)).status == 200  # after those before it

"""OpenAI's own client, unmodified."""

import asyncio
import json
from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionToolParam
from tests.serving.server.bigram_engine import TABLE, TOKENIZER, BigramEngine, greedy
from tests.serving.server.serving import Running, serving

HI = {"role": "user", "content": "Hi"}
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as made:
        yield made


def test_models_and_completions(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["bigram"]
    done = client.completions.create(
        model="bigram", prompt="The old", max_tokens=6, temperature=0, logprobs=2
    )
    tokens = greedy(list(b"The old"), 6)
    assert done.choices[0].text == TOKENIZER.decode(tokens)
    assert done.usage is not None
    assert done.usage.total_tokens == 13
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == pytest.approx(
        [TABLE[pair] for pair in zip([ord("d"), *tokens], tokens, strict=False)]
    )


def test_a_stream_gives_the_same_text_and_the_usage(client: openai.OpenAI) -> None:
    once = client.chat.completions.create(model="bigram", messages=[HI], seed=4, max_tokens=9)
    text, usage = "", None
    for chunk in client.chat.completions.create(
        model="bigram", messages=[HI], seed=4, max_tokens=9, stream=True,
        stream_options={"include_usage": True},
    ):  # fmt: skip
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == once.choices[0].message.content
    assert usage == once.usage


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model="bigram", messages=[HI], temperature=0, max_tokens=3, logprobs=True, top_logprobs=4
    )
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    last = ord("\n")
    for entry, token in zip(logprobs.content, greedy([last], 3), strict=True):
        assert entry.logprob == pytest.approx(TABLE[last, token])
        assert entry.token == entry.top_logprobs[0].token == chr(token)
        assert [top.logprob for top in entry.top_logprobs] == sorted(TABLE[last])[:-5:-1]
        last = token


def test_the_async_client_runs_many_at_once(server: Running) -> None:
    async def texts() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:

            async def one(seed: int) -> str:
                stream = await client.completions.create(
                    model="bigram", prompt="ab", seed=seed, max_tokens=20, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(seed) for seed in range(30)))

    together = asyncio.run(texts())
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        for seed, text in enumerate(together[:5]):
            alone = client.completions.create(model="bigram", prompt="ab", seed=seed, max_tokens=20)
            assert alone.choices[0].text == text


def test_tools_are_called_and_streamed() -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
    with (
        serving(BigramEngine(answer=lambda _: f"Wait. {call}{call}")) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client,
    ):
        done = client.chat.completions.create(model="bigram", messages=[HI], tools=[WEATHER])
        message = done.choices[0].message
        assert message.content == "Wait."
        assert message.tool_calls is not None
        assert done.choices[0].finish_reason == "tool_calls"
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
        client.chat.completions.create(
            model="bigram",
            messages=[HI, message.model_dump(exclude_none=True), result],
            tools=[WEATHER],
        )
        with client.chat.completions.stream(
            model="bigram", messages=[HI], tools=[WEATHER]
        ) as stream:
            final = stream.get_final_completion().choices[0].message
        assert final.content == "Wait."
        assert final.tool_calls is not None
        assert [json.loads(each.function.arguments) for each in final.tool_calls] == [
            {"city": "Ulm"}
        ] * 2


def test_errors_are_the_clients_own(client: openai.OpenAI, server: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="'bigram'"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="max_tokens=511 would fit") as error:
        client.completions.create(model="bigram", prompt="a", max_tokens=10_000)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "max_tokens")
    with (
        serving(api_key=("right",)) as locked,
        openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong") as stranger,
    ):
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        assert stranger.with_options(api_key="right").models.list().data
    with (
        serving(BigramEngine(fails="broken")) as broken,
        openai.OpenAI(base_url=f"{broken.url}/v1", api_key="x", max_retries=0) as unlucky,
    ):
        with pytest.raises(openai.InternalServerError, match="broken"):
            unlucky.completions.create(model="bigram", prompt="a")
        with pytest.raises(openai.APIError, match="broken"):
            list(unlucky.completions.create(model="bigram", prompt="a", stream=True))

"""response_format and forced tool calls, with the real engine and OpenAI's client."""

import dataclasses
import enum
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
from tests.serving.models import BASE
from tests.serving.server.serving import QWEN, Running, config
from tests.serving.test_grammars import CONFIG, SCHEMAS

from meshwright.data import ChatTemplate
from meshwright.serving import Engine, Grammar, Model, generation_mesh
from meshwright.serving.server import HttpServer, Service
from meshwright.serving.server.formats import after_reasoning

HI = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", "Zürich"]}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
# random weights would go on with the white space that JSON allows anywhere
TERSE = {str(ord(mark)): -100 for mark in " \t\r\n"}


class Color(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Car(pydantic.BaseModel):
    color: Color
    doors: int
    owners: list[Color]


@pytest.fixture(scope="module")
def engine(random_model: Callable[..., Model]) -> Iterator[Engine]:
    small = dataclasses.replace(BASE, vocab=300, layers=1, heads=2, kv_heads=1, max_seq=1024)
    model = random_model(small, generation_mesh())
    with Engine(model, dataclasses.replace(CONFIG, max_length=800, max_batch=8)) as engine:
        yield engine
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
        assert stats.compilations_after_ready == 0


def serving(engine: Engine, template: str) -> HttpServer:
    settings, chat = config(access_log=False), ChatTemplate(template)
    return HttpServer(Service(engine, engine.source, settings, chat))


@pytest.fixture(scope="module")
def real(engine: Engine) -> Iterator[Running]:
    with serving(engine, QWEN.replace("</think>", "")) as server:
        yield Running(server, engine)


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    named = {"name": "answer", "schema": schema, "strict": True}
    return {"type": "json_schema", "json_schema": named}


def test_openai_parses_what_it_asked_for(real: Running) -> None:
    usual = {"model": "bigram", "messages": HI}
    usual["logit_bias"] = TERSE | {str(ord(",")): 20, str(ord("]")): 40}  # end numbers and lists
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
        parsed = client.chat.completions.parse(
            **usual, response_format=Car, temperature=0.7, seed=3, n=2, max_tokens=400
        )
        tool = openai.pydantic_function_tool(Car)
        called = client.chat.completions.parse(
            **usual, tools=[tool], tool_choice="required", seed=2, parallel_tool_calls=False
        )
    assert {choice.finish_reason for choice in parsed.choices} == {"stop"}
    assert all(isinstance(choice.message.parsed, Car) for choice in parsed.choices)
    (choice,) = called.choices
    assert choice.finish_reason == "tool_calls"
    assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Car)


def test_streams_choices_logprobs_and_lengths(real: Running) -> None:
    schema = SCHEMAS["unicode"]
    body = {
        "messages": HI, "response_format": schema_format(schema), "seed": 5, "n": 3,
        "logprobs": True, "top_logprobs": 2, "max_tokens": 300,
        "logit_bias": TERSE,
    }  # fmt: skip
    choices = real.post(CHAT, **body).data["choices"]
    texts = ["", "", ""]
    for event in real.post(CHAT, stream=True, **body).events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [choice["message"]["content"] for choice in choices]
    for choice in choices:
        assert choice["finish_reason"] == "stop"
        assert len(choice["logprobs"]["content"]) > 10
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    (cut,) = real.post(CHAT, **(body | {"n": 1, "max_tokens": 7})).data["choices"]
    assert cut["finish_reason"] == "length"
    assert texts[0].startswith(cut["message"]["content"].rstrip("�"))


def test_completions_take_formats_too(real: Running) -> None:
    def text(**settings: Any) -> str:
        (choice,) = real.post(
            "/v1/completions", prompt="x", max_tokens=400, seed=3, **settings
        ).data["choices"]
        assert choice["finish_reason"] == "stop"
        return choice["text"]

    closing = {str(ord(mark)): 50 for mark in '}"'}  # random weights would nest for long
    anything = text(response_format={"type": "json_object"}, logit_bias=closing)
    assert isinstance(json.loads(anything), dict)
    assert text(structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    assert len(text(structured_outputs={"regex": "[ab]{5}"})) == 5
    assert json.loads(text(structured_outputs={"json": {"enum": [[1]]}})) == [1]


def test_twenty_at_once_with_free_ones(real: Running) -> None:
    schemas = (list(SCHEMAS.values()) * 4)[:20]

    def free(seed: int) -> str:
        body = {"prompt": "abc", "seed": seed, "max_tokens": 30, "ignore_eos": True}
        return real.post("/v1/completions", **body).data["choices"][0]["text"]

    def strict(index: int) -> None:
        schema = schemas[index]
        answer = real.post(
            CHAT, messages=HI, response_format=schema_format(schema), seed=index, max_tokens=200,
            temperature=index % 3 / 2, logit_bias=TERSE,
        )  # fmt: skip
        (choice,) = answer.data["choices"]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), schema)

    alone = [free(seed) for seed in range(20)]
    with ThreadPoolExecutor(40) as pool:
        checks = [pool.submit(strict, index) for index in range(20)]
        assert list(pool.map(free, range(20))) == alone
        for check in checks:
            check.result()


@pytest.mark.parametrize("form", ["hermes", "llama"])
def test_forced_calls(engine: Engine, form: str) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    template = QWEN.replace("</think>", "")
    if form == "llama":
        template = '{{ messages | tojson }}{{ tools | tojson }} "parameters"'
    with serving(engine, template) as server:
        running = Running(server, engine)
        for seed in range(4):
            answer = running.post(
                CHAT, messages=HI, tools=[CLOCK, WEATHER], tool_choice=named, seed=seed,
                max_tokens=200, stream=False, logit_bias=TERSE,
            )  # fmt: skip
            (choice,) = answer.data["choices"]
            assert choice["finish_reason"] == "tool_calls"
            (call,) = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "weather"
            jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)


def test_an_answer_or_a_call(real: Running) -> None:
    answers = [
        real.post(
            CHAT, messages=HI, tools=[WEATHER], response_format=schema_format({"enum": ["<ok>"]}),
            seed=seed, max_tokens=200, logit_bias=TERSE,
        ).data["choices"][0]["message"]
        for seed in range(6)
    ]  # fmt: skip
    assert all(m["content"] == '"<ok>"' or m.get("tool_calls") for m in answers)


def test_reasoning_comes_before_the_answer(engine: Engine) -> None:
    template = "{{ messages[-1].content }}{% if think %}<think>{% endif %}{# </think> #}"
    bias = {str(ord("<")): 100}
    with serving(engine, template) as server:
        running = Running(server, engine)
        body = {
            "messages": HI, "response_format": schema_format({"const": 5}), "seed": 1,
            "max_tokens": 100, "logit_bias": bias, "temperature": 0,
        }  # fmt: skip
        (choice,) = running.post(CHAT, **body).data["choices"]
        assert choice["message"]["reasoning_content"]  # "<" began the reasoning
        (choice,) = running.post(CHAT, chat_template_kwargs={"think": True}, **body).data["choices"]
        assert choice["message"]["reasoning_content"].startswith("<")
        closed = [{"role": "user", "content": "<think></think>"}]
        (choice,) = running.post(CHAT, **(body | {"messages": closed})).data["choices"]
        assert choice["message"]["content"] == "5"


def test_reasoning_ends_where_its_mark_is(engine: Engine) -> None:
    grammars = engine.source.grammars
    grammar = after_reasoning(Grammar.json({"const": 5}), "Hi<think>", grammars)
    constraint = grammars.start(grammar)
    assert constraint.matcher.try_consume_tokens(list(b"hm <b> </think>\n\n5")) == 18
    assert constraint.matcher.is_accepting()
    other = grammars.start(grammar)
    assert other.matcher.try_consume_tokens(list(b"hm </think>6")) == 11


def test_fields_of_vllm_hold_for_what_is_generated(real: Running) -> None:
    chat = {"messages": HI, "seed": 4, "max_tokens": 30}
    for stream in (False, True):
        answer = real.post(CHAT, **chat, n=2, guided_choice=["left", "right"], stream=stream)
        texts = ["", ""]
        for event in answer.events[:-1] if stream else [answer.data]:
            for choice in event["choices"]:
                message = choice["delta"] if stream else choice["message"]
                texts[choice["index"]] += message.get("content") or ""
        assert set(texts) <= {"left", "right"}
    free = {"prompt": "ab", "seed": 3, "max_tokens": 12, "allowed_token_ids": [97, 98, 99]}
    (choice,) = real.post("/v1/completions", **free, bad_words=["ca", "bb"]).data["choices"]
    assert set(choice["text"]) <= set("abc")
    assert len(choice["text"]) == 12
    assert "ca" not in choice["text"]
    assert "bb" not in choice["text"]
    stop = {"stop": [choice["text"][2]], "bad_words": ["ca", "bb"]}
    for least, include in ((0, False), (5, True)):
        more = stop | {"min_tokens": least, "include_stop_str_in_output": include}
        (cut,) = real.post("/v1/completions", **free | more).data["choices"]
        at = choice["text"].find(stop["stop"][0], least)
        assert cut["text"] == choice["text"][: at + include if at >= 0 else None]
    nothing = real.post("/v1/completions", **free, bad_words=["a", "b", "c"])
    assert (nothing.status, "excludes every token" in nothing.message) == (400, True)

"""Vocabularies in which `<think>`, `<tool_call>` and the like are tokens of their own."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tests.serving.server.bigram_engine import BigramEngine
from tests.serving.server.serving import QWEN, config, serving, source

from meshwright.data import ChatTemplate
from meshwright.data.tokenizers import HuggingFaceTokenizer, byte_characters
from meshwright.serving import Completion, Delta, Grammar, Grammars, LanguageModel, Request
from meshwright.serving.harmony import HarmonyParser
from meshwright.serving.output import tool_format
from meshwright.serving.server import Service
from meshwright.serving.server.bodies import ChatBody
from meshwright.serving.server.formats import _chat_grammar

HI = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
FIVE = {"type": "json_schema", "json_schema": {"name": "five", "schema": {"const": 5}}}
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
HARMONY_MARKS = tuple(
    f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "return", "call")
)
# the end of gpt-oss's: what is said last ends with <|return|>
HARMONY = """{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final\
<|message|>{{ m.content }}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}\
{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}\
{% if tools %}{{ tools | tojson }}{# <|call|> #}{% endif %}\
{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}'
THOUGHT = "<|channel|>analysis<|message|>A greeting.<|end|><|start|>assistant"


@functools.cache
def tokenizer(marks: tuple[str, ...] = MARKS, special: bool = False) -> HuggingFaceTokenizer:
    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    added = [tokenizers.AddedToken(m, special=special, normalized=False) for m in marks]
    (inner.add_special_tokens if special else inner.add_tokens)(added)
    inner.add_special_tokens(["<|im_end|>", "<|endoftext|>"])
    end = "<|return|>" if "<|return|>" in marks else "<|endoftext|>"
    return HuggingFaceTokenizer(json.loads(inner.to_str()), end)


def service(template: str, own: HuggingFaceTokenizer) -> Service:
    return Service(None, source(own), config(), ChatTemplate(template))


def refused(grammars: Grammars, grammar: Grammar, text: str, end: str) -> str:
    """The first token that is not allowed, or nothing."""
    constraint, own = grammars.start(grammar), grammars._tokenizer
    for token in own.encode(text + end).tolist():
        [mask] = grammars.masks(1, [(0, constraint)])
        assert constraint.failed is None
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if token not in allowed:
            return own.token_text(token)
        constraint.unread = np.array([token]), 0
    return ""


def grammar_of(service: Service, prompt: str = "Hi", **body: Any) -> Grammar:
    tools = tool_format(service.template)
    return _chat_grammar(service, ChatBody(messages=HI, **body), prompt, tools)  # type: ignore[return-value]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("prompt", "body", "texts", "wrong"),
    [
        ("Hi", {"response_format": FIVE}, ["5", "<think>so\n</think>\n\n5", "<think></think>5"], "6"),
        ("<think>", {"response_format": FIVE}, ["so</think>5", "</think>\n5"], "<|endoftext|>"),
        (
            "Hi",
            {"tools": [WEATHER], "tool_choice": "required"},
            ['<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
             '<think>so</think><tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n'
             "</tool_call>"],
            "a",
        ),
        (
            "Hi",
            {"tools": [WEATHER], "response_format": FIVE},
            ["5", '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'],
            "</tool_call>",
        ),
    ],
)  # fmt: skip
def test_formats_take_the_tokens_of_marks(
    special: bool, prompt: str, body: Any, texts: list[str], wrong: str
) -> None:
    own = service(QWEN, tokenizer(MARKS, special))
    grammars, grammar = own.source.grammars, grammar_of(own, prompt, **body)
    for text in texts:
        # by the document's end, and by what the template writes after an answer
        for end in ("<|endoftext|>", "<|im_end|>"):
            assert refused(grammars, grammar, text, end) == ""
    assert refused(grammars, grammar, wrong, "") == wrong


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"response_format": FIVE}, "<|channel|>final<|message|>5"),
        ({"tools": [WEATHER], "tool_choice": "required"}, CALL),
        ({"tools": [WEATHER], "response_format": FIVE}, CALL),
    ],
)
def test_formats_are_of_the_final_channel(body: Any, text: str) -> None:
    own = service(HARMONY, tokenizer(HARMONY_MARKS, True))
    grammars, grammar = own.source.grammars, grammar_of(own, **body)
    for before in ("", THOUGHT):
        for end in ("<|return|>", "<|call|>"):
            assert refused(grammars, grammar, before + text, end) == ""
    assert refused(grammars, grammar, "5", "") == "5"
    begun = grammar_of(own, "<|start|>assistant<|channel|>final<|message|>", response_format=FIVE)
    assert refused(grammars, begun, "5", "<|return|>") == ""


class Says(BigramEngine):
    """Generates the tokens of a text."""

    text = ""

    def _tokens(self, request: Request) -> tuple[list[int], bool]:
        return self.tokenizer.encode(self.text).tolist()[: request.max_new], True


def says(text: str, own: HuggingFaceTokenizer) -> BigramEngine:
    engine = Says(tokenizer=own, max_length=2000)
    engine.text = text
    return engine


@pytest.mark.parametrize("special", [False, True])
def test_marks_that_are_special_tokens_are_seen(special: bool) -> None:
    text = '<think>so</think>\n<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    with serving(says(text, tokenizer(MARKS, special))) as server:
        (choice,) = server.post(CHAT, messages=HI, tools=[WEATHER]).data["choices"]
    assert choice["message"]["reasoning_content"] == "so"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{THOUGHT}<|channel|>final<|message|>Hello!", ("Hello!", "A greeting.", None)),
        ("<|channel|>final<|message|>Hello!", ("Hello!", None, None)),
        (f"{THOUGHT}{CALL}", (None, "A greeting.", '{"city": "Rome"}')),
        (f" to=functions.weather{CALL.replace(' to=functions.weather', '')}",
         (None, None, '{"city": "Rome"}')),
        ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALL,
         ("I look.", None, '{"city": "Rome"}')),
        ("Hello", ("Hello", None, None)),
        ("<|channel|>analysis<|message|>A gree", ("", "A gree", None)),
        ("<|channel|>ana", ("", None, None)),
    ],
)  # fmt: skip
def test_channels_are_content_reasoning_and_calls(text: str, expected: Any) -> None:
    with serving(says(text, tokenizer(HARMONY_MARKS, True)), HARMONY) as server:
        answer = server.post(CHAT, messages=HI, tools=[WEATHER], max_tokens=500)
        events = server.post(CHAT, messages=HI, tools=[WEATHER], max_tokens=500, stream=True).events
    (choice,) = answer.data["choices"]
    message = choice["message"]
    calls = message.get("tool_calls")
    found = calls[0]["function"]["arguments"] if calls else None
    assert (message["content"], message.get("reasoning_content"), found) == expected
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    deltas = [choice["delta"] for event in events[:-1] for choice in event["choices"]]
    assert "".join(each.get("content") or "" for each in deltas) == (expected[0] or "")
    assert "".join(each.get("reasoning_content") or "" for each in deltas) == (expected[1] or "")


def test_a_message_that_is_begun_is_continued() -> None:
    parser = HarmonyParser("<|start|>assistant<|channel|>analysis<|message|>A gre")
    pieces = [*parser.feed("eting.<|end|><|start|>assistant<|channel|>final<|message|>Hi")]
    assert [piece.text for piece in (*pieces, *parser.end())] == ["eting.", "Hi"]  # type: ignore[union-attr]


def test_the_answer_of_a_model_with_channels_is_its_final_one(tmp_path: Path) -> None:
    class Answers:
        """An engine that generates one text."""

        max_length = 2000

        def generate(self, requests: list[Request]) -> list[Completion]:
            [request] = requests
            assert request.special_tokens
            assert request.stop_tokens == frozenset(own.encode("<|return|><|call|>").tolist())
            return [Completion((), text, "stop")]

        def submit(self, requests: list[Request], sink: Any) -> None:
            for place in range(0, len(text), 7):
                sink(0, Delta((), text[place : place + 7]))
            sink(0, Delta(finish_reason="stop"))

    own, text = tokenizer(HARMONY_MARKS, True), f"{THOUGHT}<|channel|>final<|message|>Hello!"
    (tmp_path / "template").write_text(HARMONY)
    model = LanguageModel(source(own), Answers(), tmp_path, tmp_path / "template")  # type: ignore[arg-type]
    assert model.chat("Hi").text == "Hello!"
    assert "".join(model.stream_chat("Hi")) == "Hello!"

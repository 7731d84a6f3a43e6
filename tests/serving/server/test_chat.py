"""/v1/chat/completions: prompts by the chat template, tool calls, reasoning."""

import json
from typing import Any

import pytest
from tests.serving.server.bigram_engine import BigramEngine
from tests.serving.server.serving import QWEN, Running, serving

from meshwright.data import ChatTemplate
from meshwright.serving.output import (
    Content,
    OutputParser,
    Reasoning,
    ToolCall,
    ToolFormat,
    tool_format,
)

HI = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
LLAMA = '{% if tools %}{"name": …, "parameters": …}{% endif %}{{ messages[0].content }}'


def prompt_of(server: Running) -> str:
    return bytes(server.engine.seen[-1].prompt).decode()


def test_the_chat_template_makes_the_prompt(server: Running) -> None:
    answer = server.post(
        CHAT,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}],
            },
        ],
        max_tokens=5,
        temperature=0,
    )
    assert prompt_of(server) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    (choice,) = answer.data["choices"]
    assert choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"]) == 5
    assert answer.data["usage"]["completion_tokens"] == 5
    assert answer.data["object"] == "chat.completion"


def test_without_a_limit_the_model_may_use_all_its_length(server: Running) -> None:
    server.post(CHAT, messages=HI)
    request = server.engine.seen[-1]
    assert len(request.prompt) + request.max_new == server.engine.max_length


def test_a_message_can_be_continued(server: Running) -> None:
    server.post(
        CHAT, messages=[*HI, {"role": "assistant", "content": "Once upon"}], max_tokens=1,
        add_generation_prompt=False, continue_final_message=True,
    )  # fmt: skip
    assert prompt_of(server).endswith("<|im_start|>assistant\nOnce upon")


@pytest.mark.parametrize("content", ["end", "i", "|>", "<|im_end|>", "assistant", "\n", " ", ""])
def test_a_continued_message_may_be_part_of_the_template(server: Running, content: str) -> None:
    parts = [{"type": "text", "text": content[:1]}, {"type": "text", "text": content[1:]}]
    for form in (content, parts):
        answer = server.post(
            CHAT, messages=[*HI, {"role": "assistant", "content": form}], max_tokens=1,
            add_generation_prompt=False, continue_final_message=True,
        )  # fmt: skip
        assert answer.status == 200
        assert prompt_of(server).endswith(f"<|im_end|>\n<|im_start|>assistant\n{content}")


def test_a_model_without_a_template_continues_the_text() -> None:
    with serving(template=None) as server:
        server.post(CHAT, messages=HI, max_tokens=1)
        assert prompt_of(server) == "Hi"
        answer = server.post(CHAT, messages=HI, tools=[WEATHER])
        assert (answer.status, answer.data["error"]["param"]) == (400, "tools")


def test_a_model_without_a_template_does_not_answer_with_nothing() -> None:
    with serving(template=None) as server:
        server.post(CHAT, messages=HI, max_tokens=4)
        assert server.engine.seen[-1].min_new == 1
        server.post(CHAT, messages=HI, max_tokens=4, min_tokens=0)
        assert server.engine.seen[-1].min_new == 0


def test_without_a_template_that_reasons_nothing_is_reasoning() -> None:
    messages = [{"role": "user", "content": "what is <think>"}]
    with serving(BigramEngine(answer=lambda _: "a tag"), template=None) as server:
        (choice,) = server.post(CHAT, messages=messages).data["choices"]
        assert (choice["message"]["content"], "reasoning_content" in choice["message"]) == (
            "a tag", False,
        )  # fmt: skip


def streamed(server: Running, **body: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The chunks, and the message that a client puts together from them."""
    *chunks, done = server.post(CHAT, stream=True, **body).events
    assert done == "[DONE]"
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            message["tool_calls"] += delta.get("tool_calls", [])
    return chunks, message


def test_the_stream_has_the_role_first_and_the_reason_last(server: Running) -> None:
    once = server.post(CHAT, messages=HI, seed=1, max_tokens=8, logprobs=True, top_logprobs=2)
    chunks, message = streamed(
        server, messages=HI, seed=1, max_tokens=8, logprobs=True, top_logprobs=2,
        stream_options={"include_usage": True},
    )  # fmt: skip
    (choice,) = once.data["choices"]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], once.data["usage"])
    assert message["content"] == choice["message"]["content"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1]]
    merged = [entry for part in parts if part for entry in part["content"]]
    assert merged == choice["logprobs"]["content"]
    assert len(merged[0]["top_logprobs"]) == 2
    assert bytes(merged[0]["bytes"]).decode() == merged[0]["token"]
    chunks, _ = streamed(
        server, messages=HI, seed=1, max_tokens=8,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )  # fmt: skip
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, once.data["usage"]["completion_tokens"])


def test_parts_of_a_character_have_their_bytes() -> None:
    with serving(BigramEngine(answer=lambda _: "né")) as server:
        (choice,) = server.post(CHAT, messages=HI, logprobs=True).data["choices"]
        content = choice["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in content) == "né".encode()


def test_tool_calls_are_parsed_at_once_and_streamed() -> None:
    def answer(prompt: str) -> str:
        return f"Let me see.\n{CALL}\n{CALL}" if "weather" in prompt else "No tools."

    with serving(BigramEngine(answer=answer)) as server:
        (choice,) = server.post(CHAT, messages=HI, tools=[WEATHER]).data["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me see."
        calls = choice["message"]["tool_calls"]
        assert [call["function"]["name"] for call in calls] == ["weather"] * 2
        assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Köln"}
        assert len({call["id"] for call in calls}) == 2

        chunks, message = streamed(server, messages=HI, tools=[WEATHER])
        assert message["content"] == "Let me see."
        assert [call["index"] for call in message["tool_calls"]] == [0, 1]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        _, message = streamed(server, messages=HI, tools=[WEATHER], parallel_tool_calls=False)
        assert len(message["tool_calls"]) == 1

        # the result goes back into the prompt, with arguments as an object
        result = [{"role": "tool", "tool_call_id": "x", "content": "rain"}]
        server.post(CHAT, messages=[*HI, choice["message"], *result], tools=[WEATHER])
        assert '"arguments": {"city": "Köln"}}' in prompt_of(server)
        (choice,) = server.post(CHAT, messages=HI, tools=[WEATHER], tool_choice="none").data[
            "choices"
        ]
        assert choice["message"]["content"] == "No tools."


def test_llama_calls_are_whole_messages() -> None:
    text = '{"name": "weather", "parameters": {"city": "Ulm"}}'
    with serving(BigramEngine(answer=lambda _: text), LLAMA) as server:
        (choice,) = server.post(CHAT, messages=HI, tools=[WEATHER]).data["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Ulm"}'
        assert choice["message"]["content"] is None
        _, message = streamed(server, messages=HI, tools=[WEATHER])
        assert len(message["tool_calls"]) == 1
        (choice,) = server.post(CHAT, messages=HI).data["choices"]
        assert choice["message"]["content"] == text


def test_reasoning_is_apart() -> None:
    with serving(BigramEngine(answer=lambda _: "<think>\nHm.\n</think>\n\nYes.")) as server:
        (choice,) = server.post(CHAT, messages=HI).data["choices"]
        assert choice["message"]["content"] == "Yes."
        assert choice["message"]["reasoning_content"] == "\nHm.\n"
        _, message = streamed(server, messages=HI)
        assert (message["content"], message["reasoning_content"]) == ("Yes.", "\nHm.\n")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "messages"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "king", "content": "x"}]}, "role is 'king'"),
        ({"messages": [{"role": "user"}]}, "content must be a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url'"),
        ({"messages": [{"role": "user", "content": [7]}]}, "part of type None"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "function with a name"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "no JSON"),
        ({"messages": HI, "tools": [{}]}, "tools[0]"),
        ({"messages": HI, "tool_choice": "required"}, "no tools to call"),
        ({"messages": HI, "tools": [WEATHER], "tool_choice": "maybe"}, "must be 'none', 'auto', 'required'"),
        ({"messages": HI, "tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "the name 'f'"),
        ({"messages": HI, "top_logprobs": 2}, "needs logprobs=true"),
        ({"messages": HI, "max_tokens": 0}, "1 or more"),
        ({"messages": HI, "functions": []}, "functions is not supported by this server; leave it out: send tools instead"),
        ({"messages": HI, "continue_final_message": True}, "continue_final_message needs"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], "add_generation_prompt": False, "continue_final_message": True}, "which come after the content"),
        ({"messages": HI, "response_format": {"type": "json_schema", "json_schema": {}}}, "json_schema.schema must be"),
        ({"messages": HI, "response_format": {"type": "json"}}, "response_format.type is 'json'"),
        ({"messages": HI, "modalities": ["audio"]}, "text only"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(server: Running, body: dict[str, Any], message: str) -> None:
    answer = server.post(CHAT, **body)
    assert (answer.status, message in answer.message) == (400, True), answer.text


def test_a_chat_that_is_too_long_names_its_messages(server: Running) -> None:
    long = [{"role": "user", "content": "a" * 600}]
    error = server.post(CHAT, messages=long).data["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def parsed(text: str, tools: ToolFormat, sizes: int) -> list[tuple[str, str]]:
    """(kind, text) of the pieces, neighbours of a kind joined, fed some characters at a time."""
    parser, out = OutputParser(tools, reasoning=True), []
    parts = [text[i : i + sizes] for i in range(0, len(text), sizes)]
    pieces = [piece for part in parts for piece in parser.feed(part)]
    for piece in [*pieces, *parser.end()]:
        kind = type(piece).__name__
        value = piece.arguments if isinstance(piece, ToolCall) else piece.text
        if out and out[-1][0] == kind and isinstance(piece, Content | Reasoning):
            value = out.pop()[1] + value
        out.append((kind, value))
    return out


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("tools", "text", "pieces"),
    [
        ("none", "a <think> b", [("Content", "a "), ("Reasoning", " b")]),
        ("none", f"x {CALL}", [("Content", f"x {CALL}")]),
        ("hermes", "1 < 2 <tool> </x", [("Content", "1 < 2 <tool> </x")]),
        ("hermes", f" {CALL}\n", [("ToolCall", '{"city": "Köln"}')]),
        ("hermes", f"a\n\n b {CALL} c", [("Content", "a\n\n b"), ("ToolCall", '{"city": "Köln"}'), ("Content", " c")]),
        ("hermes", "<tool_call>{]</tool_call>!", [("Content", "<tool_call>{]</tool_call>!")]),
        ("hermes", '<tool_call>{"name": "f"}', [("ToolCall", "{}")]),
        ("hermes", "<tool_call>{", [("Content", "<tool_call>{")]),
        ("hermes", "<think>x</think>\n", [("Reasoning", "x")]),
        ("hermes", "trailing \n", [("Content", "trailing \n")]),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g"}', [("ToolCall", '{"a": 1}'), ("ToolCall", "{}")]),
        ("llama", '{"name": "Ann", "age": 5}', [("Content", '{"name": "Ann", "age": 5}')]),
        ("llama", '{"name": 3}', [("Content", '{"name": 3}')]),
        ("llama", "{not JSON", [("Content", "{not JSON")]),
        ("llama", "plain", [("Content", "plain")]),
        ("llama", "<|", [("Content", "<|")]),
    ],
)  # fmt: skip
def test_pieces_do_not_depend_on_how_the_text_arrives(
    tools: ToolFormat, text: str, pieces: list[tuple[str, str]], size: int
) -> None:
    assert parsed(text, tools, size) == pieces


def test_the_template_tells_the_format_of_tool_calls() -> None:
    assert tool_format(ChatTemplate(QWEN)) == "hermes"
    assert tool_format(ChatTemplate(LLAMA)) == "llama"
    assert tool_format(ChatTemplate("{{ messages }}")) == "none"
    assert tool_format(None) == "none"

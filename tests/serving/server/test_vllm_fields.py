"""Fields that vLLM adds to OpenAI's bodies: what they ask of the engine, and what is refused."""

import itertools
import json
from typing import Any, get_type_hints

import pytest
import tokenizers
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from tests.serving.server.bigram_engine import END, TABLE, BigramEngine, greedy
from tests.serving.server.serving import Running, serving

from meshwright.data.tokenizers import HuggingFaceTokenizer
from meshwright.serving.request import Request

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "The old", "max_tokens": 6},
    CHAT: {"messages": [{"role": "user", "content": "The old"}], "max_tokens": 6},
}


def asked(server: Running, path: str, **fields: Any) -> list[Request]:
    """The requests that a body becomes, at once and in a stream, which are the same."""
    seen = []
    for stream in (False, True):
        answer = server.post(path, **BODIES[path] | fields, seed=1, stream=stream)
        assert answer.status == 200, answer.text
        seen.append(server.engine.seen[-fields.get("n", 1) :])
    whole, streamed = seen
    for left, right in zip(whole, streamed, strict=True):
        assert {**vars(left), "id": ""} == {**vars(right), "id": ""}
    return whole


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("n", [1, 3])
def test_fields_reach_every_request_of_a_body(server: Running, path: str, n: int) -> None:
    fields = {
        "min_tokens": 4, "include_stop_str_in_output": True, "skip_special_tokens": False,
        "allowed_token_ids": [65, 66, 66], "cache_salt": "sesame", "bad_words": ["ab", " c"],
    }  # fmt: skip
    requests = asked(server, path, n=n, **fields)
    assert len(requests) == n
    for request in requests:
        assert (request.min_new, request.include_stop, request.special_tokens) == (4, True, True)
        assert (request.allowed, request.cache_salt) == (frozenset({65, 66}), "sesame")
        # a space before a word is a token of its own here
        assert request.banned == (tuple(b"ab"), tuple(b"c"))
    (plain,) = asked(server, path)
    assert (plain.min_new, plain.include_stop, plain.special_tokens) == (0, False, False)
    assert (plain.allowed, plain.banned, plain.cache_salt) == (None, (), "")


def test_words_without_tokens_are_never_generated() -> None:
    """A tokenizer without bytes or an unknown token drops the characters that it does not know."""
    vocab = {piece: index for index, piece in enumerate([*"abc ", "</s>", *map(str, range(252))])}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    inner.add_special_tokens(["</s>"])
    engine = BigramEngine(tokenizer=HuggingFaceTokenizer(json.loads(inner.to_str()), "</s>"))
    with serving(engine, template=None) as server:
        body = {"prompt": "a", "bad_words": ["\u00e9", "b"]}
        assert asked(server, COMPLETIONS, **body)[0].banned == ((1,),)


@pytest.mark.parametrize("path", BODIES)
def test_of_a_long_prompt_the_last_tokens_are_used(path: str) -> None:
    with serving(BigramEngine(max_length=20), template=None) as server:
        assert bytes(asked(server, path, truncate_prompt_tokens=3)[0].prompt) == b"old"
        assert bytes(asked(server, path, truncate_prompt_tokens=30)[0].prompt) == b"The old"
        long = "abcdefghijklmnopqrstuvwxyz"
        body = (
            {"prompt": long}
            if path == COMPLETIONS
            else {"messages": [{"role": "user", "content": long}]}
        )
        assert server.post(path, **BODIES[path] | body).status == 400
        (request,) = asked(server, path, truncate_prompt_tokens=-1, **body)
        assert (bytes(request.prompt), request.max_new) == (long[-14:].encode(), 6)
        answer = server.post(path, **BODIES[path], truncate_prompt_tokens=0)
        assert (answer.status, answer.data["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_a_truncated_prompt_is_echoed_as_it_is_used(server: Running) -> None:
    body = BODIES[COMPLETIONS] | {"truncate_prompt_tokens": 3, "echo": True, "logprobs": 0}
    (choice,) = server.post(COMPLETIONS, **body, temperature=0).data["choices"]
    assert choice["text"].startswith("old")
    assert choice["logprobs"]["text_offset"][:3] == [0, 1, 2]
    assert choice["logprobs"]["token_logprobs"][0] is None


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("n", [1, 2])
def test_prompt_logprobs_are_those_of_the_table(path: str, count: int, n: int) -> None:
    with serving(template=None) as server:
        answer = server.post(path, **BODIES[path], prompt_logprobs=count, n=n)
        data = answer.data
        lists = (
            [data["prompt_logprobs"]]
            if path == CHAT
            else [choice["prompt_logprobs"] for choice in data["choices"]]
        )
        assert len(lists) == (1 if path == CHAT else n)
        tokens = b"The old"
        for first, *rest in lists:
            assert first is None
            for (before, token), scores in zip(itertools.pairwise(tokens), rest, strict=True):
                order = (-TABLE[before]).argsort(kind="stable")
                top = [int(each) for each in order[:count]]
                assert set(scores) == {str(each) for each in {token, *top}}
                assert scores[str(token)]["logprob"] == pytest.approx(TABLE[before, token])
                assert scores[str(token)]["decoded_token"] == chr(token)
                assert scores[str(token)]["rank"] == list(order).index(token) + 1
                for rank, each in enumerate(top, 1):
                    assert scores[str(each)]["rank"] == rank


def test_prompt_logprobs_and_echo_keep_their_own_numbers(server: Running) -> None:
    body = BODIES[COMPLETIONS] | {"echo": True, "max_tokens": 0}
    for echoed, scored in ((1, 4), (4, 1)):
        answer = server.post(COMPLETIONS, **body, logprobs=echoed, prompt_logprobs=scored)
        (choice,) = answer.data["choices"]
        logprobs = choice["logprobs"]
        for token, top in list(zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))[1:]:
            assert token in top  # also where it is not among the most probable
            assert len(top) in (echoed, echoed + 1)
        assert {len(each) for each in choice["prompt_logprobs"][1:]} <= {scored, scored + 1}
    # without echo nothing else is asked for
    (choice,) = server.post(COMPLETIONS, prompt="ab", max_tokens=0, prompt_logprobs=0).data[
        "choices"
    ]
    assert (choice["text"], len(choice["prompt_logprobs"])) == ("", 2)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"min_tokens": 7}, "min_tokens=7 is more than max_tokens, 6"),
        ({"min_tokens": -1}, ">= 0"),
        ({"min_tokens": "3"}, "expected a whole number or null"),
        ({"include_stop_str_in_output": "yes"}, "expected true or false"),
        ({"skip_special_tokens": 1}, "expected true or false"),
        ({"truncate_prompt_tokens": -2}, ">= -1"),
        ({"truncate_prompt_tokens": True}, "expected a whole number"),
        ({"prompt_logprobs": 21}, "<= 20"),
        ({"prompt_logprobs": -1}, "the whole vocabulary is not supported; send 0 to 20"),
        ({"prompt_logprobs": 1, "stream": True}, "not supported in a stream"),
        ({"prompt_logprobs": 0, "stream": True}, "not supported in a stream"),
        ({"allowed_token_ids": []}, "length >= 1"),
        ({"allowed_token_ids": [257]}, "token 257 does not exist"),
        ({"bad_words": "word"}, "expected a list"),
        ({"bad_words": [" "]}, "blank"),
        ({"bad_words": ["x" * 257]}, "257 characters"),
        ({"bad_words": ["x"] * 257}, "at most 256"),
        ({"cache_salt": ""}, "length >= 1"),
        ({"cache_salt": 5}, "expected a text"),
        ({"guided_choice": []}, "length >= 1"),
        ({"guided_choice": "a"}, "expected a list"),
        ({"guided_json": "{"}, "guided_json: the text is no JSON schema"),
        ({"guided_json": "[]"}, "guided_json: the text is no JSON schema"),
        ({"guided_regex": "("}, "guided_regex: "),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "ask for two formats of one text"),
        ({"guided_choice": ["a"], "structured_outputs": {"regex": "a"}}, "two formats"),
        ({"guided_choice": ["a"], "response_format": {"type": "json_object"}}, "no response_format"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_field_is_said(
    server: Running, path: str, fields: dict[str, Any], words: str
) -> None:
    before = len(server.engine.seen)
    answer = server.post(path, **BODIES[path] | fields)
    assert answer.status == 400, answer.text
    assert words in answer.message
    assert answer.data["error"]["param"] in fields
    assert len(server.engine.seen) == before


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("field", "neutral", "other"),
    [
        ("priority", 0, 5),
        ("request_id", None, "mine"),
        ("use_beam_search", False, True),
        ("length_penalty", 1.0, 0.5),
        ("thinking_token_budget", -1, 100),
        ("truncation_side", "left", "right"),
        ("spaces_between_special_tokens", True, False),
        ("return_token_ids", False, True),
        ("logits_processors", None, ["a.b"]),
        ("guided_grammar", None, "start: 'a'"),
    ],
)
def test_what_is_not_supported_is_said_and_its_default_is_taken(
    server: Running, path: str, field: str, neutral: Any, other: Any
) -> None:
    assert server.post(path, **BODIES[path] | {field: neutral}).status == 200
    answer = server.post(path, **BODIES[path] | {field: other})
    assert (answer.status, answer.data["error"]["param"]) == (400, field)
    assert f"{field} is not supported by this server; leave it out" in answer.message
    assert "did you mean" not in answer.message


CHAT_ONLY: dict[str, tuple[Any, Any, str]] = {
    "add_special_tokens": (False, True, "or send false: the chat template writes special tokens"),
    "best_of": (1, 2, "or send 1: choices are not ranked"),
    "chat_template": (None, "x", "leave it out: start the server with --chat-template FILE"),
    "documents": (None, [{"text": "a"}], "has them from chat_template_kwargs"),
    "echo": (False, True, "leave it out, or send false"),
    "function_call": (None, "auto", "send tool_choice instead"),
    "include_reasoning": (True, False, "leave it out, or send true"),
    "mm_processor_kwargs": (None, {"fps": 1}, "leave it out: this model takes text only"),
}


@pytest.mark.parametrize("field", CHAT_ONLY)
def test_what_to_do_instead_is_said(server: Running, field: str) -> None:
    neutral, other, words = CHAT_ONLY[field]
    assert server.post(CHAT, **BODIES[CHAT] | {field: neutral}).status == 200
    answer = server.post(CHAT, **BODIES[CHAT] | {field: other})
    assert (answer.status, answer.data["error"]["param"]) == (400, field)
    assert f"{field} is not supported by this server; leave it out" in answer.message
    assert words in answer.message


def test_documents_reach_a_chat_template_by_its_values() -> None:
    with serving(template="{{ documents[0].text }}") as server:
        fields = {"chat_template_kwargs": {"documents": [{"text": "an old"}]}}
        assert bytes(asked(server, CHAT, **fields)[0].prompt) == b"an old"


@pytest.mark.parametrize(
    ("path", "field", "words"),
    [
        (CHAT, "prompt", "is a field of /v1/completions, not of /v1/chat/completions; send messages"),
        (CHAT, "suffix", "not of /v1/chat/completions; leave it out"),
        (CHAT, "prompt_embeds", "prompt_embeds is not supported by this server; leave it out"),
        (CHAT, "max_completion_token", "unknown field 'max_completion_token'; did you mean 'max_completion_tokens'?"),
        (CHAT, "images", "unknown field 'images'; known: model, "),
        (COMPLETIONS, "messages", "is a field of /v1/chat/completions, not of /v1/completions; send prompt"),
        (COMPLETIONS, "max_completion_tokens", "not of /v1/completions; send max_tokens"),
        (COMPLETIONS, "top_logprobs", "not of /v1/completions; send logprobs"),
        (COMPLETIONS, "tools", "not of /v1/completions; leave it out"),
        (COMPLETIONS, "documents", "documents is not supported by this server; leave it out"),
        (COMPLETIONS, "prompt_embeds", "leave it out: send a text or token ids as prompt"),
        (COMPLETIONS, "prompt_token_ids", "leave it out: send the token ids as prompt"),
        (COMPLETIONS, "system", "unknown field 'system'; known: model, "),
        (COMPLETIONS, "ignore_eos_token", "did you mean 'ignore_eos'?"),
        (COMPLETIONS, "logit_processors", "did you mean 'logits_processors'?"),
    ],
)  # fmt: skip
def test_a_field_is_taken_for_another_only_if_it_is_mistyped(
    server: Running, path: str, field: str, words: str
) -> None:
    answer = server.post(path, **BODIES[path] | {field: ["x"]})
    assert (answer.status, answer.data["error"]["param"]) == (400, field)
    assert words in answer.message


# of its requests, also of earlier versions, beside those of OpenAI
VLLM = {
    "add_special_tokens", "allowed_token_ids", "bad_words", "best_of", "cache_salt", "early_stopping", "echo",
    "ec_transfer_params", "guided_choice", "guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex",
    "guided_whitespace_pattern", "ignore_eos", "include_stop_str_in_output", "kv_transfer_params", "length_penalty",
    "logits_processors", "min_p", "min_tokens", "priority", "prompt_logprobs", "repetition_detection",
    "repetition_penalty", "request_id", "response_format", "return_token_ids", "return_token_offsets",
    "return_tokens_as_token_ids", "skip_special_tokens", "spaces_between_special_tokens", "stop_token_ids",
    "structural_tag", "structured_outputs", "thinking_token_budget", "top_k", "truncate_prompt_tokens",
    "truncation_side", "use_beam_search", "vllm_xargs",
}  # fmt: skip
VLLM_OF = {
    COMPLETIONS: VLLM | {"prompt_embeds"},
    CHAT: VLLM | {
        "add_generation_prompt", "chat_template", "chat_template_kwargs", "continue_final_message", "documents",
        "include_reasoning", "media_io_kwargs", "mm_processor_kwargs", "return_assistant_tokens_mask",
        "return_prompt_text",
    },
}  # fmt: skip
OPENAI_OF = {
    COMPLETIONS: completion_create_params.CompletionCreateParamsBase,
    CHAT: chat_create_params.CompletionCreateParamsBase,
}


@pytest.mark.parametrize("path", BODIES)
def test_every_field_of_openai_and_vllm_is_known(server: Running, path: str) -> None:
    names = VLLM_OF[path] | set(get_type_hints(OPENAI_OF[path])) | {"stream"}
    body = dict.fromkeys(sorted(names)) | BODIES[path]
    answer = server.post(path, **body)
    assert answer.status == 200, answer.message


def test_every_field_of_vllms_structured_outputs_is_known(server: Running) -> None:
    names = ("grammar", "structural_tag", "whitespace_pattern", "disable_fallback")
    names += ("disable_any_whitespace", "disable_additional_properties")
    formats = dict.fromkeys(names) | {"disable_fallback": False, "choice": ["yes"]}
    body = BODIES[COMPLETIONS] | {"structured_outputs": formats}
    assert server.post(COMPLETIONS, **body).status == 200
    for name in names:
        formats = {"choice": ["yes"], name: "other"}
        answer = server.post(COMPLETIONS, **body | {"structured_outputs": formats})
        param = f"structured_outputs.{name}"
        assert (answer.status, answer.data["error"]["param"]) == (400, param)
        assert f"{param} is not supported by this server" in answer.message


@pytest.mark.parametrize("path", BODIES)
def test_formats_by_the_older_names(server: Running, path: str) -> None:
    newer = {"choice": ["yes", "no"], "regex": "[a-z]+", "json": {"type": "object"}}
    for name, value in newer.items():
        (older,) = asked(server, path, **{f"guided_{name}": value})
        assert older.grammar is not None
        assert older.grammar == asked(server, path, structured_outputs={name: value})[0].grammar
    (text,) = asked(server, path, guided_json='{"type": "object"}')
    assert text.grammar == asked(server, path, structured_outputs={"json_object": True})[0].grammar


def test_offsets_count_special_tokens_where_they_are_shown() -> None:
    class Documents(BigramEngine):
        def _tokens(self, request: Request) -> tuple[list[int], bool]:
            return [97, END, 98], False

    with serving(Documents()) as server:
        for skip, offsets in ((True, [0, 1, 1]), (False, [0, 1, 14])):
            body = BODIES[COMPLETIONS] | {"logprobs": 0, "skip_special_tokens": skip}
            (choice,) = server.post(COMPLETIONS, **body).data["choices"]
            assert choice["logprobs"]["text_offset"] == offsets


def test_a_greedy_answer_is_not_changed_by_defaults(server: Running) -> None:
    defaults = {"min_tokens": 0, "skip_special_tokens": True, "bad_words": [], "priority": 0}
    answer = server.post(COMPLETIONS, prompt="The old", max_tokens=6, temperature=0, **defaults)
    assert answer.data["choices"][0]["text"] == bytes(greedy(list(b"The old"), 6)).decode()

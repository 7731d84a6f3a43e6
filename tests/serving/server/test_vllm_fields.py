"""Fields that vLLM adds to OpenAI's bodies: what they ask of the engine, and what is refused."""

import itertools
import json
from typing import Any

import pytest
import tokenizers
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
        ("use_beam_search", False, True),
        ("length_penalty", 1.0, 0.5),
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

"""/v1/completions and the routes around it, against the table that the engine samples from."""

import dataclasses
import json
import math

import pytest
import tokenizers
from tests.serving.server.bigram_engine import (
    END,
    TABLE,
    TOKENIZER,
    BigramEngine,
    greedy,
    loglikelihood,
)
from tests.serving.server.serving import Running, serving

from meshwright.data.tokenizers import HuggingFaceTokenizer
from meshwright.serving.server.logprobs import TextOffsets, TokenTexts

PROMPT = "The old"
TOKENS = list(PROMPT.encode())


def continued(count: int, prompt: str = PROMPT) -> str:
    return TOKENIZER.decode(greedy(list(prompt.encode()), count))


def test_a_prompt_is_continued(server: Running) -> None:
    answer = server.post(
        "/v1/completions", model="bigram", prompt=PROMPT, temperature=0, max_tokens=9
    )
    assert answer.status == 200
    data = answer.data
    assert data["choices"] == [
        {"index": 0, "text": continued(9), "logprobs": None, "finish_reason": "length"}
    ]
    assert (data["object"], data["model"]) == ("text_completion", "bigram")
    assert data["usage"]["prompt_tokens"] == 7
    assert data["usage"]["completion_tokens"] == 9
    assert data["usage"]["total_tokens"] == 16
    assert answer.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize(
    "prompt", [PROMPT, TOKENS, [PROMPT], [TOKENS], [PROMPT, TOKENS], [TOKENS, TOKENS, PROMPT]]
)
def test_a_prompt_is_text_or_tokens_or_a_list_of_both(server: Running, prompt: object) -> None:
    choices = server.post("/v1/completions", prompt=prompt, temperature=0, max_tokens=4).data[
        "choices"
    ]
    number = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert [choice["index"] for choice in choices] == list(range(number))
    assert {choice["text"] for choice in choices} == {continued(4)}


def test_choices_have_their_own_seeds_and_repeat(server: Running) -> None:
    def sampled(**settings: object) -> list[str]:
        answer = server.post("/v1/completions", prompt=[PROMPT, "x"], n=3, max_tokens=8, **settings)
        return [choice["text"] for choice in answer.data["choices"]]

    texts = sampled(seed=5)
    assert len(set(texts)) == 6
    assert sampled(seed=5) == texts
    assert sampled(seed=-5) != texts
    assert sampled() != sampled()


def test_streamed_text_and_usage_equal_those_at_once(server: Running) -> None:
    settings = {"prompt": [PROMPT, "once"], "n": 2, "seed": 1, "max_tokens": 6, "logprobs": 2}
    once = server.post("/v1/completions", **settings).data
    answer = server.post(
        "/v1/completions", **settings, stream=True, stream_options={"include_usage": True}
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = answer.events
    assert done == "[DONE]"
    assert (usage["choices"], usage["usage"]) == ([], once["usage"])
    assert {chunk["id"] for chunk in chunks} == {usage["id"]}
    assert all(chunk["usage"] is None for chunk in chunks)
    for choice in once["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name in choice["logprobs"]:
            merged = [
                value for part in parts if part["logprobs"] for value in part["logprobs"][name]
            ]
            assert merged == choice["logprobs"][name]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]


def test_reused_tokens_are_counted_once_for_each_prompt() -> None:
    with serving(BigramEngine(cached=3)) as server:
        settings = {"prompt": [PROMPT, "once"], "n": 2, "max_tokens": 6}
        once = server.post("/v1/completions", **settings).data["usage"]
        usage = {"include_usage": True}
        streamed = server.post("/v1/completions", **settings, stream=True, stream_options=usage)
        chat = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], n=2)
        for each, cached in ((once, 6), (streamed.events[-2]["usage"], 6), (chat.data["usage"], 3)):
            assert each["prompt_tokens_details"] == {"cached_tokens": cached}


def test_logprobs_are_those_of_the_table(server: Running) -> None:
    answer = server.post("/v1/completions", prompt=PROMPT, temperature=0, max_tokens=5, logprobs=3)
    logprobs = answer.data["choices"][0]["logprobs"]
    tokens = greedy(TOKENS, 5)
    assert logprobs["tokens"] == [chr(token) for token in tokens]
    pairs = zip([TOKENS[-1], *tokens], tokens, strict=False)
    assert logprobs["token_logprobs"] == pytest.approx([TABLE[pair] for pair in pairs])
    assert all(len(top) == 3 for top in logprobs["top_logprobs"])
    assert logprobs["text_offset"] == list(range(5))


def test_echo_scores_the_prompt(server: Running) -> None:
    answer = server.post("/v1/completions", prompt=TOKENS, echo=True, logprobs=1, max_tokens=0)
    (choice,) = answer.data["choices"]
    assert choice["text"] == PROMPT
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][0] is None
    total = math.fsum(choice["logprobs"]["token_logprobs"][1:])
    assert total == pytest.approx(loglikelihood(TOKENS, 1)[0])
    streamed = server.post(
        "/v1/completions", prompt=TOKENS, echo=True, max_tokens=3, temperature=0, stream=True
    )
    text = "".join(event["choices"][0]["text"] for event in streamed.events[:-1])
    assert text == PROMPT + continued(3)


def test_offsets_count_characters_of_the_text(server: Running) -> None:
    settings = {"prompt": [*"né".encode(), 256, 97], "echo": True, "logprobs": 1}
    answer = server.post("/v1/completions", **settings, max_tokens=0)
    (choice,) = answer.data["choices"]
    assert choice["text"] == "né<|endoftext|>a"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 15]


def test_offsets_know_spaces_at_the_start_of_tokens() -> None:
    pieces = {
        "<end>": 0,
        "\u2581the": 1,
        "\u2581old": 2,
        "er": 3,
        "\u2581": 4,
        "<0xC3>": 5,
        "<0xA9>": 6,
        "a": 7,
    }
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(pieces, [], byte_fallback=True))
    inner.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip
    inner.add_special_tokens(["<end>"])
    tokenizer = HuggingFaceTokenizer(json.loads(inner.to_str()), "<end>")
    tokens = [0, 1, 2, 3, 4, 5, 6, 1]
    offsets = TextOffsets(TokenTexts(tokenizer))
    found = [offsets.add(token) for token in tokens]
    text = tokenizer.decode(tokens)
    assert text == "the older é the"
    assert found == [0, 0, 3, 7, 9, 10, 10, 11]


def test_echo_alone_returns_the_prompt(server: Running) -> None:
    answer = server.post("/v1/completions", prompt=TOKENS, echo=True, max_tokens=0)
    assert answer.data["choices"] == [
        {"index": 0, "text": PROMPT, "logprobs": None, "finish_reason": "length"}
    ]


def test_a_stop_text_ends_it(server: Running) -> None:
    text = continued(12)
    stop = text[4:6]
    settings = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "stop": [stop, "zzz"]}
    (choice,) = server.post("/v1/completions", **settings).data["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")


def test_settings_reach_the_engine(server: Running) -> None:
    server.post(
        "/v1/completions", prompt=PROMPT, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3,
        presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5,
        logit_bias={"65": 2, "66": -1.5}, stop_token_ids=[10], ignore_eos=True, user="someone",
    )  # fmt: skip
    request = server.engine.seen[-1]
    assert dataclasses.asdict(request.sampling) == {
        "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.5,
        "presence_penalty": 0.5, "frequency_penalty": 0.25,
        "logit_bias": ((65, 2.0), (66, -1.5)), "seed": 3,
    }  # fmt: skip
    assert (request.stop_tokens, request.ignore_end, request.max_new) == ({10}, True, 16)


def test_the_default_number_of_tokens_fits_a_long_prompt(server: Running) -> None:
    long = "x" * (server.engine.max_length - 3)
    answer = server.post("/v1/completions", prompt=long, ignore_eos=True)
    assert answer.data["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({}, "no field 'prompt'", "prompt"),
        ({"prompt": 7}, "expected a text or a list, got a whole number - at 'prompt'", "prompt"),
        ({"prompt": []}, "at least one prompt", "prompt"),
        ({"prompt": ["a", 7]}, "mixes tokens", "prompt"),
        ({"prompt": [300]}, "token 300 does not exist; the tokenizer has 0 to 256", "prompt"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens", "max_tokens"),
        ({"prompt": "a", "max_tokens": 0}, "with echo=true", "max_tokens"),
        ({"prompt": "a", "max_tokens": 600}, "max_tokens=511 would fit", "max_tokens"),
        ({"prompt": "a" * 600}, "limit of 512 tokens (--engine.max-length); send a shorter prompt", "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of", "best_of"),
        ({"prompt": "a", "temperature": "hot"}, "temperature", "temperature"),
        ({"prompt": "a", "temperature": 9}, "'temperature'", "temperature"),
        ({"prompt": "a", "temprature": 1}, "did you mean 'temperature'?", "temprature"),
        ({"prompt": "a", "logit_bias": {"999": 1}}, "token 999", "logit_bias"),
        ({"prompt": "a", "stop": ""}, "stop text is empty", "stop"),
        ({"prompt": "a", "stop": ["b"] * 17}, "send at most 16", "stop"),
        ({"prompt": "a", "stop": ["b" * 257]}, "a text of 257 characters", "stop"),
        ({"prompt": "a", "top_p": 0}, "top_p=0", None),
        ({"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, 'response_format: Unimplemented keys: ["not"]', "response_format"),
        ({"prompt": "a", "structured_outputs": {"regex": "(a"}}, "unclosed group", "structured_outputs"),
        ({"prompt": "a", "structured_outputs": {"regex": "a", "choice": ["a"]}}, "one of json, json_object, regex, choice", "structured_outputs"),
        ({"prompt": "a", "structured_outputs": {"choice": []}}, "structured_outputs.choice", "structured_outputs.choice"),
        ({"prompt": "a\ud800"}, "", None),
    ],
)  # fmt: skip
def test_a_mistake_is_named(
    server: Running, body: dict[str, object], message: str, param: str | None
) -> None:
    answer = server.post("/v1/completions", **body)
    assert answer.status == 400, answer.text
    error = answer.data["error"]
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param


def test_another_model_is_not_found(server: Running) -> None:
    answer = server.post("/v1/completions", model="gpt-4", prompt="a")
    assert (answer.status, answer.data["error"]["code"]) == (404, "model_not_found")
    assert "'bigram'" in answer.message


def test_the_model_is_listed(server: Running) -> None:
    (card,) = server.get("/v1/models").data["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("bigram", "model", 512)
    assert server.get("/v1/models/bigram").data == card
    assert server.get("/v1/models/other").status == 404


def test_text_becomes_tokens_and_back(server: Running) -> None:
    answer = server.post("/tokenize", prompt="né", return_token_strs=True).data
    assert answer["tokens"] == list("né".encode())
    assert answer["count"] == 3
    assert answer["token_strs"][0] == "n"
    assert server.post("/detokenize", tokens=answer["tokens"]).data == {"prompt": "né"}
    chat = server.post("/tokenize", messages=[{"role": "user", "content": "Hi"}]).data["tokens"]
    assert (
        server.post("/detokenize", tokens=chat).data["prompt"].endswith("<|im_start|>assistant\n")
    )
    assert server.post("/tokenize").status == 400
    assert server.post("/detokenize", tokens=[300]).status == 400
    info = server.get("/tokenizer_info").data
    assert (info["eos_token"], info["eos_token_id"]) == ("<|endoftext|>", 256)
    assert "<|im_start|>" in info["chat_template"]


def test_an_unknown_path_or_method_says_what_there_is(server: Running) -> None:
    answer = server.get("/v1/nothing")
    assert (answer.status, "/v1/completions" in answer.message) == (404, True)
    answer = server.get("/v1/completions")
    assert (answer.status, answer.message) == (405, "/v1/completions does not take GET; use POST")
    answer = server.post("/v1/models/bigram")
    assert answer.message == "/v1/models/bigram does not take POST; use GET"
    assert "/v1/models/NAME," in server.get("/v1/nothing").message


def test_an_empty_prompt_starts_a_document(server: Running) -> None:
    expected = TOKENIZER.decode(greedy([END], 5))
    for prompt in ("", [""], [[]]):
        data = server.post("/v1/completions", prompt=prompt, max_tokens=5, temperature=0).data
        assert data["choices"][0]["text"] == expected
        assert server.engine.seen[-1].prompt == (END,)
    # it is what /loglikelihood scores a text after
    echoed = server.post(
        "/v1/completions",
        prompt="",
        max_tokens=5,
        temperature=0,
        echo=True,
        logprobs=0,
        ignore_eos=True,
    ).data["choices"][0]
    assert echoed["logprobs"]["token_logprobs"][0] is None
    assert echoed["logprobs"]["text_offset"][:2] == [0, 0]
    (score,) = server.post("/loglikelihood", text=[echoed["text"]]).data["log_likelihood"]
    assert score == pytest.approx(sum(echoed["logprobs"]["token_logprobs"][1:]))


def test_so_does_an_empty_chat_without_a_template() -> None:
    with serving(template=None) as server:
        messages = [{"role": "user", "content": ""}]
        answer = server.post("/v1/chat/completions", messages=messages, max_tokens=3)
        assert answer.status == 200
        assert server.engine.seen[-1].prompt == (END,)

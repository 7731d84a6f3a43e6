"""EasyLM's routes, with the bodies of its client, against the table the engine samples from."""

import math

import pytest
from tests.serving.server.bigram_engine import END, TOKENIZER, BigramEngine, greedy, loglikelihood
from tests.serving.server.serving import Running, serving

from meshwright.serving.settings import EasyLMConfig


def tokens(text: str) -> list[int]:
    return list(text.encode())


def test_ready(server: Running) -> None:
    assert (server.get("/ready").status, server.get("/ready").text) == (200, "Ready!\n")


def test_only_the_text_is_scored(server: Running) -> None:
    likely = TOKENIZER.decode(greedy(tokens("ab"), 3))
    prefix, text = ["ab", "ab", "", "x"], ["cd", likely, "yes", ""]
    data = server.post("/loglikelihood", prefix_text=prefix, text=text).data
    assert (data["prefix_text"], data["text"]) == (prefix, text)
    expected = [
        loglikelihood(tokens("abcd"), 2),
        loglikelihood(tokens("ab" + likely), 2),
        loglikelihood([END, *tokens("yes")], 1),
        (0.0, True),
    ]
    assert data["log_likelihood"] == pytest.approx([value for value, _ in expected])
    assert data["is_greedy"] == [greedy for _, greedy in expected] == [False, True, False, True]
    without = server.post("/loglikelihood", text=["yes"]).data
    assert without["prefix_text"] == [""]
    assert without["log_likelihood"] == pytest.approx([expected[2][0]])


def test_of_a_long_prefix_the_end_is_used() -> None:
    with serving(BigramEngine(max_length=8)) as server:
        data = server.post("/loglikelihood", prefix_text=["x" * 50 + "ab"], text=["cd"]).data
        assert data["log_likelihood"] == pytest.approx([loglikelihood(tokens("abcd"), 2)[0]])
        assert len(server.engine.seen[-1].prompt) == 8
        answer = server.post("/loglikelihood", text=["y" * 9])
        (detail,) = answer.data["detail"]
        assert (answer.status, "rolling" in detail["msg"]) == (422, True)


@pytest.mark.parametrize("length", [0, 1, 6, 7, 8, 14, 15, 40])
@pytest.mark.parametrize("path", ["/loglikelihood-rolling", "/loglikelihood_rolling"])
def test_every_token_of_a_long_text_is_scored_once(path: str, length: int) -> None:
    """The next token depends on the last only, so windows must add up to the sum of all."""
    text = "The quick brown fox jumps over the lazy dog"[:length]
    with serving(BigramEngine(max_length=8)) as server:
        data = server.post(path, text=[text, "ab"]).data
        assert data["text"] == [text, "ab"]
        full = loglikelihood([END, *tokens(text)], 1) if text else (0.0, True)
        assert data["log_likelihood"][0] == pytest.approx(full[0])
        assert data["is_greedy"][0] == full[1]
        sizes = [len(request.prompt) for request in server.engine.seen]
        assert len(sizes) == math.ceil(length / 7) + 1
        assert max(sizes) <= 8


def test_generate_and_chat() -> None:
    own = EasyLMConfig(
        chat_prepend_text="S:", chat_user_prefix="<u>", chat_user_suffix="</u>", chat_lm_prefix="<m>",
        chat_lm_suffix="</m>", prepend_to_prefix="[", append_to_prefix="]", default_temperature=0.0,
    )  # fmt: skip
    with serving(easylm=own) as server:
        data = server.post("/generate", prefix_text=["a", "b"]).data
        assert (data["prefix_text"], data["temperature"]) == (["a", "b"], 0.0)
        assert data["output_text"] == [TOKENIZER.decode(greedy(tokens("]"), 256))] * 2
        assert bytes(server.engine.seen[0].prompt) == b"[a]"
        data = server.post("/generate", prefix_text=["a"], temperature=0.7).data
        assert data["temperature"] == 0.7
        assert server.engine.seen[-1].sampling.top_k == 50

        first = server.post("/chat", prompt="Hi").data
        assert first["context"] == f"<u>Hi</u><m>{first['response']}</m>"
        assert first["temperature"] == 0.0
        assert bytes(server.engine.seen[-1].prompt) == b"S:<u>Hi</u><m>"
        again = server.post("/chat", prompt="More", context=first["context"]).data
        assert again["context"].startswith(first["context"] + "<u>More</u><m>")


@pytest.mark.parametrize("path", ["/greedy-until", "/greedy_until"])
def test_greedy_until_ends_before_the_first_stop_text(path: str) -> None:
    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    engine = BigramEngine(answer=lambda prompt: alphabet[alphabet.index(prompt[-1]) + 1 :])
    # 6 tokens at a time, so that the model is asked again, and "op" spans two answers
    own = EasyLMConfig(input_length=4, seq_length=10, greedy_until_max_length=30)
    with serving(engine, easylm=own) as server:
        until = ["st", ["§", "op", "st"], "§"]
        data = server.post(path, prefix_text=["abc"] * 3, until=until).data
        assert data["output_text"] == [alphabet[3:18], alphabet[3:14], alphabet[3:33]]
        assert (data["max_length"], data["until"]) == (30, until)


def test_greedy_until_keeps_a_character_that_begins_in_the_answer_before() -> None:
    text = "aéàüöâêîôûñçãõ"
    engine = BigramEngine()
    every = text.encode()
    engine._tokens = lambda request: (  # type: ignore[method-assign]
        [*every[every.index(bytes(request.prompt[-2:])) + 2 :]][: request.max_new], False
    )  # fmt: skip
    own = EasyLMConfig(input_length=4, seq_length=9, greedy_until_max_length=20)  # 5 at a time
    with serving(engine, easylm=own) as server:
        data = server.post("/greedy-until", prefix_text=["aé"], until=["ñ"]).data
    assert data["output_text"] == ["àüöâêîôû"]


def test_an_end_token_stops_greedy_until() -> None:
    with serving(BigramEngine(answer=lambda _: "short")) as server:
        data = server.post("/greedy-until", prefix_text=["ab"], until=["§"]).data
        assert data["output_text"] == ["short"]


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/loglikelihood", {}, ["text"]),
        ("/loglikelihood", {"text": "not a list"}, ["text"]),
        ("/loglikelihood", {"text": ["a", 3]}, ["text", 1]),
        ("/loglikelihood", {"text": ["a"], "prefix_text": ["a", "b"]}, ["prefix_text"]),
        ("/loglikelihood-rolling", {"prefix_text": ["a"]}, ["text"]),
        ("/loglikelihood_rolling", {"prefix_text": ["a"]}, ["text"]),
        ("/generate", {"text": ["a"]}, ["prefix_text"]),
        ("/generate", {"prefix_text": ["a"], "temperature": -1}, ["temperature"]),
        ("/greedy-until", {"prefix_text": ["a"]}, ["until"]),
        ("/greedy-until", {"prefix_text": ["a"], "until": []}, ["until"]),
        ("/greedy_until", {"prefix_text": ["a"], "until": [""]}, ["until"]),
        ("/greedy-until", {"prefix_text": ["a"], "until": [["b"] * 17]}, ["until"]),
        ("/chat", {}, ["prompt"]),
        ("/chat", {"prompt": 3}, ["prompt"]),
        ("/chat", {"prompt": "a", "contxt": ""}, ["contxt"]),
    ],
)
def test_a_bad_body_is_answered_in_the_form_of_fastapi(
    server: Running, path: str, body: dict[str, object], place: list[str | int]
) -> None:
    answer = server.post(path, **body)
    assert answer.status == 422, answer.text
    (detail,) = answer.data["detail"]
    assert detail["loc"] == ["body", *place]
    assert detail["msg"]


def test_so_is_a_body_that_is_no_json(server: Running) -> None:
    for data in (b"", b"{", b"[]", b"\xff"):
        answer = server.send("POST", "/generate", data)
        assert (answer.status, answer.data["detail"][0]["loc"]) == (422, ["body"])


def test_other_errors_keep_their_status() -> None:
    with serving(BigramEngine(is_ready=False)) as server:
        assert server.post("/generate", prefix_text=["a"]).status == 503


@pytest.mark.parametrize(("path", "more"), [("/generate", {}), ("/greedy-until", {"until": ["§"]})])
def test_an_empty_prefix_starts_a_document(path: str, more: dict[str, object]) -> None:
    with serving() as server:
        server.post(path, prefix_text=[""], **more)
        assert server.engine.seen[0].prompt == (END,)

"""Defaults of generation_config.json: what is read, and that a request's own settings win."""

import dataclasses
from typing import Any

import pytest
from tests.serving.server.bigram_engine import BigramEngine
from tests.serving.server.serving import Running, config, source

from meshwright.errors import MeshwrightError
from meshwright.serving import Defaults, Sampling, defaults_of
from meshwright.serving.server import HttpServer, Service

HI = [{"role": "user", "content": "Hi"}]


def test_fields_that_are_read() -> None:
    found = defaults_of(
        {
            "do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 0, "min_p": None,
            "repetition_penalty": 1.05, "max_new_tokens": 40, "eos_token_id": [1, 2], "bos": 1,
        }
    )  # fmt: skip
    assert found == Defaults(Sampling(0.6, top_p=0.9, repetition_penalty=1.05), 40)
    assert str(found) == "temperature 0.6, top_p 0.9, repetition_penalty 1.05, max_new_tokens 40"
    assert defaults_of({}) == Defaults()
    assert str(Defaults()) == ""
    assert found.typed == found.sampling
    assert (Defaults().sampling, Defaults().typed) == (Sampling(), Sampling(0.8, top_p=0.95))
    assert defaults_of({"temperature": 1.0}).typed == Sampling()
    greedy = defaults_of({"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.2})
    assert greedy.typed == Sampling(0, repetition_penalty=1.2)  # as transformers' generate
    assert greedy.sampling == Sampling(0.7, repetition_penalty=1.2)  # as vLLM's server
    assert defaults_of({"do_sample": False}).typed == Sampling(0)


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": "hot"}, {"top_p": 2}, {"top_k": -7}, {"top_k": 1.5}, {"max_new_tokens": 0}],
)
def test_a_wrong_field_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(MeshwrightError, match=f"generation_config.json: {next(iter(wrong))}="):
        defaults_of(wrong)


def test_settings_of_a_request_win() -> None:
    engine = BigramEngine()
    defaults = Defaults(Sampling(0.6, top_k=20, top_p=0.9, repetition_penalty=1.2), 5)
    with HttpServer(Service(engine, source(), config(), None, defaults)) as server:
        running = Running(server, engine)

        def sampling(path: str, **body: Any) -> tuple[Sampling, int]:
            assert running.post(path, **body).status == 200
            request = engine.seen[-1]
            return dataclasses.replace(request.sampling, seed=0), request.max_new

        chat, text = "/v1/chat/completions", "/v1/completions"
        assert sampling(chat, messages=HI) == (defaults.sampling, 5)
        assert sampling(text, prompt="a", max_tokens=3) == (defaults.sampling, 3)
        assert sampling(text, prompt="a")[1] == 16  # OpenAI's default
        own = {"temperature": 0, "top_k": -1, "top_p": 1, "repetition_penalty": 1, "min_p": 0.5}
        assert sampling(chat, messages=HI, max_tokens=9, logit_bias={"7": -3}, **own) == (
            Sampling(0, top_p=1, min_p=0.5, repetition_penalty=1, logit_bias=((7, -3.0),)), 9,
        )  # fmt: skip
        assert r"\"top_k\":20" in running.get("/").text  # for the chat page

"""lm-eval's local-completions, unmodified, with the server's tokenizer. `pip install lm-eval[api]`."""

import warnings
from typing import Any

import pytest
from tests.serving.server.bigram_engine import END, TOKENIZER, greedy, loglikelihood
from tests.serving.server.serving import Running

pytest.importorskip("lm_eval", reason="lm-eval is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model(server: Running) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        model="bigram", base_url=f"{server.url}/v1/completions", tokenizer_backend="remote",
        max_length=512, batch_size=4, num_concurrent=2, max_retries=1,
    )  # fmt: skip


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def test_loglikelihood_equals_a_direct_computation(model: Any) -> None:
    likely = TOKENIZER.decode(greedy(list(b"ab"), 3))
    pairs = [("ab", "cd"), ("ab", likely), ("", "yes"), ("Once upon", " a time"), ("x", "y")]
    results = model.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
    for (context, text), (value, is_greedy) in zip(pairs, results, strict=True):
        before = list(context.encode()) or [END]
        expected = loglikelihood([*before, *text.encode()], len(before))
        assert value == pytest.approx(expected[0], abs=1e-9)
        assert is_greedy == expected[1]
    assert [each for _, each in results][:2] == [False, True]


def test_rolling_loglikelihood_equals_a_direct_computation(model: Any) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 30
    (value,) = model.loglikelihood_rolling(
        requests("loglikelihood_rolling", [(text,)]), disable_tqdm=True
    )
    assert value == pytest.approx(loglikelihood([END, *text.encode()], 1)[0])


def test_generate_until_equals_greedy_decoding(model: Any) -> None:
    text = TOKENIZER.decode(greedy(list(b"ab"), 20))
    stop = text[5:7]
    asked = [
        ("ab", {"until": [stop], "max_gen_toks": 20, "do_sample": False}),
        ("ab", {"until": ["§"], "max_gen_toks": 9, "temperature": 0}),
    ]
    results = model.generate_until(requests("generate_until", asked), disable_tqdm=True)
    assert results == [text.split(stop)[0], text[:9]]

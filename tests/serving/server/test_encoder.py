"""`meshwright serve` of a T5 folder: completions and EasyLM's routes, and what they refuse."""

import json
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
PROGRAM = "from meshwright.cli.main import main; main()"
FOLDER = ROOT / "tests" / "models" / "t5_reference" / "t5-1.1"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the command, in a process of its own."""
    folder = tmp_path_factory.mktemp("t5") / "t5-1.1"
    shutil.copytree(FOLDER, folder)
    words = {"</s>" if i == 1 else f"w{i}": i for i in range(48)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = "--port 0 --engine.max-batch 2 --engine.max-length 32 --engine.page-size 8"
    flags += " --engine.chunk 32 --engine.no-compile-first --easylm.input-length 24"
    flags += " --easylm.seq-length 32"
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "serve", str(folder), *flags.split()],
        cwd=ROOT, text=True, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            found = re.search(r"served at (\S+)/v1", process.stdout.readline())
            assert found is not None
            yield found[1]
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def post(url: str, path: str, **body: Any) -> Any:
    """The answer of a route, or the message of its error."""
    request = urllib.request.Request(url + path, json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        data = json.load(error)
        return data["error"]["message"] if "error" in data else data["detail"][0]["msg"]


def test_completions_are_those_of_transformers(url: str) -> None:
    prompts = [row[row != 0].tolist() for row in np.load(FOLDER / "encoder_tokens.npy")]
    expected = np.load(FOLDER / "generated.npy")[:, 1:]
    texts = [" ".join(f"w{token}" for token in prompt) for prompt in prompts]
    for form in (prompts, texts):
        answer = post(url, "/v1/completions", prompt=form, temperature=0, max_tokens=16)
        for row, choice in zip(expected, answer["choices"], strict=True):
            ends = np.flatnonzero(row == 1)
            words = [f"w{token}" for token in row[: ends[0] if len(ends) else None]]
            assert choice["text"].split() == words
            assert choice["finish_reason"] == ("stop" if len(ends) else "length")
        assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_an_output_has_a_length_of_its_own(url: str) -> None:
    answer = post(
        url, "/v1/completions", prompt=[5] * 32, max_tokens=32, ignore_eos=True, temperature=0
    )
    assert answer["usage"]["completion_tokens"] == 32
    message = post(url, "/v1/completions", prompt=[5] * 33, max_tokens=1)
    assert "the prompt has 33 tokens" in message


def test_easylm_generates(url: str) -> None:
    answer = post(url, "/generate", prefix_text=["w5 w9 w12", "w7"], temperature=0.5)
    assert len(answer["output_text"]) == 2
    greedy = post(url, "/greedy-until", prefix_text=["w5 w9"], until=[["nothing"]])
    assert len(greedy["output_text"][0].split()) <= 16


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "w5", "echo": True, "logprobs": 1}),
        ("/loglikelihood", {"prefix_text": ["w5"], "text": ["w6"]}),
        ("/loglikelihood-rolling", {"text": ["w6"]}),
    ],
)
def test_prompts_are_not_scored(path: str, body: dict[str, Any], url: str) -> None:
    assert "reads prompts with an encoder" in post(url, path, **body)

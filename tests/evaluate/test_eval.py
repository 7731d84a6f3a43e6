"""Loss on a store and log-likelihoods of choices are those of transformers."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import meshwright as mw
from meshwright.cli.commands import run
from meshwright.data import ByteTokenizer, pack

TEXTS = ["Once upon a time there was a fox.", "The end.", "A river and a bridge, and a fox again."]
QUESTIONS = [
    {"question": "The fox is", "choices": [" red", " a bridge of stone"], "answer": 0},
    {"question": "Once", "choices": [" upon", "!", " more"], "answer": 2},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model") / "llama"
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def logprobs(folder: Path, tokens: list[int]) -> np.ndarray:
    """Of each token after those before it, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        found = model(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return found[range(len(tokens) - 1), tokens[1:]].numpy()


def test_the_loss_of_a_store_is_that_of_transformers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": line}) for line in TEXTS))
    pack([text], tmp_path / "text.store", ByteTokenizer())
    words = ["eval", str(folder), "--tokenizer", "bytes", "--data", str(tmp_path / "text.store")]
    run([*words, "--seq", "128", "--batch", "2", "--mesh", "tp=2", "--json"])
    found = json.loads(capsys.readouterr().out)
    expected = np.concatenate([logprobs(folder, [*line.encode(), 256]) for line in TEXTS])
    assert found["targets"] == len(expected)
    assert abs(found["loss"] + expected.mean()) < 1e-5
    assert found["perplexity"] == pytest.approx(np.exp(-expected.mean()), rel=1e-4)


def test_choices_have_the_log_likelihoods_of_transformers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from meshwright.evaluate import answer_choices, read_questions

    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, QUESTIONS)))
    questions = read_questions(file)
    engine = mw.EngineConfig(
        max_batch=2, chunk_shapes=((1, 32),), page_size=16, compile_first=False
    )
    with mw.load(folder, tokenizer="bytes", engine=engine) as model:
        scores = answer_choices(model, questions)
    for question, found in zip(questions, scores.logprobs, strict=True):
        begun = len(question.text.encode())
        for choice, logprob in zip(question.choices, found, strict=True):
            expected = logprobs(folder, list((question.text + choice).encode()))[begun - 1 :].sum()
            assert abs(logprob - expected) < 1e-4
    best = [found.index(max(found)) for found in scores.logprobs]
    right = [question.answer == choice for question, choice in zip(questions, best, strict=True)]
    assert scores.accuracy == sum(right) / 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1 is not JSON"),
        ('{"question": "a", "choices": ["b"], "answer": 0}', "with at least two choices"),
        ('{"question": "a", "choices": ["b", "c"], "answer": 2}', "answer=2 must be the number"),
        ("", "has no questions"),
    ],
)
def test_mistakes_are_told(
    line: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(line)
    with pytest.raises(SystemExit):
        run(["eval", "nowhere", "--choices", str(file)])
    assert words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(["eval", "nowhere"])
    assert "nothing to evaluate on" in capsys.readouterr().err


def test_without_lm_eval_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(SystemExit):
        run(["eval", "nowhere", "--tasks", "arc_easy"])
    said = capsys.readouterr().err
    assert "--tasks are those of lm-eval, which cannot be imported" in said
    assert "pip install -e '.[eval]'" in said
    with pytest.raises(SystemExit):
        run(["eval", "nowhere", "--limit", "3", "--data", "embedded"])
    assert "--limit is of --tasks; give some" in capsys.readouterr().err

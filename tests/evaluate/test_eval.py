"""Loss on a store and log-likelihoods of choices are those of transformers."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tests.word_tokenizer import word_tokenizer

import meshwright as mw
from meshwright.cli.commands import run
from meshwright.data import ByteTokenizer, load_tokenizer, pack
from meshwright.evaluate import check_scores_choices, store_loss
from meshwright.models import preset
from meshwright.serving import Source

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


def test_questions_may_begin_with_a_mark_and_hold_line_separators(tmp_path: Path) -> None:
    from meshwright.evaluate import read_questions

    file = tmp_path / "questions.jsonl"
    question = {"question": "a\u2028b", "choices": ["c", "d"], "answer": 1}
    file.write_text(json.dumps(question, ensure_ascii=False) + "\n", encoding="utf-8-sig")
    assert [one.text for one in read_questions(file)] == ["a\u2028b"]


def zeros(config: Any, tokenizer: Any, objective: str = "auto") -> Source:
    """A model without weights: all tokens are as likely."""

    def read(targets: Any) -> Any:
        return jax.tree.map(
            lambda one: jnp.zeros(one.shape, one.dtype, device=one.sharding), targets
        )

    ends = frozenset({tokenizer.end_of_document})
    return Source(config, tokenizer, ends, False, "zeros", read, objective=objective)


@pytest.mark.parametrize("objective", ["examples", "auto"])
def test_answers_are_the_targets_of_an_encoder_and_a_decoder(
    objective: str, tmp_path: Path
) -> None:
    """Those of a run trained on examples, and of examples that another model is evaluated on."""
    records = [{"inputs": "two and two", "targets": "four"}, {"inputs": "one", "targets": "1"}]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, records)))
    pack([tmp_path / "sums.jsonl"], tmp_path / "sums.store", ByteTokenizer())
    source = zeros(preset("t5-tiny"), ByteTokenizer(), objective)
    found = store_loss(source, str(tmp_path / "sums.store"), seq=32)
    assert found.targets == len("four") + len("1") + 2  # and their ends
    assert found.loss == pytest.approx(math.log(source.config.vocab), rel=1e-5)


def test_data_of_another_kind_than_the_run_was_trained_on_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a fox")
    source = zeros(preset("t5-tiny"), ByteTokenizer(), "examples")
    with pytest.raises(
        mw.MeshwrightError, match=r"holds texts, .* on examples; give prompts with answers"
    ):
        store_loss(source, str(tmp_path / "a.txt"), seq=32)


def test_pairs_of_answers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}))
    pack([tmp_path / "a.jsonl"], tmp_path / "a.store", ByteTokenizer())
    with pytest.raises(mw.MeshwrightError, match=r"pairs of chosen and rejected answers, and eval"):
        store_loss(zeros(preset("tiny"), ByteTokenizer()), str(tmp_path / "a.store"))


def test_a_file_is_packed_with_the_tokenizer_of_the_model(tmp_path: Path) -> None:
    """Also of a run, whose folder has no tokenizer.json."""
    words = {"<end>": 0, "a": 1, "fox": 2, "ran": 3}
    (tmp_path / "tokenizer.json").write_text(json.dumps(word_tokenizer(words, ["<end>"])))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json", "<end>")
    (tmp_path / "a.txt").write_text("a fox ran a fox")
    found = store_loss(zeros(preset("tiny"), tokenizer), str(tmp_path / "a.txt"), seq=16)
    assert found.targets == 5  # each after the first, and the end


def test_choices_of_an_encoder_and_a_decoder_are_refused() -> None:
    with pytest.raises(mw.MeshwrightError, match="an encoder reads this model's prompts"):
        check_scores_choices(preset("t5-tiny"))


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

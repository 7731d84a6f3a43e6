"""`--eval.prompts`: evaluations continue texts as `generate` does from the same checkpoint."""

from pathlib import Path

import pytest
from tests.training.conftest import TrainCommand

import meshwright as mw
from meshwright.serving.samples import NEW_TOKENS
from meshwright.training import TrainConfig, train
from meshwright.training.config import EvalConfig
from meshwright.training.run.metrics import read_metrics
from meshwright.training.run.summary import samples

PROMPTS = ("Once upon", "The fox <ran>")


@pytest.mark.slow
def test_each_evaluation_continues_the_prompts(train_command: TrainCommand, tmp_path: Path) -> None:
    """On a mesh of which a replica is a part; the vocabulary is padded there."""
    run = tmp_path / "run"
    said = train_command(
        "tiny", "--steps", "2", "--batch", "8", "--seq", "32", "--mesh", "dp=2,fsdp=2,tp=2,sp=1",
        "--override", "layers=1", "vocab=321", "--eval.sequences", "4", "--eval.every", "1",
        "--eval.prompts", *PROMPTS, "--cpu-devices", "8", "--run", str(run),
    )  # fmt: skip
    told = dict(samples(read_metrics(run)))
    assert list(told) == [2, 1]
    with mw.load(run) as model:
        right = model.generate(PROMPTS, NEW_TOKENS, temperature=0)
    assert [(one["prompt"], one["text"]) for one in told[2]] == [
        (prompt, done.text) for prompt, done in zip(PROMPTS, right, strict=True)
    ]
    assert said.count("' continues ") == 4
    page = (run / "run.html").read_text()
    assert "<b>The fox &lt;ran&gt;</b>" in page


def test_prompts_that_nobody_continues_are_refused(tmp_path: Path) -> None:
    with pytest.raises(mw.MeshwrightError, match=r"eval\.prompts needs evaluations.*--eval\.seq"):
        EvalConfig(prompts=PROMPTS)
    settings = EvalConfig(prompts=PROMPTS, sequences=4)
    config = TrainConfig("tiny", batch=16, seq=64, steps=1, eval=settings, run=tmp_path / "run")
    with pytest.raises(mw.MeshwrightError, match=r"eval\.prompts are continued by mw\.train alone"):
        train(config)

"""lm-eval's tasks on the engine: a local task, against lm-eval's own model of transformers."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.evaluate.test_eval import QUESTIONS

import meshwright as mw
from meshwright.cli.commands import run
from meshwright.data import ByteTokenizer, tokenizer_files
from meshwright.evaluate import Tasks, run_tasks
from meshwright.models import abstract_arrays, override, preset, save_hf

pytest.importorskip("lm_eval", reason="lm-eval is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

TASKS = {
    "foxes": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices[:2]}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: brier_score}]
""",
    "fox_texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}{{choices[0]}}"
metric_list: [{metric: byte_perplexity}]
""",
    "fox_answers": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["e", "."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: chrf}]
""",
}
QUESTION_COUNT = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights, and a tokenizer of bytes."""
    folder, files = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("tokenizer")
    for name, content in tokenizer_files(ByteTokenizer()).items():
        (files / name).write_text(json.dumps(content))
    config = override(preset("tiny"), ("layers=1", "max_seq=96", "vocab=257"), 96)
    generator = np.random.default_rng(0)

    def array(spec: Any) -> np.ndarray:
        return generator.normal(1.0 if spec.ndim < 3 else 0.0, 0.2, spec.shape).astype("f")

    params = jax.tree.map(array, abstract_arrays(config))
    params["embedding"] -= 1
    return save_hf(folder / "model", params, config, dtype=jnp.float32, tokenizer=files)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks that read a local file."""
    folder = tmp_path_factory.mktemp("yaml")
    lines = [json.dumps(QUESTIONS[i % 2] | {"answer": i // 2 % 2}) for i in range(QUESTION_COUNT)]
    (folder / "questions.jsonl").write_text("\n".join(lines))
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {folder}/questions.jsonl}}\n"
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}test_split: train\n{text}")
    return folder


def metrics(results: Any) -> dict[str, float]:
    """By task and name, of those that differ between models."""
    return {
        f"{task}/{name}": value
        for task, values in results.items()
        for name, value in values.items()
        if isinstance(value, float) and "stderr" not in name
    }


def test_metrics_are_those_of_transformers(model: Path, tasks: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    theirs = simple_evaluate(
        "hf", model_args={"pretrained": str(model), "dtype": "float32"}, tasks=[*TASKS],
        device="cpu", task_manager=TaskManager(include_path=str(tasks)), log_samples=False,
    )  # fmt: skip
    engine = mw.EngineConfig(
        max_batch=4, max_length=96, chunk_shapes=((1, 32),), page_size=16, compile_first=False
    )
    with mw.load(model, engine=engine) as loaded:
        ours = run_tasks(loaded, Tasks((*TASKS,), tasks))
    expected = metrics(theirs["results"])
    assert metrics(ours.data()["tasks"]) == pytest.approx(expected, rel=1e-5)
    assert len(expected) == 5


def test_one_command_prints_the_table(
    model: Path, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(model), "--tasks", "foxes", "--include-path", str(tasks), "--limit", "2"]
    run(words)
    table = capsys.readouterr().out
    assert "|foxes|" in table.replace(" ", "")
    assert "|acc_norm|" in table.replace(" ", "")
    questions = tasks.parent / "questions.jsonl"
    lines = map(json.loads, (tasks / "questions.jsonl").read_text().splitlines()[:2])
    same = [json.dumps(line | {"choices": line["choices"][:2]}) for line in lines]
    questions.write_text("\n".join(same))
    run([*words, "--choices", str(questions), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["tasks"]["foxes"]["acc,none"] == found["accuracy"]
    for wrong, told in (
        (["--tasks", "fexes"], "lm-eval has no task 'fexes'; did you mean 'foxes'"),
        (["--tasks", "foxes", "--apply-chat-template"], "has no chat template"),
    ):
        with pytest.raises(SystemExit):
            run(["eval", str(model), "--include-path", str(tasks), *wrong])
        assert told in capsys.readouterr().err

"""`meshwright eval`: loss and perplexity on data, multiple choice, lm-eval's tasks."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshwright.cli.flags import simulate
from meshwright.errors import MeshwrightError
from meshwright.present import count

if TYPE_CHECKING:
    from meshwright.evaluate import Tasks


@dataclasses.dataclass(frozen=True)
class EvalSettings:
    """Model, what to evaluate on, placement and output."""

    model: str
    """Folder of a run or of a Hugging Face model, or its name on the Hub (org/name)."""
    data: str | None = None
    """A token store, or a file that is packed on first use: its loss and perplexity."""
    choices: Path | None = None
    """Questions with choices, a line of JSON each: how many the model answers right."""
    tasks: str | None = None
    """Tasks of lm-eval, such as arc_easy,hellaswag: its table of metrics."""
    include_path: Path | None = None
    """Folder of YAML files that describe more tasks."""
    num_fewshot: int | None = None
    """Examples before each question of a task; by default as many as the task says."""
    limit: int | None = None
    """Most questions of each task."""
    apply_chat_template: bool = False
    """Ask the tasks' questions as messages, by the model's chat template."""
    adapter: str | None = None
    """Adapter that is merged into the model: a folder of PEFT or of a run with LoRA, or a name on
    the Hub."""
    batch: int = 8
    """Sequences of the data that are computed together."""
    seq: int = 512
    """Length of these sequences in tokens."""
    mesh: str = "dp=1,fsdp=1,tp=1,sp=1"
    """Mesh axes and sizes; the default is one device."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of matmuls; auto: bfloat16 on accelerators, float32 on CPUs."""
    step: int | None = None
    """Step of the checkpoint; the latest by default."""
    tokenizer: str | None = None
    """"bytes", a tokenizer.json or its folder, instead of the folder's own."""
    end_token: str | None = None
    """Token that ends a document, if the tokenizer files do not name it."""
    json: bool = False
    """Print JSON."""
    cpu_devices: int | None = None
    """Simulate this number of devices on the CPU."""


def evaluate(settings: EvalSettings) -> None:
    """Evaluate the model of a run or of a Hugging Face folder.

    meshwright eval runs/first --data held-out.store
    """
    if settings.data is None and settings.choices is None and settings.tasks is None:
        raise MeshwrightError(
            "nothing to evaluate on; give --data STORE, --choices FILE.jsonl for questions, or "
            "--tasks of lm-eval, such as arc_easy,hellaswag"
        )
    from meshwright.evaluate import (
        answer_choices,
        check_scores_choices,
        read_questions,
        run_tasks,
        store_loss,
    )
    from meshwright.hub import MODEL, local_folder
    from meshwright.serving import chat_folder, load, model_source

    simulate(settings.cpu_devices)
    model, mesh, dtype, data = settings.model, settings.mesh, settings.dtype, settings.data
    named: dict[str, Any] = {
        "step": settings.step, "tokenizer": settings.tokenizer, "end_token": settings.end_token,
        "adapter": settings.adapter,
    }  # fmt: skip
    questions = None if settings.choices is None else read_questions(settings.choices)
    tasks = _tasks(settings)
    manager = None if tasks is None else tasks.manager()  # or an error, before weights are read
    results: dict[str, Any] = {}
    if questions is not None:
        check_scores_choices(model_source(model, **named).config)
    if data is not None:
        loss = store_loss(
            model_source(model, **named), data, model=str(chat_folder(local_folder(model, MODEL))),
            batch=settings.batch, seq=settings.seq, mesh=mesh, dtype=dtype,
        )  # fmt: skip
        results |= loss.data()
        mean = f"loss {loss.loss:.4f}, perplexity {loss.perplexity:.2f}"
        _print(f"{mean} over {loss.targets:,} targets of {data}", settings)
    if questions is None and tasks is None:
        loaded: Any = contextlib.nullcontext()
    else:
        loaded = load(model, mesh, dtype, **named)
    with loaded:
        if questions is not None:
            scores = answer_choices(loaded, questions)
            results |= scores.data()
            accuracy = f"accuracy {scores.accuracy:.3f}, normalized by length "
            accuracy += f"{scores.normalized_accuracy:.3f}"
            _print(f"{accuracy} over {count(len(questions), 'question')}", settings)
        if tasks is not None:
            measured = run_tasks(loaded, tasks, manager)
            results |= measured.data()
            _print(measured.table(), settings)
    if settings.json:
        print(json.dumps(results))


def _tasks(settings: EvalSettings) -> "Tasks | None":
    from meshwright.evaluate import Tasks

    rest = {name: getattr(settings, name) for name in (
        "include_path", "num_fewshot", "limit", "apply_chat_template"
    )}  # fmt: skip
    if settings.tasks is None:
        for name, value in rest.items():
            if value not in (None, False):
                raise MeshwrightError(f"--{name.replace('_', '-')} is of --tasks; give some")
        return None
    names = [name.strip() for name in settings.tasks.split(",")]
    return Tasks(tuple(filter(None, names)), **rest)


def _print(text: str, settings: EvalSettings) -> None:
    if not settings.json:
        print(text)

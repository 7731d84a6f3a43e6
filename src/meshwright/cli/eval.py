"""`meshwright eval`: loss and perplexity on data, multiple choice."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import tyro

from meshwright.errors import MeshwrightError
from meshwright.present import count


@dataclasses.dataclass(frozen=True)
class EvalSettings:
    """Model, what to evaluate on, placement and output."""

    model: tyro.conf.Positional[str]
    """Folder of a run or of a Hugging Face model, or its name on the Hub (org/name)."""
    data: str | None = None
    """A token store, or a file that is packed on first use: its loss and perplexity."""
    choices: Path | None = None
    """Questions with choices, a line of JSON each: how many the model answers right."""
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


def evaluate(settings: tyro.conf.OmitArgPrefixes[EvalSettings]) -> None:
    """Evaluate the model of a run or of a Hugging Face folder.

    meshwright eval runs/first --data held-out.store
    """
    if settings.data is None and settings.choices is None:
        raise MeshwrightError(
            "nothing to evaluate on; give --data STORE, or --choices FILE.jsonl for questions"
        )
    from meshwright.evaluate import answer_choices, read_questions, store_loss
    from meshwright.launch import make_room_for_cpu_collectives, simulate_devices
    from meshwright.serving import chat_folder, load, model_source

    make_room_for_cpu_collectives()
    if settings.cpu_devices is not None:
        simulate_devices(settings.cpu_devices)
    model, mesh, dtype, data = settings.model, settings.mesh, settings.dtype, settings.data
    named: dict[str, Any] = {
        "step": settings.step, "tokenizer": settings.tokenizer, "end_token": settings.end_token
    }  # fmt: skip
    questions = None if settings.choices is None else read_questions(settings.choices)
    results: dict[str, Any] = {}
    if data is not None:
        loss = store_loss(
            model_source(model, **named), data,
            model=str(chat_folder(model)), batch=settings.batch, seq=settings.seq, mesh=mesh,
            dtype=dtype,
        )  # fmt: skip
        results |= loss.data()
        mean = f"loss {loss.loss:.4f}, perplexity {loss.perplexity:.2f}"
        _print(f"{mean} over {loss.targets:,} targets of {data}", settings)
    if questions is not None:
        with load(model, mesh, dtype, **named) as loaded:
            scores = answer_choices(loaded, questions)
        results |= scores.data()
        accuracy = f"accuracy {scores.accuracy:.3f}, normalized by length "
        accuracy += f"{scores.normalized_accuracy:.3f}"
        _print(f"{accuracy} over {count(len(questions), 'question')}", settings)
    if settings.json:
        print(json.dumps(results))


def _print(text: str, settings: EvalSettings) -> None:
    if not settings.json:
        print(text)

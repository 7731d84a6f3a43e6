"""Long prompts on meshes with sp: a prefill with context parallelism, and steps for the rest."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from tests.serving.models import BASE, KINDS
from tests.serving.test_engine import SMALL, check_logprobs

from meshwright.audits import audit
from meshwright.errors import MeshwrightError
from meshwright.models.decoder import DecoderConfig
from meshwright.serving import Engine, EngineConfig, Model, Request, Sampling
from meshwright.serving.program_inputs import PromptShape
from meshwright.serving.programs import Steps
from meshwright.serving.prompts import prompt_shapes
from meshwright.serving.source import generation_mesh

RandomModel = Callable[..., Model]
LONG = tuple((7 * i + 3) % 61 for i in range(90))
# as long as a program takes, too short for one, and longer than all of them
PROMPTS = [LONG[:65], LONG[40:42], LONG]
CONFIG = dataclasses.replace(
    SMALL, chunk_shapes=((2, 8),), batch_buckets=(4,), prompt_shapes=((1, 32), (1, 64)),
    compile_first=False,
)  # fmt: skip


def taken(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[PromptShape]:
    """The shapes of the programs for whole prompts that an engine will run."""
    shapes: list[PromptShape] = []
    fill = engine._executor.programs.fill

    def noted(shape: PromptShape, inputs: Any) -> None:
        shapes.append(shape)
        fill(shape, inputs)

    monkeypatch.setattr(engine._executor.programs, "fill", noted)
    return shapes


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("qwen 3", "sp=4,tp=2"),
        pytest.param("mistral", "fsdp=2,sp=4", marks=pytest.mark.slow),
        pytest.param("llama", "fsdp=2,tp=2,sp=2", marks=pytest.mark.slow),
    ],
)
def test_long_prompts_have_the_logits_of_training(
    kind: str, mesh: str, random_model: RandomModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(KINDS[kind], generation_mesh(mesh))
    with Engine(model, CONFIG) as engine:
        shapes = taken(engine, monkeypatch)
        check_logprobs(engine, model, PROMPTS)
        assert shapes == [PromptShape(1, 64)] * 2
        assert engine.stats().pages_used == 0


@pytest.mark.slow
def test_their_keys_are_reused_and_computed_again_after_preemption(
    random_model: RandomModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(BASE, generation_mesh("sp=2"))
    requests = [
        Request(prompt, Sampling(0), 30) for prompt in (LONG[:30], LONG[10:60], LONG[30:70])
    ]
    with Engine(model, CONFIG) as engine:
        alone = [engine.generate([request])[0].tokens for request in requests]
        [again] = engine.generate(requests[1:2])
        assert (again.cached_tokens, again.tokens) == (48, alone[1])
    with Engine(model, dataclasses.replace(CONFIG, pages=17)) as few:
        shapes = taken(few, monkeypatch)
        assert [done.tokens for done in few.generate(requests)] == alone
        assert few.stats().preemptions > 0
        assert len(shapes) >= len(requests)
    with Engine(model, dataclasses.replace(CONFIG, weights="int8")) as quantized:
        [done] = quantized.generate(requests[:1])
        assert len(done.tokens) == 30


@pytest.fixture
def compiled() -> Callable[[str], Any]:
    """The program for a prompt of 1,024 tokens on a mesh, compiled without weights."""
    config = DecoderConfig(64, 3, 128, 8, 4, 16, 512, max_seq=1024)

    def compile_on(mesh: str) -> Any:
        settings = EngineConfig(max_batch=4, page_size=16, chunk=64)
        steps = Steps(config, generation_mesh(mesh), jnp.float32, settings, 1024)
        return steps.lower(PromptShape(1, 1024), 80).compile()

    return compile_on


def test_a_device_computes_its_share_of_a_long_prompt(compiled: Callable[[str], Any]) -> None:
    whole, share = (compiled(mesh) for mesh in ("tp=1", "sp=4"))
    tokens, embed, heads, mlp = 1024, 128, 8 * 16, 512
    projections = 2 * tokens * embed * heads * 2  # queries, and a quarter each for keys and values
    attention = 2 * tokens * tokens * heads * 2
    feed_forward = 2 * tokens * embed * mlp * 3
    # the last layer has keys alone: nothing reads its output
    least = 2 * (attention / 2 + feed_forward + projections)
    flops, of_share = (program.cost_analysis()["flops"] for program in (whole, share))
    assert flops > least
    assert of_share < 1.05 * flops / 4
    temporary, of_part = (
        program.memory_analysis().temp_size_in_bytes for program in (whole, share)
    )
    assert of_part < 0.4 * temporary
    sent = audit(share.as_text(), {"dp": 1, "fsdp": 1, "tp": 1, "sp": 4})
    assert {axis for row in sent.rows for axis in row.axes} == {"sp"}


def test_lengths_that_devices_cannot_share_are_refused(random_model: RandomModel) -> None:
    model = random_model(BASE, generation_mesh("sp=2,fsdp=2"))
    with pytest.raises(MeshwrightError, match="must be multiples of 8"):
        Engine(model, dataclasses.replace(CONFIG, prompt_shapes=((1, 36),)))


@pytest.mark.parametrize(
    ("mesh", "max_length", "lengths"),
    [
        ({"sp": 1, "tp": 8}, 8192, []),
        ({"sp": 4}, 8192, [1024, 2048, 4096, 8192]),
        ({"sp": 4, "fsdp": 3}, 1000, [1008]),
        ({"sp": 4}, 512, []),
    ],
)
def test_default_shapes(mesh: dict[str, int], max_length: int, lengths: list[int]) -> None:
    shapes = prompt_shapes(EngineConfig(), BASE, mesh, max_length)
    assert shapes == tuple(PromptShape(1, length) for length in lengths)

"""Greedy tokens of the engine are those of transformers: see tools/make_greedy_reference.py."""

import json
from pathlib import Path

import pytest

from meshwright.serving import Engine, EngineConfig, Request, Sampling
from meshwright.serving.source import generation_mesh, load_weights, model_source

TESTS = Path(__file__).parents[1]
REFERENCE = json.loads((TESTS / "serving" / "greedy_reference.json").read_text())
# prompts are computed in chunks beside others that decode, and more wait than run
CONFIG = EngineConfig(
    max_batch=4, max_length=128, page_size=8, chunk_shapes=((2, 16),), batch_buckets=(4,),
    compile_first=False,
)  # fmt: skip
CASES = [("llama-3.1-scaling", "fsdp=2,tp=2,sp=2"), ("qwen3-sharded", "tp=1")]
LATER = [("mistral-window", "tp=2"), ("qwen2.5-tied", "tp=4"), ("qwen3-sharded", "sp=4")]
LATER += [(name, "tp=1") for name in REFERENCE if (name, "tp=1") not in CASES]


@pytest.mark.parametrize(
    ("name", "mesh"), [*CASES, *(pytest.param(*each, marks=pytest.mark.slow) for each in LATER)]
)
def test_greedy_tokens_are_those_of_transformers(name: str, mesh: str, numbers: Path) -> None:
    folder = TESTS / "models" / "hf_reference" / name
    model = load_weights(model_source(folder, tokenizer=str(numbers)), generation_mesh(mesh))
    expected = [tuple(case["tokens"]) for case in REFERENCE[name]]
    requests = [
        Request(tuple(case["prompt"]), Sampling(0), len(case["tokens"]), ignore_end=True)
        for case in REFERENCE[name]
    ]
    with Engine(model, CONFIG) as engine:
        together = engine.generate(requests)
        assert [done.tokens for done in together] == expected
        again = engine.generate(requests[::-1])[::-1]  # with the keys of the first time
        assert [done.tokens for done in again] == expected
        for request, done in zip(requests, again, strict=True):
            assert done.cached_tokens == (len(request.prompt) - 1) // 8 * 8

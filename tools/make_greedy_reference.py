"""Greedy tokens of transformers' generate, the outside reference of the engine.

    python tools/make_greedy_reference.py        # writes tests/serving/greedy_reference.json

Needs torch and transformers, which Meshwright itself does not. The models are those that
make_hf_reference.py wrote; each prompt is generated from alone, in float32, past end tokens.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

TESTS = Path(__file__).parents[1] / "tests"
NEW = 20
CLEAR = 2e-4  # the two largest logits must differ by more: rounding is below 1e-4


def prompts_of(name: str) -> list[list[int]]:
    """Lengths around those of pages and chunks; some begin alike, so that prefixes are reused."""
    rng = np.random.default_rng(sum(name.encode()))
    long = rng.integers(0, 48, 61).tolist()
    other = rng.integers(0, 48, 9).tolist()
    return [long[:16], other[:1], long, long[:40] + other, other, long[:17], (other * 5)[:33]]


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """The tokens after a prompt; an error if two logits are too close to tell them apart."""
    settings = transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    inputs = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), generation_config=settings
        )
    for step in out.logits:
        first, second = step[0].topk(2).values.tolist()
        if first - second < CLEAR:
            raise SystemExit(f"{prompt}: logits {first} and {second} are a near tie")
    return [int(token) for token in out.sequences[0, len(prompt) :]]


def main() -> None:
    reference: dict[str, list[dict[str, list[int]]]] = {}
    for folder in sorted((TESTS / "models" / "hf_reference").iterdir()):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        model.generation_config = transformers.GenerationConfig()
        reference[folder.name] = [
            {"prompt": prompt, "tokens": greedy(model, prompt)}
            for prompt in prompts_of(folder.name)
        ]
    rows = [
        f"  {json.dumps(name)}: [\n    " + ",\n    ".join(map(json.dumps, cases)) + "\n  ]"
        for name, cases in reference.items()
    ]
    file = TESTS / "serving" / "greedy_reference.json"
    file.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()

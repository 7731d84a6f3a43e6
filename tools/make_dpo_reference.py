"""DPO by trl of a tiny Llama: losses, metrics and gradients, the outside reference.

    python tools/make_dpo_reference.py            # writes tests/training/dpo_reference

Needs trl, peft and transformers. The folder has the weights of the reference (base), those of a
policy that has moved away from it, an adapter of PEFT, pairs of token ids, and for each case of
CASES what trl's DPOTrainer computes of one batch in float32.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import peft
import tokenizers
import torch
import transformers
import trl
from safetensors.torch import save_file

REFERENCE = Path(__file__).parents[1] / "tests" / "training" / "dpo_reference"
SIZES = {
    "vocab_size": 47, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "sigmoid": {"loss_type": "sigmoid", "beta": 0.5},
    "sigmoid_norm": {"loss_type": "sigmoid_norm", "beta": 5.0},
    "lora": {"loss_type": "sigmoid", "beta": 0.5},
}
METRICS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
METRICS += ("logps/chosen", "logps/rejected")


def moved(model: Any, by: float, only: str = "") -> Any:
    """The model with noise on its parameters, or on those with `only` in their name."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only in name:
                parameter += by * torch.randn_like(parameter)
    return model


def pairs() -> dict[str, list[list[int]]]:
    """Of different lengths, in the columns of trl."""
    random = np.random.default_rng(0)

    def texts(most: int) -> list[list[int]]:
        lengths = random.integers(1, most, 12)
        return [random.integers(0, SIZES["vocab_size"], length).tolist() for length in lengths]

    return {"prompt_ids": texts(5), "chosen_ids": texts(6), "rejected_ids": texts(8)}


def by_trl(policy: Any, base: Any, settings: dict[str, Any], lora: Any = None) -> dict[str, Any]:
    """The metrics and gradients of one batch of all pairs; with `lora` of an adapter, no base."""
    words = {str(i): i for i in range(SIZES["vocab_size"])}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0")),
        pad_token="0", eos_token="1",
    )  # fmt: skip
    config = trl.DPOConfig(
        "unused", bf16=False, use_cpu=True, report_to=[], gradient_checkpointing=False,
        disable_dropout=True, **settings,
    )  # fmt: skip
    # a trainer has texts; the batch is made of token ids by its own collator
    texts = datasets.Dataset.from_dict({"prompt": ["2"], "chosen": ["3"], "rejected": ["4"]})
    trainer = trl.DPOTrainer(
        policy, base, args=config, train_dataset=texts, processing_class=tokenizer, peft_config=lora
    )
    if lora is not None:
        # moved here: of an adapter that is given, trl would keep a copy as the reference
        moved(trainer.model, 0.2, "lora_").save_pretrained("adapter")
        Path("adapter/README.md").unlink()
    columns = pairs()
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    batch = trainer.data_collator(list(rows))
    loss = trainer.compute_loss(trainer.model.train(), batch)
    loss.backward()
    metrics = {name: trainer._metrics["train"][name][0] for name in METRICS}
    named = trainer.model.named_parameters()
    gradients = {name: p.grad.contiguous() for name, p in named if p.grad is not None}
    return {"metrics": {"loss": loss.item(), **metrics}, "gradients": gradients}


def main() -> None:
    shutil.rmtree(REFERENCE, ignore_errors=True)
    REFERENCE.mkdir()
    os.chdir(REFERENCE)  # the adapter notes where its base is
    transformers.set_seed(0)
    # far from uniform, so that a wrong token shows
    base = moved(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), 0.2)
    base.save_pretrained("base")
    policy = moved(transformers.LlamaForCausalLM.from_pretrained("base"), 0.05)
    policy.save_pretrained("policy")
    for folder in ("base", "policy"):
        Path(folder, "generation_config.json").unlink()
    chosen = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"])
    Path("pairs.json").write_text(json.dumps(pairs()) + "\n")
    found = {"trl": trl.__version__, "cases": {}}
    for name, settings in CASES.items():
        folder, lora = ("base", chosen) if name == "lora" else ("policy", None)
        start = transformers.LlamaForCausalLM.from_pretrained(folder)
        result = by_trl(start, None if lora else base, settings, lora)
        save_file(result["gradients"], f"gradients-{name}.safetensors")
        found["cases"][name] = {"settings": settings, "metrics": result["metrics"]}
    Path("expected.json").write_text(json.dumps(found, indent=1) + "\n")
    shutil.rmtree("unused")


if __name__ == "__main__":
    main()

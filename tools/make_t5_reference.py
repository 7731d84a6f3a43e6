"""Tiny T5s, and the logits and greedy generations of transformers: the outside reference.

    python tools/make_t5_reference.py            # writes tests/models/t5_reference

Needs torch and transformers, which Meshwright itself does not. Every model is a folder with
config.json, its weights, encoder_tokens.npy (padded with 0), tokens.npy, logits.npy (float32, from
the weights as stored) and generated.npy (start token first, 0 after the end token 1).
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

REFERENCE = Path(__file__).parents[1] / "tests" / "models" / "t5_reference"
SIZES = {
    "vocab_size": 48, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
}  # fmt: skip

# name: fields, dtype of the weights, whether the LM head is the embedding; `old`: config.json as
# transformers wrote it before version 5
MODELS: dict[str, dict[str, Any]] = {
    "t5-1.0": {"fields": {"n_positions": 64}, "old": True, "tied": True},
    "t5-1.0-new": {"fields": {"num_layers": 3, "num_decoder_layers": 2}, "tied": True},
    "t5-1.1": {"fields": {"feed_forward_proj": "gated-gelu", "d_kv": 6}, "tied": False},
    "flan-t5": {
        "fields": {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 1},
        "old": True, "tied": False, "dtype": "float32",
    },
    "ul2": {"fields": {"feed_forward_proj": "gated-silu", "d_kv": 8}, "old": True, "tied": False},
}  # fmt: skip


def make(name: str, folder: Path) -> None:
    """One model, its tokens, its logits and what it generates."""
    about = MODELS[name]
    seed = sum(name.encode())
    torch.manual_seed(seed)
    fields = SIZES | about["fields"]
    config = transformers.T5Config(**fields, tie_word_embeddings=about["tied"])
    model = transformers.T5ForConditionalGeneration(config)
    if not about["tied"]:  # transformers 5 ties them whatever the config says
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            # far from initial values, so that a norm or a bias that is left out shows
            if "norm" in weight_name:
                weight.uniform_(0.5, 1.5)
            elif "relative_attention_bias" in weight_name:
                weight.normal_(0.0, 1.0)
            elif "shared" in weight_name:  # small, else a tied head repeats the last token
                weight.normal_(0.0, 0.5)
            elif weight_name.endswith((".q.weight", ".k.weight")):
                weight.normal_(0.0, 0.6 * weight.shape[-1] ** -0.5)
            else:
                weight.normal_(0.0, 2.0 * weight.shape[-1] ** -0.5)
    model.to(getattr(torch, about.get("dtype", "bfloat16")))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if about.get("old"):
        written = json.loads((folder / "config.json").read_text())
        for field in ("scale_decoder_outputs", "dtype", "classifier_dropout"):
            written.pop(field, None)
        written |= {"tie_word_embeddings": about["tied"], "output_past": True}
        written["torch_dtype"] = about.get("dtype", "bfloat16")
        (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    rng = np.random.default_rng(seed)
    inputs = rng.integers(2, 48, (4, 24))
    for row, end in enumerate((24, 17, 9, 24)):
        inputs[row, end:] = 0
    tokens = rng.integers(2, 48, (4, 12))
    tokens[:, 0] = 0
    np.save(folder / "encoder_tokens.npy", inputs.astype(np.int32))
    np.save(folder / "tokens.npy", tokens.astype(np.int32))
    found = read(folder)
    mask = torch.as_tensor(inputs != 0, dtype=torch.int64)
    given = torch.as_tensor(inputs, dtype=torch.int64)
    with torch.no_grad():
        out = found(
            input_ids=given, attention_mask=mask,
            decoder_input_ids=torch.as_tensor(tokens, dtype=torch.int64),
        )  # fmt: skip
        generated = found.generate(
            input_ids=given, attention_mask=mask, max_new_tokens=16, do_sample=False, num_beams=1
        )
    np.save(folder / "logits.npy", out.logits.numpy())
    np.save(folder / "generated.npy", generated.numpy().astype(np.int32))


def read(folder: Path) -> Any:
    """The model as transformers reads it, in float32."""
    return transformers.T5ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def main() -> None:
    for name in MODELS:
        shutil.rmtree(REFERENCE / name, ignore_errors=True)
        make(name, REFERENCE / name)


if __name__ == "__main__":
    main()

"""Tiny Hugging Face models and the logits transformers computes for them, the outside reference.

    python tools/make_hf_reference.py            # writes tests/models/hf_reference
    python tools/make_hf_reference.py --check    # what save_hf writes gives transformers the same

Needs torch and transformers, which Meshwright itself does not. Every model is a folder with
config.json, its weights, tokens.npy and logits.npy (float32, from the weights as stored).
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

REFERENCE = Path(__file__).parents[1] / "tests" / "models" / "hf_reference"
SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 6.4, "original_max_position_embeddings": 40}

# name: class, fields, dtype of the weights, length of the tokens; `old` fields are written to
# config.json as older versions of transformers wrote them
MODELS: dict[str, dict[str, Any]] = {
    "llama-mha": {"class": "Llama", "fields": {"num_key_value_heads": 4}, "dtype": "float32"},
    "llama-3.1-scaling": {
        "class": "Llama",
        "fields": {"rope_parameters": LLAMA3 | {"rope_theta": 1000.0}},
        "length": 80,
    },
    "llama-linear": {
        "class": "Llama",
        "old": {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    },
    "llama-yarn": {
        "class": "Llama",
        "fields": {"head_dim": 16},
        # these move both ends of the ramp inside the 8 pairs of a head
        "old": {"rope_theta": 50.0, "rope_scaling": YARN | {"beta_fast": 1.0, "beta_slow": 0.25}},
        "length": 80,
    },
    "llama-yarn-mscale": {
        "class": "Llama",
        "old": {"rope_theta": 100.0, "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.5}},
    },
    "llama-biases": {"class": "Llama", "fields": {"attention_bias": True}, "dtype": "float16"},
    "mistral-window": {"class": "Mistral", "fields": {"sliding_window": 7}, "length": 32},
    "mistral-wide-heads": {"class": "Mistral", "fields": {"sliding_window": None, "head_dim": 12}},
    "qwen2.5-tied": {
        "class": "Qwen2",
        "fields": {"tie_word_embeddings": True},
        "old": {"rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": 9,
                "max_window_layers": 1},
    },
    "qwen2-window": {
        "class": "Qwen2",
        "fields": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    },
    "qwen3-sharded": {
        "class": "Qwen3", "fields": {"head_dim": 16, "rms_norm_eps": 1e-6}, "file": "24KB",
    },
    "qwen3-biases": {
        "class": "Qwen3", "fields": {"head_dim": 10, "attention_bias": True}, "dtype": "float32",
    },
}  # fmt: skip


def make(name: str, folder: Path) -> None:
    """One model, its tokens and its logits."""
    about = MODELS[name]
    seed = sum(name.encode())
    torch.manual_seed(seed)
    fields = SIZES | about.get("fields", {}) | about.get("old", {})
    config = getattr(transformers, f"{about['class']}Config")(**fields)
    model = getattr(transformers, f"{about['class']}ForCausalLM")(config)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            # far from initial values, so that a norm or a bias that is left out or put in the wrong
            # place shows
            if "norm" in weight_name:
                weight.uniform_(0.5, 1.5)
            elif weight_name.endswith("bias"):
                weight.normal_(0.0, 0.5)
            else:
                weight.normal_(0.0, 1.2 * weight.shape[-1] ** -0.5)
    model.to(getattr(torch, about.get("dtype", "bfloat16")))
    model.save_pretrained(folder, max_shard_size=about.get("file", "5GB"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if "old" in about:
        written = json.loads((folder / "config.json").read_text())
        for field in ("rope_parameters", "layer_types", "dtype"):
            written.pop(field, None)
        written |= about["old"] | {"torch_dtype": about.get("dtype", "bfloat16")}
        (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    tokens = np.random.default_rng(seed).integers(0, 48, (2, about.get("length", 24)))
    np.save(folder / "tokens.npy", tokens.astype(np.int32))
    np.save(folder / "logits.npy", logits(folder, tokens))


def logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """What transformers computes in float32 from a folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model.eval()(torch.as_tensor(tokens, dtype=torch.int64)).logits.numpy()


def check(name: str, folder: Path) -> tuple[float, list[str]]:
    """The largest difference of logits once Meshwright has read and written the model.

    Also the fields that transformers reads otherwise.
    """
    import jax.numpy as jnp

    from meshwright.models import load_hf, save_hf
    from meshwright.models.decoder.hf_config import from_hf_config

    config = from_hf_config(REFERENCE / name)
    params = load_hf(REFERENCE / name, config)
    # float32 also for what came as float16, which bfloat16 cannot hold
    is_bfloat16 = MODELS[name].get("dtype", "bfloat16") == "bfloat16"
    save_hf(
        folder,
        params,
        config,
        dtype=jnp.bfloat16 if is_bfloat16 else jnp.float32,
        max_file_bytes=30_000,
    )
    tokens = np.load(REFERENCE / name / "tokens.npy")
    # computed here: those that are kept may be another torch's, which rounds otherwise
    expected, got = (logits(place, tokens) for place in (REFERENCE / name, folder))
    before, after = (
        transformers.AutoConfig.from_pretrained(place).to_dict()
        for place in (REFERENCE / name, folder)
    )
    said_of_files = ("dtype", "_name_or_path")
    differ = [
        field
        for field in sorted(before.keys() | after.keys())
        if before.get(field) != after.get(field) and field not in said_of_files
    ]
    return float(np.abs(got - expected).max()), differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="check what save_hf writes")
    arguments = parser.parse_args()
    if not arguments.check:
        for name in MODELS:
            shutil.rmtree(REFERENCE / name, ignore_errors=True)
            make(name, REFERENCE / name)
        return
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in MODELS:
            difference, fields = check(name, Path(scratch) / name)
            failed += difference > 1e-6 or bool(fields)
            other = f"; other fields: {', '.join(fields)}" if fields else ""
            print(f"{name:20} largest difference {difference:.1e}{other}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

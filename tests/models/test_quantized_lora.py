"""LoRA beside frozen matrices of 8 or 4 bits: against NumPy's rounding and PEFT's gradients."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from tests.models.peft_models import LLAMA_MODULES, add_adapter, check_gradients, on_mesh
from tests.ops.test_nf4 import LEVELS

from meshwright.models import LoraConfig

pytest.importorskip("peft")


def rounded(weight: np.ndarray, base: str) -> np.ndarray:
    """A matrix [outputs, inputs], as PyTorch has it, rounded to int8 or nf4 and back."""
    if base == "int8":
        scale = np.abs(weight).max(1, keepdims=True) / 127
        return (np.round(weight / scale) * scale).astype(np.float32)
    blocks = weight.reshape(-1, 64)
    scale = np.abs(blocks).max(1, keepdims=True)
    nearest = np.abs((blocks / scale)[..., None] - LEVELS).argmin(-1)
    return (LEVELS[nearest] * scale).reshape(weight.shape)


def tiny(folder: Path, base: str) -> Any:
    """PEFT's model with a random adapter and rounded weights; `base` holds them not rounded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "base")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name:
                weight.copy_(torch.tensor(rounded(weight.numpy(), base)))
    return add_adapter(model, LLAMA_MODULES, folder)


@pytest.mark.parametrize(
    ("base", "mesh", "compute"),
    [
        pytest.param("int8", "fsdp=2,tp=2", {}, marks=pytest.mark.slow),
        pytest.param("nf4", "dp=1", {}, marks=pytest.mark.slow),
        ("nf4", "fsdp=2,tp=2", {"layers": "unroll", "mlp_chunk": 4}),
        pytest.param(
            "nf4",
            "tp=2,sp=2",
            {"sequence_parallel": True, "remat": "full"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_gradient_is_that_beside_rounded_weights(
    base: str, mesh: str, compute: Any, tmp_path: Path
) -> None:
    model = tiny(tmp_path, base)
    lora: Any = {"rank": 4, "alpha": 6.0, "base": base}
    step, params = on_mesh(tmp_path, mesh, LoraConfig(**lora), **compute)
    for target, array in zip(
        jax.tree.leaves(step.state.params), jax.tree.leaves(params), strict=True
    ):
        assert (array.shape, array.dtype) == (target.shape, target.dtype)
        assert array.sharding.is_equivalent_to(target.sharding, array.ndim)
    check_gradients(model, step, params, tmp_path)

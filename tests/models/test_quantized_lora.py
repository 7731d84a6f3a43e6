"""LoRA beside frozen matrices of 8 or 4 bits: against NumPy's rounding and PEFT's gradients."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tests.ops.attention.programs import QUICKLY
from tests.ops.test_nf4 import LEVELS

import meshwright as mw
from meshwright.models import (
    ADAPTER,
    LoraConfig,
    LossConfig,
    family_of,
    from_hf_config,
    load_adapter,
    save_adapter,
)
from meshwright.training import TrainConfig, abstract_step
from meshwright.training.config import ComputeConfig
from meshwright.training.weights import start_weights

peft = pytest.importorskip("peft")

TOKENS = np.random.default_rng(0).integers(3, 60, (8, 17))
INPUTS, TARGETS = torch.tensor(TOKENS[:, :-1]), torch.tensor(TOKENS[:, 1:])


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
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    chosen = peft.LoraConfig(r=4, lora_alpha=6, target_modules=modules, init_lora_weights=False)
    found = peft.get_peft_model(model, chosen).eval()
    found.save_pretrained(folder / "adapter")
    return found


def on_mesh(folder: Path, base: str, mesh: str, **compute: Any) -> tuple[Any, Any]:
    """The step of a run with that adapter, and its parameters."""
    config = from_hf_config(folder / "base")
    lora: Any = {"rank": 4, "alpha": 6.0, "base": base}
    settings = TrainConfig(
        str(folder / "base"), mesh=mesh, batch=8, seq=16, lora=LoraConfig(**lora),
        compute=ComputeConfig(**compute),
    )  # fmt: skip
    spec = mw.MeshSpec.parse(mesh).with_standard_axes()
    devices = jax.devices()[: int(np.prod(spec.sizes))]
    step = abstract_step(settings, mw.mesh(spec, devices=devices, axis_types="explicit"))
    places = jax.tree.map(lambda target: target.sharding, {ADAPTER: step.state.params[ADAPTER]})
    factors, _ = load_adapter(folder / "adapter", config, places)
    return step, start_weights(step, config, folder / "base") | factors


@pytest.mark.parametrize(
    ("base", "mesh", "compute"),
    [
        ("int8", "fsdp=2,tp=2", {}),
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
    loss = torch.nn.functional.cross_entropy(model(input_ids=INPUTS).logits.mT, TARGETS)
    loss.backward()
    torch_gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    step, params = on_mesh(tmp_path, base, mesh, **compute)
    for target, array in zip(
        jax.tree.leaves(step.state.params), jax.tree.leaves(params), strict=True
    ):
        assert (array.shape, array.dtype) == (target.shape, target.dtype)
        assert array.sharding.is_equivalent_to(target.sharding, array.ndim)
    fields = {
        "tokens": TOKENS[:, :-1],
        "targets": TOKENS[:, 1:],
        "segments": np.ones((8, 16)),
        "positions": np.tile(np.arange(16), (8, 1)),
    }
    place = step.functions.batch_sharding.update(
        spec=jax.sharding.PartitionSpec(*step.functions.batch_sharding.spec[1:])
    )
    batch = {name: jax.device_put(x.astype(np.int32), place) for name, x in fields.items()}

    def total(factors: Any) -> Any:
        scale = jnp.float32(1 / TARGETS.numel())
        sums = family_of(step.model).loss(
            params | {ADAPTER: factors}, batch, scale, step.model, step.compute, LossConfig()
        )
        return sums.total(scale)

    with jax.set_mesh(step.mesh):
        found, gradients = jax.jit(jax.value_and_grad(total), compiler_options=QUICKLY)(
            params[ADAPTER]
        )
    assert abs(float(found) - loss.item()) < 1e-5
    out = save_adapter(
        tmp_path / "gradients", {ADAPTER: gradients}, step.model, step.config.lora, ""
    )
    from safetensors.torch import load_file

    ours = load_file(out / "adapter_model.safetensors")
    assert len(ours) == len(torch_gradients) == 2 * 7 * 2
    for name, gradient in torch_gradients.items():
        mine = ours[name.replace(".default", "")]
        assert (mine - gradient).abs().max() < 1e-5 * gradient.abs().max(), name

"""Models of PEFT with a random adapter, and the same on a mesh: for the tests of LoRA."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from tests.ops.attention.programs import QUICKLY

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

TOKENS = np.random.default_rng(0).integers(3, 48, (8, 17))
INPUTS, TARGETS = torch.tensor(TOKENS[:, :-1]), torch.tensor(TOKENS[:, 1:])
LLAMA_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def add_adapter(model: Any, modules: list[str] | str, folder: Path, **settings: Any) -> Any:
    """PEFT's model with a random adapter of rank 4, which is written to `adapter`."""
    import peft

    chosen = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=modules, init_lora_weights=False, **settings
    )
    found = peft.get_peft_model(model, chosen).eval()
    found.save_pretrained(folder / "adapter")
    return found


def on_mesh(
    folder: Path, mesh: str, lora: LoraConfig | None = None, **compute: Any
) -> tuple[Any, Any]:
    """The step of a run with the adapter in a folder, and its parameters."""
    config = from_hf_config(folder / "base")
    if lora is None:
        _, lora = load_adapter(folder / "adapter", config)
    settings = TrainConfig(
        str(folder / "base"), mesh=mesh, batch=8, seq=16, lora=lora, compute=ComputeConfig(**compute)
    )  # fmt: skip
    spec = mw.MeshSpec.parse(mesh).with_standard_axes()
    devices = jax.devices()[: int(np.prod(spec.sizes))]
    step = abstract_step(settings, mw.mesh(spec, devices=devices, axis_types="explicit"))
    places = jax.tree.map(lambda target: target.sharding, {ADAPTER: step.state.params[ADAPTER]})
    factors, _ = load_adapter(folder / "adapter", config, places)
    return step, start_weights(step, config, folder / "base") | factors


def check_gradients(
    model: Any, step: Any, params: Any, folder: Path, more: Mapping[str, np.ndarray] | None = None
) -> None:
    """The loss of TOKENS and its gradients are PEFT's; `more` are other fields of the batch."""
    loss = torch.nn.functional.cross_entropy(model(input_ids=INPUTS).logits.mT, TARGETS)
    loss.backward()
    torch_gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
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
    whole = place.update(spec=jax.sharding.PartitionSpec())
    batch |= jax.device_put(dict(more or {}), whole)

    def total(factors: Any) -> Any:
        scale = jnp.float32(1 / TARGETS.numel())
        sums = family_of(step.model).loss(
            params | {ADAPTER: factors},
            batch,
            scale,
            step.model,
            step.compute,
            LossConfig(load_balance=0),
        )
        return sums.total(scale)

    with jax.set_mesh(step.mesh):
        found, gradients = jax.jit(jax.value_and_grad(total), compiler_options=QUICKLY)(
            params[ADAPTER]
        )
    assert abs(float(found) - loss.item()) < 1e-5
    out = save_adapter(folder / "gradients", {ADAPTER: gradients}, step.model, step.config.lora, "")
    from safetensors.torch import load_file

    ours = load_file(out / "adapter_model.safetensors")
    assert ours.keys() == {name.replace(".default", "") for name in torch_gradients}
    for name, gradient in torch_gradients.items():
        mine = ours[name.replace(".default", "")]
        assert (mine - gradient).abs().max() < 1e-5 * gradient.abs().max(), name

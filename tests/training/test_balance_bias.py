"""The selection bias of routers, moved after each step towards an even load of the experts."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file
from tests.models import test_experts
from tests.models.tiny_architectures import save
from tests.training import toy

import meshwright as mw
from meshwright import MeshwrightError
from meshwright.models import LossConfig, from_hf_config, load_hf, save_hf
from meshwright.models.decoder import decoder_rules
from meshwright.training import TrainConfig, abstract_step, training_mesh
from meshwright.training.config import LoraConfig
from meshwright.training.state import new_state

SPEED = 0.05  # so large that the choice changes with each step
CONFIG = dataclasses.replace(test_experts.CONFIG, router_scores="sigmoid", selection_bias=True)
NAME = "e_score_correction_bias"


def torch_loop(model: Any, batches: list[np.ndarray]) -> tuple[dict[str, Any], list[Any]]:
    """The biases of transformers' model after steps on these tokens, and the loads of each step."""
    import torch

    counts: dict[str, Any] = {}

    def count(name: str) -> Any:
        def hook(_module: Any, _inputs: Any, outputs: Any) -> None:
            counts[name] += torch.bincount(outputs[2].reshape(-1), minlength=8)

        return hook

    gates = {name: gate for name, gate in model.named_modules() if name.endswith("mlp.gate")}
    for name, gate in gates.items():
        gate.register_forward_hook(count(name))
    loads = []
    for micro_batches in batches:
        counts |= {name: torch.zeros(8) for name in gates}
        for tokens in micro_batches:
            model(torch.as_tensor(tokens, dtype=torch.int64))
        for name, gate in gates.items():
            gate.e_score_correction_bias += SPEED * torch.sign(counts[name].mean() - counts[name])
        loads.append([(one / one.mean()).tolist() for one in counts.values()])
    return {f"{name}.{NAME}": gate.e_score_correction_bias for name, gate in gates.items()}, loads


def test_the_bias_is_that_of_a_loop_over_transformers_and_is_exported(tmp_path: Path) -> None:
    """Weights stay as they are, so that the biases alone change what is chosen."""
    model = save("deepseek_v3", tmp_path / "in")
    config = from_hf_config(tmp_path / "in")
    random = np.random.default_rng(0)
    batches = [random.integers(0, 48, (2, 4, 16)).astype(np.int32) for _ in range(3)]
    setting = toy.Setting(
        mesh="dp=1,fsdp=2,ep=2,tp=1,sp=1", config=config, balance_bias=SPEED,
        rules=decoder_rules(sp=True, ep=True),
    )  # fmt: skip
    run = toy.parts(setting, optimizer=optax.set_to_zero())
    params = load_hf(
        tmp_path / "in", config, jax.tree.map(lambda leaf: leaf.sharding, run.target.params)
    )
    state = new_state(run.arrays, run.target, run.optimizer, run.mesh, params=params)
    loads = []
    for tokens in batches:
        targets = np.concatenate([tokens[..., 1:], np.full_like(tokens[..., :1], -1)], axis=-1)
        batch = {
            "tokens": tokens,
            "targets": targets,
            "segments": np.ones_like(tokens),
            "positions": np.broadcast_to(np.arange(16, dtype=np.int32), tokens.shape),
        }
        state, report = run.functions.train(state, run.put(batch))
        loads.append(np.asarray(report["expert_loads"]))
    biases, expected = torch_loop(model, batches)
    np.testing.assert_allclose(loads, expected, rtol=1e-6)
    assert np.abs(np.diff(loads, axis=0)).max() > 0  # the choice did change
    with jax.set_mesh(run.mesh):
        save_hf(tmp_path / "out", state.params, config)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {name for name in written if name.endswith(NAME)} == biases.keys()
    for name, bias in biases.items():
        np.testing.assert_allclose(written[name], bias.numpy(), rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=1,fsdp=2,ep=2,tp=2,sp=1", "dp=2,fsdp=1,ep=4,tp=1,sp=1"])
def test_the_bias_is_the_same_on_any_mesh(mesh: str) -> None:
    """By SGD: AdamW makes as much of a gradient that is rounding alone as of any other."""
    found, alone = (
        toy.train(
            toy.Setting(
                mesh=one, config=CONFIG, steps=3, balance_bias=SPEED,
                rules=decoder_rules(sp=True, ep="ep=" in one),
            ),
            optax.sgd(0.5),
        )
        for one in (mesh, toy.ONE)
    )  # fmt: skip
    test_experts.close(found, alone)
    bias = alone[1]["layers"]["mlp"]["selection_bias"]
    assert set(np.unique(np.round(bias / SPEED))) <= {-3, -2, -1, 0, 1, 2, 3}
    assert np.abs(bias).max() > 0


def test_the_bias_has_no_gradient_and_no_moments() -> None:
    run = toy.parts(toy.Setting(config=CONFIG))
    moments = [
        mw.layouts.path_text(path) for path, _ in jax.tree.leaves_with_path(run.target.optimizer)
    ]
    assert any("router" in path for path in moments)
    assert not any("selection_bias" in path for path in moments)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("tiny-moe", {}, "loss.balance_bias=0.001 moves .* this model has none; leave it out"),
        ("tiny", {}, "tiny has no experts; leave it out"),
        ("deepseek", {"lora": LoraConfig(8)}, "which LoRA leaves as it is"),
    ],
)
def test_routers_that_have_no_bias_to_move(
    model: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if model == "deepseek":
        save("deepseek_v3", tmp_path)
        model = str(tmp_path)
    config = TrainConfig(model, batch=16, seq=32, loss=LossConfig(balance_bias=0.001), **settings)
    with pytest.raises(MeshwrightError, match=message):
        abstract_step(config, training_mesh(config, devices=jax.devices()[:1]))

"""A train step on a loss of log-probabilities: the update is that of PyTorch's autograd."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file
from tests.models.tiny_architectures import save

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.models import LossConfig, from_hf_config, load_hf, preset, save_hf
from meshwright.training import (
    AbstractStep,
    TrainConfig,
    abstract_step,
    by_target,
    new_state,
    sample_batch,
    train_on,
)
from meshwright.training.state import abstract_state
from meshwright.training.step import COTANGENTS, step_functions

SAMPLES = [
    ((5, 9, 2), (7, 1, 30)),
    ((44,), (3, 3, 17, 22, 8)),
    ((1, 2, 3, 4), (40,)),
    ((9, 9), (9, 9, 9)),
    ((31, 7, 7), (12, 5)),
]
ADVANTAGES = [1.5, -0.5, -1.0, 0.7, 2.0]
RATE = 0.1


def trainer(model: Any, mesh: str, loss: LossConfig | None = None) -> AbstractStep:
    """With plain gradient descent, so that the update is the gradient."""
    config = TrainConfig("tiny", mesh=mesh, batch=8, seq=16, accumulation=2)
    devices = jax.devices()[: np.prod(mw.MeshSpec.parse(mesh).sizes)]
    placed = mw.mesh(mesh, devices=devices, axis_types="explicit")
    step, sgd = abstract_step(config, placed, model), optax.sgd(RATE)
    functions = step_functions(
        model, step.compute, sgd, lambda step: RATE, placed, loss=loss, clip_norm=None,
        arrays=step.arrays,
    )  # fmt: skip
    state = abstract_state(step.arrays, step.rules, sgd, placed)
    return dataclasses.replace(step, optimizer=sgd, functions=functions, state=state)


def clipped(new: Any, old: Any, advantages: Any, sampled: Any, library: Any) -> Any:
    ratio = library.exp(new - old)
    gain = library.minimum(ratio * advantages, library.clip(ratio, 0.8, 1.2) * advantages)
    return -(gain * sampled).sum() / sampled.sum()


def torch_update(model: Any, old: list[np.ndarray]) -> tuple[float, dict[str, np.ndarray]]:
    import torch

    losses, count = [], sum(len(new) for _, new in SAMPLES)
    for (prompt, new), before, advantage in zip(SAMPLES, old, ADVANTAGES, strict=True):
        logits = model(torch.as_tensor([[*prompt, *new]])).logits[0]
        found = torch.log_softmax(logits.float(), -1)[len(prompt) - 1 : -1]
        own = found.gather(1, torch.as_tensor(new)[:, None])[:, 0]
        terms = torch.ones(len(new))
        mean = clipped(own, torch.as_tensor(before), torch.tensor(advantage), terms, torch)
        losses.append(mean * len(new) / count)
    loss = torch.stack(losses).sum()
    loss.backward()
    updated = {name: p.detach() - RATE * p.grad for name, p in model.named_parameters()}
    return loss.item(), {name: p.numpy() for name, p in updated.items()}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gemma2", "dp=1,fsdp=2,tp=2,sp=1"),
        pytest.param("gpt2", "dp=2,fsdp=1,tp=2,sp=2", marks=pytest.mark.slow),
    ],
)
def test_an_update_is_that_of_pytorch(name: str, mesh: str, tmp_path: Path) -> None:
    model = save(name, tmp_path / "model")
    config = from_hf_config(tmp_path / "model")
    step = trainer(config, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, step.state.params)
    params = load_hf(tmp_path / "model", config, shardings)
    state = new_state(step.arrays, step.state, step.optimizer, step.mesh, params=params)
    random = np.random.default_rng(0)
    # ratios on both sides of the clip
    batch = sample_batch(step, SAMPLES)
    now = np.asarray(step.functions.log_probs(params, batch)).reshape(8, 16)
    old = [
        now[i, len(prompt) - 1 : len(prompt) + len(new) - 1] + random.normal(0, 0.3, len(new))
        for i, (prompt, new) in enumerate(SAMPLES)
    ]
    old = [np.float32(one) for one in old]
    loss, right = torch_update(copy.deepcopy(model), old)
    placed, advantages, sampled = (
        by_target(step, SAMPLES, values) for values in (old, ADVANTAGES, np.ones(len(SAMPLES)))
    )
    state, report = train_on(
        step, state, batch, lambda new: clipped(new, placed, advantages, sampled, jnp)
    )
    assert int(report["tokens"]) == sum(len(new) for _, new in SAMPLES)
    np.testing.assert_allclose(float(report["loss"]), loss, rtol=1e-4, atol=1e-6)
    save_hf(tmp_path / "updated", state.params, config)
    written = load_file(tmp_path / "updated" / "model.safetensors")
    moved = 0.0
    before = {one: param.detach().numpy() for one, param in model.named_parameters()}
    for one, array in written.items():
        np.testing.assert_allclose(array, right[one], rtol=1e-4, atol=1e-5, err_msg=one)
        moved = max(moved, float(np.abs(right[one] - before[one]).max()))
    assert moved > 1e-2  # so that 1e-5 says something


@pytest.mark.slow
def test_the_loss_of_routers_has_its_weight_whatever_the_advantages_are(tmp_path: Path) -> None:
    """Added to PyTorch's loss, averaged over layers and over micro-batches by their targets."""
    import torch
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    weight, model = 2.0, save("qwen3_moe", tmp_path / "model")
    config = from_hf_config(tmp_path / "model")
    step = trainer(config, "dp=1,fsdp=2,ep=2,tp=1,sp=1", LossConfig(load_balance=weight))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, step.state.params)
    params = load_hf(tmp_path / "model", config, shardings)
    state = new_state(step.arrays, step.state, step.optimizer, step.mesh, params=params)
    texts = np.random.default_rng(1).integers(0, 48, (8, 16)).tolist()  # without padding
    firsts = [3, 9, 12, 5, 14, 8, 2, 11]
    samples = [(text[:first], text[first:]) for text, first in zip(texts, firsts, strict=True)]
    advantages = [1.5, -0.5, -1.0, 0.7, 2.0, -0.3, 1.1, 0.4]
    batch = sample_batch(step, samples)
    placed = by_target(step, samples, advantages)
    state, report = train_on(step, state, batch, lambda new: -(new * placed).sum() / 50)

    targets = [16 - first for first in firsts]
    loss, balance = torch.tensor(0.0), torch.tensor(0.0)
    for part in (slice(0, 4), slice(4, 8)):
        out = model(torch.as_tensor(texts[part]), output_router_logits=True)
        found = torch.log_softmax(out.logits.float(), -1)
        for text, probs, first, advantage in zip(
            texts[part], found, firsts[part], advantages[part], strict=True
        ):
            own = probs[first - 1 : -1].gather(1, torch.tensor(text[first:])[:, None])
            loss = loss - advantage * own.sum() / 50
        layers = [load_balancing_loss_func((one,), 8, 3) for one in out.router_logits]
        balance = balance + torch.stack(layers).mean() * sum(targets[part]) / sum(targets)
    (loss + weight * balance).backward()
    np.testing.assert_allclose(float(report["loss"]), loss.item(), rtol=1e-4)
    np.testing.assert_allclose(float(report["load_balance"]), balance.item(), rtol=1e-5)
    right = copy.deepcopy(model)
    for to, param in zip(right.parameters(), model.parameters(), strict=True):
        to.data = param.data - RATE * param.grad
    right.save_pretrained(tmp_path / "right")
    save_hf(tmp_path / "updated", state.params, config)
    written, wanted = (
        load_file(tmp_path / one / "model.safetensors") for one in ("updated", "right")
    )
    for one, array in written.items():
        np.testing.assert_allclose(array, wanted[one], rtol=1e-4, atol=1e-5, err_msg=one)


def test_samples_that_do_not_fit_are_refused() -> None:
    step = trainer(preset("tiny"), "dp=1,fsdp=1,tp=1,sp=1")
    for samples, words in [
        ([((1,), (2,))] * 9, "9 samples do not fit a batch of 8 sequences"),
        ([((1,) * 9, (2,) * 8)], "9 tokens of a prompt and 8 new ones.* at most the step's 16"),
        ([((), (2,))], "0 tokens of a prompt"),
        ([((1,), ())], "0 new ones"),
    ]:
        with pytest.raises(MeshwrightError, match=words):
            sample_batch(step, samples)  # type: ignore[arg-type]


def test_a_z_loss_is_refused() -> None:
    step = trainer(preset("tiny"), "dp=1,fsdp=1,tp=1,sp=1")
    functions = step_functions(
        step.model, step.compute, step.optimizer, lambda step: RATE, step.mesh,
        loss=LossConfig(z_loss=1e-4), arrays=step.arrays,
    )  # fmt: skip
    cotangents = step.batch["tokens"].update(dtype=jnp.float32)
    with pytest.raises(MeshwrightError, match=r"z_loss=0.0001 is of next tokens.*use 0"):
        functions.train.lower(step.state, {**step.batch, COTANGENTS: cotangents})

"""Dropout of an adapter's inputs: PEFT's gradients with the same mask, in training alone."""

import dataclasses
import functools
import json
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from tests.models.peft_models import TOKENS, add_adapter, check_gradients, on_mesh
from tests.models.test_lora import logits, tiny

import meshwright as mw
from meshwright.models import DROPOUT, from_hf_config, load_adapter, save_adapter, sequence_noise
from meshwright.models.compute import Compute
from meshwright.models.lora import adapted_layers, token_noise
from meshwright.training.state import new_state

pytest.importorskip("peft")

RATE, SEED, STEP = 0.3, 3, 5
MATRICES = {
    "q_proj": "attention/wq", "k_proj": "attention/wk", "v_proj": "attention/wv",
    "o_proj": "attention/wo", "gate_proj": "mlp/gate", "up_proj": "mlp/up", "down_proj": "mlp/down",
}  # fmt: skip


def murmur(*numbers: Any) -> np.ndarray:
    """The hash of numbers, in NumPy."""

    def add(state: Any, number: Any) -> Any:
        x = (state + (np.asarray(number, np.uint64) + 1) * 0x9E3779B9) % 2**32
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
        return x ^ (x >> 16)

    return functools.reduce(add, numbers[1:], np.uint64(numbers[0]))


def kept(module: str, features: int) -> np.ndarray:
    """Which inputs of a module of PEFT's are kept [batch, length, features]."""
    layer, name = int(module.split(".layers.")[1].split(".")[0]), module.rpartition(".")[2]
    matrix = zlib.crc32(f"layers/{MATRICES[name]}".encode())
    sequence, position = np.arange(8)[:, None, None], np.arange(16)[:, None]
    hashes = murmur(SEED, STEP, sequence, position, matrix, layer, np.arange(features))
    return hashes >= round(RATE * 2**32)


class Mask(torch.nn.Module):
    def __init__(self, module: str, features: int) -> None:
        super().__init__()
        self.factor = torch.tensor(kept(module, features) / (1 - RATE), dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def masked(folder: Path) -> Any:
    """PEFT's llama with an adapter whose dropout is of `kept`; both are in folders."""
    model, modules = tiny("llama")
    model.save_pretrained(folder / "base")
    found = add_adapter(model, modules, folder, lora_dropout=RATE)
    for name, module in found.named_modules():
        if name.rpartition(".")[2] in MATRICES:
            module.lora_dropout["default"] = Mask(name, module.in_features)
    return found


@pytest.mark.parametrize(
    ("mesh", "compute"),
    [
        ("dp=1", {"remat": "full"}),
        pytest.param("fsdp=2,tp=2,sp=2", {"layers": "unroll"}, marks=pytest.mark.slow),
        pytest.param("dp=2,tp=4", {"sequence_parallel": True}, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_peft_with_the_same_mask(
    mesh: str, compute: Any, tmp_path: Path
) -> None:
    model = masked(tmp_path)
    step, params = on_mesh(tmp_path, mesh, **compute)
    noise = np.asarray(sequence_noise(SEED, np.int32(STEP), (1, 8)))
    check_gradients(model, step, params, tmp_path, {DROPOUT: noise[0]})


def test_nothing_is_dropped_outside_of_training_and_files_keep_the_rate(tmp_path: Path) -> None:
    model, modules = tiny("llama")
    model.save_pretrained(tmp_path / "base")
    model = add_adapter(model, modules, tmp_path, lora_dropout=RATE)
    expected = model(input_ids=torch.tensor(TOKENS[:, :-1])).logits.detach().numpy()
    step, params = on_mesh(tmp_path, "dp=1")
    np.testing.assert_allclose(logits(step, params), expected, atol=1e-5 * np.abs(expected).max())
    out = save_adapter(tmp_path / "out", params, step.model, step.config.lora, "")
    assert json.loads((out / "adapter_config.json").read_text())["lora_dropout"] == RATE
    assert load_adapter(out, step.model)[1].dropout == RATE
    fields = json.loads((out / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps(fields | {"lora_dropout": 2}))
    with pytest.raises(mw.MeshwrightError, match=r"lora\.dropout=2\.0 must be from 0 to below 1"):
        load_adapter(out, from_hf_config(tmp_path / "base"))


@pytest.mark.slow
def test_a_step_drops_by_its_number_whatever_the_micro_batches(tmp_path: Path) -> None:
    model, modules = tiny("llama")
    model.save_pretrained(tmp_path / "base")
    add_adapter(model, modules, tmp_path, lora_dropout=RATE)

    def reports(rate: float, micro_batches: int) -> list[Any]:
        """Loss and gradient norm of steps 0 and 1 on the same batch, and the loss of evaluation."""
        lora = load_adapter(tmp_path / "adapter", from_hf_config(tmp_path / "base"))[1]
        step, params = on_mesh(tmp_path, "dp=1", dataclasses.replace(lora, dropout=rate))
        state = new_state(step.arrays, step.state, step.optimizer, step.mesh, 0, params)
        fields = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
        fields |= {"segments": np.ones((8, 16)), "positions": np.tile(np.arange(16), (8, 1))}
        batch = {
            name: x.reshape(micro_batches, -1, 16).astype(np.int32) for name, x in fields.items()
        }
        batch = jax.device_put(batch, step.functions.batch_sharding)
        loss = step.functions.evaluate(state.params, batch)["loss"]
        found = [float(loss.sum) / float(loss.count)]
        for _ in range(2):
            state, report = step.functions.train(state, batch)
            found += [float(report["loss"]), float(report["gradient_norm"])]
        return found

    dropped, accumulated, plain = reports(RATE, 1), reports(RATE, 4), reports(0.0, 1)
    np.testing.assert_allclose(accumulated, dropped, rtol=1e-5)
    assert dropped[0] == plain[0]  # evaluation
    assert plain[0] == pytest.approx(plain[1], rel=1e-6)
    assert min(abs(np.array(dropped[2::2]) / plain[2::2] - 1)) > 0.01  # gradients
    assert abs(dropped[4] / dropped[2] - 1) > 0.01  # of warmup: the weights are nearly the same


def test_every_matrix_and_layer_has_its_own_noise() -> None:
    stacks = {"mlp": {"up": np.zeros((3, 4, 4), "f"), "down": np.zeros((3, 4, 4), "f")}}
    factors = {"a": np.zeros((3, 4, 2), "f"), "b": np.zeros((3, 2, 4), "f")}
    params = {"adapter": {"layers": {"mlp": {"up": factors, "down": factors}}}}
    batch = {DROPOUT: sequence_noise(0, np.int32(1), (2, 2))[1]}
    noise = token_noise(batch, np.zeros((2, 5)))
    compute = Compute(mw.Rules([]), dropout=0.5)
    found = adapted_layers(stacks, params, ("layers",), compute, lambda _: noise)
    numbers = [np.asarray(found["mlp"][name].dropout.noise) for name in ("up", "down")]
    assert np.unique(numbers).size == 2 * 3 * 2 * 5
    without = adapted_layers(stacks, params, ("layers",), compute)
    assert all(one.dropout is None for one in without["mlp"].values())
    assert jax.tree.leaves(batch[DROPOUT])[0].dtype == np.uint32


def test_t5_has_noise_of_the_tokens_that_a_matrix_multiplies(tmp_path: Path) -> None:
    model, modules = tiny("t5")
    model.save_pretrained(tmp_path / "base")
    add_adapter(model, [*modules, "k"], tmp_path, lora_dropout=RATE)
    from meshwright.models.t5.forward import layer_weights

    step, params = on_mesh(tmp_path, "dp=1")
    batch = {
        DROPOUT: sequence_noise(0, np.int32(1), (1, 2))[0],
        "tokens": np.zeros((2, 3)), "encoder_tokens": np.zeros((2, 4)),
    }  # fmt: skip
    with jax.set_mesh(step.mesh):
        layers = layer_weights(params, "decoder", step.model, step.compute, batch)
    shapes = {name: layers["cross_attention"][name].dropout.noise.shape for name in ("wq", "wk")}
    assert shapes == {"wq": (2, 2, 3), "wk": (2, 2, 4)}

"""Adapters of experts beside PEFT's: logits, merged weights, files and gradients."""

import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.models.peft_models import add_adapter, check_gradients, on_mesh
from tests.models.test_lora import logits, theirs
from tests.models.tiny_architectures import make

import meshwright as mw
from meshwright.models import (
    ADAPTER,
    LoraConfig,
    abstract_arrays,
    from_hf_config,
    load_adapter,
    merged,
    save_adapter,
    with_adapter,
)
from meshwright.serving.adapters import load_factors
from meshwright.serving.source import adapter_source

peft = pytest.importorskip("peft")
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def small(name: str, folder: Path, parameters: list[str], modules: list[str]) -> Any:
    """PEFT's model with a random adapter of experts and other matrices."""
    model = make(name)
    model.save_pretrained(folder / "base")
    return add_adapter(model, modules, folder, target_parameters=parameters)


@pytest.mark.parametrize(
    ("name", "parameters", "modules"),
    [
        ("qwen3_moe", EXPERTS, ["q_proj", "o_proj"]),
        pytest.param("qwen3_moe", EXPERTS[1:], [], marks=pytest.mark.slow),
        pytest.param("mixtral", EXPERTS, [], marks=pytest.mark.slow),
        pytest.param("olmoe", EXPERTS[:1], ["v_proj"], marks=pytest.mark.slow),
        pytest.param("gpt_oss", EXPERTS, ["q_proj"], marks=pytest.mark.slow),
        pytest.param("deepseek_v3", EXPERTS, ["q_b_proj"], marks=pytest.mark.slow),
    ],
)
def test_adapters_of_experts_are_those_of_peft(
    name: str, parameters: list[str], modules: list[str], tmp_path: Path
) -> None:
    model = small(name, tmp_path, parameters, modules)
    expected = theirs(model)
    step, params = on_mesh(tmp_path, "fsdp=2,ep=2,tp=2")
    scale = np.abs(expected).max()
    np.testing.assert_allclose(logits(step, params), expected, atol=2e-5 * scale)
    with jax.set_mesh(step.mesh):
        whole = merged(params, step.config.lora.scale)
    np.testing.assert_allclose(logits(step, whole), expected, atol=2e-5 * scale)
    base = {name: params[name] for name in params if name != ADAPTER}
    assert np.abs(logits(step, base) - expected).max() > 0.05 * scale

    out = save_adapter(tmp_path / "out", params, step.model, step.config.lora)
    again = peft.PeftModel.from_pretrained(make(name), out).eval()
    np.testing.assert_array_equal(theirs(again), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "compute"),
    [
        ("fsdp=2,ep=2,tp=2", {"experts": "ring"}),
        ("dp=2,ep=4", {"experts": "all-to-all", "remat": "mlp"}),
        ("fsdp=2,tp=2", {}),
    ],
)
def test_every_gradient_of_experts_is_that_of_peft(mesh: str, compute: Any, tmp_path: Path) -> None:
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = small("qwen3_moe", tmp_path, EXPERTS, modules)
    step, params = on_mesh(tmp_path, mesh, **compute)
    check_gradients(model, step, params, tmp_path)


def test_an_engine_has_no_slots_for_adapters_of_experts(tmp_path: Path) -> None:
    small("qwen3_moe", tmp_path, EXPERTS[1:], [])
    source: Any = types.SimpleNamespace(config=from_hf_config(tmp_path / "base"))
    adapter = adapter_source(tmp_path / "adapter", source)
    mesh = mw.mesh("tp=1", devices=jax.devices()[:1], axis_types="explicit")
    with pytest.raises(mw.MeshwrightError, match=r"adapts experts, .* serve it merged: --adapter"):
        load_factors(source, adapter, mesh, rank=8)


def test_experts_are_adapted_only_where_they_are_named(tmp_path: Path) -> None:
    make("qwen3_moe").save_pretrained(tmp_path)
    arrays = abstract_arrays(from_hf_config(tmp_path))

    def adapted(*targets: str) -> Any:
        found = with_adapter(arrays, LoraConfig(2, targets=targets), "float32")[ADAPTER]["layers"]
        return {name: set(factors) for name, factors in found.get("mlp", {}).items()}

    assert adapted() == {}
    assert adapted("attention/wq", "mlp/(gate|up)$") == {"gate": {"a", "b"}, "up": {"b"}}
    assert adapted("up") == {"up": {"a", "b"}}


def test_adapters_of_experts_that_are_refused(tmp_path: Path) -> None:
    make("qwen3_moe").save_pretrained(tmp_path / "base")
    config = from_hf_config(tmp_path / "base")
    arrays = abstract_arrays(config)
    with pytest.raises(mw.MeshwrightError, match=r"lora.dropout=0.1 does not apply to experts"):
        with_adapter(arrays, LoraConfig(2, dropout=0.1, targets=("down",)), "float32")
    half = LoraConfig(2, targets=("gate",))
    zeros = jax.tree.map(
        lambda spec: np.zeros(spec.shape, "f"), with_adapter(arrays, half, "float32")
    )
    with pytest.raises(mw.MeshwrightError, match="one adapter for gate and up of experts, and up"):
        save_adapter(tmp_path / "out", zeros, config, half)
    add_adapter(make("qwen3_moe"), ["q_proj"], tmp_path, target_parameters=["gate.weight"])
    with pytest.raises(mw.MeshwrightError, match=r"target_parameters='gate.weight' is not"):
        load_adapter(tmp_path / "adapter", config)

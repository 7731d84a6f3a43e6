"""MXFP4 files are read as transformers reads them, onto any mesh, and written as numbers."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.models.tiny_architectures import save

import meshwright as mw
from meshwright import MeshwrightError
from meshwright.models import abstract_arrays, from_hf_config, load_hf, save_hf
from meshwright.models.decoder import decoder_rules

QUANTIZED = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with packed experts, and the same with what transformers makes of them."""
    torch: Any = pytest.importorskip("torch", reason="the outside reader needs torch")
    mxfp4: Any = pytest.importorskip("transformers.integrations.mxfp4", reason="the outside reader")
    place = tmp_path_factory.mktemp("mxfp4")
    packed, plain = place / "packed", place / "plain"
    save("gpt_oss", packed)
    save("gpt_oss", plain)
    tensors, random = load_file(packed / "model.safetensors"), np.random.default_rng(0)
    numbers = dict(tensors)
    for name in [one for one in tensors if one.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 32
        blocks = random.integers(0, 256, (*shape, 16), np.uint8)
        scales = random.integers(118, 128, shape, np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        made = mxfp4.convert_moe_packed_tensors(
            torch.as_tensor(blocks), torch.as_tensor(scales), dtype=torch.float32
        )
        numbers[name] = made.numpy()
    save_file(tensors, packed / "model.safetensors")
    save_file(numbers, plain / "model.safetensors")
    fields = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(fields | {"quantization_config": QUANTIZED}))
    return packed, plain


def read(folder: Path, mesh: str, dtype: Any = np.float32) -> Any:
    config, spec = from_hf_config(folder), mw.MeshSpec.parse(mesh)
    devices = jax.devices()[: np.prod(spec.sizes)]
    placed = mw.mesh(mesh, devices=devices, axis_types="explicit")
    rules = decoder_rules(ep="ep" in spec.names)
    shardings = mw.shardings(abstract_arrays(config), rules, mesh=placed)
    return load_hf(folder, config, shardings, dtype)


@pytest.mark.parametrize("mesh", ["fsdp=2,tp=2", "fsdp=1,tp=2,ep=4"])
def test_packed_weights_are_what_transformers_makes_of_them(
    mesh: str, folders: tuple[Path, Path]
) -> None:
    found, right = (read(folder, mesh) for folder in folders)
    jax.tree.map(np.testing.assert_array_equal, found, right)
    # bfloat16 holds each of them exactly
    half = read(folders[0], mesh, jax.numpy.bfloat16)["layers"]["mlp"]
    for name in ("gate", "up", "down"):
        np.testing.assert_array_equal(half[name].astype(np.float32), right["layers"]["mlp"][name])


def test_a_packed_model_is_written_as_numbers(folders: tuple[Path, Path], tmp_path: Path) -> None:
    packed, plain = folders
    config = from_hf_config(packed)
    save_hf(tmp_path / "again", load_hf(packed, config), config)
    assert "quantization_config" not in json.loads((tmp_path / "again/config.json").read_text())
    found, right = (load_file(one / "model.safetensors") for one in (tmp_path / "again", plain))
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


def test_what_is_no_mxfp4_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    fields = json.loads((folders[0] / "config.json").read_text())
    with pytest.raises(MeshwrightError, match="mxfp4 is, and its weights are converted"):
        from_hf_config(fields | {"quantization_config": {"quant_method": "awq"}})
    tensors = load_file(folders[0] / "model.safetensors")
    name = next(one for one in tensors if one.endswith("_scales"))
    save_file(tensors | {name: tensors[name][..., None]}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(MeshwrightError, match=re.escape("a scale of each group")):
        load_hf(tmp_path, from_hf_config(tmp_path))

"""Only models/ knows a concrete family: its config's name, its own fields and its own dims."""

import ast
import dataclasses
import functools
from pathlib import Path

import jax
import pytest

import meshwright
from meshwright.models import PRESETS, family_of
from meshwright.models.registry import FAMILIES
from meshwright.models.torch_only import TORCH_ONLY

ROOT = Path(meshwright.__file__).parent
# what ModelFamily promises of every config, and a word of transformers'
PROMISED = {"vocab", "max_seq", "hf_config", "heads", "kv_heads", "head_dim", "model_type"}
KINDS = [family.config for family in (*FAMILIES, TORCH_ONLY)]
CONFIGS = {config.__name__ for config in KINDS}
# fields, properties and methods
FIELDS = {field.name for config in KINDS for field in dataclasses.fields(config)} | {
    name for config in KINDS for name in vars(config) if not name.startswith("_")
}
# names under which the rest of the code holds a model's config
HELD = {"model", "model_config", "decoder", "_model_config"}
# T5X's rules have names for dims of their own
T5X = {"layouts/logical_rules.py"}


@functools.cache
def own_dims() -> set[str]:
    """Dims of the arrays of one family that no other has."""
    dims: dict[str, set[str]] = {}
    for config in PRESETS.values():
        family = family_of(config)
        arrays = jax.tree.leaves(family.arrays(config), is_leaf=lambda leaf: hasattr(leaf, "dims"))
        dims.setdefault(family.name, set()).update(*(array.dims for array in arrays))
    shared = set.intersection(*dims.values())
    # the axis ep splits experts, and no axis splits latents
    widely_used = {"gate", "norm", "layers", "experts", "latent"}
    return {dim for some in dims.values() for dim in some - shared - widely_used if dim}


def family_knowledge(text: str, dims: set[str]) -> list[str]:
    """What a file says that only a family may know."""
    found = [name for name in CONFIGS if name in text]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in FIELDS - PROMISED:
            value = node.value
            holder = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")
            is_config = (
                holder == "config"
                and isinstance(value, ast.Attribute)
                and (
                    getattr(value.value, "id", getattr(value.value, "attr", ""))
                    in ("source", "model")
                )
            )
            if holder in HELD or is_config:
                found.append(ast.unparse(node))
        if isinstance(node, ast.Constant) and node.value in dims:
            found.append(node.value)
        if isinstance(node, ast.Name | ast.Attribute | ast.FunctionDef):
            name = getattr(node, "id", getattr(node, "attr", getattr(node, "name", "")))
            found += [name] if name == "has_encoder" else []
    return found


FILES = [file for file in sorted(ROOT.rglob("*.py")) if file.relative_to(ROOT).parts[0] != "models"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_file_outside_models_names_a_family(file: Path) -> None:
    dims = set() if str(file.relative_to(ROOT)) in T5X else own_dims()
    assert not family_knowledge(file.read_text(encoding="utf-8"), dims)


@pytest.mark.parametrize(
    "line",
    [
        "from meshwright.models import DecoderConfig",
        "isinstance(model, T5Config)",
        "start = model.start_token",
        "window = self.model.sliding_window",
        "layers = source.config.encoder_layers",
        "eps = workload.model.norm_eps",
        "'relpos_buckets' in dims",
        "if has_encoder(config): pass",
    ],
)
def test_family_knowledge_is_found(line: str) -> None:
    assert family_knowledge(line, own_dims())


def test_what_every_config_has_may_be_named() -> None:
    text = "model.vocab + model.max_seq + plan.workload.model.heads + sizes.embed + config.layers"
    assert not family_knowledge(text, own_dims())

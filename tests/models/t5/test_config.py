"""T5 configs: published sizes, and config.json as transformers wrote it before and after 5."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import pytest
from safetensors.numpy import load_file, save_file

from meshwright import MeshwrightError
from meshwright.models import load_hf
from meshwright.models.t5 import (
    PRESETS,
    T5Config,
    abstract_arrays,
    from_hf_config,
    to_hf_config,
)

REFERENCE = Path(__file__).parents[1] / "t5_reference"
TINY = T5Config(48, 2, 2, 16, 4, 4, 24)

# of the published weights, tied arrays once
PUBLISHED = {
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1.1-base": 247_577_856,
    "flan-t5-small": 76_961_152,
    "flan-t5-xl": 2_849_757_184,
    "flan-t5-xxl": 11_135_332_352,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_a_preset_has_the_published_number_of_parameters(name: str, parameters: int) -> None:
    leaves = jax.tree.leaves(abstract_arrays(PRESETS[name]))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == parameters


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_read_as_it_is_written(name: str) -> None:
    assert from_hf_config(to_hf_config(PRESETS[name])) == PRESETS[name]


def test_flops_are_six_for_each_weight_a_token_is_multiplied_with() -> None:
    config = dataclasses.replace(TINY, heads=1, head_dim=1)  # attention itself next to nothing
    arrays = abstract_arrays(config)

    def matrices(tree: Any) -> int:
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree) if leaf.inputs)

    cross = arrays["decoder"]["layers"]["cross_attention"]
    of_keys = matrices([cross["wk"], cross["wv"]])
    of_encoder = matrices(arrays["encoder"]) + of_keys
    of_decoder = matrices(arrays["decoder"]) - of_keys + matrices(arrays["embedding"])
    pairs = 2 * 100**2 + 2 * (10 * 5 + 10 * 100)
    assert config.flops(100, 10) == 6 * (100 * of_encoder + 10 * of_decoder) + 12 * pairs


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_of_transformers_5_the_files_say_whether_the_head_is_tied(
    has_head: bool, scaled: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(REFERENCE / "t5-1.1", folder)
    fields = json.loads((folder / "config.json").read_text())
    assert fields["tie_word_embeddings"] is True  # whatever the model
    fields["scale_decoder_outputs"] = scaled
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = load_file(folder / "model.safetensors")
    if not has_head:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    config = from_hf_config(folder)
    assert (config.tied_embeddings, config.scaled_output) == (not has_head, scaled)
    assert ("output" in load_hf(folder)) == has_head
    written = to_hf_config(dataclasses.replace(config, hf_config=None))
    # one field, which all versions read, where it says both
    assert ("scale_decoder_outputs" in written) == (config.tied_embeddings != scaled)


def test_copies_of_the_embedding_may_be_in_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(REFERENCE / "t5-1.0", folder)
    tensors = load_file(folder / "model.safetensors")
    shared = tensors["shared.weight"]
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    more = {"encoder.embed_tokens.weight": shared, "lm_head.weight": shared, unused: shared[:8, :4]}
    save_file(tensors | more, folder / "model.safetensors")
    assert "output" not in load_hf(folder)
    save_file(
        tensors | {"decoder.embed_tokens.weight": shared[::-1].copy()}, folder / "model.safetensors"
    )
    with pytest.raises(
        MeshwrightError, match=r"'decoder.embed_tokens.weight' .* not the same as 'shared"
    ):
        load_hf(folder)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"activation": "gelo"}, "activation='gelo' is not one of a T5; did you mean 'gelu'"),
    ({"buckets": 6}, "buckets=6 must be a multiple of 4"),
    ({"max_distance": 16}, "max_distance=16 must be above buckets / 2 = 16"),
    ({"start_token": 48}, "start_token=48 is not one of 48"),
    ({"decoder_layers": 0}, "decoder_layers=0 of a model must be a whole number"),
]


@pytest.mark.parametrize(("changes", "words"), MISTAKES)
def test_a_config_that_makes_no_model_is_an_error(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(MeshwrightError, match=words):
        dataclasses.replace(TINY, **changes)


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"feed_forward_proj": "gated-tanh"}, "feed_forward_proj='gated-tanh' is not supported; relu"),
    ({"architectures": ["T5EncoderModel"]}, r"architectures \['T5EncoderModel'\]"),
    ({"d_model": None}, "d_model is missing"),
    ({"d_modle": 3}, "d_modle=3 is not a field this model honours; did you mean 'd_model'"),
    ({"is_encoder_decoder": False}, "is_encoder_decoder=False is not honoured, only True"),
    ({"relative_attention_num_buckets": 6}, "config: buckets=6 must be a multiple of 4"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), FIELDS)
def test_fields_that_are_not_honoured_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(MeshwrightError, match=words):
        from_hf_config(to_hf_config(TINY) | changes)

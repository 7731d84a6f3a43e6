"""The description of a decoder's arrays: shapes, dims and first values follow from its config."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshwright import Constant, MeshwrightError, Normal
from meshwright.layouts import tree_paths
from meshwright.models import preset
from meshwright.models.decoder import DecoderConfig, abstract_arrays

TINY = preset("tiny")


def by_path(config: DecoderConfig, **options: Any) -> dict[str, Any]:
    arrays = abstract_arrays(config, **options)
    return dict(zip(tree_paths(arrays), jax.tree.leaves(arrays), strict=True))


def test_layers_are_stacked_and_every_other_array_is_not() -> None:
    for path, array in by_path(TINY).items():
        stacked = path.startswith("layers/")
        assert (array.dims[0] == "layers") == stacked, path
        assert "layers" not in array.dims[1:], path
        assert not stacked or array.shape[0] == TINY.layers


def test_dims_have_the_sizes_of_the_config() -> None:
    sizes: Any = {"norm": TINY.embed}
    sizes |= {
        d: getattr(TINY, d)
        for d in ("layers", "vocab", "embed", "heads", "kv_heads", "head_dim", "mlp")
    }
    for path, array in by_path(TINY).items():
        assert array.shape == tuple(sizes[dim] for dim in array.dims), path


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"qkv_bias": True}, {"bq", "bk", "bv"}),
        ({"qkv_bias": True, "output_bias": True}, {"bq", "bk", "bv", "bo"}),
        ({"qk_norm": True}, {"q_norm", "k_norm"}),
    ],
)
def test_choices_add_their_arrays_and_nothing_else(
    choice: dict[str, bool], names: set[str]
) -> None:
    more = by_path(dataclasses.replace(TINY, **choice)).keys() - by_path(TINY).keys()
    assert more == {f"layers/attention/{name}" for name in names}


def test_tied_embeddings_have_no_output_array() -> None:
    less = by_path(TINY).keys() - by_path(dataclasses.replace(TINY, tied_embeddings=True)).keys()
    assert less == {"output"}


def test_norms_start_at_one_biases_at_zero_and_what_is_added_starts_small() -> None:
    config = dataclasses.replace(TINY, qkv_bias=True, output_bias=True, qk_norm=True)
    for path, array in by_path(config).items():
        name = path.split("/")[-1]
        if name.endswith("norm"):
            assert array.init == Constant(1.0), path
        elif name in ("bq", "bk", "bv", "bo"):
            assert array.init == Constant(0.0), path
        elif name in ("wo", "down"):
            assert array.init == Normal(0.02 / math.sqrt(2 * config.layers)), path
        else:
            assert array.init == Normal(0.02), path


def test_the_dtype_is_that_asked_for() -> None:
    assert {a.dtype for a in by_path(TINY, dtype=jnp.bfloat16).values()} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab": 0}, "vocab=0 of a model must be a whole number from 1"),
        ({"layers": 1.5}, "layers=1.5 of a model must be a whole number from 1"),
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"sliding_window": 0}, "sliding_window=0 must be at least 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(MeshwrightError, match=words):
        dataclasses.replace(TINY, **change)

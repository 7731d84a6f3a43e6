"""Presets have the number of parameters their publishers state."""

import math

import jax
import pytest

from meshwright import MeshwrightError
from meshwright.models import PRESETS, abstract_arrays, preset

# from the models' cards: safetensors parameter counts
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_parameter_counts_are_the_published_ones(name: str, parameters: int) -> None:
    arrays = jax.tree.leaves(abstract_arrays(preset(name)))
    assert sum(math.prod(array.shape) for array in arrays) == parameters


def test_every_preset_but_tiny_is_checked() -> None:
    assert set(PRESETS) == {*PUBLISHED, "tiny"}


def test_a_model_that_is_not_there_is_guessed_at() -> None:
    with pytest.raises(MeshwrightError, match=r"did you mean 'llama-3.1-8b'\?"):
        preset("llama3.1-8b")

"""Published config.json files of each architecture: read, and of the published size."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import pytest

from meshwright.models import abstract_arrays, from_hf_config, to_hf_config

# of the published weights, tied arrays once
PARAMETERS = {
    "gpt2": 124_439_808,
    "distilgpt2": 81_912_576,
    "opt-125m": 125_239_296,
    "gpt-j-6b": 6_050_882_784,
    "pythia-70m": 70_426_624,
    "phi-3-mini-4k": 3_821_079_552,
    "olmo-2-7b": 7_298_617_344,
    "granite-3.1-2b": 2_533_531_648,
    "smollm3-3b": 3_075_098_624,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
}
PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text())


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_config_has_the_published_parameters(name: str) -> None:
    config = from_hf_config(PUBLISHED[name])
    arrays = jax.tree.leaves(abstract_arrays(config))
    assert sum(math.prod(array.shape) for array in arrays) == PARAMETERS[name]
    assert to_hf_config(config) == PUBLISHED[name]
    assert from_hf_config(to_hf_config(dataclasses.replace(config, hf_config=None))) == config

"""Training: the step, optimizers, data, checkpoints, and the loop that joins them."""

from meshwright.train.abstract_step import AbstractStep, abstract_step
from meshwright.train.config import (
    TrainConfig,
    config_from_dict,
    config_from_file,
    config_to_dict,
    settings_flags,
    with_settings,
)
from meshwright.train.exchange import load_pieces, save_pieces
from meshwright.train.jax_backend import AUTO, train
from meshwright.train.setup import (
    check_fp8,
    check_sizes,
    choose_rules,
    field_lengths,
    layers_choice,
    model_of,
    training_mesh,
    training_spec,
)

__all__ = [
    "AUTO", "AbstractStep", "TrainConfig", "abstract_step", "check_fp8", "check_sizes",
    "choose_rules", "config_from_dict", "config_from_file", "config_to_dict", "field_lengths",
    "layers_choice", "load_pieces", "model_of", "save_pieces", "settings_flags", "train",
    "training_mesh", "training_spec", "with_settings",
]  # fmt: skip

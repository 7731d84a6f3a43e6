"""Training: the step, optimizers, data, checkpoints, and the loop that joins them."""

from meshwright.train.config import (
    TrainConfig,
    config_from_dict,
    config_from_file,
    config_to_dict,
    decoder_from_dict,
    decoder_to_dict,
)
from meshwright.train.described import Described, step_of
from meshwright.train.loop import AUTO, train
from meshwright.train.setup import (
    check_batch,
    check_length,
    check_model,
    choose_rules,
    model_config,
    training_spec,
)

__all__ = [
    "AUTO",
    "Described",
    "TrainConfig",
    "check_batch",
    "check_length",
    "check_model",
    "choose_rules",
    "config_from_dict",
    "config_from_file",
    "config_to_dict",
    "decoder_from_dict",
    "decoder_to_dict",
    "model_config",
    "step_of",
    "train",
    "training_spec",
]

"""Training: the step, optimizers, data, checkpoints, and the loop that joins them."""

from typing import TYPE_CHECKING

from meshwright.lazy import import_when_used

if TYPE_CHECKING:
    from meshwright.training.abstract_step import AbstractStep, abstract_step
    from meshwright.training.backend import Backend, Say
    from meshwright.training.compute import (
        check_balance,
        check_experts,
        check_fp8,
        layers_choice,
        split_capacity,
        without_fp8,
    )
    from meshwright.training.config import (
        AUTO,
        DPO,
        LARGEST_COUNT,
        NONE,
        ComputeConfig,
        DpoConfig,
        TorchConfig,
        TrainConfig,
        config_from_dict,
        config_from_file,
        config_to_dict,
        settings_flags,
        with_settings,
    )
    from meshwright.training.exchange import load_pieces, save_pieces
    from meshwright.training.jax_backend import train
    from meshwright.training.loop import Loop, check_run_folder, supervised
    from meshwright.training.optimizer import learning_rate
    from meshwright.training.optimizer_config import OptimizerConfig
    from meshwright.training.policy import Sample, by_target, sample_batch, train_on
    from meshwright.training.prepare import check_objective, prepare, prepare_data
    from meshwright.training.resume import check_base, checkpoint_settings
    from meshwright.training.run import Memory, chip_peak_flops
    from meshwright.training.run.trackers import check_trackers
    from meshwright.training.same_settings import check_same_settings
    from meshwright.training.setup import (
        accepted_meshes,
        check_length,
        check_sizes,
        choose_rules,
        field_lengths,
        file_rules,
        held_arrays,
        model_of,
        objective_of,
        training_arrays,
        training_mesh,
        training_spec,
        weights_folder,
        with_commits,
    )
    from meshwright.training.state import TrainState, new_state
    from meshwright.training.tpu import overlap_choice, overlap_text
    from meshwright.training.trainable import trained_text
    from meshwright.training.work import StepWork, frozen_weights

__all__ = [
    "AUTO", "DPO", "LARGEST_COUNT", "NONE", "AbstractStep", "Backend", "ComputeConfig", "DpoConfig",
    "Loop", "Memory", "OptimizerConfig", "Sample", "Say", "StepWork", "TorchConfig", "TrainConfig",
    "TrainState", "abstract_step", "accepted_meshes", "by_target", "check_balance", "check_base",
    "check_experts", "check_fp8", "check_length", "check_objective", "check_run_folder",
    "check_same_settings", "check_sizes", "check_trackers", "checkpoint_settings",
    "chip_peak_flops", "choose_rules", "config_from_dict", "config_from_file", "config_to_dict",
    "field_lengths", "file_rules", "frozen_weights", "held_arrays", "layers_choice",
    "learning_rate", "load_pieces", "model_of", "new_state", "objective_of", "overlap_choice",
    "overlap_text", "prepare", "prepare_data", "sample_batch", "save_pieces", "settings_flags",
    "split_capacity", "supervised", "train", "train_on", "trained_text", "training_arrays",
    "training_mesh", "training_spec", "weights_folder", "with_commits", "with_settings",
    "without_fp8",
]  # fmt: skip

import_when_used(__name__)

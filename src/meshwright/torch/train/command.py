"""One process of a training run under torchrun."""

import jax
import torch.distributed as dist

from meshwright.torch.mesh import mesh as make_mesh
from meshwright.torch.train.backend import TorchBackend
from meshwright.torch.train.settings import check_settings
from meshwright.torch.train.store import join
from meshwright.train import Loop, TrainConfig, check_run_folder, check_same_settings, supervised


def train(config: TrainConfig) -> None:
    """Run to the end, to a signal, or to a mistake; the same call in every process."""
    check_settings(config)
    # jax computes learning rates alone, and must leave the GPU to PyTorch
    jax.config.update("jax_platforms", "cpu")
    joined, store = join()
    with supervised(config, joined, store) as (stop, watchdog):
        with watchdog.paused("comparing settings"):
            check_same_settings(config, store, joined, ("torch", "transformers"))
        check_run_folder(config)
        with watchdog.paused("preparing"):
            backend = TorchBackend(config, make_mesh(config.mesh))
        Loop(backend, stop, store, watchdog).go()
    dist.destroy_process_group()

"""One process of a training run under torchrun."""

import os
from collections.abc import Sequence

import jax
import torch.distributed as dist

from meshwright.errors import MeshwrightError
from meshwright.meshes import MeshSpec
from meshwright.torch.mesh import mesh as make_mesh
from meshwright.torch.train.backend import TorchBackend
from meshwright.torch.train.launcher import start_processes, starts_processes
from meshwright.torch.train.settings import check_settings
from meshwright.torch.train.store import join
from meshwright.train import Loop, TrainConfig, check_run_folder, check_same_settings, supervised


def train(config: TrainConfig, arguments: Sequence[str] = ()) -> None:
    """Run to the end, to a signal, or to a mistake; the same call in every process.

    With `config.processes`, and not under torchrun, this starts them with the same `arguments` of
    the command line.
    """
    check_settings(config)
    if starts_processes(config):
        start_processes(config.processes or 1, arguments)
        return
    _check_processes(config)
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


def _check_processes(config: TrainConfig) -> None:
    spec = MeshSpec.parse(config.mesh)
    if "RANK" in os.environ or spec.size == 1 or not spec.is_resolved:
        return
    raise MeshwrightError(
        f"mesh {spec.quoted} needs {spec.size} processes, and this one was started alone; add "
        f"--processes {spec.size}, or start it with torchrun --nproc-per-node {spec.size} "
        "--no-python -- meshwright train …"
    )

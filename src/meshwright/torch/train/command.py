"""One process of a training run under torchrun."""

import math
import os
from collections.abc import Sequence

import jax
import torch.distributed as dist

from meshwright.errors import MeshwrightError
from meshwright.launch import pause_timeout_s
from meshwright.meshes import MeshSpec
from meshwright.torch.mesh import axes_of
from meshwright.torch.mesh import mesh as make_mesh
from meshwright.torch.train.backend import TorchBackend, check_batch
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
    starts = starts_processes(config)
    _check_mesh(config)
    if starts:
        start_processes(config.processes or 1, arguments)
        return
    # jax computes learning rates alone, and must leave the GPU to PyTorch
    jax.config.update("jax_platforms", "cpu")
    joined, store = join(pause_timeout_s(config.hang_timeout))
    with supervised(config, joined, store) as (stop, watchdog):
        with watchdog.paused("comparing settings"):
            check_same_settings(config, store, joined, ("torch", "transformers"))
        check_run_folder(config)
        with watchdog.paused("preparing"):
            backend = TorchBackend(config, make_mesh(config.mesh))
        Loop(backend, stop, store, watchdog).go()
    dist.destroy_process_group()


def _check_mesh(config: TrainConfig) -> None:
    """What can be known before the processes are started."""
    spec = MeshSpec.parse(config.mesh)
    given = math.prod(size for size in spec.sizes if size > 0)
    processes = int(os.environ.get("WORLD_SIZE", config.processes or 1))
    if processes == 1 and given > 1:
        raise MeshwrightError(
            f"mesh {spec.quoted} needs {given if spec.is_resolved else f'a multiple of {given}'} "
            f"processes, and this one was started alone; add --processes {given}, or start it with "
            f"torchrun --nproc-per-node {given} --no-python -- meshwright train …"
        )
    axes = axes_of(spec.resolve(processes, where="in the run"))
    check_batch(config, axes)

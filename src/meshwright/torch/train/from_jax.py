"""Resume a run that JAX has saved."""

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator

import jax
import torch.distributed as dist

from meshwright.checkpoint import Checkpoints as JaxCheckpoints
from meshwright.checkpoint import folders, holds_pieces
from meshwright.torch.checkpoint import RANKS, Checkpoints
from meshwright.training import TorchConfig, TrainConfig, prepare, save_pieces, with_settings


@contextlib.contextmanager
def as_pieces(config: TrainConfig, checkpoints: Checkpoints, step: int) -> Iterator[Checkpoints]:
    """Checkpoints that hold `step` in PyTorch's format, while the block runs.

    Where JAX has saved it, rank 0 reads it into its host's memory and writes it again.
    """
    if is_of_torch(checkpoints, step):
        yield checkpoints
        return
    place = checkpoints.folder / "from-jax"
    with RANKS.collective_errors(f"converting step {step}") as catch:
        if dist.get_rank() == 0:
            catch(lambda: shutil.rmtree(place, ignore_errors=True))
            catch(lambda: _convert(config, checkpoints, step))
    try:
        yield Checkpoints(place)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(place, ignore_errors=True)


def _convert(config: TrainConfig, checkpoints: Checkpoints, step: int) -> None:
    with JaxCheckpoints(checkpoints.folder, command=checkpoints.command) as saved:
        meta = saved.meta(step)
        moments = meta["config"]["optimizer"].get("moments", "auto")
        alone = dataclasses.replace(
            config, backend="jax", torch=TorchConfig(), mesh=TrainConfig.mesh, processes=None
        )
        setup = prepare(with_settings(alone, {"optimizer.moments": moments}))
        with jax.set_mesh(setup.step.mesh):
            state = saved.restore(step, setup.stored)
    skipped = int(state.skipped)
    meta |= {"skipped": skipped}
    save_pieces(checkpoints.folder / "from-jax", state, setup.model, meta, config.lora)


def is_of_torch(checkpoints: Checkpoints, step: int) -> bool:
    """As rank 0 sees it: disks of other hosts may be behind."""
    found = [holds_pieces(folders.complete_folder(checkpoints.folder, step))]
    dist.broadcast_object_list(found, 0)
    return found[0]

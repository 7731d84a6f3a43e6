"""`mw.train`: a run with either backend, on a mesh that is named or planned."""

import functools
from collections.abc import Collection, Sequence

from meshwright.errors import MeshwrightError
from meshwright.planner import planned
from meshwright.serving import TextSampler
from meshwright.training import TrainConfig, settings_flags, with_commits
from meshwright.training import train as train_in_jax


def train(
    config: TrainConfig, *, words: Sequence[str] | None = None, named: Collection[str] = ()
) -> None:
    """Train a model; the same call resumes a run that stopped, on this mesh or another.

    It ends with the run, with a signal (the run is saved), or with a MeshwrightError. With the mesh
    'auto' the plan chooses it, and settings that have their default value and are not in `named`.
    `words` are the command line of other processes that this starts; by default the config's own.
    """
    if words is None:
        words = [config.model, *settings_flags(config)]
    config = with_commits(config)  # before processes join: others wait minutes, not hours
    choose = functools.partial(planned, named=named)
    if config.backend == "jax":
        train_in_jax(config, choose, TextSampler)
        return
    try:
        from meshwright.torch.train import train as train_in_torch
    except ImportError as missing:
        raise MeshwrightError(f"--backend torch: {missing}") from None
    train_in_torch(config, words, choose)

"""`meshwright train`: settings from the command line and from a file, then the loop."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from meshwright.errors import MeshwrightError
from meshwright.train.config import TrainConfig, config_from_file
from meshwright.train.loop import train as run_training
from meshwright.train.setup import model_config


def train(config: tyro.conf.OmitArgPrefixes[TrainConfig]) -> None:
    """Train a language model on any mesh.

    meshwright train tiny --mesh fsdp=4,tp=2 --data embedded --steps 200 --run runs/first

    The same command goes on where the run stopped, on this mesh or another. `--mesh auto` has the
    plan choose it. `--config FILE` takes settings from a file (a run's own config.json, say); flags
    after it win.
    """
    run_training(config, planned)


def train_command(arguments: Sequence[str]) -> None:
    run_training(settings(arguments), planned)


def planned(config: TrainConfig) -> TrainConfig:
    """The settings with the mesh that the plan puts first on the devices here.

    With it come remat, micro-batches and what else it chooses, unless they were said.
    """
    import jax

    from meshwright.machines import Machine
    from meshwright.models.decoder import usual_dtype
    from meshwright.plan import plan

    if config.rules != "standard":
        raise MeshwrightError("--mesh auto knows the standard rules; with others name the mesh")
    machine, said, usual = Machine.here(), config.compute, TrainConfig(config.model)
    found = plan(
        config.rope.apply(model_config(config.model), config.seq),
        machine,
        config.batch,
        config.seq,
        remat=None if said.remat == usual.compute.remat else said.remat,
        accumulation=None if config.accumulation == usual.accumulation else config.accumulation,
        optimizer=config.optimizer.name,
        param_dtype=said.param_dtype,
        dtype=usual_dtype(said.dtype, machine.chip.platform),
        scan=said.scan,
        loss_chunk=config.loss.chunk,
    )
    choice = found.best.choice
    if jax.process_index() == 0:
        more = [f"remat={choice.remat}", f"accumulation={choice.accumulation}"]
        more += ["tp_sequence"] if choice.tp_sequence else []
        more += [f"mlp_chunk={choice.mlp_chunk}"] if choice.mlp_chunk else []
        print(f"mesh auto: {choice.mesh}, {', '.join(more)} ({found.best.reason})")
    compute: dict[str, Any] = {
        "remat": choice.remat,
        "tp_sequence": choice.tp_sequence,
        "mlp_chunk": choice.mlp_chunk,
    }
    return dataclasses.replace(
        config,
        mesh=choice.mesh,
        accumulation=choice.accumulation,
        compute=dataclasses.replace(said, **compute),
    )


def settings(arguments: Sequence[str]) -> TrainConfig:
    """The command line as settings; those of `--config FILE` are the defaults of the flags."""
    rest, file = _without_config(list(arguments))
    from_file: dict[str, Any] = {} if file is None else {"default": config_from_file(file)}
    return tyro.cli(
        TrainConfig,
        prog="meshwright train",
        description=train.__doc__,
        args=rest,
        config=(tyro.conf.PositionalRequiredArgs,),
        **from_file,
    )


def _without_config(arguments: list[str]) -> tuple[list[str], Path | None]:
    file = None
    rest = []
    words = iter(arguments)
    for word in words:
        if word == "--config":
            file = next(words, None)
            if file is None:
                raise MeshwrightError("--config needs a file of settings")
        elif word.startswith("--config="):
            file = word.partition("=")[2]
        else:
            rest.append(word)
    return rest, None if file is None else Path(file)


if __name__ == "__main__":
    train_command(sys.argv[1:])

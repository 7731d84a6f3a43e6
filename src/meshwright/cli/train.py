"""`meshwright train`: settings from the command line and from a file, then the loop."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from meshwright.cli.flags import NUMBERS, named_settings
from meshwright.errors import MeshwrightError
from meshwright.training import TrainConfig, config_from_file

_DESCRIPTION = """Train a language model on any mesh.

meshwright train tiny --mesh fsdp=4,tp=2 --data embedded --steps 200 --run runs/first

The same command resumes a stopped run, on this mesh or another. `--mesh auto` takes the mesh
that the plan puts first. `--config FILE` takes settings from a file (a run's own config.json,
say); flags after it win.
"""


def train_command(arguments: Sequence[str]) -> None:
    config = settings(arguments)
    from meshwright.api import train  # imports what plans and compiles

    train(config, words=arguments, named=named_settings(arguments))


def settings(
    arguments: Sequence[str], default: TrainConfig | None = None, prog: str = "meshwright train"
) -> TrainConfig:
    """The command line as settings; flags change `default`, or what `--config FILE` holds."""
    rest, file = _without_config(list(arguments))
    if file is not None and default is not None:
        raise MeshwrightError("--config and --plan both give all settings; leave one out")
    default = default if file is None else config_from_file(file)
    defaults: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(
        TrainConfig,
        prog=prog,
        description=_DESCRIPTION,
        args=rest,
        config=(tyro.conf.PositionalRequiredArgs,),
        registry=NUMBERS,
        **defaults,
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

"""`meshwright train`: settings from the command line and from a file, then the loop."""

import functools
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from meshwright.cli.early import check_data
from meshwright.cli.flags import named_settings, take
from meshwright.cli.parser import read
from meshwright.errors import MeshwrightError
from meshwright.files import print_line
from meshwright.interrupt import unless_ending
from meshwright.training import TrainConfig, config_from_file

HELP = """Train a language model on any mesh.

  meshwright train tiny --mesh fsdp=4,tp=2 --data embedded --steps 200 --run runs/first

The same command resumes a stopped run, on this mesh or another. `--mesh auto` takes the mesh
that the plan puts first. `--config FILE` takes settings from a file (a run's own config.json,
say); flags after it win. Two sizes have names with `--axes`: --mesh 8,32 --axes data,model."""
MOST_USED = (
    "data", "mesh", "batch", "seq", "steps", "run", "init_from", "optimizer.learning_rate",
    "accumulation", "lora.rank", "objective", "checkpoint.every", "eval.sequences",
    "compute.remat", "cpu_devices",
)  # fmt: skip


def train_command(arguments: Sequence[str]) -> None:
    config = settings(arguments)
    check_data(config)
    # jax takes a second or more to import: say so before anyone wonders
    line = functools.partial(print_line, f"{config.model}: importing jax …", sys.stderr)
    slow = threading.Timer(1.0, unless_ending, (line,))
    slow.daemon = True
    slow.start()
    from meshwright.api import train  # imports what plans and compiles

    slow.cancel()
    train(config, words=arguments, named=named_settings(arguments))


def settings(
    arguments: Sequence[str], default: TrainConfig | None = None, prog: str = "meshwright train"
) -> TrainConfig:
    """The command line as settings; flags change `default`, or what `--config FILE` holds."""
    words = list(arguments)
    file = take(words, "--config")
    if file is not None and default is not None:
        raise MeshwrightError("--config and --plan both give all settings; leave one out")
    if file is not None:
        default = config_from_file(Path(file))
    return read(TrainConfig, words, prog, HELP, default=default, first=MOST_USED)


if __name__ == "__main__":
    train_command(sys.argv[1:])

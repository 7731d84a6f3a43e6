"""`meshwright eval needle`: ask a model for what it read far back, and say where it finds it."""

import json
import sys
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from meshwright.data import Needles, needle_sequences
from meshwright.errors import MeshwrightError
from meshwright.evaluate import Group, Retrieval, check_needle, needle_rules, retrieve
from meshwright.launch import make_room_for_cpu_collectives, simulate_devices
from meshwright.models import default_dtype, describe_padding
from meshwright.present import count, mesh_text
from meshwright.serve import check_fits, generation_mesh, load, look_into


@dataclass(frozen=True)
class Needle:
    """Ask for values hidden far back in fresh rows, as `meshwright data needle` makes them.

    meshwright eval needle runs/needle --mesh sp=4 --seq 256 --rows 64
    """

    model: tyro.conf.Positional[str]
    """The folder of a run, or of a Hugging Face model that reads bytes."""
    seq: int = 256
    """Tokens of a row."""
    rows: int = 64
    """Rows to ask."""
    needles: int = Needles.needles
    """Pairs hidden in a row."""
    questions: int | None = None
    """How many of them are asked for; by default all."""
    key_length: int = Needles.key_length
    """Letters of a key."""
    value_length: int = Needles.value_length
    """Letters of a value; an answer is right if all are."""
    depths: int = 10
    """Equal parts of the row that are counted apart."""
    seed: int = 0
    """Of the rows; they are never those of training."""
    mesh: str = "dp=1,fsdp=1,tp=1,sp=1"
    """Where the model and the rows lie: sp splits rows. The default is one device."""
    context_parallel: Literal["auto", "ring", "allgather", "ulysses"] = "auto"
    """How attention is done where sp splits the rows."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """What matrices are kept and multiplied in; auto: bfloat16 on accelerators, float32 on CPUs."""
    step: int | None = None
    """The checkpoint to take; by default the last."""
    tokenizer: str | None = None
    """"bytes", for a Hugging Face model that reads bytes and does not say so."""
    json: bool = False
    """Print plain data."""
    cpu_devices: int | None = None
    """Simulate this many devices on the CPU."""


def evaluate(
    command: tyro.conf.OmitSubcommandPrefixes[
        Annotated[Needle, tyro.conf.subcommand("needle")]
        # one subcommand is none to tyro; a second that is not shown makes it one
        | Annotated[None, tyro.conf.Suppress]
    ],
) -> None:
    """Measure what a trained model can do."""
    assert command is not None
    needle(command)


def needle(asked: Needle) -> None:
    """Check everything, load the model, ask, and print."""
    settings = Needles(asked.needles, asked.questions, asked.key_length, asked.value_length)
    if asked.depths < 1:
        raise MeshwrightError(f"--depths {asked.depths} must be at least 1")
    rows = needle_sequences(settings, asked.rows, asked.seq, asked.seed, fresh=True)
    make_room_for_cpu_collectives()
    if asked.cpu_devices is not None:
        simulate_devices(asked.cpu_devices)
    source = look_into(asked.model, step=asked.step, tokenizer=asked.tokenizer)
    placed = generation_mesh(asked.mesh)
    check_fits(source.config, placed)
    strategy = check_needle(source, placed, asked.seq, asked.context_parallel)
    kind = default_dtype(asked.dtype, placed.devices.flat[0].platform)
    used = (
        f"{source.name}, mesh {mesh_text(placed.shape)} on {count(placed.size, 'device')} of "
        f"{len(jax.devices())}, {kind}"
        + (f", rows split over sp: {strategy}" if strategy is not None else "")
    )
    padded = describe_padding(source.config, needle_rules(source.config), placed.shape)
    used += "" if padded is None else f", {padded}"
    print(used, file=sys.stderr)
    model = load(source, placed, jnp.dtype(kind), needle_rules(source.config))
    found = retrieve(model, rows, context_parallel=asked.context_parallel)
    if asked.json:
        print(json.dumps({"model": used, **_data(found, asked)}))
        return
    for title, groups in (
        ("needle at", found.by_depth(asked.depths)),
        ("needle before the answer by", found.by_distance(asked.depths)),
    ):
        Console().print(_table(title, groups))
    right = int(found.right.sum())
    print(
        f"found {right:,} of {found.right.size:,}: {100 * found.share:.1f}% "
        f"({count(asked.rows, 'row')} of {asked.seq:,} tokens)"
    )


def _table(title: str, groups: list[Group]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(title)
    for name in ("asked", "found", "%"):
        table.add_column(name, justify="right")
    for group in groups:
        share = f"{100 * group.right / group.asked:.0f}"
        where = f"{group.start:,} to {group.stop - 1:,}"
        table.add_row(where, f"{group.asked:,}", f"{group.right:,}", share)
    return table


def _data(found: Retrieval, asked: Needle) -> dict[str, object]:
    return {
        "rows": asked.rows,
        "seq": asked.seq,
        "asked": found.right.size,
        "right": int(found.right.sum()),
        "share": found.share,
        "by_depth": [asdict(group) for group in found.by_depth(asked.depths)],
        "by_distance": [asdict(group) for group in found.by_distance(asked.depths)],
    }

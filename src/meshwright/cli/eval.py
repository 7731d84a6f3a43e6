"""`meshwright eval needle`: needle in a haystack, by depth and by distance."""

import json
import sys
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import tyro

from meshwright.data import Needles, needle_sequences
from meshwright.errors import MeshwrightError
from meshwright.evaluate import Group, Retrieval, check_needle, needle_rules, retrieve
from meshwright.launch import make_room_for_cpu_collectives, simulate_devices
from meshwright.models import default_dtype, describe_padding
from meshwright.present import Column, Row, count, mesh_text, table_text
from meshwright.serve import check_fits, generation_mesh, load, look_into


@dataclass(frozen=True)
class Needle:
    """Needle in a haystack: ask for hidden values in new sequences of `meshwright data needle`.

    meshwright eval needle runs/needle --mesh sp=4 --seq 256 --sequences 64
    """

    model: tyro.conf.Positional[str]
    """Folder of a run, or of a Hugging Face model with a byte vocabulary."""
    seq: int = 256
    """Sequence length in tokens."""
    sequences: int = 64
    """Number of sequences to evaluate."""
    needles: int = Needles.needles
    """Key-value pairs hidden in each sequence."""
    questions: int | None = None
    """Pairs asked for at the end of each sequence; all of them by default."""
    key_length: int = Needles.key_length
    """Letters in a key."""
    value_length: int = Needles.value_length
    """Letters in a value; an answer is correct if all its letters are."""
    depths: int = 10
    """Number of equal depth ranges that results are reported for."""
    seed: int = 0
    """Random seed; the sequences always differ from the training sequences."""
    mesh: str = "dp=1,fsdp=1,tp=1,sp=1"
    """Mesh axes and sizes; sp splits the sequences. The default is one device."""
    context_parallel: Literal["auto", "ring", "allgather", "ulysses"] = "auto"
    """Context parallelism over sp: the attention method where sp splits sequences."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of weights and matmuls; auto: bfloat16 on accelerators, float32 on CPUs."""
    step: int | None = None
    """Step of the checkpoint to load; the latest by default."""
    tokenizer: str | None = None
    """Give "bytes" for a Hugging Face model that reads bytes but has no tokenizer files."""
    json: bool = False
    """Print JSON instead of tables."""
    cpu_devices: int | None = None
    """Simulate this number of devices on the CPU."""


def evaluate(
    command: tyro.conf.OmitSubcommandPrefixes[
        Annotated[Needle, tyro.conf.subcommand("needle")]
        # tyro needs two alternatives to make a subcommand; this one is hidden
        | Annotated[None, tyro.conf.Suppress]
    ],
) -> None:
    """Evaluate a trained model."""
    assert command is not None
    needle(command)


def needle(asked: Needle) -> None:
    """Check the settings, load the model, evaluate and print."""
    settings = Needles(asked.needles, asked.questions, asked.key_length, asked.value_length)
    if asked.depths < 1:
        raise MeshwrightError(f"--depths {asked.depths} must be at least 1")
    sequences = needle_sequences(settings, asked.sequences, asked.seq, asked.seed, fresh=True)
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
        + (f", context parallelism over sp: {strategy}" if strategy is not None else "")
    )
    padded = describe_padding(source.config, needle_rules(source.config), placed.shape)
    used += "" if padded is None else f", {padded}"
    print(used, file=sys.stderr)
    model = load(source, placed, jnp.dtype(kind), needle_rules(source.config))
    retrieval = retrieve(model, sequences, context_parallel=asked.context_parallel)
    if asked.json:
        print(json.dumps({"model": used, **_data(retrieval, asked)}))
        return
    for title, groups in (
        ("needle position", retrieval.by_depth(asked.depths)),
        ("distance to the answer", retrieval.by_distance(asked.depths)),
    ):
        _print_table(title, groups)
    right = int(retrieval.right.sum())
    print(
        f"found {right:,} of {retrieval.right.size:,}: {100 * retrieval.share:.1f}% "
        f"({count(asked.sequences, 'sequence')} of {asked.seq:,} tokens)"
    )


def _print_table(title: str, groups: list[Group]) -> None:
    lines = []
    for group in groups:
        share = f"{100 * group.right / group.asked:.0f}"
        span = f"{group.start:,} to {group.stop - 1:,}"
        lines.append(Row((span, f"{group.asked:,}", f"{group.right:,}", share)))
    columns = [Column(title, right=False), *map(Column, ("asked", "found", "%"))]
    print(table_text(columns, lines))


def _data(retrieval: Retrieval, asked: Needle) -> dict[str, object]:
    return {
        "sequences": asked.sequences,
        "seq": asked.seq,
        "asked": retrieval.right.size,
        "right": int(retrieval.right.sum()),
        "share": retrieval.share,
        "by_depth": [asdict(group) for group in retrieval.by_depth(asked.depths)],
        "by_distance": [asdict(group) for group in retrieval.by_distance(asked.depths)],
    }

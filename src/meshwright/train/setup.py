"""What settings say of a step: the model, the mesh, the rules, how it is computed."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from meshwright.errors import MeshwrightError
from meshwright.layouts import Rules
from meshwright.machines import chip_of_kind
from meshwright.meshes import STANDARD_AXES, MeshSpec
from meshwright.models import indivisible
from meshwright.models.decoder import (
    PRESETS,
    Compute,
    DecoderConfig,
    activation_layouts,
    decoder_rules,
    default_dtype,
    from_hf_config,
    preset,
    sequence_split,
    t5x_rules,
)
from meshwright.ops import nontrivial_axes
from meshwright.ops.attention import (
    FLOPS_PER_BYTE,
    calls_of,
    choose_strategy,
    explain_strategy,
    sequence_order,
    slow_kernel,
)
from meshwright.train.config import TrainConfig


def model_config(model: str) -> DecoderConfig:
    """A preset's, or that of a Hugging Face config.json or of a folder that holds one."""
    if model in PRESETS:
        return preset(model)
    path = Path(model)
    if (path / "checkpoints").is_dir():
        raise MeshwrightError(
            f"{model!r} is a run, not a model; to go on with it: --config {path / 'config.json'}"
        )
    if path.is_dir() or path.suffix == ".json":
        return from_hf_config(path)
    return preset(model)  # raises, with the nearest names


def training_spec(config: TrainConfig) -> MeshSpec:
    """The mesh that is asked for; standard axes that are not named have size 1.

    With own rules the axes may be others.
    """
    spec = MeshSpec.parse(config.mesh)
    own_rules = config.rules != "standard" and not config.rules.startswith("t5x:")
    if own_rules and not set(spec.names) <= set(STANDARD_AXES):
        return spec
    return spec.with_standard_axes()


def choose_rules(config: TrainConfig) -> Rules:
    """The standard rules, one of T5X's sets, or those in a file."""
    sequence_parallel = config.compute.sequence_parallel
    if config.rules == "standard":
        return decoder_rules(sp=True, sequence_parallel=sequence_parallel)
    if sequence_parallel:
        raise MeshwrightError(
            "compute.sequence_parallel is part of the standard rules; with own rules say it there: "
            "length -> sp+tp after the rules of heads, mlp and vocab"
        )
    sets = {f"t5x:{a},{p}": (a, p) for a in (1, 2) for p in (1, 2)}
    if config.rules in sets:
        return t5x_rules(*sets[config.rules])
    try:
        text = Path(config.rules).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        raise MeshwrightError(
            f"rules {config.rules!r} are neither 'standard', nor one of {', '.join(sets)}, nor a "
            f"file that can be read ({reason})"
        ) from None
    return _with_activations(Rules.parse(text), config.rules)


def _with_activations(rules: Rules, file: str) -> Rules:
    """A file's rules, of which some are for activations: no weight needs to have their dims."""
    dims = {rule.dim for rule in rules.rules}
    standard = decoder_rules(sp=True)
    for dim in sorted(standard.optional - dims):
        example = standard.layout(dim).axes[0]
        raise MeshwrightError(
            f"rules {file!r} do not say where dim {dim!r} goes, which activations have; "
            f"add a line such as '{dim}? -> {'+'.join(example)}', or '{dim}? -> none'"
        )
    return Rules(rules.rules, optional=rules.optional | standard.optional)


def compute_of(
    config: TrainConfig, model: DecoderConfig, rules: Rules, placed: Mesh
) -> tuple[Compute, str | None]:
    """How the forward is computed; and of attention, how it is split and whether it is slow."""
    said = config.compute
    device = placed.devices.flat[0]
    dtype = jnp.dtype(default_dtype(said.dtype, device.platform))
    layouts = activation_layouts(rules, nontrivial_axes(placed.shape))
    split = sequence_split(model, layouts, placed.shape, config.seq)
    strategy: str = config.context_parallel
    words = None
    if split.ways > 1:
        split = dataclasses.replace(split, flops_per_byte=flops_per_byte(device))
        why = "as asked"
        if strategy == "auto":
            strategy, why = explain_strategy(split)
        order = sequence_order(split, choose_strategy(split, strategy))
        words = f"{strategy} over {split.ways} parts of a row, in {order} order ({why})"
    calls = calls_of(split, strategy, device.platform, dtype.name, segmented=True)
    slow = slow_kernel(calls, said.attention, device.device_kind)
    if slow is not None:
        slower = f"in the slower kernel {slow[0]} ({slow[1]})"
        words = slower if words is None else f"{words}; {slower}"
    compute = Compute(rules, dtype, said.remat, said.scan, said.attention, strategy, said.mlp_chunk)
    return compute, words


def flops_per_byte(device: Any) -> float:
    """FLOP/s of a chip for each byte/s to its neighbour; a usual figure where it is not known."""
    try:
        chip = chip_of_kind(device.device_kind, device.platform)
    except MeshwrightError:
        return FLOPS_PER_BYTE
    return FLOPS_PER_BYTE if chip.platform == "cpu" else chip.flops_per_byte


def check_sizes(
    config: TrainConfig,
    model: DecoderConfig,
    rules: Rules,
    mesh_shape: Mapping[str, int],
    split_length: bool = True,
) -> None:
    """The model, the batch and, if it is to be, the split length against the mesh."""
    if config.seq > model.max_seq:
        raise MeshwrightError(
            f"seq={config.seq} is longer than the model allows; {model.max_seq} or less would fit, "
            "or say how its positions reach further: --rope.theta, or --rope.scaling with "
            "--rope.factor"
        )
    seq = config.seq if split_length else None
    why = indivisible(model, rules, mesh_shape, config.batch, seq, config.accumulation)
    if why is not None:
        raise MeshwrightError(why)

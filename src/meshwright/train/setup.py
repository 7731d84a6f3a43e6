"""From settings to everything a run needs, with every mistake found before anything is compiled."""

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from meshwright.data import (
    Loader,
    Mixture,
    Tokenizer,
    check_data,
    held_out_loader,
    load_tokenizer,
    training_loader,
)
from meshwright.errors import MeshwrightError
from meshwright.layouts import Explanation, Rules, explain
from meshwright.machines import Machine, chip_of_kind
from meshwright.meshes import STANDARD_AXES, MeshSpec, mesh, tile_mesh
from meshwright.models import (
    SOURCE,
    SPECIAL_TOKENS,
    Compute,
    activation_layouts,
    default_dtype,
    describe_padding,
    family_of,
    from_hf_config,
    indivisible,
    model_config,
    override,
    padded_vocab,
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
from meshwright.train.optimizer import make_optimizer
from meshwright.train.run.trackers import check_trackers
from meshwright.train.state import TrainState, abstract_state, stored_state
from meshwright.train.step import StepFunctions, step_functions


@dataclasses.dataclass(frozen=True)
class Setup:
    """A run, made ready: nothing is on a device yet."""

    config: TrainConfig
    model: Any  # its config
    mesh: Mesh
    rules: Rules
    arrays: Any  # ArraySpecs of the parameters
    optimizer: Any
    functions: StepFunctions
    target: TrainState  # described
    stored: TrainState  # the same as a checkpoint holds it, without padding
    loader: Loader
    eval_loader: Loader | None
    explanation: Explanation
    attention: str | None  # how it is split over sp, and a kernel that is slow, in words
    padding: str | None  # what is padded in memory, in words


def prepare(config: TrainConfig) -> Setup:
    """Read model, mesh, rules and data, and check them against each other."""
    check_trackers(config.log.tensorboard, config.log.wandb is not None)
    model = model_of(config)
    rules = choose_rules(config, model)
    placed = training_mesh(config)
    check_sizes(config, model, rules, placed.shape)
    if config.init_from is not None:
        _check_weights(config, model)
    mixture = Mixture.parse(config.data)
    tokenizer = None
    if config.init_from is not None and (config.init_from / "tokenizer.json").exists():
        tokenizer = load_tokenizer(str(config.init_from))
    check_data(
        mixture,
        vocab=model.vocab,
        seq=config.seq,
        batch=config.batch,
        held_out=config.eval.sequences,
        tokenizer=tokenizer,
    )
    model = dataclasses.replace(model, hf_config=_hf_config(config, model, mixture.tokenizer))
    compute, attention = compute_of(config, model, rules, placed)
    loader = training_loader(
        mixture,
        batch=config.batch,
        seq=config.seq,
        accumulation=config.accumulation,
        seed=config.seed,
        held_out=config.eval.sequences,
    )
    eval_loader = None
    if config.eval.sequences:
        rows = config.batch // config.accumulation
        eval_loader = held_out_loader(
            mixture, batch=rows, seq=config.seq, held_out=config.eval.sequences
        )
    vocab = padded_vocab(model, rules, placed.shape)
    arrays = family_of(model).arrays(model, jnp.dtype(config.compute.param_dtype), vocab)
    explanation = explain(arrays, rules, placed)
    optimizer, rate = make_optimizer(config.optimizer, config.steps, arrays)
    functions = step_functions(
        model,
        compute,
        optimizer,
        rate,
        placed,
        loss=config.loss,
        clip_norm=config.optimizer.clip_norm,
        overlap=config.compute.overlap,
    )
    target = abstract_state(arrays, rules, optimizer, placed)
    return Setup(
        config, model, placed, rules, arrays, optimizer, functions, target,
        stored_state(arrays, target, optimizer), loader, eval_loader, explanation, attention,
        describe_padding(model, rules, placed.shape),
    )  # fmt: skip


def model_of(config: TrainConfig) -> Any:
    """The model that the settings name, with their changes to it."""
    return override(model_config(config.model), config.override, config.seq)


def training_spec(config: TrainConfig) -> MeshSpec:
    """The mesh that is asked for, by role; standard axes that are not named have size 1.

    With own rules the axes may have names of their own, those of the rules.
    """
    tile = _tile(config)
    if tile is not None:
        return MeshSpec.parse(f"dp=-1,fsdp=1,tp={math.prod(tile)},sp=1")
    spec = MeshSpec.parse(config.mesh)
    own_rules = config.rules != "standard" and not config.rules.startswith("t5x:")
    if own_rules and not spec.roles and not set(spec.names) <= set(STANDARD_AXES):
        return spec
    return spec.with_standard_axes()


def training_mesh(
    config: TrainConfig, machine: Machine | None = None, devices: Sequence[Any] | None = None
) -> Any:
    """The mesh of the settings over the devices here, or over a machine as `mw.mesh` takes it."""
    if _tile(config) is None:
        return mesh(training_spec(config), machine, devices, axis_types="explicit")
    submesh = None if config.submesh is None else _tile(config)
    tiles = tile_mesh(machine or Machine.here(), submesh, config.num_partitions)
    data, model = tiles.devices.shape
    placed = dataclasses.replace(
        tiles,
        axis_names=STANDARD_AXES,
        devices=tiles.devices.reshape(data, 1, model, 1),
        axis_type=AxisType.Explicit,
    )
    return placed if machine is not None and devices is None else placed.to_jax(devices)


def _tile(config: TrainConfig) -> tuple[int, ...] | None:
    """The devices of a model replica, if the settings name a tile of the machine."""
    if config.num_partitions is not None:
        return (config.num_partitions,)
    if config.submesh is None:
        return None
    sizes = config.submesh.strip("()[] ").split(",")
    if not all(size.strip().isdecimal() for size in sizes):
        raise MeshwrightError(
            f"submesh={config.submesh!r} is not a tile; write its sides x,y,z,cores: 2,1,1,2"
        )
    return tuple(map(int, sizes))


def choose_rules(config: TrainConfig, model: Any) -> Rules:
    """The model's standard rules, one of T5X's sets, or those in a file."""
    family = family_of(model)
    sequence_parallel = config.compute.sequence_parallel
    if config.rules == "standard":
        return family.rules(sp=True, sequence_parallel=sequence_parallel)
    if sequence_parallel:
        raise MeshwrightError(
            "compute.sequence_parallel is part of the standard rules; with own rules say it there: "
            "length -> sp+tp after the rules of heads, mlp and vocab"
        )
    sets = {f"t5x:{a},{p}": (a, p) for a in (1, 2) for p in (1, 2)}
    if config.rules in sets:
        return family.t5x_rules(*sets[config.rules])
    try:
        text = Path(config.rules).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        raise MeshwrightError(
            f"rules {config.rules!r} are neither 'standard', nor one of {', '.join(sets)}, nor a "
            f"file that can be read ({reason})"
        ) from None
    return _with_activations(Rules.parse(text), config.rules, family.rules(sp=True))


def _with_activations(rules: Rules, file: str, standard: Rules) -> Rules:
    """A file's rules, of which some are for activations: no weight needs to have their dims."""
    dims = {rule.dim for rule in rules.rules}
    for dim in sorted(standard.optional - dims):
        example = standard.layout(dim).axes[0]
        raise MeshwrightError(
            f"rules {file!r} do not say where dim {dim!r} goes, which activations have; "
            f"add a line such as '{dim}? -> {'+'.join(example)}', or '{dim}? -> none'"
        )
    return Rules(rules.rules, optional=rules.optional | standard.optional)


def compute_of(
    config: TrainConfig, model: Any, rules: Rules, placed: Mesh
) -> tuple[Compute, str | None]:
    """How the forward is computed; and of attention, how it is split and whether it is slow."""
    said = config.compute
    device = placed.devices.flat[0]
    dtype = jnp.dtype(default_dtype(said.dtype, device.platform))
    layouts = activation_layouts(rules, nontrivial_axes(placed.shape))
    split = family_of(model).sequence_split(model, layouts, placed.shape, config.seq)
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
    config: TrainConfig, model: Any, rules: Rules, mesh_shape: Mapping[str, int]
) -> None:
    """The model, the batch and the sequence length against the mesh and against each other."""
    if config.seq > model.max_seq:
        raise MeshwrightError(
            f"seq={config.seq} is longer than the model allows; {model.max_seq} or less would fit, "
            "or say how its positions reach further: --override rope.theta=…, or rope.scaling=… "
            "with rope.factor=…"
        )
    why = indivisible(model, rules, mesh_shape, config.batch, config.seq, config.accumulation)
    if why is not None:
        raise MeshwrightError(why)


def _check_weights(config: TrainConfig, model: Any) -> None:
    """Weights made for other settings (a rope, a norm) would fit and be wrong."""
    folder = config.init_from
    assert folder is not None
    theirs = override(from_hf_config(folder), config.override, config.seq)
    differ = [
        field.name
        for field in dataclasses.fields(model)
        if field.compare
        and field.name != "max_seq"
        and getattr(model, field.name) != getattr(theirs, field.name)
    ]
    if differ:
        said = ", ".join(
            f"{name} {getattr(theirs, name)} there, {getattr(model, name)} here" for name in differ
        )
        raise MeshwrightError(
            f"init_from {str(folder)!r} holds the weights of another model: {said}; give that "
            f"folder as the model too: meshwright train {folder} --init-from {folder}"
        )


def _hf_config(config: TrainConfig, model: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    """What `save_hf` will need of the folder that the weights or the model came from.

    Special tokens and tokenizer files are kept if the data was packed with that tokenizer.
    """
    source = model if config.init_from is None else from_hf_config(config.init_from)
    fields = dict(source.hf_config or {})
    folder = None if SOURCE not in fields else Path(fields[SOURCE])
    if folder is not None and (folder / "tokenizer.json").is_file():
        with contextlib.suppress(MeshwrightError):  # one that cannot be read is another one
            if load_tokenizer(folder).identity == tokenizer.identity:
                return fields
    elif config.init_from is not None:
        return fields  # no tokenizer contradicts its special tokens
    kept = {name: fields[name] for name in fields if name not in (SOURCE, *SPECIAL_TOKENS)}
    return kept | {"eos_token_id": tokenizer.end_of_document}


def bytes_per_device(tree: Any) -> int:
    """Of described arrays with shardings, what one device holds."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        elements = 1
        for size in leaf.sharding.shard_shape(leaf.shape):
            elements *= size
        total += elements * leaf.dtype.itemsize
    return total

"""What settings say of a step: the model, the data, the mesh and the rules."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from meshwright.data import OBJECTIVES, EncoderDecoderObjective, Tokenizer, sentinel_top
from meshwright.errors import MeshwrightError, one_of
from meshwright.hub import MODEL, TOKENIZER, local_folder, pinned
from meshwright.layouts import Rules, select_trainable
from meshwright.machines import Machine
from meshwright.meshes import STANDARD_AXES, Accepts, MeshSpec, mesh, tile_mesh
from meshwright.models import (
    activation_layouts,
    family_of,
    hf_names,
    indivisible,
    indivisible_blocks,
    model_config,
    override,
    quantized_base,
    serving_of,
    what_fits,
    with_adapter,
)
from meshwright.ops import nontrivial_axes
from meshwright.ops.attention import (
    STRATEGIES,
)
from meshwright.ops.attention import refusal as strategy_refusal
from meshwright.training.config import TrainConfig

if TYPE_CHECKING:
    from meshwright.data import Mixture


def model_of(config: TrainConfig) -> Any:
    """The model that the settings name, with their changes to it."""
    return override(model_config(config.model), config.override, config.seq)


def weights_folder(config: TrainConfig) -> Path | None:
    """The folder of the weights that a run starts from; an adapter needs some.

    It is --init-from, or the model's own folder if it holds weights; None: random weights.
    """
    if config.init_from is not None:
        return local_folder(config.init_from, MODEL)
    folder = local_folder(config.model, MODEL)
    if folder.is_dir() and any(folder.glob("*.safetensors")):
        return folder
    if not config.lora.rank:
        return None
    model_config(config.model)  # says what else the folder is
    raise MeshwrightError(
        "LoRA adapts weights that are trained, and no folder of weights is named: give one as the "
        "model, meshwright train FOLDER, or with --init-from FOLDER"
    )


def with_commits(config: TrainConfig) -> TrainConfig:
    """The settings with the commits of models and data on the Hub; models are downloaded."""
    from meshwright.data import with_sources

    init = config.init_from
    weights_folder(config)
    return dataclasses.replace(
        config,
        model=pinned(config.model),
        data=with_sources(config.data, lambda source: pinned(source, "dataset")),
        init_from=None if init is None else pinned(init),
    )


def mixture_of(config: TrainConfig) -> "Mixture":
    """The data of the settings; files are packed on first use, with the model's tokenizer."""
    from meshwright.data import Mixture, open_or_pack

    folder = local_folder(config.model, TOKENIZER)
    init = None if config.init_from is None else local_folder(config.init_from, TOKENIZER)
    folders = (init, folder, folder.parent)
    with_tokenizer = (one for one in folders if one and (one / "tokenizer.json").is_file())
    is_named = init is not None or folder.exists()
    tokenizer = next(map(str, with_tokenizer), "bytes") if is_named else "bytes"
    return Mixture.parse(config.data, lambda path: open_or_pack(path, tokenizer))


def objective_of(
    config: TrainConfig, model: Any, tokenizer: Tokenizer | None = None
) -> EncoderDecoderObjective | None:
    """What makes the fields of a batch of an encoder and a decoder; None for a decoder alone.

    Without data's tokenizer, its lengths alone.
    """
    name = _objective_name(model, config.objective)
    if name not in OBJECTIVES:
        return None
    end, vocab = 1, model.vocab
    if tokenizer is not None:
        end, vocab = tokenizer.end_of_document, sentinel_top(tokenizer, model.vocab)
    (start,) = serving_of(model).decoder_prompt(model, ())
    objective = OBJECTIVES[name](config.seq, vocab, end, start, config.seed)
    if tokenizer is not None:
        objective.check_sentinels(tokenizer)
    return objective


def _objective_name(model: Any, objective: str) -> str:
    known = family_of(model).objectives
    name = known[0] if objective == "auto" else objective
    if name not in known:
        raise MeshwrightError(
            f"objective={name!r} is not one of this model; it trains on {one_of(known)}"
        )
    return name


def field_lengths(model: Any, seq: int, objective: str = "auto") -> Mapping[str, int]:
    """The length of each field of a batch."""
    name = _objective_name(model, objective)
    if name not in OBJECTIVES:
        return dict.fromkeys(family_of(model).batch_fields, seq)
    return OBJECTIVES[name](seq, model.vocab, end=1).lengths


def training_spec(config: TrainConfig) -> MeshSpec:
    """The mesh that is asked for, by role; standard axes that are not named have size 1.

    With rules from a file that name axes of this mesh, the axes keep their names.
    """
    tile = _tile(config)
    if tile is not None:
        return MeshSpec.parse(f"dp=-1,fsdp=1,tp={math.prod(tile)},sp=1")
    spec = MeshSpec.parse(config.mesh)
    rules = file_rules(config)
    axes = set() if rules is None else {axis for rule in rules.rules for axis in rule.axes}
    if axes & (set(spec.names) - set(STANDARD_AXES)):
        return spec
    return spec.with_standard_axes()


def training_mesh(
    config: TrainConfig,
    machine: Machine | None = None,
    devices: Sequence[Any] | None = None,
    accepts: Accepts | None = None,
) -> Any:
    """The mesh of the settings over the devices here, or over a machine as `mw.mesh` takes it."""
    if _tile(config) is None:
        spec = training_spec(config)
        return mesh(spec, machine, devices, axis_types="explicit", accepts=accepts)
    submesh = None if config.submesh is None else _tile(config)
    tiles = tile_mesh(machine or Machine.here(), submesh, config.num_partitions)
    data, model = tiles.devices.shape
    placed = dataclasses.replace(
        tiles,
        axis_names=STANDARD_AXES,
        devices=tiles.devices.reshape(data, 1, model, 1),
        axis_types="explicit",
    )
    return placed if machine is not None and devices is None else placed.to_jax(devices)


def _tile(config: TrainConfig) -> tuple[int, ...] | None:
    """The devices of a model replica, if the settings name a tile of the machine."""
    if config.num_partitions is not None:
        return (config.num_partitions,)
    if config.submesh is None:
        return None
    sizes = config.submesh.strip("()[] ").split(",")
    if not all(size.strip().isdecimal() and int(size) for size in sizes):
        raise MeshwrightError(
            f"submesh={config.submesh!r} is not a tile; write its sides x,y,z,cores: 2,1,1,2"
        )
    return tuple(map(int, sizes))


def choose_rules(config: TrainConfig, model: Any) -> Rules:
    """The model's standard rules, one of T5X's sets, or those in a file."""
    family = family_of(model)
    sequence_parallel = config.compute.sequence_parallel
    if config.rules == "standard":
        ep = _tile(config) is None and "ep" in training_spec(config).names
        return family.rules(sp=True, sequence_parallel=sequence_parallel, ep=ep)
    if sequence_parallel:
        raise MeshwrightError(
            "compute.sequence_parallel is part of the standard rules; with own rules say it there: "
            "length -> sp+tp after the rules of heads, mlp and vocab"
        )
    rules = file_rules(config)
    if rules is None:
        return family.t5x_rules(*_T5X[config.rules])
    return _with_activations(rules, config.rules, family.rules(sp=True))


_T5X = {f"t5x:{a},{p}": (a, p) for a in (1, 2) for p in (1, 2)}


def file_rules(config: TrainConfig) -> Rules | None:
    """The rules of a file; None for the standard rules and T5X's."""
    if config.rules == "standard" or config.rules in _T5X:
        return None
    try:
        text = Path(config.rules).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        raise MeshwrightError(
            f"rules {config.rules!r} are neither 'standard', nor one of {', '.join(_T5X)}, nor a "
            f"file that can be read ({reason})"
        ) from None
    if "=>" in text:
        raise MeshwrightError(
            f"rules {config.rules!r} are path rules (regex => layout), which are for scripts; "
            "train takes one 'dim -> axis' a line"
        )
    try:
        return Rules.parse(text)
    except MeshwrightError as mistake:
        raise MeshwrightError(f"rules {config.rules!r}: {mistake}") from None


def _with_activations(rules: Rules, file: str, standard: Rules) -> Rules:
    """A file's rules, of which some are for activations: no weight needs to have their dims."""
    dims = {rule.dim for rule in rules.rules}
    for dim in sorted(standard.optional - dims):
        if dim != "batch" and not dim.endswith("length"):  # of weights that some models have
            continue
        example = standard.layout(dim).axes[0]
        raise MeshwrightError(
            f"rules {file!r} do not say where dim {dim!r} goes, which activations have; "
            f"add a line such as '{dim}? -> {'+'.join(example)}', or '{dim}? -> none'"
        )
    return Rules(rules.rules, optional=rules.optional | (standard.optional & dims))


def training_arrays(config: TrainConfig, model: Any, dtype: Any, vocab: int | None = None) -> Any:
    """ArraySpecs of all that a step holds of the model, with what is trained; nothing quantized.

    `dtype` is that of matmuls; `vocab` is the vocabulary in memory, if it is padded.
    """
    family, lora = family_of(model), config.lora
    arrays = family.arrays(model, jnp.dtype(config.compute.param_dtype), vocab)
    if not lora.rank:
        return select_trainable(arrays, config.trainable)
    base = dtype if lora.base == "auto" or lora.quantizes else jnp.dtype(lora.base)
    return with_adapter(arrays, lora, base, hf_names(model))


def held_arrays(config: TrainConfig, arrays: Any) -> Any:
    """The arrays of `training_arrays` as a step holds them: frozen matrices may be quantized."""
    return quantized_base(arrays, config.lora.base) if config.lora.quantizes else arrays


def check_sizes(
    config: TrainConfig, model: Any, rules: Rules, mesh_shape: Mapping[str, int]
) -> None:
    """The model, the batch, the length and how attention splits it, against the mesh."""
    check_length(config, model)
    why = _refusal(config, model, rules, mesh_shape, config.batch, config.seq)
    if why is None:
        return

    def refuses(mesh_shape: Mapping[str, int], batch: int, seq: int) -> bool:
        if seq > model.max_seq:
            return True
        return _refusal(config, model, rules, mesh_shape, batch, seq) is not None

    def accepts(accumulation: int) -> bool:
        changed = dataclasses.replace(config, accumulation=accumulation)
        return _refusal(changed, model, rules, mesh_shape, config.batch, config.seq) is None

    fits = what_fits(mesh_shape, config.batch, config.seq, refuses, config.accumulation, accepts)
    raise MeshwrightError(f"{why}; {fits}")


def accepted_meshes(config: TrainConfig, model: Any) -> Accepts:
    """Which meshes the settings can run on, for errors that propose one."""
    rules = choose_rules(config, model)
    return lambda shape: _refusal(config, model, rules, shape, config.batch, config.seq) is None


def _refusal(
    config: TrainConfig,
    model: Any,
    rules: Rules,
    mesh_shape: Mapping[str, int],
    batch: int,
    seq: int,
) -> str | None:
    """Why a mesh cannot run the settings with this batch and length; None if it can."""
    why = indivisible(model, rules, mesh_shape, batch, None, config.accumulation)
    why = why or indivisible_blocks(model, config.lora.base, rules, mesh_shape)
    if why is not None:
        return why
    # the length last: one that sp divides may still not suit the strategy
    layouts = activation_layouts(rules, nontrivial_axes(mesh_shape))
    split = family_of(model).sequence_split(model, layouts, mesh_shape, seq)
    strategy = config.context_parallel
    names = STRATEGIES if strategy == "auto" else (strategy,)
    reasons = [strategy_refusal(split, name, proposes=False) for name in names]
    if all(reasons):
        each = ", ".join(f"{name}: {why}" for name, why in zip(names, reasons, strict=True))
        auto = f"context parallelism over sp={split.ways} is not possible: {each}"
        named = f"context_parallel={strategy!r} is not possible: {reasons[0]}"
        return auto if strategy == "auto" else named
    return indivisible(model, rules, mesh_shape, batch, seq, config.accumulation)


def check_length(config: TrainConfig, model: Any) -> None:
    """Raise if the sequences are longer than the model's positions reach."""
    if config.seq > model.max_seq:
        changes = " ".join(family_of(model).longer(model, config.seq))
        further = f", or let its positions reach further: --override {changes}" if changes else ""
        raise MeshwrightError(
            f"seq={config.seq} is longer than the model allows; {model.max_seq} or less would fit"
            f"{further}"
        )

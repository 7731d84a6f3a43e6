"""From settings to everything a run needs, with every mistake found before anything is compiled."""

import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from meshwright.arithmetic import divisors
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
from meshwright.layouts import Explanation, Rules, axes_of, explain
from meshwright.machines import chip_of_kind
from meshwright.meshes import STANDARD_AXES, MachineMesh, MeshSpec, mesh
from meshwright.models.decoder import (
    PRESETS,
    SOURCE,
    SPECIAL_TOKENS,
    Compute,
    DecoderConfig,
    abstract_arrays,
    activation_layouts,
    decoder_rules,
    default_dtype,
    describe_padding,
    from_hf_config,
    padded_vocab,
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
from meshwright.present import nearest_multiples
from meshwright.train.config import RopeConfig, TrainConfig
from meshwright.train.optimizer import make_optimizer
from meshwright.train.run.trackers import check_trackers
from meshwright.train.state import TrainState, abstract_state, stored_state
from meshwright.train.step import StepFunctions, step_functions


@dataclasses.dataclass(frozen=True)
class Setup:
    """A run, made ready: nothing is on a device yet."""

    config: TrainConfig
    model: DecoderConfig
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
    model = config.rope.apply(model_config(config.model), config.seq)
    rules = choose_rules(config)
    placed = mesh(training_spec(config), axis_types="explicit")
    check_model(model, rules, placed)
    if config.init_from is not None:
        _check_weights(config.init_from, model, config.rope)
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
        longest=model.max_seq,
        tokenizer=tokenizer,
    )
    model = dataclasses.replace(model, hf_config=_hf_config(config, model, mixture.tokenizer))
    # before the batch: a length that sp divides may still not suit the strategy
    compute, attention = compute_of(config, model, rules, placed)
    check_batch(config, rules, placed)
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
    arrays = abstract_arrays(model, jnp.dtype(config.compute.param_dtype), vocab)
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


def check_model(model: DecoderConfig, rules: Rules, placed: Mesh | MachineMesh) -> None:
    """The model's sizes against the mesh, before each array says the same."""
    for dim in ("heads", "kv_heads", "mlp", "embed"):  # the vocabulary is padded
        size = getattr(model, dim)
        axes = [axis for axis in rules.layout(dim).axes[0] if axis in placed.shape]
        parts = math.prod(placed.shape[axis] for axis in axes)
        if size % parts:
            over = " · ".join(f"{axis}={placed.shape[axis]}" for axis in axes)
            fit = [str(d) for d in divisors(size) if d <= placed.size and placed.size % d == 0]
            raise MeshwrightError(
                f"the model's {dim}={size} cannot be split in {parts} ({over}); on "
                f"{placed.size} devices {', '.join(fit)} would fit"
            )


def check_length(model: DecoderConfig, seq: int) -> None:
    """Rows that the model's positions do not reach."""
    if seq > model.max_seq:
        raise MeshwrightError(
            f"seq={seq} is longer than the model allows; {model.max_seq} or less would fit, or say "
            "how its positions reach further: --rope.theta, or --rope.scaling with --rope.factor"
        )


def _check_weights(folder: Path, model: DecoderConfig, changed: RopeConfig) -> None:
    """Weights made for other settings (a rope, a norm) would fit and be wrong."""
    theirs = changed.apply(from_hf_config(folder), model.max_seq)
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


def _hf_config(config: TrainConfig, model: DecoderConfig, tokenizer: Tokenizer) -> dict[str, Any]:
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


def check_batch(config: TrainConfig, rules: Rules, placed: Mesh | MachineMesh) -> None:
    """Batch and sequence against the mesh, in the user's own words."""
    layouts = activation_layouts(rules, nontrivial_axes(placed.shape))
    rows, length = (axes_of(entry, "tokens") for entry in layouts.tokens.partitions)
    parts = config.accumulation
    for axis in rows:
        parts *= placed.shape[axis]
    if config.batch % parts:
        said = " · ".join(
            [f"{axis}={placed.shape[axis]}" for axis in rows]
            + [f"accumulation={config.accumulation}"]
        )
        raise MeshwrightError(
            f"batch={config.batch} is not divisible by {said} = {parts}: every device takes the "
            f"same number of rows of every micro-batch; batch="
            f"{nearest_multiples(config.batch, parts)} would fit"
        )
    between = axes_of(layouts.residual.partitions[1], "residual") or length
    parts = 1
    for axis in between:
        parts *= placed.shape[axis]
    if config.seq % parts:
        said = " · ".join(f"{axis}={placed.shape[axis]}" for axis in between)
        raise MeshwrightError(
            f"seq={config.seq} is not divisible by {said}, which split the sequence; seq="
            f"{nearest_multiples(config.seq, parts)} would fit"
        )


def bytes_per_device(tree: Any) -> int:
    """Of described arrays with shardings, what one device holds."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        elements = 1
        for size in leaf.sharding.shard_shape(leaf.shape):
            elements *= size
        total += elements * leaf.dtype.itemsize
    return total

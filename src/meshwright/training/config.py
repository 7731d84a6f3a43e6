"""All settings of a run, as one value that can be written down and read again."""

import dataclasses
import functools
import json
import math
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from meshwright.arithmetic import check_seed
from meshwright.errors import MeshwrightError, did_you_mean, explained
from meshwright.launch import HANG_TIMEOUT_S, check_simulated, convert_paths, flat_settings
from meshwright.models import LoraConfig, LossConfig
from meshwright.training.optimizer_config import OptimizerConfig

DPO = "dpo"  # the objective
AUTO = "auto"  # a mesh that is chosen once the devices are known
DEFAULT_MESH = "dp=1,fsdp=-1,tp=1,sp=1"
LATEST = "latest"  # of resume_from, besides a step
NONE = "none"


@dataclasses.dataclass(frozen=True)
class ComputeConfig:
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of matmuls; auto: bfloat16 on accelerators, float32 on CPUs."""
    matmul: Literal["auto", "fp8"] = "auto"
    """Matmuls of the layers; auto: in `dtype`; fp8: e4m3, gradients e5m2, one scale per tensor."""
    fp8_skips: int = 0
    """With fp8, layers at each end of a stack that stay in `dtype`, as the LM head does."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of parameters and, unless --optimizer.moments says another, of optimizer state."""
    remat: Literal["none", "elementwise", "mlp", "full", "offload"] = "none"
    """What the backward pass recomputes, from nothing to all; offload: all, inputs on the host."""
    layers: Literal["auto", "scan", "unroll"] = "auto"
    """A scan over layers compiles fast, unrolled layers run faster; auto: by machine, printed."""
    attention: Literal["auto", "hopper", "cudnn", "splash", "dense", "blockwise"] = "auto"
    """Attention kernel; auto: the fastest that supports the call."""
    sequence_parallel: bool = False
    """Megatron's sequence parallelism: shard activations between blocks over tp."""
    mlp_chunk: int = 0
    """Tokens per device in the feed-forward at a time; 0: all of them."""
    experts: Literal["auto", "ring", "all-to-all"] = "auto"
    """How tokens reach the experts of other devices along ep; auto: the way that sends less."""
    capacity: float = 0.0
    """Tokens of a sequence that an expert takes, over the average; the last ones beyond are
    dropped. 0: no token is dropped."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """On TPUs, overlap the all-gather of weights with compute; auto: on v4, v5p and v6e."""

    def __post_init__(self) -> None:
        if self.remat == "offload" and self.layers == "unroll":
            raise MeshwrightError(
                "compute.remat offload needs compute.layers scan (or auto): without a loop the "
                "compiler fetches activations from the host long before they are used"
            )
        if self.fp8_skips < 0:
            raise MeshwrightError(f"compute.fp8_skips={self.fp8_skips} must be at least 0")
        if self.matmul == "fp8" and self.mlp_chunk:
            raise MeshwrightError(
                "compute.matmul fp8 takes one scale of a whole tensor, and compute.mlp_chunk never "
                "has one; leave out one of them"
            )
        if self.mlp_chunk < 0:
            raise MeshwrightError(f"compute.mlp_chunk={self.mlp_chunk} must be at least 0")
        if not 0 <= self.capacity < math.inf:
            raise MeshwrightError(
                f"compute.capacity={self.capacity} must be a number above 0, such as 1.25; 0 means "
                "that no token is dropped"
            )


@dataclasses.dataclass(frozen=True)
class DpoConfig:
    """Settings of --objective dpo."""

    beta: float = 0.1
    """How strongly the model is held to the reference: the factor of the log-ratios."""
    loss_type: Literal["sigmoid", "sigmoid_norm"] = "sigmoid"
    """sigmoid: of sums over the tokens of an answer; sigmoid_norm: length-normalized, of their
    means (a larger beta is usual: Tülu 3 has 5)."""

    def __post_init__(self) -> None:
        if not self.beta > 0:  # nan too
            raise MeshwrightError(f"dpo.beta={self.beta} must be above 0, such as 0.1")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every: int = 500
    """Steps from one to the next; one is also saved at the end."""
    keep_last: int = 3
    """How many of the latest are kept; the newest healthy one is kept in any case."""
    keep_every: int | None = None
    """Also keep those whose step is a multiple of this."""
    keep_best: bool = True
    """Also keep the one with the lowest evaluation loss, of those evaluated when they are saved."""


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    every: int = 500
    """Steps from one evaluation to the next; there is one at the end too."""
    sequences: int = 0
    """Sequences held out at the end of each token store for evaluation; 0: no evaluation."""
    patience: int | None = None
    """Stop after this many evaluations without a lower loss; None: never."""
    prompts: tuple[str, ...] = ()
    """Texts that each evaluation continues with the current weights, greedily: they are printed,
    and shown on the run's page."""

    def __post_init__(self) -> None:
        for name in ("patience", "prompts"):
            if getattr(self, name) not in (None, ()) and not self.sequences:
                raise MeshwrightError(
                    f"eval.{name} needs evaluations; hold out some with --eval.sequences, such as "
                    "64"
                )


@dataclasses.dataclass(frozen=True)
class LogConfig:
    every: int = 1
    """Steps from one line of metrics.jsonl to the next."""
    tensorboard: bool = False
    wandb: str | None = None
    """A project's name."""


@dataclasses.dataclass(frozen=True)
class TorchConfig:
    """Settings of --backend torch."""

    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile of each layer; auto: on GPUs."""
    loss_parallel: bool = True
    """With tensor parallelism, keep logits split over the vocabulary until the loss is computed."""
    reshard_after_forward: bool = True
    """Free the weights of a layer after its forward pass; the backward pass all-gathers them."""


@explained("mw.TrainConfig('tiny', steps=200, run='runs/first')")
@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """All settings of a run."""

    model: str
    """A preset (tiny, llama-3.1-8b …), a Hugging Face config.json, a folder that holds one, or a
    name on the Hub (org/name, org/name@revision). A run starts from the weights of a folder or of
    the Hub, and else from random ones."""
    run: Path = Path("runs/latest")
    """The run's folder. If it holds checkpoints, the run resumes: see --resume-from."""
    backend: Literal["jax", "torch"] = "jax"
    """torch: FSDP2 and tensor parallelism on the Hugging Face model; --processes starts one per
    device, or torchrun does."""
    mesh: str = DEFAULT_MESH
    """Sizes of the mesh axes; one may be -1: all devices left. auto: what `plan` chooses."""
    num_partitions: int | None = None
    """As in T5X: devices of a model replica (tp), a compact tile of the machine; the rest is dp."""
    submesh: str | None = None
    """As in T5X: the tile of a model replica as x,y,z,cores, such as 2,1,1,2; the rest is dp."""
    data: str = "embedded"
    """A token store, a file or dataset on the Hub that is packed on first use (chat.jsonl,
    org/name), several with weights (a.store:0.7,b.store:0.3), or the embedded stories."""
    pack: bool = True
    """Pack several documents into a sequence; --no-pack gives each document a sequence of its own,
    cut or padded to --seq."""
    objective: Literal["auto", "next-token", "dpo", "span-corruption", "prefix-lm", "examples"] = (
        "auto"
    )
    """What is predicted; auto: next tokens for decoders, corrupted spans for T5. dpo: of pairs, the
    chosen answer rather than the rejected. Of T5, examples: the encoder reads a prompt, the decoder
    predicts the answer."""
    steps: int = 1000
    """Number of optimizer steps."""
    stop_at: int | None = None
    """Save and stop at this step, at most `steps`; the learning rate still follows `steps`."""
    resume_from: str = LATEST
    """Checkpoint to resume from: a step, latest, or none to start anew. Later ones are set aside,
    not deleted."""
    batch: int = 32
    """Global batch size in sequences, over all devices and micro-batches."""
    seq: int = 512
    """Sequence length in tokens."""
    context_parallel: Literal["auto", "ring", "allgather", "ulysses"] = "auto"
    """Context parallelism over sp: how attention is computed; auto prints its choice and why."""
    accumulation: int = 1
    """Gradient accumulation: micro-batches per optimizer step."""
    seed: int = 0
    """Random seed for initialization and data order, from 0 to 2**32 - 1."""
    init_from: str | None = None
    """Start from the weights of this Hugging Face folder, or name on the Hub, instead."""
    rules: str = "standard"
    """Sharding rules: standard, a set of T5X (t5x:1,1 t5x:2,1 t5x:1,2 t5x:2,2), or a file."""
    override: tuple[str, ...] = ()
    """Changes to the model's config, each NAME=VALUE: rope.theta=5e7, layers=4."""
    trainable: tuple[str, ...] = ()
    """Train only arrays in whose path one of these regexes is found: norm, layers/-1/ (the last
    layer). Without any: all."""
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    dpo: DpoConfig = dataclasses.field(default_factory=DpoConfig)
    compute: ComputeConfig = dataclasses.field(default_factory=ComputeConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
    torch: TorchConfig = dataclasses.field(default_factory=TorchConfig)
    max_skipped: int = 10
    """Consecutive steps with a loss or gradient that is not finite, after which training stops."""
    hang_timeout: float = HANG_TIMEOUT_S
    """Seconds without a new step after which the run ends and names the process that hangs.
    Compiling, saving and evaluating may take an hour, or four times this."""
    coordinator: str | None = None
    """Several processes: HOST:PORT of process 0, or auto (Slurm, Kubernetes, TPU pods)."""
    processes: int | None = None
    """How many there are. With --backend torch and not under torchrun: start so many here."""
    process_id: int | None = None
    """Which this is, from 0."""
    cpu_devices: int | None = None
    """Simulate this many devices on the CPU, at most 1024."""

    def __post_init__(self) -> None:
        convert_paths(self)
        values = flat_settings(self)
        for name, least in _AT_LEAST.items():
            value = values[name]
            if value is not None and value < least:
                raise MeshwrightError(f"{name}={value} must be at least {least}")
        for name, value in values.items():
            _check_number(name, value)
            # none of a group that is no dataclass: `explained` says what it must be
            if typing.get_origin(_types_of_settings().get(name)) is tuple:
                _check_texts(value, name)
        check_seed(self.seed)
        if self.lora.rank and self.trainable:
            raise MeshwrightError(
                "lora.rank and trainable both say what is trained; give --lora.targets to adapt "
                "some matrices only, or leave one out"
            )
        if self.lora.dropout and self.compute.mlp_chunk:
            raise MeshwrightError(
                "lora.dropout is of all tokens of a sequence at once, and compute.mlp_chunk takes "
                "some of them; leave one of the two out"
            )
        if self.backend == "jax" and self.torch != TorchConfig():
            raise MeshwrightError("the settings torch.… belong to --backend torch; add it")
        if self.objective != DPO and self.dpo != DpoConfig():
            raise MeshwrightError("the settings dpo.… belong to --objective dpo; add it")
        for name in ("z_loss", "router_z", "load_balance") if self.objective == DPO else ():
            value = getattr(self.loss, name)
            if value and value != getattr(LossConfig(), name):
                raise MeshwrightError(
                    f"loss.{name}={value} is added to the loss of next tokens, and objective is "
                    "dpo; leave one of them out"
                )
        for name in ("steps", "batch", "seq", "accumulation"):
            if values[name] > LARGEST_COUNT:
                raise MeshwrightError(f"{name}={values[name]} must be at most {LARGEST_COUNT}")
        if self.resume_from not in (LATEST, NONE) and not self.resume_from.isdecimal():
            raise MeshwrightError(
                f"resume_from={self.resume_from!r} is neither a step nor 'latest' nor 'none'"
                f"{did_you_mean(self.resume_from, (LATEST, NONE))}"
            )
        if self.num_partitions is not None and self.submesh is not None:
            raise MeshwrightError("give num_partitions or submesh, not both: each is T5X's tile")
        tiles = self.num_partitions is not None or self.submesh is not None
        if tiles and self.mesh != DEFAULT_MESH:
            raise MeshwrightError(
                f"mesh={self.mesh!r} and {'submesh' if self.submesh else 'num_partitions'} both "
                "say where the axes go; give one of them"
            )
        if self.stop_at is not None and self.stop_at > self.steps:
            raise MeshwrightError(
                f"stop_at={self.stop_at} is beyond the end of the run, steps={self.steps}; give at "
                f"most {self.steps}, or leave it out"
            )
        if self.hang_timeout <= 0:
            raise MeshwrightError(f"hang_timeout={self.hang_timeout} must be above 0, such as 600")
        if self.cpu_devices is not None:
            check_simulated(self.cpu_devices)
        warmup = self.optimizer.warmup_steps
        if warmup is not None and warmup > self.steps:
            raise MeshwrightError(
                f"optimizer.warmup_steps={warmup} is longer than the run, steps={self.steps}: the "
                f"peak learning rate would never be reached; give at most {self.steps}, or for a "
                "short trial of a longer run keep --steps and add --stop-at"
            )


LARGEST_COUNT = 2**31 - 1  # steps and dims of arrays are counted in int32
_LEAST_FLOAT32, _MOST_FLOAT32 = 1.2e-38, 3.4e38
_AT_LEAST = {
    "steps": 1, "stop_at": 1, "batch": 1, "seq": 1, "accumulation": 1, "max_skipped": 1,
    "cpu_devices": 1, "num_partitions": 1, "eval.sequences": 0, "eval.every": 1,
    "eval.patience": 1, "log.every": 1, "checkpoint.every": 1, "checkpoint.keep_last": 1,
    "checkpoint.keep_every": 1,
}  # fmt: skip


def with_settings(config: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig:
    """The config with other values of the settings that have these dotted names."""
    for name, value in changes.items():
        _check_type(value, _types_of_settings()[name], name)
    top = {name: value for name, value in changes.items() if "." not in name}
    nested: dict[str, dict[str, Any]] = {}
    for name in changes.keys() - top.keys():
        group, _, last = name.partition(".")
        nested.setdefault(group, {})[last] = changes[name]
    for group, values in nested.items():
        top[group] = dataclasses.replace(getattr(config, group), **values)
    return dataclasses.replace(config, **top)


def settings_flags(config: TrainConfig, named: Collection[str] = ()) -> list[str]:
    """The settings that are not the defaults, as the command line takes them after the model.

    Those that are `named`, by their dotted names, in any case.

    >>> settings_flags(TrainConfig("tiny", batch=8, compute=ComputeConfig(layers="unroll")))
    ['--batch', '8', '--compute.layers', 'unroll']
    """
    words: list[str] = []
    usual = flat_settings(TrainConfig(config.model))
    for name, value in flat_settings(config).items():
        group, dot, last = name.replace("_", "-").rpartition(".")
        if value == usual[name] and name not in named:
            continue
        if isinstance(value, bool):
            words.append(f"--{group}{dot}{'' if value else 'no-'}{last}")
        elif isinstance(value, tuple):
            words += [f"--{group}{dot}{last}", *value]
        else:
            words += [f"--{group}{dot}{last}", str(value)]
    return words


def _check_number(name: str, value: Any) -> None:
    """Devices compute in float32 and int64, and JSON has no word for inf and nan."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise MeshwrightError(
            f"{name}={value} is not a finite number; to leave a limit out, where it may be, say "
            "None"
        )
    if isinstance(value, int) and name != "seed" and abs(value) >= 2**63:
        raise MeshwrightError(f"{name}={value} is too large; it must fit in 64 bits")
    if isinstance(value, float) and value and not _LEAST_FLOAT32 <= abs(value) <= _MOST_FLOAT32:
        meaning = "infinite" if abs(value) > 1 else "0"
        raise MeshwrightError(
            f"{name}={value} would be {meaning} in float32, which holds {_LEAST_FLOAT32} to "
            f"{_MOST_FLOAT32}"
        )


# settings that say how and where a run is computed: a resumed run may change them
FREE = frozenset(
    {"run", "mesh", "steps", "stop_at", "compute", "checkpoint", "log", "eval", "max_skipped"}
)
FREE |= {"hang_timeout", "coordinator", "processes", "process_id", "cpu_devices", "rules"}
FREE |= {"num_partitions", "submesh", "resume_from", "override"}  # the model itself is compared
FREE |= {"context_parallel"}  # every strategy computes the same
FREE |= {"backend", "torch"}


def config_to_dict(config: TrainConfig) -> dict[str, Any]:
    """As plain JSON data."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def config_from_file(file: Path) -> TrainConfig:
    """Settings written as JSON: a run's own config.json, or one by hand."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as reason:
        raise MeshwrightError(
            f"--config {str(file)!r} cannot be read: {reason.strerror}; give a run's config.json"
        ) from None
    except ValueError as reason:
        raise MeshwrightError(
            f"--config {str(file)!r} is not JSON: {reason}; give a run's config.json"
        ) from None
    if not isinstance(data, dict):
        raise MeshwrightError(f"--config {str(file)!r} must hold an object of settings")
    if "architectures" in data or "model_type" in data:
        raise MeshwrightError(
            f"--config {str(file)!r} is the config of a model, not of a run; give the model as the "
            "first word"
        )
    for name in ("model_config", "hf_config", "base", "special_tokens"):  # found by the run
        data.pop(name, None)
    return config_from_dict(data, str(file))


def config_from_dict(data: Mapping[str, Any], where: str) -> TrainConfig:
    """The reverse of config_to_dict; settings may be missing. `where` is for messages."""
    return typing.cast(TrainConfig, _from_dict(TrainConfig, data, where))


def _from_dict(kind: Any, data: Mapping[str, Any], where: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    types = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name not in fields:
            raise MeshwrightError(
                f"{where}: setting {name!r} is unknown{did_you_mean(name, fields)}"
            )
        if dataclasses.is_dataclass(types[name]):
            if not isinstance(value, Mapping):
                raise MeshwrightError(f"{where}: setting {name!r} must be an object, got {value!r}")
            value = _from_dict(types[name], value, f"{where}: {name}")
        elif isinstance(value, str) and Path in (types[name], *typing.get_args(types[name])):
            value = Path(value)
        elif typing.get_origin(types[name]) is tuple:
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise MeshwrightError(f"{where}: setting {name!r} must be a list of text")
            value = tuple(value)
        else:
            _check_type(value, types[name], f"{where}: setting {name!r}")
        values[name] = value
    if "model" in fields and "model" not in values:
        raise MeshwrightError(f"{where}: setting 'model' is missing")
    return kind(**values)


@functools.cache
def _types_of_settings(kind: Any = TrainConfig, prefix: str = "") -> dict[str, Any]:
    """The type of every setting, by its dotted name."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        nested = dataclasses.is_dataclass(hint)
        found |= _types_of_settings(hint, f"{name}.") if nested else {prefix + name: hint}
    return found


def _check_texts(value: Any, subject: str) -> None:
    if not (isinstance(value, tuple) and all(isinstance(one, str) for one in value)):
        example = value if isinstance(value, str) else "norm"
        raise MeshwrightError(f"{subject} is {value!r}; it must be a tuple: ({example!r},)")


def _check_type(value: Any, kind: Any, subject: str) -> None:
    options = typing.get_args(kind) or (kind,)
    if typing.get_origin(kind) is Literal:
        if value not in options:
            raise MeshwrightError(f"{subject} is {value!r}; one of {', '.join(map(str, options))}")
        return
    if typing.get_origin(kind) is tuple:
        _check_texts(value, subject)
        return
    allowed = tuple(option for option in options if isinstance(option, type))
    number = isinstance(value, int) and not isinstance(value, bool)
    is_path = isinstance(value, Path) and Path in allowed
    if type(value) in allowed or is_path or (float in allowed and number):
        return
    names = " or ".join("none" if option is type(None) else option.__name__ for option in allowed)
    raise MeshwrightError(f"{subject} is {value!r}; it must be {names}")

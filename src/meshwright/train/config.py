"""All settings of a run, as one value that can be written down and read again."""

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from meshwright.arithmetic import check_seed
from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.launch import HANG_TIMEOUT_S, check_simulated
from meshwright.models.decoder import DecoderConfig
from meshwright.ops import rope
from meshwright.train.optimizer import OptimizerConfig
from meshwright.train.step import LossConfig

LATEST, NONE = "latest", "none"  # of resume_from, besides a step


@dataclasses.dataclass(frozen=True)
class ComputeConfig:
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """What matrices are multiplied in; auto: bfloat16 on accelerators, float32 on CPUs."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """What weights and moments are kept in."""
    remat: Literal["none", "elementwise", "mlp", "full"] = "none"
    """What is computed again in the backward pass instead of kept, from nothing to everything."""
    scan: bool = True
    """A loop over layers, which compiles fast; --compute.no-scan unrolls it, which runs faster."""
    attention: Literal["auto", "hopper", "cudnn", "splash", "dense", "blockwise"] = "auto"
    """The kernel; auto takes the fastest that can serve."""
    sequence_parallel: bool = False
    """Split activations between blocks over tp, along the sequence."""
    mlp_chunk: int = 0
    """Tokens of a row on a device whose feed-forward is computed at a time; 0: all of them."""
    overlap: bool = False
    """On TPUs, gather a layer's weights while another computes; GPUs and v5e do so anyway."""

    def __post_init__(self) -> None:
        if self.mlp_chunk < 0:
            raise MeshwrightError(f"compute.mlp_chunk={self.mlp_chunk} must be at least 0")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary positions other than the model's own, for longer contexts."""

    theta: float | None = None
    """The base; the longer the context, the larger (LWM: 1e6 at 32K, 5e7 at 1M)."""
    scaling: Literal["linear", "yarn", "llama3"] | None = None
    """How positions beyond the model's length are brought back into it."""
    factor: float = 1.0
    """Of the scaling: how many times the model's length."""

    def __post_init__(self) -> None:
        if self.theta is not None and not self.theta > 1:  # nan too
            raise MeshwrightError(f"rope.theta={self.theta} must be above 1, such as 500000")
        if not self.factor >= 1:
            raise MeshwrightError(f"rope.factor={self.factor} must be at least 1, such as 8")
        if self.scaling is not None and self.factor == 1:
            raise MeshwrightError(
                f"rope.scaling={self.scaling} needs rope.factor, how many times the model's length "
                "rows may have: 8, say"
            )
        if self.factor > 1 and self.scaling is None:
            raise MeshwrightError(
                f"rope.factor={self.factor} belongs to a scaling; give rope.scaling too: linear, "
                "yarn or llama3"
            )

    def apply(self, model: DecoderConfig, seq: int) -> DecoderConfig:
        """The model with these positions; what is changed for longer rows allows them."""
        if self.theta is None and self.scaling is None:
            return model
        own, scaling = model.rope, model.rope.scaling
        match self.scaling:
            case "linear":
                scaling = rope.LinearScaling(self.factor)
            case "yarn":
                scaling = rope.YarnScaling(self.factor, model.max_seq)
            case "llama3":
                scaling = rope.Llama3Scaling(self.factor, 1.0, 4.0, model.max_seq)
        turning = rope.Rope(self.theta or own.theta, scaling)
        return dataclasses.replace(model, rope=turning, max_seq=max(model.max_seq, seq))


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every: int = 500
    """Steps from one to the next; one is also saved at the end."""
    keep_last: int = 3
    """How many of the latest are kept; the newest healthy one is kept in any case."""
    keep_every: int | None = None
    """Also keep those whose step is a multiple of this."""


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    every: int = 500
    """Steps from one evaluation to the next; there is one at the end too."""
    sequences: int = 0
    """Sequences held out at the end of each token store for evaluation; 0: no evaluation."""


@dataclasses.dataclass(frozen=True)
class LogConfig:
    every: int = 1
    """Steps from one line of metrics.jsonl to the next."""
    tensorboard: bool = False
    wandb: str | None = None
    """A project's name."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    model: str
    """A preset (tiny, llama-3.1-8b …), a Hugging Face config.json, or a folder that holds one."""
    run: Path = Path("runs/latest")
    """The run's folder. If it holds checkpoints, the run resumes: see --resume-from."""
    mesh: str = "dp=1,fsdp=-1,tp=1,sp=1"
    """Where every axis goes; one size may be -1: what is left. auto: what `plan` would choose."""
    data: str = "embedded"
    """A token store, several with weights (a.store:0.7,b.store:0.3), or the embedded stories."""
    steps: int = 1000
    """Optimizer steps, in all."""
    stop_at: int | None = None
    """Save and stop at this step, at most `steps`; the learning rate still follows `steps`."""
    resume_from: str = LATEST
    """Checkpoint to resume from: a step, latest, or none to start anew. Later ones are set aside,
    not deleted."""
    batch: int = 32
    """Rows of an optimizer step, over all devices and micro-batches."""
    seq: int = 512
    """Tokens of a row."""
    context_parallel: Literal["auto", "ring", "allgather", "ulysses"] = "auto"
    """How attention is done where sp splits the rows; auto says what it takes and why."""
    accumulation: int = 1
    """Micro-batches of an optimizer step; each is batch / accumulation rows."""
    seed: int = 0
    """Random seed for initialization and data order, from 0 to 2**32 - 1."""
    init_from: Path | None = None
    """Start from the weights of a Hugging Face folder."""
    rules: str = "standard"
    """Where dims go: standard, T5X's sets (t5x:1,1 t5x:2,1 t5x:1,2 t5x:2,2), or a file of rules."""
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    compute: ComputeConfig = dataclasses.field(default_factory=ComputeConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
    max_skipped: int = 10
    """Steps in a row with a loss or gradient that is not finite, after which training stops."""
    hang_timeout: float = HANG_TIMEOUT_S
    """Seconds without a new step after which the run ends and names the process that hangs.
    Compiling, saving and evaluating may take an hour, or four times this."""
    coordinator: str | None = None
    """Several processes: HOST:PORT of process 0, or auto (Slurm, Kubernetes, TPU pods)."""
    processes: int | None = None
    """How many there are."""
    process_id: int | None = None
    """Which this is, from 0."""
    cpu_devices: int | None = None
    """Simulate this many devices on the CPU, at most 1024."""

    def __post_init__(self) -> None:
        values = flat_settings(self)
        for name, least in _AT_LEAST.items():
            value = values[name]
            if value is not None and value < least:
                raise MeshwrightError(f"{name}={value} must be at least {least}")
        for name, value in values.items():
            _check_number(name, value)
        check_seed(self.seed)
        for name in ("steps", "batch", "seq", "accumulation"):
            if values[name] > MOST:
                raise MeshwrightError(f"{name}={values[name]} must be at most {MOST}")
        if self.resume_from not in (LATEST, NONE) and not self.resume_from.isdecimal():
            raise MeshwrightError(
                f"resume_from={self.resume_from!r} is neither a step nor 'latest' nor 'none'"
                f"{did_you_mean(self.resume_from, (LATEST, NONE))}"
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


MOST = 2**31 - 1  # steps and dims of arrays are counted in int32
_LEAST_FLOAT32, _MOST_FLOAT32 = 1.2e-38, 3.4e38
_AT_LEAST = {
    "steps": 1, "stop_at": 1, "batch": 1, "seq": 1, "accumulation": 1, "max_skipped": 1,
    "cpu_devices": 1, "eval.sequences": 0, "eval.every": 1, "log.every": 1,
    "checkpoint.every": 1, "checkpoint.keep_last": 1, "checkpoint.keep_every": 1,
}  # fmt: skip


def flat_settings(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every setting by its dotted name: `{"batch": 32, …, "optimizer.learning_rate": 3e-4}`."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        nested = dataclasses.is_dataclass(value)
        found |= flat_settings(value, f"{name}.") if nested else {name: value}
    return found


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
        what = "infinite" if abs(value) > 1 else "0"
        raise MeshwrightError(
            f"{name}={value} would be {what} in float32, which holds {_LEAST_FLOAT32} to "
            f"{_MOST_FLOAT32}"
        )


# settings that say how and where a run is computed: a resumed run may change them
FREE = frozenset(
    {"run", "mesh", "steps", "stop_at", "compute", "checkpoint", "log", "eval", "max_skipped"}
)
FREE |= {"hang_timeout", "coordinator", "processes", "process_id", "cpu_devices", "rules"}
FREE |= {"resume_from"}
FREE |= {"context_parallel"}  # every strategy computes the same


def config_to_dict(config: TrainConfig) -> dict[str, Any]:
    """As plain JSON data."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def config_from_file(file: Path) -> TrainConfig:
    """Settings written as JSON: a run's own config.json, or one by hand."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as reason:
        raise MeshwrightError(f"--config {str(file)!r} cannot be read: {reason.strerror}") from None
    except ValueError as reason:
        raise MeshwrightError(f"--config {str(file)!r} is not JSON: {reason}") from None
    if not isinstance(data, dict):
        raise MeshwrightError(f"--config {str(file)!r} must hold an object of settings")
    for name in ("model_config", "hf_config"):  # a run's record of what `model` was
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
        else:
            _check_type(value, types[name], f"{where}: setting {name!r}")
        values[name] = value
    if "model" in fields and "model" not in values:
        raise MeshwrightError(f"{where}: setting 'model' is missing")
    return kind(**values)


def _check_type(value: Any, kind: Any, what: str) -> None:
    options = typing.get_args(kind) or (kind,)
    if typing.get_origin(kind) is Literal:
        if value not in options:
            raise MeshwrightError(f"{what} is {value!r}; one of {', '.join(map(str, options))}")
        return
    allowed = tuple(option for option in options if isinstance(option, type))
    number = isinstance(value, int) and not isinstance(value, bool)
    if type(value) in allowed or (float in allowed and number):
        return
    names = " or ".join("none" if option is type(None) else option.__name__ for option in allowed)
    raise MeshwrightError(f"{what} is {value!r}; it must be {names}")


_SCALINGS = {
    kind.__name__: kind for kind in (rope.LinearScaling, rope.Llama3Scaling, rope.YarnScaling)
}


def decoder_to_dict(config: DecoderConfig) -> dict[str, Any]:
    """A model's config as plain JSON data, without what it was read from."""
    data = dataclasses.asdict(config)
    del data["hf_config"]
    if config.rope.scaling is not None:
        data["rope"]["scaling"]["kind"] = type(config.rope.scaling).__name__
    return data


def decoder_from_dict(data: Mapping[str, Any]) -> DecoderConfig:
    """The reverse of decoder_to_dict."""
    values = dict(data)
    turning = dict(values.pop("rope"))
    scaling = turning.pop("scaling")
    if scaling is not None:
        scaling = dict(scaling)
        scaling = _SCALINGS[scaling.pop("kind")](**scaling)
    return DecoderConfig(**values, rope=rope.Rope(**turning, scaling=scaling))

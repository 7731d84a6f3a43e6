"""Choose a mesh: every way to run a workload on a machine, ranked, with reasons.

>>> best = plan("llama-3.1-8b", "v5p:4x4x4", batch=256, seq=4096)
>>> best.mesh
'dp=1,fsdp=64,tp=1,sp=1'
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping
from typing import Any, Literal

from meshwright.audits import wire_bytes
from meshwright.errors import MeshwrightError, did_you_mean, explained, one_of
from meshwright.launch import flat_settings
from meshwright.lazy import without_collector
from meshwright.machines import Machine, larger
from meshwright.models import QUANTIZED_BASES, experts_of, family_of, model_config, what_fits
from meshwright.ops import QUANTIZED_DTYPES
from meshwright.ops.attention import CACHE_DTYPES
from meshwright.planner.attention import slow_attention
from meshwright.planner.constraints import Constraints, constraints_of
from meshwright.planner.efficiency import told_to_overlap
from meshwright.planner.memory import largest_batch, largest_seq
from meshwright.planner.result import Estimate, Plan, Refusal
from meshwright.planner.search import (
    Candidate,
    RankBy,
    allowed_meshes,
    feasible,
    search,
    why_not,
)
from meshwright.planner.time import bound_and_reason
from meshwright.planner.workload import Choice, Workload, setting_name
from meshwright.present import amount, count, seconds_text
from meshwright.serving import EngineConfig
from meshwright.training import AUTO, TrainConfig, check_balance, check_length, with_settings

RANK_BY = ("throughput", "fastest", "latency", "memory")
UNQUANTIZED = "plain"  # weights in the dtype of activations
SERVED = {  # settings of an engine, and their values
    "weights": (UNQUANTIZED, *QUANTIZED_DTYPES), "cache": tuple(CACHE_DTYPES),
}  # fmt: skip
SLOTS = ("max_adapters", "max_adapter_rank")  # numbers, of adapters that an engine serves
MOST_DEVICES = 65536  # to which a larger machine is looked for


@explained("mw.plan('llama-3.1-8b', on='h100:8', batch=64, seq=4096)")
def plan(
    model: Any,
    on: str | Machine,
    batch: int | None = None,
    seq: int | None = None,
    *,
    rank_by: RankBy = "throughput",
    mesh: str | None = None,
    kind: Literal["train", "serve"] = "train",
    cost_per_hour: float | None = None,
    named: Collection[str] = (),
    imbalance: float = 1.0,
    like: str = "",
    **settings: Any,
) -> Plan:
    """Every mesh for a model on a machine, ranked.

    `model` is a preset, a config.json, a model's config, or a TrainConfig; `on` a machine as a
    value or in text; `batch` the sequences of a step, over all devices. `mesh` limits what may be
    chosen (`fsdp=*,tp<=8,sp=1`). The `settings` are those of train, by the last part of their names
    (`remat="full"`, `optimizer="muon"`) or with `_` for the dot (`optimizer_moments="bfloat16"`);
    of serving, weights (plain, int8 or fp8), cache (fp8), max_adapters and max_adapter_rank.
    `imbalance` is assumed of a router:
    the tokens of the device whose experts have most, over the average; 1.0 is an even load. `like`
    names a stack (torchtitan, megatron, maxtext) whose published speed is planned.

    Remat, accumulation, sequence_parallel, context_parallel and mlp_chunk are chosen with the mesh
    unless they are given here or, in a TrainConfig, are not the defaults; settings of it that are
    `named` are kept in any case.
    """
    machine = Machine.parse(on)
    _check_question(rank_by, kind, cost_per_hour, imbalance)
    given = {"batch": batch, "seq": seq} | settings
    given = {name: value for name, value in given.items() if value is not None}
    slots = {name: given.pop(name) for name in SLOTS if name in given}
    for name, value in slots.items() if kind == "train" else ():
        raise MeshwrightError(
            f"{name}={value!r} is of serving, and training is planned; leave it out"
        )
    if rank := slots.get("max_adapter_rank") if not slots.get("max_adapters") else None:
        raise MeshwrightError(
            f"max_adapter_rank={rank} is of slots for adapters, and none are planned; give their "
            "number too, such as max_adapters=8"
        )
    config, changed, engine = _config(model, kind, given)
    named = {*named, *changed}
    check_kind(config, kind, named)
    limits = constraints_of(config, named, mesh)
    limits = dataclasses.replace(limits, fixed={**limits.fixed, **engine})
    model = None if isinstance(model, str | TrainConfig) else model
    served = EngineConfig(**slots) if kind == "serve" else None
    made = plan_config(
        config, machine, limits, model=model, engine=served, rank_by=rank_by, imbalance=imbalance,
        like=like,
    )  # fmt: skip
    return dataclasses.replace(made, cost_per_hour=cost_per_hour)


@without_collector()
def plan_config(
    config: TrainConfig,
    machine: Machine,
    limits: Constraints,
    *,
    model: Any = None,
    engine: EngineConfig | None = None,
    rank_by: RankBy = "throughput",
    imbalance: float = 1.0,
    like: str = "",
) -> Plan:
    """Every mesh within the limits for these settings, ranked; `model` as in `Workload.of`."""
    model = model_config(config.model) if model is None else model
    workload = dataclasses.replace(Workload.of(config, machine, model, engine), imbalance=imbalance)
    workload = workload.running_like(like)
    if engine is None and not family_of(workload.model).longer(workload.model, workload.seq):
        check_length(config, workload.model)
    if engine is not None and workload.seq > workload.model.max_seq:
        raise MeshwrightError(
            f"seq={workload.seq:,} does not fit the model, which has {workload.model.max_seq:,} "
            "positions, and an engine serves no more; give fewer tokens, or a config.json with "
            "more positions"
        )
    if imbalance != 1 and experts_of(workload.model) is None:
        name = config.model or "the model"
        raise MeshwrightError(f"imbalance={imbalance:g}: {name} has no experts; leave it out")
    if engine is None and (speed := config.loss.balance_bias):
        kept_by = "LoRA" if config.lora.rank else "DPO" if workload.has_reference else ""
        check_balance(family_of(model).arrays(workload.model), speed, kept_by)
    workload.schedule.check(workload)
    limits = workload.schedule.narrowed(workload, limits)
    remat, policies = limits.fixed.get("remat"), workload.remat
    if remat is not None and remat not in policies:
        raise MeshwrightError(f"remat={remat!r} is not a policy{did_you_mean(remat, policies)}")
    estimates, refused = _search(workload, limits, rank_by)
    if not estimates:
        raise MeshwrightError(_nothing(workload, limits, refused))
    best = estimates[0].choice
    return Plan(
        config=config,
        model=model,
        engine=engine,
        machine=machine,
        rank_by=rank_by,
        ranked=tuple(estimates),
        refused=tuple(refused),
        largest_batch=largest_batch(workload, best),
        largest_seq=largest_seq(workload, best),
        warnings=_warnings(workload),
        imbalance=imbalance,
        like=like,
    )


def _search(
    workload: Workload, limits: Constraints, rank_by: RankBy
) -> tuple[list[Estimate], list[Refusal]]:
    """Every mesh that fits, the best first, and every one that does not, with why."""
    if workload.engine is not None:
        from meshwright.planner.serving import search_serving

        return search_serving(workload, limits, rank_by)
    found, refused = search(workload, limits, rank_by)
    return [estimated(one) for one in found], refused


def _config(
    model: Any, kind: str, given: Mapping[str, Any]
) -> tuple[TrainConfig, set[str], dict[str, Any]]:
    """The settings of train, the names of those that were given, and settings of an engine."""
    if not isinstance(model, str | TrainConfig):
        try:
            family_of(model)
        except MeshwrightError:
            raise MeshwrightError(
                f"model {model!r} is neither a preset's name, nor a config.json, nor a model's "
                "config, nor a TrainConfig"
            ) from None
    config = model
    if not isinstance(config, TrainConfig):
        for name in ("batch", "seq"):
            if name not in given:
                raise MeshwrightError(f"{name} is missing; give it, or a TrainConfig")
        config = TrainConfig(config if isinstance(config, str) else "", mesh=AUTO)
    known, engine = tuple(flat_settings(config)), {}
    changes: dict[str, Any] = {}
    for name, value in given.items():
        if name in SERVED:
            engine[name] = engine_setting(kind, name, value)
            continue
        if name == "serve":
            raise MeshwrightError("plan has no setting 'serve'; serving is kind=\"serve\"")
        changes[setting_name(name, known)] = value
    return with_settings(config, changes), set(changes), engine


def check_kind(config: TrainConfig, kind: str, named: Collection[str]) -> None:
    """Raise if a setting of training was given, and serving is planned."""
    for setting, value in flat_settings(config).items() if kind == "serve" else ():
        if setting in named and setting not in ("model", "batch", "seq", "mesh", "compute.dtype"):
            raise MeshwrightError(
                f"{setting}={value!r} is of training, and serving is planned; leave it out"
            )


def engine_setting(kind: str, name: str, value: str) -> str | None:
    """A setting of an engine as a Choice has it."""
    if kind == "train":
        raise MeshwrightError(
            f"{name}={value!r} is of serving, and training is planned; leave it out"
        )
    if value not in SERVED[name]:
        raise MeshwrightError(
            f"{name}={value!r} is not known{did_you_mean(str(value), SERVED[name])}"
        )
    return None if value == UNQUANTIZED else value


def _check_question(rank_by: str, kind: str, cost_per_hour: float | None, imbalance: float) -> None:
    """Find mistakes in what plan was asked."""
    if kind not in ("train", "serve"):
        raise MeshwrightError(f"kind={kind!r} is neither 'train' nor 'serve'")
    if rank_by not in RANK_BY:
        raise MeshwrightError(f"rank_by={rank_by!r} is not known{did_you_mean(rank_by, RANK_BY)}")
    price = cost_per_hour
    if price is not None and not (isinstance(price, int | float) and 0 < price < math.inf):
        raise MeshwrightError(
            f"cost_per_hour={price!r} is not a price; give what one chip costs for an hour, such "
            "as 4.2"
        )
    if not (isinstance(imbalance, int | float) and 1 <= imbalance < math.inf):
        raise MeshwrightError(
            f"imbalance={imbalance!r} must be at least 1: the tokens of the device whose experts "
            "have most, over the average"
        )
    if kind == "train" and rank_by == "latency":
        raise MeshwrightError(
            "rank_by='latency' is the time of a token of serving; for training use 'throughput'"
        )
    if kind == "serve" and rank_by == "fastest":
        raise MeshwrightError(
            "rank_by='fastest' is of training; for serving use 'throughput' or 'latency'"
        )


def _warnings(workload: Workload) -> tuple[str, ...]:
    """What would keep a workload from running as it is."""
    found = []
    longest = workload.model.max_seq
    machine = workload.machine
    if stack := workload.like.name:
        found.append(
            f"times are an estimate for {stack}, from its published results; meshes, memory and "
            "the commands are ours"
        )
    if workload.overlap and not told_to_overlap(machine.chip):
        found.append(
            f"overlap changes nothing on {machine.chip.name}: "
            + ("it overlaps by itself" if machine.is_tpu else "it is for TPUs")
        )
    said = f"seq={workload.seq:,} is longer than the model's {longest:,} tokens"
    if workload.seq > longest:
        changes = " ".join(family_of(workload.model).longer(workload.model, workload.seq))
        found.append(f"{said}; train needs --override {changes}, as in the commands below")
    return tuple(found)


def estimated(one: Candidate) -> Estimate:
    """What a way to run would cost, with what bounds it and why."""
    timing, workload = one.timing, one.step.workload
    bound, reason = bound_and_reason(one.choice, timing)
    slow = slow_attention(workload, one.choice)
    if slow is not None:
        reason += f"; attention in the slower kernel {slow[0]} ({slow[1]})"
    host = timing.seconds.get("waiting for the host", 0.0)
    if host > 0.03 * timing.step:
        reason += f"; {100 * host / timing.step:.0f}% waits for activations in the host's memory"
    reason += _exchange(one)
    if one.memory.tight:
        reason += f"; tight: {100 * one.memory.total / one.memory.limit:.0f}% of memory"
    if (padded := one.step.padding) is not None:
        reason += f"; {padded}"
    return one.estimate(bound, reason)


def _exchange(one: Candidate) -> str:
    """How tokens reach the experts of other devices, and what that sends; "" if they need not."""
    exchange, ways = one.step.device.exchange, one.choice.size("ep")
    sent = [each for each in one.timing.collectives if each.axes == ("ep",)]
    sent = [each for each in sent if each.payload == "activations"]
    if exchange is None or not sent:
        return ""
    size = sum(each.times * wire_bytes(each.operation, each.bytes, ways) for each in sent)
    seconds = sum(each.seconds for each in sent)
    return (
        f"; tokens reach experts over ep={ways} by {exchange}: {amount(size, 'B')} a step and "
        f"device over {sent[0].link}, {seconds_text(seconds)}"
    )


def _nothing(workload: Workload, limits: Constraints, refused: list[Refusal]) -> str:
    """Why there is no mesh, and how many devices would be needed."""
    machine, axes = workload.machine, workload.schedule.axes
    name = workload.config.model or "the model"
    within = f" within '{limits}'" if limits.limits else ""
    what = f"{name} with batch={workload.batch}, seq={workload.seq} on '{machine}'"
    if not refused:
        problem = (
            f"no mesh of {count(machine.num_devices, 'device')} lies{within}: the sizes of "
            f"{', '.join(axes[:-1])} and {axes[-1]} must multiply to {machine.num_devices:,}"
        )
        if near := _nearest_that_fit(workload, limits):
            problem += f"; mesh {one_of(mesh.mesh for mesh in near)} would fit"
        if bigger := _larger_that_fits(workload, limits):
            return f"{problem}; '{limits}' fits on '{bigger}'"
        free = Constraints(fixed=limits.fixed)
        others = [] if near else _search(workload, free, "throughput")[1]
        if not others:
            return problem
        return f"{problem}; without '{limits}': {_nothing(workload, free, others)}"
    accumulation = limits.fixed.get("accumulation", 1)
    if workload.batch % accumulation:
        return (
            f"accumulation={accumulation} does not divide batch={workload.batch}: every "
            f"micro-batch has as many sequences; {_proposal(workload, limits, refused[0].choice)}"
        )
    too_large = [(one.memory.total, i, one) for i, one in enumerate(refused) if one.memory]
    if not too_large:
        whys = {one.why: one.choice.mesh for one in reversed(refused)}
        some = "; ".join(f"'{mesh}': {why}" for why, mesh in list(whys.items())[:3])
        fits = _proposal(workload, limits, refused[0].choice)
        return f"no mesh{within} can run {what}: {some}; {fits}"
    nearest = min(too_large)[2]
    said = f"{what} fits on no mesh{within}: the nearest, '{nearest.choice.mesh}', {nearest.why}"
    if flags := _settings_that_fit(workload, limits):
        said += f"; {' or '.join(flags)} would fit"
        if workload.config.lora.rank:
            return said
    larger = _larger_that_fits(workload, limits)
    if larger is None:
        return f"{said}; nor does it on {MOST_DEVICES:,} devices of that chip"
    return f"{said}; {count(larger.num_devices, 'device')} would do: '{larger}'"


def _settings_that_fit(workload: Workload, limits: Constraints) -> list[str]:
    """Flags with which a run would fit: smaller moments or parameters, with LoRA a smaller base."""
    config = workload.config
    if workload.kind != "train" or config.backend != "jax":
        return []
    smaller = [("optimizer.moments", "bfloat16"), ("compute.param_dtype", "bfloat16")]
    if config.lora.rank:
        smaller = [("lora.base", base) for base in QUANTIZED_BASES]

    def fits(setting: str, value: str) -> bool:
        try:
            config = with_settings(workload.config, {setting: value})
            changed = Workload.of(config, workload.machine, workload.model)
        except MeshwrightError:  # a size or setting that these do not take
            return False
        return _first_that_fits(changed, limits) is not None

    known = flat_settings(config)
    return [
        f"--{setting.replace('_', '-')} {value}"
        for setting, value in smaller
        if known[setting] != value and fits(setting, value)
    ]


def _proposal(workload: Workload, limits: Constraints, refused: Choice) -> str:
    """What would fit: a mesh outside of the limits, or another batch or length."""
    if limits.limits:
        unlimited = _first_that_fits(workload, Constraints(fixed=limits.fixed))
        if unlimited is not None:
            return f"mesh '{unlimited.mesh}' would fit"

    def refuses(mesh_shape: Mapping[str, int], batch: int, seq: int) -> bool:
        mesh = Choice.of(**mesh_shape)
        changed = workload.resized(batch, seq)
        return not limits.allows(mesh) or not _fits_on(changed, mesh, limits)

    def accepts(accumulation: int) -> bool:
        fixed = {**limits.fixed, "accumulation": accumulation}
        changed = dataclasses.replace(limits, fixed=fixed)
        return _first_that_fits(workload, changed) is not None

    accumulation = limits.fixed.get("accumulation", 1)
    return what_fits(refused.sizes, workload.batch, workload.seq, refuses, accumulation, accepts)


def _nearest_that_fit(workload: Workload, limits: Constraints) -> list[Choice]:
    """Up to three meshes outside of the limits that fit, those whose sizes are nearest to them."""

    def distance(mesh: Choice) -> float:
        broken = [limit for limit in limits.limits if not Constraints((limit,)).allows(mesh)]
        return sum(abs(math.log2(mesh.size(axis) / size)) for axis, _, size in broken)

    free = Constraints(fixed=limits.fixed)
    meshes = sorted(allowed_meshes(workload, free), key=distance)
    fitting = (mesh for mesh in meshes if _fits_on(workload, mesh, free))
    return list(itertools.islice(fitting, 3))


def _first_that_fits(workload: Workload, limits: Constraints) -> Choice | None:
    """A mesh within the limits that fits, the plainest first."""
    allowed = allowed_meshes(workload, limits)
    return next((mesh for mesh in allowed if _fits_on(workload, mesh, limits)), None)


def _fits_on(workload: Workload, mesh: Choice, limits: Constraints) -> bool:
    """Whether a mesh passes every check of a plan, memory last."""
    if workload.kind == "serve":
        from meshwright.planner.serving import serves

        return serves(workload, mesh, limits)
    if why_not(workload, mesh, limits) is not None:
        return False
    return bool(feasible(workload, mesh, limits)[0])


def _larger_that_fits(workload: Workload, limits: Constraints) -> Machine | None:
    """The first machine of the same chip, doubled and doubled again, on which some mesh fits."""
    for machine in larger(workload.machine, MOST_DEVICES):
        if _first_that_fits(dataclasses.replace(workload, machine=machine), limits) is not None:
            return machine
    return None

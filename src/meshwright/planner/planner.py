"""Choose a mesh: every way to run a job on a machine, ranked, with reasons.

>>> best = plan("llama-3.1-8b", "v5p:4x4x4", batch=256, seq=4096)
>>> best.mesh
'dp=1,fsdp=64,tp=1,sp=1'
"""

import contextlib
import dataclasses
import gc
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.machines import Machine, largest_slice, squarest
from meshwright.meshes import STANDARD_AXES
from meshwright.models import family_of, model_config, what_fits
from meshwright.ops import QUANTIZED_DTYPES
from meshwright.ops.attention import CACHE_DTYPES
from meshwright.planner import constraints, fsdp2
from meshwright.planner.candidates import meshes
from meshwright.planner.constraints import Constraints
from meshwright.planner.efficiency import OPTIMIZER_BYTES, told_to_overlap
from meshwright.planner.kernels import slow_attention
from meshwright.planner.largest import largest_batch, largest_seq
from meshwright.planner.parts import padding
from meshwright.planner.reason import bound_and_reason
from meshwright.planner.result import Choice, Estimate, Job, Plan, Refusal
from meshwright.planner.search import Found, Objective, fitting, search, why_not
from meshwright.planner.serving import serves, serving
from meshwright.planner.settings import constraints_of, job_of
from meshwright.planner.time import transfers
from meshwright.present import count
from meshwright.train import AUTO, TrainConfig, with_settings

OBJECTIVES = ("throughput", "latency", "memory")
DTYPES = ("float32", "bfloat16")
UNQUANTIZED = "plain"  # weights in the dtype of activations
MOST = 2**31 - 1  # of batch, seq and the like: dims of arrays are counted in int32
MOST_DEVICES = 65536  # to which a larger machine is looked for


def plan(
    model: Any,
    on: str | Machine,
    batch: int | None = None,
    seq: int | None = None,
    *,
    objective: Objective = "throughput",
    mesh: str | None = None,
    kind: Literal["train", "serve"] = "train",
    cost_per_hour: float | None = None,
    **settings: Any,
) -> Plan:
    """Every mesh for a model on a machine, ranked.

    `model` is a preset, a config.json, a model's config, or a TrainConfig; `on` a machine as a
    value or in text; `batch` the sequences of a step, over all devices. `mesh` limits what may be
    chosen (`fsdp=*,tp<=8,sp=1`). The `settings` remat and accumulation, or weights of serving
    (plain, int8 or fp8), fix what else would be chosen with it, and `cache="fp8"` is a KV cache of
    8 bits; loss_chunk, optimizer, moments, param_dtype, dtype, matmul, layers and overlap are
    settings of train and have its defaults.

    Of a TrainConfig the mesh, remat, accumulation, sequence_parallel, context_parallel and
    mlp_chunk are kept where they are not the defaults. Settings given here replace its own.
    """
    machine = Machine.parse(on)
    given = {"batch": batch, "seq": seq} | settings
    given = {name: value for name, value in given.items() if value is not None}
    _check(objective, kind, cost_per_hour, given)
    fixed = {name: given.pop(name) for name in CHOSEN_TOO if name in given}
    if fixed.get("weights") == UNQUANTIZED:
        fixed["weights"] = None
    config = _config(model, given)
    limits = constraints_of(config)
    if mesh is not None:
        limits = dataclasses.replace(limits, limits=constraints.parse(mesh).limits)
    limits = dataclasses.replace(limits, fixed={**limits.fixed, **fixed})
    model = None if isinstance(model, str | TrainConfig) else model
    made = plan_config(config, machine, limits, model=model, kind=kind, objective=objective)
    return dataclasses.replace(made, cost_per_hour=cost_per_hour)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Many small values are made, none of them in a cycle: to collect them takes an eighth."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_without_collector()
def plan_config(
    config: TrainConfig,
    machine: Machine,
    limits: Constraints,
    *,
    model: Any = None,
    kind: Literal["train", "serve"] = "train",
    objective: Objective = "throughput",
) -> Plan:
    """Every mesh within the limits for these settings, ranked; `model` as in `job_of`."""
    model = model_config(config.model) if model is None else model
    job = job_of(config, machine, model, kind)
    if job.backend == "torch":
        fsdp2.check_backend(job, machine)
        limits = Constraints(fsdp2.data_axis(limits.limits), fsdp2.micro_batches(job, limits.fixed))
    remat, policies = limits.fixed.get("remat"), job.remat
    if remat is not None and remat not in policies:
        raise MeshwrightError(f"remat={remat!r} is not a policy{did_you_mean(remat, policies)}")
    if kind == "serve":
        estimates, refused = serving(job, machine, limits, objective)
    else:
        found, refused = search(job, machine, limits, objective)
        estimates = [_estimate(job, machine, one) for one in found]
    if not estimates:
        raise MeshwrightError(_nothing(job, machine, limits, refused))
    best = estimates[0].choice
    return Plan(
        config=config,
        model=model,
        kind=kind,
        machine=machine,
        objective=objective,
        ranked=tuple(estimates),
        refused=tuple(refused),
        largest_batch=largest_batch(job, best, machine),
        largest_seq=largest_seq(job, best, machine),
        warnings=_warnings(job, machine),
    )


# arguments of plan, and the settings that they are
_SETTINGS = {
    "batch": "batch", "seq": "seq", "loss_chunk": "loss.chunk", "optimizer": "optimizer.name",
    "moments": "optimizer.moments",
    "param_dtype": "compute.param_dtype", "dtype": "compute.dtype", "layers": "compute.layers",
    "overlap": "compute.overlap", "matmul": "compute.matmul", "fp8_skips": "compute.fp8_skips",
    "backend": "backend", "compile": "torch.compile", "loss_parallel": "torch.loss_parallel",
    "reshard_after_forward": "torch.reshard_after_forward",
}  # fmt: skip
_KNOWN = {
    "optimizer": tuple(OPTIMIZER_BYTES), "param_dtype": DTYPES, "dtype": DTYPES,
    "matmul": ("auto", "fp8"), "backend": ("jax", "torch"), "compile": ("auto", "on", "off"),
    "overlap": ("auto", "on", "off"),
}  # fmt: skip
CHOSEN_TOO = ("remat", "accumulation", "weights", "cache")


def _config(model: Any, given: Mapping[str, Any]) -> TrainConfig:
    """The settings, with every mistake found."""
    if not isinstance(model, str | TrainConfig):
        try:
            family_of(model)
        except MeshwrightError:
            raise MeshwrightError(
                f"model {model!r} is neither a preset's name, nor a config.json, nor a model's "
                "config, nor a TrainConfig"
            ) from None
    for name in ("batch", "seq", "loss_chunk"):
        if name in given:
            _check_number(name, given[name])
        elif name in ("batch", "seq") and not isinstance(model, TrainConfig):
            raise MeshwrightError(f"{name} is missing; give it, or a TrainConfig")
    for name, known in _KNOWN.items():
        if name in given and given[name] not in known:
            raise MeshwrightError(
                f"{name}={given[name]!r} is not known{did_you_mean(given[name], known)}"
            )
    config = model
    if not isinstance(config, TrainConfig):
        config = TrainConfig(config if isinstance(config, str) else "", mesh=AUTO)
    return with_settings(config, {_SETTINGS[name]: value for name, value in given.items()})


def _check(
    objective: str, kind: str, cost_per_hour: float | None, given: Mapping[str, Any]
) -> None:
    """Find mistakes in what plan was asked."""
    known = (*_SETTINGS, *CHOSEN_TOO)
    for name in given:
        if name not in known:
            hint = '; serving is kind="serve"' if name == "serve" else did_you_mean(name, known)
            raise MeshwrightError(f"plan has no setting {name!r}{hint}")
    if objective not in OBJECTIVES:
        raise MeshwrightError(
            f"objective={objective!r} is not known{did_you_mean(objective, OBJECTIVES)}"
        )
    served = {"weights": (UNQUANTIZED, *QUANTIZED_DTYPES), "cache": tuple(CACHE_DTYPES)}
    for name, values in served.items():
        if name in given:
            _check_served(kind, name, given[name], values)
    if "accumulation" in given:
        _check_number("accumulation", given["accumulation"])
    price = cost_per_hour
    if price is not None and not (isinstance(price, int | float) and 0 < price < math.inf):
        raise MeshwrightError(
            f"cost_per_hour={price!r} is not a price; give what one chip costs for an hour, such "
            "as 4.2"
        )
    if kind == "train" and objective == "latency":
        raise MeshwrightError(
            "objective='latency' is how long a token takes to serve; of a train step of a given "
            "batch the shortest is also the most tokens a second: objective='throughput'"
        )
    for name in ("remat", "accumulation", "optimizer", "moments", "overlap"):
        if kind == "serve" and given.get(name):
            raise MeshwrightError(
                f"{name}={given[name]!r} is of training, and serving is planned; leave it out"
            )


def _check_served(kind: str, name: str, value: object, known: Collection[str]) -> None:
    if kind == "train":
        raise MeshwrightError(
            f"{name}={value!r} is of serving, and training is planned; leave it out"
        )
    if value not in known:
        raise MeshwrightError(f"{name}={value!r} is not known{did_you_mean(str(value), known)}")


def _check_number(what: str, number: object) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MOST:
        raise MeshwrightError(f"{what}={number!r} must be a whole number from 1 to {MOST}")


def _warnings(job: Job, machine: Machine) -> tuple[str, ...]:
    """What would keep a job from running as it is."""
    found = []
    longest = job.model.max_seq
    if job.overlap and not told_to_overlap(machine.chip):
        found.append(
            f"overlap changes nothing on {machine.chip.name}: "
            + ("it overlaps by itself" if machine.is_tpu else "it is for TPUs")
        )
    said = f"seq={job.seq:,} is longer than the model's {longest:,} tokens"
    if job.seq > longest and job.kind == "serve":
        found.append(f"{said}; weights made for longer sequences are needed")
    elif job.seq > longest:
        found.append(
            f"{said}; train needs --override rope.theta=…, or rope.scaling and rope.factor (the "
            "commands below take linear scaling)"
        )
    return tuple(found)


def _estimate(job: Job, machine: Machine, one: Found) -> Estimate:
    timing = one.timing
    peak = machine.chip.bf16_flops / machine.chip.cores_per_chip
    bound, reason = bound_and_reason(one.choice, timing)
    slow = slow_attention(job, one.choice, machine)
    if slow is not None:
        reason += f"; attention in the slower kernel {slow[0]} ({slow[1]})"
    host = timing.seconds.get("waiting for the host", 0.0)
    if host > 0.03 * timing.step:
        reason += f"; {100 * host / timing.step:.0f}% waits for activations in the host's memory"
    if one.memory.tight:
        reason += f"; tight: {100 * one.memory.total / one.memory.limit:.0f}% of memory"
    if (padded := padding(job, one.choice)) is not None:
        reason += f"; {padded}"
    return Estimate(
        choice=one.choice,
        memory=one.memory,
        flops=timing.work.flops,
        computed_flops=timing.work.computed,
        memory_bytes=timing.work.memory_bytes,
        transfers=transfers(timing),
        seconds=timing.seconds,
        step_seconds=timing.step,
        mfu=timing.work.flops / timing.step / peak,
        bound=bound,
        reason=reason,
        group=one.group,
    )


def _nothing(
    job: Job,
    machine: Machine,
    limits: Constraints,
    refused: list[Refusal],
) -> str:
    """Why there is no mesh, and how many devices would be needed."""
    name = job.name or "the model"
    within = f" within '{limits}'" if limits.limits else ""
    what = f"{name} with batch={job.batch}, seq={job.seq} on '{machine}'"
    if not refused:
        return (
            f"no mesh of {count(machine.num_devices, 'device')} lies{within}: the sizes of "
            f"{'dp, fsdp and tp' if job.backend == 'torch' else 'dp, fsdp, tp and sp'} must "
            "multiply to that" + (", and fsdp=1 is left out" if job.backend == "torch" else "")
        )
    accumulation = limits.fixed.get("accumulation", 1)
    if job.batch % accumulation:
        return (
            f"accumulation={accumulation} does not divide batch={job.batch}: every micro-batch has "
            f"as many sequences; {_proposal(job, machine, limits, refused[0].choice)}"
        )
    too_large = [(one.memory.total, i, one) for i, one in enumerate(refused) if one.memory]
    if not too_large:
        whys = {one.why: one.choice.mesh for one in reversed(refused)}
        some = "; ".join(f"'{mesh}': {why}" for why, mesh in list(whys.items())[:3])
        fits = _proposal(job, machine, limits, refused[0].choice)
        return f"no mesh{within} can run {what}: {some}; {fits}"
    nearest = min(too_large)[2]
    said = f"{what} fits on no mesh{within}: the nearest, '{nearest.choice.mesh}', {nearest.why}"
    larger = _larger_that_fits(job, machine, limits)
    if larger is None:
        return f"{said}; nor does it on {MOST_DEVICES:,} devices of that chip"
    return f"{said}; {count(larger.num_devices, 'device')} would do: '{larger}'"


def _proposal(job: Job, machine: Machine, limits: Constraints, refused: Choice) -> str:
    """What would fit: a mesh outside of the limits, or another batch or length."""
    if limits.limits:
        unlimited = _first_that_fits(job, machine, Constraints(fixed=limits.fixed))
        if unlimited is not None:
            return f"mesh '{unlimited.mesh}' would fit"

    def refuses(mesh_shape: Mapping[str, int], batch: int, seq: int) -> bool:
        dp, fsdp, tp, sp = (mesh_shape[axis] for axis in STANDARD_AXES)
        mesh = Choice(dp, fsdp, tp, sp)
        changed = dataclasses.replace(job, batch=batch, seq=seq)
        return not limits.allows(mesh) or not _fits_on(changed, mesh, machine, limits)

    accumulation = limits.fixed.get("accumulation", 1)
    return what_fits(refused.sizes, job.batch, job.seq, refuses, accumulation)


def _first_that_fits(job: Job, machine: Machine, limits: Constraints) -> Choice | None:
    """A mesh within the limits that fits, the plainest first."""
    every = fsdp2.meshes if job.backend == "torch" else meshes
    allowed = filter(limits.allows, every(machine.num_devices))
    return next((mesh for mesh in allowed if _fits_on(job, mesh, machine, limits)), None)


def _fits_on(job: Job, mesh: Choice, machine: Machine, limits: Constraints) -> bool:
    """Whether a mesh passes every check of a plan, memory last."""
    if job.kind == "serve":
        return serves(job, mesh, machine, limits)
    if why_not(job, mesh, machine, limits) is not None:
        return False
    return bool(fitting(job, mesh, machine, limits)[0])


def _larger_that_fits(job: Job, machine: Machine, limits: Constraints) -> Machine | None:
    """The first machine of the same chip, doubled and doubled again, on which some mesh fits."""
    every = _larger(machine)
    return next((one for one in every if _first_that_fits(job, one, limits) is not None), None)


def _larger(machine: Machine) -> Iterator[Machine]:
    """Twice as many devices again and again, as they can be had: slices, then several of them."""
    chip, shape, slices = machine.chip, list(machine.shape), machine.slices
    most = largest_slice(chip.name)  # None: a chip that is not in the catalogue
    chips = math.prod(shape)
    while math.prod(shape) * slices * 2 <= MOST_DEVICES:
        if chip.platform != "tpu":  # until a host is full, then by hosts
            is_full = len(shape) == 1 or shape[1] >= chip.chips_per_host
            shape[0 if is_full else 1] *= 2
        elif most is None:
            shape[shape.index(min(shape))] *= 2
        elif chips * 2 > most:
            slices *= 2
        else:
            chips *= 2
            shape = list(squarest(chip.name, chips) or ())
            if not shape:
                shape = list(machine.shape)  # no slice has so many; the next doubling may be one
                continue
        yield Machine(chip, tuple(shape), slices)

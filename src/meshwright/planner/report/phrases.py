"""Numbers, choices and refusals of a plan in words, as every report writes them."""

import dataclasses
import math
import re
import shlex
from collections.abc import Iterable, Sequence

from meshwright.machines import CHIPS, Price, is_compiled_for
from meshwright.models import family_of
from meshwright.planner.result import Estimate, Plan, Refusal
from meshwright.planner.search import UNCERTAINTY
from meshwright.planner.workload import Choice, apply
from meshwright.present import count, percent
from meshwright.serving import EngineConfig
from meshwright.training import AUTO, TrainConfig, settings_flags, with_settings


def meshes(number: int) -> str:
    return f"{number:,} {'mesh' if number == 1 else 'meshes'}"


def short_mesh(choice: Choice) -> str:
    """The mesh without its axes of size 1: `"fsdp=64,tp=4"`."""
    split = [f"{axis}={size}" for axis, size in choice.sizes.items() if size > 1]
    return ",".join(split) or "fsdp=1"


def unpriced_note(names: Sequence[str]) -> list[str]:
    """Of chips that are not compared by their cost, how to give a price; [] if there are none."""
    if not names:
        return []
    chips = list(dict.fromkeys(names))  # one may be there in several sizes
    return [
        f"no price is known of {', '.join(chips)}: not compared by cost; give one in a file, "
        f"--catalogue prices.toml: [prices], then {chips[0]} = dollars of a chip and hour"
    ]


def group_headings(plan: Plan) -> dict[int, str]:
    """What stands above each group of choices whose times cannot be told apart."""
    found: dict[int, str] = {}
    for one in plan.ranked:
        if one.group and one.group not in found:
            which = "next " if found else ""
            tight = ", tight memory" if one.memory.tight else ""
            kept = f", weights {one.choice.weights}" if one.choice.weights else ""
            found[one.group] = (
                f"group {one.group}: within {percent(UNCERTAINTY)} of the {which}fastest{kept}"
                f"{tight}; simplest first"
            )
    return found


def settings(choice: Choice, kind: str) -> str:
    """What is chosen with the mesh: `"remat full, 4 micro-batches, sequence_parallel"`."""
    if kind == "serve":
        weights = f"weights in {choice.weights}" if choice.weights else "weights not quantized"
        return weights + (f", KV cache in {choice.cache}" if choice.cache else "")
    words = [f"remat {choice.remat}", count(choice.accumulation, "micro-batch")]
    if choice.sequence_parallel:
        words.append("sequence_parallel")
    if choice.context > 1:
        words.append(f"attention over sp: {choice.context_parallel}")
    if choice.mlp_chunk:
        words.append(f"mlp_chunk {choice.mlp_chunk:,}")
    return ", ".join(words)


def next_commands(plan: Plan, choice: Choice) -> list[str]:
    """What to type next: have the compiler prove it, where there is one for the chip; run it."""
    workload = plan.workload
    if workload.kind == "serve":
        return _to_serve(plan, choice)
    config, longer = apply(plan.config, choice), []
    if workload.seq > workload.model.max_seq:  # Plan.warnings says so
        changes = family_of(workload.model).longer(workload.model, workload.seq)
        config = with_settings(config, {"override": (*config.override, *changes)})
        longer = ["--override", *config.override]
    model = workload.config.model or "MODEL"
    if not workload.schedule.is_proved:
        return [_in_torch(plan, model, config)]
    flags = settings_flags(config)
    train = ["meshwright", "train", model, *flags]
    if config.lora.rank and config.init_from is None:  # which an adapter needs
        train += ["--init-from", "MODEL_FOLDER"]
    return [*_to_prove(plan, choice, flags, longer), shlex.join(train)]


def _to_prove(
    plan: Plan, choice: Choice, flags: Sequence[str], changes: Sequence[str] = ()
) -> list[str]:
    """Has a choice proved: by its flags or, where its chip is a user's own, by the plan's file.

    `changes` are flags that a plan's file lacks. [] where nothing proves it.
    """
    chip, model = plan.machine.chip, plan.config.model
    if not is_compiled_for(chip):
        return []
    if CHIPS.get(chip.name) == chip:
        prove = ["meshwright", "prove", model or "MODEL", "--on", str(plan.machine), *flags]
    elif model:
        number = _number(plan, choice)
        prove = ["meshwright", "prove", "--plan", "PLAN_JSON"]
        prove += ["--choice", str(number + 1)] if number else []
        prove += changes
    else:
        return []
    return [shlex.join(prove)]


def _in_torch(plan: Plan, model: str, config: TrainConfig) -> str:
    """Starts a process for each GPU; on several hosts torchrun does, the same command on each."""
    hosts, gpus = plan.machine.grid
    train = ["meshwright", "train", model]
    if hosts == 1:
        config = with_settings(config, {"processes": gpus if gpus > 1 else None})
        return shlex.join([*train, *settings_flags(config)])
    start = ["torchrun", "--nproc-per-node", str(gpus), "--nnodes", str(hosts)]
    start += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "FIRST_HOST:29500"]
    start += ["--no-python", "--"]  # else it takes --run for its own flag
    return shlex.join([*start, *train, *settings_flags(config)])


def _to_serve(plan: Plan, choice: Choice) -> list[str]:
    workload, engine, dtype = plan.workload, plan.workload.engine, plan.config.compute.dtype
    assert engine is not None
    of_replica = -(-workload.batch // choice.size("dp"))
    engine = dataclasses.replace(engine, max_batch=of_replica, max_length=workload.seq)
    serve = serve_command(plan.ranked[_number(plan, choice)], engine, dtype)
    if len(workload.sizes.sequences) > 1:  # prove --serve compiles the steps of decoders
        return [serve]
    prove = ["--serve", "--mesh", choice.mesh]
    prove += ["--batch", str(workload.batch), "--seq", str(workload.seq)]
    return [*_to_prove(plan, choice, prove + _kept_in(choice, dtype)), serve]


def serve_command(one: Estimate, engine: EngineConfig, dtype: str) -> str:
    """Serves as planned, by engines with these settings."""
    words = ["meshwright", "serve", "MODEL_FOLDER", "--mesh", one.choice.mesh]
    words += ["--engine.max-batch", str(engine.max_batch)]
    words += ["--engine.max-length", str(engine.max_length), *_kept_in(one.choice, dtype)]
    need, usual = one.memory, engine.memory_fraction
    if need.total > usual * need.limit:
        words += ["--engine.memory-fraction", f"{math.ceil(100 * need.total / need.limit) / 100:g}"]
    if engine.max_adapters:
        words += ["--engine.max-adapters", str(engine.max_adapters)]
        words += ["--engine.max-adapter-rank", str(engine.adapter_rank)]
    return shlex.join(words)


def _kept_in(choice: Choice, dtype: str) -> list[str]:
    """What weights and the cache are kept in, where it is not the default."""
    flags = {"--engine.weights": choice.weights, "--engine.cache": choice.cache}
    words = [] if dtype == AUTO else ["--dtype", dtype]
    return words + [word for flag, kept in flags.items() if kept for word in (flag, kept)]


def _number(plan: Plan, choice: Choice) -> int:
    """Of a plan's choices, from 0."""
    return [one.choice.key for one in plan.ranked].index(choice.key)


def folded(command: str, width: int) -> str:
    """A command, indented, over several lines that end in a backslash: still one to copy."""
    lines = ["  "]
    for word in _words_with_values(command):
        if lines[-1].strip() and len(lines[-1]) + 1 + len(word) > width - 2:
            lines.append("      ")
        lines[-1] += f" {word}" if lines[-1].strip() else word
    return " \\\n".join(lines)


def _words_with_values(command: str) -> list[str]:
    """`--flag value` stays on one line."""
    words: list[str] = []
    for word in command.split(" "):
        if words and words[-1].startswith("--") and " " not in words[-1] and word[:2] != "--":
            words[-1] += f" {word}"
        else:
            words.append(word)
    return words


def groups_of(refused: Iterable[Refusal]) -> list[tuple[Sequence[Refusal], bool]]:
    """Refusals that differ only in their numbers together, the most frequent first.

    The flag says that it is memory that refuses.
    """
    groups: dict[tuple[str, bool], list[Refusal]] = {}
    for one in refused:
        by_memory = one.memory is not None
        # memory refuses each mesh with its own largest kind: they still are one group
        pattern = "" if by_memory else re.sub(r"\d[\d.,]*", "#", one.why)
        groups.setdefault((pattern, by_memory), []).append(one)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return [(members, by_memory) for (_, by_memory), members in ordered]


def derivation(steps: str, chips: str, cost: str, price: Price | None, reason: str) -> str:
    """How an answer came about: its steps, what so many chips cost and where that is from, why."""
    if price is None or not cost:
        return f"{steps}. {reason}"
    dated = f", {price.date}" if price.date else ""
    of_price = f"{chips} × ${price.dollars:.4g} = ${cost} ({price.instance}: {price.source}{dated})"
    return f"{steps}{of_price}. {reason}"

"""`meshwright plan`: rank every mesh of a machine for a model, or compare machines for a run."""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from meshwright.cli.flags import (
    named_settings,
    quantity,
    seconds,
    take,
    take_integer,
    take_switch,
)
from meshwright.errors import MeshwrightError
from meshwright.lazy import without_collector
from meshwright.machines import Catalogue, Machine, read_catalogue
from meshwright.present import count, write_page

if TYPE_CHECKING:
    from meshwright.planner import Comparison, Constraints, Plan, Run, Size
    from meshwright.training import TrainConfig

HELP = """usage: meshwright plan MODEL --on MACHINE [--batch N] [--seq N] [the settings of train]
       meshwright plan MODEL --on MACHINE --serve --batch N --seq N
                       [--engine.weights int8|fp8|plain] [--engine.cache fp8]
                       [--engine.max-adapters N] [--engine.max-adapter-rank N]
       meshwright plan MODEL --on MACHINES|any --tokens 1T [--within 30d] [--budget 100k]
       meshwright plan MODEL --on MACHINES|any --serve --requests X --prompt N --output N

Rank every mesh of a machine for a model: step time, memory, what limits it, and why. Meshes whose
times cannot be told apart are one group, the simplest first. A setting of train that is named is
kept (--compute.remat full, --accumulation 4, --context-parallel ring, --backend torch …); the
others are chosen with the mesh where they change what fits or how fast it is.

Given several machines, chips without a size, a deadline or a budget, compare machines instead: how
many chips, which mesh, how long, how much; the cheapest first. With --serve and --requests: how
many replicas of which machine serve a load, how long clients wait, and what it costs.

  MODEL                a preset (llama-3.1-8b), a Hugging Face config.json, its folder, or a name
                       on the Hub (org/name, org/name@revision)
  --on MACHINE         v5p:4x4x8, v5p-256, h100:16x8, 16*p5.48xlarge, 2*v5e:16x16, cpu:8, here;
                       to compare, several (h100:8x8,v5p), or any: every chip that has a price
  --batch N            global batch size in sequences; with --serve, sequences decoded at a time;
                       auto, the default of training: by a scaling law, for --tokens or 20 tokens
                       a parameter
  --batch-tokens 4M    the same in tokens: the nearest power of two of sequences
  --seq N              sequence length in tokens (default of training: 8192, or the model's
                       longest); with --serve, of a prompt and of its cache
  --mesh LIMITS        only meshes that match: "fsdp=*,tp<=8,sp=1"
  --axes NAMES         names of the sizes of --mesh: --mesh 8,32 --axes data,model
  --serve              plan `meshwright serve` instead: weights, KV cache, times of tokens
  --requests X         requests a second, at random times: how many replicas serve them
  --prompt N           tokens of their prompts on average; lengths are uniform from a quarter to
                       seven quarters of it
  --output N           tokens of their answers, likewise
  --first-token 500ms  longest wait for the first token
  --per-token 50ms     longest wait between tokens
  --percentile X       percent of requests and tokens that must wait no longer (default 99)
  --rank-by WHAT       rank by throughput (within 10%, the simplest first), fastest (by time
                       alone), memory, or with --serve latency (default: throughput)
  --tokens 15T         of the whole run: shows how long it takes and what it costs
  --within 30d         deadline of the run: machines that meet it, in the cheapest size
  --budget 100k        dollars for the run; without a deadline, the fastest machine for it
  --curve              how tokens/s and MFU scale with the number of chips
  --imbalance X        assume that the experts of one device get X times the average number of
                       tokens (default 1: an even load)
  --like STACK         times of another stack, from its published results: torchtitan, megatron or
                       maxtext; without it, of our own step
  --cost-per-hour X    price of one chip per hour; shows the cost of a trillion tokens
  --catalogue FILE     a TOML file with chips and prices of your own
  --failures X         of a chip, a day (default 0.00047: Llama 3 405B's on H100)
  --restart 10m        from a failure until steps are taken again
  --checkpoint-write X bytes a second that a chip writes to the store (default 1.2e8)
  --top N              meshes to list (default 8; with --json all), or machines (default: all)
  --refused            list every refused mesh with the reason
  --explain MESH       explain one mesh: every formula with its numbers
  --json               print JSON, which `meshwright prove --plan FILE` reads
  --html FILE          write a self-contained HTML page, of one machine or of several compared;
                       with --curve, also for other numbers of chips and batches

meshwright train --help lists the settings."""

_OF_LOADS = ("--prompt", "--output", "--first-token", "--per-token", "--percentile")
_EVERY_S = 4.0  # between two lines of what is done
_OF_RUNS = ("--tokens", "--within", "--budget", "--failures", "--restart", "--checkpoint-write")
_NOT_OF_LOADS = (
    "--seq", "--rank-by", "--cost-per-hour", *_OF_RUNS, "--like", "--imbalance", "--batch-tokens",
    "--engine.max-adapters", "--engine.max-adapter-rank",
)  # fmt: skip
_PAGE_BATCHES = (0.25, 0.5, 1, 2, 4)  # of the batch, to which a page slides
LENGTH = 8192  # of sequences, where none is given
_SIZES = {"batch": "--batch 256", "seq": "--seq 4096"}  # examples of what serving needs


@without_collector()
def plan_command(arguments: Sequence[str]) -> None:
    """Rank every mesh of a machine for a model: step time, memory, what limits it, and why.

    meshwright plan llama-3.1-8b --on v5p:4x4x4 --batch 256 --seq 4096
    """
    words = list(arguments)  # the flags of plan are taken out, the rest are train's
    if not words or "--help" in words or "-h" in words:
        print(HELP)
        return
    shown, html = take(words, "--explain"), take(words, "--html")
    top, refused = take_integer(words, "--top", 1), take_switch(words, "--refused")
    as_json, curves = take_switch(words, "--json"), take_switch(words, "--curve")
    if curves and "--serve" in words:
        raise MeshwrightError("--curve is of training, and serving is planned; leave it out")
    file = take(words, "--catalogue")
    catalogue = Catalogue() if file is None else read_catalogue(file)
    on = take(words, "--on")
    if on is None:
        needed = list(_SIZES.values()) if "--serve" in words else []
        if "--requests" in words:
            needed = ["--serve", "--prompt 1000", "--output 200"]
        needed = [flag for flag in needed if flag.split()[0] not in words]
        _missing(words, ["--on v5p:4x4x4 (or h100:8, here …)", *needed])
    assert on is not None
    names = [name.strip() for name in on.split(",")]
    requests = _read(words, "--requests", _positive)
    if requests is not None:
        if html is not None or shown is not None or curves:
            raise MeshwrightError("--requests has no --html, --explain or --curve")
        _check_refused(refused)
        _serve_load(words, names, catalogue, requests, as_json=as_json, top=top)
        return
    for flag in _given(words, _OF_LOADS):
        raise MeshwrightError(f"{flag} is of a load: add --requests, as in --requests 20")
    for flag in _given(words, _OF_RUNS) if "--serve" in words else ():
        raise MeshwrightError(f"{flag} is of training, and serving is planned; leave it out")
    run, questions = _run(words)
    if len(names) > 1 or questions or names[0] == "any" or catalogue.chip(names[0]) is not None:
        if shown is not None:
            raise MeshwrightError("--explain is of one machine with a size")
        _check_refused(refused)
        comparison, sizes = _compare(words, names, catalogue, run, curves)
        _print_compared(comparison, sizes, as_json=as_json, html=html, top=top)
        return
    of_all = {"--curve": curves, "--refused": refused, "--top": top, "--html": html}
    for flag in (flag for flag, given in of_all.items() if shown is not None and given):
        raise MeshwrightError(
            f"{flag} is of all meshes, and --explain {shown} of one; leave one of the two out"
        )
    ranking, limits = _ranking(words, Machine.parse(on, catalogue.own), catalogue, run)
    from meshwright.planner.report import (
        curve_data,
        explain,
        find_mesh,
        found_data,
        page,
        plan_data,
        report,
    )

    mesh = None if shown is None else find_mesh(ranking, shown)
    sizes = _sizes(ranking, limits, (1,) if html is None else _PAGE_BATCHES) if curves else []
    if html is not None:
        _write(html, page(ranking, sizes), as_json)
    if as_json:
        data = plan_data(ranking) if mesh is None else found_data(ranking, mesh)
        if mesh is None:
            data["ranked"] = data["ranked"][:top]
        if curves:
            data["curve"] = curve_data([one for one in sizes if one.batch == ranking.config.batch])
        print(json.dumps(data))
    if as_json or html is not None:
        return
    console = Console()
    if mesh is not None:
        console.print(explain(ranking, mesh, console.width))
    else:
        console.print(report(ranking, console.width, top=top or 8, refused=refused))
        if sizes:
            from meshwright.planner.report import curve_lines

            console.print("", *curve_lines(sizes, console.width), sep="\n")


def _given(words: list[str], flags: Sequence[str]) -> list[str]:
    """Those of the flags that are among the words."""
    there = {word.partition("=")[0] for word in words}
    return [flag for flag in flags if flag in there]


def _check_refused(given: bool) -> None:
    if given:
        raise MeshwrightError(
            "--refused lists meshes of one machine with a size; of several, every machine that is "
            "refused is listed anyway"
        )


def _missing(words: list[str], flags: list[str]) -> None:
    """Raise if there is something to add, for all of it at once."""
    is_first = words and not words[0].startswith("-")
    needed = flags if is_first or "--config" in words else ["a model, such as llama-3.1-8b", *flags]
    if needed:
        raise MeshwrightError(f"add {' and '.join(needed)}; meshwright plan --help says more")


def _read(words: list[str], flag: str, read: Callable[[str], float]) -> float | None:
    """The value of a flag, read by a function that names what is wrong with it."""
    text = take(words, flag)
    try:
        return None if text is None else read(text)
    except MeshwrightError as mistake:
        raise MeshwrightError(f"{flag}: {mistake}") from None


def _run(words: list[str]) -> "tuple[Run | None, bool]":
    """The run that is asked about, and whether a machine is asked for that can do it."""
    flags = _given(words, _OF_RUNS)
    tokens = _read(words, "--tokens", quantity)
    within, budget = _read(words, "--within", seconds), _read(words, "--budget", quantity)
    given = {
        "failures": _read(words, "--failures", _positive),
        "restart": _read(words, "--restart", seconds),
        "write": _read(words, "--checkpoint-write", quantity),
    }
    if tokens is None:
        for flag in flags:
            raise MeshwrightError(f"{flag} needs the tokens of the run: --tokens 1T")
        return None, False
    from meshwright.planner import LongRun, Run  # which import jax

    long_run = LongRun(**{name: value for name, value in given.items() if value is not None})
    limits = {"within": within, "budget": budget}
    named = {name: value for name, value in limits.items() if value is not None}
    return Run(tokens, **named, long_run=long_run), bool(named)


def _positive(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise MeshwrightError(f"{text[:40]!r} is not a number above 0")
    return number


def _config(
    words: list[str], run: "Run | None", kind: Literal["train", "serve", "load"]
) -> "tuple[TrainConfig, set[str]]":
    """The settings of train, with the batch that is asked for, and the names of those given.

    A training step has a batch and a length by default, which are printed; a load has its own.
    """
    batch_tokens = _read(words, "--batch-tokens", quantity)
    named = named_settings(words)
    auto = take(list(words), "--batch") == "auto"
    if auto:
        take(words, "--batch")
    if batch_tokens is not None and "batch" in named:
        raise MeshwrightError("--batch and --batch-tokens are the same; give one of them")
    fixed = named | ({"batch"} if auto or batch_tokens is not None else set())
    missing = [] if "config" in named else [name for name in _SIZES if name not in fixed]
    _missing(words, [_SIZES[name] for name in missing] if kind == "serve" else [])
    from meshwright.cli.train import settings

    config = settings(words, prog="meshwright plan")
    # here, since they import jax
    from meshwright.models import model_config
    from meshwright.planner import Workload, batch_for, sequences

    if "seq" in missing:
        longest = model_config(config.model).max_seq
        config = dataclasses.replace(config, seq=min(LENGTH, longest))
    if batch_tokens is not None:
        config = dataclasses.replace(config, batch=sequences(batch_tokens, config.seq))
    elif auto or "batch" in missing:
        workload = Workload.of(config, Machine.parse("h100:1"))
        batch = batch_for(workload, None if run is None else run.tokens)
        config = dataclasses.replace(config, batch=batch)
    if missing and kind == "train":
        how = {"batch": " (by a scaling law: --batch auto)"}
        chosen = [f"--{name} {getattr(config, name)}{how.get(name, '')}" for name in missing]
        print(f"note: not given, so chosen: {' and '.join(chosen)}", file=sys.stderr)
    return config, named | {"batch", "seq"}


def _compare(
    words: list[str],
    names: list[str],
    catalogue: Catalogue,
    run: "Run | None",
    curves: bool,
) -> "tuple[Comparison, list[Size]]":
    """Machines compared, and how the best scales."""
    if run is None and "--serve" in words:
        raise MeshwrightError(
            "chips are compared for a load: add --requests 20 --prompt 1000 --output 200, or give "
            "one machine with a size, as in --on h100:8"
        )
    if run is None:
        raise MeshwrightError(
            "machines are compared for a run: give its tokens, as in --tokens 1T, or one machine "
            "with a size, as in --on h100:8"
        )
    for flag in _given(words, ("--rank-by", "--cost-per-hour", "--imbalance")):
        raise MeshwrightError(f"{flag} is of one machine with a size, as in --on h100:8")
    limits, stack = take(words, "--mesh"), take(words, "--like") or ""
    config, named = _config(words, run, "train")
    from meshwright.planner import (
        compare,
        constraints_of,
        machines_named,
        planned_sizes,
        without_price,
    )

    allowed = constraints_of(config, named, limits)
    machines = machines_named(names, catalogue)
    comparison = dataclasses.replace(
        compare(config, machines, run, allowed, catalogue=catalogue, like=stack),
        unpriced=without_price(names, catalogue),
    )
    best = comparison.best.machine
    return comparison, planned_sizes(config, best, allowed, like=stack) if curves else []


def _print_compared(
    found: "Comparison",
    sizes: "list[Size]",
    *,
    as_json: bool,
    html: str | None,
    top: int | None,
) -> None:
    from meshwright.planner.report import comparison_data, comparison_page, comparison_report

    if html is not None:
        _write(html, comparison_page(found, sizes), as_json)
    if as_json:
        data = comparison_data(found, sizes)
        print(json.dumps(data | {"machines": data["machines"][:top]}))
    elif html is None:
        console = Console()
        console.print(comparison_report(found, console.width, sizes, top=top))


def _write(file: str, html: str, as_json: bool) -> None:
    write_page(Path(file), html)
    print(f"wrote {file}", file=sys.stderr if as_json else sys.stdout)


def _serve_load(
    words: list[str], names: list[str], catalogue: Catalogue, requests: float, *, as_json: bool,
    top: int | None,
) -> None:  # fmt: skip
    """Print deployments for a load."""
    missing = [] if take_switch(words, "--serve") else ["--serve"]
    sizes = {name: take_integer(words, f"--{name}", 1) for name in ("prompt", "output")}
    examples = {"prompt": "--prompt 1000", "output": "--output 200"}
    _missing(words, missing + [examples[name] for name, size in sizes.items() if size is None])
    read = {"first_token": seconds, "per_token": seconds, "percentile": _positive}
    waits = {name: _read(words, "--" + name.replace("_", "-"), how) for name, how in read.items()}
    weights, cache = take(words, "--engine.weights"), take(words, "--engine.cache")
    batch, mesh = take_integer(words, "--batch", 1), take(words, "--mesh")
    for flag in _given(words, _NOT_OF_LOADS):
        raise MeshwrightError(f"{flag} does not go with --requests; leave it out")
    config, named = _config(words, None, "load")
    from meshwright.planner import (
        Load,
        check_kind,
        constraints_of,
        deployments,
        machines_named,
        without_price,
    )
    from meshwright.planner.report import load_data, load_report

    check_kind(config, "serve", named)
    asked = {name: wait for name, wait in waits.items() if wait is not None}
    load = Load(requests, sizes["prompt"] or 1, sizes["output"] or 1, **asked)
    limits = constraints_of(config, named, mesh)
    machines = machines_named(names, catalogue)
    offers = deployments(
        config, machines, load, limits, catalogue=catalogue,
        batches=None if batch is None else (batch,), weights=weights, cache=cache,
        progress=_progress(len(machines)),
    )  # fmt: skip
    offers = dataclasses.replace(offers, unpriced=without_price(names, catalogue))
    if as_json:
        data = load_data(offers)
        print(json.dumps(data | {"deployments": data["deployments"][:top]}))
        return
    console = Console()
    console.print(load_report(offers, console.width, top=top))


def _progress(machines: int) -> Callable[[int], None]:
    """Prints on a terminal, every few seconds, how many machines are done."""
    printed_at = time.monotonic()

    def done(count_done: int) -> None:
        nonlocal printed_at
        is_due = time.monotonic() - printed_at > _EVERY_S and count_done < machines
        if is_due and sys.stderr.isatty():
            printed_at = time.monotonic()
            of = count(machines, "machine")
            print(f"simulated the load on {count_done} of {of}", file=sys.stderr)

    return done


def _sizes(ranking: "Plan", limits: "Constraints", of_batch: Sequence[float]) -> "list[Size]":
    from meshwright.planner import planned_sizes

    return planned_sizes(
        ranking.config, ranking.machine, limits, ranking.model, ranking.like, ranking.imbalance,
        of_batch=of_batch,
    )  # fmt: skip


def _ranking(
    words: list[str], machine: Machine, catalogue: Catalogue, run: "Run | None"
) -> "tuple[Plan, Constraints]":
    """The plan that the command line asks for, and the limits of its choices."""
    mesh = take(words, "--mesh")
    rank_by = take(words, "--rank-by") or "throughput"
    price = _read(words, "--cost-per-hour", _price)
    imbalance = _read(words, "--imbalance", _positive)
    stack = take(words, "--like") or ""
    kind: Literal["train", "serve"] = "serve" if take_switch(words, "--serve") else "train"
    weights, cache = take(words, "--engine.weights"), take(words, "--engine.cache")
    slots = {
        "max_adapters": take_integer(words, "--engine.max-adapters", 1),
        "max_adapter_rank": take_integer(words, "--engine.max-adapter-rank", 1),
    }
    config, named = _config(words, run, kind)
    from meshwright.planner import constraints_of, plan  # which import jax

    made = plan(
        config, machine, mesh=mesh, kind=kind,
        rank_by=rank_by,  # type: ignore[arg-type]
        cost_per_hour=price, named=named, weights=weights, cache=cache, **slots,
        imbalance=1.0 if imbalance is None else imbalance, like=stack,
    )  # fmt: skip
    limits = constraints_of(config, named, mesh)
    if run is None:
        return made, limits
    if price is None and machine.chip.name in catalogue.prices:
        price = catalogue.prices[machine.chip.name].dollars
    made = dataclasses.replace(made, tokens=run.tokens, long_run=run.long_run, cost_per_hour=price)
    return made, limits


def _price(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise MeshwrightError(f"{text!r} is not a price, such as 4.2") from None

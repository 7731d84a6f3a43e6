"""`meshwright prove`: compile the step of train for a machine that is not here."""

import contextlib
import dataclasses
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from meshwright.audits import Audit
from meshwright.audits import audit as read_audit
from meshwright.cli.audit import show as show_audit
from meshwright.cli.flags import named_settings, take, take_integer, take_switch
from meshwright.cli.train import settings
from meshwright.errors import MeshwrightError
from meshwright.files import status_of
from meshwright.machines import Machine
from meshwright.planner import Choice, Plan, StepModel, Workload, apply, memory, planned
from meshwright.planner.report import read_plan
from meshwright.present import Column, Row, aligned, bytes_text, count
from meshwright.proofs import Comparison, Proof, compare, comparison_table, expected, prove
from meshwright.training import AUTO, TrainConfig, training_spec

STAGES = {
    "starting": "starting the compiler",
    "lowering": "tracing the step",
    "compiling": "compiling",
    "reading": "reading the program",
}


def prove_train(words: list[str]) -> None:
    """`words` are the command line: the flags of prove are taken out, the rest are train's."""
    plan_file, choice = take(words, "--plan"), take_integer(words, "--choice")
    plan = None if plan_file is None else read_plan(plan_file)
    if take_switch(words, "--serve") or (plan is not None and plan.engine is not None):
        from meshwright.cli.prove_serve import prove_serve

        if plan is None:
            prove_serve(words)
        else:
            prove_serve([*_served(plan, plan_file or "", choice), *words], plan.machine)
        return
    on: str | Machine | None = take(words, "--on")
    most = take_integer(words, "--rows")
    fail_on = take(words, "--fail-on")
    as_json, again = take_switch(words, "--json"), take_switch(words, "--no-cache")
    if fail_on not in (None, "surprise", "rewrite", "memory"):
        raise MeshwrightError(
            f"--fail-on {fail_on!r} is not known; it can be: surprise, rewrite, memory"
        )
    default = model = None
    if plan is not None and plan_file is not None:
        if words and not words[0].startswith("-"):
            raise MeshwrightError(
                f"the plan {plan_file!r} names its model; leave out {words[0]!r}, or plan that one"
            )
        default = apply(plan.config, _chosen(plan, plan_file, choice))
        model, on = plan.model, on or plan.machine
    elif choice is not None:
        raise MeshwrightError("--choice picks a mesh of a plan; give it too: --plan FILE")
    if on is None:
        raise MeshwrightError(
            "--on says for which machine to compile: --on v5p:4x4x4, --on h100:8, --on cpu:8"
        )
    config, machine = settings(words, default, "meshwright prove"), Machine.parse(on)
    if config.backend == "torch":
        raise MeshwrightError(
            "prove compiles the step of the JAX backend; with --backend torch mw.torch.audit lists "
            "what a step sends, and mw.torch.explain where every parameter goes"
        )
    if config.mesh == AUTO:
        config, chosen = planned(config, machine, named_settings(words))
        print(chosen, file=sys.stderr)
    has_plan = config.rules == "standard"
    if fail_on in ("surprise", "rewrite") and not has_plan:
        raise MeshwrightError(
            f"--fail-on {fail_on} needs to know what belongs to the step, and the plan knows the "
            "standard rules alone; audit the program with --expect: meshwright audit --text FILE"
        )
    with shown(f"{config.model} on {machine}") as progress:
        proof = prove(config, machine, model=model, cache=not again, progress=progress)
    step = StepModel(Workload.of(config, machine, model)) if has_plan else None
    audit, compared = _read(config, proof, step)
    wrong = {
        "surprise": audit is not None and audit.surprises,
        "rewrite": audit is not None and (audit.surprises or audit.rewritten),
        "memory": not proof.fits,
    }
    with status_of(failed=fail_on is not None and bool(wrong[fail_on])):
        if as_json:
            print(json.dumps(_data(config, proof, audit, compared)))
        else:
            _print(config, proof, audit, compared, step, 12 if most is None else most)


def _served(plan: Plan, file: str, choice: int | None) -> list[str]:
    """The words of `prove --serve` for a choice of a plan."""
    if plan.engine is None:
        raise MeshwrightError(f"the plan {file!r} is of training; leave out --serve")
    chosen, config = _chosen(plan, file, choice), plan.config
    words = [config.model, "--mesh", chosen.mesh]
    words += ["--batch", str(config.batch), "--seq", str(config.seq)]
    words += ["--dtype", config.compute.dtype]
    for flag, value in {"--engine.weights": chosen.weights, "--engine.cache": chosen.cache}.items():
        words += [flag, value] if value else []
    return words


def _chosen(plan: Plan, file: str, choice: int | None) -> Choice:
    """A plan's choice; by default its best."""
    if choice is not None and not 1 <= choice <= len(plan.ranked):
        raise MeshwrightError(
            f"--choice {choice} is not one of the plan's meshes, 1 to {len(plan.ranked)}"
        )
    if not plan.config.model:
        raise MeshwrightError(
            f"the plan {file!r} was made of a model's config and names no model; prove it in "
            "Python: meshwright.proofs.prove(TrainConfig(…), machine, model=…)"
        )
    return plan.ranked[0 if choice is None else choice - 1].choice


def _read(
    config: TrainConfig, proof: Proof, step: StepModel | None
) -> tuple[Audit | None, tuple[Comparison, ...]]:
    """The audit, with what the plan expects, and the comparison."""
    if proof.footprint is None:
        return None, () if step is None else compare(step, proof, None)
    shape = dict(training_spec(config).resolve(proof.machine.num_devices).axes)
    if step is None:
        return read_audit(proof.text, shape), ()
    audit = read_audit(proof.text, shape, expected=expected(step))
    return audit, compare(step, proof, audit)


def _print(
    config: TrainConfig, proof: Proof, audit: Audit | None, compared: Sequence[Comparison],
    step: StepModel | None, most: int,
) -> None:  # fmt: skip
    console = Console()
    console.print(headline(config.model, proof), highlight=False, soft_wrap=True)
    if step is not None and step.padding is not None:
        console.print(step.padding, highlight=False, soft_wrap=True)
    if proof.footprint is not None:
        kinds = ", ".join(
            f"{kind} {bytes_text(size)}" for kind, size in proof.footprint.kinds.items() if size
        )
        console.print(f"of a device: {kinds}", highlight=False, soft_wrap=True)
    if proof.attention is not None:
        console.print(
            f"attention: {proof.attention}", highlight=False, markup=False, soft_wrap=True
        )
    buffers = proof.footprint.buffers if proof.footprint else ()
    buffers = proof.out_of_memory.buffers if proof.out_of_memory else buffers
    if proof.footprint is None and not buffers and step is not None:
        # the compiler gave up before it had placed anything
        kinds = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in memory(step).kinds.items())
        console.print(f"by the plan: {kinds}", highlight=False, soft_wrap=True)
    if buffers:
        lines = [Row((bytes_text(buffer.bytes), buffer.arrays)) for buffer in buffers[:6]]
        columns = [Column("bytes"), Column("largest buffers", right=False, least=40)]
        console.print(*aligned(columns, lines, console.width), sep="\n")
    print_comparison(console, compared)
    if audit is not None:
        show_audit(audit, console, most)
    kept = "the program and the compiler's report are" if proof.footprint else "all it said is"
    console.print(f"{kept} in {proof.folder}", soft_wrap=True)


def print_comparison(console: Console, compared: Sequence[Comparison]) -> None:
    if compared:
        columns, rows = comparison_table(compared)
        console.print(*aligned(columns, rows, console.width), sep="\n")


def headline(model: str, proof: Proof) -> str:
    seconds = sum(proof.times.values())
    when = "compiled before" if proof.cached else "compiled"
    how = f"{when} in {seconds:.0f} s by {proof.compiler}"
    devices = count(proof.machine.num_devices, "device")
    subject = f"{model} on {proof.machine} ({devices}), mesh {proof.mesh}"
    if proof.footprint is not None:
        total, limit = proof.footprint.total, proof.footprint.limit
        verdict = "fits" if proof.fits else "does not fit"
        return f"{verdict}: {bytes_text(total)} of {bytes_text(limit)} a device; {subject}; {how}"
    lacks = proof.out_of_memory
    assert lacks is not None
    if not lacks.needed:
        return f"does not fit, by the compiler's own word; {subject}; {how}"
    count_ = ", by the compiler's first count" if lacks.early else ""
    verdict = f"needs {bytes_text(lacks.needed)} of {bytes_text(lacks.limit)} a device{count_}"
    return f"does not fit: {verdict}; {subject}; {how}"


def _data(
    config: TrainConfig, proof: Proof, audit: Audit | None, compared: Sequence[Comparison]
) -> dict[str, Any]:
    return {
        "model": config.model,
        "machine": str(proof.machine),
        "mesh": config.mesh,
        **proof_data(proof, audit, compared),
    }


def proof_data(proof: Proof, audit: Audit | None, compared: Sequence[Comparison]) -> dict[str, Any]:
    """Of one program."""
    used, lacks = proof.footprint, proof.out_of_memory
    return {
        "fits": proof.fits,
        "memory": None if used is None else dataclasses.asdict(used),
        "out_of_memory": None if lacks is None else dataclasses.asdict(lacks),
        "times": dict(proof.times),
        "compiler": proof.compiler,
        "cached": proof.cached,
        "attention": proof.attention,
        "audit": None if audit is None else audit.data(),
        "compared": [dataclasses.asdict(number) | {"off": number.off} for number in compared],
    }


@contextlib.contextmanager
def shown(subject: str) -> Iterator[Any]:
    """A line on stderr that says the stage and how long it has taken; plain lines in a pipe."""
    console = Console(stderr=True)
    stage, start, done = "starting", time.perf_counter(), threading.Event()
    if not console.is_terminal:

        def line(name: str, _: float) -> None:
            print(f"{STAGES.get(name, name)}: {subject}", file=sys.stderr, flush=True)

        yield line
        return
    with console.status("") as status:

        def tick() -> None:
            while not done.wait(0.2):
                passed = time.perf_counter() - start
                status.update(f"{STAGES.get(stage, stage)}: {subject}, {passed:.0f} s")

        def move(name: str, _: float) -> None:
            nonlocal stage
            stage = name

        clock = threading.Thread(target=tick, daemon=True)
        clock.start()
        try:
            yield move
        finally:
            done.set()
            clock.join()

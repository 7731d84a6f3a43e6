"""`meshwright prove --serve`: compile an engine's steps for a machine that is not here."""

import json

from rich.console import Console

from meshwright.audits import audit as read_audit
from meshwright.cli.audit import show as show_audit
from meshwright.cli.flags import take, take_integer, take_switch
from meshwright.cli.prove_train import headline, print_comparison, proof_data, shown
from meshwright.errors import MeshwrightError
from meshwright.files import status_of
from meshwright.machines import Machine
from meshwright.meshes import STANDARD_AXES, MeshSpec
from meshwright.models import default_dtype, model_config
from meshwright.ops import QUANTIZED_DTYPES
from meshwright.ops.attention import CACHE_DTYPES
from meshwright.planner import Choice, StepModel, Workload
from meshwright.present import bytes_text, mesh_text
from meshwright.proofs import compare, expected_serving, prove_serving
from meshwright.serving import EngineConfig, ServedStep
from meshwright.training import AUTO, TrainConfig, with_settings


def prove_serve(words: list[str], planned_on: Machine | str = "") -> None:
    """`words` are the command line without --serve; without --on it is for `planned_on`."""
    on, mesh = take(words, "--on") or planned_on, take(words, "--mesh")
    weights, kept = take(words, "--engine.weights"), take(words, "--engine.cache")
    wanted_dtype = take(words, "--dtype") or AUTO
    batch, seq = take_integer(words, "--batch", 1), take_integer(words, "--seq", 1)
    rows = take_integer(words, "--rows")
    most = 12 if rows is None else rows
    fail_on = take(words, "--fail-on")
    as_json, again = take_switch(words, "--json"), take_switch(words, "--no-cache")
    if fail_on not in (None, "surprise", "memory"):
        raise MeshwrightError(f"--fail-on {fail_on!r} can be, with --serve: surprise, memory")
    has_model = bool(words) and not words[0].startswith("-")
    needed = {"a model": has_model, "--on h100:8": on, "--batch 32": batch, "--seq 2048": seq}
    if missing := [flag for flag, given in needed.items() if not given]:
        raise MeshwrightError(f"add {' and '.join(missing)}; meshwright prove --help says more")
    if len(words) > 1:
        raise MeshwrightError(f"{words[1]} does not go with prove --serve; leave it out")
    assert batch is not None
    assert seq is not None
    if weights not in (None, *QUANTIZED_DTYPES):
        raise MeshwrightError(
            f"--engine.weights {weights!r} must be {' or '.join(QUANTIZED_DTYPES)}"
        )
    if kept not in (None, *CACHE_DTYPES):
        raise MeshwrightError(f"--engine.cache {kept!r} must be {' or '.join(CACHE_DTYPES)}")
    name, machine = words[0], Machine.parse(on)
    spec = MeshSpec.parse(mesh or "tp=-1").with_standard_axes()
    axes = dict(spec.resolve(machine.num_devices, where=f"in '{machine}'").axes)
    if axes["fsdp"] * axes["sp"] > 1:
        raise MeshwrightError("an engine serves meshes of dp, tp and ep; leave fsdp and sp at 1")
    text = mesh_text({axis: axes[axis] for axis in (*STANDARD_AXES, "ep") if axis in axes})
    model = model_config(name)
    dtype = default_dtype(wanted_dtype, machine.chip.platform)
    with shown(f"{name} on {machine}, serving") as progress:
        proofs = prove_serving(
            ServedStep(text, batch, seq, weights, dtype, kept), model, machine,
            cache=not again, progress=progress,
        )  # fmt: skip
    config = TrainConfig(name, batch=batch, seq=seq)
    config = with_settings(config, {"compute.dtype": wanted_dtype})
    workload = Workload(config, machine, model, EngineConfig())
    step = StepModel(workload, Choice.of(**axes, weights=weights, cache=kept))
    decode = proofs["decode"]
    audit = None
    if decode.footprint is not None:
        replica = {**axes, "dp": 1}
        wanted = expected_serving(step)
        audit = read_audit(decode.text, replica, expected=wanted)
    compared = compare(step, proofs["prefill"], audit)
    wrong = {
        "surprise": audit is not None and bool(audit.surprises),
        "memory": not all(proof.fits for proof in proofs.values()),
    }
    with status_of(failed=fail_on is not None and wrong[fail_on]):
        if as_json:
            data = {
                "decode": proof_data(decode, audit, compared),
                "prefill": proof_data(proofs["prefill"], None, ()),
            }
            print(json.dumps({"model": name, "machine": str(machine), "mesh": text} | data))
        else:
            console = Console()
            for part, proof in proofs.items():
                line = headline(name, proof)
                console.print(f"{part} {line}", highlight=False, soft_wrap=True)
                kinds = proof.footprint.kinds if proof.footprint else {}
                sizes = [f"{kind} {bytes_text(size)}" for kind, size in kinds.items() if size]
                console.print(f"of a device: {', '.join(sizes)}", highlight=False, soft_wrap=True)
                console.print(f"attention: {proof.attention}", highlight=False, soft_wrap=True)
            print_comparison(console, compared)
            if audit is not None:
                show_audit(audit, console, most)
            console.print(f"the programs are in {decode.folder} and {proofs['prefill'].folder}")

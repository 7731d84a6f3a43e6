"""An engine's steps, compiled for machines that are not here."""

import dataclasses
import json
from pathlib import Path

import pytest
from tests.planner.compiled import MODELS
from tests.planner.workloads import workload

from meshwright.audits import audit
from meshwright.cli.main import main
from meshwright.errors import MeshwrightError
from meshwright.models import preset
from meshwright.planner import Choice
from meshwright.planner.memory import memory
from meshwright.planner.step import StepModel
from meshwright.proofs import Proof, compare, expected_serving, prove_serving
from meshwright.serving import ServedStep

pytestmark = pytest.mark.usefixtures("fast_proofs")
STEP = ServedStep("dp=4,fsdp=1,tp=2,sp=1", batch=16, seq=256)
RUN = workload(preset("tiny"), "cpu:8", STEP.batch, STEP.seq, serve=True, dtype="float32")
CHOICE = Choice.of(dp=4, tp=2)


@pytest.fixture(scope="module")
def proofs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Proof]:
    return prove_serving(STEP, preset("tiny"), "cpu:8", cache=tmp_path_factory.mktemp("proofs"))


def test_decode_and_prefill_fit(proofs: dict[str, Proof]) -> None:
    assert list(proofs) == ["decode", "prefill"]
    for proof in proofs.values():
        assert proof.fits
        assert proof.attention == "paged, by the kernel plain"


def test_weights_and_pages_are_arguments_of_the_planned_size(proofs: dict[str, Proof]) -> None:
    """Beside them are only the host's integers."""
    kinds = memory(StepModel(RUN, CHOICE)).kinds
    used = proofs["decode"].footprint
    assert used is not None
    more = used.kinds["arguments"] - kinds["parameters"] - kinds["key-value cache"]
    assert 0 < more < 4096
    # the pages are written in place, and the last token of each slot: one more than sequences
    slots = STEP.batch // CHOICE.size("dp") + 1
    in_place = kinds["key-value cache"] + 4 * slots
    assert used.kinds["of outputs, in place of arguments"] == in_place


def test_a_decode_step_sends_what_is_planned_and_nothing_else(proofs: dict[str, Proof]) -> None:
    wanted = expected_serving(StepModel(RUN, CHOICE))
    found = audit(proofs["decode"].text, {"dp": 1, "fsdp": 1, "tp": 2, "sp": 1}, expected=wanted)
    assert not found.surprises
    compared = compare(StepModel(RUN, CHOICE), proofs["prefill"], found)
    assert [one.what for one in compared] == [
        "memory of a device", "all-reduce over tp", "all-gather over tp",
    ]  # fmt: skip
    assert [one.off for one in compared[1:]] == [0.0, 0.0]
    # the plan reserves logits three times, as the engine does
    assert compared[0].off is not None
    assert 0.0 < compared[0].off < 0.25


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, "int8"])
def test_latent_attention_and_experts_are_served_as_planned(
    weights: str | None, tmp_path: Path
) -> None:
    """Leading layers, latents that every device along tp makes, a cache of every head."""
    model = dataclasses.replace(MODELS["deepseek"], layers=4, max_seq=256, router_bias=True)
    step = ServedStep("dp=2,fsdp=1,tp=2,sp=1,ep=2", batch=16, seq=256, weights=weights)
    run = workload(model, "cpu:8", step.batch, step.seq, serve=True, dtype="float32")
    planned = StepModel(run, Choice.of(dp=2, tp=2, ep=2, weights=weights))
    proof = prove_serving(step, model, "cpu:8", cache=tmp_path)["decode"]
    kinds = memory(planned).kinds
    assert proof.footprint is not None
    more = proof.footprint.kinds["arguments"] - kinds["parameters"] - kinds["key-value cache"]
    assert 0 < more < 4096
    axes = {"dp": 1, "fsdp": 1, "tp": 2, "sp": 1, "ep": 2}
    found = audit(proof.text, axes, expected=expected_serving(planned))
    assert not found.surprises
    compared = compare(planned, proof, found)
    assert {one.what for one in compared[1:]} == {
        "all-reduce over tp", "all-reduce over tp+ep", "all-gather over tp", "all-gather over ep",
    }  # fmt: skip
    for one in compared[1:]:
        assert one.planned == pytest.approx(one.compiled, rel=0.02), one.what


def test_a_mesh_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    step = ServedStep("dp=1,fsdp=1,tp=16,sp=1", batch=8, seq=64)
    with pytest.raises(MeshwrightError, match="does not divide the model's heads=8"):
        prove_serving(step, preset("tiny"), "cpu:16", cache=tmp_path)


def test_the_command_reports_both_steps_and_the_audit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # of four KV heads, each is on two devices
    command = "prove tiny --on cpu:8 --serve --mesh tp=8 --batch 4 --seq 128 --engine.weights int8"
    main([*command.split(), "--fail-on", "surprise"])
    text = capsys.readouterr().out
    assert "decode fits: " in text
    assert "prefill fits: " in text
    assert "no surprises" in text
    main([*command.split(), "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["decode"]["cached"]
    assert data["decode"]["audit"] is not None
    assert data["prefill"]["fits"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("tiny --on cpu:8 --seq 64", "add --batch 32; meshwright prove"),
        ("tiny --on cpu:8 --batch 4 --seq x", "--seq: 'x' is not a whole number"),
        ("tiny --batch 4 --seq 64", "add --on h100:8"),
        ("tiny --on cpu:8 --batch 4 --seq 64 --steps 3", "--steps does not go with prove --serve"),
        ("tiny --on cpu:8 --batch 4 --seq 64 --mesh fsdp=8", "meshes of dp, tp and ep"),
        ("tiny --on cpu:8 --batch 4 --seq 64 --engine.weights int4", "must be int8 or fp8"),
        ("t5-tiny --on cpu:2 --mesh tp=2 --batch 4 --seq 64", "compiles steps of decoders"),
    ],
)
def test_mistakes_are_said(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["prove", "--serve", *words.split()])
    assert says in capsys.readouterr().err

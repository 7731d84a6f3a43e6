"""Compiling for a machine that is not here: here, one of CPUs, whose compiler is always there."""

import dataclasses
import importlib.util
import json
import platform
import re
import types
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

import meshwright as mw
from meshwright.audits import audit
from meshwright.machines import Machine
from meshwright.models import preset
from meshwright.planner import Workload
from meshwright.planner.step import StepModel
from meshwright.proofs import Proof, child, prove
from meshwright.proofs.compare import compare, expected
from meshwright.proofs.proof import _proof, digest
from meshwright.proofs.target import check_extra, child_environment, gpu_description
from meshwright.training.config import ComputeConfig, TrainConfig

pytestmark = pytest.mark.usefixtures("fast_proofs")
CONFIG = TrainConfig("tiny", mesh="dp=1,fsdp=2,tp=4,sp=1", batch=8, seq=128)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("proofs")


@pytest.fixture(scope="module")
def proof(cache: Path) -> Proof:
    return prove(CONFIG, "cpu:8", cache=cache)


def test_a_step_is_compiled_and_fits(proof: Proof) -> None:
    assert proof.fits
    assert not proof.cached
    assert proof.footprint is not None
    parameters = 4 * 1_066_112 / 8  # split in eight, norms aside
    assert proof.footprint.kinds["arguments"] > 3 * parameters  # with adamw's moments
    assert proof.footprint.total > proof.footprint.kinds["arguments"]
    assert proof.times["compiling"] > 0


def test_results_are_short_to_look_at(proof: Proof) -> None:
    found = audit(proof.text, "dp=1,fsdp=2,tp=4,sp=1")
    for shown in (repr(proof), repr(found), repr(proof.machine)):
        assert len(shown) < 300
        assert "\n" not in shown
    assert repr(proof).startswith("Proof(dp=1,fsdp=2,tp=4,sp=1 on cpu:8: fits, ")
    assert repr(found).startswith("Audit(mesh dp=1,fsdp=2,tp=4,sp=1: ")
    assert repr(proof.machine) == "Machine('cpu:8')"


def test_the_program_has_what_the_plan_says_and_nothing_else(proof: Proof) -> None:
    step = StepModel(Workload.of(CONFIG, proof.machine))
    found = audit(proof.text, step.choice.sizes, expected=expected(step))
    assert found.rows
    assert not found.surprises
    sent = [one for one in compare(step, proof, found) if " over " in one.what]
    assert len(sent) >= 4
    large = [one for one in sent if one.compiled > 10_000]
    assert large
    assert all(one.off is not None and abs(one.off) < 0.01 for one in large)


def test_so_it_is_with_a_padded_vocabulary(cache: Path) -> None:
    model = dataclasses.replace(preset("tiny"), vocab=321)
    padded = prove(CONFIG, "cpu:8", model=model, cache=cache)
    step = StepModel(Workload.of(CONFIG, padded.machine, model))
    assert step.padding == "vocab 321 padded to 324 for tp=4"
    found = audit(padded.text, step.choice.sizes, expected=expected(step))
    assert not found.surprises
    compared = compare(step, padded, found)
    large = [one for one in compared if " over " in one.what and one.compiled > 10_000]
    assert large
    assert all(one.off is not None and abs(one.off) < 0.01 for one in large)


def test_the_same_step_is_not_compiled_again(proof: Proof, cache: Path) -> None:
    stages: list[str] = []
    again = prove(CONFIG, "cpu:8", cache=cache, progress=lambda stage, _: stages.append(stage))
    assert again.cached
    assert stages == []
    assert again.footprint == proof.footprint


def test_what_does_not_change_the_program_does_not_compile_again(cache: Path, proof: Proof) -> None:
    other = dataclasses.replace(CONFIG, run=Path("elsewhere"), seed=7)
    assert prove(other, "cpu:8", cache=cache).cached


def test_another_setting_is_another_program(cache: Path, proof: Proof) -> None:
    stages: list[str] = []
    other = dataclasses.replace(CONFIG, compute=ComputeConfig(remat="full"))
    found = prove(other, "cpu:8", cache=cache, progress=lambda stage, _: stages.append(stage))
    assert not found.cached
    assert stages == ["starting", "lowering", "compiling", "reading"]


def test_a_mistake_is_said_as_train_says_it(cache: Path) -> None:
    with pytest.raises(
        mw.MeshwrightError,
        match=r"kv_heads=4 cannot be split in tp=8, but in 1, 2 or 4; mesh 'tp=4,dp=1,fsdp=2,sp=1' would fit",
    ):
        prove(dataclasses.replace(CONFIG, mesh="tp=8"), "cpu:8", cache=cache)


@pytest.mark.parametrize(
    ("system", "processor", "machine", "reason"),
    [
        (
            "Linux",
            "aarch64",
            "v5e:2x4",
            "there is none for Linux on aarch64: prove it on Linux on x86_64",
        ),
        (
            "Darwin",
            "arm64",
            "v5e:2x4",
            "there is none for Darwin on arm64: prove it on Linux on x86_64",
        ),
        (
            "Darwin",
            "arm64",
            "h100:8",
            "for Darwin on arm64: prove it on Linux on x86_64 or aarch64",
        ),
        ("Linux", "x86_64", "v5e:2x4", "pip install -e '.[tpu]' (in the clone of Meshwright)"),
        ("Linux", "aarch64", "h100:8", "pip install -e '.[cuda]' (in the clone of Meshwright)"),
    ],
)
def test_a_compiler_that_cannot_be_installed_here_is_said_to_be_so(
    system: str, processor: str, machine: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: processor)
    with pytest.raises(mw.MeshwrightError, match=re.escape(reason)):
        check_extra(mw.Machine.parse(machine))


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="it is installed")
def test_a_compiler_that_is_not_installed_is_named_with_its_command() -> None:
    with pytest.raises(mw.MeshwrightError, match=r"pip install -e '\.\[tpu\]'"):
        prove(CONFIG, "v5e:2x4")


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is not None, reason="it is installed"
)
def test_so_is_the_gpus() -> None:
    with pytest.raises(mw.MeshwrightError, match=r"pip install -e '\.\[cuda\]'"):
        prove(CONFIG, "h100:8")


def test_a_failure_of_the_compiler_is_digested_and_kept(tmp_path: Path) -> None:
    message = "INTERNAL: Mosaic failed to compile TPU kernel: bad tiling\n\nmany more lines"
    result = {"times": {}, "failure": message, "attention": None}
    result |= {"compiled_on": "x86_64", "date": "2026-11-17"}
    with pytest.raises(mw.MeshwrightError, match=r"Mosaic failed.*message\.txt"):
        _proof(result, mw.Machine.parse("v5e:2x4"), "tp=8", "", tmp_path, False)
    assert digest("x" * 500).endswith("….")


def test_a_gpu_is_known_by_its_own_figures() -> None:
    text = gpu_description(mw.Machine.parse("h200:8"))
    assert "core_count: 132" in text
    # XLA takes 80% of it for its limit; with the GPU there, jax names the allocator's instead
    said = re.search(r"device_memory_size: (\d+)", text)
    assert said is not None
    assert 0.8 * int(said[1]) == pytest.approx(mw.CHIPS["h200"].usable_bytes)
    assert 'device_description_str: "NVIDIA H200"' in text
    own = dataclasses.replace(mw.CHIPS["h200"], name="mine")
    with pytest.raises(mw.MeshwrightError, match="it can compile for"):
        gpu_description(mw.Machine(own, (1, 8)))
    like = dataclasses.replace(own, like="h200", memory_bytes=2 * own.memory_bytes)
    own_text = gpu_description(mw.Machine(like, (1, 8)))
    assert "core_count: 132" in own_text
    assert said[0] not in own_text


def test_what_was_asked_is_kept_beside_the_answer(proof: Proof) -> None:
    request = json.loads((proof.folder / "request.json").read_text())
    assert request["machine"] == "cpu:8"
    assert request["config"]["mesh"] == CONFIG.mesh


def test_flags_of_this_machine_are_not_given_to_another_machines_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    for machine in ("v5p:2x2x1", "h200:1", "cpu:8"):
        assert "XLA_FLAGS" not in child_environment(Machine.parse(machine))


class _Program:
    def as_text(self) -> str:
        return "HloModule train"

    def memory_analysis(self) -> types.SimpleNamespace:
        kinds = ("argument", "output", "alias", "temp", "generated_code", "host_temp")
        return types.SimpleNamespace(**{f"{kind}_size_in_bytes": 1 for kind in kinds})


class _Lowered:
    """A step that compiles only where `works` says so."""

    def __init__(self, works: Callable[[dict[str, object]], bool]) -> None:
        self.works, self.tried = works, 0

    def compile(self, compiler_options: dict[str, object]) -> _Program:
        self.tried += 1
        if not self.works(compiler_options):
            raise jax.errors.JaxRuntimeError("INTERNAL: Couldn't find output tile sizes")
        return _Program()


def _compiled_by_child(
    lowered: _Lowered, machine: str, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> dict[str, object]:
    monkeypatch.setattr(
        child, "_trained", lambda *_: (lowered, types.SimpleNamespace(shape={}), None)
    )
    monkeypatch.setattr("meshwright.proofs.target.absent_devices", lambda _: [])
    return child.compiled({"machine": machine}, folder)


def test_matmuls_whose_triton_tiles_fail_are_compiled_without_triton(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lowered = _Lowered(lambda options: options.get("xla_gpu_enable_triton_gemm") is False)
    result = _compiled_by_child(lowered, "h100:8", monkeypatch, tmp_path)
    assert result["options"] == {"xla_gpu_enable_triton_gemm": False}
    assert lowered.tried == 2
    made = _proof(result, Machine.parse("h100:8"), "dp=8", "jax 0", tmp_path, False)
    assert made.compiler == "jax 0 (xla_gpu_enable_triton_gemm=False)"


@pytest.mark.parametrize(("machine", "times"), [("h100:8", 2), ("cpu:1", 1)])
def test_a_compile_that_fails_either_way_says_the_first_reason(
    machine: str, times: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lowered = _Lowered(lambda options: False)
    result = _compiled_by_child(lowered, machine, monkeypatch, tmp_path)
    assert lowered.tried == times
    with pytest.raises(mw.MeshwrightError, match="Couldn't find output tile sizes"):
        _proof(result, Machine.parse(machine), "dp=1", "jax 0", tmp_path, False)


def test_a_proof_says_where_and_when_it_was_compiled(proof: Proof) -> None:
    assert proof.compiled_on == platform.machine()
    assert re.fullmatch(r"20[0-9]{2}-[0-9]{2}-[0-9]{2}", proof.date)

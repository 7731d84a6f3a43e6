"""--compute.overlap: on TPUs weights are all-gathered while layers compute."""

import dataclasses
import importlib.util

import pytest

import meshwright as mw
from meshwright.audits.read import collectives
from meshwright.errors import MeshwrightError
from meshwright.machines import CHIPS
from meshwright.planner import Workload
from meshwright.planner.report.phrases import next_commands
from meshwright.proofs import prove
from meshwright.training.compute import known_chip
from meshwright.training.config import ComputeConfig, TrainConfig
from meshwright.training.tpu import compiler_options, overlap_choice, overlap_text


def test_only_tpus_are_told_and_only_if_asked() -> None:
    assert compiler_options("tpu", overlap=True)
    assert not compiler_options("tpu", overlap=False)
    assert not compiler_options("cpu", overlap=True)
    assert not compiler_options("gpu", overlap=True)


def test_the_compiler_is_told_by_default_on_chips_where_every_compiled_step_is_faster() -> None:
    assert {name for name, chip in CHIPS.items() if overlap_choice("auto", chip)[0]} == {
        "v4",
        "v5p",
        "v6e",
    }
    assert not overlap_choice("auto", None)[0]
    for chip in (CHIPS["v5e"], CHIPS["v5p"], None):
        assert overlap_choice("on", chip) == (True, "as asked")
        assert overlap_choice("off", chip) == (False, "as asked")
    said = overlap_text("auto", CHIPS["v5p"])
    assert "asked for (v5p: compiled steps are faster" in said
    assert said.endswith("--compute.overlap off changes it")
    assert "by itself); --compute.overlap on" in overlap_text("auto", CHIPS["v5e"])


@pytest.mark.parametrize(("on", "told"), [("v6e:2x2", True), ("v5e:2x2", False)])
def test_plan_and_step_take_the_same_default(on: str, told: bool) -> None:
    machine = mw.Machine.parse(on)
    config = TrainConfig("tiny", mesh="fsdp=4", batch=4, seq=128)
    assert Workload.of(config, machine).overlap is told
    named = {setting: ComputeConfig(overlap=setting) for setting in ("on", "off")}
    for setting, compute in named.items():
        asked = dataclasses.replace(config, compute=compute)
        assert Workload.of(asked, machine).overlap is (setting == "on")
    device = machine.devices[0]
    assert overlap_choice(config.compute.overlap, known_chip(device))[0] is told


def test_the_plan_hides_all_gathers_on_a_tpu_that_is_told_to_and_says_it() -> None:
    given = ("llama-3.1-8b", "v5p:4x4x4", 256, 4096)
    plain, told = (mw.plan(*given, mesh="fsdp=64", overlap=overlap) for overlap in ("off", "on"))
    usual = mw.plan(*given, mesh="fsdp=64")
    assert usual.best.step_seconds == told.best.step_seconds
    assert usual.best.memory.total == told.best.memory.total
    assert not any("overlap" in line for line in next_commands(usual, usual.best.choice))
    assert told.best.step_seconds < plain.best.step_seconds
    assert not plain.warnings
    assert not told.warnings
    assert told.best.memory.total == plain.best.memory.total  # attention's is the largest moment
    small = [
        mw.plan("llama-3.2-1b", "v5p:2x2x2", 16, 2048, mesh="fsdp=8", overlap=overlap)
        for overlap in ("off", "on")
    ]
    assert small[0].best.memory.total < small[1].best.memory.total  # here the loss is
    assert any("--compute.overlap on" in line for line in next_commands(told, told.best.choice))
    assert any("--compute.overlap off" in line for line in next_commands(plain, plain.best.choice))
    on_gpus = [
        mw.plan("llama-3.1-8b", "h100:8", 64, 4096, mesh="fsdp=8", overlap=overlap)
        for overlap in ("off", "on")
    ]
    assert on_gpus[0].best.step_seconds == on_gpus[1].best.step_seconds
    assert on_gpus[1].warnings == ("overlap changes nothing on h100: it is for TPUs",)
    v5e = [
        mw.plan("llama-3.2-1b", "v5e:4x4", 32, 2048, mesh="fsdp=16", overlap=overlap)
        for overlap in ("off", "on")
    ]
    assert v5e[0].best.memory.total == v5e[1].best.memory.total
    assert v5e[1].warnings == ("overlap changes nothing on v5e: it overlaps by itself",)
    with pytest.raises(MeshwrightError, match="overlap='on' is of training, and serving is plan"):
        mw.plan(*given, kind="serve", overlap="on")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install jax[tpu]"
)
def test_the_all_gathers_of_the_loop_are_asynchronous_on_v5p_for_some_memory() -> None:
    shape = {"dp": 1, "fsdp": 8, "tp": 1, "sp": 1}
    found = {}
    for overlap in (False, True):
        config = TrainConfig(
            "llama-3.2-1b",
            mesh="fsdp=8",
            batch=16,
            seq=2048,
            compute=ComputeConfig(overlap="on" if overlap else "off"),
        )
        found[overlap] = prove(config, "v5p:2x2x2", cache=False)
    footprints = [found[overlap].footprint for overlap in (False, True)]
    assert footprints[0] is not None
    assert footprints[1] is not None
    assert footprints[1].total < 1.15 * footprints[0].total
    for overlap, proof in found.items():
        rows = [row for row in collectives(proof.text, shape) if row.operation == "all-gather"]
        in_loop = [row for row in rows if row.times >= 16 and row.bytes > 2**20]
        assert len(in_loop) >= 10
        if overlap:  # one of 2 MiB is not, of k or v
            assert all(row.asynchronous for row in in_loop if row.bytes > 4 * 2**20)
            assert sum(not row.asynchronous for row in in_loop) <= 1
        else:
            assert not any(row.asynchronous for row in in_loop)

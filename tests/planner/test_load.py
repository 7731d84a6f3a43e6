"""Deployments under load: the simulated queue against formulas, plans and a measured server."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.cli.plan import plan_command
from meshwright.errors import MeshwrightError
from meshwright.machines import CHIPS, Catalogue, Machine
from meshwright.models import DecoderConfig
from meshwright.planner import Load, Workload, deployments, load, machines_named, simulation
from meshwright.planner.constraints import Constraints, parse
from meshwright.planner.serving import search_serving
from meshwright.serving import EngineConfig, ScheduledSequence, ScheduledStep
from meshwright.training import TrainConfig

root = Path(__file__).parents[2]
# benchmarks/serve.py's 1.5b
SMALL = DecoderConfig(
    vocab=128256, layers=16, embed=2048, heads=32, kv_heads=8, head_dim=64, mlp=8192, max_seq=8192
)


def replica(max_batch: int, length: int, on: str = "h200:1") -> Any:
    engine = EngineConfig(max_batch=max_batch, max_length=length)
    config = TrainConfig("", batch=max_batch, seq=length)
    workload = Workload.of(config, Machine.parse(on), SMALL, engine)
    return load._Replica(workload, search_serving(workload, Constraints(), "latency")[0][0])


@pytest.mark.parametrize("utilisation", [0.5, 0.7])
def test_one_place_and_one_token_are_a_queue_with_a_known_wait(
    utilisation: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M/D/1: the mean wait before service is u / (2 (1 - u)) services (Pollaczek-Khinchine)."""
    one = replica(1, 512)
    monkeypatch.setattr(one.costs, "counted", lambda *step: 1.0)
    asked = Load(rate=1.0, prompt=100, output=1, spread=0.0)
    waits = one.waits(asked, utilisation, 10_000)
    mean = sum(waits.first) / len(waits.first)
    assert mean == pytest.approx(1 + utilisation / (2 * (1 - utilisation)), rel=0.07)
    assert waits.busy == pytest.approx(utilisation, rel=0.03)


@pytest.mark.parametrize(
    ("max_batch", "prompt", "output", "rate"),
    [(1, 513, 3, 20), (2, 1, 1, math.inf), (4, 100, 20, 30), (32, 600, 40, 12), (32, 9, 2, 1e-3)],
)
def test_counted_steps_are_those_of_the_scheduler(
    max_batch: int, prompt: int, output: int, rate: float
) -> None:
    """Prompts of 1 token, of one more than a chunk, in several chunks; batches that are full."""
    one = replica(max_batch, 2048)
    spread = 0.0 if prompt == 513 else 0.75
    requests = list(Load(1, prompt, output, spread=spread).requests(rate, 60))
    counts = simulation.counted(one.simulator, requests)
    steps = simulation.scheduled(one.simulator, requests)
    assert counts is not None
    np.testing.assert_array_equal(counts.first, steps.first)
    np.testing.assert_array_equal(counts.between, steps.between)
    assert (counts.seconds, counts.busy) == (steps.seconds, steps.busy)


def test_a_simulation_ends_when_the_waits_cannot_be_met() -> None:
    """Also where the limit is the wait itself, and where pages run out."""
    one = replica(4, 2048)
    requests = list(Load(1, 300, 20).requests(30, 60))
    waits = simulation.counted(one.simulator, requests)
    assert waits is not None
    for percentile in (50, 90, 99):
        first, each = waits.first_token(percentile), waits.per_token(percentile)
        met = simulation.Limits(first, each, percentile)
        assert waits.meet(met)
        assert simulation.counted(one.simulator, requests, met) is not None
        for less in ({"first_token": first * 0.999}, {"per_token": each * 0.999}):
            missed = dataclasses.replace(met, **less)
            assert not waits.meet(missed)
            assert simulation.counted(one.simulator, requests, missed) is None
    few = dataclasses.replace(one.simulator, pages=12)  # for two of the longest
    preempted = few.simulate(requests)
    assert preempted is not None
    assert preempted.first_token(50) > waits.first_token(50)
    assert few.simulate(requests, met) is None


def test_a_step_costs_what_the_plan_says() -> None:
    engine = EngineConfig(max_batch=32, max_length=1024)
    workload = Workload.of(
        TrainConfig("", batch=32, seq=1024), Machine.parse("h200:1"), SMALL, engine
    )
    estimate = search_serving(workload, Constraints(), "latency")[0][0]
    sequence = ScheduledSequence("", [0] * 1024, 1024, 1, computed=1024)
    took = load._Replica(workload, estimate).costs.seconds(ScheduledStep((sequence,) * 32, ()))
    assert took == pytest.approx(estimate.step_seconds, rel=1e-6)


def test_a_measured_server_is_as_fast_as_planned() -> None:
    """benchmarks/RESULTS.md: 1.5b, max-batch 128, prompts of 64 to 448 and answers of 32 to 224."""
    one = replica(128, 2048)
    asked = Load(rate=87.58, prompt=256, output=128)
    highest = 300 / one.waits(asked, math.inf, 300).seconds
    assert highest == pytest.approx(109.5, rel=0.1)
    waits = one.waits(asked, 87.58, 500)
    assert waits.per_token(50) == pytest.approx(3.8e-3, rel=0.1)
    assert waits.first_token(50) == pytest.approx(22.9e-3, rel=0.1)


@pytest.mark.parametrize("number", range(3))
def test_waits_of_measured_loads_are_planned_within_20_percent(number: int) -> None:
    """Three loads that no constant was fitted to; the requests are those that were sent."""
    record = json.loads(Path(root, "benchmarks/served_loads.json").read_text())["loads"][number]
    machine = Machine.parse(f"{record['chip']}:1")
    config = TrainConfig(record["model"], batch=record["max_batch"])
    waits = load.replay(config, machine, record["requests"])
    for what, planned in (
        ("time to first token", waits.first_token),
        ("between tokens", waits.per_token),
    ):
        half, _, most = record["measured"][what]
        assert planned(50) == pytest.approx(half, rel=0.2)
        assert planned(99) == pytest.approx(most, rel=0.2)


def test_twice_the_load_needs_more_chips_and_the_cheapest_comes_first() -> None:
    asked = Load(rate=4, prompt=400, output=60)
    config = TrainConfig("llama-3.1-8b")
    found = deployments(config, [CHIPS["h100"], CHIPS["l40s"]], asked, batches=(32,))
    costs = [one.dollars_per_hour or 0 for one in found.found]
    assert len(costs) == 2
    assert costs == sorted(costs)
    twice = deployments(config, [CHIPS["l40s"]], dataclasses.replace(asked, rate=40), batches=(32,))
    of_l40s = next(one for one in found.found if one.machine.chip.name == "l40s")
    assert twice.best.chips > of_l40s.chips
    for one in (*found.found, twice.best):
        assert one.waits.first_token(99) <= 0.5
        assert one.waits.per_token(99) <= 0.05


def test_what_cannot_be_served_is_said() -> None:
    asked = Load(rate=1, prompt=400, output=60, per_token=1e-3)
    with pytest.raises(MeshwrightError, match=r"a request that is alone waits .* for its first"):
        deployments(TrainConfig("llama-3.1-8b"), [Machine.parse("l40s:1")], asked, batches=(32,))
    asked = Load(rate=1, prompt=400, output=60)
    with pytest.raises(MeshwrightError, match=r"no mesh fits: needs .* with a batch of 1"):
        deployments(TrainConfig("llama-3.1-405b"), [Machine.parse("l4:1")], asked)
    with pytest.raises(MeshwrightError, match="t5-small reads prompts with an encoder"):
        deployments(TrainConfig("t5-small"), [Machine.parse("l4:1")], asked)
    asked = Load(rate=1, prompt=100_000, output=60)
    with pytest.raises(MeshwrightError, match=r"175,105 tokens, and llama-3.1-8b has 131,072 pos"):
        deployments(TrainConfig("llama-3.1-8b"), [Machine.parse("h100:8")], asked)
    with pytest.raises(MeshwrightError, match="rate=inf must be a number above 0"):
        Load(rate=math.inf, prompt=400, output=60)


@pytest.mark.parametrize(
    ("on", "mesh", "why"),
    [
        ("h100:4", "tp=2", "dp=1, so that tp is 4 here.* not 'tp=2'; leave it out.* --on h100:2$"),
        ("h100", "tp=16", "at most 8 chips are tried, and none has 'tp=16'.* --on h100:2x8$"),
        ("h100", "tp=3", "at most 8 chips are tried, and none has 'tp=3'; leave it out$"),
        ("h100", "fsdp=4", "an engine splits a model over tp and ep alone; leave 'fsdp=4' out"),
        ("h100:4", "tp>=2,dp=2", "a replica has dp=1, and how many are .* leave 'dp=2' out"),
        # possible on one of the sizes, whose refusal is told
        ("l4", "tp=1", "no mesh fits: needs .* with a batch of 1$"),
    ],
)
def test_a_mesh_that_no_replica_has_is_refused_by_that_rule(on: str, mesh: str, why: str) -> None:
    model = "llama-3.1-70b" if on == "l4" else "llama-3.1-8b"
    asked, limits = Load(rate=20, prompt=500, output=100), parse(mesh)
    machines = machines_named([on], Catalogue())
    with pytest.raises(MeshwrightError, match=why):
        deployments(TrainConfig(model), machines, asked, limits)


def test_replicas_are_of_the_sizes_that_have_the_mesh() -> None:
    found = deployments(TrainConfig("tiny"), [CHIPS["h100"]], Load(1, 64, 8), parse("tp=2"))
    assert str(found.best.machine) == "h100:2"


def test_long_prompts_are_served_with_the_largest_batch_that_fits() -> None:
    asked = Load(rate=0.05, prompt=50_000, output=20, first_token=60, per_token=1)
    (one,) = deployments(TrainConfig("llama-3.1-8b"), [Machine.parse("h100:1")], asked).found
    assert one.max_batch < 32
    twice = 2 * one.max_batch
    with pytest.raises(MeshwrightError, match=f"no mesh fits: .* with a batch of {twice}"):
        deployments(TrainConfig("llama-3.1-8b"), [Machine.parse("h100:1")], asked, batches=(twice,))


def test_replicas_that_meet_the_waits_for_few_requests_alone_are_not_offered() -> None:
    """One in a thousand tokens waits for a chunk of another's prompt, however many replicas."""
    asked = Load(rate=2, prompt=1000, output=20, per_token=0.012, percentile=99.9)
    with pytest.raises(MeshwrightError, match=r"replicas, p99.9 is still .* between tokens"):
        deployments(TrainConfig("llama-3.1-8b"), [Machine.parse("h100:1")], asked, batches=(32,))


def test_the_command_prints_replicas_and_names_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = ["tiny", "--serve", "--on", "h100:1", "--requests", "5"]
    words = [*served, "--prompt", "64", "--output", "8", "--batch", "32"]
    plan_command(words)
    assert "rounded up: 1 replica of 1 chip" in " ".join(capsys.readouterr().out.split())
    plan_command([*words, "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["deployments"][0]["chips"] == 1
    monkeypatch.setenv("COLUMNS", "80")
    plan_command([word if word != "h100:1" else "rtx-pro-6000:1" for word in words])
    out = capsys.readouterr().out
    heading, row = (
        next(line for line in out.splitlines() if name in line)
        for name in ("replicas", "rtx-pro-6000:1")
    )
    assert max(map(len, out.splitlines())) <= 80
    assert heading.split()[:4] == ["replica", "mesh", "batch", "replicas"]
    assert " ".join(heading.split()).endswith("$/h $/M tokens")
    assert row.split()[2] == "32"
    assert "…" not in heading + row
    plan_command([*words, "--engine.cache", "fp8"])
    assert "--engine.cache fp8" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(MeshwrightError, match="add --prompt 1000 and --output 200"):
        plan_command(served)
    with pytest.raises(MeshwrightError, match="add --serve"):
        plan_command([word for word in words if word != "--serve"])
    with pytest.raises(MeshwrightError, match="does not go with --requests"):
        plan_command([*words, "--seq", "512"])
    with pytest.raises(MeshwrightError, match="--refused lists meshes of one machine"):
        plan_command([*words, "--refused"])
    two = [word if word != "h100:1" else "h100:1,h200:1" for word in words]
    plan_command(two)
    assert "h200:1" in capsys.readouterr().out
    plan_command([*two, "--top", "1"])
    table = capsys.readouterr().out.split("next")[0]
    assert ("h100:1" in table) != ("h200:1" in table)
    plan_command([*two, "--top", "1", "--json"])
    assert len(json.loads(capsys.readouterr().out)["deployments"]) == 1
    with pytest.raises(MeshwrightError, match=r"compute.remat='full' is of training"):
        plan_command([*words, "--compute.remat", "full"])
    without = [word for word in words if word not in ("--requests", "5")]
    with pytest.raises(MeshwrightError, match="--prompt is of a load: add --requests"):
        plan_command(without)
    with pytest.raises(MeshwrightError, match="compared for a load: add --requests 20"):
        plan_command(["tiny", "--serve", "--on", "h100"])

"""Plans of LoRA: against the step that one H200 ran, and what fits."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import MeshwrightError
from meshwright.models import LoraConfig, preset
from meshwright.planner import plan
from meshwright.planner.sizes import adapter_numbers, sizes_of
from meshwright.training import ComputeConfig, TrainConfig

RESULTS = Path(__file__).parents[2] / "benchmarks" / "RESULTS.md"


def config(model: str, batch: int, seq: int, rank: int = 16) -> TrainConfig:
    return TrainConfig(model, mesh="auto", batch=batch, seq=seq, lora=LoraConfig(rank, 32.0))


def test_time_and_memory_are_those_of_one_gpu() -> None:
    section = (
        RESULTS.read_text().partition("## LoRA: one step on one GPU\n")[2].partition("\n## ")[0]
    )
    row = re.search(r"\| ours \| ([\d.]+) ms \|.*?\| ([\d.]+) GiB \|", section)
    assert row is not None
    best = plan(config("llama-3.1-8b", 4, 2048), "h200:1").best
    assert best.choice.remat == "none"
    assert 0.92 <= best.memory.total / 2**30 / float(row[2]) <= 1.08
    assert 0.9 <= best.step_seconds * 1e3 / float(row[1]) <= 1.1


def test_what_does_not_fit_in_training_fits_with_lora() -> None:
    with pytest.raises(MeshwrightError, match="fits on no mesh"):
        plan("llama-3.1-70b", "h100:8", batch=8, seq=2048)
    found = plan(config("llama-3.1-70b", 8, 2048), "h100:8")
    assert found.best.memory.fits
    kinds = found.best.memory.kinds
    assert kinds["optimizer"] < 0.1 * kinds["parameters"]


def test_numbers_of_an_adapter_are_split_as_its_matrices() -> None:
    llama, lora = preset("llama-3.1-8b"), LoraConfig(16)
    sides = 32 * (8192 + 2 * 5120 + 8192 + 3 * 18432)
    assert adapter_numbers(llama, lora, ()) == 16 * sides
    assert not sizes_of(llama, (), lora).trained_parameters
    # of wq the first factor is split over fsdp, the second over tp
    one = LoraConfig(16, targets=("wq",))
    found = adapter_numbers(llama, one, (("fsdp", 4), ("tp", 2)))
    assert found == 16 * 32 * (4096 // 4 + 4096 // 2)


def test_a_70b_model_fits_one_gpu_in_8_or_4_bits() -> None:
    with pytest.raises(MeshwrightError, match=r"--lora.base int8 or --lora.base nf4 would fit"):
        plan(config("llama-3.1-70b", 1, 2048), "h200:1")
    lora = LoraConfig(16, base="nf4")
    settings = TrainConfig("llama-3.1-70b", mesh="auto", batch=1, seq=2048, lora=lora)
    found = plan(settings, "h100:1")
    assert found.best.memory.fits
    assert found.best.seconds["dequantization"] > 0


def test_a_base_is_proposed_only_where_it_can_be_taken() -> None:
    odd = ("embed=8208",)  # not a multiple of 64, which nf4 needs
    settings = dataclasses.replace(config("llama-3.1-70b", 1, 2048), override=odd)
    with pytest.raises(MeshwrightError, match=r"; --lora\.base int8 would fit"):
        plan(settings, "h200:1")


def test_what_int8_and_nf4_cannot_do_is_told() -> None:
    def settings(**changes: Any) -> TrainConfig:
        given: dict[str, Any] = {"batch": 128, "seq": 128, "lora": LoraConfig(16, base="nf4")}
        return TrainConfig("tiny", **{"mesh": "auto"} | given | changes)

    with pytest.raises(MeshwrightError, match=r"settings lora\.… need --lora.rank"):
        LoraConfig(base="nf4")
    fp8 = ComputeConfig(matmul="fp8")
    with pytest.raises(MeshwrightError, match=r"lora.base is nf4; leave one of the two out"):
        plan(settings(compute=fp8), "h100:1")
    with pytest.raises(MeshwrightError, match=r"lora.base nf4 needs inputs in blocks of 64, and"):
        plan(settings(override=("mlp=96",)), "h100:1")
    with pytest.raises(MeshwrightError, match=r"embed has 2 blocks of 64 inputs, which share a"):
        plan(settings(mesh="fsdp=8"), "h100:8")


def test_factors_of_experts_are_split_over_ep_and_a_token_meets_some() -> None:
    tiny = preset("tiny-moe")
    lora = LoraConfig(4, targets=("down",))
    numbers = tiny.layers * tiny.experts * 4 * (tiny.mlp + tiny.embed)
    assert adapter_numbers(tiny, lora, ()) == numbers
    # of each expert the second factor is split over fsdp, the first over tp
    found = adapter_numbers(tiny, lora, (("ep", 4), ("fsdp", 2), ("tp", 2)))
    assert found == numbers // 4 // 2
    assert adapter_numbers(tiny, lora, (), ("matrix",)) == 0

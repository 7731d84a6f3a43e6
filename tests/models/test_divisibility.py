"""One check of sizes against a mesh, with what would fit."""

import pytest

from meshwright.layouts import Rules
from meshwright.models import decoder_rules, indivisible, preset

MODEL = preset("llama-3.1-8b")  # embed 4096, 32 heads, 8 kv_heads, mlp 14336
ONE = {"dp": 1, "fsdp": 1, "tp": 1, "sp": 1}


@pytest.mark.parametrize(
    ("mesh", "accumulation", "says"),
    [
        ({"tp": 8, "fsdp": 4}, 1, None),
        ({"tp": 16}, 1, "kv_heads=8 cannot be split in tp=16; tp=8 would fit"),
        ({"fsdp": 24, "sp": 2}, 1, "embed=4096 cannot be split in fsdp·sp=48; fsdp·sp=32 would fit"),
        ({"dp": 3}, 1, "batch=64 is not divisible by dp·fsdp=3; batch=63 or 66 would fit"),
        ({"dp": 4}, 5, "batch=64 is not divisible by dp·fsdp·accumulation=20; batch=60 or 80 would fit"),
        ({"dp": 128}, 1, "batch=64 is not divisible by dp·fsdp=128; batch=128 would fit"),
        ({"sp": 16}, 1, "seq=1000 is not divisible by sp=16; seq=992 or 1008 would fit"),
    ],
)  # fmt: skip
def test_a_size_that_the_mesh_does_not_divide_is_named_with_what_would_fit(
    mesh: dict[str, int], accumulation: int, says: str | None
) -> None:
    found = indivisible(MODEL, decoder_rules(sp=True), ONE | mesh, 64, 1000, accumulation)
    assert found == says


def test_sequence_parallelism_splits_the_length_between_blocks_over_tp_too() -> None:
    rules = decoder_rules(sp=True, sequence_parallel=True)
    shape = ONE | {"sp": 2, "tp": 8}
    assert indivisible(MODEL, rules, shape, 64, 1000) == (
        "seq=1000 is not divisible by sp·tp=16; seq=992 or 1008 would fit"
    )
    assert indivisible(MODEL, rules, shape, 64, 1008) is None


def test_axes_are_those_of_the_rules_and_of_the_mesh() -> None:
    text = "batch? -> data; length? -> none; heads -> model; kv_heads -> model; mlp -> model"
    rules = Rules.parse(f"{text}; embed -> absent; head_dim -> none")
    assert indivisible(MODEL, rules, {"data": 2, "model": 16}, 64, 1000) == (
        "kv_heads=8 cannot be split in model=16; model=8 would fit"
    )
    assert indivisible(MODEL, rules, {"data": 2, "model": 8}, 64, 999) is None

"""The calls an attention makes of kernels, and which of them no fused kernel serves."""

import dataclasses

import pytest

from meshwright.ops.attention import EVERYTHING, Mask, Split
from meshwright.ops.attention.calls import calls_of, padding, slow_kernel

WHOLE = Split(ways=1, length=4000, heads=8, kv_heads=8, head_dim=128, mask=Mask())
SPLIT = dataclasses.replace(WHOLE, ways=4)
V5E, A100, H100 = "TPU v5 lite", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("split", "strategy", "expected"),
    [
        (WHOLE, "none", [(4000, 4000, Mask())]),
        (SPLIT, "ulysses", [(4000, 4000, Mask())]),
        (
            SPLIT, "ring",
            [(1000, 1000, Mask()), (1000, 500, EVERYTHING), (500, 1000, EVERYTHING)],
        ),
        (
            dataclasses.replace(SPLIT, mask=Mask(window=1500)), "allgather",
            [
                (1000, 1000, Mask()),
                (1000, 1000, Mask(window=1500, offset=1000)),
                (1000, 1000, Mask(window=1500, offset=2000)),
            ],
        ),
        (dataclasses.replace(SPLIT, mask=Mask(block=2000)), "ring", [(1000, 1000, EVERYTHING)]),
    ],
)  # fmt: skip
def test_they_are_those_of_the_strategy(
    split: Split, strategy: str, expected: list[tuple[int, int, Mask]]
) -> None:
    found = calls_of(split, strategy, "tpu", "bfloat16", segmented=True)
    assert [(one.queries, one.keys, one.mask) for one in found] == expected


def test_blocks_across_edges_are_known_when_the_program_runs() -> None:
    split = dataclasses.replace(SPLIT, mask=Mask(block=1500))
    found = calls_of(split, "ring", "tpu", "bfloat16", segmented=True)
    assert all(one.dynamic for one in found)
    name, why = slow_kernel(found, "auto", V5E) or ("", "")
    assert name == "dense"
    assert why == "not splash: it needs the mask at compile time"


@pytest.mark.parametrize("length", [1, 1000, 3648, 4000, 4096, 32_769])
@pytest.mark.parametrize("mask", [Mask(), EVERYTHING, Mask(window=500), Mask(block=300)])
def test_tpus_take_every_length_in_the_fused_kernel(length: int, mask: Mask) -> None:
    split = dataclasses.replace(WHOLE, length=length, mask=mask.within(length, length))
    for segmented in (False, True):
        calls = calls_of(split, "none", "tpu", "bfloat16", segmented=segmented)
        assert slow_kernel(calls, "auto", V5E) is None


@pytest.mark.parametrize("length", [1001, 4000, 65_538])
def test_gpus_take_every_length_in_a_fused_kernel(length: int) -> None:
    split = dataclasses.replace(WHOLE, length=length)
    for kind in (A100, H100):
        for segmented in (False, True):
            calls = calls_of(split, "none", "gpu", "bfloat16", segmented=segmented)
            assert slow_kernel(calls, "auto", kind) is None


def test_what_no_fused_kernel_serves_is_said_with_the_reason() -> None:
    near = dataclasses.replace(WHOLE, mask=Mask(window=500))
    calls = calls_of(near, "none", "gpu", "bfloat16", segmented=True)
    name, why = slow_kernel(calls, "auto", A100) or ("", "")
    assert name == "blockwise"
    assert "not cudnn: it takes a sliding window or packed documents, not both" in why
    calls = calls_of(WHOLE, "none", "cpu", "float32", segmented=True)
    assert slow_kernel(calls, "auto", "cpu") is None  # there is no faster one


def test_padding_is_counted_in_pairs_of_queries_and_keys() -> None:
    calls = calls_of(WHOLE, "none", "tpu", "bfloat16", segmented=True)
    assert padding(calls, "auto", V5E) == (4096 / 4000) ** 2
    exact = dataclasses.replace(WHOLE, length=3712)
    calls = calls_of(exact, "none", "tpu", "bfloat16", segmented=True)
    assert padding(calls, "auto", V5E) == 1

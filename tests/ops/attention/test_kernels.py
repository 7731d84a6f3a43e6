"""Which kernel serves a call, and what is said of the choice."""

import dataclasses
import logging
from typing import Any

import pytest

from meshwright.errors import MeshwrightError
from meshwright.files import log_once
from meshwright.ops.attention import EVERYTHING, KERNELS, Call, Mask, choose, kernels

CPU = Call("cpu", "float32", 4096, 4096, 128, Mask(), segmented=False)


def changed(**what: Any) -> Call:
    return dataclasses.replace(CPU, **what)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (CPU, "blockwise"),
        (changed(queries=512, keys=512), "dense"),
        (changed(queries=1024, keys=65536), "dense"),
        (changed(queries=1025, keys=64), "blockwise"),
        (changed(mask=Mask(block=16), segmented=True), "blockwise"),
        (changed(platform="gpu"), "blockwise"),  # float32
        (changed(platform="gpu", dtype="bfloat16", mask=Mask(block=16)), "blockwise"),
        (changed(platform="gpu", dtype="bfloat16", head_dim=256), "blockwise"),
        (changed(platform="tpu", dtype="bfloat16", queries=1500, keys=1500), "splash"),
        (changed(platform="tpu", dtype="float16"), "blockwise"),
        (changed(platform="tpu", dtype="bfloat16", dynamic=True), "blockwise"),
        (changed(platform="gpu", dtype="bfloat16", queries=1501, keys=1501), "cudnn"),
        (changed(platform="tpu", dtype="bfloat16"), "splash"),
        (changed(platform="tpu", mask=Mask(window=100), segmented=True), "splash"),
    ],
)
def test_the_fastest_kernel_that_can_serve_is_chosen(call: Call, expected: str) -> None:
    assert choose(call) == expected


@pytest.mark.usefixtures("pretended_h200")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_hopper_goes_first_only_where_cudnn_is_not_faster(head_dim: int) -> None:
    call = changed(platform="gpu", dtype="bfloat16", head_dim=head_dim)
    assert choose(call) == "cudnn"
    assert choose(dataclasses.replace(call, segmented=True)) == "hopper"
    assert choose(dataclasses.replace(call, partial=True)) == "hopper"


@pytest.mark.parametrize("mask", [Mask(), EVERYTHING, Mask(window=128), Mask(block=64)])
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_there_is_a_kernel_for_every_call(platform: str, mask: Mask) -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        for segmented in (False, True):
            for length in (1, 127, 1280, 100_000):
                call = Call(platform, dtype, length, length, 72, mask, segmented)
                assert choose(call) in KERNELS


def test_what_was_passed_over_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="meshwright"):
        choose(CPU)
        choose(changed(head_dim=64))  # the same choice for the same reasons
    assert len(caplog.messages) == 1
    why = "not dense: its scores grow with the square of the length (4096)"
    assert caplog.messages[0].startswith(f"attention kernel: blockwise ({why}")


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_kernels_of_other_hardware_are_not_mentioned(platform: str) -> None:
    theirs = {"splash": "tpu", "hopper": "gpu", "cudnn": "gpu"}
    for dtype in ("float32", "float16"):
        _, why = kernels.explain_kernel(changed(platform=platform, dtype=dtype))
        for kernel, home in theirs.items():
            assert f"not {kernel}: " not in why or home == platform
    _, on_gpus = kernels.explain_kernel(changed(platform="gpu", dtype="float16", head_dim=1000))
    assert "not cudnn: " in on_gpus


def test_a_slower_kernel_is_said_to_be_slower(caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="meshwright"):
        choose(changed(platform="tpu", dtype="float16"))
        choose(changed(platform="tpu"), "blockwise")
    automatic, asked = caplog.messages
    assert automatic.startswith("attention kernel: blockwise, slower than splash (")
    assert "not splash: it computes in bfloat16 and float32, not float16" in automatic
    assert asked == "attention kernel: blockwise, slower than splash (as requested)"


def test_a_kernel_that_is_named_is_taken() -> None:
    assert choose(changed(queries=16, keys=16), "blockwise") == "blockwise"
    assert choose(CPU, "dense") == "dense"  # long, but asked for


def test_a_kernel_that_is_not_there_or_cannot_serve_is_an_error() -> None:
    with pytest.raises(MeshwrightError, match=r"attention='cuddn' .* did you mean 'cudnn'\?"):
        choose(CPU, "cuddn")
    with pytest.raises(
        MeshwrightError, match=r"known: auto, hopper, cudnn, splash, dense, blockwise"
    ):
        choose(CPU, "x")
    with pytest.raises(
        MeshwrightError, match="'cudnn' does not support this: it runs on NVIDIA GPUs"
    ):
        choose(CPU, "cudnn")
    with pytest.raises(MeshwrightError, match="'splash' does not support this: it runs on TPUs"):
        choose(CPU, "splash")

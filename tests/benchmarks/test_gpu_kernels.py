"""The check of our GPU kernels, done with a kernel that runs anywhere: it can pass and fail."""

import dataclasses
from typing import Any

import jax
import pytest

import gpu_kernels
from meshwright.ops.attention.block import Kernel
from meshwright.ops.attention.kernels import KERNELS

DENSE, CHECKS = KERNELS["dense"], gpu_kernels.CHECKS


@pytest.mark.parametrize(
    "check",
    [CHECKS[-1], *(pytest.param(one, marks=pytest.mark.slow) for one in CHECKS[1:19:17])],
    ids=str,
)
def test_a_kernel_that_is_right_passes(
    check: gpu_kernels.Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_kernels, "hopper", DENSE)
    assert check.name in gpu_kernels.checked(check)


def test_parts_of_a_row_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "hopper", DENSE)
    assert "by halves" in gpu_kernels.checked_in_parts(64)


def test_some_queries_and_some_keys_have_nobody() -> None:
    (apart, _) = (check for check in CHECKS if check.documents == "apart")
    queries, keys = gpu_kernels.numbers_of(apart)
    assert queries is not None
    assert keys is not None
    seen = queries[:, :, None] == keys[:, None, :]
    assert not seen[0].any()
    assert not seen[1, :200].any()
    assert seen[1, 200:].any()
    assert not seen[1, :, :256].any()


def wrong(kernel: Kernel) -> Kernel:
    """The values' gradient is a little off."""

    def backward(*given: Any) -> Any:
        found = kernel.backward(*given)
        return found._replace(v=found.v * 1.02)

    return dataclasses.replace(kernel, backward=backward)


def test_a_kernel_that_is_wrong_is_an_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "hopper", wrong(DENSE))
    with jax.numpy_dtype_promotion("standard"):
        with pytest.raises(SystemExit, match=r"causal, 8/2 heads of 64: error 2\.\de-02"):
            gpu_kernels.checked(CHECKS[0])
        with pytest.raises(SystemExit, match=r"by halves of the keys, head_dim 64: error"):
            gpu_kernels.checked_in_parts(64)

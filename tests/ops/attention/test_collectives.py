"""What attention over a split length sends and keeps, from the compiled programs."""

import functools
import math
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tests.ops.attention.programs import QUICKLY, Case

from meshwright.audits import SentCollective, collectives, instructions
from meshwright.models.compute import remat_policy
from meshwright.models.decoder import REMAT
from meshwright.ops.attention import Mask

BATCH, HEADS, KV_HEADS, HEAD_DIM = 3, 6, 3, 16
PART = 34  # tokens of a row on a device; times 2, 4 or 8 it is no other size here


def case(strategy: str, ways: int, mask: Mask | None = None, **options: Any) -> Case:
    given = {"heads": HEADS, "kv_heads": KV_HEADS, "packed": False, **options}
    return Case(strategy, f"sp={ways}", mask or Mask(), batch=BATCH, length=PART * ways, **given)


def lowered(what: Case, gradient: bool = False, remat: str = "none") -> Any:
    """The output, or the gradients of a sum of squares of it, within a checkpoint as in a model.

    Without one, XLA keeps what came with the first hop for the backward pass.
    """

    def loss(q: Any, k: Any, v: Any, segments: Any) -> jax.Array:
        attend = jax.checkpoint(what.attention, policy=remat_policy(remat, REMAT))
        return jnp.sum(jnp.square(attend(q, k, v, segments)), dtype=jnp.float32)

    run = jax.grad(loss, argnums=(0, 1, 2)) if gradient else what.attention
    with jax.set_mesh(what.devices):
        return jax.jit(run).lower(*what.shapes(HEAD_DIM))


@functools.cache
def program(what: Case, gradient: bool = False, remat: str = "none") -> Any:
    # XLA for CPU alone would drop the barriers that keep what is made again apart
    options = {**QUICKLY, "xla_disable_hlo_passes": "cse_barrier_expander"}
    return lowered(what, gradient, remat).compile(compiler_options=options)


def sent(what: Case, gradient: bool = False, remat: str = "none") -> list[SentCollective]:
    """Without the sum of the loss."""
    found = collectives(program(what, gradient, remat).as_text(), what.devices)
    return [c for c in found if math.prod(c.shape) > 1]


def times(found: list[SentCollective], dtype: str | None = None) -> int:
    return sum(c.times for c in found if dtype in (None, c.dtype))


KEYS = (2, BATCH, PART, KV_HEADS, HEAD_DIM)  # and values, of a device
BYTES = 4 * math.prod(KEYS)


# ---- the ring


@pytest.mark.parametrize("ways", [pytest.param(2, marks=pytest.mark.slow), 4, 8])
def test_keys_and_values_hop_together_once_a_turn_and_not_after_the_last(ways: int) -> None:
    found = sent(case("ring", ways))
    assert {(c.operation, c.axes) for c in found} == {("collective-permute", ("sp",))}
    assert {c.shape for c in found} == {KEYS}
    assert times(found) == ways - 1
    # a loop over the turns in the middle: one hop in it
    assert [c.times for c in found if c.loops] == ([ways - 2] if ways > 3 else [])


def test_documents_hop_beside_them() -> None:
    found = sent(case("ring", 4, packed=True))
    assert {c.operation for c in found} == {"collective-permute"}
    assert times(found, "f32") == times(found, "s32") == 3
    assert sum(c.bytes * c.times for c in found) == 3 * (BYTES + 4 * BATCH * PART)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_backward_keys_go_around_again_and_gradients_travel_home(packed: bool) -> None:
    ways = 4
    found = sent(case("ring", ways, packed=packed), gradient=True)
    assert {(c.operation, c.axes) for c in found} == {("collective-permute", ("sp",))}
    # keys forward and backward; gradients as often and one hop more, home
    assert times(found, "f32") == 2 * (ways - 1) + ways
    assert times(found, "s32") == (2 * (ways - 1) if packed else 0)
    assert times(found) <= 6 * ways
    assert {c.shape for c in found if c.dtype == "f32"} == {KEYS}  # not widened to all heads
    in_a_loop = [c for c in found if c.loops]
    assert len(in_a_loop) == (5 if packed else 3)


@pytest.mark.parametrize("ways", [4, 8])
def test_the_bytes_of_the_ring_are_those_of_the_formula(ways: int) -> None:
    whole_rows = ways * BYTES
    forward = sum(c.bytes * c.times for c in sent(case("ring", ways)))
    assert forward == pytest.approx((ways - 1) / ways * whole_rows, rel=0.02)


def test_keys_in_bfloat16_travel_so_and_their_gradients_in_float32() -> None:
    # read before XLA for CPU makes all of them float32
    text = lowered(case("ring", 4, dtype="bfloat16"), gradient=True).as_text()
    found = re.findall(r"stablehlo.collective_permute.*-> tensor<2x3x34x3x16x(\w+)>", text)
    assert len(found) == len(re.findall("stablehlo.collective_permute", text))
    # outside a loop and in it: forward 2; backward 2, of gradients 2 and home
    assert Counter(found) == {"bf16": 4, "f32": 3}


@pytest.mark.parametrize(("window", "hops"), [(1, 0), (PART + 1, 1), (PART + 2, 2)])
def test_a_window_goes_no_further_than_it_reaches(window: int, hops: int) -> None:
    assert times(sent(case("ring", 4, Mask(window=window)))) == hops


def test_gradients_of_a_window_come_home_in_one_hop_from_where_it_ends() -> None:
    found = sent(case("ring", 8, Mask(window=PART + 2)), gradient=True)
    assert times(found) == 2 + 2 + 2 + 1


@pytest.mark.parametrize("order", [None, pytest.param("contiguous", marks=pytest.mark.slow)])
def test_nothing_in_the_rings_program_has_the_whole_length(order: str | None) -> None:
    def dims(what: Case) -> set[int]:
        text = program(what, gradient=True).as_text()
        return {dim for one in instructions(text) for _, shape in one.arrays for dim in shape}

    ring = dims(case("ring", 4, packed=True, order=order))
    assert PART in ring
    assert 4 * PART not in ring
    # the same, seen by this test where it is so
    assert 4 * PART in dims(case("ulysses", 4, heads=8, kv_heads=4, packed=True))


# ---- the others


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_ulysses_exchanges_heads_and_gathers_nothing(gradient: bool) -> None:
    found = sent(case("ulysses", 4, heads=8, kv_heads=4, packed=True), gradient)
    assert {(c.operation, c.axes) for c in found} == {("all-to-all", ("sp",))}
    head = 4 * BATCH * PART * HEAD_DIM
    there, back = (8 + 4 + 4) * head, 8 * head  # queries, keys and values; outputs
    documents = 4 * 4 * BATCH * PART  # a copy for each
    # backward, what went there is exchanged again, since it was not kept, and its gradients
    times = 3 if gradient else 1
    total = times * there + (times - 1 or 1) * (back + documents)
    assert sum(c.bytes * c.times for c in found) == pytest.approx(total, rel=0.02)


def test_gathering_sends_keys_of_few_heads_once_and_adds_their_gradients_once() -> None:
    found = sent(case("allgather", 4), gradient=True)
    gathered = [c for c in found if c.operation == "all-gather"]
    scattered = [c for c in found if c.operation == "reduce-scatter"]
    assert len(gathered) + len(scattered) == len(found)
    assert {c.axes for c in found} == {("sp",)}
    assert sum(c.bytes * c.times for c in gathered) == 2 * 4 * BYTES  # forward and backward
    assert sum(c.bytes * c.times for c in scattered) == 4 * BYTES  # what goes in


# ---- checkpoints


def test_what_is_kept_by_name_is_not_made_again() -> None:
    """Output and log-sum: the backward pass then needs no second ring of keys forward."""
    what = case("ring", 4)
    assert times(sent(what, True, "none")) == 3 + 3 + 4
    # what comes with the first hop of the ring that is made again may serve both
    assert times(sent(what, True, "full")) in (3 + 3 + 3 + 4, 3 + 3 + 2 + 4)


# ---- memory


def temporary(strategy: str, ways: int, part: int, kernel: str = "blockwise") -> int:
    """Bytes of a device beside arguments and results, in float32."""
    what = Case(
        strategy, f"sp={ways}", batch=1, heads=2, kv_heads=1, packed=False, length=ways * part,
        kernel=kernel,
    )  # fmt: skip
    return int(program(what, gradient=True).memory_analysis().temp_size_in_bytes)


def test_memory_grows_with_a_devices_part_not_with_its_square() -> None:
    small, large = (temporary("ring", 2, part) for part in (2048, 8192))
    assert large <= 4.4 * small


@pytest.mark.slow
def test_memory_grows_with_neither_the_devices_nor_all_scores() -> None:
    large = temporary("ring", 4, 8192)
    assert temporary("ring", 8, 8192) <= 1.05 * large
    # both are seen where they are so: all scores at once, and the keys of all devices
    scores = 4 * 2 * 8192**2
    assert temporary("ring", 4, 8192, "dense") >= scores >= 2 * large
    assert temporary("allgather", 8, 8192) >= large + 4 * 2 * 7 * 8192 * HEAD_DIM

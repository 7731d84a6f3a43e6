"""The TPU kernel in Pallas's interpreter, against attention as its definition says."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from tests.ops.attention.programs import (
    FORWARD,
    GRADIENT,
    QUICKLY,
    Case,
    agrees,
    forward_and_backward,
)  # fmt: skip
from tests.ops.attention.reference import Sees, documents, in_float64, inputs

from meshwright.errors import MeshwrightError
from meshwright.ops.attention import (
    EVERYTHING,
    KERNELS,
    Call,
    ContextParallel,
    Mask,
    attention,
    choose,
    splash,
)
from meshwright.ops.attention.block import Block, merge

INTERPRETED = dataclasses.replace(splash.splash_kernel(interpret=True), refuses=lambda call: None)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel runs here, in blocks so small that several are needed."""
    monkeypatch.setitem(KERNELS, "splash", INTERPRETED)
    monkeypatch.setattr(splash, "LARGEST", splash.LANES)
    monkeypatch.setattr(splash, "COMPUTED", splash.LANES)
    forward_and_backward.cache_clear()
    yield
    forward_and_backward.cache_clear()


masks = st.one_of(
    st.builds(Mask, offset=st.integers(0, 900)),
    st.builds(Mask, window=st.integers(1, 900), offset=st.integers(0, 900)),
    st.builds(Mask, block=st.integers(1, 300), offset=st.integers(0, 900)),
)
blocks = st.sampled_from([128, 256])


@given(masks, st.integers(1, 4), st.integers(1, 4), blocks, blocks, st.booleans(), st.booleans())
def test_the_table_visits_each_block_that_is_seen_once_and_no_other(
    mask: Mask, queries: int, keys: int, of_q: int, of_k: int, by_keys: bool, whole: bool
) -> None:
    queries, keys = queries * of_q, keys * of_k
    seen = Sees(**dataclasses.asdict(mask)).table(queries, keys)
    blocks = seen.reshape(queries // of_q, of_q, keys // of_k, of_k).any((1, 3))
    visit, sees = splash.table(mask, queries, keys, of_q, of_k, by_keys=by_keys, whole=whole)
    assert visit.shape == sees.shape
    if by_keys:
        visit, sees, blocks = visit.T, sees.T, blocks.T
    assert len(visit) == len(blocks)
    for row, (places, used) in enumerate(zip(visit, sees, strict=True)):
        assert places[used].tolist() == np.flatnonzero(blocks[row]).tolist()
        assert set(places.tolist()) <= set(range(blocks.shape[1]))  # all of them are fetched
    if whole:  # the kernel that writes gradients of queries takes the place for the block
        assert visit.shape[1] == blocks.shape[1]
        assert (visit == np.arange(visit.shape[1]))[sees].all()


@dataclasses.dataclass(frozen=True)
class Row:
    """Later queries of a row against the keys before them and their own, one after the other."""

    mask: Mask
    packed: bool = False
    heads: int = 2
    kv_heads: int = 2
    one_kernel: bool = True  # of the backward pass


HALF = 256


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICKLY)
def in_two_blocks(mask: Mask, q: Any, k: Any, v: Any, segments: Any, given: Any) -> Any:
    def block(keys: slice) -> Block:
        later, theirs = (
            (None, None) if segments is None else (segments[:, HALF:], segments[:, keys])
        )
        return Block(q[:, HALF:], k[:, keys], v[:, keys], later, theirs)

    run = splash.splash_kernel(interpret=True)
    behind = dataclasses.replace(mask, offset=HALF) if mask.causal else mask
    parts = [
        (block(slice(HALF)), behind.within(HALF, HALF)),
        (block(slice(HALF, None)), mask.within(HALF, HALF)),
    ]
    first, second = (run.partial(run.forward(*part)) for part in parts)
    whole = merge(first, second)
    gradients = [run.gradients(run.backward(*part, whole, given[:, HALF:])) for part in parts]
    of_q = gradients[0].q + gradients[1].q
    of_k, of_v = (jnp.concatenate([getattr(x, n) for x in gradients], axis=1) for n in ("k", "v"))
    return first, whole, of_q, of_k, of_v


@pytest.mark.parametrize(
    "row",
    [
        Row(Mask(), packed=True, heads=4),
        Row(Mask(window=200), one_kernel=False),
        pytest.param(Row(Mask(), one_kernel=False, packed=True), marks=pytest.mark.slow),
        pytest.param(Row(Mask(window=200), packed=True, heads=4), marks=pytest.mark.slow),
        pytest.param(Row(Mask(window=300), kv_heads=1), marks=pytest.mark.slow),
        pytest.param(Row(Mask(block=64)), marks=pytest.mark.slow),
        pytest.param(Row(EVERYTHING, one_kernel=False), marks=pytest.mark.slow),
        pytest.param(Row(EVERYTHING, packed=True, heads=3, kv_heads=1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_runs_of_keys_put_together_are_attention_to_all_of_them(
    row: Row, interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splash, "ONE_KERNEL", 2 * HALF if row.one_kernel else 0)
    in_two_blocks.clear_cache()
    batch = 2 if row.packed else 1
    q, k, v, given = inputs(batch, 2 * HALF, row.heads, row.kv_heads)
    given[:, :HALF] = 0  # only the later queries are asked
    segments = documents(batch, 2 * HALF) if row.packed else None
    sees = Sees(**dataclasses.asdict(row.mask))
    out, (of_q, of_k, of_v) = in_float64(q, k, v, given, segments, sees)
    first, whole, *gradients = in_two_blocks(row.mask, q, k, v, segments, given)
    np.testing.assert_allclose(whole.out, out[:, HALF:], rtol=0, atol=FORWARD)
    for one, right in zip(gradients, (of_q[:, HALF:], of_k, of_v), strict=True):
        np.testing.assert_allclose(one, right, rtol=0, atol=GRADIENT)

    seen = sees.table(2 * HALF, 2 * HALF)[None, HALF:, :HALF]
    if segments is not None:
        seen = seen & (segments[:, HALF:, None] == segments[:, None, :HALF])
    nothing = np.broadcast_to(~seen.any(-1), (batch, HALF))
    assert (np.isneginf(first.lse) == nothing[..., None]).all()
    assert (np.asarray(first.out)[nothing] == 0).all()


@dataclasses.dataclass(frozen=True)
class Odd:
    """Lengths that are not a multiple of 128."""

    mask: Mask
    queries: int = 200
    keys: int = 200
    packed: bool = False


@pytest.mark.parametrize(
    "odd",
    [
        Odd(Mask(), packed=True),
        Odd(EVERYTHING),
        Odd(Mask(block=70)),  # of which the last would reach into the padding
        pytest.param(Odd(Mask()), marks=pytest.mark.slow),
        pytest.param(Odd(Mask(window=60)), marks=pytest.mark.slow),
        pytest.param(Odd(EVERYTHING, packed=True), marks=pytest.mark.slow),
        pytest.param(Odd(EVERYTHING, queries=128, keys=130), marks=pytest.mark.slow),
        pytest.param(Odd(Mask(offset=50), queries=100, keys=130), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_any_length_is_padded_and_comes_out_as_if_it_were_not(odd: Odd, interpreted: None) -> None:
    arrays = inputs(2, max(odd.queries, odd.keys), 4, 2)
    q, given = (x[:, : odd.queries] for x in (arrays[0], arrays[3]))
    k, v = (x[:, : odd.keys] for x in arrays[1:3])
    segments = documents(2, odd.keys) if odd.packed else None
    sees = Sees(**dataclasses.asdict(odd.mask))
    expected, gradients = in_float64(q, k, v, given, segments, sees)

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def both(*arrays: Any) -> Any:
        out, backward = jax.vjp(
            lambda *x: attention(*x, segments, odd.mask, kernel="splash"), *arrays[:3]
        )
        return out, *backward(arrays[3])

    found, *found_gradients = both(*map(jnp.asarray, (q, k, v, given)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=FORWARD)
    for one, right in zip(found_gradients, gradients, strict=True):
        np.testing.assert_allclose(one, right, rtol=0, atol=GRADIENT)


@given(st.integers(1, 2**20))
def test_padding_is_little_and_multiples_of_128_have_none(length: int) -> None:
    padded = splash.padded_length(length)
    assert padded % 128 == 0
    assert length <= padded < max(1.25 * length, length + 128) + 1
    if length % 128 == 0:
        assert padded == length


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("ring", "sp=2", length=512, batch=1, kernel="splash"),
        Case("ring", "sp=2", length=280, batch=1, kernel="splash"),
        Case("allgather", "sp=2", Mask(window=100), length=300, batch=1, kernel="splash"),
        Case("ring", "sp=2", Mask(window=200), length=512, batch=1, kernel="splash"),
        Case("allgather", "sp=2", EVERYTHING, length=256, batch=1, packed=False, kernel="splash"),
    ],
    ids=["ring", "odd ring", "odd window", "window", "gathered"],
)
def test_strategies_over_a_split_row_can_use_it(
    case: Case, interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the interpreter loses track of the axes over which values differ; the compiler does not ask
    unchecked = functools.partial(jax.shard_map, check_vma=False)
    monkeypatch.setattr(jax, "shard_map", unchecked)
    agrees(case)


def test_it_says_what_it_cannot_do() -> None:
    able = Call("tpu", "bfloat16", 1024, 1024, 128, Mask(), segmented=True)
    assert splash.splash.refuses(able) is None
    assert splash.splash.refuses(dataclasses.replace(able, queries=1000, keys=64)) is None
    for change, why in (
        ({"platform": "gpu"}, "TPUs"),
        ({"dtype": "float16"}, "float16"),
        ({"dynamic": True}, "the mask at compile time"),
        ({"queries": 2**20, "keys": 2**20}, "1,048,576 entries"),
    ):
        refusal = splash.splash.refuses(dataclasses.replace(able, **change))
        assert refusal is not None
        assert why in refusal
    everything = dataclasses.replace(able, queries=2**20, keys=2**20, mask=EVERYTHING)
    assert splash.splash.refuses(everything) is None  # needs no table
    with pytest.raises(
        MeshwrightError, match="attention='splash' does not support this: it runs on"
    ):
        choose(dataclasses.replace(able, platform="cpu"), "splash")


@pytest.mark.parametrize(("platform", "fused"), [("tpu", True), ("cpu", False)])
def test_the_kernel_is_that_of_the_mesh_in_force_not_of_this_machine(
    platform: str, fused: bool
) -> None:
    device = AbstractDevice(device_kind="of another place", num_cores=None, platform=platform)
    mesh = AbstractMesh((2,), ("sp",), (AxisType.Explicit,), abstract_device=device)

    def described(heads: int) -> jax.ShapeDtypeStruct:
        layout = jax.NamedSharding(mesh, P(None, "sp"))
        return jax.ShapeDtypeStruct((1, 1024, heads, 128), "bfloat16", sharding=layout)

    def gradient(*arrays: Any) -> Any:
        out, backward = jax.vjp(
            lambda *x: attention(*x, context=ContextParallel("ring", "zigzag")), *arrays
        )
        return backward(out)

    with jax.sharding.use_abstract_mesh(mesh):
        program = str(jax.make_jaxpr(gradient)(described(4), described(2), described(2)))
    for name in ("splash_mqa_fwd_residuals", "splash_mqa_dkv_no_residuals"):
        assert (name in program) == fused

"""One number for an array's values, whatever the mesh; NumPy with 64-bit whole numbers is the reference."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.checkpoint.fingerprint import fingerprint, fingerprint_text, sums_of_part

DTYPES = [
    "float32",
    "bfloat16",
    "float16",
    "int32",
    "uint32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "float8_e4m3fn",
]


def text(array: jax.Array) -> str:
    return fingerprint_text(fingerprint(array))


def values(shape: tuple[int, ...], dtype: str) -> jax.Array:
    numbers = 20 * jax.random.normal(jax.random.key(len(shape)), shape)
    return numbers > 0 if dtype == "bool" else numbers.astype(dtype)


def mixed(x: int, rounds: tuple[int, ...]) -> int:
    a, first, b, second, c = rounds
    x = ((x ^ (x >> a)) * first) % 2**32
    x = ((x ^ (x >> b)) * second) % 2**32
    return x ^ (x >> c)


def reference(part: np.ndarray, starts: tuple[int, ...], shape: tuple[int, ...]) -> list[int]:
    """Element by element with Python's own whole numbers, which do not wrap."""
    first = second = 0
    width = part.dtype.itemsize
    for place in np.ndindex(part.shape):
        key = 0x6A09E667
        index, limit, keys = 0, 1, []
        for dim in reversed(range(len(shape))):  # runs of dims of at most 2**32 elements
            if limit * shape[dim] > 2**32:
                keys.append(index)
                index, limit = 0, 1
            index += (starts[dim] + place[dim]) * limit
            limit *= shape[dim]
        for run in [*keys, index][::-1]:
            assert run < 2**32
            key = mixed((key + run) % 2**32, (16, 0x21F0AAAD, 15, 0xD35A2D97, 15))
        bits = int.from_bytes(part[place].tobytes(), "little") if width else 0
        salt = 0x9E3779B9
        first += mixed(bits ^ ((key + salt) % 2**32), (16, 0x85EBCA6B, 13, 0xC2B2AE35, 16))
        second += mixed(
            bits ^ ((key * 0xB5297A4D + salt) % 2**32), (16, 0x7FEB352D, 15, 0x846CA68B, 16)
        )
    return [first % 2**32, second % 2**32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_mesh_and_axis_type_gives_the_number_of_the_reference(dtype: str) -> None:
    array = values((16, 8, 4), dtype)
    first, second = reference(np.asarray(array), (0, 0, 0), (16, 8, 4))
    expected = f"{first:08x}{second:08x}"
    assert text(array) == expected
    kinds = (AxisType.Auto, AxisType.Explicit) if dtype == "float32" else (AxisType.Explicit,)
    specs = (P(("b", "a"), None, "c"), P(), P("a", "b", "c"), P(None, ("a", "b")))
    for kind in kinds:
        mesh = jax.make_mesh((2, 4, 2), ("a", "b", "c"), axis_types=(kind,) * 3)
        for spec in specs if dtype == "float32" else specs[:1]:
            assert text(jax.device_put(array, NamedSharding(mesh, spec))) == expected


def test_another_mesh_may_be_set_meanwhile() -> None:
    array = values((16, 8), "float32")
    other = jax.make_mesh((16,), ("z",), axis_types=(AxisType.Explicit,))
    placed = mw.shard(array, "a b -> a@fsdp b@tp", mesh="fsdp=2,tp=8")
    with jax.set_mesh(other):
        assert (
            text(placed)
            == text(array)
            == "".join(f"{s:08x}" for s in reference(np.asarray(array), (0, 0), (16, 8)))
        )


@pytest.mark.parametrize("dtype", ["int32", "float32", "bfloat16", "bool"])
def test_a_scalar_has_one_alone_and_on_a_mesh(dtype: str) -> None:
    scalar = jnp.asarray(1, dtype)
    assert text(scalar) == text(mw.shard(scalar, "->", mesh="tp=16"))
    assert text(scalar) != text(jnp.asarray(0, dtype))


def test_large_elements_count_with_all_their_bits() -> None:
    with jax.enable_x64(True):
        array = jnp.asarray([1.0, 2.0, 3.0], jnp.float64)
        low_bit = jnp.asarray(np.nextafter(np.asarray(array), 9))
        assert len({text(array), text(low_bit), text(array[::-1])}) == 3
    assert text(jnp.asarray([1 + 2j], jnp.complex64)) != text(jnp.asarray([2 + 1j], jnp.complex64))


@given(st.integers(0, 16 * 8 - 1), st.integers(0, 31))
@hypothesis_settings(max_examples=60)
def test_one_flipped_bit_anywhere_is_seen(element: int, bit: int) -> None:
    array = np.asarray(values((16, 8), "float32")).view(np.uint32).copy()
    before = text(jnp.asarray(array))
    array.flat[element] ^= np.uint32(1 << bit)
    after = text(jnp.asarray(array))
    assert before[:8] != after[:8]
    assert before[8:] != after[8:]


def test_zeroed_and_swapped_shards_are_seen() -> None:
    array = np.asarray(values((8, 8), "float32"))
    found = {text(jnp.asarray(array))}
    blocks = [(slice(r, r + 4), slice(c, c + 4)) for r in (0, 4) for c in (0, 4)]
    for block in blocks:
        lost = array.copy()
        lost[block] = 0
        found.add(text(jnp.asarray(lost)))
    for one, other in itertools.combinations(blocks, 2):
        swapped = array.copy()
        swapped[one], swapped[other] = array[other], array[one]
        found.add(text(jnp.asarray(swapped)))
    assert len(found) == 1 + 4 + 6


def test_zeros_of_another_place_are_not_the_same() -> None:
    assert text(jnp.zeros((4, 4))) != text(jnp.zeros((4, 5)))


@pytest.mark.parametrize(
    ("shape", "starts"),
    [
        ((40_000, 300_000), (39_990, 299_000)),  # 1.2e10 elements
        ((126, 53_248, 16_384), (120, 53_000, 16_000)),  # 405B's stacked feed-forward, 1.1e11
        ((2**16, 2**16), (2**16 - 4, 2**16 - 4)),  # 2**32 to the element
        ((2**20, 2**20, 2**20), (2**20 - 4, 3, 2**20 - 9)),
        ((7, 2**32), (6, 2**32 - 5)),
    ],
)
def test_places_beyond_two_to_the_32_are_exact(
    shape: tuple[int, ...], starts: tuple[int, ...]
) -> None:
    part = values((4,) * len(shape), "bfloat16")
    found = sums_of_part(part, [jnp.uint32(start) for start in starts], shape)
    assert [int(s) for s in found] == reference(np.asarray(part), starts, shape)
    # 2**32 elements further, where a 32-bit index is the same again, the sums are not
    linear = sum(s * math.prod(shape[d + 1 :]) for d, s in enumerate(starts)) - 2**32
    if linear >= 0:
        earlier = np.unravel_index(linear, shape)
        again = sums_of_part(part, [jnp.uint32(int(start)) for start in earlier], shape)
        assert not np.array_equal(found, again)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_temporary_of_the_arrays_size_is_made(dtype: str) -> None:
    abstract = jax.ShapeDtypeStruct((4096, 4096), dtype)
    zero = jnp.uint32(0)
    compiled = (
        jax.jit(lambda x: sums_of_part(x, [zero, zero], (4096, 4096))).lower(abstract).compile()
    )
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 4096


def test_a_dim_beyond_two_to_the_32_is_refused() -> None:
    class Huge:
        shape = (2**32 + 1,)

    with pytest.raises(mw.MeshwrightError, match="2\\*\\*32"):
        fingerprint(Huge())  # type: ignore[arg-type]

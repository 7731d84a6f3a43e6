"""shard and sharding: every device holds what an independent formula says it should."""

import contextlib
import itertools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright import ArraySpec, MeshwrightError


def held(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> dict[int, list[tuple[int, int]]]:
    """What each device holds, as (start, stop) of every dim."""
    return {
        device.id: [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
        for device, index in sharding.devices_indices_map(shape).items()
    }


def digits(number: int, radices: list[int]) -> list[int]:
    """`number` in mixed radix, most significant first, by repeated division."""
    out = []
    for radix in reversed(radices):
        number, digit = divmod(number, radix)
        out.append(digit)
    return out[::-1]


@given(st.data())
def test_numbers_put_on_each_device_what_the_formula_says(data: st.DataObject) -> None:
    devices = data.draw(st.integers(1, 16))
    factors: list[tuple[str | None, int]] = []  # in device order
    rest = devices
    dims = ["a", "b", "c"]
    unused = list(dims)
    while rest > 1:
        size = data.draw(st.sampled_from([d for d in range(2, rest + 1) if rest % d == 0]))
        dim = data.draw(st.sampled_from([None, *unused]))
        if dim is not None:
            unused.remove(dim)
        factors.append((dim, size))
        rest //= size
    text = "a b c -> " + " ".join(
        [f"{dim or ''}{size}" for dim, size in factors] + unused + (["1"] if devices == 1 else [])
    )
    shape = (math.lcm(*range(1, 17)),) * 3
    listed = list(data.draw(st.permutations(jax.devices()[:devices])))
    try:
        sharding = mw.sharding(text, ndim=3, devices=listed)
    except MeshwrightError as error:  # counts that mix primes: the error names a mesh that fits
        proposed = str(error).partition("mesh=mw.mesh('")[2].partition("'")[0]
        sharding = mw.sharding(text, ndim=3, mesh=mw.mesh(proposed, devices=listed))
    expected = {}
    for position, device in enumerate(listed):
        digit = dict(
            zip(
                [dim for dim, _ in factors],
                zip(
                    digits(position, [n for _, n in factors]), [n for _, n in factors], strict=True
                ),
                strict=True,
            )
        )
        ranges = []
        for dim in dims:
            part, parts = digit.get(dim, (0, 1))
            step = shape[0] // parts
            ranges.append((part * step, (part + 1) * step))
        expected[device.id] = ranges
    assert held(sharding, shape) == expected


@given(st.data())
def test_named_axes_put_on_each_device_what_the_formula_says(data: st.DataObject) -> None:
    sizes = data.draw(
        st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=4).filter(
            lambda sizes: math.prod(sizes) <= 16
        )
    )
    names = ["dp", "fsdp", "tp", "sp"][: len(sizes)]
    devices = jax.devices()[: math.prod(sizes)]
    mesh = mw.mesh(",".join(map("{}={}".format, names, sizes)), devices=devices)
    free = list(data.draw(st.permutations(names)))
    ndim = data.draw(st.integers(1, 3))
    axes: list[list[str]] = []
    for _ in range(ndim):
        take = data.draw(st.integers(0, min(2, len(free))))
        axes.append(free[:take])
        free = free[take:]
    dims = ["x", "y", "z"][:ndim]
    right = [f"{d}@{'+'.join(a)}" if a else d for d, a in zip(dims, axes, strict=True)]
    shape = (576,) * ndim
    sharding = mw.sharding(f"{' '.join(dims)} -> {' '.join(right)}", mesh=mesh, shape=shape)
    expected = {}
    for position, device in enumerate(devices):
        at = dict(zip(names, digits(position, sizes), strict=True))
        ranges = []
        for dim_axes in axes:
            part, parts = 0, 1
            for axis in dim_axes:
                part = part * sizes[names.index(axis)] + at[axis]
                parts *= sizes[names.index(axis)]
            ranges.append((part * 576 // parts, (part + 1) * 576 // parts))
        expected[device.id] = ranges
    assert held(sharding, shape) == expected


def cuts(devices: int) -> list[str]:
    """Every way to cut bare devices by numbers that is not refused, over two dims and copies."""
    found = []
    for order in itertools.permutations(["a", "b", ""]):
        for sizes in itertools.product(range(1, devices + 1), repeat=3):
            text = " ".join(f"{d}{n}" for d, n in zip(order, sizes, strict=True) if d or n > 1)
            if math.prod(sizes) == devices:
                with contextlib.suppress(MeshwrightError):
                    mw.sharding(f"a b -> {text}", devices=jax.devices()[:devices])
                    found.append(f"a b -> {text}")
    return found


@pytest.mark.parametrize("devices", [6, 8, 12])
def test_arrays_placed_by_different_expressions_meet_in_one_jit(devices: int) -> None:
    listed = jax.devices()[:devices]
    x = (np.arange(144 * 144) % 7).astype(np.float32).reshape(144, 144)  # exact in any order
    texts = random.Random(devices).sample(sorted(set(cuts(devices))), 7)
    placed = {text: mw.shard(x, text, devices=listed) for text in texts}
    for one, other in itertools.combinations(texts, 2):
        both, product = jax.jit(lambda p, q: ((p, q), p @ q))(placed[one], placed[other])
        np.testing.assert_array_equal(np.asarray(product), x @ x, f"{one}, {other}")
        np.testing.assert_array_equal(np.asarray(both[1]), x)
    together = jax.jit(lambda *arrays: sum(arrays[1:], start=arrays[0]))(*placed.values())
    np.testing.assert_array_equal(np.asarray(together), x * len(texts))


def test_arrays_by_numbers_meet_arrays_on_a_mesh_of_the_same_order(eight: list[jax.Device]) -> None:
    x = np.ones((16, 16), np.float32)
    mesh = mw.mesh("dp=2,tp=4", devices=eight)
    for text in ("a b -> a* b", "a b -> a4 b2", "a b -> b* 2 a"):
        for one, other in itertools.permutations(
            [mw.shard(x, text, devices=eight), mw.shard(x, "a b -> a@tp b@dp", mesh=mesh)]
        ):
            assert float(jax.jit(lambda p, q: (p @ q).sum())(one, other)) == 16.0**3


def test_cuts_that_could_not_meet_others_name_a_mesh_on_which_they_can() -> None:
    listed = jax.devices()[:12]
    with pytest.raises(MeshwrightError, match=r"\(3 x 2 x 2\).*mesh=mw\.mesh\('i=4,j=3'\)"):
        mw.sharding("a b -> a4 b3", devices=listed)
    mesh = mw.mesh("i=4,j=3", devices=listed)
    assert mw.sharding("a b -> a4 b3", mesh=mesh).spec == P("i", "j")
    assert mw.sharding("a b -> a3 b4", devices=listed).shard_shape((12, 12)) == (4, 3)


@pytest.mark.parametrize(
    ("text", "spec"),
    [("a b -> a2 b4", P("fsdp", "tp")), ("a b -> b2 a4", P("tp", "fsdp")), ("a b -> a* b", P(("fsdp", "tp"))),
     ("a b -> 2 a4 b", P("tp")), ("a b -> a2 b *", P("fsdp"))],
)  # fmt: skip
def test_numbers_that_line_up_with_a_mesh_use_its_axes(
    text: str, spec: P, eight: list[jax.Device]
) -> None:
    mesh = mw.mesh("dp=1,fsdp=2,tp=4,sp=1", devices=eight)
    assert mw.sharding(text, mesh=mesh) == NamedSharding(mesh, spec)


def test_without_numbers_a_mesh_means_copies_and_devices_an_error(eight: list[jax.Device]) -> None:
    assert mw.sharding("a b -> a b", mesh=mw.mesh("dp=8", devices=eight)).is_fully_replicated
    with pytest.raises(MeshwrightError, match=r"'a b -> \* a b' makes copies"):
        mw.sharding("a b -> a b", devices=eight)


class TestKindsOfArrays:
    layout = "x y -> x y*"

    def test_jax_and_numpy_arrays_are_put_on_the_devices(self, eight: list[jax.Device]) -> None:
        for array in (np.ones((4, 16), np.float32), jnp.ones((4, 16))):
            placed = mw.shard(array, self.layout, devices=eight)
            assert placed.sharding.shard_shape(placed.shape) == (4, 2)
            np.testing.assert_array_equal(np.asarray(placed), np.asarray(array))

    def test_abstract_arrays_get_a_sharding(self, eight: list[jax.Device]) -> None:
        wanted = mw.sharding(self.layout, devices=eight)
        struct = mw.shard(jax.ShapeDtypeStruct((4, 16), jnp.bfloat16), self.layout, devices=eight)
        assert (struct.sharding, struct.dtype) == (wanted, jnp.bfloat16)
        spec = mw.shard(ArraySpec((4, 16), "x y"), self.layout, devices=eight)
        assert spec.sharding == wanted

    def test_inside_jit_it_is_a_constraint(self, eight: list[jax.Device]) -> None:
        x = mw.shard(jnp.ones((4, 16)), "x y -> * x y", devices=eight)
        y = jax.jit(lambda x: mw.shard(x * 2, self.layout, devices=eight))(x)
        assert y.sharding.shard_shape(y.shape) == (4, 2)

    @pytest.mark.parametrize("axis_types", ["auto", "explicit"])
    def test_inside_jit_the_current_mesh_is_used(
        self, axis_types: str, eight: list[jax.Device]
    ) -> None:
        mesh = mw.mesh("fsdp=2,tp=4", devices=eight, axis_types=axis_types)  # type: ignore[call-overload]
        with jax.set_mesh(mesh):
            y = jax.jit(lambda: mw.shard(jnp.ones((4, 16)), "x y -> x@fsdp y@tp"))()
            z = mw.shard(np.ones((4, 16)), "x y -> x@fsdp y@tp")
        assert y.sharding.spec == z.sharding.spec == P("fsdp", "tp")

    def test_as_in_and_out_shardings(self, eight: list[jax.Device]) -> None:
        into, out = (mw.sharding(t, devices=eight) for t in ("x y -> x* y", self.layout))
        y = jax.jit(lambda x: x + 1, in_shardings=into, out_shardings=out)(np.ones((8, 16)))
        assert y.sharding == out

    def test_scalars(self, eight: list[jax.Device]) -> None:
        assert mw.shard(3.0, "-> *", devices=eight).sharding.is_fully_replicated

    def test_a_tree_takes_one_layout_or_a_prefix_tree_of_them(
        self, eight: list[jax.Device]
    ) -> None:
        tree = {"w": [np.ones((8, 16)), np.ones((8, 8))], "b": np.ones((8, 8))}
        one = mw.shard(tree, "x y -> x* y", devices=eight)
        assert {a.sharding.shard_shape(a.shape) for a in jax.tree.leaves(one)} == {(1, 16), (1, 8)}
        two = mw.shard(tree, {"w": "x y -> x y*", "b": "x y -> x* y"}, devices=eight)
        assert two["w"][0].sharding.shard_shape((8, 16)) == (8, 2)
        assert two["b"].sharding.shard_shape((8, 8)) == (1, 8)

    def test_a_tuple_of_expressions_is_a_tree(self, eight: list[jax.Device]) -> None:
        w1, w2 = mw.shard(
            (np.ones((8, 16)), np.ones((16, 8))), ("x y -> x y*", "y z -> y* z"), devices=eight
        )
        assert w1.sharding.shard_shape(w1.shape) == (8, 2)
        assert w2.sharding.shard_shape(w2.shape) == (2, 8)

    def test_shardings_of_an_abstract_tree_drive_jit(self, eight: list[jax.Device]) -> None:
        mesh = mw.mesh("fsdp=2,tp=4", devices=eight)
        rules = mw.PathRules([("w", ("fsdp", "tp")), ("b", ())])
        make = lambda: {"w": jnp.ones((8, 8)), "b": jnp.ones((8,))}  # noqa: E731
        wanted = mw.shardings(jax.eval_shape(make), rules, mesh=mesh)
        made = jax.jit(make, out_shardings=wanted)()
        assert jax.tree.map(lambda a: a.sharding.spec, made) == {"w": P("fsdp", "tp"), "b": P()}


def test_no_device_holds_more_than_its_shard(eight: list[jax.Device]) -> None:
    placed = mw.shard(np.ones((8, 16), np.float32), "x y -> x2 y4", devices=eight)
    assert {shard.data.shape for shard in placed.addressable_shards} == {(4, 4)}
    assert len({shard.index for shard in map(_hashable, placed.addressable_shards)}) == 8


class _hashable:  # noqa: N801
    def __init__(self, shard: object) -> None:
        self.index = tuple((s.start, s.stop) for s in shard.index)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda d: mw.shard(np.ones((4, 12)), "x y -> x y*", devices=d), ["(4, 12)", "'y' of size 12", "in 8", "'x y -> x y*'", "8 or 16"]),
        (lambda d: mw.shard(np.ones(4), "x y -> x y*", devices=d), ["names 2 dims, the array has 1"]),
        (lambda d: mw.sharding("x y -> x y@tp", devices=d), ["'tp' but no mesh", "mesh="]),
        (lambda d: mw.sharding("x y -> x y@tpp", mesh=mw.mesh("tp=8", devices=d)), ["'tpp'", "did you mean 'tp'?"]),
        (lambda d: mw.sharding(P("tpp"), mesh=mw.mesh("tp=8", devices=d)), ["'tpp'"]),
        (lambda d: mw.sharding(P("tp", "tp"), mesh=mw.mesh("tp=8", devices=d)), ["'tp' twice"]),
        (lambda d: mw.sharding("x -> x*", ndim=2, devices=d), ["names 1 dim, the array has 2"]),
        (lambda d: mw.sharding(mw.Layout((("tp",),)), ndim=2, mesh=mw.mesh("tp=8", devices=d)), ["1 dim"]),
        (lambda d: mw.sharding("x -> x*", ndim=-1, devices=d), ["ndim=-1"]),
        (lambda d: mw.sharding("x -> x*", ndim=1, shape=(8, 8), devices=d), ["disagree"]),
        (lambda d: mw.sharding(42, devices=d), ["42 is not a layout"]),
        (lambda d: mw.sharding("x -> x*", devices=[]), ["devices=[] is not a list"]),
        (lambda d: mw.sharding("x -> x*", mesh=mw.mesh("tp=8", devices=d), devices=d), ["not both"]),
        (lambda d: mw.sharding("x -> x*", mesh=8), ["mesh=8 is not a mesh"]),
        (lambda d: mw.shard({"a": np.ones(8), "b": "text"}, "x -> x*", devices=d), ["'b'", "str, not an array"]),
        (lambda d: mw.shard({"a": np.ones(8), "b": np.ones(8)}, {"a": "x -> x*"}, devices=d), ["does not match"]),
        (lambda d: mw.shard({"a": np.ones(8)}, {"a": np.ones(3)}, devices=d), ["is not a layout"]),
        (lambda d: mw.shard(np.ones(8), "x -> x@tp", mesh=mw.mesh("tp=8", machine="v5e:2x4")), ["without devices"]),
        (lambda d: mw.sharding("x y -> x4 y2", mesh=mw.mesh("a=2,b=4", machine="v5e:2x4")), ["does not line up"]),
        (lambda d: mw.sharding("x y -> x4 y2", mesh=mw.mesh("a=2,b=4", devices=d, axis_types="explicit")), ["(a=2,b=4)"]),
    ],
)  # fmt: skip
def test_mistakes_are_readable(call: object, words: list[str], eight: list[jax.Device]) -> None:
    with pytest.raises(MeshwrightError) as caught:
        call(eight)  # type: ignore[operator]
    for word in words:
        assert word in str(caught.value)


def test_many_mistakes_of_one_kind_are_told_once(eight: list[jax.Device]) -> None:
    tree = {f"layer{i}": np.ones((12,)) for i in range(50)}
    with pytest.raises(MeshwrightError) as caught:
        mw.shard(tree, "x -> x*", devices=eight)
    assert "and 49 more alike: layer1, layer10, …" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_the_tutorials_name_places_as_shard_does() -> None:
    from meshwright import einshard

    for expression in ("x y -> x y*", "x y -> * x y", "x y -> x2 y*", "... -> * ..."):
        placed = einshard(np.arange(256.0).reshape(16, 16), expression)
        assert placed.sharding == mw.shard(np.zeros((16, 16)), expression).sharding
        np.testing.assert_array_equal(placed, np.arange(256.0).reshape(16, 16))


def test_axes_without_names_are_printed_as_their_sizes() -> None:
    table = mw.explain({"w": np.ones((8, 8))}, "a b -> a2 b*")
    assert "on 16 devices (2×2×2×2, unnamed)" in str(table)
    assert "a2 b8" in str(table)

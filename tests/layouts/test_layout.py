"""The Layout value: read, printed in every notation, checked against meshes and shapes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright import Layout, MeshwrightError


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    ndim = draw(st.integers(0, 4))
    free = list(draw(st.permutations(["dp", "fsdp", "tp", "sp"])))
    axes = []
    for _ in range(ndim):
        take = draw(st.integers(0, min(2, len(free))))
        axes.append(tuple(free[:take]))
        free = free[take:]
    names = draw(st.permutations(["embed", "mlp", "batch", "seq"]))[:ndim]
    return Layout(tuple(axes), tuple(names) if draw(st.booleans()) else ())


@given(layouts())
def test_a_printed_layout_reads_back(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@given(layouts())
def test_a_partition_spec_reads_back(layout: Layout) -> None:
    assert Layout.of_spec(layout.spec, layout.dims, ndim=layout.ndim) == layout


@given(layouts(), st.permutations(["dp", "fsdp", "tp", "sp"]))
def test_printed_in_numbers_it_is_the_same_placement_or_a_readable_error(
    layout: Layout, order: list[str]
) -> None:
    shape = dict(zip(order, (2, 2, 1, 4), strict=True))
    try:
        numbers = layout.numbers(shape)
    except MeshwrightError as error:
        assert "neighbours in the mesh order" in str(error)
        return
    mesh = mw.mesh(",".join(f"{a}={s}" for a, s in shape.items()), devices=_sixteen())
    sizes = (16,) * layout.ndim
    named = mw.sharding(layout, ndim=layout.ndim, mesh=mesh)
    if not numbers.counts_devices:
        return
    counted = mw.sharding(numbers, ndim=layout.ndim, mesh=mesh)
    assert named.devices_indices_map(sizes) == counted.devices_indices_map(sizes)


@given(layouts(), st.permutations(["dp", "fsdp", "tp", "sp"]))
def test_slices_are_those_of_jax(layout: Layout, order: list[str]) -> None:
    shape = dict(zip(order, (2, 2, 1, 4), strict=True))
    mesh = mw.mesh("!" + ",".join(f"{a}={s}" for a, s in shape.items()), devices=_sixteen())
    sizes = tuple(16 * (dim + 1) for dim in range(layout.ndim))
    indices = mw.sharding(layout, ndim=layout.ndim, mesh=mesh).devices_indices_map(sizes)
    slices = layout.slices(sizes, shape)
    assert slices.shape == mesh.devices.shape
    for place in np.ndindex(*slices.shape):
        expected = [s.indices(n) for s, n in zip(indices[mesh.devices[place]], sizes, strict=True)]
        found = [s.indices(n) for s, n in zip(slices[place], sizes, strict=True)]
        assert found == expected


def _sixteen() -> list[object]:
    import jax

    return list(jax.devices()[:16])


def test_dims_without_a_name_are_letters() -> None:
    assert str(Layout.of_spec(P("fsdp", None, ("dp", "tp")))) == "a b c -> a@fsdp b c@dp+tp"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Layout((("tp",), ("tp",))), ["'tp' twice"]),
        (lambda: Layout((("tp",),), ("a", "b")), ["1 dim"]),
        (lambda: Layout.parse("a b -> a4 b"), ["counts devices", "mw.sharding"]),
        (lambda: Layout.parse("a ... -> a@tp ..."), ["ndim="]),
        (lambda: Layout.of_spec(P("tp", "dp"), ndim=1), ["names 2 dims, the array has 1"]),
        (lambda: Layout.of_spec((3,)), ["the entry 3"]),
        (lambda: Layout.of_spec(P(P.UNCONSTRAINED)), ["mesh axis, a tuple of them, or None"]),
        (
            lambda: Layout.parse("a b -> a@fsdp b").check({"fsdp": 8}, (12, 4)),
            [
                "(12, 4)",
                "'a' of size 12",
                "in 8 (fsdp=8)",
                "make it 8 or 16, or split it in at most 6",
            ],
        ),
        (
            lambda: Layout.parse("a -> a@tpp").check({"tp": 8}, None),
            ["'tpp'", "did you mean 'tp'?"],
        ),
        (lambda: Layout.parse("a -> a@tp").check({"tp": 8}, (8, 8)), ["has 2 dims", "1 dim"]),
    ],
)
def test_mistakes_say_what_would_fit(make: object, words: list[str]) -> None:
    with pytest.raises(MeshwrightError) as caught:
        make()  # type: ignore[operator]
    for word in words:
        assert word in str(caught.value)

"""T5X tiles: positions against the formula T5X's placement was found to follow."""

import itertools
import math

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright import Machine, MeshwrightError
from meshwright.meshes.tiles import choose_tile, positions


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def formula(
    grid: tuple[int, ...], tile: tuple[int, ...], host: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """The (data, model) index of every grid position, by arithmetic on coordinates.

    Independent of the code under test, which reshapes and transposes.
    """
    order = [0, 1, 2, 3]
    (gx, gy, gz, _), (mx, my, mz, mc) = grid, tile
    yz = (mx == gx > 1 and my == mz == 1) or (mx == 1 and my == gy > 1 and mz == gz > 1)
    xz = (my == gy > 1 and mx == mz == 1) or (my == 1 and mx == gx > 1 and mz == gz > 1)
    if mc == grid[3] and (yz or xz):
        order = [0, 2, 1, 3] if yz else [2, 1, 0, 3]
        host = (1, 1, 1, 1)
    at = np.indices(grid)
    digits: dict[str, list[tuple[np.ndarray, int]]] = {"dh": [], "dd": [], "mh": [], "md": []}
    for dim in order:
        g, m, l, p = grid[dim], tile[dim], host[dim], at[dim]
        d = g // m
        dh, dd, mh, md = (d, 1, m // l, l) if m >= l else (d // (l // m), l // m, 1, m)
        digits["md"].append((p % md, md))
        digits["mh"].append((p // md % mh, mh))
        digits["dd"].append((p // (md * mh) % dd, dd))
        digits["dh"].append((p // (md * mh * dd), dh))
    data = model = np.zeros(grid, dtype=int)
    for digit, radix in digits["dh"] + digits["dd"]:
        data = data * radix + digit
    for digit, radix in digits["mh"] + digits["md"]:
        model = model * radix + digit
    return data, model


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize(
    "gz", [1, 2, 3, *(pytest.param(gz, marks=pytest.mark.slow) for gz in range(4, 9))]
)
def test_positions_equal_the_formula_for_every_slice_up_to_8x8x8_and_every_tile(
    gz: int, cores: int
) -> None:
    checked = 0
    for gx, gy in itertools.product(range(1, 9), repeat=2):
        grid = (gx, gy, gz, cores)
        host = (math.gcd(gx, 2), math.gcd(gy, 2), 1, cores)
        for tile in itertools.product(*map(divisors, grid)):
            if any(m % l and l % m for m, l in zip(tile, host, strict=True)):
                continue  # T5X has no answer
            data, model = formula(grid, tile, host)
            placed = positions(grid, tile, host)
            assert placed.shape == (math.prod(grid) // math.prod(tile), math.prod(tile))
            flat = [int(np.ravel_multi_index(p, grid)) for p in placed.ravel()]
            expected = data.ravel() * math.prod(tile) + model.ravel()
            assert (expected[flat] == np.arange(len(flat))).all(), (grid, tile)
            checked += 1
    assert checked > 300


@pytest.mark.parametrize(
    ("tile", "shape"),
    [((1, 1, 1, 2), {"data": 16, "model": 2}), ((2, 1, 1, 2), {"data": 8, "model": 4}),
     ((1, 2, 1, 2), {"data": 8, "model": 4})],
)  # fmt: skip
def test_the_stated_tiles_of_v3_32(tile: tuple[int, ...], shape: dict[str, int]) -> None:
    mesh = mw.tile_mesh("v3-32", submesh=tile)
    assert mesh.shape == shape
    # a model group is one box of that tile
    for group in mesh.coords:
        spans = np.ptp(np.array(group.tolist()), axis=0) + 1
        assert tuple(spans) == tile


T5X_TABLE = [
    ("v3:4x4", {1: (1, 1, 1, 1), 2: (1, 1, 1, 2), 4: (2, 1, 1, 2), 8: (2, 2, 1, 2), 16: (4, 2, 1, 2)}),
    ("v2:4x4", {1: (1, 1, 1, 1), 16: (4, 2, 1, 2)}),
    ("v4:4x4x4", {1: (1, 1, 1, 1), 2: (1, 2, 1, 1), 4: (4, 1, 1, 1), 8: (4, 2, 1, 1), 16: (4, 4, 1, 1)}),
    ("v4:2x2x4", {4: (2, 2, 1, 1), 16: (2, 2, 4, 1)}),
    ("v4:8x8x8", {8: (1, 1, 8, 1), 16: (8, 2, 1, 1)}),
    ("v4:8x8x16", {16: (1, 1, 16, 1)}),
    # the entry (4, 2, 1, 1) does not fit: T5X would fail, another tile is taken
    ("v4:2x2x4", {8: (2, 2, 2, 1)}),
]  # fmt: skip


@pytest.mark.parametrize(("machine", "tiles"), T5X_TABLE)
def test_num_partitions_agrees_with_the_table_where_it_fits(
    machine: str, tiles: dict[int, tuple[int, ...]]
) -> None:
    for count, tile in tiles.items():
        assert choose_tile(Machine.parse(machine), count) == tile


@pytest.mark.parametrize(
    "text",
    ["v2:4x4", "v3:4x8", "v4:4x4x8", "v4:2x2x1", "v5e:4x8", "v5e:2x4", "v5p:4x4x12", "v5p:4x12x12",
     "v6e:8x8", "7x:2x4x4", "v5p:4x8x12", "h100:4x8", "cpu:6", "2*v5e:4x4"],
)  # fmt: skip
def test_num_partitions_works_for_every_count_that_divides_any_slice(text: str) -> None:
    machine = Machine.parse(text)
    for count in divisors(machine.devices_per_slice):
        mesh = mw.tile_mesh(machine, num_partitions=count)
        assert mesh.shape == {"data": machine.num_devices // count, "model": count}
        assert len({(d.slice_index, *d.position) for d in mesh.devices.flat}) == mesh.size
        for group in mesh.devices:
            assert len({d.slice_index for d in group}) == 1


def test_a_tile_no_larger_than_a_host_stays_in_one() -> None:
    for text, count in [("v5e:4x4", 4), ("v6e:4x8", 2), ("7x:4x4x4", 8), ("h100:4x8", 8)]:
        for group in mw.tile_mesh(text, num_partitions=count).devices:
            assert len({d.process_index for d in group}) == 1


def test_a_tile_mesh_becomes_a_jax_mesh() -> None:
    mesh = mw.tile_mesh("v5e:4x4", num_partitions=4)
    real = mesh.to_jax(jax.devices()[:16])
    assert dict(real.shape) == {"data": 4, "model": 4}
    order = {d.position: i for i, d in enumerate(mesh.machine.devices)}
    assert [d.id for d in real.devices.flat] == [order[p] for p in mesh.coords.ravel()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"submesh": (3, 1, 1, 2)}, ["(3, 1, 1, 2)", "(4, 4, 1, 2)", "x can be 1, 2, 4"]),
        ({"submesh": (1, 1, 2)}, ["3 sizes", "(x, y, z, core)"]),
        ({"submesh": (0, 1, 1, 2)}, ["x=0"]),
        ({"submesh": "tile"}, ["'tile' is not a tuple of whole numbers"]),
        ({"num_partitions": 5}, ["num_partitions=5", "32 devices", "4, 8 would fit"]),
        ({"num_partitions": 0}, ["num_partitions=0"]),
        ({"num_partitions": 2.0}, ["num_partitions=2.0"]),
        ({}, ["exactly one"]),
        ({"submesh": (1, 1, 1, 2), "num_partitions": 2}, ["exactly one"]),
    ],
)
def test_mistakes_say_what_would_fit(arguments: dict[str, object], words: list[str]) -> None:
    with pytest.raises(MeshwrightError) as caught:
        mw.tile_mesh("v3:4x4", **arguments)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)

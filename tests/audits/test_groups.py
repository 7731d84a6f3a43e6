"""Groups of devices in every spelling, and the mesh axes they lie along."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.audits import axes_between, part_of_axes, replica_groups
from meshwright.errors import MeshwrightError

SHAPE = {"a": 2, "b": 2, "c": 2}


@pytest.mark.parametrize(
    ("spelling", "axes"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}, x", ("c",)),
        ("replica_groups={{0,2},{1,3},{4,6},{5,7}}, x", ("b",)),
        ("replica_groups={{0,4,2,6},{1,5,3,7}}, x", ("a", "b")),
        ("replica_groups={}, x", ("a", "b", "c")),
        ("replica_groups=[4,2]<=[8], x", ("c",)),
        ("replica_groups=[2,4]<=[8], x", ("b", "c")),
        ("replica_groups=[2,4]<=[4,2]T(1,0), x", ("a", "b")),
        ("replica_groups=[4,2]<=[2,4]T(1,0), x", ("a",)),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1), x", ("b",)),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_1'}, x", ("c",)),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, x", ("a", "b")),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}, x", ("a", "c")),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(2)2}, x", ("b",)),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(1)2}, x", ("a",)),
        ("replica_groups=mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x'}, x", ("c",)),
        ("replica_groups=mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}, x", ("a", "b")),
        ("source_target_pairs={{0,1},{1,0},{2,3},{3,2}}, x", ("c",)),
        ("source_target_pairs={{0,2},{2,0},{5,7}}, x", ("b",)),
        ("source_target_pairs={{0,0},{1,1}}, x", ()),
        ("replica_groups={{0},{1},{2},{3}}, x", ()),
    ],
)
def test_every_spelling_of_groups_is_read(spelling: str, axes: tuple[str, ...]) -> None:
    assert axes_between(replica_groups(spelling, 8), SHAPE) == axes


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    chosen=st.sets(st.integers(0, 3)),
)
def test_groups_along_any_axes_are_found_again(sizes: list[int], chosen: set[int]) -> None:
    """Groups written down by splitting a grid of numbers along axes."""
    grid = np.arange(math.prod(sizes)).reshape(sizes)
    along = sorted(axis for axis in chosen if axis < len(sizes))
    others = [range(n) for axis, n in enumerate(sizes) if axis not in along]
    groups = []
    for place in itertools.product(*others):
        rest = iter(place)
        index = tuple(slice(None) if axis in along else next(rest) for axis in range(len(sizes)))
        groups.append(np.asarray(grid[index]).reshape(-1).tolist())
    names = [f"axis{i}" for i in range(len(sizes))]
    wide = tuple(names[axis] for axis in along if sizes[axis] > 1)
    shape = dict(zip(names, sizes, strict=True))
    assert axes_between(groups, shape) == wide
    assert not part_of_axes(groups, shape)
    if len(groups[0]) > 2:
        assert part_of_axes([group[:-1] for group in groups], shape)


@pytest.mark.parametrize(
    ("groups", "part"),
    [
        ([[0, 1], [2, 3]], False),
        ([[0, 1, 2, 3]], False),
        ([[0, 3], [1, 2]], True),  # across both axes, two of four
        ([[0, 1], [2]], True),
    ],
)
def test_groups_that_are_not_all_devices_along_their_axes_are_parts(
    groups: list[list[int]], part: bool
) -> None:
    assert part_of_axes(groups, {"a": 2, "b": 2}) == part


def test_a_mesh_that_is_too_small_is_a_mistake() -> None:
    with pytest.raises(MeshwrightError, match="device 7, mesh 'a=2' has 2; give the mesh"):
        axes_between([[0, 7]], {"a": 2})


def test_groups_that_cannot_be_read_are_a_mistake() -> None:
    with pytest.raises(MeshwrightError, match="unknown notation of device groups"):
        replica_groups("replica_groups=<<0,1>>", 8)

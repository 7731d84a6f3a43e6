"""TPU slices that exist are read, others are refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import CHIPS, Chip, Machine, MeshwrightError, plan
from meshwright.machines.slices import nearest_slices, slice_shapes
from meshwright.proofs import prove
from meshwright.training.config import TrainConfig

# Cloud TPU's pages for v3, v4, v5e, v5p, v6e and TPU7x; the topologies of xpk
PUBLISHED = """
v2:2x2 v2:16x16 v3:2x2 v3:4x8 v3:32x32 v4:2x2x1 v4:2x2x4 v4:2x4x4 v4:4x4x12 v4:12x12x24 v4:12x16x16
v4:4x16x16 v4:8x16x16 v5e:1x1 v5e:2x2 v5e:2x4 v5e:8x16 v5e:16x16 v5p:2x2x1 v5p:2x2x2 v5p:2x4x4
v5p:4x4x8 v5p:4x4x92 v5p:4x12x20 v5p:8x8x28 v5p:12x12x12 v5p:16x16x24 v6e:1x1 v6e:4x8 v6e:16x16
7x:1x1x1 7x:2x2x1 7x:2x2x2 7x:4x4x244 7x:12x24x24 7x:16x24x24
"""


@pytest.mark.parametrize("text", PUBLISHED.split())
def test_a_published_slice_is_read(text: str) -> None:
    assert str(Machine.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("v5p:2x3x5", ["v5p:2x2x4", "v5p:2x4x4"]),
        ("v6e:32x32", ["v6e:16x16", "4*v6e:16x16"]),
        ("v5e:1x100", ["v5e:8x8", "v5e:8x16"]),
        ("v5p:64x64x64", ["v5p:16x16x24"]),
        ("v5p:16x24x24", ["v5p:16x16x24"]),
        ("v4:2x2x3", ["v4:2x2x2", "v4:2x2x4"]),
        ("v4:8x8x10", ["v4:8x8x8", "v4:8x8x12"]),
        ("v5e:1x2", ["v5e:1x1", "v5e:2x2"]),
        ("v3:64x64", ["v3:32x32", "4*v3:32x32"]),
        ("7x:20x20x24", ["7x:16x24x24"]),
        ("2*v6e:32x16", ["2*v6e:16x16", "4*v6e:16x16"]),
    ],
)
def test_a_slice_that_does_not_exist_is_refused_and_the_nearest_are_named(
    text: str, near: list[str]
) -> None:
    with pytest.raises(MeshwrightError) as caught:
        Machine.parse(text)
    said = str(caught.value)
    assert said.startswith(f"machine '{text}': there is no such")
    assert f"nearest: {' or '.join(map(repr, near))}." in said
    for one in near:
        assert str(Machine.parse(one)) == one


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("v4:8x4x4", "v4:4x4x8"),
        ("v5p:4x8x4", "v5p:4x4x8"),
        ("v5e:4x2", "v5e:2x4"),
        ("2*v6e:16x8", "2*v6e:8x16"),
        ("v4:1x2x2", "v4:2x2x1"),
    ],
)
def test_a_slice_written_in_another_order_is_the_same_machine(text: str, same: str) -> None:
    assert Machine.parse(text) == Machine.parse(same)
    assert str(Machine.parse(text)) == same


@pytest.mark.parametrize("text", ["v5p-17920", "v4-2", "v4-12288", "v6e-512", "v5e-2", "v3-16"])
def test_a_cloud_name_of_no_slice_is_refused(text: str) -> None:
    with pytest.raises(MeshwrightError, match="nearest: "):
        Machine.parse(text)


@given(st.sampled_from(["v4", "v5p", "7x"]), st.tuples(*[st.integers(1, 40)] * 3))
def test_slices_of_three_dims_are_cubes_in_order_up_to_the_largest(
    chip: str, shape: tuple[int, int, int]
) -> None:
    most = {"v4": 4096, "v5p": 6144, "7x": 9216}[chip]
    whole = list(shape) == sorted(shape) and not any(side % 4 for side in shape)
    if math.prod(shape) >= 64:
        assert (shape in slice_shapes(chip)) == (whole and math.prod(shape) <= most)
    assert all(one in slice_shapes(chip) for one in nearest_slices(chip, shape))


def test_a_machine_that_does_not_exist_can_still_be_named_and_planned_but_not_proved() -> None:
    machine = Machine(CHIPS["v6e"], (32, 32))
    assert machine.num_devices == 1024
    assert plan("llama-3.1-8b", machine, 1024, 4096).best.memory.fits
    with pytest.raises(MeshwrightError, match="there is no such v6e slice"):
        prove(TrainConfig("tiny", batch=1024), machine)


def test_a_chip_of_your_own_comes_in_any_shape_and_can_be_outgrown() -> None:
    figures = {name: getattr(CHIPS["v5e"], name) for name in Chip.__dataclass_fields__}
    own = Chip(**figures | {"name": "mine", "aliases": ()})
    with pytest.raises(MeshwrightError, match=r"would do: 'mine:\d+x\d+'"):
        plan("llama-3.1-8b", Machine(own, (1, 2)), 64, 4096)

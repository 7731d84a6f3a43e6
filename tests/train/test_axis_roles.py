"""Meshes as other systems write them: the step is that of the same mesh by roles."""

import jax
import numpy as np
import pytest

from meshwright import MeshwrightError
from meshwright.machines import Machine
from meshwright.meshes import tile_mesh
from meshwright.train import TrainConfig, abstract_step, training_mesh

SMALL = {"batch": 8, "seq": 32}


def ids(mesh: jax.sharding.Mesh) -> list[int]:
    return [device.id for device in mesh.devices.flat]


@pytest.mark.parametrize(
    ("said", "by_role"),
    [
        ({"mesh": "data=8,model=2"}, "dp=8,tp=2"),
        ({"mesh": "data=4:fsdp,model=4:tp"}, "fsdp=4,tp=4"),
        ({"mesh": "dp:1,fsdp:-1,mp:2"}, "dp=1,fsdp=-1,tp=2"),
        ({"mesh": "data=4,model=4", "rules": "t5x:1,2"}, "dp=4,tp=4"),
    ],
)
def test_a_step_on_named_axes_is_the_step_by_roles(said: dict[str, str], by_role: str) -> None:
    named = abstract_step(TrainConfig("tiny", **SMALL, **said))  # type: ignore[arg-type]
    roles = abstract_step(TrainConfig("tiny", **SMALL, **(said | {"mesh": by_role})))  # type: ignore[arg-type]
    assert named.mesh == roles.mesh
    assert named.state == roles.state
    assert named.batch == roles.batch


@pytest.mark.parametrize("said", [{"num_partitions": 4}, {"submesh": "2,1,1,2"}])
def test_tiles_are_those_of_t5x(said: dict[str, object]) -> None:
    machine = Machine.parse("v3:4x4")
    placed = training_mesh(TrainConfig("tiny", **SMALL, **said), machine)  # type: ignore[arg-type]
    assert placed.shape == {"dp": 8, "fsdp": 1, "tp": 4, "sp": 1}
    expected = tile_mesh(machine, submesh=(2, 1, 1, 2))
    found = [d.position for d in placed.devices.flat]
    assert found == [d.position for d in expected.devices.flat]


def test_a_tile_of_the_devices_here() -> None:
    step = abstract_step(TrainConfig("tiny", **SMALL, num_partitions=4))  # type: ignore[arg-type]
    assert dict(step.mesh.shape) == {"dp": 4, "fsdp": 1, "tp": 4, "sp": 1}
    assert np.array_equal(sorted(ids(step.mesh)), range(16))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"num_partitions": 3}, "num_partitions=3 does not divide the 16 devices"),
        ({"num_partitions": 0}, "num_partitions=0 must be at least 1"),
        ({"submesh": "2,x"}, "submesh='2,x' is not a tile"),
        ({"submesh": "2,1,1,2", "num_partitions": 4}, "not both"),
        ({"num_partitions": 4, "mesh": "tp=4"}, "both say where the axes go"),
        ({"mesh": "fsdp=8,foo=2"}, "axis 'foo' is not known"),
    ],
)
def test_mistakes_are_told(said: dict[str, object], words: str) -> None:
    with pytest.raises(MeshwrightError, match=words):
        abstract_step(TrainConfig("tiny", **SMALL, **said))  # type: ignore[arg-type]

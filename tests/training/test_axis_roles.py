"""Meshes as other systems write them: the step is that of the same mesh by roles."""

from pathlib import Path

import jax
import numpy as np
import pytest

from meshwright import MeshwrightError
from meshwright.machines import Machine
from meshwright.meshes import tile_mesh
from meshwright.training import TrainConfig, abstract_step, training_mesh

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


@pytest.mark.parametrize("names", [("data", "model"), ("fsdp", "tp")])
def test_axes_keep_the_names_that_the_rules_of_a_file_use(
    names: tuple[str, str], tmp_path: Path
) -> None:
    """With a role for each axis, the file may use the names of the mesh or of the roles."""
    data, model = names
    file = tmp_path / "own.rules"
    file.write_text(
        f"batch -> {data}\nlength -> none\nvocab -> {model}\nembed -> {data}\nmlp -> {model}\n"
        f"heads -> {model}\nkv_heads -> {model}\nhead_dim -> none\nlayers -> none\nnorm -> none\n"
    )
    mesh = "data=8:fsdp,model=2:tp"
    step = abstract_step(TrainConfig("tiny", **SMALL, mesh=mesh, rules=str(file)))  # type: ignore[arg-type]
    assert {axis: size for axis, size in step.mesh.shape.items() if size > 1} == {data: 8, model: 2}
    assert step.state.params["embedding"].sharding.spec == jax.P(model, data)


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
        ({"submesh": "2,1,1,2"}, "num_partitions=4 chooses a tile on any machine"),
        ({"submesh": "2,1,1,2", "num_partitions": 4}, "not both"),
        ({"num_partitions": 4, "mesh": "tp=4"}, "both say where the axes go"),
        ({"mesh": "fsdp=8,foo=2"}, "axis 'foo' is not known"),
    ],
)
def test_mistakes_are_told(said: dict[str, object], words: str) -> None:
    with pytest.raises(MeshwrightError, match=words):
        abstract_step(TrainConfig("tiny", **SMALL, **said))  # type: ignore[arg-type]

"""What is saved comes back to the bit, on any mesh."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.checkpoint import Checkpoints

META = {
    "step": 3,
    "data": {"position": 12_345_678_901},
    "seed": 7,
    "mesh": "fsdp=4,tp=2",
    "lr": 0.1,
}


def mesh_of(shape: tuple[int, ...], kind: AxisType = AxisType.Explicit) -> jax.sharding.Mesh:
    size = int(np.prod(shape))
    devices = np.array(jax.devices()[:size]).reshape(shape)
    return jax.sharding.Mesh(devices, ("fsdp", "tp")[: len(shape)], axis_types=(kind,) * len(shape))


def training_state() -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 8))
    params = {
        "embed": jax.random.normal(next(keys), (32, 16)),
        "layers": {
            "wq": jax.random.normal(next(keys), (16, 8, 16)).astype(jnp.bfloat16),
            "norm": jnp.asarray([jnp.nan, -0.0, jnp.inf, 1e-42] * 4),  # bits, not values
        },
        "nothing": jnp.zeros((0, 16)),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return {
        "params": params,
        "optimizer": optimizer.init(params),
        "step": jnp.int32(3),
        "flags": {
            "mask": jax.random.bernoulli(next(keys), 0.5, (16, 8)),
            "bytes": jnp.arange(128, dtype=jnp.uint8).reshape(16, 8),
            "half": jnp.ones((16,), jnp.float16) / jnp.float16(3),
        },
        "key": jax.random.key(5),
        "keys": jax.random.split(jax.random.key(6), 16),
    }


def placed(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec_for(x, mesh))), tree)


def spec_for(x: Any, mesh: jax.sharding.Mesh) -> P:
    if x.size == 0:
        return P()
    return P(*list(mesh.axis_names)[::-1][: x.ndim])


def targets_of(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec_for(x, mesh))
        ),
        tree,
    )


def bits(x: jax.Array) -> bytes:
    return np.asarray(
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    ).tobytes()


def assert_same(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert bits(a) == bits(b)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoints, Any]:
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    state = placed(training_state(), mesh_of((4, 2)))
    checkpoints = Checkpoints(folder)
    checkpoints.save(3, state, META, wait=True)
    return checkpoints, state


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((4, 2), AxisType.Explicit),
        ((2, 4), AxisType.Auto),
        ((1,), AxisType.Explicit),
        ((16,), AxisType.Auto),
    ],
)
def test_a_whole_training_state_comes_back_to_the_bit_on_any_mesh(
    saved: tuple[Checkpoints, Any], shape: tuple[int, ...], kind: AxisType
) -> None:
    checkpoints, state = saved
    targets = targets_of(state, mesh_of(shape, kind))
    restored = checkpoints.restore(3, targets)
    assert_same(restored, state)
    for array, target in zip(jax.tree.leaves(restored), jax.tree.leaves(targets), strict=True):
        assert array.sharding == target.sharding


def test_the_callers_data_comes_back_and_arrays_can_be_listed(
    saved: tuple[Checkpoints, Any],
) -> None:
    checkpoints, _ = saved
    assert checkpoints.meta(3) == META
    listed = checkpoints.arrays(3)
    assert str(listed["optimizer/1/0/mu/layers/wq"]) == "(16, 8, 16) bfloat16"
    assert (checkpoints.steps(), checkpoints.latest()) == ([3], 3)


def test_parts_can_be_restored_by_name(saved: tuple[Checkpoints, Any]) -> None:
    checkpoints, state = saved
    part = {"params": state["params"], "step": state["step"]}
    assert_same(checkpoints.restore(3, targets_of(part, mesh_of((2, 2)))), part)


def test_another_set_mesh_does_not_disturb(saved: tuple[Checkpoints, Any], tmp_path: Path) -> None:
    checkpoints, state = saved
    with jax.set_mesh(mesh_of((16,))):
        assert_same(checkpoints.restore(3, targets_of(state, mesh_of((2, 4)))), state)
        with Checkpoints(tmp_path) as other:
            other.save(1, state, {})
    with jax.set_mesh(mesh_of((4, 2))):
        assert_same(Checkpoints(tmp_path).restore(1, targets_of(state, mesh_of((8, 1)))), state)


def test_plain_orbax_reads_the_arrays_under_the_same_names(saved: tuple[Checkpoints, Any]) -> None:
    import orbax.checkpoint as ocp

    checkpoints, _ = saved
    with ocp.PyTreeCheckpointer() as reader:
        metadata = reader.metadata(checkpoints.folder / "step-00000003" / "arrays").item_metadata
    wq = metadata["params"]["layers"]["wq"]
    assert (wq.shape, wq.dtype) == ((16, 8, 16), jnp.bfloat16)
    assert metadata["optimizer"]["1"]["0"]["count"].shape == ()


def test_another_dtype_is_an_error_unless_asked_for(saved: tuple[Checkpoints, Any]) -> None:
    checkpoints, state = saved
    asked = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), state["params"]
    )
    with pytest.raises(
        mw.MeshwrightError,
        match=r"a different dtype.*\n.*params/layers/wq: .*bfloat16 saved.*float32",
    ) as error:
        checkpoints.restore(3, {"params": asked})
    assert "cast=True" in str(error.value)
    restored = checkpoints.restore(3, {"params": asked}, cast=True)
    assert_same(
        restored["params"]["layers"]["wq"], state["params"]["layers"]["wq"].astype(jnp.float32)
    )
    assert restored["params"]["layers"]["wq"].sharding == asked["layers"]["wq"].sharding


def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path: Path) -> None:
    mesh = mesh_of((4, 2))
    state = placed({"w": jnp.zeros((512, 1024)), "v": jnp.zeros((64,))}, mesh)
    targets = targets_of(state, mesh)
    add_one = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
    with Checkpoints(tmp_path, keep_last=None) as checkpoints:
        for step in range(4):
            checkpoints.save(step, state, {})
            for _ in range(3):
                state = add_one(state)
        checkpoints.wait()
        for step in range(4):
            for array in jax.tree.leaves(checkpoints.restore(step, targets)):
                assert (np.asarray(array) == 3 * step).all()


def test_saving_twice_the_same_values_gives_the_same_fingerprints(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        for step, shape in enumerate([(4, 2), (2, 8)]):
            state = {"w": jax.random.normal(jax.random.key(0), (8, 16))}
            checkpoints.save(step, placed(state, mesh_of(shape)), {})
        checkpoints.wait()
        assert checkpoints.arrays(0) == checkpoints.arrays(1)


@pytest.mark.parametrize(
    ("tree", "meta", "said"),
    [
        ({}, {}, "nothing to save"),
        ({"a": 1}, {}, "'a' is a int"),
        ({"a": np.ones(3)}, {}, "'a' is a ndarray"),
        ({"a": jnp.ones(3)}, [], "meta is a list"),
        ({"a": jnp.ones(3)}, {"x": {"y": [1, object()]}}, r"meta\['x'\]\['y'\]\[1\] is a object"),
        ({"a": jnp.ones(3)}, {"loss": float("nan")}, r"meta\['loss'\] is nan"),
        ({"a": jnp.ones(3)}, {1: 2}, "the key 1"),
    ],
)
def test_what_cannot_be_saved_is_said_before_anything_is_written(
    tmp_path: Path, tree: Any, meta: Any, said: str
) -> None:
    with pytest.raises(mw.MeshwrightError, match=said):
        Checkpoints(tmp_path).save(1, tree, meta)
    assert list(tmp_path.iterdir()) == []


def test_a_donated_array_is_refused(tmp_path: Path) -> None:
    array = jnp.ones(4)
    array.delete()
    with pytest.raises(mw.MeshwrightError, match="'a' was donated"):
        Checkpoints(tmp_path).save(1, {"a": array}, {})

"""A checkpoint of another model is told from names and shapes, before data is read."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.checkpoint import Checkpoints


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    folder = tmp_path_factory.mktemp("run")
    state = {
        "params": {
            "embed": jnp.ones((256, 64)),
            "head": jnp.ones((64, 256)),
            "layers": {"wq": jnp.ones((2, 8))},
        },
        "key": jax.random.key(0),
        "count": jnp.int32(3),
    }
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(100, state, {})
    shutil.rmtree(folder / "step-00000100" / "arrays")  # so that reading would fail
    return checkpoints


def target(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        shape, dtype, sharding=mw.sharding("... -> ...", mesh="tp=16", ndim=len(shape))
    )


def test_differences_are_listed_with_both_shapes(checkpoints: Checkpoints) -> None:
    asked = {
        "params": {"embed": target(512, 64), "layers": {"wq": target(2, 8), "wk": target(2, 4)}}
    }
    with pytest.raises(mw.MeshwrightError) as error:
        checkpoints.restore(100, asked)
    folder = checkpoints.folder / "step-00000100"
    assert str(error.value).splitlines() == [
        f"checkpoint {folder} holds a different model; 3 arrays differ:",
        "  params/embed: (256, 64) float32 saved, (512, 64) float32 requested",
        "  params/layers/wk: not saved, (2, 4) float32 requested",
        "  params/head: (64, 256) float32 saved, not requested",
        "build the model from the config saved with it, or choose this model's checkpoint",
    ]


def test_many_differences_are_counted_and_the_first_shown(checkpoints: Checkpoints) -> None:
    asked = {"params": {f"layer{number}": target(4) for number in range(20)}}
    with pytest.raises(mw.MeshwrightError, match="23 arrays differ") as error:
        checkpoints.restore(100, asked)
    assert "… and 17 more" in str(error.value)
    assert len(str(error.value).splitlines()) == 9


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"param": {"embed": target(256, 64)}}, "no part 'param'; did you mean 'params'"),
        ({}, "targets are empty"),
        ({"params": {"embed": 3}}, "'params/embed' is a int"),
        ({"params": {"embed": jax.ShapeDtypeStruct((2,), jnp.float32)}}, "'params/embed' has no sharding"),
        ({"key": target(2, dtype=jnp.uint32)}, r"key: \(\) key<fry> saved, \(2,\) uint32 requested"),
        ({"count": target(dtype=jnp.float32)}, r"count: \(\) int32 saved, \(\) float32 requested"),
        ({"key": target(dtype=jnp.uint32)}, r"key: \(\) key<fry> saved, \(\) uint32 requested"),
        (
            {"params": {"embed": jax.ShapeDtypeStruct((3, 4), jnp.float32, sharding=mw.sharding("a b -> a@tp b", mesh="tp=16"))}},
            r"'params/embed' of shape \(3, 4\) does not fit its sharding",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("cast", [False, True])
def test_what_is_asked_for_is_checked_first(
    checkpoints: Checkpoints, asked: Any, said: str, cast: bool
) -> None:
    with pytest.raises(mw.MeshwrightError, match=said):
        checkpoints.restore(100, asked, cast=cast)


@pytest.mark.parametrize("step", [7, -1, "latest", None, 2.5])
def test_a_step_that_is_not_there_lists_those_that_are(checkpoints: Checkpoints, step: Any) -> None:
    with pytest.raises(mw.MeshwrightError, match="step") as error:
        checkpoints.restore(step, {"key": target()})
    if step == 7:
        assert "complete checkpoints there: 100" in str(error.value)


def test_an_empty_folder_has_no_latest(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "not yet").latest() is None
    assert Checkpoints(tmp_path / "not yet").steps() == []
    assert not (tmp_path / "not yet").exists()

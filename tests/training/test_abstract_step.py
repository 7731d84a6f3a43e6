"""A step without data: the same as train's, with the same mistakes found."""

import jax
import pytest

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.training.abstract_step import abstract_step
from meshwright.training.config import TrainConfig
from meshwright.training.prepare import prepare

EIGHT = mw.mesh("dp=1,fsdp=4,tp=2,sp=1", devices=jax.devices()[:8], axis_types="explicit")


def test_the_abstract_step_is_the_one_that_train_prepares() -> None:
    config = TrainConfig("tiny", mesh="dp=2,fsdp=4,tp=2", batch=16, seq=64, accumulation=2)
    run, found = prepare(config), abstract_step(config)
    assert found.mesh == run.step.mesh
    same = jax.tree.map(lambda a, b: a == b, found.state, run.step.state)
    assert all(jax.tree.leaves(same))
    assert {row.shape for row in found.batch.values()} == {(2, 8, 64)}
    assert found.functions.batch_sharding == run.step.functions.batch_sharding
    assert found.compute == abstract_step(config, run.step.mesh).compute


def test_the_mesh_given_counts_not_the_devices_here() -> None:
    found = abstract_step(TrainConfig("tiny", batch=8, seq=64), EIGHT)
    assert found.mesh.size == 8 < len(jax.devices())
    assert found.state.params["embedding"].sharding.mesh == EIGHT


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 6}, "batch=6 is not divisible by"),
        ({"seq": 10**6}, "longer than the model allows"),
        ({"model": "tinny"}, "did you mean 'tiny'"),
        ({"rules": "nowhere.rules"}, "nor a file that can be read"),
    ],
)
def test_mistakes_are_those_of_train(settings: dict, message: str) -> None:
    with pytest.raises(MeshwrightError, match=message):
        abstract_step(TrainConfig(**{"model": "tiny", "batch": 8, "seq": 64, **settings}), EIGHT)


def test_automatic_axes_are_refused() -> None:
    auto = mw.mesh("dp=1,fsdp=4,tp=2,sp=1", devices=jax.devices()[:8])
    with pytest.raises(MeshwrightError, match="axis_types='explicit'"):
        abstract_step(TrainConfig("tiny", batch=8, seq=64), auto)

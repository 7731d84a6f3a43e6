"""Remat offload: the inputs of layers go to the host's memory and come back; nothing else changes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.training.toy import LENGTH, MICRO_BATCHES, ONE, SEQUENCES, Setting, parts, train

from meshwright.errors import MeshwrightError
from meshwright.launch import gpu
from meshwright.machines import Machine
from meshwright.models import preset
from meshwright.planner import Workload
from meshwright.training import TrainConfig, with_settings
from meshwright.training.compute import layers_text

EIGHT = "dp=1,fsdp=4,tp=2,sp=1"


@functools.cache
def losses(mesh: str, remat: str) -> np.ndarray:
    return train(Setting(mesh, remat=remat, steps=5))[0]


@pytest.mark.parametrize("mesh", [pytest.param(ONE, marks=pytest.mark.slow), EIGHT])
def test_losses_are_those_of_full(mesh: str) -> None:
    np.testing.assert_array_equal(losses(mesh, "offload"), losses(mesh, "full"))


def lowered(setting: Setting, platform: str) -> str:
    run = parts(setting)
    shape = (MICRO_BATCHES, SEQUENCES, LENGTH)
    one = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=run.functions.batch_sharding)
    batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), one)
    with jax.set_mesh(run.mesh):
        traced = run.functions.train.jitted.trace(run.target, batch)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("platform", "mesh", "scan"),
    [
        pytest.param("cuda", ONE, True, marks=pytest.mark.slow),
        ("cuda", ONE, False),
        ("tpu", EIGHT, True),
        pytest.param("tpu", EIGHT, False, marks=pytest.mark.slow),
    ],
)
def test_a_layers_input_is_sent_to_the_host_and_fetched(
    platform: str, mesh: str, scan: bool
) -> None:
    setting = Setting(mesh, remat="offload", scan=scan)
    # one loop sends and one fetches, or every layer does
    places = 1 if scan else setting.config.layers
    text = lowered(setting, platform)
    assert text.count('_xla_buffer_placement = "pinned_host"') == places
    assert text.count('_xla_buffer_placement = "device"') >= places
    assert "pinned_host" not in lowered(dataclasses.replace(setting, remat="full"), platform)


def test_layers_run_in_a_loop_or_the_settings_are_refused() -> None:
    config = TrainConfig("llama-3.2-1b", batch=8, seq=2048)
    assert not Workload.of(config, Machine.parse("h200:1")).scan
    config = with_settings(config, {"compute.remat": "offload"})
    assert Workload.of(config, Machine.parse("h200:1")).scan
    model = preset("llama-3.2-1b")
    assert "the host's memory, pinned" in layers_text(config, model, "gpu", 1)
    assert "as remat full" in layers_text(config, model, "cpu", 1)
    with pytest.raises(MeshwrightError, match=r"offload needs compute\.layers scan"):
        with_settings(config, {"compute.layers": "unroll"})


def test_as_much_of_the_hosts_memory_may_be_pinned_as_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "free_host_memory", lambda: 200 * 2**30)
    for variable in (gpu.SHARE, gpu.PINNED):
        monkeypatch.setenv(variable, "")  # so that it is put back
        monkeypatch.delenv(variable)
    gpu.take_most_gpu_memory()
    assert gpu.os.environ[gpu.PINNED] == "200"
    monkeypatch.setenv(gpu.PINNED, "7")
    gpu.take_most_gpu_memory()
    assert gpu.os.environ[gpu.PINNED] == "7"

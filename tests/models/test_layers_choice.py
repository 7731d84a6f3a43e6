"""Whether layers are scanned or unrolled, in train and in the plan."""

import pytest

from meshwright.machines import Machine
from meshwright.models import layer_count, preset, scans_layers
from meshwright.planner import Workload
from meshwright.training import TrainConfig, with_settings


@pytest.mark.parametrize(
    ("model", "on", "scan"),
    [
        ("llama-3.2-1b", "h200:1", False),
        ("llama-3.1-8b", "h100:1", False),
        ("llama-3.1-70b", "h200:1", True),  # 80 layers
        ("llama-3.2-1b", "h200:1x8", True),
        ("llama-3.2-1b", "v5p:2x2x1", True),
        ("tiny", "cpu:1", True),
    ],
)
def test_layers_are_unrolled_by_default_on_one_gpu_if_they_are_few(model, on, scan):
    machine = Machine.parse(on)
    config = TrainConfig(model, batch=8, seq=2048)
    found, why = scans_layers(
        "auto", layer_count(preset(model)), machine.chip.platform, machine.num_devices
    )
    assert found is scan
    assert why
    assert Workload.of(config, machine).scan is scan
    for setting in ("scan", "unroll"):
        run = Workload.of(with_settings(config, {"compute.layers": setting}), machine)
        assert run.scan is (setting == "scan")


def test_the_layers_of_all_stacks_count():
    assert layer_count(preset("llama-3.2-1b")) == 16
    assert layer_count(preset("t5-small")) == 12

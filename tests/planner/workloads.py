"""Workloads for tests: a model on a machine, with settings by the last part of their names."""

from typing import Any

from meshwright.launch import flat_settings
from meshwright.machines import Machine
from meshwright.planner import Workload
from meshwright.planner.workload import setting_name
from meshwright.serving import EngineConfig
from meshwright.training import TrainConfig, with_settings


def workload(
    model: Any, on: Machine | str, batch: int, seq: int, serve: bool = False, **settings: Any
) -> Workload:
    """In bfloat16, with scanned layers and no overlap, unless the settings say otherwise."""
    config = TrainConfig("", batch=batch, seq=seq)
    usual = {"dtype": "bfloat16", "overlap": "off", "layers": "scan"} | settings
    changes = {setting_name(name, flat_settings(config)): usual[name] for name in usual}
    engine = EngineConfig() if serve else None
    return Workload(with_settings(config, changes), Machine.parse(on), model, engine)

"""`--mesh auto`: the settings of the mesh that the plan puts first."""

from collections.abc import Collection
from typing import Any

from meshwright.launch import flat_settings
from meshwright.machines import Machine
from meshwright.models import default_dtype
from meshwright.planner.constraints import constraints_of
from meshwright.planner.planner import plan, plan_config
from meshwright.planner.workload import CHOSEN, apply
from meshwright.training import AUTO, TrainConfig


def planned(
    config: TrainConfig, machine: Machine, named: Collection[str] = ()
) -> tuple[TrainConfig, str]:
    """The settings with a mesh of this machine, and what was chosen, in words.

    With the mesh come remat, micro-batches, the strategy of attention and what else the plan
    chooses, but not settings in `named` or with another value than the default.
    """
    assert config.mesh == AUTO
    ranking = plan_config(config, machine, constraints_of(config, named))
    chosen = apply(config, ranking.best.choice)
    values = flat_settings(chosen)
    chosen_values = {name.rpartition(".")[2]: values[name] for name in ("mesh", *CHOSEN.values())}
    if ranking.best.choice.size("sp") == 1:  # nothing for a strategy to split
        del chosen_values["context_parallel"]
    with_it = ", ".join(f"{name} {value}" for name, value in chosen_values.items() if value)
    warned = "".join(f"\nwarning: {warning}" for warning in ranking.warnings)
    return chosen, f"mesh auto: {with_it} ({ranking.best.reason}){warned}"


def planned_to_serve(model: Any, machine: Machine, sequences: int, longest: int, dtype: str) -> str:
    """The mesh over all devices with the lowest latency per token for so many long sequences."""
    ranking = plan(
        model, machine, sequences, longest,
        kind="serve", rank_by="latency", weights="plain",
        dtype=default_dtype(dtype, machine.chip.platform),
    )  # fmt: skip
    return ranking.mesh

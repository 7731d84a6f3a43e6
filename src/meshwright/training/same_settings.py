"""What every process of a run must have been started with: settings, data, model, versions."""

import json
from collections.abc import Sequence
from typing import Any

from meshwright.launch import (
    Fact,
    Joined,
    Store,
    by_content,
    compare_processes,
    flat_settings,
    software_facts,
    weights_sample,
)
from meshwright.models import model_config, model_to_dict
from meshwright.training.config import TrainConfig
from meshwright.training.setup import (
    choose_rules,
    file_rules,
    mixture_of,
    model_of,
    weights_folder,
)

# what may differ between processes: who each one is, and what process 0 alone acts on
MAY_DIFFER = frozenset(
    {"coordinator", "processes", "process_id", "log.every", "log.tensorboard", "log.wandb"}
)
# what is compared by content instead of by name
FILES = frozenset({"model", "data", "rules", "init_from"})


PACKAGES = ("jaxlib", "optax")  # whose versions must be the same


def check_same_settings(
    config: TrainConfig,
    store: Store | None,
    joined: Joined,
    packages: Sequence[str] = PACKAGES,
) -> None:
    """An error in every process, before anything is compiled, if one was started differently."""
    compare_processes(lambda: config, lambda read: settings_facts(read, packages), store, joined)


def settings_facts(config: TrainConfig, packages: Sequence[str] = PACKAGES) -> dict[str, Fact]:
    """All that must be the same, by the name a user knows it by."""
    model = model_to_dict(model_config(config.model))
    data = mixture_of(config).describe()
    for source in data["sources"]:
        del source["name"]
    init = weights_folder(config)
    contents: dict[str, tuple[str, Any]] = {
        "MODEL": (config.model, model),
        "--data": (config.data, data),
        "--rules": (config.rules, str(_rules_of(config))),
        "--init-from": (str(init), None if init is None else weights_sample(init)),
    }
    facts = {name: by_content(*content) for name, content in contents.items()}
    for name, value in flat_settings(config).items():
        if name not in MAY_DIFFER | FILES:
            facts[f"--{name.replace('_', '-')}"] = Fact(str(value))
    facts["--run"] = Fact(str(config.run.absolute()))
    facts |= software_facts(*packages)
    return facts | {f"MODEL's {name}": Fact(json.dumps(value)) for name, value in model.items()}


def _rules_of(config: TrainConfig) -> Any:
    if config.backend == "torch":  # where activations follow from the styles
        return file_rules(config)
    return choose_rules(config, model_of(config))

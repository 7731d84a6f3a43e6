"""What every process of a run must have been started with: settings, data, model, versions.

Files are compared by what is in them, so that each host may keep them elsewhere.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import jax

import meshwright
from meshwright.data import Mixture
from meshwright.errors import MeshwrightError
from meshwright.launch import Fact, Joined, Store, compare_processes
from meshwright.models import model_config, model_to_dict
from meshwright.train.config import TrainConfig, flat_settings
from meshwright.train.setup import choose_rules, model_of

# what may differ between processes: who each one is, and what process 0 alone acts on
MAY_DIFFER = frozenset(
    {"coordinator", "processes", "process_id", "log.every", "log.tensorboard", "log.wandb"}
)
# what is compared by content instead of by name
FILES = frozenset({"model", "data", "rules", "init_from"})
JAX_OPTIONS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl",
    "jax_threefry_partitionable", "jax_numpy_dtype_promotion",
)  # fmt: skip
VARIABLES = ("MESHWRIGHT_MOSAIC",)
SAMPLES, SAMPLE_BYTES = 64, 1 << 14  # of a file of weights


def check_same_settings(config: TrainConfig, store: Store | None, joined: Joined) -> None:
    """An error in every process, before anything is compiled, if one was started differently."""
    if store is None:
        return
    try:
        facts: dict[str, Fact] | str = settings_facts(config)
    except MeshwrightError as mistake:
        facts = str(mistake)
    compare_processes(facts, store, joined.process_id, joined.processes)


def settings_facts(config: TrainConfig) -> dict[str, Fact]:
    """All that must be the same, by the name a user knows it by."""
    model = model_to_dict(model_config(config.model))
    data = Mixture.parse(config.data).describe()
    for source in data["sources"]:
        del source["name"]
    contents: dict[str, tuple[str, Any]] = {
        "MODEL": (config.model, model),
        "--data": (config.data, data),
        "--rules": (config.rules, str(choose_rules(config, model_of(config)))),
        "--init-from": (str(config.init_from), weights_sample(config.init_from)),
    }
    facts = {name: _by_content(*content) for name, content in contents.items()}
    for name, value in flat_settings(config).items():
        if name not in MAY_DIFFER | FILES:
            facts[f"--{name.replace('_', '-')}"] = Fact(str(value))
    facts["--run"] = Fact(str(config.run.absolute()))
    for package in ("jax", "jaxlib", "optax"):
        facts[f"version of {package}"] = Fact(_version(package))
    facts["version of meshwright"] = Fact(f"{meshwright.__version__} (source {_source()})")
    facts |= {option: Fact(str(getattr(jax.config, option, None))) for option in JAX_OPTIONS}
    facts |= {name: Fact(os.environ.get(name, "not set")) for name in VARIABLES}
    return facts | {f"MODEL's {name}": Fact(json.dumps(value)) for name, value in model.items()}


def _by_content(name: str, content: Any) -> Fact:
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return Fact(digest, name)


def weights_sample(folder: Path | None) -> Any:
    """Sizes of the files of weights, and a checksum of parts of each: all may be terabytes."""
    if folder is None:
        return None
    samples = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            size, digest = file.stat().st_size, hashlib.sha256()
            with file.open("rb") as stream:
                for i in range(SAMPLES):
                    stream.seek(i * max(size - SAMPLE_BYTES, 0) // (SAMPLES - 1))
                    digest.update(stream.read(SAMPLE_BYTES))
            samples[file.name] = size, digest.hexdigest()
    except OSError as reason:
        raise MeshwrightError(
            f"init_from {str(folder)!r} cannot be read: {reason.strerror}"
        ) from None
    return samples


def _version(package: str) -> str:
    if package == "jax":
        return jax.__version__
    return importlib.metadata.version(package)


@functools.cache
def _source() -> str:
    """A checksum of our own code: one version can be installed in two states."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:8]

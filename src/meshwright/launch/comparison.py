"""Facts that processes compare before they work together: settings, files, versions.

Files are compared by what is in them, so that each host may keep them elsewhere.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import typing
from pathlib import Path
from typing import Any

import meshwright
from meshwright.errors import MeshwrightError
from meshwright.launch.agreement import Fact

JAX_OPTIONS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl",
    "jax_threefry_partitionable", "jax_numpy_dtype_promotion",
)  # fmt: skip
VARIABLES = ("MESHWRIGHT_MOSAIC",)
SAMPLES, SAMPLE_BYTES = 64, 1 << 14  # of a file of weights


def flat_settings(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every setting by its dotted name: `{"batch": 32, …, "optimizer.learning_rate": 3e-4}`."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        nested = dataclasses.is_dataclass(value)
        flat |= flat_settings(value, f"{name}.") if nested else {name: value}
    return flat


def convert_paths(config: Any) -> None:
    """In __post_init__: a path may be given as text, and text that names a file as a path."""
    config_type: type = type(config)
    for name, kinds in _field_types(config_type).items():
        value = getattr(config, name)
        if isinstance(value, str) and Path in kinds:
            object.__setattr__(config, name, Path(value))
        elif isinstance(value, os.PathLike) and Path not in kinds and str in kinds:
            object.__setattr__(config, name, os.fspath(value))
        elif Path in kinds and not isinstance(value, kinds):
            raise MeshwrightError(f"{name}={value!r} is not a path; give text or a pathlib.Path")


@functools.cache
def _field_types(kind: type) -> dict[str, tuple[type, ...]]:
    """The types that each field of a dataclass may have."""
    hints = typing.get_type_hints(kind)
    return {
        name: tuple(t for t in (hint, *typing.get_args(hint)) if isinstance(t, type))
        for name, hint in hints.items()
    }


def by_content(name: str, content: Any) -> Fact:
    """A fact that is shown by a name and compared by its content, which must be JSON."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return Fact(digest, name)


def software_facts(*packages: str) -> dict[str, Fact]:
    """Versions of jax, of these packages and of meshwright, and options that change results."""
    import jax

    facts = {"version of jax": Fact(jax.__version__)}
    for package in packages:
        facts[f"version of {package}"] = Fact(importlib.metadata.version(package))
    facts["version of meshwright"] = Fact(f"{meshwright.__version__} (source {_source()})")
    facts |= {option: Fact(str(getattr(jax.config, option, None))) for option in JAX_OPTIONS}
    return facts | {name: Fact(os.environ.get(name, "not set")) for name in VARIABLES}


def weights_sample(folder: Path) -> dict[str, list[Any]]:
    """Sizes of the files of weights, and a checksum of parts of each: all may be terabytes.

    It is plain JSON data.
    """
    samples: dict[str, list[Any]] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            size, digest = file.stat().st_size, hashlib.sha256()
            with file.open("rb") as stream:
                for i in range(SAMPLES):
                    stream.seek(i * max(size - SAMPLE_BYTES, 0) // (SAMPLES - 1))
                    digest.update(stream.read(SAMPLE_BYTES))
            samples[file.name] = [size, digest.hexdigest()]
    except OSError as reason:
        raise MeshwrightError(
            f"weights in {str(folder)!r} cannot be read: {reason.strerror}"
        ) from None
    return samples


@functools.cache
def _source() -> str:
    """A checksum of our own code: one version can be installed in two states."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:8]

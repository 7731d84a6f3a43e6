"""Adapters that an engine serves beside each other: their factors, and who uses which slot."""

import dataclasses
import itertools
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.layouts import fit
from meshwright.models import (
    ADAPTER,
    LoraConfig,
    abstract_arrays,
    hf_names,
    serving_of,
    with_adapter,
)
from meshwright.serving.abstract_weights import adapter_targets, repeat_kv_heads
from meshwright.serving.settings import EngineConfig, served_config
from meshwright.serving.source import Adapter, Source, adapter_source


def with_adapters(source: Source, folders: Mapping[str, str | os.PathLike[str]]) -> Source:
    """The model with adapters that an engine serves beside it, by name."""
    for name in folders:
        check_name(name)
    adapters = {name: adapter_source(folder, source) for name, folder in folders.items()}
    return dataclasses.replace(source, adapters=adapters)


def with_slots(config: EngineConfig, source: Source) -> EngineConfig:
    """The settings of an engine with slots for the adapters of a model."""
    count = len(source.adapters)
    most = config.max_adapters or count
    if count > most:
        raise MeshwrightError(
            f"{count} adapters are named, and max_adapters={most}; give {count} or more, or leave "
            "it out"
        )
    if most and serving_of(source.config).adapter is None:
        raise MeshwrightError(
            f"{source.name}: only decoders take adapters by name; merge one into this model: "
            "meshwright generate or serve with --adapter FOLDER"
        )
    ranks = [adapter.lora.rank for adapter in source.adapters.values()]
    rank = config.max_adapter_rank or max(ranks, default=config.adapter_rank)
    return dataclasses.replace(config, max_adapters=most, max_adapter_rank=rank)


def check_name(name: str) -> None:
    """Raise a MeshwrightError for what cannot be the name of an adapter."""
    if not name or ":" in name or name != name.strip():
        raise MeshwrightError(
            f"{name!r} cannot be the name of an adapter: it must have a character, and no ':' and "
            "no spaces around it"
        )


def load_factors(source: Source, adapter: Adapter, mesh: Mesh, rank: int) -> Any:
    """The factors of an adapter for all matrices of the layers, as a mesh holds them.

    They are padded with zeros to `rank`, and zeros where it adapts nothing.
    """
    if adapter.lora.rank > rank:
        raise MeshwrightError(
            f"the adapter in {adapter.folder} has rank {adapter.lora.rank}, the engine has room "
            f"for {rank}; start it with --engine.max-adapter-rank {adapter.lora.rank}"
        )
    config, lora = source.config, adapter.lora
    specs = with_adapter(abstract_arrays(config), lora, jnp.float32, hf_names(config))[ADAPTER]
    if any(spec.kind == "expert" for spec in jax.tree.leaves(specs)):
        raise MeshwrightError(
            f"the adapter in {adapter.folder} adapts experts, which an engine has no slots for; "
            f"serve it merged: --adapter {adapter.folder}"
        )
    read = adapter.read(adapter_targets(config, lora, mesh))[ADAPTER]
    every = LoraConfig(rank)
    targets = adapter_targets(served_config(config, mesh.shape), every, mesh)[ADAPTER]

    def padded(target: Any, array: Any, spec: Any) -> Any:
        if isinstance(target, dict):
            return {
                name: padded(target[name], (array or {}).get(name), (spec or {}).get(name))
                for name in target
            }
        if array is None:
            return jnp.zeros(target.shape, target.dtype, device=target.sharding)
        return fit(repeat_kv_heads(array, target, spec), target)

    factors = padded(targets, read, specs)
    with jax.set_mesh(mesh):
        if not bool(_all_finite(factors)):  # times the zeros of other requests they would be NaN
            raise MeshwrightError(f"the adapter in {adapter.folder} has NaN or infinite numbers")
    return factors


@jax.jit
def _all_finite(tree: Any) -> jax.Array:
    sums = [jnp.sum(jnp.abs(array)) for array in jax.tree.leaves(tree)]
    return jnp.isfinite(jnp.stack(sums)).all()


@dataclasses.dataclass(eq=False)
class LoadedAdapter:
    """An adapter in a slot."""

    slot: int
    number: int  # of its load: keys that another one wrote are never reused
    adapter: Adapter
    users: int = 0  # requests that run or wait
    unloaded: bool = False  # its slot is free after the last of them


class AdapterTable:
    """Which adapter is in which slot; one thread changes it, any may read `loaded`."""

    def __init__(self, adapters: Mapping[str, Adapter], slots: int) -> None:
        self._numbers = itertools.count(1)
        self._free = list(range(slots, 0, -1))
        self.slots = slots
        self.loaded: Mapping[str, LoadedAdapter] = {}
        for name, adapter in adapters.items():
            self.add(name, adapter)

    def find(self, name: str) -> LoadedAdapter:
        found = self.loaded.get(name)
        if found is None:
            hint = did_you_mean(name, self.loaded) if self.loaded else "; none is loaded"
            raise MeshwrightError(f"no adapter is called {name!r}{hint}")
        return found

    def take(self, name: str) -> LoadedAdapter:
        """An adapter with one more request, until `release`."""
        found = self.find(name)
        found.users += 1
        return found

    def check_new(self, name: str) -> None:
        """Raise a MeshwrightError if an adapter of this name cannot be added."""
        check_name(name)
        if name in self.loaded:
            raise MeshwrightError(f"an adapter is called {name!r} already; unload it first")
        if not self._free:
            raise MeshwrightError(
                f"all {self.slots} slots of adapters are in use (--engine.max-adapters); unload "
                "one, whose slot is free when its last request has ended"
                if self.slots
                else "this engine has no slots of adapters; start it with --engine.max-adapters"
            )

    def add(self, name: str, adapter: Adapter) -> LoadedAdapter:
        """Give an adapter a free slot."""
        self.check_new(name)
        added = LoadedAdapter(self._free.pop(), next(self._numbers), adapter)
        self.loaded = {**self.loaded, name: added}
        return added

    def remove(self, name: str) -> None:
        """Take no more requests for an adapter."""
        removed = self.find(name)
        self.loaded = {other: each for other, each in self.loaded.items() if other != name}
        removed.unloaded = True
        self._free_if_unused(removed)

    def release(self, used: LoadedAdapter) -> None:
        """One request less."""
        used.users -= 1
        self._free_if_unused(used)

    def _free_if_unused(self, adapter: LoadedAdapter) -> None:
        if adapter.unloaded and not adapter.users:
            self._free.append(adapter.slot)

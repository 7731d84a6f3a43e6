"""Data-parallel replicas behind one front end: each request goes to the least loaded engine.

    engine = start_engine(source, generation_mesh("dp=2,tp=4"), jnp.bfloat16)

A mesh with dp gets an engine for each of its groups of devices; the others work together on each
step.
"""

import dataclasses
import functools
import itertools
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from meshwright.serving.adapters import with_slots
from meshwright.serving.engine import Engine
from meshwright.serving.job import Job
from meshwright.serving.request import Completion, Delta, EngineStats, Request
from meshwright.serving.settings import EngineConfig
from meshwright.serving.source import Adapter, Model, Source, load_weights


def start_engine(
    source: Source,
    mesh: Mesh,
    dtype: Any = jnp.float32,
    config: EngineConfig | None = None,
    progress: Callable[[str], None] | None = None,
) -> "Engine | Replicas":
    """Load a model and compile its programs: one engine, or one for each index of dp."""
    config = with_slots(config or EngineConfig(), source)
    return engine_of(load_weights(source, mesh, dtype), config, progress, release=True)


def engine_of(
    model: Model,
    config: EngineConfig | None = None,
    progress: Callable[[str], None] | None = None,
    *,
    release: bool = False,
) -> "Engine | Replicas":
    """Engines of a loaded model, as `start_engine`; `release` frees the model's own weights."""
    engines = [
        Engine(part, config, progress=progress, release=release) for part in _replica_models(model)
    ]
    return engines[0] if len(engines) == 1 else Replicas(engines)


def _replica_models(model: Model) -> list[Model]:
    """The model on the mesh of each index of dp, with the arrays that its devices hold."""
    meshes = replica_meshes(model.mesh)
    if len(meshes) == 1:
        return [model]

    def on(mesh: Mesh) -> Model:
        def part(array: jax.Array) -> jax.Array:
            shards = {shard.device: shard.data for shard in array.addressable_shards}
            place = NamedSharding(mesh, array.sharding.spec)  # type: ignore[attr-defined]
            arrays = [shards[device] for device in mesh.devices.flat]
            return jax.make_array_from_single_device_arrays(array.shape, place, arrays)

        return dataclasses.replace(model, params=jax.tree.map(part, model.params), mesh=mesh)

    return [on(mesh) for mesh in meshes]


def replica_meshes(mesh: Mesh) -> list[Mesh]:
    """The mesh of each index of dp, with dp=1.

    >>> [dict(part.shape) for part in replica_meshes(jax.make_mesh((1, 1), ("dp", "tp")))]
    [{'dp': 1, 'tp': 1}]
    """
    if mesh.shape.get("dp", 1) == 1:
        return [mesh]
    parts = np.split(mesh.devices, mesh.shape["dp"], axis=mesh.axis_names.index("dp"))
    return [jax.sharding.Mesh(part, mesh.axis_names, axis_types=mesh.axis_types) for part in parts]


class Replicas:
    """Several engines of one model, used as one."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        self._adapters_change = threading.Lock()  # in all engines, or in none
        self._names = itertools.count(1)
        self._loads = [0] * len(self.engines)

    def __enter__(self) -> "Replicas":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_ready(self) -> bool:
        return all(engine.is_ready for engine in self.engines)

    @property
    def failure(self) -> str | None:
        return next((engine.failure for engine in self.engines if engine.failure), None)

    @property
    def max_length(self) -> int:
        return self.engines[0].max_length

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        """Yield deltas as they come; closing the iterator cancels the request."""
        if not request.id:  # engines number theirs from 1
            request = dataclasses.replace(request, id=f"replicated-{next(self._names)}")
        index = min(range(len(self.engines)), key=lambda i: self._loads[i])
        self._loads[index] += 1
        deltas = self.engines[index].stream(request)
        try:
            async for delta in deltas:
                yield delta
        finally:
            self._loads[index] -= 1
            await deltas.aclose()  # type: ignore[attr-defined]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Run requests to their end; the results are in the order of the requests."""
        count = len(self.engines)
        with ThreadPoolExecutor(count) as pool:
            parts = list(
                pool.map(
                    lambda i: self.engines[i].generate(requests[i::count]),
                    range(count),
                )
            )
        return [parts[i % count][i // count] for i in range(len(requests))]

    def submit(self, requests: Sequence[Request], sink: Callable[[int, Delta], None]) -> list[Job]:
        """Start requests; `sink` gets (index of the request, delta), in the engines' threads."""
        count = len(self.engines)

        def deliver(first: int, index: int, delta: Delta) -> None:
            sink(first + count * index, delta)

        parts = [
            engine.submit(requests[i::count], functools.partial(deliver, i))
            for i, engine in enumerate(self.engines)
        ]
        return [parts[i % count][i // count] for i in range(len(requests))]

    def cancel(self, request_id: str) -> None:
        for engine in self.engines:
            engine.cancel(request_id)

    def update_weights(self, params: Any, adapter_scale: float | None = None) -> None:
        """As `Engine.update_weights`, of each engine."""
        for engine in self.engines:
            engine.update_weights(params, adapter_scale)

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters that are loaded, by name."""
        return self.engines[0].adapters

    def load_adapter(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Load an adapter in every engine, or in none."""
        done: list[Engine] = []
        with self._adapters_change:
            try:
                for engine in self.engines:
                    engine.load_adapter(name, folder)
                    done.append(engine)
            except Exception:
                for engine in done:
                    engine.unload_adapter(name)
                raise

    def unload_adapter(self, name: str) -> None:
        with self._adapters_change:
            for engine in self.engines:
                engine.unload_adapter(name)

    def stats(self) -> EngineStats:
        """Sums over the engines."""
        each = [engine.stats() for engine in self.engines]
        numbers = {
            field.name: sum(getattr(stats, field.name) for stats in each)
            for field in dataclasses.fields(EngineStats)
            if field.name != "finished"
        }
        finished: Counter[str] = Counter()
        for stats in each:
            finished.update(stats.finished)
        return EngineStats(**numbers, finished=dict(finished))

    def fail(self, reason: str) -> None:
        """End every request with this error, and take no more."""
        with ThreadPoolExecutor(len(self.engines)) as pool:
            list(pool.map(lambda engine: engine.fail(reason), self.engines))

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

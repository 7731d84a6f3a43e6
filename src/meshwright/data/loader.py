"""batch = f(step): the arrays of any step; each process reads only what its devices hold."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshwright.arithmetic import whole_number
from meshwright.data.ahead import AHEAD, THREADS, read_ahead
from meshwright.data.mixture import Mixture
from meshwright.data.samples import (
    PADDING,
    AllSamples,
    HeldOutSamples,
    Samples,
    TrainingSamples,
    training_sequences,
)
from meshwright.data.sequences import (
    FIELDS,
    NO_TARGET,
    WEIGHTS,
    Batch,
    empty_sequences,
    read_sequences,
    sequence_table,
)
from meshwright.errors import MeshwrightError
from meshwright.present import count, nearest_multiples

Bounds = tuple[tuple[int, int], ...]  # (start, stop) for each dim of a batch
DeviceBatch = dict[str, jax.Array]


class Objective(Protocol):
    """What an example is: from the tokens of a sequence to the fields of a batch."""

    @property
    def lengths(self) -> Mapping[str, int]:
        """The length of each field."""
        ...

    def fields(self, sequences: Batch, samples: np.ndarray[Any, Any]) -> Batch:
        """Fields [examples, length] from sequences [examples, seq]; `samples` number them."""
        ...

    def describe(self) -> dict[str, Any]:
        """Plain data that decides the fields."""
        ...


@dataclass(frozen=True)
class Loader:
    """Batches by step; see `training_loader` and `held_out_loader`."""

    mixture: Mixture
    samples: Samples
    batch: int  # sequences per step, over all processes and micro-batches
    seq: int
    accumulation: int = 1
    steps: int | None = None  # None: endless
    objective: Objective | None = None  # None: predict the next token
    packed: bool = True  # False: every document has a sequence of its own

    def __post_init__(self) -> None:
        for name in ("batch", "seq", "accumulation"):
            if whole_number(getattr(self, name), name) < 1:
                raise MeshwrightError(f"{name}={getattr(self, name)!r} must be at least 1")
        if self.batch % self.accumulation:
            raise MeshwrightError(
                f"batch={self.batch} is not divisible by accumulation={self.accumulation}; "
                f"batch={nearest_multiples(self.batch, self.accumulation)} would fit"
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """[accumulation, batch // accumulation, seq]."""
        return self.accumulation, self.batch // self.accumulation, self.seq

    @property
    def lengths(self) -> Mapping[str, int]:
        """The length of each field of a batch."""
        if self.objective is not None:
            return self.objective.lengths
        return dict.fromkeys((*FIELDS, WEIGHTS) if self.is_weighted else FIELDS, self.seq)

    @property
    def is_weighted(self) -> bool:
        """Whether batches have the field `weights`."""
        return any(store.is_weighted for store in self.mixture.stores)

    def host_batch(self, step: int) -> Batch:
        """The whole batch as NumPy arrays."""
        return self.read(step, tuple((0, size) for size in self.shape))

    def read(self, step: int, bounds: Bounds) -> Batch:
        """The part of a batch inside the bounds; only that part is read."""
        (a0, a1), (r0, r1), (start, stop) = bounds
        micro, index = np.meshgrid(np.arange(a0, a1), np.arange(r0, r1), indexing="ij")
        samples = step * self.batch + micro.ravel() * self.shape[1] + index.ravel()
        sources, sequences = self.samples.locate(samples)
        batch = empty_sequences(len(samples), stop - start, self.is_weighted)
        for i, store in enumerate(self.mixture.stores):
            (mine,) = np.nonzero((sources == i) & (sequences != PADDING))
            if len(mine):
                part = read_sequences(
                    store, sequences[mine].tolist(), self.seq, start, stop, packed=self.packed
                )
                for name, array in part.items():
                    batch[name][mine] = array
                if self.is_weighted and not store.is_weighted:
                    batch[WEIGHTS][mine] = part["targets"] != NO_TARGET
        if self.objective is not None:
            batch = self.objective.fields(batch, samples)
            batch["targets"] = np.where(
                (sequences == PADDING)[:, None], NO_TARGET, batch["targets"]
            )
        shape = (a1 - a0, r1 - r0)
        return {name: array.reshape(*shape, -1) for name, array in batch.items()}

    def device_batch(self, step: int, sharding: NamedSharding) -> DeviceBatch:
        """The batch as global arrays; this process reads only what its own devices hold."""
        self.check_sharding(sharding)
        return self._place(self._local_parts(step, sharding), sharding)

    def iterate(
        self,
        from_step: int,
        sharding: NamedSharding,
        *,
        threads: int = THREADS,
        ahead: int = AHEAD,
    ) -> Iterator[tuple[int, DeviceBatch]]:
        """Yield (step, batch) from `from_step`, reading `ahead` batches in the background."""
        self.check_sharding(sharding)

        def read(step: int) -> dict[Bounds, Batch]:
            return self._local_parts(step, sharding)

        for step, parts in read_ahead(read, from_step, self.steps, threads, ahead):
            yield step, self._place(parts, sharding)

    def iterate_part(
        self, from_step: int, sequences: tuple[int, int]
    ) -> Iterator[tuple[int, Batch]]:
        """Yield (step, `sequences` of each micro-batch), reading ahead in the background."""

        def read(step: int) -> Batch:
            return self.read(step, ((0, self.accumulation), sequences, (0, self.seq)))

        return read_ahead(read, from_step, self.steps)

    def check_sharding(self, sharding: NamedSharding) -> None:
        """Raise a MeshwrightError if the sharding does not divide the batch evenly."""
        spec = tuple(sharding.spec)
        if len(spec) > 3:
            raise MeshwrightError(
                f"sharding {sharding.spec} has {len(spec)} dims; a batch has 3: "
                "[accumulation, batch, seq]"
            )
        names = ("accumulation", f"batch={self.batch} / accumulation={self.accumulation}", "seq")
        for name, size, axes in zip(names, self.shape, spec, strict=False):
            axes = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
            parts = math.prod(sharding.mesh.shape[axis] for axis in axes)
            if size % parts:
                raise MeshwrightError(
                    f"{name} = {size} is not divisible by {'·'.join(axes)} = {parts}; "
                    f"{nearest_multiples(size, parts)} would fit"
                )

    def remarks(self) -> Iterator[str]:
        """What is read of stores whose documents are not cut into several sequences, in words."""
        for store in self.mixture.stores:
            table = sequence_table(store, self.seq, self.packed)
            if table is None:
                continue
            noun = "document" if store.weights is None else "example"
            documents = store.documents
            if store.holds_pairs:
                noun, documents = "pair", documents // 2
            filled = float(table.lengths.sum()) / (self.seq * len(table))
            line = (
                f"data {store.name}: {count(documents, noun)} in "
                f"{count(len(table), 'sequence')} of {self.seq} tokens, {filled:.0%} filled"
            )
            if table.cut and store.holds_pairs:
                line += f"; of {count(table.cut, noun)} with more the longer answer loses its end"
            elif table.cut:
                line += f"; of {count(table.cut, noun)} only the first {self.seq} tokens are read"
            yield line

    def describe(self) -> dict[str, Any]:
        """Plain data that determines every batch: equal descriptions mean equal batches."""
        samples = self.samples
        objective = {} if self.objective is None else {"objective": self.objective.describe()}
        packed = {} if self.packed else {"packed": False}
        return (
            self.mixture.describe()
            | objective
            | packed
            | {
                "batch": self.batch,
                "seq": self.seq,
                "held_out": getattr(samples, "held_out", 0),
                "seed": getattr(samples, "seed", None),
            }
        )

    def _local_parts(self, step: int, sharding: NamedSharding) -> dict[Bounds, Batch]:
        # a part that several devices hold is read once
        indices = sharding.addressable_devices_indices_map(self.shape).values()
        wanted = dict.fromkeys(self._bounds(index) for index in indices)
        return {bounds: self.read(step, bounds) for bounds in wanted}

    def _place(self, parts: dict[Bounds, Batch], sharding: NamedSharding) -> DeviceBatch:
        def part(name: str) -> Callable[[Any], np.ndarray[Any, Any]]:
            return lambda index: parts[self._bounds(index)][name]

        return {
            name: jax.make_array_from_callback(
                (*self.shape[:2], length),
                sharding,
                part(name),
                dtype=np.float32 if name == WEIGHTS else np.int32,
            )
            for name, length in self.lengths.items()
        }

    def _bounds(self, index: Any) -> Bounds:
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, self.shape, strict=True))
        # the fields of an objective are made of whole sequences
        return bounds if self.objective is None else (*bounds[:2], (0, self.seq))


def training_loader(
    mixture: Mixture,
    *,
    batch: int,
    seq: int,
    accumulation: int = 1,
    seed: int | None = 0,
    held_out: int = 0,
    objective: Objective | None = None,
    packed: bool = True,
) -> Loader:
    """Endless batches of shuffled, mixed sequences; the last `held_out` of each store are left out.

    `seed=None`: in packed order. `packed=False`: every document has a sequence of its own.

    >>> loader = training_loader(Mixture.parse("embedded"), batch=8, seq=64, accumulation=2)
    >>> loader.host_batch(step=1000)["tokens"].shape
    (2, 4, 64)
    """
    samples = TrainingSamples(mixture, seq, whole_number(held_out, "held_out"), seed, packed)
    loader = Loader(mixture, samples, batch, seq, accumulation, objective=objective, packed=packed)
    for store in mixture.stores:
        training_sequences(store, seq, held_out, packed)  # fail here, not in a reading thread
    return loader


def held_out_loader(
    mixture: Mixture,
    *,
    batch: int,
    seq: int,
    held_out: int,
    objective: Objective | None = None,
    packed: bool = True,
) -> Loader:
    """The held-out sequences once, in order; padding fills the last batch."""
    if whole_number(held_out, "held_out") < 1:
        raise MeshwrightError("evaluation needs held-out sequences; give at least 1")
    samples = HeldOutSamples(mixture, seq, held_out, packed)
    steps = -(-samples.count // max(batch, 1))
    loader = Loader(mixture, samples, batch, seq, steps=steps, objective=objective, packed=packed)
    for store in mixture.stores:
        training_sequences(store, seq, held_out, packed)
    return loader


def all_sequences_loader(
    mixture: Mixture,
    *,
    batch: int,
    seq: int,
    objective: Objective | None = None,
    packed: bool = True,
) -> Loader:
    """All sequences of all stores once, in order; padding fills the last batch."""
    samples = AllSamples(mixture, seq, packed)
    steps = -(-samples.count // max(batch, 1))
    return Loader(mixture, samples, batch, seq, steps=steps, objective=objective, packed=packed)

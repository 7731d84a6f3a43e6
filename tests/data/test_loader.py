"""The loader: batch = f(step), on any sharding and any number of processes."""

import json
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import islice
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.patience import PATIENCE_S, eventually
from tests.processes import free_port

from meshwright.data import (
    FIELDS,
    NO_TARGET,
    ByteTokenizer,
    Mixture,
    TokenStore,
    embedded_corpus,
    held_out_loader,
    sequence_count,
    training_loader,
)
from meshwright.data.ahead import read_ahead
from meshwright.errors import MeshwrightError

LAYOUTS = {
    "whole": P(),
    "batch": P(None, ("dp", "fsdp"), None),
    "batch and seq": P(None, ("dp", "fsdp"), "sp"),
    "seq": P(None, None, "sp"),
    "seq over two": P(None, "dp", ("fsdp", "sp")),
}


@pytest.fixture
def mesh(eight: list[jax.Device]) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(eight).reshape(2, 2, 2), ("dp", "fsdp", "sp"))


def mixture() -> Mixture:
    other = TokenStore.of_documents(["xyz " * 200, "uvw " * 300], ByteTokenizer(), name="other")
    return Mixture.of([embedded_corpus(), other], [3, 1])


class Watched:
    """Stands for a token array and notes which tokens were read."""

    def __init__(self, tokens: Any):
        self.tokens, self.read = tokens, np.zeros(len(tokens), int)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> Any:
        self.read[part] += 1
        return self.tokens[part]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_on_devices_is_the_batch_of_the_host(
    mesh: jax.sharding.Mesh, layout: str, accumulation: int
) -> None:
    loader = training_loader(mixture(), batch=16, seq=32, accumulation=accumulation)
    sharding = NamedSharding(mesh, LAYOUTS[layout])
    for step in (0, 7, 12345):
        host, device = loader.host_batch(step), loader.device_batch(step, sharding)
        for name in FIELDS:
            assert device[name].shape == (accumulation, 16 // accumulation, 32)
            assert device[name].dtype == np.int32
            assert device[name].sharding == sharding
            np.testing.assert_array_equal(np.asarray(device[name]), host[name])


def test_accumulation_cuts_the_same_batch_into_parts() -> None:
    whole = training_loader(mixture(), batch=8, seq=16).host_batch(3)
    parts = training_loader(mixture(), batch=8, seq=16, accumulation=4).host_batch(3)
    for name in FIELDS:
        np.testing.assert_array_equal(parts[name].reshape(1, 8, 16), whole[name])


def test_each_token_is_read_once_and_only_where_a_device_holds_it(
    mesh: jax.sharding.Mesh,
) -> None:
    watched = Watched(embedded_corpus().tokens)
    store = replace(embedded_corpus(), tokens=watched)  # type: ignore[arg-type]
    loader = training_loader(Mixture.of([store]), batch=8, seq=16)
    sharding = NamedSharding(mesh, P(None, "dp", None))  # 4 devices hold each half
    loader.device_batch(0, sharding)
    # the last token of a sequence is the target of its last position, and may open another sequence
    assert set(watched.read.tolist()) <= {0, 1, 2}
    assert watched.read.sum() == 8 * 17

    watched.read[:] = 0
    loader.read(0, ((0, 1), (4, 8), (8, 16)))
    assert watched.read.sum() == 4 * 9


def test_mixture_and_shuffle_reach_the_batch() -> None:
    loader = training_loader(mixture(), batch=40, seq=8, seed=3)
    tokens = loader.host_batch(0)["tokens"][0]
    from_other = np.isin(tokens, np.frombuffer(b"xyz uvw\x00", np.uint8)).all(axis=1)
    assert from_other.sum() == 10  # one of four
    plain = training_loader(Mixture.of([embedded_corpus()]), batch=4, seq=8, seed=None)
    np.testing.assert_array_equal(
        plain.host_batch(1)["tokens"].ravel(), embedded_corpus().tokens[32:64]
    )


def test_reading_ahead_gives_the_same_batches_from_any_step(
    mesh: jax.sharding.Mesh,
) -> None:
    loader = training_loader(mixture(), batch=8, seq=32, accumulation=2)
    sharding = NamedSharding(mesh, LAYOUTS["batch and seq"])
    found = list(islice(loader.iterate(1000, sharding), 6))
    assert [step for step, _ in found] == list(range(1000, 1006))
    for step, batch in found:
        np.testing.assert_array_equal(
            np.asarray(batch["tokens"]), loader.host_batch(step)["tokens"]
        )


def test_reading_runs_ahead_and_stops_when_it_is_left() -> None:
    seen: list[int] = []
    lock = threading.Lock()

    def read(step: int) -> int:
        with lock:
            seen.append(step)
        return step

    steps = read_ahead(read, 5, None, threads=2, ahead=4)
    assert next(steps) == (5, 5)
    eventually(lambda: len(seen) >= 4)
    assert set(seen) >= {5, 6, 7, 8}
    steps.close()  # type: ignore[attr-defined]
    assert max(seen) < 20


def test_an_error_while_reading_reaches_the_caller() -> None:

    def read(step: int) -> int:
        if step == 3:
            raise MeshwrightError("the disk is gone")
        return step

    steps = read_ahead(read, 0, 10, threads=2, ahead=4)
    assert [next(steps)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(MeshwrightError, match="the disk is gone"):
        next(steps)


def test_evaluation_meets_every_held_out_token_once(mesh: jax.sharding.Mesh) -> None:
    data = Mixture.of([embedded_corpus()])
    loader = held_out_loader(data, batch=8, seq=64, held_out=13)
    sharding = NamedSharding(mesh, LAYOUTS["batch"])
    batches = [batch for _, batch in loader.iterate(0, sharding)]
    assert len(batches) == loader.steps == 2
    segments = np.concatenate([np.asarray(batch["segments"])[0] for batch in batches])
    assert (segments[:13].max(axis=1) > 0).all()
    assert (segments[13:] == 0).all()
    assert (np.asarray(batches[1]["targets"])[0, 5:] == NO_TARGET).all()
    # its first sequence is the one training stops before
    first = (sequence_count(embedded_corpus(), 64) - 13) * 64
    np.testing.assert_array_equal(
        np.asarray(batches[0]["tokens"])[0, 0], embedded_corpus().tokens[first : first + 64]
    )


def test_the_description_decides_the_batches() -> None:
    make = training_loader
    data = mixture()
    same = [make(data, batch=8, seq=16), make(data, batch=8, seq=16, accumulation=4)]
    assert same[0].describe() == same[1].describe()
    others = [
        make(data, batch=4, seq=16), make(data, batch=8, seq=8), make(data, batch=8, seq=16, seed=1),
        make(data, batch=8, seq=16, seed=None), make(data, batch=8, seq=16, held_out=2),
    ]  # fmt: skip
    described = {json.dumps(loader.describe()) for loader in [same[0], *others]}
    assert len(described) == 6


def test_sizes_that_do_not_fit_are_named(mesh: jax.sharding.Mesh) -> None:
    data = Mixture.of([embedded_corpus()])

    def batch_on(spec: P, **sizes: int) -> Any:
        return training_loader(data, **sizes).device_batch(0, NamedSharding(mesh, spec))  # type: ignore[arg-type]

    for mistake, words in [
        (lambda: training_loader(data, batch=9, seq=16, accumulation=2), "batch=8 or 10 would fit"),
        (lambda: training_loader(data, batch=0, seq=16), "batch=0 must be at least 1"),
        (lambda: training_loader(data, batch=8, seq=16.5), "not a whole number"),  # type: ignore[arg-type]
        (lambda: training_loader(data, batch=8, seq=64, held_out=10**6), "hold out fewer than"),
        (lambda: training_loader(data, batch=8, seq=64, held_out=-1), "held_out=-1"),
        (lambda: held_out_loader(data, batch=8, seq=64, held_out=0), "give at least 1"),
        (lambda: held_out_loader(data, batch=0, seq=64, held_out=2), "batch=0"),
        (lambda: batch_on(P(None, ("dp", "fsdp")), batch=12, seq=16, accumulation=2), "= 6 is not divisible by dp·fsdp = 4; 4 or 8 would fit"),
        (lambda: batch_on(P(None, None, "sp"), batch=4, seq=17), "seq = 17 is not divisible by sp = 2"),
        (lambda: batch_on(P(None, None, None, "sp"), batch=4, seq=16), "a batch has 3"),
    ]:  # fmt: skip
        with pytest.raises(MeshwrightError) as said:
            mistake()
        assert words in str(said.value)


PROGRAM = """
import json, sys
from dataclasses import replace
import jax
import numpy as np
process, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
from jax.sharding import NamedSharding, PartitionSpec as P
from meshwright.data import Mixture, embedded_corpus, training_loader

class Watched:
    def __init__(self, tokens):
        self.tokens, self.read = tokens, 0
    def __len__(self):
        return len(self.tokens)
    def __getitem__(self, part):
        self.read += part.stop - part.start
        return self.tokens[part]

watched = Watched(embedded_corpus().tokens)
store = replace(embedded_corpus(), tokens=watched)
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "sp"))
loader = training_loader(Mixture.of([store]), batch=8, seq=32, accumulation=2)
expected = training_loader(Mixture.of([embedded_corpus()]), batch=8, seq=32, accumulation=2)
sharding = NamedSharding(mesh, P(None, "fsdp", "sp"))
sums, right = [], True
for step, batch in loader.iterate(5, sharding, threads=1, ahead=1):
    if step == 8:
        break
    for name, array in batch.items():
        host = expected.host_batch(step)[name]
        right &= all((np.asarray(s.data) == host[s.index]).all() for s in array.addressable_shards)
    sums.append(int(jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))(batch["tokens"])))
watched.read = 0
loader.device_batch(0, sharding)
print(json.dumps({"sums": sums, "right": bool(right), "read": watched.read}))
"""


def test_two_processes_each_read_their_half_of_the_batch() -> None:
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(i), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    alone = training_loader(Mixture.of([embedded_corpus()]), batch=8, seq=32)
    sums = [int(alone.host_batch(step)["tokens"].sum()) for step in range(5, 8)]
    for process in processes:
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err[-3000:]
        found = json.loads(out.strip().splitlines()[-1])
        assert found["right"]
        assert found["sums"] == sums
        # 4 of the 8 sequences, each in two halves of 16 tokens and a target
        assert found["read"] == 4 * 2 * 17

"""An engine whose steps run elsewhere, here in another thread, answers as one that runs them."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.patience import PATIENCE_S, eventually
from tests.serving.models import BASE

from meshwright.errors import MeshwrightError
from meshwright.serving import Engine, EngineConfig, Model, Request, Sampling
from meshwright.serving.engine import IN_FLIGHT
from meshwright.serving.executor import Sizes
from meshwright.serving.grammars import Grammar
from meshwright.serving.lockstep import FollowExecutor, RemoteExecutor, _Channel, _Replica
from meshwright.serving.source import generation_mesh
from meshwright.serving.step_messages import pack, unpack

CONFIG = EngineConfig(
    max_batch=4, max_length=64, page_size=8, chunk_shapes=((2, 8),), chunk=16, batch_buckets=(4,),
    pages=12, compile_first=False,
)  # fmt: skip  # few pages: preemption
GREEDY = Sampling(temperature=0)
PENALIZED = Sampling(
    0.9, top_k=20, frequency_penalty=1.5, repetition_penalty=1.2, logit_bias=((7, 3.0),), seed=5
)
REQUESTS = [
    *(Request(prompt, GREEDY, 30) for prompt in ((5, 9, 2, 60, 33, 7, 7, 1, 0), (3,), (8, 30) * 7)),
    Request((9, 4), PENALIZED, 12, logprobs=3),
    Request((1, 2, 3), PENALIZED, 2, prompt_logprobs=2),
]


class Wire:
    """Both ends of a link; messages are packed and unpacked as between processes."""

    def __init__(self) -> None:
        self.replica = _Replica()
        self.channel = _Channel(self, 0, frozenset({1}))  # type: ignore[arg-type]
        self.follower = self.Follower(self.channel)

    def send(self, data: bytes, processes: frozenset[int]) -> None:
        assert processes == {1}
        self.replica.messages.put(unpack(data))

    def cause(self) -> None:
        return None

    class Follower:
        def __init__(self, channel: _Channel) -> None:
            self.channel = channel

        def send(self, data: bytes) -> None:
            self.channel.take(1, unpack(data))

        @contextlib.contextmanager
        def ends_on_error(self) -> Iterator[None]:
            yield


@pytest.fixture(scope="module")
def model(random_model: Callable[..., Model]) -> Model:
    config = dataclasses.replace(BASE, vocab=320)  # the byte tokenizer's 257 and more
    return random_model(config, generation_mesh())


@pytest.fixture(scope="module")
def remote(model: Model) -> Iterator[Engine]:
    wire = Wire()
    executor = FollowExecutor(model.source, model.mesh, "float32", CONFIG, wire.replica.messages)
    wire.follower.send(pack({"replica": 0, "sizes": executor.sizes}))
    wire.replica.start(wire.follower, 0, executor, reports=True)  # type: ignore[arg-type]
    steps = RemoteExecutor(wire.channel, model.source.grammars)
    with Engine(Model(model.source, None, model.mesh), CONFIG, executor=steps) as engine:
        yield engine


def test_steps_that_run_elsewhere_give_the_same_results(remote: Engine, model: Model) -> None:
    requests = list(REQUESTS)
    with contextlib.suppress(ImportError):
        import llguidance  # noqa: F401

        grammars = [Grammar.regex("[a-f]{12}"), Grammar.choice(["yes", "no"])]
        requests += [Request((3, 4), GREEDY, 20, grammar=grammar) for grammar in grammars]
    with Engine(model, CONFIG) as here:
        expected = here.generate(requests)
        assert here.stats().preemptions > 0
    found = remote.generate(requests)
    assert remote.stats().preemptions > 0
    for one, other in zip(found, expected, strict=True):
        assert dataclasses.replace(one, cached_tokens=0) == dataclasses.replace(
            other, cached_tokens=0
        )


def test_a_reason_from_outside_ends_requests_and_refuses_others(model: Model) -> None:
    engine = Engine(model, CONFIG)
    told: list[Any] = []
    try:
        engine.fail("process 1 (node-1) is gone")
        assert (engine.failure, engine.is_ready) == ("process 1 (node-1) is gone", False)
        with pytest.raises(MeshwrightError, match="process 1"):
            told = engine.generate([Request((1,))])
        assert not told
    finally:
        engine.close()


def unanswered(model: Model) -> tuple[Engine, Wire]:
    """An engine whose steps run in a process that never answers, and its link."""
    wire = Wire()
    sizes = Sizes((8, 0), [], 12, 2, "plain", (4,))
    wire.follower.send(pack({"replica": 0, "sizes": sizes}))
    steps = RemoteExecutor(wire.channel, model.source.grammars)
    return Engine(Model(model.source, None, model.mesh), CONFIG, executor=steps), wire


def test_a_step_that_hangs_does_not_keep_the_reason_from_clients(model: Model) -> None:
    engine, _ = unanswered(model)
    threading.Timer(0.5, engine.fail, ["process 1 (node-1) is gone"]).start()
    with pytest.raises(MeshwrightError, match="process 1"):
        engine.generate([Request((1, 2))])
    engine.close()


def test_an_engine_that_is_closed_hears_of_a_lost_process(model: Model) -> None:
    engine, wire = unanswered(model)

    def ask() -> None:
        with pytest.raises(MeshwrightError, match="process 1"):
            engine.generate([Request((1, 2))])

    client = threading.Thread(target=ask)
    client.start()
    # then the engine waits for the first step
    eventually(lambda: wire.replica.messages.qsize() > IN_FLIGHT)
    threading.Timer(0.5, engine.fail, ["process 1 (node-1) is gone"]).start()
    engine.close()  # the step never ends
    client.join(PATIENCE_S)
    assert not client.is_alive()

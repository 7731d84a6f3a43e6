"""An engine over several processes: process 0 plans the steps, and all run the same programs.

Process 0 has the scheduler, and sends the plan of each step to the processes whose devices are in
the mesh before it dispatches the step itself. Nobody waits: tokens stay on the devices, which are
kept in step by the collectives of the model. A replica without a device of process 0 sends back its
tokens.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from meshwright.errors import MeshwrightError
from meshwright.launch import Follower, Leader
from meshwright.models import encodes_prompts
from meshwright.present import mesh_text
from meshwright.serving.adapters import with_slots
from meshwright.serving.engine import Engine
from meshwright.serving.executor import (
    AnyExecutor,
    Executor,
    Read,
    Results,
    Sizes,
    StepPlan,
    masks_of,
    note_unread,
)
from meshwright.serving.grammars import Grammars, Masks
from meshwright.serving.replicas import Replicas, replica_meshes
from meshwright.serving.settings import EngineConfig, longest
from meshwright.serving.source import Adapter, Model, Source, load_weights
from meshwright.serving.step_messages import pack, plan_of, results_of, sizes_of, unpack

_AT_START = "a server of several processes takes adapters at its start: name them in --adapters"


def serve_leader(
    link: Leader,
    source: Source,
    mesh: Mesh,
    dtype: Any,
    config: EngineConfig,
    progress: Callable[[str], None],
) -> Engine | Replicas:
    """Load a model and compile its programs, together with `follow` in the other processes."""
    config = with_slots(config, source)
    config = config.for_encoder() if encodes_prompts(source.config) else config
    meshes = replica_meshes(mesh)
    _check_processes(mesh, meshes)
    channels = [_Channel(link, index, _processes(part)) for index, part in enumerate(meshes)]

    def take(process: int, data: bytes) -> None:
        message = unpack(data)
        channels[message["replica"]].take(process, message)

    link.on_message = take
    engines: dict[int, Engine] = {}
    # those of this process first: the others load theirs at the same time
    for channel in sorted(channels, key=lambda channel: 0 not in channel.processes):
        part = meshes[channel.replica]
        if 0 in channel.processes:
            model = load_weights(source, part, dtype)
            length = longest(config, source.config)
            executor: AnyExecutor = LeadExecutor(model, config, length, channel)
        else:
            progress(f"waiting for process {min(channel.processes)} to compile")
            model = Model(source, None, part)
            executor = RemoteExecutor(channel, source.grammars)
        engines[channel.replica] = Engine(model, config, progress=progress, executor=executor)
        channel.sizes()  # all processes are ready
    parts = [engine for _, engine in sorted(engines.items())]
    return parts[0] if len(parts) == 1 else Replicas(parts)


def serve_follower(
    link: Follower, source: Source, mesh: Mesh, dtype: Any, config: EngineConfig
) -> None:
    """Run what process 0 plans, until it ends."""
    config = with_slots(config, source)
    config = config.for_encoder() if encodes_prompts(source.config) else config
    meshes = replica_meshes(mesh)
    _check_processes(mesh, meshes)
    replicas: dict[int, _Replica] = {}
    for index, part in enumerate(meshes):
        if link.process_id in _processes(part):
            replicas[index] = replica = _Replica()
            executor = FollowExecutor(source, part, dtype, config, replica.messages)
            executor.compile(lambda text: None)
            link.send(pack({"replica": index, "sizes": executor.sizes}))
            reports = link.process_id == min(_processes(part))  # process 0 is not one of them
            replica.start(link, index, executor, reports)
    for data in link:
        message = unpack(data)
        replicas[message["replica"]].messages.put(message)


def _processes(mesh: Mesh) -> frozenset[int]:
    """The processes that have devices of a mesh."""
    return frozenset(device.process_index for device in mesh.devices.flat)


def _check_processes(mesh: Mesh, meshes: list[Mesh]) -> None:
    """Raise a MeshwrightError for a mesh that leaves out a process, or divides them unevenly."""
    groups = [_processes(part) for part in meshes]
    processes = range(jax.process_count())
    numbers = [sum(process in group for group in groups) for process in processes]
    if 0 in numbers:
        raise MeshwrightError(
            f"mesh '{mesh_text(mesh.shape)}' has no device of process {numbers.index(0)}: use a "
            f"mesh of all {jax.device_count()} devices, or start fewer processes"
        )
    if len(set(numbers)) > 1:  # loading a checkpoint needs all processes each time
        raise MeshwrightError(
            f"mesh '{mesh_text(mesh.shape)}': some processes have devices of {min(numbers)} of the "
            f"replicas, others of {max(numbers)}; use a dp that divides the number of processes, "
            f"{len(numbers)}, or that it divides"
        )


class _Channel:
    """What process 0 tells the processes of a replica, and hears from them."""

    def __init__(self, link: Leader, replica: int, processes: frozenset[int]) -> None:
        self.replica, self.processes = replica, processes
        self.compilations = 0
        self._link = link
        self._ready: dict[int, Future[Sizes]] = {process: Future() for process in processes - {0}}
        self._unread: deque[Future[Results]] = deque()

    def send(self, plan: StepPlan) -> None:
        self._send(plan=plan[:3])

    def send_masks(self, plan: StepPlan, masks: Masks) -> None:
        """Only those of sequences that have a grammar."""
        indices = [index for index, _ in plan.constraints]
        self._send(indices=indices, masks=masks[indices])

    def _send(self, **message: Any) -> None:
        self._link.send(pack({"replica": self.replica, **message}), self.processes)

    def take(self, process: int, message: Any) -> None:
        """Note a message of a process; called by the thread that receives it."""
        if "sizes" in message:
            self._ready[process].set_result(sizes_of(message["sizes"]))
        else:
            self.compilations = message["compilations"]
            self._unread.popleft().set_result(results_of(message["results"]))

    def sizes(self) -> list[Sizes]:
        """Those of each other process, when all are ready."""
        return [future.result() for future in self._ready.values()]

    def expect_results(self) -> "Future[Results]":
        """Of the step that is sent next."""
        self._unread.append(Future())
        return self._unread[-1]

    def cause(self) -> str | None:
        return self._link.cause()


class _Replica:
    """A replica in another process than process 0: a thread that does what comes."""

    def __init__(self) -> None:
        self.messages: SimpleQueue[Any] = SimpleQueue()

    def start(self, link: Follower, index: int, executor: "FollowExecutor", reports: bool) -> None:
        """`reports`: whether process 0 needs the tokens from here."""

        def report(read: Read) -> None:
            with link.ends_on_error():  # errors of the device appear here
                results, compilations = read(), executor.compilations
                if not reports:
                    return
                message = {"results": results, "compilations": compilations}
                link.send(pack({"replica": index, **message}))

        def run() -> None:
            reading = ThreadPoolExecutor(1, "meshwright-results")
            with link.ends_on_error():
                while True:
                    read = executor.prepare(plan_of(self.messages.get()["plan"]))()
                    reading.submit(report, read)

        threading.Thread(target=run, name=f"meshwright-replica-{index}", daemon=True).start()


def _refuse_weights(executor: Any, params: Any, adapter_scale: float | None) -> None:
    raise MeshwrightError(
        "the weights of an engine over several processes come from a folder; start one again, or "
        "run the engine in one process"
    )


class LeadExecutor(Executor):
    """Runs steps on devices of this process and perhaps of others."""

    update_weights = _refuse_weights

    def __init__(self, model: Model, config: EngineConfig, length: int, channel: _Channel) -> None:
        super().__init__(model, config, length, release=True)
        self._channel = channel

    def prepare(self, plan: StepPlan) -> Callable[[], Read]:
        run = super().prepare(plan)

        def dispatch() -> Read:
            self._channel.send(plan)
            return run()

        return dispatch

    def read_adapter(self, adapter: Adapter) -> Callable[[int], None]:
        raise MeshwrightError(_AT_START)

    def masks(self, plan: StepPlan) -> Masks | None:
        masks = super().masks(plan)
        if masks is not None:
            self._channel.send_masks(plan, masks)
        return masks

    def cause(self, error: Exception) -> str | None:
        return self._channel.cause()


class FollowExecutor(Executor):
    """Runs steps whose masks come from process 0, behind the plan."""

    def __init__(
        self,
        source: Source,
        mesh: Mesh,
        dtype: Any,
        config: EngineConfig,
        messages: "SimpleQueue[Any]",
    ) -> None:
        super().__init__(
            load_weights(source, mesh, dtype), config, longest(config, source.config), True
        )
        self._messages = messages

    def masks(self, plan: StepPlan) -> Masks | None:
        if plan.choice is None or not plan.choice.masked:
            return None
        message = self._messages.get()
        rows = message["masks"]
        masks = np.full((plan.choice.where.shape[1], rows.shape[1]), -1, np.int32)
        masks[message["indices"]] = rows
        return masks


class _Tokens:
    """The tokens of a step, as an array that is waited for."""

    def __init__(self, results: "Future[Results]") -> None:
        self._results = results

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self._results.result().tokens, dtype)


class RemoteExecutor:
    """Has other processes run the steps."""

    update_weights = _refuse_weights

    def __init__(self, channel: _Channel, grammars: Grammars) -> None:
        self._channel, self._grammars = channel, grammars
        self.sizes = channel.sizes()[0]

    @property
    def compilations(self) -> int:
        return self._channel.compilations

    def compile(self, progress: Callable[[str], None]) -> None:
        """They have."""

    def prepare(self, plan: StepPlan) -> Callable[[], Read]:
        def dispatch() -> Read:
            results = self._channel.expect_results()
            self._channel.send(plan)
            masks = masks_of(plan, self._grammars)
            if masks is not None:
                self._channel.send_masks(plan, masks)
            note_unread(plan, _Tokens(results))
            return results.result

        return dispatch

    def read_adapter(self, adapter: Adapter) -> Callable[[int], None]:
        raise MeshwrightError(_AT_START)

    def cause(self, error: Exception) -> str | None:
        return self._channel.cause()

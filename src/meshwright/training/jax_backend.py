"""Training with JAX: one compiled step, arrays over all devices of all processes.

train(TrainConfig("tiny", steps=200, run=Path("runs/first")))
"""

import contextlib
import dataclasses
import functools
import logging
import math
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from meshwright.checkpoint import Checkpoints, folders, holds_pieces
from meshwright.data import Mixture
from meshwright.errors import MeshwrightError
from meshwright.launch import (
    StoreAgreement,
    coordinator_store,
    join,
    keep_compiled_programs,
    make_room_for_cpu_collectives,
    quick_compile_options,
    simulate_devices,
    take_most_gpu_memory,
)
from meshwright.layouts import create, fit
from meshwright.machines import Machine, check_host_memory, free_host_memory, host_bytes
from meshwright.models import ADAPTER, OFFLOAD
from meshwright.present import bytes_text, duration_text
from meshwright.training.abstract_step import AbstractStep
from meshwright.training.backend import Backend, Say
from meshwright.training.compute import (
    exchange_text,
    experts_kernel_text,
    known_chip,
    layers_text,
    matmuls_text,
)
from meshwright.training.config import AUTO, TrainConfig
from meshwright.training.exchange import load_pieces
from meshwright.training.loop import Loop, check_run_folder, supervised
from meshwright.training.prepare import bytes_per_device, prepare
from meshwright.training.resume import checkpoint_settings, resume_command
from meshwright.training.run import Memory, memory, peak_flops, waiting_line
from meshwright.training.same_settings import check_same_settings
from meshwright.training.state import (
    TrainState,
    new_state,
    params_are_finite,
    saved_part,
    with_reference,
)
from meshwright.training.tpu import overlap_text
from meshwright.training.trainable import trained_part, trained_text
from meshwright.training.weights import start_weights


def memory_remedy(config: TrainConfig, needed: int, moments: int) -> str:
    """What would fit into the free memory of this host: other moments, or another machine."""
    free = free_host_memory() or 0
    is_default = config.optimizer.name == "adamw" and config.optimizer.moments == "auto"
    smaller = {  # what each setting would leave; int8 at most half of the moments
        "--optimizer.moments int8": needed - moments // 2,
        "--optimizer.name adafactor": needed - moments,
    }
    fits = [flag for flag, size in smaller.items() if is_default and size <= free]
    if fits:
        return f"{' or '.join(fits)} would fit"
    model = shlex.quote(config.model)
    return (
        "use a smaller model, or ask which machine has room: "
        f"meshwright plan {model} --on any --tokens 1T"
    )


class Sampler(Protocol):
    """Continues prompts with the weights of a moment."""

    def __call__(self, params: Any) -> list[str]:
        """The continuation of each prompt."""

    def close(self) -> None: ...


MakeSampler = Callable[[AbstractStep, Mixture, Sequence[str]], Sampler]
"""(the step, its data, prompts) → their sampler; the package for it is beyond this one."""


def train(
    config: TrainConfig,
    choose: Callable[[TrainConfig, Machine], tuple[TrainConfig, str]] | None = None,
    sampler: MakeSampler | None = None,
) -> None:
    """Run to the end, to a signal, or to a mistake (MeshwrightError).

    The same call in every process of a run. `choose` gives the settings of a mesh where the one
    asked for is 'auto', and what to say about them. `sampler` continues --eval.prompts.
    """
    make_room_for_cpu_collectives()
    take_most_gpu_memory()
    if config.cpu_devices is not None:
        simulate_devices(config.cpu_devices)
    if config.mesh == AUTO and choose is None:
        raise MeshwrightError("mesh 'auto' needs a function that chooses one: train(.., choose)")
    joined = join(config.coordinator, config.processes, config.process_id)
    with waiting_line("starting the devices", shown=joined.process_id == 0, at_once=False):
        platform = jax.default_backend()
    if platform != "cpu":
        keep_compiled_programs()
    store = coordinator_store()
    with supervised(config, joined, store) as (stop, watchdog):
        with watchdog.paused("comparing settings"):
            check_same_settings(config, store, joined)
            if config.mesh == AUTO and choose is not None:
                config, said = choose(config, Machine.here())
                if jax.process_index() == 0:
                    print(said)
                check_same_settings(config, store, joined)
        check_run_folder(config)
        with watchdog.paused("preparing"):
            backend = JaxBackend(config, sampler)
        with contextlib.closing(backend):
            Loop(backend, stop, store, watchdog).run()


class JaxBackend(Backend):
    lag = 1

    def __init__(self, config: TrainConfig, sampler: MakeSampler | None = None) -> None:
        self.config = config
        self.process_id, self.processes = jax.process_index(), jax.process_count()
        if config.eval.prompts and (sampler is None or self.processes > 1):
            why = "runs of one process" if sampler else "mw.train"
            raise MeshwrightError(f"eval.prompts are continued by {why} alone; leave them out")
        self.checkpoints: Checkpoints = Checkpoints(**checkpoint_settings(config))
        self._agreement = StoreAgreement("run")
        self._setup = setup = prepare(config)
        step = setup.step
        self.model, self.loader, self.eval_loader = setup.model, setup.loader, setup.eval_loader
        self._devices = list(step.mesh.devices.flat)
        self.mesh_shape, self.num_devices = step.mesh.shape, step.mesh.size
        self.device_kind = self._devices[0].device_kind
        sizes = (spec.unpadded_shape for spec in jax.tree.leaves(step.unquantized))
        self.num_parameters = sum(map(math.prod, sizes))
        self.work = step.work
        self._sampler: Sampler | None = None
        if sampler is not None and config.eval.prompts:
            self._sampler = sampler(step, self.loader.mixture, config.eval.prompts)
        self._state: TrainState  # after `start`
        self._compiled: Any = None  # after `compile`

    def from_first(self, text: str) -> str:
        return self._agreement.from_first(text)

    def placement_lines(self) -> Iterator[str]:
        if self._setup.weights is not None:
            yield f"starts from the weights in {self._setup.weights}"
        yield self._setup.explanation.summary()
        state = self._setup.step.state
        trained = trained_part(self._setup.step.arrays, state.params)
        if self.config.trainable or self.config.lora.rank:
            yield trained_text(self._setup.step.arrays, self.num_parameters)
        kinds = {
            "parameters": bytes_per_device(state.params),
            "gradients": bytes_per_device(trained),
            "optimizer": bytes_per_device(state.optimizer),
        }
        if state.reference is not None:
            kinds["reference"] = bytes_per_device(state.reference)
        parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in kinds.items())
        yield f"per device: {parts}"

    def compute_lines(self) -> Iterator[str]:
        setup, platform = self._setup, self._devices[0].platform
        settings = self.config.compute
        if platform != "cpu" or settings.layers != "auto" or settings.remat == OFFLOAD:
            yield layers_text(self.config, setup.step.model, platform, self.num_devices)
        chip = known_chip(self._devices[0])
        tensor = setup.step.mesh.shape.get("tp", 1)
        matmuls = chip and matmuls_text(settings, setup.step.model, chip, tensor)
        if matmuls:
            yield matmuls
        if platform == "tpu":
            yield overlap_text(settings.overlap, chip)
        if setup.step.attention is not None:
            yield f"attention: {setup.step.attention}"
        if exchange := exchange_text(settings.experts, setup.step.model, setup.step.mesh.shape):
            yield exchange
        if kernel := experts_kernel_text(setup.step.compute.dtype, setup.step.model, platform):
            yield kernel
        if setup.padding is not None:
            yield f"{setup.padding} (in memory only)"
        for remark in setup.explanation.remarks:
            yield f"note: {remark}"

    def check_memory(self) -> None:
        target = self._setup.step.state
        trained = trained_part(self._setup.step.arrays, target.params)
        needed = host_bytes(target) + host_bytes(trained)  # gradients are as large as parameters
        check_host_memory(
            needed,
            f"{self.config.model} with parameters, gradients and optimizer state",
            memory_remedy(self.config, needed, host_bytes(target.optimizer)),
        )

    def start(self, saved: int | None) -> None:
        step = self._setup.step
        if saved is not None:
            with jax.set_mesh(step.mesh):
                restored = self._restored(saved)
                restored = fit(restored, saved_part(step.state))
                none = jax.device_put(np.int32(0), step.state.step.sharding)
            if self.config.lora.rank:
                assert self._setup.weights is not None  # else it is an error
                weights = start_weights(step, self._setup.model, self._setup.weights)
                whole = {**weights, **restored.params}
                restored = dataclasses.replace(restored, params=whole)
            restored = dataclasses.replace(restored, skipped_in_a_row=none)
            if step.state.reference is not None:
                restored = with_reference(step.arrays, step.state, restored, self._first_params())
            self._state = restored
            return
        params: dict[str, Any] | None = None
        if self._setup.weights is not None:
            params = start_weights(step, self._setup.model, self._setup.weights)
            if self.config.lora.rank:
                specs, targets = step.arrays[ADAPTER], step.state.params[ADAPTER]
                shardings = jax.tree.map(lambda target: target.sharding, targets)
                params[ADAPTER] = create(specs, shardings, self.config.seed)
        self._state = new_state(
            step.arrays, step.state, step.optimizer, step.mesh, self.config.seed, params
        )

    def _first_params(self) -> Any:
        """The parameters of step 0, of a run without an adapter."""
        step = self._setup.step
        if self._setup.weights is not None:
            return start_weights(step, self._setup.model, self._setup.weights)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, step.state.params)
        with jax.set_mesh(step.mesh):
            return create(step.arrays, shardings, self.config.seed)

    def _restored(self, saved: int) -> TrainState:
        """Without padding; of a checkpoint that JAX or PyTorch wrote."""
        folder = self.checkpoints.folder
        if holds_pieces(folders.complete_folder(folder, saved)):
            command = functools.partial(resume_command, self.config)
            lora = self.config.lora
            return load_pieces(folder, saved, self._setup.stored, self.model, command, lora)[0]
        state: TrainState = self.checkpoints.restore(saved, self._setup.stored)
        return state

    def compile(self, say: Say) -> None:
        step = self._setup.step
        start = time.monotonic()
        with waiting_line("compiling", shown=self.process_id == 0), _log_to(say):
            lowered = step.functions.train.lower(self._state, step.batch)
            self._compiled = lowered.compile(quick_compile_options(self._devices[0].platform))
        took = duration_text(time.monotonic() - start)
        held = self._compiled.memory_analysis()
        if held is not None:
            total = (
                held.argument_size_in_bytes
                + held.temp_size_in_bytes
                + held.output_size_in_bytes
                - held.alias_size_in_bytes
            )
            say(f"compiled in {took}: {bytes_text(total)} per device by the compiler's account")
            on_host = held.host_temp_size_in_bytes  # offloaded
            if self._devices[0].platform == "cpu":  # and, beyond the state, the step itself
                on_host += total - held.argument_size_in_bytes
            self._check_step_memory(on_host)

    def _check_step_memory(self, of_device: int) -> None:
        config = self.config
        check_host_memory(
            of_device * len(self._setup.step.mesh.local_devices),
            f"one step of {config.model} with batch={config.batch} and seq={config.seq}",
            "use a smaller --batch or --seq, more --accumulation, or --compute.remat full",
        )

    def batches(self, first: int) -> Iterator[tuple[int, Any]]:
        return self.loader.iterate(first, self._setup.step.functions.batch_sharding)

    def step(self, batch: Any) -> Any:
        self._state, report = self._compiled(self._state, batch)
        return report

    def values(self, report: Any) -> dict[str, Any]:
        return {name: value.tolist() for name, value in jax.device_get(report).items()}

    def evaluate(self) -> dict[str, tuple[float, float]]:
        assert self.eval_loader is not None
        functions, state = self._setup.step.functions, self._state
        totals: dict[str, tuple[float, float]] = {}
        for _, batch in self.eval_loader.iterate(0, functions.batch_sharding):
            metrics = jax.device_get(functions.evaluate(state.params, batch, state.reference))
            for name, one in metrics.items():
                total, counted = totals.get(name, (0.0, 0))
                totals[name] = total + one.sum.item(), counted + one.count.item()
        return totals

    def continuations(self) -> list[str]:
        assert self._sampler is not None
        return self._sampler(self._state.params)

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.close()

    def is_finite(self) -> bool:
        return params_are_finite(self._state, self._setup.step.mesh)

    def save(self, step: int, meta: dict[str, Any], wait: bool = False) -> None:
        state = fit(saved_part(self._state), self._setup.stored)
        self.checkpoints.save(step, state, meta, wait=wait)

    def peak_flops(self) -> float | None:
        return peak_flops(self._devices)

    def memory(self) -> Memory | None:
        return memory()


@contextlib.contextmanager
def _log_to(say: Say) -> Iterator[None]:
    """Print what the library logs inside: which attention kernel is used, and why."""
    logger = logging.getLogger("meshwright")
    handler = logging.Handler()
    handler.emit = lambda record: say(record.getMessage())  # type: ignore[method-assign]
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # some libraries give the root logger a handler of its own
    try:
        yield
    finally:
        logger.level, logger.propagate = before
        logger.removeHandler(handler)

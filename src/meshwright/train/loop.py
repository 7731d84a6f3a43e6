"""The training loop: resume, step, log, evaluate, save, stop.

    train(TrainConfig("tiny", steps=200, run=Path("runs/first")))

The same call in every process of a run; process 0 speaks.
"""

import collections
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from meshwright.checkpoint import Channel, Checkpoints, not_a_folder
from meshwright.errors import MeshwrightError
from meshwright.launch import (
    Stop,
    Watchdog,
    agree,
    coordinator_store,
    ends_together,
    join,
    keep_compiled_programs,
    make_room_for_cpu_collectives,
    pause_timeout_s,
    simulate_devices,
    stop_on_signals,
    take_most_gpu_memory,
)
from meshwright.layouts import fit
from meshwright.machines import check_host_memory, host_bytes
from meshwright.models import load_hf, model_to_dict
from meshwright.present import bytes_text, count, duration_text, mesh_text
from meshwright.train.config import LATEST, NONE, TrainConfig, config_to_dict
from meshwright.train.optimizer import DEFAULT_WARMUP
from meshwright.train.prepare import bytes_per_device, prepare
from meshwright.train.resume import check_resume, resume_command, resume_step
from meshwright.train.run import (
    LiveLine,
    MetricsLog,
    StepClock,
    disk_errors_in_one_line,
    memory,
    only_run_in,
    peak_flops,
    print_line,
    throughput,
    waiting_line,
    write_description,
    write_run_page,
)
from meshwright.train.run.metrics import FILE as METRICS
from meshwright.train.same_settings import check_same_settings
from meshwright.train.setup import layers_text
from meshwright.train.state import TrainState, new_state, params_are_finite

LAG = 1  # a step is started before the result of the one before it is looked at


AUTO = "auto"  # a mesh that is chosen once the devices are known


def train(config: TrainConfig, choose: Callable[[TrainConfig], TrainConfig] | None = None) -> None:
    """Run to the end, to a signal, or to a mistake (MeshwrightError).

    `choose` gives the settings of a mesh where the one asked for is 'auto'.
    """
    make_room_for_cpu_collectives()
    take_most_gpu_memory()
    if config.cpu_devices is not None:
        simulate_devices(config.cpu_devices)
    if config.mesh == AUTO and choose is None:
        raise MeshwrightError("mesh 'auto' needs a function that chooses one: train(.., choose)")
    joined = join(config.coordinator, config.processes, config.process_id)
    if jax.default_backend() != "cpu":
        keep_compiled_programs()
    store = coordinator_store()
    with (
        ends_together(store, joined.process_id, joined.processes),
        disk_errors_in_one_line(),
        stop_on_signals() as stop,
    ):
        watchdog = Watchdog(
            config.run,
            timeout_s=config.hang_timeout,
            pause_timeout_s=pause_timeout_s(config.hang_timeout),
            store=store,
            process_id=joined.process_id,
            processes=joined.processes,
        )
        with watchdog:
            with watchdog.paused("comparing settings"):
                check_same_settings(config, store, joined)
                if config.mesh == AUTO and choose is not None:
                    config = choose(config)
                    check_same_settings(config, store, joined)
            _Run(config, stop, store, watchdog).go()


class _Run:
    """One run in this process: what the steps of `go` share."""

    def __init__(self, config: TrainConfig, stop: Stop, store: Any, watchdog: Watchdog) -> None:
        self.config, self.stop, self.store, self.watchdog = config, stop, store, watchdog
        self.speaks = jax.process_index() == 0
        if problem := not_a_folder(config.run.absolute()):
            raise MeshwrightError(f"--run {str(config.run)!r} {problem}")
        keep = config.checkpoint
        self.checkpoints = Checkpoints(
            config.run / "checkpoints",
            keep.keep_last,
            keep.keep_every,
            command=functools.partial(resume_command, config),
        )
        self.channel = Channel("run")
        self.saved = resume_step(self.checkpoints, config.resume_from, self.channel)
        # a run's own record says how to continue it, which is from the latest
        self.config = config = dataclasses.replace(config, resume_from=LATEST)
        with watchdog.paused("preparing"):
            self.setup = prepare(config)
        self.unconfirmed: list[int] = [] if self.saved is None else [self.saved]
        self.skipped_in_a_row = 0
        self.evaluated: int | None = None
        self.signalled = False
        self.tokens = 0
        self.clock = StepClock()

    def go(self) -> None:
        config = self.config
        first = self.saved or 0
        if self.saved is not None:
            meta, where = self.checkpoints.meta(self.saved), f"step {first} of {config.run}"
            self.tokens = check_resume(meta, config, self.setup, where, self._say)
        self._announce(first)
        last = config.steps if config.stop_at is None else min(config.steps, config.stop_at)
        if first >= last:
            self._say(f"nothing to do: {config.run} is at step {first}, and {last} are wanted")
            return
        with contextlib.ExitStack() as stack:
            if self.speaks:
                stack.enter_context(only_run_in(config.run))
            self._check_state_memory()
            with self.watchdog.paused("loading"):
                state = self._first_state()
            with self.watchdog.paused("compiling"):
                step_function = self._compile(state)
            self._set_later_aside()
            self._write_description()
            stack.callback(self._close)
            log = stack.enter_context(
                MetricsLog(
                    config.run,
                    tensorboard=config.log.tensorboard,
                    wandb=config.log.wandb,
                    resume_step=first,
                )
            )
            if self.saved is not None:
                log.note(first, "resumed", mesh=mesh_text(self.setup.step.mesh.shape))
            live = stack.enter_context(LiveLine(config.steps, shown=self.speaks))
            state, last = self._steps(state, first, step_function, log, live)
            self._save_for_good(state, last, live)
            why = f" ({self.stop.reason})" if self.stop.requested else ""
            live.print(f"saved step {last}{why} in {self.checkpoints.folder}")
            # who sends a signal does not wait for long
            if config.eval.sequences and last not in (first, self.evaluated) and not self.signalled:
                self._evaluate(state, last, log, live)
        if self.speaks:
            try:
                page = write_run_page(config.run)
            except MeshwrightError as problem:
                raise MeshwrightError(f"step {last} is saved, but {problem}") from None
            self._say(f"curves: {page}")

    def _steps(
        self, state: TrainState, first: int, step_function: Any, log: MetricsLog, live: LiveLine
    ) -> tuple[TrainState, int]:
        """All steps from `first`; gives back the state and how many are done."""
        config = self.config
        # reports of steps begun but not looked at, oldest first
        waiting: collections.deque[tuple[int, Any]] = collections.deque()
        sharding = self.setup.step.functions.batch_sharding
        batches: Any = self.setup.loader.iterate(first, sharding)
        done, save_is_due = first, False
        with contextlib.closing(batches):
            for step in range(first, config.steps):
                if step == config.stop_at:
                    self.stop.request(f"stop_at {step}")
                    break
                if agree(self.stop, step, self.store, LAG):
                    self.signalled = True
                    break
                _, batch = next(batches)
                self.watchdog.beat(step + 1)
                state, report = step_function(state, batch)
                done = step + 1
                waiting.append((done, report))
                if len(waiting) > LAG:
                    self._look(waiting.popleft(), log, live, state)
                if done % config.eval.every == 0 and config.eval.sequences and done < config.steps:
                    self._look_at_all(waiting, log, live, state)
                    self._evaluate(state, done, log, live)
                save_is_due |= done % config.checkpoint.every == 0
                if save_is_due and done < config.steps:
                    self._look_at_all(waiting, log, live, state)
                    # weights from which a step was skipped are in doubt: wait for a good one
                    if not self.skipped_in_a_row:
                        self._save_if_possible(state, done, live)
                        save_is_due = False
        self._look_at_all(waiting, log, live, state)
        return state, done

    def _look_at_all(self, waiting: Any, log: MetricsLog, live: LiveLine, state: Any) -> None:
        while waiting:
            self._look(waiting.popleft(), log, live, state)

    def _look(
        self, waiting: tuple[int, Any], log: MetricsLog, live: LiveLine, state: TrainState
    ) -> None:
        """Wait for a step's report, write it down, and stop if steps keep failing."""
        step, report = waiting
        setup, config = self.setup, self.config
        values = {name: value.item() for name, value in jax.device_get(report).items()}
        self.tokens += values["tokens"]
        took = self.clock.tick(values.get("keys_seen"))
        metrics: dict[str, Any] = {
            "loss": values["loss"],
            "grad_norm": values["gradient_norm"],
            "learning_rate": values["learning_rate"],
            "tokens": self.tokens,
            "skipped_steps": values["skipped"],
        }
        if "keys_seen" in values:
            metrics["keys_seen"] = values["keys_seen"]
        if took is not None and self.clock.seconds:
            per_step = config.batch * setup.step.tokens_of_example
            flops = setup.step.flops_per_token(self.clock.keys_seen)
            peak = peak_flops(list(setup.step.mesh.devices.flat))
            speed = throughput(flops, per_step, self.clock.seconds, setup.step.mesh.size, peak)
            metrics |= {"step_seconds": self.clock.seconds} | speed.metrics()
        held = memory()
        metrics |= {} if held is None else held.metrics()
        if step % config.log.every == 0 or step == config.steps:
            log.write(step, metrics)
        live.update({"step": step} | metrics)
        self.skipped_in_a_row = consecutive = int(values["skipped_in_a_row"])
        if consecutive:
            live.print(f"step {step}: loss or gradient is not finite; the step is skipped")
        else:  # the first good step after a save is computed from the weights that were saved
            for saved in self.unconfirmed:
                self.checkpoints.confirm(saved)
            self.unconfirmed = []
        if consecutive >= config.max_skipped:
            self._give_up(step, consecutive, live)

    def _give_up(self, step: int, consecutive: int, live: LiveLine) -> None:
        """End the run. The weights are not saved: no step from them was finite."""
        with self.watchdog.paused("saving"):
            self._finish_last_save(live)
        raise MeshwrightError(
            f"{consecutive} consecutive steps up to step {step} had a loss or gradient that is not "
            f"finite, so training stopped, and these weights are not saved. "
            f"{self._newest_healthy()}"
        )

    def _newest_healthy(self) -> str:
        """Sentences: which checkpoint to resume from, and how. The same text in every process."""
        healthy = max(self.checkpoints.healthy(), default=None)
        mend = "Lower --optimizer.learning-rate, lengthen the warm-up or check the data, then"
        if healthy is None:
            text = (
                f"No checkpoint in {self.checkpoints.folder} is known to be healthy (a finite step "
                f"was computed from it). {mend} start anew: {resume_command(self.config, NONE)}"
            )
        else:
            text = (
                f"The newest healthy checkpoint is step {healthy} in {self.checkpoints.folder}. "
                f"{mend} resume from it: {resume_command(self.config, healthy)}"
            )
        return self.channel.from_first(text)

    def _evaluate(self, state: TrainState, step: int, log: MetricsLog, live: LiveLine) -> None:
        loader, functions = self.setup.eval_loader, self.setup.step.functions
        assert loader is not None
        with self.watchdog.paused("evaluating"), self.clock.paused():
            entropy, tokens = 0.0, 0
            for _, batch in loader.iterate(0, functions.batch_sharding):
                report = jax.device_get(functions.evaluate(state.params, batch))
                entropy += report["entropy"].item()
                tokens += report["tokens"].item()
        self.evaluated = step
        loss = entropy / max(tokens, 1)
        log.write(step, {"eval_loss": loss})
        live.print(f"step {step}: eval loss {loss:.4f} over {tokens:,} tokens")

    # checkpoints

    def _meta(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "tokens": self.tokens,
            "data": self.setup.loader.describe(),
            "mesh": mesh_text(self.setup.step.mesh.shape),
            "model_config": model_to_dict(self.setup.model),
            "config": config_to_dict(self.config),
        }

    def _finish_last_save(self, live: LiveLine) -> None:
        """Wait for the save before; that it failed is told once, and nothing saved is lost."""
        try:
            self.checkpoints.wait()
        except MeshwrightError as problem:
            live.print(f"warning: {problem}")

    def _save_if_possible(self, state: TrainState, step: int, live: LiveLine) -> None:
        """A save that fails loses nothing that was saved before: training continues."""
        with self.watchdog.paused("saving"), self.clock.paused():
            self._finish_last_save(live)
            if not params_are_finite(state, self.setup.step.mesh):
                live.print(f"warning: step {step} is not saved: its weights are not finite")
                return
            try:
                self.checkpoints.save(step, fit(state, self.setup.stored), self._meta(step))
                self.unconfirmed.append(step)
            except MeshwrightError as problem:
                live.print(f"warning: {problem}; training continues")

    def _save_for_good(self, state: TrainState, step: int, live: LiveLine) -> None:
        """The last save of a run: waited for, and tried again if the one of this step failed."""
        with self.watchdog.paused("saving"):
            self._finish_last_save(live)
            if step in self.checkpoints.steps():
                return
            if not params_are_finite(state, self.setup.step.mesh):
                raise MeshwrightError(
                    f"the weights of step {step} are not finite, so they are not saved. "
                    f"{self._newest_healthy()}"
                )
            stored = fit(state, self.setup.stored)
            self.checkpoints.save(step, stored, self._meta(step), wait=True)

    def _close(self) -> None:
        with self.watchdog.paused("saving"):
            try:
                self.checkpoints.close()
            except MeshwrightError as problem:  # not in place of the error that ends the run
                self._say(f"warning: {problem}")

    def _set_later_aside(self) -> None:
        """Checkpoints after the step resumed from would be mistaken for this run's own."""
        after = -1 if self.saved is None else self.saved
        aside = self.checkpoints.set_aside_after(after, self.config.run / METRICS)
        if aside is not None:
            later, place = aside
            self._say(
                f"set aside in {place}: {count(len(later), 'later checkpoint')} "
                f"({', '.join(map(str, later[-8:]))}) and a copy of {METRICS}; delete that folder "
                "when you no longer need it"
            )

    def _first_state(self) -> TrainState:
        setup, step = self.setup, self.setup.step
        if self.saved is not None:
            with jax.set_mesh(step.mesh):
                restored: TrainState = self.checkpoints.restore(self.saved, setup.stored)
                restored = fit(restored, step.state)
                none = jax.device_put(np.int32(0), step.state.step.sharding)
            return dataclasses.replace(restored, skipped_in_a_row=none)
        params = None
        if self.config.init_from is not None:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, setup.stored.params)
            dtype = self.config.compute.param_dtype
            params = load_hf(self.config.init_from, setup.model, shardings, dtype)
            params = fit(params, step.state.params)
        return new_state(
            step.arrays, step.state, step.optimizer, step.mesh, self.config.seed, params
        )

    # what is told

    def _compile(self, state: TrainState) -> Any:
        step = self.setup.step
        with _heard(self._say):
            lowered = step.functions.train.lower(state, step.batch)
        start = time.monotonic()
        with waiting_line("compiling", shown=self.speaks):
            compiled = lowered.compile()
        took = duration_text(time.monotonic() - start)
        held = compiled.memory_analysis()
        if held is not None:
            total = (
                held.argument_size_in_bytes
                + held.temp_size_in_bytes
                + held.output_size_in_bytes
                - held.alias_size_in_bytes
            )
            self._say(
                f"compiled in {took}: {bytes_text(total)} per device by the compiler's account"
            )
            # beyond the state, which is there already
            self._check_step_memory(total - held.argument_size_in_bytes)
        return compiled

    def _check_state_memory(self) -> None:
        target = self.setup.step.state
        check_host_memory(
            host_bytes(target) + host_bytes(target.params),  # gradients are as large as parameters
            f"{self.config.model} with parameters, gradients and optimizer state",
            "use a smaller model, --optimizer.moments int8, or --optimizer.name adafactor",
        )

    def _check_step_memory(self, per_device: int) -> None:
        local = self.setup.step.mesh.local_devices
        devices = [device for device in local if device.platform == "cpu"]
        config = self.config
        check_host_memory(
            per_device * len(devices),
            f"one step of {config.model} with batch={config.batch} and seq={config.seq}",
            "use a smaller --batch or --seq, more --accumulation, or --compute.remat full",
        )

    def _announce(self, first: int) -> None:
        setup, config = self.setup, self.config
        devices = list(setup.step.mesh.devices.flat)
        self._say(
            f"{config.model} on mesh {mesh_text(setup.step.mesh.shape)}: "
            f"{count(len(devices), devices[0].device_kind + ' device')}"
            + (f", {jax.process_count()} processes" if jax.process_count() > 1 else "")
        )
        self._say(setup.explanation.summary())
        kinds = {
            "parameters": bytes_per_device(setup.step.state.params),
            "gradients": bytes_per_device(setup.step.state.params),
            "optimizer": bytes_per_device(setup.step.state.optimizer),
        }
        parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in kinds.items())
        self._say(f"per device: {parts}")
        sequences = count(config.batch // config.accumulation, "sequence")
        self._say(
            f"batch {config.batch} × {config.seq} tokens as "
            f"{count(config.accumulation, 'micro-batch')} of {sequences}; data {config.data}; "
            f"steps {first} to {config.steps}"
        )
        warmup = config.optimizer.warmup(config.steps)
        if config.optimizer.warmup_steps is None and warmup < DEFAULT_WARMUP:
            self._say(
                f"note: the warm-up is shortened from {DEFAULT_WARMUP} to {count(warmup, 'step')}, "
                "to suit the length of the run; --optimizer.warmup-steps sets it"
            )
        if devices[0].platform != "cpu" or config.compute.layers != "auto":
            self._say(layers_text(config, setup.step.model, devices[0].platform, len(devices)))
        if setup.step.attention is not None:
            self._say(f"attention: {setup.step.attention}")
        if setup.padding is not None:
            self._say(f"{setup.padding} (in memory only)")
        for remark in setup.explanation.remarks:
            self._say(f"note: {remark}")
        if self.saved is not None:
            self._say(f"resuming from step {self.saved} in {self.checkpoints.folder}")

    def _write_description(self) -> None:
        if not self.speaks:
            return
        setup, folder = self.setup, self.config.run
        settings = config_to_dict(self.config) | {
            "model_config": model_to_dict(setup.model),
            "hf_config": setup.model.hf_config,
        }
        about = {
            "name": folder.name,
            "model": self.config.model,
            "parameters": f"{setup.explanation.num_elements:,}",
            "mesh": mesh_text(setup.step.mesh.shape),
            "machine": f"{setup.step.mesh.size} × {setup.step.mesh.devices.flat[0].device_kind}",
            "data": self.config.data,
            "FLOPs of a token": setup.step.flops_formula,
        }
        write_description(folder, settings, about, setup.loader.mixture.tokenizer.to_json())

    def _say(self, text: str) -> None:
        if self.speaks:
            print_line(text)


@contextlib.contextmanager
def _heard(say: Any) -> Iterator[None]:
    """What the library logs inside (which attention kernel, and why) is said."""
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

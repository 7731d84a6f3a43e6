"""The training loop of every backend: resume, step, log, evaluate, save, stop.

The same calls in every process of a run; process 0 alone logs.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import math
import shlex
from collections.abc import Callable, Iterator
from typing import Any

from meshwright.checkpoint import lowest_loss, not_a_folder
from meshwright.errors import MeshwrightError
from meshwright.files import write_whole
from meshwright.launch import (
    Joined,
    Stop,
    Store,
    Watchdog,
    agree,
    ends_together,
    pause_timeout_s,
    stop_on_signals,
    weights_sample,
)
from meshwright.models import model_to_dict
from meshwright.present import count, mesh_text
from meshwright.training.backend import Backend
from meshwright.training.config import DPO, LATEST, NONE, TrainConfig, config_to_dict
from meshwright.training.description import announcement, run_description
from meshwright.training.resume import check_resume, resume_command, resume_step
from meshwright.training.run import (
    ENDED,
    RESUMED,
    LiveLine,
    LivePage,
    LostFolderError,
    MetricsLog,
    StepClock,
    check_room,
    disk_errors_in_one_line,
    only_run_in,
    print_line,
    read_metrics,
    throughput,
    waiting_line,
    write_run_page,
)
from meshwright.training.run.metrics import FILE as METRICS
from meshwright.training.run.summary import EXPERT_LOADS, SAMPLE
from meshwright.training.setup import weights_folder
from meshwright.training.step import STEP_VALUES

NO_TARGETS = "all its tokens are masked, or what is not masked lies beyond --seq"


@contextlib.contextmanager
def supervised(
    config: TrainConfig, joined: Joined, store: Store | None
) -> Iterator[tuple[Stop, Watchdog]]:
    """Processes that end together, signals that stop after a step, and a watchdog."""
    with (
        ends_together(store, joined.process_id, joined.processes),
        disk_errors_in_one_line(),
        stop_on_signals() as stop,
        Watchdog(
            config.run,
            timeout_s=config.hang_timeout,
            pause_timeout_s=pause_timeout_s(config.hang_timeout),
            store=store,
            process_id=joined.process_id,
            processes=joined.processes,
        ) as watchdog,
    ):
        yield stop, watchdog


class Loop:
    """One run in this process: what the steps of `go` share."""

    def __init__(
        self, backend: Backend, stop: Stop, store: Store | None, watchdog: Watchdog
    ) -> None:
        self.backend, self.stop, self.store, self.watchdog = backend, stop, store, watchdog
        self.checkpoints = backend.checkpoints
        self.is_main = backend.process_id == 0
        wanted = backend.config.resume_from
        self.saved = resume_step(self.checkpoints, wanted, backend.from_first)
        # a run's own record says how to continue it, which is from the latest
        self.config = dataclasses.replace(backend.config, resume_from=LATEST)
        self.unconfirmed: list[int] = [] if self.saved is None else [self.saved]
        self.skipped_in_a_row = 0
        self.eval_losses: dict[int, float] = {}  # by step
        self.warned = False  # of a step without targets
        self.signalled = False
        self.tokens = 0
        self.done = self.saved or 0  # the last step
        self.clock = StepClock()
        self.page = LivePage(self.config.run)
        # before each write into the run's folder: raises where it is another run's by now
        self.check_owned: Callable[[], None] = lambda: None

    def run(self) -> None:
        config = self.config
        first = self.saved or 0
        if self.saved is not None:
            meta, where = self.checkpoints.meta(self.saved), f"step {first} of {config.run}"
            self.tokens = check_resume(
                meta, config, self.backend.model, self.backend.loader.describe(), where, self._log
            )
            self.eval_losses = self._read_eval_losses(first)
        if config.checkpoint.keep_best:
            self.checkpoints.losses = self.eval_losses
        last = config.steps if config.stop_at is None else min(config.steps, config.stop_at)
        if first >= last:
            wanted = f"{last} are wanted"
            if last < config.steps:
                passed = "ends it there" if first == last else "has been passed"
                wanted = f"--stop-at {last} {passed}; leave that out to continue"
            self._log(f"nothing to do: {config.run} is at step {first}, and {wanted}")
            return
        if why := self._no_longer_better():
            self._log(f"nothing to do: {why}; a larger --eval.patience continues {config.run}")
            return
        for line in announcement(self.backend, config, first):
            self._log(line)
        if self.saved is not None:
            self._log(f"resuming from step {self.saved} in {self.checkpoints.folder}")
        with contextlib.ExitStack() as lock:
            if self.is_main:
                self.check_owned = lock.enter_context(only_run_in(config.run))
                self.checkpoints.check_owned = self.check_owned
            last = self._train(first)
            if self.is_main:
                self._write_page(last)

    def _train(self, first: int) -> int:
        """From loading to the last save; gives back the step it is of."""
        config = self.config
        description = run_description(self.backend, config, self._base)
        if self.is_main:  # before anything slow
            size = sum(len(text.encode()) for text in description.values())
            if (metrics := config.run / METRICS).is_file():  # copied without later lines
                size += metrics.stat().st_size
            check_room(config.run, size)
        with contextlib.ExitStack() as stack:
            self.backend.check_memory()
            activity = "creating weights" if self.saved is None else f"reading step {self.saved}"
            with self.watchdog.paused("loading"), waiting_line(activity, shown=self.is_main):
                self.backend.start(self.saved)
            with self.watchdog.paused("compiling"):
                self.backend.compile(self._log)
            self.check_owned()
            self._set_later_aside()
            if self.is_main:
                for name, text in description.items():
                    write_whole(config.run / name, text)
                self._log(
                    f"curves from the first step on: {self.page.file}, or with other runs: "
                    f"meshwright board {shlex.quote(str(config.run.parent))}"
                )
            stack.callback(self._close)
            log = stack.enter_context(
                MetricsLog(
                    config.run,
                    writes=self.is_main,
                    tensorboard=config.log.tensorboard,
                    wandb=config.log.wandb,
                    resume_step=first,
                )
            )
            if self.saved is not None:
                log.note(first, RESUMED, mesh=mesh_text(self.backend.mesh_shape))
            stack.enter_context(self._end_noted(log))
            live = stack.enter_context(LiveLine(config.steps, shown=self.is_main, first=first))
            last = self._steps(first, log, live)
            live.finish()
            self._save_for_good(last, live)
            why = f" ({self.stop.reason})" if self.stop.requested else ""
            live.print(f"saved step {last}{why} in {self.checkpoints.folder}")
            # who sends a signal does not wait for long
            done = last in (first, *self.eval_losses)
            if config.eval.sequences and not done and not self.signalled:
                self._evaluate(last, log, live)
            best = lowest_loss(self.checkpoints.steps(), self.eval_losses)
            if best is not None and best != last:
                live.print(
                    f"step {best} has the lowest evaluation loss of the saved ones, "
                    f"{self.eval_losses[best]:.4f}; --step {best} serves or exports it"
                )
        return last

    @contextlib.contextmanager
    def _end_noted(self, log: MetricsLog) -> Iterator[None]:
        """Note how the run ended; of one that failed, write the page that says so."""
        try:
            yield
        except BaseException as failure:
            reason = str(failure).partition("\n")[0] or type(failure).__name__
            with contextlib.suppress(MeshwrightError):
                self.check_owned()
                log.note(self.done, ENDED, state="failed", reason=reason)
                if self.is_main:
                    write_run_page(self.config.run)
            raise
        self.check_owned()
        if self.done < self.config.steps:
            log.note(self.done, ENDED, state="stopped", reason=self.stop.reason)
        else:
            log.note(self.done, ENDED, state="finished")

    def _write_page(self, last: int) -> None:
        self.check_owned()
        try:
            page = write_run_page(self.config.run)
        except MeshwrightError as problem:
            raise MeshwrightError(f"step {last} is saved, but {problem}") from None
        self._log(f"curves: {page}")

    def _steps(self, first: int, log: MetricsLog, live: LiveLine) -> int:
        """All steps from `first`; gives back how many are done."""
        config = self.config
        # reports of steps begun but not looked at, oldest first
        waiting: collections.deque[tuple[int, Any]] = collections.deque()
        batches: Any = self.backend.batches(first)
        done, save_is_due = first, False
        with contextlib.closing(batches):
            for step in range(first, config.steps):
                if step == config.stop_at:
                    self.stop.request(f"stop_at {step}")
                    break
                if agree(self.stop, step, self.store, self.backend.lag):
                    self.signalled = True
                    break
                _, batch = next(batches)
                self.watchdog.beat(step + 1)
                report = self.backend.step(batch)
                done = self.done = step + 1
                waiting.append((done, report))
                if len(waiting) > self.backend.lag:
                    self._look(waiting.popleft(), log, live)
                if done % config.eval.every == 0 and config.eval.sequences and done < config.steps:
                    self._look_at_all(waiting, log, live)
                    self._evaluate(done, log, live)
                    if why := self._no_longer_better():
                        self.stop.request(why)
                        break
                    # a run that may end after it keeps the best one, whenever that is
                    best = lowest_loss(self.eval_losses, self.eval_losses)
                    save_is_due |= config.eval.patience is not None and best == done
                save_is_due |= done % config.checkpoint.every == 0
                if save_is_due and done < config.steps:
                    self._look_at_all(waiting, log, live)
                    # weights from which a step was skipped are in doubt: wait for a good one
                    if not self.skipped_in_a_row:
                        self._save_if_possible(done, live)
                        save_is_due = False
        self._look_at_all(waiting, log, live)
        return done

    def _look_at_all(self, waiting: Any, log: MetricsLog, live: LiveLine) -> None:
        while waiting:
            self._look(waiting.popleft(), log, live)

    def _look(self, waiting: tuple[int, Any], log: MetricsLog, live: LiveLine) -> None:
        """Wait for a step's report, write it down, and stop if steps keep failing."""
        step, report = waiting
        config, backend = self.config, self.backend
        values = backend.values(report)
        self.check_owned()
        if not values["tokens"] and not self.warned:
            self.warned = True
            live.print(f"warning: step {step} has no target; {NO_TARGETS}")
        self.tokens += values["tokens"]
        took = self.clock.tick(values.get("keys_seen"))
        metrics: dict[str, Any] = {
            **{name: value for name, value in values.items() if name not in STEP_VALUES},
            "grad_norm": values["gradient_norm"],
            "learning_rate": values["learning_rate"],
            "tokens": self.tokens,
            "skipped_steps": values["skipped"],
        }
        if "keys_seen" in values:
            metrics["keys_seen"] = values["keys_seen"]
        if took is not None and self.clock.seconds:
            speed = throughput(
                backend.work.flops_per_token(self.clock.keys_seen),
                config.batch * backend.work.tokens_of_example,
                self.clock.seconds,
                backend.num_devices,
                backend.peak_flops(),
            )
            metrics |= {"step_seconds": self.clock.seconds} | speed.metrics()
        held = backend.memory()
        metrics |= {} if held is None else held.metrics()
        if step % config.log.every == 0 or step == config.steps:
            log.write(step, metrics)
            if self.is_main:
                self.page.update()
        if EXPERT_LOADS in values and (
            step % config.checkpoint.every == 0 or step in (config.steps, config.stop_at)
        ):
            loads = [[float(f"{load:.3g}") for load in layer] for layer in values[EXPERT_LOADS]]
            log.note(step, EXPERT_LOADS, loads=loads)
        live.update({"step": step} | metrics)
        self.skipped_in_a_row = consecutive = int(values["skipped_in_a_row"])
        if consecutive:
            live.print(f"step {step}: loss or gradient is not finite; the step is skipped")
        else:  # the first good step after a save is computed from the weights that were saved
            for saved in self.unconfirmed:
                self.checkpoints.confirm(saved)
            self.unconfirmed = []
        if consecutive >= config.max_skipped:
            self._abort(step, consecutive, live)

    def _abort(self, step: int, consecutive: int, live: LiveLine) -> None:
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
        return self.backend.from_first(text)

    def _evaluate(self, step: int, log: MetricsLog, live: LiveLine) -> None:
        prompts = self.config.eval.prompts
        with self.watchdog.paused("evaluating"), self.clock.paused():
            sums = self.backend.evaluate()
            texts = self.backend.continuations() if prompts else []
        self.check_owned()
        for prompt, text in zip(prompts, texts, strict=True):
            log.note(step, SAMPLE, prompt=prompt, text=text)
            live.print(f"step {step}: {prompt!r} continues {text!r}")
        counted = sums["loss"][1]
        if not counted:
            live.print(f"warning: step {step}: the held-out sequences have no target; {NO_TARGETS}")
            return
        means = {name: total / (counts or 1) for name, (total, counts) in sums.items()}
        self.eval_losses[step] = means["loss"] if math.isfinite(means["loss"]) else math.inf
        log.write(step, {f"eval_{name}": value for name, value in means.items()})
        shown = ", ".join(f"{name} {value:.4f}" for name, value in means.items())
        noun = "pairs" if self.config.objective == DPO else "tokens"
        over = f"{counted:,} {noun}" if isinstance(counted, int) else f"a weight of {counted:,.4g}"
        live.print(f"step {step}: eval {shown} over {over}")

    def _read_eval_losses(self, until: int) -> dict[int, float]:
        """The evaluation losses up to a step, as the run wrote them down."""
        losses = {}
        if self.is_main and (self.config.run / METRICS).is_file():
            steps, values = read_metrics(self.config.run).column("eval_loss")
            losses = {
                step: value for step, value in zip(steps, values, strict=True) if step <= until
            }
        shared = json.loads(self.backend.from_first(json.dumps(losses)))
        read = {int(step): float(value) for step, value in shared.items()}
        return {step: loss if math.isfinite(loss) else math.inf for step, loss in read.items()}

    def _no_longer_better(self) -> str:
        """Why to stop early, where the last evaluations did not lower the loss; else ''."""
        best, patience = lowest_loss(self.eval_losses, self.eval_losses), self.config.eval.patience
        if best is None or patience is None:
            return ""
        since = sum(step > best for step in self.eval_losses)
        return (
            ""
            if since < patience
            else (
                f"{count(since, 'evaluation')} without a lower loss than that of step {best}, "
                f"{self.eval_losses[best]:.4f}"
            )
        )

    # checkpoints

    def _meta(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "tokens": self.tokens,
            "data": self.backend.loader.describe(),
            "mesh": mesh_text(self.backend.mesh_shape),
            "model_config": model_to_dict(self.backend.model),
            "config": config_to_dict(self.config),
            "base": self._base,
        }

    @functools.cached_property
    def _base(self) -> dict[str, Any] | None:
        """The folder of frozen weights that the run reads again, and what identifies them.

        An adapter is of them, or they are the reference of DPO.
        """
        frozen = self.config.lora.rank or self.config.objective == DPO
        folder = weights_folder(self.config) if frozen else None
        if folder is None:
            return None
        return {"folder": str(folder.resolve()), "weights": weights_sample(folder)}

    def _finish_last_save(self, live: LiveLine) -> None:
        """Wait for the save before; that it failed is told once, and nothing saved is lost."""
        try:
            self.checkpoints.wait()
        except MeshwrightError as problem:
            self.check_owned()
            live.print(f"warning: {problem}")

    def _save_if_possible(self, step: int, live: LiveLine) -> None:
        """A save that fails loses nothing that was saved before: training continues."""
        with self.watchdog.paused("saving"), self.clock.paused():
            self._finish_last_save(live)
            if not self.backend.is_finite():
                live.print(f"warning: step {step} is not saved: its weights are not finite")
                return
            try:
                self.backend.save(step, self._meta(step))
                self.unconfirmed.append(step)
            except MeshwrightError as problem:
                self.check_owned()
                live.print(f"warning: {problem}; training continues")

    def _save_for_good(self, step: int, live: LiveLine) -> None:
        """The last save of a run: waited for, and tried again if the one of this step failed."""
        with self.watchdog.paused("saving"):
            self._finish_last_save(live)
            there = step in self.checkpoints.steps()  # disks of other hosts may be behind
            if self.backend.from_first("saved" if there else ""):
                return
            if not self.backend.is_finite():
                raise MeshwrightError(
                    f"the weights of step {step} are not finite, so they are not saved. "
                    f"{self._newest_healthy()}"
                )
            self.backend.save(step, self._meta(step), wait=True)

    def _close(self) -> None:
        with self.watchdog.paused("saving"):
            try:
                self.checkpoints.close()
            except MeshwrightError as problem:  # not in place of the error that ends the run
                with contextlib.suppress(LostFolderError):  # that is the error
                    self.check_owned()
                    self._log(f"warning: {problem}")

    def _set_later_aside(self) -> None:
        """Checkpoints after the step resumed from would be mistaken for this run's own."""
        after = -1 if self.saved is None else self.saved
        aside = self.checkpoints.set_aside_after(after, self.config.run / METRICS)
        if aside is not None:
            later, place = aside
            self._log(
                f"set aside in {place}: {count(len(later), 'later checkpoint')} "
                f"({', '.join(map(str, later[-8:]))}) and a copy of {METRICS}; delete that folder "
                "when you no longer need it"
            )

    def _log(self, text: str) -> None:
        if self.is_main:
            print_line(text)


def check_run_folder(config: TrainConfig) -> None:
    """Raise if the run's folder cannot be one."""
    if problem := not_a_folder(config.run.absolute()):
        raise MeshwrightError(f"--run {str(config.run)!r} {problem}")

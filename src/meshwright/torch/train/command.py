"""One process of a training run under torchrun."""

import contextlib
import logging
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import torch
import torch.distributed as dist

from meshwright.checkpoint import folders
from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.launch import pause_timeout_s
from meshwright.layouts import Rules
from meshwright.machines import CHIPS, Machine, chip_of_kind
from meshwright.meshes import MeshSpec
from meshwright.models import is_torch_only, to_hf_config, what_fits
from meshwright.planner import Choice
from meshwright.planner.schedules import fsdp2
from meshwright.torch.dims import ACTIVATIONS
from meshwright.torch.explanation import explain
from meshwright.torch.load import tensor_files
from meshwright.torch.mesh import axes_of
from meshwright.torch.mesh import mesh as make_mesh
from meshwright.torch.train.backend import TorchBackend, check_batch, on_meta
from meshwright.torch.train.launcher import start_processes, starts_processes
from meshwright.torch.train.settings import check_settings
from meshwright.torch.train.store import join
from meshwright.training import (
    AUTO,
    NONE,
    Loop,
    TrainConfig,
    check_run_folder,
    check_same_settings,
    file_rules,
    supervised,
    weights_folder,
)

PACKAGES = ("torch", "transformers")  # whose versions must be the same


def train(
    config: TrainConfig,
    arguments: Sequence[str] = (),
    choose: Callable[[TrainConfig, Machine], tuple[TrainConfig, str]] | None = None,
) -> None:
    """Run to the end, to a signal, or to a mistake; the same call in every process.

    With `config.processes`, and not under torchrun, this starts them with the same `arguments` of
    the command line. `choose` gives the settings of a mesh where the one asked for is 'auto', and
    what to say about them.
    """
    model = check_settings(config)
    if config.mesh == AUTO and is_torch_only(model):
        raise MeshwrightError(
            f"--mesh auto: the plan has no figures of {to_hf_config(model)['model_type']} models; "
            f"name the mesh, such as --mesh dp={config.processes or 1}"
        )
    starts = starts_processes(config)
    if config.mesh != AUTO:
        _check_mesh(config, model)
    elif choose is None:
        raise MeshwrightError("mesh 'auto' needs a function that chooses one: train(.., choose)")
    # jax computes learning rates alone, and must leave the GPU to PyTorch
    jax.config.update("jax_platforms", "cpu")
    if starts:
        processes = config.processes or 1
        if config.mesh == AUTO and choose is not None:  # its mistakes are told once
            choose(config, machine_of(processes * [processes]))
        _check_folders(config)
        start_processes(processes, arguments)
        return
    joined, store = join(pause_timeout_s(config.hang_timeout))
    if joined.process_id:  # every process has the same warnings
        warnings.simplefilter("ignore")
        logging.getLogger("torch").setLevel(logging.ERROR)
    with supervised(config, joined, store) as (stop, watchdog), connection_errors():
        with watchdog.paused("comparing settings"):
            check_same_settings(config, store, joined, PACKAGES)
            if config.mesh == AUTO and choose is not None:
                config, words = choose(config, machine_of_run())
                if joined.process_id == 0:
                    print(words, flush=True)
                check_same_settings(config, store, joined, PACKAGES)
        check_run_folder(config)
        with watchdog.paused("preparing"):
            backend = TorchBackend(config, make_mesh(config.mesh))
        Loop(backend, stop, store, watchdog).run()
    dist.destroy_process_group()


@contextlib.contextmanager
def connection_errors() -> Iterator[None]:
    """What gloo says of a broken connection, without its source lines and its good wishes."""
    try:
        yield
    except RuntimeError as failure:
        text = str(failure).partition("\n")[0]
        if "gloo/" not in text:
            raise
        raise ConnectionError(re.sub(r"^\[[^]]*\]\s*|[.\s]*GLHF!\s*$", "", text)) from None


def _check_mesh(config: TrainConfig, model: Any) -> None:
    """What can be known before the processes are started."""
    spec = MeshSpec.parse(config.mesh)
    given = math.prod(size for size in spec.sizes if size > 0)
    processes = int(os.environ.get("WORLD_SIZE", config.processes or 1))
    if processes == 1 and given > 1:
        raise MeshwrightError(
            f"mesh {spec.quoted} needs {given if spec.is_resolved else f'a multiple of {given}'} "
            f"processes, and this one was started alone; add --processes {given}, or start it with "
            f"torchrun --nproc-per-node {given} --no-python -- meshwright train …"
        )
    by = "started by torchrun" if "WORLD_SIZE" in os.environ else f"--processes {processes}"
    spec = spec.resolve(processes, where=f"in the run ({by})")
    axes = axes_of(spec)
    check_batch(config, axes)
    if (rules := file_rules(config)) is not None:  # what is split depends on them
        _check_axes(config.rules, rules, spec)
        return
    if is_torch_only(model):
        explain(on_meta(to_hf_config(model), torch.float32), spec)
        return
    decoder, parallel = model, config.compute.sequence_parallel

    def problem(
        mesh_shape: Mapping[str, int], batch: int, seq: int, accumulation: int = config.accumulation
    ) -> str | None:
        tp = mesh_shape.get(axes.tensor or "", 1)
        ranks = math.prod(mesh_shape.values()) // tp
        if batch % (parts := ranks * accumulation):
            return f"batch={batch} is not divisible by dp·fsdp·accumulation={parts}"
        choice = Choice.of(fsdp=ranks, tp=tp, sequence_parallel=parallel)
        return fsdp2.indivisible(decoder, choice, batch, seq)

    def refuses(mesh_shape: Mapping[str, int], batch: int, seq: int) -> bool:
        return seq > decoder.max_seq or problem(mesh_shape, batch, seq) is not None

    def accepts(accumulation: int) -> bool:
        return problem(sizes, config.batch, config.seq, accumulation) is None

    sizes = dict(zip(spec.names, spec.sizes, strict=True))
    if (why := problem(sizes, config.batch, config.seq)) is not None:
        fits = what_fits(sizes, config.batch, config.seq, refuses, config.accumulation, accepts)
        raise MeshwrightError(f"mesh {spec.quoted}: {why}; {fits}")


def _check_folders(config: TrainConfig) -> None:
    """That of the run, and that of the weights unless it resumes with all of them."""
    check_run_folder(config)
    saved = folders.complete_steps(config.run / "checkpoints")
    weights = weights_folder(config)
    reads = not saved or config.resume_from == NONE or config.lora.rank
    if weights is not None and reads:
        tensor_files(weights)


def _check_axes(file: str, rules: Rules, spec: MeshSpec) -> None:
    """Rules for weights name axes that the mesh has."""
    for rule in rules.rules:
        unknown = [axis for axis in rule.axes if axis not in spec.names]
        if unknown and rule.dim not in {*ACTIVATIONS, *rules.optional}:
            axis = unknown[0]
            usual = axis in ("dp", "fsdp", "tp", "sp")
            hint = f"; add {axis}=1 to the mesh" if usual else did_you_mean(axis, spec.names)
            raise MeshwrightError(
                f"rules {file!r}: '{rule.dim} -> {'+'.join(rule.axes)}' names axis {axis!r}, which "
                f"mesh {spec.quoted} does not have{hint}"
            )


def machine_of_run() -> Machine:
    """The devices of all processes, one each, for the plan; the same call in each."""
    on_hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(on_hosts, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return machine_of(on_hosts)


def machine_of(on_hosts: Sequence[int]) -> Machine:
    """`on_hosts`: for each process of the run, how many its host runs."""
    processes, own = len(on_hosts), on_hosts[0]
    if not torch.cuda.is_available():
        return Machine(CHIPS["cpu"], (processes,))
    if len(set(on_hosts)) > 1:
        raise MeshwrightError(
            f"--mesh auto: one host runs {max(on_hosts)} of the {processes} processes, another "
            f"{min(on_hosts)}; start the same number on each, or name the mesh"
        )
    kind = torch.cuda.get_device_name()
    try:
        return Machine(chip_of_kind(kind, "gpu"), (processes // own, own))
    except MeshwrightError:
        raise MeshwrightError(
            f"--mesh auto: the plan has no figures of {kind!r}; name the mesh, such as "
            f"--mesh fsdp={processes}"
        ) from None

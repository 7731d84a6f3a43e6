"""`mw.plan` and `mw.prove`: of a model, or of any function; `mw.train`: with either backend."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, overload

from meshwright.errors import MeshwrightError, explained
from meshwright.machines import Machine
from meshwright.planner import Plan, ProgramPlan, planned
from meshwright.planner import plan as plan_model
from meshwright.proofs import ProgramProof, Proof, plan_program, prove_program
from meshwright.proofs import prove as prove_config
from meshwright.serving import TextSampler
from meshwright.training import TrainConfig, settings_flags, with_commits
from meshwright.training import train as train_in_jax


@overload
def plan(
    function: Callable[..., Any], args: Sequence[Any], /, on: Machine | str, **settings: Any
) -> ProgramPlan: ...
@overload
def plan(
    model: Any,
    /,
    on: Machine | str,
    batch: int | None = None,
    seq: int | None = None,
    **settings: Any,
) -> Plan: ...
def plan(what: Any, /, *arguments: Any, **settings: Any) -> Any:
    """Every mesh for a model on a machine, ranked; or what a function costs on one.

    plan("llama-3.1-8b", "v5p:4x4x4", batch=256, seq=4096) → Plan, as meshwright.planner.plan
    plan(step, (state, batch), on="h100:8") → ProgramPlan, as meshwright.proofs.plan_program

    The function is plain, jitted, or a step of Flax NNX or Equinox; its arguments are arrays or
    abstract ones, whose shardings say where they lie. Their mesh need not have devices.
    """
    return (plan_program if callable(what) else plan_model)(what, *arguments, **settings)


@overload
def prove(
    function: Callable[..., Any], args: Sequence[Any], /, on: Machine | str, **settings: Any
) -> ProgramProof: ...
@overload
def prove(config: TrainConfig, /, on: Machine | str, **settings: Any) -> Proof: ...
def prove(what: Any, /, *arguments: Any, **settings: Any) -> Any:
    """Compile a train step, or a function, for a machine that is not here.

    prove(TrainConfig("tiny", mesh="fsdp=8", batch=8), "cpu:8") → Proof, as meshwright.proofs.prove
    prove(step, (state, batch), on="v5p:2x2x2") → ProgramProof, as meshwright.proofs.prove_program
    """
    return (prove_program if callable(what) else prove_config)(what, *arguments, **settings)


@explained("mw.train(mw.TrainConfig('tiny', steps=200))")
def train(
    config: TrainConfig, *, words: Sequence[str] | None = None, named: Collection[str] = ()
) -> None:
    """Train a model; the same call resumes a run that stopped, on this mesh or another.

    It ends with the run, with a signal (the run is saved), or with a MeshwrightError. With the mesh
    'auto' the plan chooses it, and settings that have their default value and are not in `named`.
    `words` are the command line of other processes that this starts; by default the config's own.
    """
    if words is None:
        words = [config.model, *settings_flags(config)]
    config = with_commits(config)  # before processes join: others wait minutes, not hours
    choose = functools.partial(planned, named=named)
    if config.backend == "jax":
        train_in_jax(config, choose, TextSampler)
        return
    try:
        from meshwright.torch.train import train as train_in_torch
    except ImportError as missing:
        raise MeshwrightError(f"--backend torch: {missing}") from None
    train_in_torch(config, words, choose)

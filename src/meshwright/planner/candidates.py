"""Every mesh of a number of devices, and the strategies of attention that serve one."""

import dataclasses
from collections.abc import Iterator

from meshwright.arithmetic import divisors
from meshwright.machines import Machine
from meshwright.ops.attention import FLOPS_PER_BYTE, STRATEGIES, choose_strategy
from meshwright.ops.attention import refusal as strategy_refusal
from meshwright.planner.parts import split_of
from meshwright.planner.result import Choice, Job


def meshes(devices: int) -> Iterator[Choice]:
    """Every (dp, fsdp, tp, sp) that makes up this many devices."""
    for tp in divisors(devices):
        for sp in divisors(devices // tp):
            for dp in divisors(devices // (tp * sp)):
                yield Choice({"dp": dp, "fsdp": devices // (tp * sp * dp), "tp": tp, "sp": sp})


def with_strategy(job: Job, choice: Choice, machine: Machine) -> Choice:
    """The choice with its strategy of attention over sp named: what auto takes on this machine.

    A strategy that was named is kept, if it can serve.
    """
    if choice.size("sp") == 1:
        return choice
    split = dataclasses.replace(split_of(job, choice), flops_per_byte=flops_per_byte(machine))
    return dataclasses.replace(choice, strategy=choose_strategy(split, choice.strategy))


def strategies(job: Job, choice: Choice) -> tuple[str, ...]:
    """Every strategy that can serve a mesh; an error says why none can."""
    if choice.size("sp") == 1:
        return (choice.strategy,)
    split = split_of(job, choice)
    able = tuple(name for name in STRATEGIES if strategy_refusal(split, name) is None)
    return able or (choose_strategy(split),)  # which raises, with the reasons


def flops_per_byte(machine: Machine) -> float:
    """FLOP/s of a chip for each byte/s to its neighbour, as train takes it."""
    nominal = machine.chip.platform == "cpu"
    return FLOPS_PER_BYTE if nominal else machine.chip.flops_per_byte

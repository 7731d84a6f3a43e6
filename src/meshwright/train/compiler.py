"""What the compilers are asked for."""

import os
from typing import Any

import jax

from meshwright.errors import MeshwrightError

# XLA's CPU runtime starts collectives that do not depend on one another in any order, which can
# differ from device to device: two of them that share devices then wait for each other for ever
# (jax 0.10 to 0.12). With this scheduler it keeps the program's order.
_IN_ORDER = ("xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED")


def compiler_options(platform: str) -> dict[str, Any]:
    """For jax.jit(…, compiler_options=…) of a program with collectives."""
    return dict([_IN_ORDER]) if platform == "cpu" else {}


def keep_cpu_collectives_in_order() -> None:
    """The same for every program of this process; call it before jax compiles anything."""
    name, value = _IN_ORDER
    flags = os.environ.get("XLA_FLAGS", "")
    if name not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{name}={value}".strip()


def simulate_devices(number: int) -> None:
    """This many devices on the CPU; call it before jax is used."""
    if number < 1:
        raise MeshwrightError(f"--cpu-devices {number} must be at least 1")
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError as reason:
        raise MeshwrightError(f"--cpu-devices {number} comes too late: {reason}") from None

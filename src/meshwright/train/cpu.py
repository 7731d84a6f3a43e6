"""Devices simulated on the CPU, and room for what they wait on; asked for before jax is used."""

import os

import jax

from meshwright.errors import MeshwrightError

# XLA's CPU runtime starts collectives that do not depend on one another in any order, which can
# differ from device to device, and each holds a thread while it waits for the others. With a thread
# a core, devices that began with different collectives wait for each other for ever (jax 0.10 to
# 0.12). With room for all that can be under way at once they cannot.
_THREADS = 128


def make_room_for_cpu_collectives() -> None:
    """Let XLA's CPU runtime have many threads; it reads NPROC when jax is first used."""
    os.environ.setdefault("NPROC", str(_THREADS))


def simulate_devices(number: int) -> None:
    """This many devices on the CPU; call it before jax is used."""
    if number < 1:
        raise MeshwrightError(f"--cpu-devices {number} must be at least 1")
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError as reason:
        raise MeshwrightError(f"--cpu-devices {number} comes too late: {reason}") from None

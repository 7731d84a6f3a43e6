"""Simulate devices on the CPU, with enough threads; call before jax is used."""

import functools
import os

from meshwright.errors import MeshwrightError

# XLA's CPU runtime starts collectives that do not depend on one another in any order, which can
# differ from device to device, and each holds a thread while it waits for the others. With one
# thread per core, devices that started different collectives deadlock (jax 0.10 to 0.12). With
# enough threads for all collectives in flight they cannot.
_THREADS = 128

# Each simulated device has a thread. On two cores jax starts 1,024 devices in 0.3 s and 4,096 in
# 2.3 s, and the time grows with the square of their number.
MOST_DEVICES = 1024


# A collective whose devices do not all arrive in 40 s ends the process. On a busy machine that is
# too soon.
_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds"


def make_room_for_cpu_collectives() -> None:
    """Give the devices of XLA's CPU runtime threads and time; it is told when jax is first used."""
    os.environ.setdefault("NPROC", str(_THREADS))
    flags = os.environ.get("XLA_FLAGS", "")
    if _PATIENCE not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_PATIENCE}=1200".strip()


@functools.cache
def quick_compile_options(platform: str) -> dict[str, bool] | None:
    """The compiler_options of a train step; None: the compiler's own.

    Without its fusion emitters, XLA's CPU compiler takes two thirds of the time for the step of
    `tiny`, which runs as fast. Newer ones (jax 0.12) no longer have this option, and refuse it.
    """
    import jax

    options = {"xla_cpu_use_fusion_emitters": False}
    if platform != "cpu":
        return None
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(0).compile()
    except jax.errors.JaxRuntimeError:
        return None
    return options


def check_simulated(number: int, given: str = "") -> None:
    """Raise a MeshwrightError for too many devices; `given` is what the user wrote."""
    given = given or f"--cpu-devices {number}"
    if number < 1:
        raise MeshwrightError(f"{given} must be at least 1")
    if number > MOST_DEVICES:
        raise MeshwrightError(
            f"{given}: at most {MOST_DEVICES:,} devices can be simulated on one CPU; for more, "
            "plan or prove a machine of TPUs or GPUs (meshwright machines lists them)"
        )


def simulate_devices(number: int) -> None:
    """Simulate this number of devices on the CPU; call before jax is used."""
    import jax

    check_simulated(number)
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError as reason:
        raise MeshwrightError(f"--cpu-devices {number} comes too late: {reason}") from None

"""The devices of a machine that is not here, as its compiler knows them."""

import importlib.util
import os
import platform
from typing import Any

from meshwright.errors import MeshwrightError, not_installed
from meshwright.machines import COMPILED_GPUS, Machine, is_compiled_for

# what libtpu calls the chips, and how to have one device a chip where two would be the default
_TPU_NAMES = {"7x": "tpu7x"}
_TPU_CONFIGS = {"v4": "megacore"}
# without these words libtpu looks for a TPU that is here, and only one process may load it
_TPU_ABSENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}

# XLA makes its schedule fit into this much of the memory of a GPU that is not here; of one that is
# here, into all that the allocator gives out
_SCHEDULED = 0.80


def check_extra(machine: Machine) -> None:
    """That the machine's compiler is installed and takes as many devices as the machine has."""
    kind = machine.chip.platform
    if kind == "cpu":
        from meshwright.launch import check_simulated

        check_simulated(machine.num_devices, given=f"machine '{machine}'")
    if kind == "tpu" and importlib.util.find_spec("libtpu") is None:
        _missing(machine, "the TPU compiler (libtpu)", "tpu")
    if machine.chip.device_kinds[0].startswith("AMD"):
        raise MeshwrightError(
            f"'{machine}' cannot be proved: jax has no compiler for AMD GPUs that runs without "
            f"one; meshwright plan MODEL --on {machine} estimates it"
        )
    if kind == "gpu" and not _gpu_plugins():
        _missing(machine, "the GPU compiler (jax's CUDA plugin)", "cuda")


# (system, processor) that there are packages for, as the markers in pyproject.toml say
_PACKAGED = {"tpu": [("Linux", "x86_64")], "cuda": [("Linux", "x86_64"), ("Linux", "aarch64")]}


def _missing(machine: Machine, package: str, extra: str) -> None:
    system, processor = platform.system(), platform.machine()
    if (system, processor) not in _PACKAGED[extra]:
        there = " or ".join(name for _, name in _PACKAGED[extra])
        raise MeshwrightError(
            f"to compile for '{machine}' {package} must be installed, and there is none for "
            f"{system} on {processor}: prove it on Linux on {there}"
        )
    raise MeshwrightError(
        f"to compile for '{machine}' {package} must be installed, and is not: "
        f"{not_installed(extra)}; no {'TPU' if extra == 'tpu' else 'GPU'} is needed"
    )


def _gpu_plugins() -> list[str]:
    names = [f"jax_cuda{version}_plugin" for version in (13, 12)]
    return [name for name in names if importlib.util.find_spec(name) is not None]


def compiler_versions(machine: Machine) -> str:
    """The compiler that would be used, for the record and for the cache."""
    from importlib.metadata import PackageNotFoundError, version

    names = {"tpu": ["jax", "libtpu"], "gpu": ["jax", *_gpu_plugins()], "cpu": ["jax"]}
    versions = []
    for name in names[machine.chip.platform]:
        try:
            versions.append(f"{name} {version(name.replace('_', '-'))}")
        except PackageNotFoundError:
            versions.append(name)
    return ", ".join(versions)


def child_environment(machine: Machine) -> dict[str, str]:
    """For a process that compiles for the machine."""
    environment = dict(os.environ)
    environment.pop("XLA_FLAGS", None)  # ours say nothing of another machine's compiler
    if machine.is_tpu:
        return environment | _TPU_ABSENT
    environment["JAX_PLATFORMS"] = "cpu"
    return environment


def absent_devices(machine: Machine) -> list[Any]:
    """jax devices to build a mesh of; nothing can be put on them."""
    import jax
    from jax.experimental import topologies

    if machine.chip.platform == "cpu":
        from meshwright.launch import make_room_for_cpu_collectives, simulate_devices

        make_room_for_cpu_collectives()
        simulate_devices(machine.num_devices)
        return jax.devices("cpu")[: machine.num_devices]
    if machine.is_tpu:
        name = machine.chip.kind
        shape = "x".join(map(str, machine.shape))
        options: dict[str, Any] = {"wrap": list(machine.wraps)}
        if name in _TPU_CONFIGS:
            options["chip_config_name"] = _TPU_CONFIGS[name]
        if machine.slices > 1:
            options["num_slices"] = machine.slices
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{_TPU_NAMES.get(name, name)}:{shape}", **options
        )
    else:
        hosts, gpus = machine.shape
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            topology=f"{machine.slices}x{hosts}x{gpus}",
            target_config=gpu_description(machine),
        )
    return list(topology.devices)


def gpu_description(machine: Machine) -> str:
    """The text by which XLA knows a GPU that is not here."""
    chip = machine.chip
    if not is_compiled_for(chip):
        raise MeshwrightError(
            f"the GPU compiler needs more about {chip.name!r} than the catalogue has; it can "
            f"compile for {', '.join(COMPILED_GPUS)}"
        )
    (major, minor), cores, clock, l2, shared, shared_optin = COMPILED_GPUS[chip.kind]
    kib = 1024
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * kib}
  shared_memory_per_core: {shared * kib}
  threads_per_core_limit: {1536 if (major, minor) == (8, 9) else 2048}
  core_count: {cores}
  fpus_per_core: {64 if (major, minor) == (8, 0) else 128}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(chip.memory_bandwidth)}
  l2_cache_size: {l2 * kib * kib}
  clock_rate_ghz: {clock}
  device_memory_size: {int(chip.usable_bytes / _SCHEDULED)}
  shared_memory_per_block_optin: {shared_optin * kib}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
runtime_version: {{ major: 13 minor: 0 patch: 0 }}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 15 }}
device_description_str: "{chip.device_kinds[0]}"
"""

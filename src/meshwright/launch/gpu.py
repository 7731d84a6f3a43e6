"""Settings of the GPU runtime, made before it starts."""

import os

from meshwright.machines import free_host_memory
from meshwright.present import GIB

SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
PINNED = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def take_most_gpu_memory() -> None:
    """Let jax allocate 95% of a GPU's memory instead of 75%, and pin what the host has free.

    Of the host's memory jax pins at most 64 GiB by default, and only as activations need it.
    """
    os.environ.setdefault(SHARE, "0.95")
    free = free_host_memory()
    if free is not None:
        os.environ.setdefault(PINNED, str(max(1, free // GIB)))

"""What a GPU's runtime must be told before it starts."""

import os

SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def take_most_gpu_memory() -> None:
    """jax takes 75% of a GPU's memory unless told otherwise; a run may have nearly all of it."""
    os.environ.setdefault(SHARE, "0.95")

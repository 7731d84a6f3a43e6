"""What the TPU compiler is told beyond its defaults."""

from collections.abc import Mapping

# libtpu makes all-gathers asynchronous only on v5e by itself. With these options the compiler
# starts the next all-gather of a loop during matmuls that do not need it; benchmarks/RESULTS.md
# has the cost
_OVERLAP = {
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
}


def compiler_options(platform: str, overlap: bool) -> Mapping[str, str]:
    """For jax.jit, on a mesh of devices of this platform."""
    return _OVERLAP if overlap and platform == "tpu" else {}

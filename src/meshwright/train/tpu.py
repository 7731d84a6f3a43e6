"""What the TPU compiler is told beyond its defaults."""

from collections.abc import Mapping

# libtpu makes gathers asynchronous only on v5e by itself. With these the compiler starts the next
# gather of a loop inside the matmuls that do not need it; benchmarks/RESULTS.md says what it takes
_OVERLAP = {
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
}


def compiler_options(platform: str, overlap: bool) -> Mapping[str, str]:
    """For jax.jit, on a mesh of devices of this platform."""
    return _OVERLAP if overlap and platform == "tpu" else {}

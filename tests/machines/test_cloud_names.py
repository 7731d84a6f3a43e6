"""Cloud slice names give the topologies that Google's documentation and tools list for them."""

import pytest

from meshwright import Machine

# TPU v4, v5e, v5p, v6e pages of the Cloud TPU documentation; MaxText's accelerator_to_spec_map
PUBLISHED = """
v2-8 2x2, v2-32 4x4, v2-128 8x8, v2-256 8x16, v2-512 16x16,
v3-8 2x2, v3-32 4x4, v3-64 4x8, v3-128 8x8, v3-512 16x16, v3-1024 16x32, v3-2048 32x32,
v4-8 2x2x1, v4-16 2x2x2, v4-32 2x2x4, v4-64 2x4x4, v4-128 4x4x4, v4-256 4x4x8, v4-384 4x4x12,
v4-512 4x8x8, v4-1024 8x8x8, v4-1536 8x8x12, v4-2048 8x8x16, v4-4096 8x16x16,
v5litepod-1 1x1, v5litepod-4 2x2, v5litepod-8 2x4, v5e-16 4x4, v5e-32 4x8, v5e-64 8x8,
v5e-128 8x16, v5e-256 16x16,
v5p-8 2x2x1, v5p-16 2x2x2, v5p-64 2x4x4, v5p-128 4x4x4, v5p-256 4x4x8, v5p-384 4x4x12,
v5p-512 4x8x8, v5p-640 4x4x20, v5p-768 4x8x12, v5p-896 4x4x28, v5p-1024 8x8x8, v5p-1152 4x12x12,
v5p-1280 4x8x20, v5p-1536 8x8x12, v5p-1920 4x12x20, v5p-2048 8x8x16, v5p-3072 8x12x16,
v5p-3456 12x12x12, v5p-4096 8x16x16, v5p-8192 16x16x16, v5p-12288 16x16x24,
v6e-1 1x1, v6e-4 2x2, v6e-8 2x4, v6e-64 8x8, v6e-256 16x16,
tpu7x-8 2x2x1, tpu7x-128 4x4x4, tpu7x-256 4x4x8, tpu7x-1024 8x8x8
"""
PAIRS = [tuple(pair.split()) for pair in PUBLISHED.replace("\n", " ").split(",")]


@pytest.mark.parametrize(("name", "topology"), PAIRS)
def test_the_name_gives_the_published_topology(name: str, topology: str) -> None:
    assert "x".join(map(str, Machine.parse(name).shape)) == topology

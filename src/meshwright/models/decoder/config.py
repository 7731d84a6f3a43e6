"""Sizes of a dense decoder, and presets with the published ones."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from meshwright.errors import MeshwrightError, did_you_mean


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    vocab: int
    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    tied_embeddings: bool = False


# sizes as in each model's published config.json
PRESETS: Mapping[str, DecoderConfig] = MappingProxyType(
    {
        "tiny": DecoderConfig(
            vocab=256, layers=4, embed=128, heads=8, kv_heads=4, head_dim=16, mlp=512
        ),
        "llama-2-7b": DecoderConfig(
            vocab=32000, layers=32, embed=4096, heads=32, kv_heads=32, head_dim=128, mlp=11008
        ),
        "llama-3.2-1b": DecoderConfig(
            vocab=128256,
            layers=16,
            embed=2048,
            heads=32,
            kv_heads=8,
            head_dim=64,
            mlp=8192,
            tied_embeddings=True,
        ),
        "llama-3.1-8b": DecoderConfig(
            vocab=128256, layers=32, embed=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336
        ),
        "llama-3.1-70b": DecoderConfig(
            vocab=128256, layers=80, embed=8192, heads=64, kv_heads=8, head_dim=128, mlp=28672
        ),
        "llama-3.1-405b": DecoderConfig(
            vocab=128256, layers=126, embed=16384, heads=128, kv_heads=8, head_dim=128, mlp=53248
        ),
    }
)


def preset(name: str) -> DecoderConfig:
    """The config of that name."""
    if name not in PRESETS:
        raise MeshwrightError(f"model {name!r} is not a preset{did_you_mean(name, PRESETS)}")
    return PRESETS[name]

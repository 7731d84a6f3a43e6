"""Published models by name; sizes as in each model's config.json. FLAN-T5s are T5 1.1s."""

from collections.abc import Mapping
from types import MappingProxyType

from meshwright.models.t5.config import T5Config


def _t5(layers: int, embed: int, heads: int, mlp: int, head_dim: int = 64) -> T5Config:
    return T5Config(32128, layers, layers, embed, heads, head_dim, mlp)


def _later(
    layers: int, embed: int, heads: int, mlp: int, head_dim: int = 64, activation: str = "gelu"
) -> T5Config:
    return T5Config(
        32128, layers, layers, embed, heads, head_dim, mlp,
        activation=activation, gated=True, tied_embeddings=False, scaled_output=False,
    )  # fmt: skip


_LATER = {
    "small": _later(8, 512, 6, 1024),
    "base": _later(12, 768, 12, 2048),
    "large": _later(24, 1024, 16, 2816),
    "xl": _later(24, 2048, 32, 5120),
    "xxl": _later(24, 4096, 64, 10240),
}

PRESETS: Mapping[str, T5Config] = MappingProxyType(
    {
        # ours, for tests and demos: bytes, an end-of-document token and sentinels
        "t5-tiny": T5Config(
            384, 2, 2, 128, 8, 16, 256,
            activation="gelu", gated=True, tied_embeddings=False, scaled_output=False,
        ),
        "t5-small": _t5(6, 512, 8, 2048),
        "t5-base": _t5(12, 768, 12, 3072),
        "t5-large": _t5(24, 1024, 16, 4096),
        "t5-3b": _t5(24, 1024, 32, 16384, head_dim=128),
        "t5-11b": _t5(24, 1024, 128, 65536, head_dim=128),
        **{f"t5-v1.1-{size}": config for size, config in _LATER.items()},
        **{f"flan-t5-{size}": config for size, config in _LATER.items()},
        "ul2": _later(32, 4096, 16, 16384, head_dim=256, activation="silu"),
    }
)  # fmt: skip

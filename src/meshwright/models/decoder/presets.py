"""Published models by name; sizes as in each model's config.json."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from meshwright.models.decoder.config import DecoderConfig
from meshwright.ops import Llama3Scaling, Rope, YarnScaling


def _llama3(
    layers: int,
    embed: int,
    heads: int,
    mlp: int,
    head_dim: int = 128,
    factor: float | None = 8.0,
    tied: bool = False,
) -> DecoderConfig:
    scaling = None if factor is None else Llama3Scaling(factor, 1.0, 4.0, 8192)
    return DecoderConfig(
        vocab=128256,
        layers=layers,
        embed=embed,
        heads=heads,
        kv_heads=8,
        head_dim=head_dim,
        mlp=mlp,
        tied_embeddings=tied,
        max_seq=8192 if factor is None else 131072,
        rope=Rope(theta=500000.0, scaling=scaling),
    )


def _qwen(
    layers: int,
    embed: int,
    heads: int,
    kv_heads: int,
    mlp: int,
    *,
    version: int,
    head_dim: int = 128,
    tied: bool = False,
    vocab: int = 151936,
    max_seq: int = 40960,
    **more: Any,
) -> DecoderConfig:
    return DecoderConfig(
        vocab=vocab,
        layers=layers,
        embed=embed,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=mlp,
        tied_embeddings=tied,
        max_seq=max_seq,
        rope=Rope(theta=1000000.0),
        norm_eps=1e-6,
        qkv_bias=version == 2,
        qk_norm=version == 3,
        **more,
    )


def _llama2(layers: int, embed: int, heads: int, kv_heads: int, mlp: int) -> DecoderConfig:
    return DecoderConfig(32000, layers, embed, heads, kv_heads, 128, mlp, max_seq=4096)


def _lwm(
    layers: int, embed: int, heads: int, mlp: int, max_seq: int = 2048, norm_eps: float = 1e-6
) -> DecoderConfig:
    """A size of LWM's and EasyLM's, which call it 7b."""
    return DecoderConfig(
        32000, layers, embed, heads, heads, embed // heads, mlp, max_seq=max_seq, norm_eps=norm_eps
    )


def _mistral(vocab: int, theta: float, window: int | None) -> DecoderConfig:
    return DecoderConfig(
        vocab, 32, 4096, 32, 8, 128, 14336,
        max_seq=32768, rope=Rope(theta), sliding_window=window,
        hf_config={"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
    )  # fmt: skip


def _qwen3_moe(layers: int, embed: int, heads: int, mlp: int) -> DecoderConfig:
    return _qwen(layers, embed, heads, 4, mlp, version=3, experts=128, experts_per_token=8)


def _mixtral(layers: int, embed: int, heads: int, mlp: int, max_seq: int) -> DecoderConfig:
    return DecoderConfig(
        32000, layers, embed, heads, 8, 128, mlp, max_seq=max_seq, rope=Rope(1000000.0),
        experts=8, experts_per_token=2,
    )  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> DecoderConfig:
    return DecoderConfig(
        201088, layers, 2880, 64, 8, 64, 2880,
        max_seq=131072, rope=Rope(150000.0, YarnScaling(32.0, 4096, truncate=False)),
        pattern=[{"sliding_window": 128}, {}], sinks=True, qkv_bias=True, output_bias=True,
        activation="gelu_sigmoid", mlp_bias=True, mlp_clamp=7.0, router_bias=True,
        experts=experts, experts_per_token=4,
    )  # fmt: skip


PRESETS: Mapping[str, DecoderConfig] = MappingProxyType(
    {
        # ours, for tests and demos: bytes and an end-of-document token
        "tiny": DecoderConfig(
            vocab=320, layers=4, embed=128, heads=8, kv_heads=4, head_dim=16, mlp=512, max_seq=2048
        ),
        "tiny-moe": DecoderConfig(
            vocab=320,
            layers=4,
            embed=128,
            heads=8,
            kv_heads=4,
            head_dim=16,
            mlp=128,
            max_seq=2048,
            experts=8,
            experts_per_token=2,
        ),
        "llama-2-7b": _llama2(32, 4096, 32, 32, 11008),
        "llama-2-13b": _llama2(40, 5120, 40, 40, 13824),
        "llama-2-70b": _llama2(80, 8192, 64, 8, 28672),
        "llama-3-8b": _llama3(32, 4096, 32, 14336, factor=None),
        "llama-3-70b": _llama3(80, 8192, 64, 28672, factor=None),
        "llama-3.1-8b": _llama3(32, 4096, 32, 14336),
        "llama-3.1-70b": _llama3(80, 8192, 64, 28672),
        "llama-3.1-405b": _llama3(126, 16384, 128, 53248),
        "llama-3.2-1b": _llama3(16, 2048, 32, 8192, head_dim=64, factor=32.0, tied=True),
        "llama-3.2-3b": _llama3(28, 3072, 24, 8192, factor=32.0, tied=True),
        "lwm-200m": _lwm(14, 1024, 8, 2048),
        "lwm-1b": _lwm(22, 2048, 16, 5504),
        "lwm-3b": _lwm(26, 3200, 32, 8640),
        "lwm-7b": _lwm(32, 4096, 32, 11008, max_seq=4096),
        "lwm-13b": _lwm(40, 5120, 40, 13824),
        "lwm-30b": _lwm(60, 6656, 52, 17920),
        "lwm-65b": _lwm(80, 8192, 64, 22016, norm_eps=1e-5),
        "mistral-7b": _mistral(32000, 10000.0, 4096),
        "mistral-7b-v0.3": _mistral(32768, 1000000.0, None),
        "qwen2.5-0.5b": _qwen(
            24, 896, 14, 2, 4864, version=2, head_dim=64, tied=True, max_seq=32768
        ),
        "qwen2.5-1.5b": _qwen(28, 1536, 12, 2, 8960, version=2, tied=True, max_seq=131072),
        "qwen2.5-7b": _qwen(28, 3584, 28, 4, 18944, version=2, vocab=152064, max_seq=131072),
        "qwen2.5-72b": _qwen(80, 8192, 64, 8, 29568, version=2, vocab=152064, max_seq=131072),
        "qwen3-0.6b": _qwen(28, 1024, 16, 8, 3072, version=3, tied=True),
        "qwen3-1.7b": _qwen(28, 2048, 16, 8, 6144, version=3, tied=True),
        "qwen3-4b": _qwen(36, 2560, 32, 8, 9728, version=3, tied=True),
        "qwen3-8b": _qwen(36, 4096, 32, 8, 12288, version=3),
        "qwen3-14b": _qwen(40, 5120, 40, 8, 17408, version=3),
        "qwen3-32b": _qwen(64, 5120, 64, 8, 25600, version=3),
        "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 768),
        "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 1536),
        "mixtral-8x7b": _mixtral(32, 4096, 32, 14336, 32768),
        "mixtral-8x22b": _mixtral(56, 6144, 48, 16384, 65536),
        "gpt-oss-20b": _gpt_oss(24, 32),
        "gpt-oss-120b": _gpt_oss(36, 128),
        "deepseek-v3": DecoderConfig(
            vocab=129280,
            layers=61,
            embed=7168,
            heads=128,
            kv_heads=128,
            head_dim=192,
            mlp=2048,
            max_seq=163840,
            rope=Rope(10000.0, YarnScaling(40.0, 4096, attention_factor=1.0), interleaved=True),
            score_scale=192**-0.5 * (0.1 * math.log(40) + 1) ** 2,
            norm_eps=1e-6,
            kv_rank=512,
            q_rank=1536,
            rope_dim=64,
            value_dim=128,
            leading=3,
            leading_mlp=18432,
            experts=256,
            experts_per_token=8,
            router_scores="sigmoid",
            router_scale=2.5,
            selection_bias=True,
            expert_groups=8,
            expert_groups_per_token=4,
            shared_mlp=2048,
        ),
        "olmoe-1b-7b": DecoderConfig(
            50304,
            16,
            2048,
            16,
            16,
            128,
            1024,
            experts=64,
            experts_per_token=8,
            router_normalized=False,
            qk_norm=True,
            joint_qk_norm=True,
        ),
    }
)

"""Tiny random models of every architecture, made by transformers."""

from pathlib import Path
from typing import Any

import pytest

SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
DEEPSEEK = SIZES | {
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_key_value_heads": 4, "q_lora_rank": 16,
    "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "n_shared_experts": 2, "num_mtp_layers": 0,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 4.0, "mscale": 1.0,
        "mscale_all_dim": 0.8, "original_max_position_embeddings": 16,
    },
}  # fmt: skip
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4}
# by name: the class of transformers' config, and its fields
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2Config",
        {"vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 48},
    ),
    "opt": (
        "OPTConfig",
        {
            "vocab_size": 48, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
        },
    ),
    "phi3": ("Phi3Config", SIZES | {"sliding_window": 9}),
    "phi3-partial": (
        "Phi3Config",
        SIZES | {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    # LongRoPE: the original length is below and above that of the tests' sequences
    "phi3-longer": ("Phi3Config", SIZES | {
        "original_max_position_embeddings": 2,
        "rope_parameters": LONG_ROPE | {"short_factor": [1.0] * 4, "long_factor": [1.1, 2.0, 7.5, 30.0]},
    }),
    "phi3-shorter": ("Phi3Config", SIZES | {
        "original_max_position_embeddings": 64, "max_position_embeddings": 512, "tie_word_embeddings": True,
        "rope_parameters": LONG_ROPE | {
            "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.5, 2.5], "long_factor": [9.0] * 3,
        },
    }),
    "olmo2": ("Olmo2Config", SIZES),
    "granite": (
        "GraniteConfig",
        SIZES | {
            "embedding_multiplier": 12.0, "logits_scaling": 4.0, "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
        },
    ),
    "smollm3": ("SmolLM3Config", SIZES | {"num_hidden_layers": 5, "no_rope_layer_interval": 2}),
    "gpt_neox": (
        "GPTNeoXConfig",
        {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
        | {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25}},
    ),
    "gptj": (
        "GPTJConfig",
        {
            "vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
            "n_inner": 48, "rotary_dim": 4,
        },
    ),
    "gemma2": (
        "Gemma2Config",
        SIZES | {
            "num_hidden_layers": 3, "head_dim": 16, "query_pre_attn_scalar": 9, "sliding_window": 5,
            "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        SIZES | {
            "num_hidden_layers": 5, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] + 2 * ["sliding_attention"],
        },
    ),
    "mixtral": ("MixtralConfig", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        SIZES | {
            "head_dim": 16, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
    ),
    # transformers looks at no max_window_layers here: every layer has the window
    "qwen3_moe-window": (
        "Qwen3MoeConfig",
        SIZES | {
            "head_dim": 16, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 1,
            "use_sliding_window": True, "sliding_window": 5,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        SIZES | {
            "num_hidden_layers": 3, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
            "sliding_window": 5, "swiglu_limit": 1.5,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 15000.0, "factor": 4.0, "truncate": False,
                "beta_fast": 4.0, "beta_slow": 1.0, "original_max_position_embeddings": 16,
            },
        },
    ),
    "deepseek_v3": ("DeepseekV3Config", DEEPSEEK),
    "deepseek_v3-plain": (
        "DeepseekV3Config",
        {name: value for name, value in DEEPSEEK.items() if name != "rope_parameters"}
        | {
            "num_hidden_layers": 2, "first_k_dense_replace": 0, "q_lora_rank": None,
            "rope_interleave": False, "norm_topk_prob": False,
        },
    ),
    "olmoe": ("OlmoeConfig", SIZES | {"num_experts": 8, "num_experts_per_tok": 2}),
}  # fmt: skip


def make(name: str) -> Any:
    """The model in float32, every parameter random, biases and norms too."""
    torch: Any = pytest.importorskip("torch", reason="the outside reader needs torch")
    transformers: Any = pytest.importorskip("transformers", reason="the outside reader")
    kind, fields = MODELS[name]
    config = getattr(transformers, kind)(
        **fields, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=random)
            param.copy_(0.3 * noise if param.ndim > 1 else param + 0.2 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=random))
    return model.eval()


def save(name: str, folder: Path) -> Any:
    """The model, written to a folder."""
    model = make(name)
    model.save_pretrained(folder)
    return model

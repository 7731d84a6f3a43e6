"""Tiny Hugging Face models and their data, the same in every process."""

from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2,
    "num_attention_heads": 12, "num_key_value_heads": 6, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 4,
}  # fmt: skip
# what mixtures of experts have beside, by model_type
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 8},
    "deepseek_v3": {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "moe_intermediate_size": 24, "first_k_dense_replace": 1, "num_key_value_heads": 12,
        "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
        "v_head_dim": 4,
    },
}  # fmt: skip


def tiny(kind: str, tied: bool = False, **changes: Any) -> Any:
    """A model with random weights, the same in every process, of the sizes that it has."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = SIZES | EXPERTS.get(kind, {}) | {"tie_word_embeddings": tied} | changes
    known = AutoConfig.for_model(kind)
    config = AutoConfig.for_model(kind, **{k: v for k, v in sizes.items() if hasattr(known, k)})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def batches(steps: int, sequences: int = 6, length: int = 12) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (sequences, length)
    return [torch.randint(3, 96, shape, generator=generator) for _ in range(steps)]


def optimizer_of(model: torch.nn.Module) -> torch.optim.AdamW:
    # a large eps: with the usual one a rounding error of a gradient near 0 changes its whole step
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """The model's own loss, which it computes in float32; of a model in float64, in float64."""
    if next(model.parameters()).dtype != torch.float64:
        return model(input_ids=batch, labels=batch).loss
    logits = model(input_ids=batch).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def train(model: Any, optimizer: Any, data: list[torch.Tensor]) -> list[float]:
    losses = []
    for batch in data:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

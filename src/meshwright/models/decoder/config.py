"""The config of a dense decoder: sizes, and where Llama, Mistral and Qwen differ."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ops import Rope


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    vocab: int
    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    tied_embeddings: bool = False  # the LM head is the embedding, transposed
    max_seq: int = 4096
    rope: Rope = dataclasses.field(default_factory=Rope)
    norm_eps: float = 1e-5
    qkv_bias: bool = False  # Qwen 2 and 2.5
    output_bias: bool = False  # with qkv_bias: Llama's attention_bias
    qk_norm: bool = False  # Qwen 3: each head's query and key through an RMS norm
    sliding_window: int | None = None  # Mistral: a token sees itself and window - 1 before it
    # the Hugging Face config.json it was read from, for writing it again: no part of the model
    hf_config: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        sizes = ("vocab", "layers", "embed", "heads", "kv_heads", "head_dim", "mlp", "max_seq")
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise MeshwrightError(f"{name}={value!r} of a model must be a whole number from 1")
        if self.heads % self.kv_heads:
            raise MeshwrightError(
                f"heads={self.heads} cannot share kv_heads={self.kv_heads} evenly; heads must be a "
                "multiple of kv_heads"
            )
        if self.head_dim % 2:
            raise MeshwrightError(
                f"head_dim={self.head_dim} is odd; it must be even: rotary embedding rotates pairs"
            )
        if not 0 < self.norm_eps < 1:  # nan too
            raise MeshwrightError(f"norm_eps={self.norm_eps} must be above 0, such as 1e-5")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise MeshwrightError(f"sliding_window={self.sliding_window} must be at least 1")

    @property
    def matmul_params(self) -> int:
        """Weights that each token is multiplied with: all matrices and the LM head."""
        attention = 2 * self.embed * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.embed * self.mlp) + self.embed * self.vocab

    def keys_seen(self, seq: int) -> float:
        """Keys that a query sees, on average: half of the sequence, fewer within a window."""
        window = min(self.sliding_window or seq, seq)
        return window * (2 * seq - window) / seq / 2

    def flops_per_token(self, seq: int, keys_seen: float | None = None) -> int:
        """Of a training step, forward and backward: 6 per weight, and causal attention.

        Each visible key costs 12 per number of a head. `keys_seen`: those of a query of packed
        documents, on average; without it, of sequences that are one document each.
        """
        keys = self.keys_seen(seq) if keys_seen is None else keys_seen
        attention = 12 * self.layers * self.heads * self.head_dim * keys
        return 6 * self.matmul_params + round(attention)

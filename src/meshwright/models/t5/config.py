"""What a T5 is: its sizes and the choices in which T5 1.0, 1.1, FLAN-T5 and UL2 differ."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshwright.errors import MeshwrightError, did_you_mean

ACTIVATIONS = ("relu", "gelu", "silu")


@dataclasses.dataclass(frozen=True)
class T5Config:
    vocab: int
    encoder_layers: int
    decoder_layers: int
    embed: int
    heads: int
    head_dim: int
    mlp: int
    activation: str = "relu"  # gelu: its approximation by tanh
    gated: bool = False  # from 1.1 on: the activation multiplies a second projection
    tied_embeddings: bool = True  # the LM head is the embedding, transposed
    scaled_output: bool = True  # hidden states are multiplied by embed^-0.5 before the LM head
    buckets: int = 32  # of relative positions
    max_distance: int = 128  # from which on all positions share a bucket
    norm_eps: float = 1e-6
    max_seq: int = 512  # that it was trained with: relative positions have no end
    start_token: int = 0  # which the decoder begins with
    # the Hugging Face config.json it was read from, for writing it again: no part of the model
    hf_config: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        sizes = (
            "vocab", "encoder_layers", "decoder_layers", "embed", "heads", "head_dim", "mlp",
            "max_seq",
        )  # fmt: skip
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise MeshwrightError(f"{name}={value!r} of a model must be a whole number from 1")
        if self.activation not in ACTIVATIONS:
            raise MeshwrightError(
                f"activation={self.activation!r} is not one of a T5"
                f"{did_you_mean(self.activation, ACTIVATIONS)}"
            )
        if self.buckets < 4 or self.buckets % 4:
            raise MeshwrightError(
                f"buckets={self.buckets} must be a multiple of 4: half of them are for keys ahead, "
                "and half of these for exact distances"
            )
        if self.max_distance <= self.buckets // 2:
            raise MeshwrightError(
                f"max_distance={self.max_distance} must be above buckets / 2 = {self.buckets // 2},"
                " which have a distance each"
            )
        if not 0 < self.norm_eps < 1:  # nan too
            raise MeshwrightError(f"norm_eps={self.norm_eps} must be above 0, such as 1e-6")
        if not 0 <= self.start_token < self.vocab:
            raise MeshwrightError(f"start_token={self.start_token} is not one of {self.vocab}")

    @property
    def kv_heads(self) -> int:
        """As many as there are heads."""
        return self.heads

    def flops(self, encoder_seq: int, seq: int) -> int:
        """Of a training step for one example, forward and backward: 6 a weight, and attention.

        Each key that a query sees costs 12 for each number of a head.
        """
        attention = 4 * self.embed * self.heads * self.head_dim
        # keys and values of the cross-attention are made of the encoder's tokens
        of_keys = attention // 2
        mlp = (3 if self.gated else 2) * self.embed * self.mlp
        per_encoder_token = self.encoder_layers * (attention + mlp) + self.decoder_layers * of_keys
        per_token = self.decoder_layers * (2 * attention - of_keys + mlp) + self.embed * self.vocab
        pairs = self.encoder_layers * encoder_seq**2
        pairs += self.decoder_layers * seq * (seq // 2 + encoder_seq)
        weights = encoder_seq * per_encoder_token + seq * per_token
        return 6 * weights + 12 * self.heads * self.head_dim * pairs

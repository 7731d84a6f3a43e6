"""FLOPs of a network of transformers, counted from its layers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from meshwright.present import amount
from meshwright.training import StepWork


@dataclasses.dataclass(frozen=True)
class NetworkWork(StepWork):
    """`weights`: those of all Linear layers; `layers`: those with attention."""

    weights: int = 0
    layers: int = 0

    @classmethod
    def of(cls, network: Any, model: Any, lengths: Mapping[str, int]) -> "NetworkWork":
        linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
        weights = sum(module.in_features * module.out_features for module in linear)
        return cls(model, lengths, weights, network.config.num_hidden_layers)

    def flops_per_token(self, keys_seen: float | None = None) -> float:
        # scores and their product with values: 2 · 2 FLOPs a key, three times in a step
        keys = (self.lengths["tokens"] + 1) / 2 if keys_seen is None else keys_seen
        attention = 12 * self.layers * self.model.heads * self.model.head_dim * keys
        return 6 * self.weights + attention

    @property
    def formula(self) -> str:
        weights = self.flops_per_token(0.0)
        return (
            f"{amount(weights, 'FLOP')} (6 a weight) + "
            f"{amount(self.flops_per_token(1.0) - weights, 'FLOP')} × keys seen: those that a "
            "query attends to within its document, on average; windows are not counted"
        )

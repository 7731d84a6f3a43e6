"""The FLOPs of a training step."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshwright.models import family_of
from meshwright.present import amount


@dataclasses.dataclass(frozen=True)
class StepWork:
    """Of a model (its config) that reads fields of these lengths."""

    model: Any
    lengths: Mapping[str, int]

    @property
    def tokens_of_example(self) -> int:
        """Tokens that the model reads, of an encoder and of a decoder."""
        return self.lengths["tokens"] + self.lengths.get("encoder_tokens", 0)

    def flops_per_token(self, keys_seen: float | None = None) -> float:
        """FLOPs of a training step, for each token that the model reads.

        `keys_seen`: keys that a query attends to, as steps report it of packed documents.
        """
        packed = {} if keys_seen is None else {"keys_seen": keys_seen}
        flops = family_of(self.model).flops(self.model, self.lengths, **packed)
        return flops / self.tokens_of_example

    @property
    def formula(self) -> str:
        """How the FLOPs of a token are counted, in words."""
        if family_of(self.model).keys_seen is None:
            return f"{amount(self.flops_per_token(), 'FLOP')}: 6 a weight, and attention"
        weights = self.flops_per_token(0.0)
        return (
            f"{amount(weights, 'FLOP')} (6 a weight) + "
            f"{amount(self.flops_per_token(1.0) - weights, 'FLOP')} × keys seen: those that a "
            "query attends to within its document and window, on average"
        )

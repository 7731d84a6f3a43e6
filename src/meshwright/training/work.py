"""The FLOPs of a training step."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax

from meshwright.models import family_of
from meshwright.present import amount


@dataclasses.dataclass(frozen=True)
class StepWork:
    """Of a model (its config) that reads fields of these lengths."""

    model: Any
    lengths: Mapping[str, int]
    frozen: int = 0
    """Weights of matmuls that are not trained, of a model that reads one sequence: the step has no
    matmul for their gradients."""
    has_reference: bool = False
    """Whether the tokens also go through a frozen model, forward only."""

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
        passes = 4 / 3 if self.has_reference else 1.0  # of a step, a third is the forward pass
        return passes * flops / self.tokens_of_example - 2 * self.frozen

    @property
    def formula(self) -> str:
        """How the FLOPs of a token are counted, in words."""
        if family_of(self.model).keys_seen is None:
            return f"{amount(self.flops_per_token(), 'FLOP')}: {self._per_weight}, and attention"
        weights = self.flops_per_token(0.0)
        return (
            f"{amount(weights, 'FLOP')} ({self._per_weight}) + "
            f"{amount(self.flops_per_token(1.0) - weights, 'FLOP')} × keys seen: those that a "
            "query attends to within its document and window, on average"
        )

    @property
    def _per_weight(self) -> str:
        each = 8 if self.has_reference else 6
        return f"{each} a weight" + (f", {each - 2} a frozen one" if self.frozen else "")


def frozen_weights(arrays: Any) -> int:
    """Of these ArraySpecs, the weights of layers and LM head that are not trained."""
    frozen = 0
    for spec in jax.tree.leaves(arrays):
        if spec.kind == "matrix":
            trained = spec.trained_part
            frozen += math.prod(spec.unpadded_shape)
            frozen -= 0 if trained is None else math.prod(trained.unpadded_shape)
    return frozen

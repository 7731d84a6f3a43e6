"""Settings of the loss and of LoRA; a command's help reads them without jax."""

import dataclasses
import math
from typing import Literal

from meshwright.errors import MeshwrightError, explained

QUANTIZED_BASES = ("int8", "nf4")


@dataclasses.dataclass(frozen=True)
class LossConfig:
    z_loss: float = 0.0
    """Weight of the squared log-normalizer, which keeps logits from drifting."""
    chunk: int = 2048
    """Tokens whose logits a device holds at a time."""
    load_balance: float = 0.001
    """Of a mixture of experts, weight of the loss that grows with uneven loads of the experts."""
    router_z: float = 0.0
    """The same of the squared log-normalizer of the router's logits."""
    balance_bias: float = 0.0
    """How far a step moves the selection bias of each expert towards an even load, as DeepSeek-V3
    does in place of a loss: 0.001 is usual."""

    def __post_init__(self) -> None:
        for name in ("load_balance", "router_z", "balance_bias"):
            if not getattr(self, name) >= 0:
                raise MeshwrightError(
                    f"loss.{name}={getattr(self, name)} must be at least 0; 0 means that there is "
                    "none"
                )
        if not self.z_loss >= 0:  # nan too
            raise MeshwrightError(
                f"loss.z_loss={self.z_loss} must be at least 0; 0 means no z-loss, 1e-4 is usual"
            )
        if self.chunk < 1:
            raise MeshwrightError(f"loss.chunk={self.chunk} must be at least 1")


@explained("mw.LoraConfig(rank=16)")
@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Settings of LoRA: what is trained beside frozen weights, and how those are kept."""

    rank: int = 0
    """Rank of the trained update of each matrix, such as 16; 0: no LoRA."""
    alpha: float = 16.0
    """The update is multiplied with alpha / rank."""
    rslora: bool = False
    """Rank-stabilized: multiply with alpha / √rank instead."""
    dropout: float = 0.0
    """Probability with which training drops each input of the update, as PEFT's lora_dropout."""
    targets: tuple[str, ...] = ()
    """Adapt only matrices with one of these names (q_proj), or in whose path or Hugging Face name
    one of these regexes is found (attention). Without any: every matrix of the layers but those of
    experts."""
    base: Literal["auto", "float32", "bfloat16", "int8", "nf4"] = "auto"
    """Dtype of the frozen weights; auto: that of matmuls. int8 and nf4 (4 bits) are of the matrices
    of the layers: embedding, LM head and norms stay as with auto."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise MeshwrightError(f"lora.rank={self.rank} must be at least 0; 0 means no LoRA")
        if not 0 < self.alpha < math.inf:
            raise MeshwrightError(f"lora.alpha={self.alpha} must be a number above 0, such as 16")
        if not 0 <= self.dropout < 1:
            raise MeshwrightError(f"lora.dropout={self.dropout} must be from 0 to below 1")
        fields = dataclasses.fields(self)
        if not self.rank and any(getattr(self, one.name) != one.default for one in fields):
            raise MeshwrightError("the settings lora.… need --lora.rank, such as --lora.rank 16")

    @property
    def quantizes(self) -> bool:
        """Whether the frozen matrices of the layers are in 8 or 4 bits."""
        return self.base in QUANTIZED_BASES

    @property
    def scale(self) -> float:
        """What multiplies the update."""
        if not self.rank:
            return 1.0
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

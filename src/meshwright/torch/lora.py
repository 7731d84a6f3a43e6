"""LoRA: frozen Linear layers, each with two trained factors beside its weight.

The factors are parameters of the layer, lora_A [rank, inputs] and lora_B [outputs, rank], so they
are split as its weight is: A along the inputs, B along the outputs.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn import functional

A, B = "lora_A", "lora_B"
_PEFT = "base_model.model."  # what PEFT's names begin with


class LoraLinear(nn.Linear):
    """A Linear layer with an update of low rank: weight + scale · B·A."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        bias = linear.bias is not None
        super().__init__(linear.in_features, linear.out_features, bias, device="meta")
        self.weight, self.bias, self.scale = linear.weight, linear.bias, scale
        device = linear.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, linear.in_features, device=device))
        self.lora_B = nn.Parameter(torch.empty(linear.out_features, rank, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        update = functional.linear(functional.linear(x, self.lora_A), self.lora_B)
        return super().forward(x) + self.scale * update


def add_factors(
    model: nn.Module, layers: Iterable[str], rank: int, scale: float, base: torch.dtype
) -> None:
    """Give Linear layers factors in float32, and freeze the rest: matrices in the dtype `base`."""
    for param in model.parameters():
        param.requires_grad_(False)
        if param.ndim > 1:
            param.data = param.data.to(base)
    for path in layers:
        linear = model.get_submodule(path)
        assert isinstance(linear, nn.Linear), f"{path} is no Linear layer"
        model.set_submodule(path, LoraLinear(linear, rank, scale))


def is_factor(name: str) -> bool:
    """Whether a parameter's name is that of a factor."""
    return name.endswith((f".{A}", f".{B}"))


def matrix_of(factor: str) -> str:
    """The name of the weight that a factor is beside."""
    return f"{factor.rpartition('.')[0]}.weight"


def peft_name(name: str) -> str:
    """What PEFT calls a factor; names of other parameters stay.

    >>> peft_name("model.layers.0.mlp.up_proj.lora_A")
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return f"{_PEFT}{name}.weight" if is_factor(name) else name


def adapted_layer(peft: str) -> str:
    """The path of the layer that has a factor of this name of PEFT's.

    >>> adapted_layer("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight")
    'model.layers.0.mlp.up_proj'
    """
    return peft.removeprefix(_PEFT).removesuffix(".weight").rpartition(".")[0]


def saved_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """What a checkpoint holds of the parameters, by name: factors if there are any, else all."""
    named = list(model.named_parameters())
    yield from [one for one in named if is_factor(one[0])] or named

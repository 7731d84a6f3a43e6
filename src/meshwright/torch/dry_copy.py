"""The copy of a model that a dry run calls: on the CPU in float32, without weight matrices."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_DENSE = 2**20  # elements of a parameter up to which each has a value of its own


class DryCopy:
    """A copy of a model, each of whose forward passes begins with the same buffers."""

    def __init__(self, model: nn.Module, generator: torch.Generator, in_training: bool) -> None:
        """`in_training`: also with all modules in training, and with those that are so now."""
        self.model = _without_matrices(model, generator)
        flags_now = self._flags()
        self.model.eval()
        modes = [self._flags()]
        if in_training:
            self.model.train()
            modes += [self._flags(), flags_now]
        self._modes = list(dict.fromkeys(modes))
        self._buffers = [(module, dict(module._buffers)) for module in self.model.modules()]
        self._values = [
            (buffer, buffer.clone()) for buffer in self.model.buffers() if 0 not in buffer.stride()
        ]

    def modes(self) -> Iterator[bool]:
        """Put the copy into one mode after another; gives whether any module trains in it."""
        for flags in self._modes:
            for (module, buffers), is_training in zip(self._buffers, flags, strict=True):
                module.training = is_training
                module._buffers.update(buffers)
            for buffer, value in self._values:  # as of running statistics and counters
                buffer.data.copy_(value)
            yield any(flags)

    def _flags(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self.model.modules())


def _without_matrices(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """A copy in float32 on the CPU; large parameters repeat one slice, which takes no memory."""

    def values(tensor: torch.Tensor, is_param: bool) -> torch.Tensor:
        if not is_param and not tensor.is_meta:
            return as_float(tensor).clone()
        if not tensor.is_floating_point():
            return torch.ones_like(tensor, device="cpu")
        shape = tensor.shape if tensor.numel() <= _DENSE else (1, *tensor.shape[1:])
        numbers = torch.rand(shape, dtype=torch.float32, generator=generator, device="cpu")
        return numbers.expand(tensor.shape)

    memo: dict[int, Any] = {}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(values(param.detach(), True), param.is_floating_point())
    for buffer in model.buffers():
        memo[id(buffer)] = values(buffer, False)
    bare = copy.deepcopy(model, memo)
    for module in bare.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and value.is_meta:
                setattr(module, name, values(value, False))
        if hasattr(module, "gradient_checkpointing"):  # of transformers, in training
            module.gradient_checkpointing = False
        config = getattr(module, "config", None)
        for own in (config, getattr(config, "text_config", None)):
            if own is not None and hasattr(own, "use_cache"):
                own.use_cache = False  # caches would give split keys and values to the outside
    attention = getattr(getattr(bare, "config", None), "_attn_implementation", None)
    if attention not in (None, "eager", "sdpa"):  # kernels of GPUs
        bare.set_attn_implementation("sdpa" if bare._supports_sdpa else "eager")
    return bare


def as_float(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, in float32 if it is of floating point."""
    copied = tensor.detach().to("cpu")
    return copied.float() if copied.is_floating_point() else copied

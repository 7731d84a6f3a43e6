"""Split layers whose class has a forward pass of its own, compared with the complete layer.

The dry run puts random numbers in the place of what a Linear or Embedding gives, so it does not see
what a subclass computes: `act(x @ weight.T)` is right on a part of the outputs, and wrong as a sum
of parts of the inputs. They are compared in evaluation and in training, with the same random
numbers: dropout of the complete input is the same in every part, that of a part is not. Nor does
the dry run see whether they draw random numbers, so layers that are whole run here too.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from meshwright.errors import MeshwrightError
from meshwright.torch.lora import LoraLinear
from meshwright.torch.placement import generic

_KNOWN = (nn.Linear.forward, nn.Embedding.forward, LoraLinear.forward)


def check_own_forward(model: nn.Module, kinds: Mapping[str, str], tp: int) -> frozenset[bool]:
    """Refuse a subclass that is not the sum, or the concatenation, of what its parts compute.

    Returns in which modes any draws random numbers: in evaluation (False), in training (True).
    """
    checked = set()
    modes: set[bool] = set()
    for path, kind in kinds.items():
        module: Any = model.get_submodule(path)
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        if "forward" in vars(module):
            if kind == "whole":
                modes |= {False, True}  # not known
                continue
            raise MeshwrightError(
                f"{path!r} is split over tp, and its forward was replaced by another function, "
                "which cannot be checked on parts; give it a rule that keeps it whole over tp"
            )
        if type(module).forward in _KNOWN:
            continue
        key = (generic(path), kind, type(module), module.weight.shape)
        if key in checked:
            continue
        checked.add(key)
        for is_training in (False, True):
            with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
                why, is_random = _in_parts(module, kind, tp, is_training)
            if is_random:
                modes.add(is_training)
            if why and kind != "whole":
                raise MeshwrightError(
                    f"{path!r}: the forward of {type(module).__name__} {why} ({kind} over tp"
                    f"{', in training mode' if is_training else ''}); give it a rule that keeps it "
                    "whole over tp"
                )
    return frozenset(modes)


def _in_parts(module: Any, kind: str, tp: int, is_training: bool) -> tuple[str | None, bool]:
    """Why a layer cannot be split, if so, and whether it draws random numbers."""
    generator = torch.default_generator
    module = copy.copy(module)
    module.training = is_training
    weight, bias, x = given = _numbers(module, kind, tp)
    try:
        complete: Any = _run(module, weight, bias, x)
        is_random = not torch.equal(generator.get_state(), generator.manual_seed(0).get_state())
    except Exception as reason:  # whatever the class raises
        return f"cannot be checked on parts: with one input it raises {type(reason).__name__}", True
    if not isinstance(complete, torch.Tensor):
        output_type = type(complete).__name__
        return f"cannot be checked on parts: it returns a {output_type}, not a tensor", True
    if kind == "whole":
        return None, is_random
    try:
        joined = _of_parts(module, kind, tp, given, complete)
    except Exception as reason:
        return f"raises {type(reason).__name__} on a part of its weight", True
    limit = 0.01 * complete.abs().max().item()  # of matmuls in 16 bits
    is_same = complete.shape == joined.shape and torch.allclose(complete, joined, 0.0, limit)
    return None if is_same else "computes something else on a part of its weight", is_random


def _numbers(module: Any, kind: str, tp: int) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """A weight, a bias and an input."""
    torch.default_generator.manual_seed(0)
    outputs, width = module.weight.shape
    is_vocab, is_linear = kind == "vocab", isinstance(module, nn.Linear)
    if is_linear and kind != "whole":
        weight = torch.randn(outputs, width)
    else:  # a table may be large: numbers that repeat take no memory
        weight = torch.randn(outputs, 1) if is_vocab else torch.randn(1, width)
        weight = weight.expand(outputs, width)
    if is_linear:
        x = torch.randn(2, 3, width)
    else:
        # where all tokens have the same entry: ones, as of a mask from which positions are counted
        x = torch.full((2, 8), min(outputs - 1, 1))
        if is_vocab:  # the first and last of each part, and others
            size = -(-outputs // tp)
            ends = [[at, min(at + size, outputs) - 1] for at in range(0, outputs, size)]
            x = torch.cat([torch.tensor(ends), torch.randint(outputs, (8, 2))])
    bias = torch.randn(outputs) if getattr(module, "bias", None) is not None else None
    return weight, bias, x


def _of_parts(module: Any, kind: str, tp: int, given: Any, complete: torch.Tensor) -> Any:
    """What the parts compute of the weight, bias and input, joined as ranks join it."""
    weight, bias, x = given
    parts = weight.chunk(tp, 0 if kind in ("colwise", "vocab") else -1)
    joined: Any
    if kind == "colwise":
        biases = [None] * tp if bias is None else bias.chunk(tp)
        pairs = zip(parts, biases, strict=True)
        joined = torch.cat([_run(module, part, own, x) for part, own in pairs], -1)
    elif kind == "rowwise":
        pairs = zip(parts, x.chunk(tp, -1), strict=True)
        joined = sum(_run(module, part, None, own) for part, own in pairs)
        joined = joined if bias is None else joined + bias
    elif kind == "vocab":
        joined = torch.zeros_like(complete)
        for rank, part in enumerate(parts):
            tokens = x - rank * len(parts[0])
            own = (tokens >= 0) & (tokens < len(part))
            entry = _run(module, part, None, torch.where(own, tokens, 0))
            joined += entry * own.unsqueeze(-1)
    else:
        joined = torch.cat([_run(module, part, None, x) for part in parts], -1)
    return joined


def _run(module: nn.Module, weight: torch.Tensor, bias: Any, x: torch.Tensor) -> Any:
    """The forward pass of a copy of a module with another weight and bias."""
    torch.default_generator.manual_seed(0)
    bare = copy.copy(module)
    bare.padding_idx = None  # which has to do with gradients only, and is another in each part
    bare._parameters = {"weight": weight} | ({"bias": bias} if "bias" in module._parameters else {})
    bare._buffers = {name: _on_cpu(value) for name, value in module._buffers.items()}
    bare._modules = copy.deepcopy(module._modules)
    for each in bare._modules.values():
        if each is not None:
            each._apply(_on_cpu).train(module.training)
    return bare.forward(x)


def _on_cpu(values: torch.Tensor | None) -> torch.Tensor | None:
    """Where there are no values yet, some that no activation or scale is trivial with."""
    if values is None or not values.is_meta:
        return None if values is None else values.detach().cpu().clone()
    return torch.linspace(0.5, 1.5, values.numel()).reshape(values.shape).to(values.dtype)

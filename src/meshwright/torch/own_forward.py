"""Split layers whose class has a forward pass of its own, compared with the complete layer.

The dry run puts random numbers in the place of what a Linear or Embedding gives, so it does not see
what a subclass computes: `act(x @ weight.T)` is right on a part of the outputs, and wrong as a sum
of parts of the inputs. They are compared as in evaluation: random numbers of training, as
of dropout, would differ between parts that are right.
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


def check_own_forward(model: nn.Module, kinds: Mapping[str, str], tp: int) -> None:
    """Refuse a subclass that is not the sum, or the concatenation, of what its parts compute."""
    checked = set()
    for path, kind in kinds.items():
        module: Any = model.get_submodule(path)
        if kind == "whole":
            continue
        if "forward" in vars(module):
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
        with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            why = _why_not_in_parts(module, kind, tp)
        if why:
            raise MeshwrightError(
                f"{path!r}: the forward of {type(module).__name__} {why} ({kind} over tp); give it "
                "a rule that keeps it whole over tp"
            )


def _why_not_in_parts(module: Any, kind: str, tp: int) -> str | None:
    outputs, width = module.weight.shape
    if isinstance(module, nn.Linear):
        weight, x = torch.randn(outputs, width), torch.randn(2, 3, width)
    else:  # a table may be large: numbers that repeat take no memory
        is_vocab = kind == "vocab"
        weight = torch.randn(outputs, 1) if is_vocab else torch.randn(1, width)
        weight = weight.expand(outputs, width)
        # where all tokens have the same entry: ones, as of a mask from which positions are counted
        x = torch.full((2, 8), min(outputs - 1, 1))
        if is_vocab:  # the first and last of each part, and others
            size = -(-outputs // tp)
            ends = [[at, min(at + size, outputs) - 1] for at in range(0, outputs, size)]
            x = torch.cat([torch.tensor(ends), torch.randint(outputs, (8, 2))])
    bias = torch.randn(outputs) if getattr(module, "bias", None) is not None else None
    try:
        complete: Any = _run(module, weight, bias, x)
    except Exception as reason:  # whatever the class raises
        return f"cannot be checked on parts: with one input it raises {type(reason).__name__}"
    if not isinstance(complete, torch.Tensor):
        return f"cannot be checked on parts: it returns a {type(complete).__name__}, not a tensor"
    try:
        joined = _of_parts(module, kind, tp, (weight, bias, x), complete)
    except Exception as reason:
        return f"raises {type(reason).__name__} on a part of its weight"
    limit = 0.01 * complete.abs().max().item()  # of matmuls in 16 bits
    is_same = complete.shape == joined.shape and torch.allclose(complete, joined, 0.0, limit)
    return None if is_same else "computes something else on a part of its weight"


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
    bare = copy.copy(module)
    bare.training = False
    bare.padding_idx = None  # which has to do with gradients only, and is another in each part
    bare._parameters = {"weight": weight} | ({"bias": bias} if "bias" in module._parameters else {})
    bare._buffers = {name: _on_cpu(value) for name, value in module._buffers.items()}
    bare._modules = copy.deepcopy(module._modules)
    for each in bare._modules.values():
        if each is not None:
            each._apply(_on_cpu).eval()
    return bare.forward(x)


def _on_cpu(values: torch.Tensor | None) -> torch.Tensor | None:
    """Where there are no values yet, some that no activation or scale is trivial with."""
    if values is None or not values.is_meta:
        return None if values is None else values.detach().cpu()
    return torch.linspace(0.5, 1.5, values.numel()).reshape(values.shape).to(values.dtype)

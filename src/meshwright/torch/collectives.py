"""Collectives of tensor parallelism on plain tensors, each with that of its backward pass.

`over`: a mesh of one axis.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh


class _Collective(torch.autograd.Function):
    """`kinds`: what happens to the input, and to the gradient of the output."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, kinds: tuple[str, str], dim: int, ranks: tuple[str, int, int]
    ) -> torch.Tensor:
        ctx.backward_kind, ctx.dim, ctx.ranks = kinds[1], dim, ranks
        return _apply(kinds[0], x, dim, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return _apply(ctx.backward_kind, gradients[0], ctx.dim, ctx.ranks), None, None, None


def _apply(kind: str, x: torch.Tensor, dim: int, ranks: tuple[str, int, int]) -> torch.Tensor:
    group, rank, size = ranks
    dim %= x.ndim
    if kind == "none":
        return x.view_as(x)
    if kind == "slice":
        return x.chunk(size, dim)[rank].contiguous()
    operators = torch.ops._c10d_functional
    if kind == "all-reduce":
        return operators.wait_tensor(operators.all_reduce(x.contiguous(), "sum", group))
    if kind == "all-gather":
        parts = operators.all_gather_into_tensor(x.contiguous(), size, group)
        parts = operators.wait_tensor(parts)
        return parts if dim == 0 else torch.cat(parts.chunk(size, 0), dim)
    parts = torch.cat(x.chunk(size, dim), 0)  # reduce-scatter
    return operators.wait_tensor(operators.reduce_scatter_tensor(parts, "sum", size, group))


def _run(x: torch.Tensor, kinds: tuple[str, str], dim: int, over: DeviceMesh) -> torch.Tensor:
    ranks = (over.get_group().group_name, over.get_local_rank(), over.size())
    return _Collective.apply(x, kinds, dim, ranks)


def first_of_rank(size: int, over: DeviceMesh) -> int:
    """Where a rank's part of a dim begins; the last part may be smaller than the others."""
    return min(-(-size // over.size()) * over.get_local_rank(), size)


def share(x: torch.Tensor, over: DeviceMesh) -> torch.Tensor:
    """A complete tensor that each rank uses for its part, so that gradients are summed."""
    return _run(x, ("none", "all-reduce"), 0, over)


def all_reduce(x: torch.Tensor, over: DeviceMesh) -> torch.Tensor:
    """The sum of the parts, which each rank uses in the same way."""
    return _run(x, ("all-reduce", "none"), 0, over)


def all_gather(x: torch.Tensor, dim: int, over: DeviceMesh) -> torch.Tensor:
    """The complete tensor, which each rank uses in the same way."""
    return _run(x, ("all-gather", "slice"), dim, over)


def slice_of_rank(x: torch.Tensor, dim: int, over: DeviceMesh) -> torch.Tensor:
    """A rank's part of a complete tensor."""
    return _run(x, ("slice", "all-gather"), dim, over)


def all_gather_shared(x: torch.Tensor, dim: int, over: DeviceMesh) -> torch.Tensor:
    """The complete tensor, which each rank uses for its part, so that gradients are summed."""
    return _run(x, ("all-gather", "reduce-scatter"), dim, over)


def reduce_scatter(x: torch.Tensor, dim: int, over: DeviceMesh) -> torch.Tensor:
    """A rank's part of the sum."""
    return _run(x, ("reduce-scatter", "all-gather"), dim, over)

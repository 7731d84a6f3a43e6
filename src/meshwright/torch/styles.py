"""Placements → the tensor-parallel style of every module that owns parameters.

PyTorch's own styles do the work for Linear layers (ColwiseParallel, RowwiseParallel). Three styles
here do what it lacks: an embedding of any class split over the vocabulary; parameters that are
whole on every rank, with their gradients summed where the activations are split; and the input of
an attention or mlp block, all-gathered once for all its column-parallel layers.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from meshwright.errors import MeshwrightError
from meshwright.torch.placement import Placements

_SEQUENCE = 1  # the dim of the sequence in [batch, length, embed]


def styles(
    model: nn.Module,
    placements: Placements,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
) -> dict[str, ParallelStyle]:
    """The style of every module, by its path; empty without tensor parallelism."""
    if placements.axes.tp == 1:
        return {}
    kinds = _kinds(model, placements)
    inside = _tensor_blocks(kinds)
    head = _output_head(model)
    between: Any = Shard(_SEQUENCE) if sequence_parallel else Replicate()
    blocks = blocks_of(model)
    split_norms = _norms_between(model, kinds, inside, blocks) if sequence_parallel else set()
    # blocks that are split between the ranks, so that norms and activations see a part
    split_inside = {
        parent
        for parent in inside
        for path, kind in kinds.items()
        if path.rpartition(".")[0] == parent
        and kind == "colwise"
        and not _needs_all_gather(placements.word(path) or "", True)
    }
    found: dict[str, ParallelStyle] = {}
    for path, kind in kinds.items():
        parent = path.rpartition(".")[0]
        word = placements.word(path) or ""
        paired = parent in inside
        if kind == "colwise" and path == head:
            output = Shard(-1) if loss_parallel else Replicate()
            found[path] = ColwiseParallel(
                input_layouts=between, output_layouts=output, use_local_output=not loss_parallel
            )
        elif kind == "colwise":
            output = Replicate() if _needs_all_gather(word, paired) else Shard(-1)
            found[path] = ColwiseParallel(output_layouts=output)
        elif kind == "rowwise":
            splits = word in ("rowwise_split_input", "rowwise_rep") or (not word and not paired)
            found[path] = RowwiseParallel(
                input_layouts=Replicate() if splits else Shard(-1),
                output_layouts=between if paired else Replicate(),
            )
        elif kind == "vocab":
            found[path] = VocabParallel()
        elif kind == "embedding columns":
            found[path] = ColwiseParallel(output_layouts=Replicate())
        else:
            of_heads = word == "replicated_with_grad_allreduce" or (
                parent in split_inside and _is_elementwise(model.get_submodule(path))
            )
            found[path] = Whole(partial_gradient=of_heads or path in split_norms)
    for path in inside:
        # one gather, and in the backward pass one sum, for all column-parallel layers of the block
        if path not in found and _takes_dtensor(model, path, kinds):
            found[path] = BlockInput(between)
    if sequence_parallel:
        found |= {path: SplitSequence() for path in _first_of_each(blocks)}
    if loss_parallel and not isinstance(found.get(head or ""), ColwiseParallel):
        raise MeshwrightError(
            "loss_parallel=True needs an LM head that is split over the vocabulary; this model has "
            f"{'none' if head is None else f'{head!r}, which is not'}: leave it out"
        )
    return found


def _needs_all_gather(word: str, paired: bool) -> bool:
    """Whether a column-parallel layer all-gathers its output: by the plan, or if alone."""
    return word in ("colwise_gather_output", "colwise_rep") or (not word and not paired)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _is_elementwise(module: nn.Module) -> bool:
    """A norm, or an activation with parameters: it takes what a layer before it gives."""
    return all(param is None or param.ndim < 2 for param in module._parameters.values())


def _kinds(model: nn.Module, placements: Placements) -> dict[str, str]:
    """How each module that owns parameters is split."""
    tensor = placements.axes.tensor
    kinds: dict[str, str] = {}
    for path, module in model.named_modules():
        own = {name: f"{path}.{name}" if path else name for name in module._parameters}
        dims = {
            name: placements.by_name[full].dim_of(tensor)
            for name, full in own.items()
            if full in placements.by_name
        }
        if not dims:
            continue
        if all(dim is None for dim in dims.values()):
            kinds[path] = "whole"
        elif isinstance(module, nn.Linear):
            kinds[path] = "colwise" if dims["weight"] == 0 else "rowwise"
            wanted = dict(dims) | {"bias": 0 if kinds[path] == "colwise" else None}
            if "bias" in dims and dims["bias"] != wanted["bias"]:
                fit = f"out@{tensor}" if kinds[path] == "colwise" else "out"
                raise MeshwrightError(
                    f"'{path}.bias' does not go with its weight, which is {kinds[path]}: give it "
                    f"the layout 'out -> {fit}'"
                )
        elif isinstance(module, nn.Embedding):
            kinds[path] = "vocab" if dims["weight"] == 0 else "embedding columns"
        else:
            name = next(full for name, full in own.items() if dims.get(name) is not None)
            raise MeshwrightError(
                f"parameter {name!r} of a {type(module).__name__} is split over {tensor!r}, and "
                "only Linear and Embedding weights can be; give it a rule that keeps it whole "
                f"over {tensor!r}"
            )
    return kinds


def _tensor_blocks(kinds: Mapping[str, str]) -> set[str]:
    """Modules that split inside: with a column-parallel and a row-parallel layer."""
    by_parent: dict[str, set[str]] = {}
    for path, kind in kinds.items():
        by_parent.setdefault(path.rpartition(".")[0], set()).add(kind)
    return {parent for parent, own in by_parent.items() if {"colwise", "rowwise"} <= own}


def _takes_dtensor(model: nn.Module, block: str, kinds: Mapping[str, str]) -> bool:
    """Whether only column-parallel layers read the input of a block."""
    below = {path: kind for path, kind in kinds.items() if path.startswith(f"{block}.")}
    return all(
        kind in ("colwise", "rowwise")
        or (kind == "whole" and _is_elementwise(model.get_submodule(path)))
        for path, kind in below.items()
    )


def blocks_of(model: nn.Module) -> list[str]:
    """The paths of the model's repeated blocks: decoder layers, in order."""
    kinds = getattr(model, "_no_split_modules", None) or ()
    named = [path for path, module in model.named_modules() if type(module).__name__ in kinds]
    lists = (
        [f"{path}.{i}" if path else str(i) for i in range(len(module))]
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    )
    blocks = named or max(lists, key=len, default=[])
    return [path for path in blocks if not any(path.startswith(f"{b}.") for b in blocks)]


def _first_of_each(blocks: list[str]) -> list[str]:
    by_list = {path.rpartition(".")[0]: path for path in reversed(blocks)}
    return list(by_list.values())


def _norms_between(
    model: nn.Module, kinds: Mapping[str, str], inside: set[str], blocks: list[str]
) -> set[str]:
    """The norms that see a part of the sequence; a model of another structure is refused."""
    norms = set()
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    head = _output_head(model)
    for path in kinds:
        module = model.get_submodule(path)
        if any(path.startswith(f"{block}.") for block in inside) or path == head:
            continue
        if kinds[path] == "whole" and _is_norm(module):
            norms.add(path)
        elif module is not embedding:
            raise MeshwrightError(
                f"sequence_parallel=True: {path!r} ({type(module).__name__}) is neither a norm nor "
                "inside an attention or mlp block that is split over tp; leave sequence_parallel "
                "out for this model"
            )
    if head is None or kinds.get(head) != "colwise" or not blocks:
        raise MeshwrightError(
            "sequence_parallel=True needs decoder layers and an LM head that is split over the "
            "vocabulary; leave it out for this model"
        )
    return norms


def _output_head(model: nn.Module) -> str | None:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return next((path for path, module in model.named_modules() if module is head), None)


class Whole(ParallelStyle):
    """Parameters that are whole on every tensor rank, used as plain tensors.

    `partial_gradient`: each rank sees a part of the activations (of the sequence, or of the
    heads), so the gradients of the ranks are summed.
    """

    def __init__(self, partial_gradient: bool = False) -> None:
        super().__init__()
        self.partial_gradient = partial_gradient

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameters(module, device_mesh, dict.fromkeys(module._parameters, Replicate()))
        _with_local_parameters(module, Partial() if self.partial_gradient else Replicate())
        return module

    def __repr__(self) -> str:
        return f"Whole({'partial gradient' if self.partial_gradient else ''})"


class VocabParallel(ParallelStyle):
    """An embedding split over the vocabulary: each rank looks up its own tokens, then all add."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameters(module, device_mesh, dict.fromkeys(module._parameters, Shard(0)))
        entries = module.weight.to_local().shape[0]
        first = entries * device_mesh.get_local_rank()
        lookup = module.forward
        padding = getattr(module, "padding_idx", None)
        if padding is not None:  # an index of this rank's entries
            module.padding_idx = padding - first if first <= padding < first + entries else None

        def forward(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            own = (tokens >= first) & (tokens < first + entries)
            with _local_parameters(module, Shard(0)):
                found = lookup(torch.where(own, tokens - first, 0), *args, **kwargs)
            found = found * own.unsqueeze(-1).to(found.dtype)
            partial = DTensor.from_local(found, device_mesh, [Partial()], run_check=False)
            return partial.redistribute(placements=[Replicate()]).to_local()

        module.forward = forward
        return module


class BlockInput(ParallelStyle):
    """The first tensor of a module's input as a replicated DTensor; `given`: how it comes."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.given = given

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def prepare(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return _with_first_tensor(
                args,
                kwargs,
                lambda x: DTensor.from_local(
                    x, device_mesh, [self.given], run_check=False
                ).redistribute(placements=[Replicate()]),
            )

        module.register_forward_pre_hook(prepare, with_kwargs=True)
        return module


class SplitSequence(ParallelStyle):
    """The first tensor of a module's input, replicated, split along the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def split(x: torch.Tensor) -> torch.Tensor:
            whole = DTensor.from_local(x, device_mesh, [Replicate()], run_check=False)
            return whole.redistribute(placements=[Shard(_SEQUENCE)]).to_local()

        module.register_forward_pre_hook(
            lambda _, args, kwargs: _with_first_tensor(args, kwargs, split), with_kwargs=True
        )
        return module


def distribute_parameters(
    module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Any]
) -> None:
    """Replace a module's own parameters by DTensors; each rank takes its part of what it has."""
    for name, placement in placements.items():
        param = module._parameters.get(name)
        if param is None or isinstance(param, DTensor):
            continue
        part = distribute_tensor(param.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part, requires_grad=param.requires_grad))


def _with_local_parameters(module: nn.Module, gradient: Any) -> None:
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _local_parameters(module, gradient):
            return original(*args, **kwargs)

    module.forward = forward


@contextlib.contextmanager
def _local_parameters(module: nn.Module, gradient: Any) -> Iterator[None]:
    """The module's own DTensor parameters as plain tensors; `gradient`: the placement of theirs."""
    kept = {name: param for name, param in module._parameters.items() if isinstance(param, DTensor)}
    try:
        for name, param in kept.items():
            local: Any = param.to_local(grad_placements=[gradient])
            module._parameters[name] = local
        yield
    finally:
        module._parameters.update(kept)


def _with_first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> Any:
    """The arguments with their first tensor of floating point changed."""

    def is_hidden(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_floating_point()

    for i, value in enumerate(args):
        if is_hidden(value):
            return (*args[:i], change(value), *args[i + 1 :]), kwargs
    for name in ("hidden_states", *kwargs):
        if is_hidden(kwargs.get(name)):
            return args, kwargs | {name: change(kwargs[name])}
    raise MeshwrightError("a module that is split over tp got no tensor as its input")

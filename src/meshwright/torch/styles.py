"""Placements → the tensor-parallel style of every module that owns parameters.

Parameters are DTensors; activations are plain tensors everywhere, so that a model's code may do
with them what it likes. Which of them are parts, `dry_run` finds out: a column-parallel layer keeps
its output split where all that follows, up to a row-parallel layer, is the same on a part;
elsewhere it all-gathers it.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional

from meshwright.errors import MeshwrightError
from meshwright.torch.collectives import (
    all_gather,
    all_gather_shared,
    all_reduce,
    first_of_rank,
    reduce_scatter,
    share,
    slice_of_rank,
)
from meshwright.torch.dry_pass import example_of, with_first_tensor
from meshwright.torch.dry_run import (
    SplitActivations,
    all_gather_note,
    from_first_rank,
    split_activations,
)
from meshwright.torch.dry_sequence import SEQUENCE, with_sequence_parallel
from meshwright.torch.lora import A, B
from meshwright.torch.own_forward import check_own_forward
from meshwright.torch.placement import Placements

_WEIGHT, _LAYER = {"weight"}, {"weight", "bias", A, B}  # what a split layer must and may have


def styles(
    model: nn.Module,
    placements: Placements,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    example: Any = None,
) -> tuple[dict[str, ParallelStyle], SplitActivations]:
    """The style of every module, by its path, and which activations stay split.

    Empty without tensor parallelism. `example`: arguments of a forward pass.
    """
    if placements.axes.tp == 1:
        return {}, SplitActivations()
    kinds, tp = _kinds(model, placements), placements.axes.tp
    head = _output_head(model)
    inputs = example_of(model, example, repeats=tp if sequence_parallel else 1)

    def decide() -> SplitActivations:
        random = check_own_forward(model, kinds, tp)
        if inputs is None:
            missing = "no input of the model is known; give parallelize(…, example=…)"
            return SplitActivations(problem=missing)
        split = split_activations(model, kinds, tp, head, inputs)
        return dataclasses.replace(split, random=split.random | random)

    split = from_first_rank(decide)
    first_blocks = _first_of_each(blocks_of(model)) if sequence_parallel else []
    if sequence_parallel:
        _check_sequence_parallel(model, kinds, split, first_blocks)
        if inputs is None:
            raise MeshwrightError(f"sequence_parallel=True: {split.problem}")
        on_sequence = functools.partial(with_sequence_parallel, model, split, first_blocks)
        split = from_first_rank(functools.partial(on_sequence, str(head), tp, inputs))
    on_parts = split.parameters | split.sequence_parameters
    partial = {id(p) for name, p in model.named_parameters() if name in on_parts}
    chosen: dict[str, ParallelStyle] = {}
    for path, kind in kinds.items():
        stays = path in split.layers
        in_block = path.rpartition(".")[0] in split.blocks
        if kind == "colwise" and path == head:
            chosen[path] = Column(
                "sequence" if sequence_parallel else "complete",
                "DTensor" if loss_parallel else "complete",
            )
        elif kind == "colwise":
            chosen[path] = Column(
                "shared" if path in split.readers else "complete", "part" if stays else "complete"
            )
        elif kind == "rowwise":
            chosen[path] = Row(
                "part" if stays else "complete",
                "sequence" if sequence_parallel and in_block else "complete",
            )
        elif kind == "vocab":
            chosen[path] = VocabParallel()
        elif kind == "embedding columns":
            chosen[path] = EmbeddingColumns()
        else:
            own = model.get_submodule(path)._parameters
            names = {name for name, param in own.items() if id(param) in partial}
            chosen[path] = Whole(names)
    # one gather, and in the backward pass one sum, for all column-parallel layers of a block
    inputs_of = BlockInput("sequence" if sequence_parallel else "complete")
    chosen |= {path: inputs_of for path in split.blocks if path not in chosen}
    chosen |= {path: SplitSequence() for path in first_blocks}
    if loss_parallel and not isinstance(chosen.get(head or ""), Column):
        raise MeshwrightError(
            "loss_parallel=True needs an LM head that is split over the vocabulary; this model has "
            f"{'none' if head is None else f'{head!r}, which is not'}: leave it out"
        )
    layers = (path for path, kind in kinds.items() if kind in ("colwise", "rowwise"))
    note = all_gather_note(split, (path for path in layers if path != head))
    return chosen, dataclasses.replace(split, note=note)


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
        elif (
            not isinstance(module, nn.Linear | nn.Embedding) or not _LAYER >= dims.keys() >= _WEIGHT
        ):
            name = next(full for name, full in own.items() if dims.get(name) is not None)
            raise MeshwrightError(
                f"parameter {name!r} of a {type(module).__name__} is split over {tensor!r}, and "
                "only Linear and Embedding weights can be, of a layer with no more than a weight "
                f"and a bias; give it a rule that keeps it whole over {tensor!r}"
            )
        elif isinstance(module, nn.Linear):
            kinds[path] = "colwise" if dims["weight"] == 0 else "rowwise"
            wanted = dict(dims) | {"bias": 0 if kinds[path] == "colwise" else None}
            if "bias" in dims and dims["bias"] != wanted["bias"]:
                fit = f"out@{tensor}" if kinds[path] == "colwise" else "out"
                raise MeshwrightError(
                    f"'{path}.bias' does not go with its weight, which is {kinds[path]}: give it "
                    f"the layout 'out -> {fit}'"
                )
        else:
            kinds[path] = "vocab" if dims["weight"] == 0 else "embedding columns"
    return kinds


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


def _check_sequence_parallel(
    model: nn.Module, kinds: Mapping[str, str], split: SplitActivations, blocks: list[str]
) -> None:
    """Refuse a model of another structure: nothing but norms has weights around its blocks."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    head = _output_head(model)
    for path in kinds:
        module = model.get_submodule(path)
        if path == head or _is_inside(path, module, kinds[path], split):
            continue
        is_norm = kinds[path] == "whole" and "norm" in type(module).__name__.lower()
        if not is_norm and module is not embedding:
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


def _is_inside(path: str, module: nn.Module, kind: str, split: SplitActivations) -> bool:
    """Whether a module works on the complete sequence, between the two ends of a block."""
    if not any(path.startswith(f"{block}.") for block in split.blocks):
        return False
    if kind == "rowwise":
        return path in split.layers and path.rpartition(".")[0] in split.blocks
    if kind == "colwise":
        return path in split.readers
    own = (name for name, param in module._parameters.items() if param is not None)
    return all(f"{path}.{name}" in split.parameters for name in own)


def _output_head(model: nn.Module) -> str | None:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return next((path for path, module in model.named_modules() if module is head), None)


class Column(ParallelStyle):
    """A Linear layer split over its outputs.

    `takes`: what its input is, "complete", "shared" (complete, and the block sums the gradients)
    or "sequence" (a part of it). `gives`: "complete", a "part" for each rank, or that as "DTensor".
    """

    def __init__(self, takes: str, gives: str) -> None:
        super().__init__()
        self.takes, self.gives = takes, gives

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        placements = dict.fromkeys(module._parameters, Shard(0)) | {A: Replicate()}
        distribute_parameters(module, device_mesh, placements)
        gradients = placements | {A: Partial()}  # from a rank's own outputs
        original = module.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            if self.takes != "shared":
                x = _shared_input(x, self.takes, device_mesh)
            with _local_parameters(module, gradients):
                part = original(x)
            if self.gives == "part":
                return part
            if self.gives == "DTensor":
                return _split_outputs(part, module.out_features, device_mesh)
            chunk = -(-module.out_features // device_mesh.size())
            if chunk * device_mesh.size() == module.out_features:
                return all_gather(part, -1, device_mesh)
            # a vocabulary that tp does not divide: the last part is smaller
            padded = functional.pad(part, (0, chunk - part.shape[-1]))
            return all_gather(padded, -1, device_mesh)[..., : module.out_features]

        module.forward = forward
        return module

    def __repr__(self) -> str:
        return f"Column({self.takes} -> {self.gives})"


class Row(ParallelStyle):
    """A Linear layer split over its inputs; all sum their parts of the output.

    `takes`: "complete", or a "part" for each rank. `gives`: "complete", or a part of the
    "sequence".
    """

    def __init__(self, takes: str, gives: str) -> None:
        super().__init__()
        self.takes, self.gives = takes, gives

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        sequence = self.gives == "sequence"
        placements = {"weight": Shard(1), "bias": Replicate(), A: Shard(1), B: Replicate()}
        distribute_parameters(module, device_mesh, placements)
        # of B, from a rank's own inputs
        gradients = placements | {"bias": Partial() if sequence else Replicate(), B: Partial()}
        original = module.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            if self.takes == "complete":
                x = slice_of_rank(x, -1, device_mesh)
            with _local_parameters(module, gradients):
                bias, module._parameters["bias"] = module._parameters["bias"], None
                try:
                    part = original(x)
                finally:
                    module._parameters["bias"] = bias
            if sequence:
                output = reduce_scatter(part, SEQUENCE, device_mesh)
            else:
                output = all_reduce(part, device_mesh)
            return output if bias is None else output + bias

        module.forward = forward
        return module

    def __repr__(self) -> str:
        return f"Row({self.takes} -> {self.gives})"


class Whole(ParallelStyle):
    """Parameters that are whole on every tensor rank; `use_local_parameters` makes them plain.

    `partial`: those used on a part of the activations (of the sequence, or of the heads), so that
    the gradients of the ranks are summed.
    """

    def __init__(self, partial: Set[str] = frozenset()) -> None:
        super().__init__()
        self.partial = partial

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameters(module, device_mesh, dict.fromkeys(module._parameters, Replicate()))
        return module

    def __repr__(self) -> str:
        return f"Whole(partial gradients: {', '.join(sorted(self.partial)) or 'none'})"


class VocabParallel(ParallelStyle):
    """An embedding split over the vocabulary: each rank looks up its own tokens, then all add."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameters(module, device_mesh, dict.fromkeys(module._parameters, Shard(0)))
        entries = module.weight.to_local().shape[0]
        first = first_of_rank(module.weight.shape[0], device_mesh)
        lookup = module.forward
        padding = getattr(module, "padding_idx", None)
        if padding is not None:  # an index of this rank's entries
            module.padding_idx = padding - first if first <= padding < first + entries else None

        def forward(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            own = (tokens >= first) & (tokens < first + entries)
            with _local_parameters(module, {"weight": Shard(0)}):
                entry = lookup(torch.where(own, tokens - first, 0), *args, **kwargs)
            return all_reduce(entry * own.unsqueeze(-1).to(entry.dtype), device_mesh)

        module.forward = forward
        return module


class EmbeddingColumns(ParallelStyle):
    """An embedding whose entries are split: each rank looks up its part of every token."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        placements = dict.fromkeys(module._parameters, Shard(1))
        distribute_parameters(module, device_mesh, placements)
        lookup = module.forward

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            with _local_parameters(module, placements):
                return all_gather(lookup(*args, **kwargs), -1, device_mesh)

        module.forward = forward
        return module


class BlockInput(ParallelStyle):
    """One gather, and one sum of gradients, for all column-parallel layers of a block."""

    def __init__(self, takes: str) -> None:
        super().__init__()
        self.takes = takes

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(
            lambda _, args, kwargs: with_first_tensor(
                args, kwargs, lambda x: _shared_input(x, self.takes, device_mesh)
            ),
            with_kwargs=True,
        )
        return module


class SplitSequence(ParallelStyle):
    """The first tensor of a module's input, complete, split along the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(
            lambda _, args, kwargs: with_first_tensor(
                args, kwargs, lambda x: slice_of_rank(x, SEQUENCE, device_mesh)
            ),
            with_kwargs=True,
        )
        return module


def _split_outputs(part: torch.Tensor, outputs: int, mesh: DeviceMesh) -> DTensor:
    shape = torch.Size((*part.shape[:-1], outputs))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, mesh, [Shard(part.ndim - 1)], run_check=False, shape=shape, stride=stride
    )


def _shared_input(x: torch.Tensor, takes: str, mesh: DeviceMesh) -> torch.Tensor:
    """The complete input of column-parallel layers."""
    return all_gather_shared(x, SEQUENCE, mesh) if takes == "sequence" else share(x, mesh)


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


def use_local_parameters(
    model: nn.Module, blocks: Iterable[str], plan: Mapping[str, ParallelStyle]
) -> None:
    """Give the code of each block, and of the model around them, whole parameters as plain tensors.

    Modules also read parameters of their children, so this is not done module by module.
    """
    owners: dict[str, list[tuple[nn.Module, dict[str, Any]]]] = {}
    for path, style in plan.items():
        if isinstance(style, Whole):
            module = model.get_submodule(path)
            gradients: dict[str, Any] = {
                name: Partial() if name in style.partial else Replicate()
                for name in module._parameters
            }
            around = next((b for b in blocks if f"{path}.".startswith(f"{b}.")), "")
            owners.setdefault(around, []).append((module, gradients))
    for around, modules in owners.items():
        _run_with_local_parameters(model.get_submodule(around), modules)


def _run_with_local_parameters(
    block: nn.Module, modules: list[tuple[nn.Module, dict[str, Any]]]
) -> None:
    original = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        kept = [_use_local(module, gradients) for module, gradients in modules]
        try:
            return original(*args, **kwargs)
        finally:
            for (module, _), own in zip(modules, kept, strict=True):
                module._parameters.update(own)

    block.forward = forward


@contextlib.contextmanager
def _local_parameters(module: nn.Module, gradients: Mapping[str, Any]) -> Iterator[None]:
    """A module's own DTensor parameters as plain tensors; `gradients`: the placement of theirs."""
    kept = _use_local(module, gradients)
    try:
        yield
    finally:
        module._parameters.update(kept)


def _use_local(module: nn.Module, gradients: Mapping[str, Any]) -> dict[str, nn.Parameter | None]:
    """Put plain tensors in the place of a module's DTensors, which it returns."""
    kept = {name: param for name, param in module._parameters.items() if isinstance(param, DTensor)}
    for name, param in kept.items():
        local: Any = param.to_local(grad_placements=[gradients[name]])
        module._parameters[name] = local
    return dict(kept)

"""What would fail or be wrong at run time, found before anything runs; each with what would fit."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.errors import MeshwrightError
from meshwright.present import nearest_multiples
from meshwright.torch.dims import dims_of, head_counts
from meshwright.torch.dry_run import is_trained
from meshwright.torch.placement import Placement, Placements, tied


def check_model(model: nn.Module, placements: Placements) -> None:
    """Raise if this model cannot be split so."""
    _check_untouched(model)
    _check_embeddings(model)
    _check_tied(model, placements)
    _check_heads(model, placements)
    _check_divides(model, placements)


def _check_untouched(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise MeshwrightError(
                f"{path or type(model).__name__!r} has been through fully_shard already, and "
                "tensor parallelism comes first; give parallelize the plain model, it calls "
                "fully_shard"
            )
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise MeshwrightError(
                f"parameter {name!r} is a DTensor already; give parallelize the plain model, which "
                "may be on the meta device"
            )


def _check_embeddings(model: nn.Module) -> None:
    """A rank has neither all entries nor all tokens of a batch."""
    for path, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if value := getattr(module, option):
                raise MeshwrightError(
                    f"{path!r} is an {type(module).__name__} with {option}={value}, which needs "
                    "all entries and tokens on every rank; make it without"
                )


def _check_tied(model: nn.Module, placements: Placements) -> None:
    for names in tied(dict(model.named_parameters(remove_duplicate=False))):
        first = placements.by_name[names[0]]
        for name in names[1:]:
            other = placements.by_name[name]
            if other.layout.axes != first.layout.axes:
                raise MeshwrightError(
                    f"{first.name!r} and {name!r} are one tied weight, and the rules give them two "
                    f"layouts: {_axes(first)} and {_axes(other)}; give both the same, as in "
                    f"'{'|'.join(n.rpartition('.')[0].rpartition('.')[2] for n in names)} => vocab "
                    "embed -> vocab@tp embed'"
                )


def _check_heads(model: nn.Module, placements: Placements) -> None:
    """A shard holds complete heads, and queries are split as keys and values are."""
    axes, counts = placements.axes, head_counts(model)
    split: dict[str, dict[str, bool]] = {}
    for placed in placements.by_name.values():
        dims = (dims_of(placed.name) or "").split()
        named = [dim for dim in ("heads", "kv_heads") if dim in dims]
        word = placements.word(placed.name.rpartition(".")[0]) or ""
        if not named or len(dims) != len(placed.shape) or "gather" in word or "split" in word:
            continue
        dim = named[0]
        is_split = placed.dim_of(axes.tensor) == dims.index(dim)
        module, _, own_name = placed.name.rpartition(".")[0].rpartition(".")
        split.setdefault(module, {})[own_name] = is_split
        count = counts.get(dim)
        if is_split and count is not None and count % axes.tp:
            raise MeshwrightError(
                f"{dim}={count} cannot be split in {axes.tensor}={axes.tp}; "
                f"{axes.tensor}={_fit(model, placements)} would fit"
            )
    for module, own in split.items():
        if len(set(own.values())) > 1:
            whole = next(name for name, is_split in own.items() if not is_split)
            other = next(name for name, is_split in own.items() if is_split)
            raise MeshwrightError(
                f"{module}: the heads of {other} are split over {axes.tensor!r} and those of "
                f"{whole} are not, so a rank would have queries without their keys; split all of "
                f"{', '.join(own)}, or none"
            )


def _check_divides(model: nn.Module, placements: Placements) -> None:
    """A vocabulary need not divide: the part of the last rank is smaller, as long as it has one."""
    axes = placements.axes
    for placed, dim, is_table in _split_dims(model, placements):
        size = placed.shape[dim]
        if _divides(size, axes.tp, is_table):
            continue
        raise MeshwrightError(
            f"parameter {placed.name!r} of shape {placed.shape}: dim {placed.layout.dims[dim]!r} "
            f"of size {size} cannot be split in {axes.tensor}={axes.tp}; {axes.tensor}="
            f"{_fit(model, placements)} would fit, or make it {nearest_multiples(size, axes.tp)}"
        )


def _split_dims(model: nn.Module, placements: Placements) -> Iterator[tuple[Placement, int, bool]]:
    """Each parameter that tp splits, the dim, and whether that is a vocabulary."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    tables = {
        id(param)
        for module in model.modules()
        if module is head or isinstance(module, nn.Embedding)
        for param in module._parameters.values()
    }
    for name, param in model.named_parameters(remove_duplicate=False):
        placed = placements.by_name[name]
        dim = placed.dim_of(placements.axes.tensor)
        if dim is not None:
            yield placed, dim, id(param) in tables and dim == 0


def _divides(size: int, tp: int, is_table: bool) -> bool:
    return size % tp == 0 or (is_table and -(-size // tp) * (tp - 1) < size)


def check_sequence(length: int, tp: int, tensor: str | None) -> None:
    """Under sequence parallelism tp divides the sequence; the runtime would abort the process."""
    if length % tp:
        raise MeshwrightError(
            f"sequence length {length} is not divisible by {tensor}={tp}, which sequence "
            f"parallelism splits it over; pad to {-(-length // tp) * tp}, or leave out "
            "sequence_parallel"
        )


def explain_mixed_tensors(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's forward pass, with a sentence where a weight is used that was not all-gathered."""

    @functools.wraps(forward)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except RuntimeError as reason:
            if "mixed torch.Tensor and DTensor" not in str(reason):
                raise
            raise MeshwrightError(
                "the model uses a weight that is still split: it calls the `forward` of a block "
                "itself, or uses a weight of another module, so that PyTorch does not all-gather "
                f"it; call the block instead, as in `layer(x)` ({str(reason).partition('!')[0]})"
            ) from reason

    return explained


def refuse_training(model: nn.Module, why: str) -> None:
    """A sentence where a model is called in training that was split for evaluation."""

    def check(*_: Any) -> None:
        if is_trained(model):
            raise MeshwrightError(why)

    model.register_forward_pre_hook(check)


def refuse_generate(what: str) -> Any:
    """A `generate` for a model that is split for training."""

    def generate(*args: Any, **kwargs: Any) -> Any:
        raise MeshwrightError(
            f"this model was parallelized with {what}=True, which is for training: a token at a "
            f"time cannot be split. To generate, parallelize a model without {what}"
        )

    return generate


def _axes(placed: Placement) -> str:
    return str(placed.layout).partition("->")[2].strip()


def _fit(model: nn.Module, placements: Placements) -> int:
    """The largest tp, of those below, that every check of a size passes."""
    sizes = [
        (placed.shape[dim], is_table) for placed, dim, is_table in _split_dims(model, placements)
    ]
    sizes += [(heads, False) for heads in head_counts(model).values()]
    smaller = range(placements.axes.tp - 1, 0, -1)
    return next(tp for tp in smaller if all(_divides(size, tp, table) for size, table in sizes))

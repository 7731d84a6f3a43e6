"""Rules → the placement of every parameter: which mesh axes split which dim.

Weights are split twice: over the tensor axis, where a rule (or the model's own plan) says so, and
over the data axis by fully_shard, which splits every parameter: on the dim that a rule gives to
that axis, else on dim 0 of what tensor parallelism left.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.errors import MeshwrightError
from meshwright.layouts import Layout, PathRules, Rules, decide
from meshwright.meshes import MeshSpec
from meshwright.models import TENSOR_DIMS, WITH_DIMS
from meshwright.torch.dims import ACTIVATIONS, MERGED, dims_of, has_table
from meshwright.torch.lora import A, is_factor, matrix_of
from meshwright.torch.mesh import Axes, axes_of, spec_of

Slices = tuple[slice, ...]
# what the words of a tp plan of transformers split: the dim of a weight, the dim of a bias
_PLAN_DIMS: dict[str, tuple[int | None, int | None]] = {
    "colwise": (0, 0),
    "colwise_gather_output": (0, 0),
    "colwise_rep": (0, 0),
    "rowwise": (1, None),
    "rowwise_split_input": (1, None),
    "rowwise_rep": (1, None),
    "embedding_rowwise": (0, None),
    "embedding_colwise": (1, None),
    "replicated_with_grad_allreduce": (None, None),
    "replicate": (None, None),
}
_EXAMPLE = (
    "rules=mw.PathRules([('q_proj', 'out in -> out@tp in'), ('o_proj', 'out in -> out in@tp'), …, "
    "('.*', ())])"
)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a parameter goes; `rule` decided, `lost` are rules that did not."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    rule: str
    lost: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """As the path of an array: `model/layers/0/mlp/up_proj/weight`."""
        return self.name.replace(".", "/")

    def dim_of(self, axis: str | None) -> int | None:
        """The dim that a mesh axis splits."""
        return next((dim for dim, axes in enumerate(self.layout.axes) if axis in axes), None)

    def slices(self, mesh_shape: Mapping[str, int], position: Mapping[str, int]) -> Slices:
        """The part of the parameter at a position of the mesh, as fully_shard cuts it.

        The first axis of a dim cuts first, the next cuts its part. A part that is not divisible
        is cut as torch.chunk does, so the last ones are smaller or empty.
        """
        parts = []
        for size, axes in zip(self.shape, self.layout.axes, strict=True):
            start, stop = 0, size
            for axis in axes:
                chunk = -(-(stop - start) // mesh_shape[axis])
                first = min(start + position[axis] * chunk, stop)
                start, stop = first, min(first + chunk, stop)
            parts.append(slice(start, stop))
        return tuple(parts)

    def largest_shard(self, mesh_shape: Mapping[str, int]) -> int:
        """Elements of the largest shard."""
        first = self.slices(mesh_shape, dict.fromkeys(mesh_shape, 0))
        return math.prod(part.stop - part.start for part in first)


@dataclasses.dataclass(frozen=True)
class Placements:
    """The placement of every parameter, tied ones under each of their names."""

    by_name: Mapping[str, Placement]
    axes: Axes
    spec: MeshSpec
    plan: Mapping[str, str] | None  # the model's own tp plan, where that decided

    def word(self, module: str) -> str | None:
        """What the model's own tp plan says about a module."""
        return None if self.plan is None else self.plan.get(generic(module))


def place(model: nn.Module, mesh: Any, rules: Any = None) -> Placements:
    """Decide for every parameter of a model, which may be on the meta device."""
    spec, axes = spec_of(mesh), axes_of(mesh)
    every = dict(model.named_parameters(remove_duplicate=False))
    named = {name: param for name, param in every.items() if not is_factor(name)}
    scalars = [name for name, param in named.items() if param.ndim == 0]
    if scalars:
        raise MeshwrightError(
            f"parameter {scalars[0]!r} has no dim, and fully_shard splits every parameter; make it "
            "one of shape (1,)"
        )
    plan = None
    if rules is None and axes.tp == 1 and not has_table(model):
        whole = "no tensor parallelism"
        decided = {
            name: _placement(name, param, Layout.whole((None,) * param.ndim), whole)
            for name, param in named.items()
        }
    elif rules is None and has_table(model):
        decided = {name: _standard(name, param, axes) for name, param in named.items()}
    elif rules is None:
        plan = _own_plan(model)
        decided = {name: _by_plan(name, param, plan, axes) for name, param in named.items()}
        decided = _tied_alike(decided, named)
    else:
        decided = _by_rules(model, named, rules, spec)
    for name, param in every.items():
        if is_factor(name):
            decided[name] = _factor(name, param, decided[matrix_of(name)])
    placed = {name: _with_data_axis(one, axes) for name, one in decided.items()}
    return Placements(placed, axes, spec, plan)


def _standard(name: str, param: torch.Tensor, axes: Axes) -> Placement:
    """Vocabulary, heads and mlp over the tensor axis."""
    text = dims_of(name)
    if text is None:
        raise MeshwrightError(
            f"parameter {name!r} is not one of a {' or '.join(WITH_DIMS)} model; place all of them "
            "with path rules: rules=mw.PathRules([('q_proj', 'out in -> out@tp in'), …])"
        )
    split = [(axes.tensor,) if dim in TENSOR_DIMS and axes.tensor else () for dim in text.split()]
    rule = next((f"{dim} -> {axes.tensor}" for dim in text.split() if dim in TENSOR_DIMS), "norm")
    layout = Layout(tuple(split), tuple(text.split()))
    return _placement(name, param, layout, rule if any(split) else f"{text} -> none")


def _own_plan(model: nn.Module) -> dict[str, str]:
    """The model's own tp plan, by the generic names of its modules."""
    plan = dict(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {})
    kind = type(model).__name__
    if not plan:
        raise MeshwrightError(
            f"{kind} has no tp plan of its own and is not a {', '.join(WITH_DIMS)} model; give "
            f"{_EXAMPLE}, or a mesh with tp=1"
        )
    modules = {generic(name): module for name, module in model.named_modules()}
    named = {generic(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    plan = {name: word for name, word in plan.items() if name in modules or name in named}
    strange = sorted({word for word in plan.values() if word not in _PLAN_DIMS})
    if strange:
        where = next(name for name, word in plan.items() if word == strange[0])
        raise MeshwrightError(
            f"{kind}: its tp plan has {strange[0]!r} for {where!r}, which is not supported here; "
            "give rules=mw.PathRules(…) that leave this module whole, or a mesh with tp=1"
        )
    if set(plan) <= {"lm_head"}:
        raise MeshwrightError(
            f"{kind}: its tp plan splits {' and '.join(plan) or 'nothing'} only, so almost all "
            f"weights would be the same on every tp rank; give {_EXAMPLE}"
        )
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    for name, module in modules.items():
        if module is embedding and isinstance(module, nn.Embedding):
            plan.setdefault(name, "embedding_rowwise")  # split over the vocabulary
    return plan


def _by_plan(name: str, param: torch.Tensor, plan: Mapping[str, str], axes: Axes) -> Placement:
    module, _, own = generic(name).rpartition(".")
    word = plan.get(generic(name), plan.get(module))
    dims = dims_of(name)
    names: Sequence[str | None] = dims.split() if dims is not None else ()
    if len(names) != param.ndim:
        names = ("out", "in") if param.ndim == 2 else (None,) * param.ndim
    layout = Layout.whole(names)
    if word is None:
        return _placement(name, param, layout, "not in the model's tp plan")
    dim = _PLAN_DIMS[word][1 if own == "bias" or param.ndim == 1 else 0]
    if dim is not None and axes.tensor is not None:
        layout = _split(layout, dim, (axes.tensor,))
    return _placement(name, param, layout, f"tp plan: {word}")


def _tied_alike(
    decided: dict[str, Placement], named: Mapping[str, torch.Tensor]
) -> dict[str, Placement]:
    """A plan may name one of two tied weights only; the other goes with it."""
    for names in tied(named):
        split = [decided[name] for name in names if decided[name].layout.used_axes]
        for name in names:
            if split and not decided[name].layout.used_axes:
                decided[name] = dataclasses.replace(split[0], name=name)
    return decided


def _by_rules(
    model: nn.Module, named: Mapping[str, torch.Tensor], rules: Any, spec: MeshSpec
) -> dict[str, Placement]:
    tree = {name.replace(".", "/"): param for name, param in named.items()}
    dims = None
    if isinstance(rules, Rules):
        if not has_table(model):
            raise MeshwrightError(
                f"logical rules need dim names, which are known for {', '.join(WITH_DIMS)} models; "
                f"for {type(model).__name__} give path rules: mw.PathRules([('q_proj', 'out in -> "
                "out@tp in'), …])"
            )
        dims = {path: dims_of(path.replace("/", ".")) for path in tree}
        whole = {rule.dim for rule in rules.rules if not rule.axes}
        known = {rule.dim for rule in rules.rules}
        rules = Rules(
            rules.rules, optional=rules.optional | whole | ({*MERGED, *ACTIVATIONS} & known)
        )
    elif not isinstance(rules, PathRules):
        raise MeshwrightError(
            f"rules={type(rules).__name__} are not rules for a model; give mw.PathRules or mw.Rules"
        )
    decided = decide(tree, rules, spec, dims)
    decided.raise_problems()
    by_path = dict(zip(decided.paths, decided.decisions, strict=True))
    found = {}
    for name, param in named.items():
        decision = by_path[name.replace(".", "/")]
        found[name] = _placement(name, param, decision.layout, decision.rule, decision.lost)
    return found


def _factor(name: str, param: torch.Tensor, matrix: Placement) -> Placement:
    """A factor of LoRA is split as its matrix is: A along the inputs, B along the outputs."""
    (outputs, inputs), dims = matrix.layout.axes, matrix.layout.dims
    if name.endswith(A):
        layout = Layout(((), inputs), ("rank", dims[1]))
    else:
        layout = Layout((outputs, ()), (dims[0], "rank"))
    return _placement(name, param, layout, matrix.rule)


def _with_data_axis(placed: Placement, axes: Axes) -> Placement:
    """The placement with the data axis in it, as fully_shard will have it."""
    layout = placed.layout
    if axes.replicate is not None and axes.replicate in layout.used_axes:
        raise MeshwrightError(
            f"parameter {placed.name!r}: {layout} splits it over {axes.replicate!r}, and on a mesh "
            f"with {axes.shard!r} weights are the same along {axes.replicate!r}; use {axes.shard!r}"
        )
    given = placed.dim_of(axes.shard)
    dim = 0 if given is None else given
    others = tuple(axis for axis in layout.axes[dim] if axis != axes.shard)
    kept = tuple(axis for axis in layout.axes[dim] if axes.shape[axis] > 1)
    if given is not None and axes.shard in kept and kept[-1] != axes.shard:
        raise MeshwrightError(
            f"parameter {placed.name!r}: {layout} cuts over {axes.shard!r} first; fully_shard cuts "
            f"what tensor parallelism left, so write {layout.dims[dim]}@{'+'.join(others)}"
            f"+{axes.shard}"
        )
    layout = _split(layout, dim, (*others, axes.shard))
    size = placed.shape[dim] // math.prod(axes.shape[axis] for axis in others)
    if dim and size % axes.shape[axes.shard]:
        raise MeshwrightError(
            f"parameter {placed.name!r} of shape {placed.shape}: dim {layout.dims[dim]!r} cannot "
            f"be split in {axes.shard}={axes.shape[axes.shard]}; fully_shard splits only dim 0 "
            "unevenly"
        )
    rule = placed.rule if given is not None else f"{placed.rule}; fully_shard: dim 0"
    return dataclasses.replace(placed, layout=layout, rule=rule)


def _split(layout: Layout, dim: int, axes: tuple[str, ...]) -> Layout:
    split = (*layout.axes[:dim], axes, *layout.axes[dim + 1 :])
    return Layout(split, layout.dims)


def _placement(
    name: str, param: torch.Tensor, layout: Layout, rule: str, lost: Iterable[str] = ()
) -> Placement:
    return Placement(name, tuple(param.shape), param.dtype, layout, rule, tuple(lost))


@functools.lru_cache(maxsize=65536)
def generic(name: str) -> str:
    """Layer numbers as `*`: `model.layers.*.mlp`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def tied(named: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, param in named.items():
        names.setdefault(id(param), []).append(name)
    return [same for same in names.values() if len(same) > 1]

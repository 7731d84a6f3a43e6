"""LoRA: frozen matrices, each with a trained update of low rank beside it.

A matrix w [inputs ..., outputs ...] gets two factors, a [inputs ..., rank] and b [rank, outputs
...]; its product with x is x·w + scale · (x·a)·b. The factors lie in a tree of their own,
`adapter`, that repeats the paths of the matrices: `adapter/layers/attention/wq/a`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.layouts import ArraySpec, Constant, Normal, PathMatcher, tree_paths

ADAPTER = "adapter"


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Which update of low rank is trained beside frozen matrices."""

    rank: int = 0
    """Rank of the trained update of each matrix, such as 16; 0: no LoRA."""
    alpha: float = 16.0
    """The update is multiplied with alpha / rank."""
    rslora: bool = False
    """Rank-stabilized: multiply with alpha / √rank instead."""
    targets: tuple[str, ...] = ()
    """Adapt only matrices with one of these names (q_proj), or in whose path or Hugging Face name
    one of these regexes is found (attention). Without any: every matrix of the layers."""
    base: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the frozen weights; auto: that of matmuls."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise MeshwrightError(f"lora.rank={self.rank} must be at least 0; 0 means no LoRA")
        if not 0 < self.alpha < math.inf:
            raise MeshwrightError(f"lora.alpha={self.alpha} must be a number above 0, such as 16")
        fields = dataclasses.fields(self)
        if not self.rank and any(getattr(self, one.name) != one.default for one in fields):
            raise MeshwrightError("the settings lora.… need --lora.rank, such as --lora.rank 16")

    @property
    def scale(self) -> float:
        """What multiplies the update."""
        if not self.rank:
            return 1.0
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def with_adapter(
    arrays: Any, lora: LoraConfig, base: Any, names: Mapping[str, str] | None = None
) -> Any:
    """ArraySpecs of a model with an adapter: all else is frozen, matrices in the dtype `base`.

    `names` are other names of arrays by path, which targets may match.
    """
    if not lora.rank:
        return arrays
    chosen = set(_targets(arrays, lora.targets, names or {}))

    def frozen(spec: ArraySpec) -> ArraySpec:
        dtype = base if spec.is_matrix else spec.dtype
        return dataclasses.replace(spec, dtype=dtype, trained=False)

    adapter: dict[str, Any] = {}
    for path, spec in zip(tree_paths(arrays), jax.tree.leaves(arrays), strict=True):
        if path in chosen:
            *blocks, name = path.split("/")
            inside = adapter
            for block in blocks:
                inside = inside.setdefault(block, {})
            inside[name] = _factors(spec, lora.rank)
    return {**jax.tree.map(frozen, arrays), ADAPTER: adapter}


def _targets(arrays: Any, targets: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """The paths of the matrices that are adapted."""
    specs = dict(zip(tree_paths(arrays), jax.tree.leaves(arrays), strict=True))
    matrices = [path for path, spec in specs.items() if spec.kind == "matrix" and spec.is_stacked]
    if not targets:
        return matrices
    try:
        matcher = PathMatcher(targets)
    except MeshwrightError as mistake:
        raise MeshwrightError(f"lora.targets: {mistake}") from None
    own_names = {path: _last_names(path, names.get(path, "")) for path in matrices}
    known = {name for both in own_names.values() for name in both}
    chosen, used = [], set()
    for path in matrices:
        searched = {*matcher.found_in(path), *matcher.found_in(names.get(path, ""))}
        matches = {
            at for at in searched if targets[at] not in known or targets[at] in own_names[path]
        }
        used |= matches
        chosen += [path] if matches else []
    for position, target in enumerate(targets):
        if position not in used:
            raise MeshwrightError(
                f"lora.targets {target!r} is found in the path of no matrix of the layers, which "
                f"are {', '.join(matrices)}{did_you_mean(target, sorted(known))}"
            )
    return chosen


def _last_names(path: str, name: str) -> set[str]:
    """The last part of a matrix's path, and of its module's name in Hugging Face's model."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    return {path.rpartition("/")[2], *([module] if module else [])}


def _factors(spec: ArraySpec, rank: int) -> dict[str, ArraySpec]:
    first = 1 + spec.inputs  # after layers
    inputs, outputs = spec.shape[1:first], spec.shape[first:]
    layers, dims = spec.shape[:1], tuple(spec.dims)
    start = Normal(1 / math.sqrt(3 * math.prod(inputs)))  # the variance of PEFT's
    return {
        "a": ArraySpec(
            (*layers, *inputs, rank), (*dims[:first], None), init=start,
            inputs=spec.inputs, kind="matrix",
        ),
        "b": ArraySpec(
            (*layers, rank, *outputs), (*dims[:1], None, *dims[first:]), init=Constant(0.0),
            inputs=1, kind="matrix",
        ),
    }  # fmt: skip


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A weight and its update of low rank: base + scale · a·b."""

    base: Any
    a: jax.Array
    b: jax.Array
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})

    @property
    def ndim(self) -> int:
        return int(self.base.ndim)


def adapted_names(params: Any) -> list[str]:
    """The names of the matrices that have an update, each once."""
    paths = (path.split("/") for path in tree_paths(params[ADAPTER]))
    return list(dict.fromkeys(keys[-2] for keys in paths))


def adapted_layers(layers: Any, params: Any, path: Sequence[str], scale: float) -> Any:
    """The weights of a stack of layers, those with an update as `Adapted`."""
    adapter = params.get(ADAPTER, {})
    for name in path:
        adapter = adapter.get(name, {})
    if not adapter:
        return layers

    def joined(block: str, name: str, weight: Any) -> Any:
        factors = adapter.get(block, {}).get(name)
        return weight if factors is None else Adapted(weight, factors["a"], factors["b"], scale)

    return {
        block: {name: joined(block, name, weight) for name, weight in arrays.items()}
        for block, arrays in layers.items()
    }


def merged(params: Any, scale: float) -> Any:
    """The parameters with the updates added, without the adapter; each in its own dtype."""
    base = {name: tree for name, tree in params.items() if name != ADAPTER}

    def add(tree: Any, factors: Any) -> Any:
        if isinstance(tree, Mapping):
            return {name: add(tree[name], factors.get(name, {})) for name in tree}
        return _merge(tree, factors["a"], factors["b"], scale) if factors else tree

    return add(base, params.get(ADAPTER, {}))


@jax.jit
def _merge(weight: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    inputs, outputs = "xyz"[: a.ndim - 2], "uvw"[: b.ndim - 2]
    # in float32, whatever they are kept in
    update = jnp.einsum(
        f"l{inputs}r,lr{outputs}->l{inputs}{outputs}",
        a.astype(jnp.float32), b.astype(jnp.float32),
    )  # fmt: skip
    return (weight.astype(jnp.float32) + scale * update).astype(weight.dtype)

"""LoRA: frozen matrices, each with a trained update of low rank beside it.

A matrix w [inputs ..., outputs ...] gets two factors, a [inputs ..., rank] and b [rank, outputs
...]; its product with x is x·w + scale · (x·a)·b. The factors lie in a tree of their own,
`adapter`, that repeats the paths of the matrices: `adapter/layers/attention/wq/a`. Experts have
factors each. As in PEFT, which has one matrix of both, `up` of experts has the input factor of
`gate` where both are adapted.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import reshard

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.layouts import ArraySpec, Constant, Normal, PathMatcher, tree_paths
from meshwright.models.compute import Compute
from meshwright.models.settings import LoraConfig
from meshwright.ops import NF4, NF4_BLOCK, Dropout, hashed, quantized_spec, spec_of

ADAPTER = "adapter"
_INPUT_FACTOR_OF = {"up": "gate"}  # of experts
DROPOUT = "dropout"  # a field of a batch in a train step, noise of each sequence: [batch, 1]


def with_adapter(
    arrays: Any, lora: LoraConfig, base: Any, names: Mapping[str, str] | None = None
) -> Any:
    """ArraySpecs of a model with an adapter: all else is frozen, matrices in the dtype `base`.

    `names` are other names of arrays by path, which targets may match.
    """
    if not lora.rank:
        return arrays
    chosen = set(_targets(arrays, lora.targets, names or {}))
    specs = dict(zip(tree_paths(arrays), jax.tree.leaves(arrays), strict=True))
    of_experts = {path for path in chosen if specs[path].kind == "expert"}
    if of_experts and lora.dropout:
        raise MeshwrightError(
            f"lora.dropout={lora.dropout} does not apply to experts ({min(of_experts)}), as in "
            "PEFT; leave one of the two out"
        )

    def frozen(spec: ArraySpec) -> ArraySpec:
        dtype = base if spec.is_matrix else spec.dtype
        return dataclasses.replace(spec, dtype=dtype, trained=False)

    adapter: dict[str, Any] = {}
    for path, spec in specs.items():
        if path in chosen:
            *blocks, name = path.split("/")
            inside = adapter
            for block in blocks:
                inside = inside.setdefault(block, {})
            inside[name] = _factors(spec, lora.rank)
            if "/".join((*blocks, _INPUT_FACTOR_OF.get(name, ""))) in of_experts:
                del inside[name]["a"]
    return {**jax.tree.map(frozen, arrays), ADAPTER: adapter}


def quantized_base(arrays: Any, name: str) -> Any:
    """ArraySpecs with the frozen matrices of the layers in int8 or nf4."""

    def quantized(path: str, spec: ArraySpec) -> Any:
        if spec.trained or not is_layer_matrix(spec):
            return spec
        inputs = math.prod(spec.shape[1 : 1 + spec.inputs])
        if name == NF4 and inputs % NF4_BLOCK:
            raise MeshwrightError(
                f"lora.base nf4 needs inputs in blocks of {NF4_BLOCK}, and {path} has {inputs}; "
                "give --lora.base int8"
            )
        return quantized_spec(spec, name)

    leaves, treedef = jax.tree.flatten(arrays)
    return jax.tree.unflatten(treedef, list(map(quantized, tree_paths(arrays), leaves)))


def is_layer_matrix(spec: ArraySpec) -> bool:
    """Whether it is a matrix of the layers, all of them stacked."""
    return spec.kind == "matrix" and spec.is_stacked


def _targets(arrays: Any, targets: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """The paths of the matrices that are adapted."""
    specs = dict(zip(tree_paths(arrays), jax.tree.leaves(arrays), strict=True))
    matrices = [
        path
        for path, spec in specs.items()
        if is_layer_matrix(spec) or (targets and spec.kind == "expert")
    ]
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
    many = 2 if spec.kind == "expert" else 1  # layers, and experts
    first = many + spec.inputs
    inputs, outputs = spec.shape[many:first], spec.shape[first:]
    stacked, dims = spec.shape[:many], tuple(spec.dims)
    start = Normal(1 / math.sqrt(3 * math.prod(inputs)))  # the variance of PEFT's
    return {
        "a": ArraySpec(
            (*stacked, *inputs, rank), (*dims[:first], None), init=start,
            inputs=spec.inputs, kind=spec.kind,
        ),
        "b": ArraySpec(
            (*stacked, rank, *outputs), (*dims[:many], None, *dims[first:]), init=Constant(0.0),
            inputs=1, kind=spec.kind,
        ),
    }  # fmt: skip


def _input_factor(block: Mapping[str, Any], name: str) -> Any:
    """The a of a matrix among the factors of its block."""
    return block[name].get("a", block.get(_INPUT_FACTOR_OF.get(name, ""), {}).get("a"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A weight and its update of low rank: base + scale · a·b."""

    base: Any
    a: Any  # of experts, None where `up` has that of `gate`
    b: jax.Array
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})
    slots: jax.Array | None = None  # of tokens [batch, length]: see AdapterSlots
    count: int = dataclasses.field(default=1, metadata={"static": True})
    dropout: Dropout | None = None  # of the update's inputs, in training

    @property
    def ndim(self) -> int:
        return int(self.base.ndim)

    @property
    def mask(self) -> jax.Array | None:
        """Which columns of a count for each token [batch, length, columns]; None: all."""
        if self.slots is None:
            return None
        columns = self.a.shape[-1]
        slot_of_column = 1 + jnp.arange(columns) // (columns // self.count)
        return self.slots[..., None] == slot_of_column[None, None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdapterSlots:
    """Several adapters of an engine's weights, of which each token has at most one.

    The factors of all slots lie side by side: a [inputs ..., slots · rank], b [slots · rank,
    outputs ...]. So a product is two matmuls, between which each token keeps the columns of its
    slot; slots count from 1, and a token of slot 0 keeps none.
    """

    layers: list[Any]  # {block: {name: {"a": …, "b": …}}} of each layer
    count: int = dataclasses.field(metadata={"static": True})
    of_tokens: jax.Array | None = None  # [batch, length]

    @classmethod
    def empty(cls, layers: list[Any], count: int) -> "AdapterSlots":
        """Slots of zeros, inside jit; `layers` are the factors of one, as abstract arrays."""

        def zeros(path: Any, one: Any) -> jax.Array:
            dim = _slot_dim(path, one)
            shape = (*one.shape[:dim], count * one.shape[dim], *one.shape[dim + 1 :])
            return jnp.zeros(shape, one.dtype, out_sharding=one.sharding.spec)

        return cls(jax.tree.map_with_path(zeros, layers), count)

    def written(self, layers: list[Any], slot: jax.Array) -> "AdapterSlots":
        """With these factors in a slot."""

        def write(path: Any, slots: jax.Array, one: jax.Array) -> jax.Array:
            dim = _slot_dim(path, one)
            start = (slot - 1) * one.shape[dim]
            return lax.dynamic_update_slice_in_dim(slots, one, start, dim)

        return dataclasses.replace(self, layers=jax.tree.map_with_path(write, self.layers, layers))

    def joined(self, layers: list[Any]) -> list[Any]:
        """The weights of layers, as `Adapted`."""

        def join(weight: Any, factors: Any) -> Any:
            if factors is None:
                return weight
            of_tokens, count = self.of_tokens, self.count
            return Adapted(weight, factors["a"], factors["b"], slots=of_tokens, count=count)

        return [
            {
                block: {name: join(w, own.get(block, {}).get(name)) for name, w in arrays.items()}
                for block, arrays in layer.items()
            }
            for layer, own in zip(layers, self.layers, strict=True)
        ]


def _slot_dim(path: Any, factor: Any) -> int:
    """The dim of a factor along which slots lie."""
    return 0 if path[-1].key == "b" else factor.ndim - 1


def for_tokens(weights: Any, slots: jax.Array) -> Any:
    """An engine's weights for tokens that have these slots [batch, length]."""
    return {**weights, ADAPTER: dataclasses.replace(weights[ADAPTER], of_tokens=slots)}


def adapted_names(params: Any) -> list[str]:
    """The names of the matrices that have an update, each once."""
    paths = (path.split("/") for path in tree_paths(params[ADAPTER]))
    return list(dict.fromkeys(keys[-2] for keys in paths))


def sequence_noise(seed: int, step: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The field `dropout` of a step's batch, for sequences [micro-batches, batch].

    A sequence has the same noise in whichever micro-batch it is.
    """
    return hashed(seed, step, jnp.arange(math.prod(shape)).reshape(*shape, 1))


def token_noise(batch: Mapping[str, jax.Array], tokens: jax.Array) -> jax.Array | None:
    """Noise of tokens [batch, length], from that of their sequences; None: nothing is dropped."""
    if DROPOUT not in batch:
        return None
    return hashed(batch[DROPOUT], jnp.arange(tokens.shape[1])[None])


def adapted_layers(
    layers: Any,
    params: Any,
    path: Sequence[str],
    compute: Compute,
    noise: Callable[[str], jax.Array | None] = lambda matrix: None,
) -> Any:
    """The weights of a stack of layers, those with an update as `Adapted`.

    `noise` is that of the tokens [batch, length] that a matrix (`attention/wq`) multiplies.
    """
    adapter = params.get(ADAPTER, {})
    if isinstance(adapter, AdapterSlots):
        return adapter.joined(layers)
    for name in path:
        adapter = adapter.get(name, {})
    if not adapter:
        return layers

    def joined(block: str, name: str, weight: Any) -> Any:
        factors = adapter.get(block, {}).get(name)
        if factors is None:
            return weight
        a, b = factors.get("a"), factors["b"]
        scale, rate = compute.adapter_scale, compute.dropout
        of_tokens = noise(f"{block}/{name}") if rate else None
        if of_tokens is None:
            return Adapted(weight, a, b, scale)
        matrix = zlib.crc32("/".join((*path, block, name)).encode())
        of_layers = jnp.arange(a.shape[0])[:, None, None]
        dropout = Dropout(hashed(of_tokens[None], matrix, of_layers), rate)
        return Adapted(weight, a, b, scale / (1 - rate), dropout=dropout)

    return {
        block: {name: joined(block, name, weight) for name, weight in arrays.items()}
        for block, arrays in layers.items()
    }


def merged(params: Any, scale: float) -> Any:
    """The parameters with the updates added, without the adapter; each in its own dtype."""
    base = {name: tree for name, tree in params.items() if name != ADAPTER}

    def add(tree: Any, factors: Any) -> Any:
        def added(name: str) -> Any:
            if name not in factors or isinstance(tree[name], Mapping):
                return add(tree[name], factors.get(name, {}))
            return _merge(tree[name], _input_factor(factors, name), factors[name]["b"], scale)

        return {name: added(name) for name in tree} if isinstance(tree, Mapping) else tree

    return add(base, params.get(ADAPTER, {}))


@jax.jit
def _merge(weight: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    # dims that both factors have: layers, and experts
    stacked = "le"[: a.ndim + b.ndim - 2 - weight.ndim]
    inputs, outputs = "xyz"[: a.ndim - 1 - len(stacked)], "uvw"[: b.ndim - 1 - len(stacked)]
    # in float32, whatever they are kept in
    update = jnp.einsum(
        f"{stacked}{inputs}r,{stacked}r{outputs}->{stacked}{inputs}{outputs}",
        a.astype(jnp.float32), b.astype(jnp.float32),
    )  # fmt: skip
    if spec_of(update) != spec_of(weight):
        update = reshard(update, spec_of(weight))
    return (weight.astype(jnp.float32) + scale * update).astype(weight.dtype)

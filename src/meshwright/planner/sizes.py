"""The sizes of a model: what the planner counts with, from its family's arrays and declared work.

>>> from meshwright.models import preset
>>> sizes = sizes_of(preset("llama-3.1-8b"))
>>> sizes.stacks[0].layers, sizes.stacks[0].weights
(32, 218103808)
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.layouts import ArraySpec, Rules, select_trainable
from meshwright.lazy import cached_property
from meshwright.models import (
    ADAPTER,
    Attention,
    Block,
    Experts,
    LoraConfig,
    Stack,
    family_of,
    hf_names,
    with_adapter,
)


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A weight that tokens are multiplied with."""

    name: str
    weights: int  # of one layer
    inner: int  # its other side than embed; of one that reads a latent, its outputs
    output: str  # the activation that it makes; "" for one that every remat policy saves
    adds_to_residual: bool  # its last dim is embed: it leads back to the residual stream
    of_keys: bool  # it makes keys or values
    outputs: int  # numbers that it makes of a token; of experts, that all of them would
    trained_layers: int
    kind: str = "matrix"  # as ArraySpec.kind: of experts, or the router that chooses them
    share: float = 1.0  # of the tokens, those that meet each of its numbers
    inputs: int = 0  # numbers of a token that it reads
    whole: bool = False  # tp does not split it: routers, and matrices that make latents
    of_latent: bool = False  # it reads a latent, not the residual stream

    @property
    def met(self) -> float:
        """Weights that a token meets."""
        return self.weights * self.share

    @property
    def is_latent(self) -> bool:
        """Whether it makes a latent, which every device along tp needs."""
        return self.whole and self.kind == "matrix"


@dataclasses.dataclass(frozen=True)
class AlikeMatrices:
    """Matrices of a block that meet the same tokens, and that devices split alike."""

    matrices: tuple[Matrix, ...]
    keys_from: str  # the batch field of those tokens, where it is not the stack's

    @cached_property
    def weights(self) -> int:
        return sum(matrix.weights for matrix in self.matrices)

    @cached_property
    def gradient_weights(self) -> int:
        return sum(matrix.weights for matrix in self.matrices if matrix.trained_layers)

    @cached_property
    def outputs(self) -> tuple[tuple[str, int], ...]:
        """The activations that they make, each with the weights it takes."""
        return tuple((matrix.output, matrix.weights) for matrix in self.matrices if matrix.output)


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """A block of a layer."""

    name: str
    matrices: tuple[Matrix, ...]
    saved: Mapping[str, tuple[str, ...]]  # activation → dims
    attention: Attention | None
    experts: Experts | None = None
    is_beside: bool = False  # it reads what the block before it reads

    @cached_property
    def weights(self) -> int:
        return sum(matrix.weights for matrix in self.matrices)

    def of_kind(self, kind: str) -> tuple[Matrix, ...]:
        return tuple(matrix for matrix in self.matrices if matrix.kind == kind)

    @cached_property
    def alike(self) -> "tuple[AlikeMatrices, ...]":
        """Its matrices by the tokens that they meet, and by how they are split."""
        keys_from = self.attention.keys_from if self.attention else ""
        found: dict[tuple[str, str, bool, bool], list[Matrix]] = {}
        for one in self.matrices:
            field = keys_from if one.of_keys else ""
            found.setdefault((field, one.kind, one.whole, one.of_latent), []).append(one)
        return tuple(AlikeMatrices(tuple(same), field) for (field, *_), same in found.items())

    @cached_property
    def with_gradients(self) -> tuple[Matrix, ...]:
        """Matrices with a trained layer: the loop over layers makes gradients of all layers."""
        return tuple(matrix for matrix in self.matrices if matrix.trained_layers)

    @cached_property
    def gradient_weights(self) -> int:
        return sum(matrix.weights for matrix in self.with_gradients)

    @property
    def has_gradients_of_inputs(self) -> bool:
        """Whether a matrix that reads the block's input has a gradient."""
        return any(not matrix.adds_to_residual for matrix in self.with_gradients)

    @cached_property
    def inner(self) -> int:
        """The widest activation inside the block: heads × head_dim, or mlp of a token's experts."""
        return max(matrix.inner for matrix in self.matrices)

    @cached_property
    def splits_input(self) -> bool:
        """Whether a matrix that tp splits reads the block's input."""
        return any(
            not (one.whole or one.of_latent or one.adds_to_residual) for one in self.matrices
        )

    @cached_property
    def arrays_inside(self) -> int:
        """Matrices that lead from the residual stream into the block: gate and up of an mlp."""
        return sum(not one.adds_to_residual for one in self.matrices if one.kind != "router")


@dataclasses.dataclass(frozen=True, eq=False)
class StackSizes:
    """Layers of one kind."""

    name: str  # "" for the only one, or the one after those that lead
    field: str  # the batch field of its sequence
    layers: int
    period: int  # layers that a loop takes at a time
    blocks: tuple[BlockSizes, ...]
    dims: Mapping[str, int]  # of its arrays
    latent_norms: int  # numbers of a layer's norms of latents that have gradients
    router_biases: int  # numbers that a layer adds to the scores of its router

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """Of one layer."""
        return tuple(matrix for block in self.blocks for matrix in block.matrices)

    @cached_property
    def weights(self) -> int:
        """In the matrices of one layer."""
        return sum(block.weights for block in self.blocks)

    @cached_property
    def whole_weights(self) -> int:
        """Of a layer, those that tp does not split."""
        return sum(matrix.weights for matrix in self.matrices if matrix.whole)

    @cached_property
    def whole_gradient_weights(self) -> int:
        """Of those, the ones that have gradients."""
        matrices = (matrix for block in self.blocks for matrix in block.with_gradients)
        return sum(matrix.weights for matrix in matrices if matrix.whole)

    @cached_property
    def whole_trained_weights(self) -> int:
        """Of all layers, the trained ones that tp does not split."""
        return sum(
            matrix.weights * matrix.trained_layers for matrix in self.matrices if matrix.whole
        )

    @cached_property
    def met(self) -> float:
        """Of a layer, the weights that a token meets."""
        return sum(matrix.met for matrix in self.matrices)

    @cached_property
    def experts(self) -> Experts | None:
        return next((block.experts for block in self.blocks if block.experts), None)

    def of_kind(self, kind: str) -> tuple[Matrix, ...]:
        """Matrices of a layer."""
        return tuple(matrix for block in self.blocks for matrix in block.of_kind(kind))

    @cached_property
    def expert_weights(self) -> int:
        """Of a layer, those of all experts."""
        return sum(matrix.weights for matrix in self.of_kind("expert"))

    @cached_property
    def frozen_met(self) -> float:
        """Of a layer, the weights without gradients that a token meets."""
        return sum(matrix.met for matrix in self.matrices if not matrix.trained_layers)

    @cached_property
    def gradient_weights(self) -> int:
        """Of a layer, the weights that have gradients."""
        return sum(block.gradient_weights for block in self.blocks)

    @cached_property
    def trained_weights(self) -> int:
        """Of all layers."""
        return sum(matrix.weights * matrix.trained_layers for matrix in self.matrices)

    @cached_property
    def attention_weights(self) -> int:
        return sum(block.weights for block in self.blocks if block.attention)

    @cached_property
    def whole_attention_weights(self) -> int:
        attention = (block for block in self.blocks if block.attention)
        return sum(one.weights for block in attention for one in block.matrices if one.whole)

    @cached_property
    def is_biased(self) -> bool:
        """Whether a bias is added to the scores of an attention."""
        return any(block.attention and block.attention.biased for block in self.blocks)

    @cached_property
    def mlp(self) -> BlockSizes:
        """The block without attention."""
        return next(block for block in self.blocks if block.attention is None)


@dataclasses.dataclass(frozen=True)
class Vectors:
    """Norms and biases: arrays that no token is multiplied with as a matrix."""

    numbers: int  # of all layers
    arrays: int
    trained: int  # numbers that are trained
    gradients: int  # numbers of the arrays of which some layer is trained
    gradient_arrays: int


@dataclasses.dataclass(frozen=True, eq=False)
class ModelSizes:
    """Everything the planner knows about a model; there is one for each config."""

    dims: Mapping[str, int]
    stacks: tuple[StackSizes, ...]
    tables: int  # embedding and LM head: 1 if they are tied
    trains_embedding: bool
    trains_head: bool  # the LM head; of a tied one, the embedding
    residual_vectors: Vectors  # over embed
    head_vectors: Vectors  # over heads, which tp splits
    position_vectors: Vectors  # biases of relative positions, over heads
    other_vectors: Vectors  # replicated over all axes
    latent_vectors: Vectors  # norms of latents: the same, but each layer reduces their gradients
    expert_vectors: Vectors  # biases of experts and their routers, which ep splits
    fields: tuple[str, ...]  # of a batch

    @property
    def embed(self) -> int:
        return self.dims["embed"]

    @property
    def is_tied(self) -> bool:
        return self.tables == 1

    @cached_property
    def sequences(self) -> tuple[str, ...]:
        """The batch fields that go through layers, each embedded once."""
        return tuple(dict.fromkeys(stack.field for stack in self.stacks))

    @cached_property
    def generating(self) -> tuple[StackSizes, ...]:
        """The stacks that a new token goes through: of an encoder and a decoder, the decoder's."""
        return tuple(stack for stack in self.stacks if stack.field == self.stacks[-1].field)

    @cached_property
    def layer_weights(self) -> int:
        """In the matrices of all layers."""
        return sum(stack.layers * stack.weights for stack in self.stacks)

    @property
    def trained_tables(self) -> int:
        return self.trains_embedding + (self.trains_head and not self.is_tied)

    @cached_property
    def trained_matrices(self) -> int:
        """Arrays of matrices that are trained, those of a stack's layers being one each."""
        return self.trained_tables + sum(
            len(block.with_gradients) for stack in self.stacks for block in stack.blocks
        )

    @cached_property
    def trained_parameters(self) -> int:
        """In matrices, embedding and LM head."""
        tables = self.trained_tables * self.dims["vocab"] * self.embed
        return sum(stack.trained_weights for stack in self.stacks) + tables

    @cached_property
    def layers(self) -> int:
        return sum(stack.layers for stack in self.stacks)

    @property
    def parameters(self) -> int:
        """In matrices, embedding and LM head."""
        return self.layer_weights + self.tables * self.dims["vocab"] * self.embed

    @property
    def active_parameters(self) -> float:
        """Of those, what a token meets."""
        layers = sum(stack.layers * stack.met for stack in self.stacks)
        return layers + self.tables * self.dims["vocab"] * self.embed

    @cached_property
    def experts(self) -> Experts | None:
        """Of the first stack that has some."""
        return next((stack.experts for stack in self.stacks if stack.experts), None)


@functools.lru_cache(maxsize=1024)
def adapter_numbers(
    model: Any,
    lora: LoraConfig,
    axes: tuple[tuple[str, int], ...],
    kinds: tuple[str, ...] = ("matrix", "expert"),
) -> int:
    """Numbers of an adapter on one device of a mesh with axes of these sizes.

    `kinds`: of which matrices they are.
    """
    if not lora.rank:
        return 0
    family, sizes = family_of(model), dict(axes)
    adapter = with_adapter(family.arrays(model), lora, np.float32, hf_names(model))[ADAPTER]
    rules, numbers = family.rules(sp=True, ep="ep" in sizes), 0
    for spec in (spec for spec in array_leaves(adapter) if spec.kind in kinds):
        split = rules.layout(" ".join(dim for dim in spec.dims if dim))
        numbers += spec.size // math.prod(sizes.get(axis, 1) for dim in split.axes for axis in dim)
    return numbers


@functools.lru_cache(maxsize=256)
def sizes_of(
    model: Any, trainable: tuple[str, ...] = (), lora: LoraConfig | None = None
) -> ModelSizes:
    """The sizes of a model's config, of which `trainable` is trained, or nothing beside `lora`."""
    family = family_of(model)
    arrays = select_trainable(family.arrays(model), trainable)
    if lora is not None and lora.rank:
        arrays = {**with_adapter(arrays, lora, np.float32, hf_names(model)), ADAPTER: {}}
    leaves = list(array_leaves(arrays))
    rules = family.rules(sp=True)
    vectors: dict[str, list[ArraySpec]] = {
        "residual": [], "position": [], "heads": [], "latents": [], "experts": [], "other": []
    }  # fmt: skip
    for array in leaves:
        if not array.inputs:
            vectors[_kind_of_vector(set(array.dims))].append(array)
    counted = {
        kind: Vectors(
            numbers=sum(one.size for one in some),
            arrays=len(some),
            trained=sum(one.trained_part.size for one in some if one.trained_part),
            gradients=sum(one.size for one in some if one.trained),
            gradient_arrays=sum(bool(one.trained) for one in some),
        )
        for kind, some in vectors.items()
    }
    of_vocab = [array for array in leaves if "vocab" in array.dims]
    trained_kinds = {array.kind for array in of_vocab if array.trained}
    return ModelSizes(
        dims=_sizes(leaves),
        stacks=tuple(_stack(stack, arrays, rules) for stack in family.work(model)),
        tables=len(of_vocab),
        trains_embedding="embedding" in trained_kinds,
        trains_head=bool(trained_kinds - {"embedding"}) or len(of_vocab) == 1 == len(trained_kinds),
        residual_vectors=counted["residual"],
        head_vectors=counted["heads"],
        position_vectors=counted["position"],
        other_vectors=counted["other"],
        latent_vectors=counted["latents"],
        expert_vectors=counted["experts"],
        fields=family.batch_fields,
    )


def _kind_of_vector(dims: set[str | None]) -> str:
    if "experts" in dims:
        return "experts"
    if "latent" in dims:
        return "latents"
    if "norm" in dims:
        return "residual"
    if not dims & {"heads", "kv_heads"}:
        return "other"
    return "heads" if "layers" in dims else "position"  # a bias of scores, which layers share


def array_leaves(tree: Any) -> Iterator[ArraySpec]:
    if isinstance(tree, Mapping):
        for child in tree.values():
            yield from array_leaves(child)
    else:
        yield tree


def _stack(stack: Stack, arrays: Any, rules: Rules) -> StackSizes:
    for key in stack.path:
        arrays = arrays[key]
    for name, block in arrays.items():
        known = {m for one in stack.blocks if (one.beside or one.name) == name for m in one.outputs}
        unknown = [array for array, spec in block.items() if spec.inputs and array not in known]
        if unknown:
            raise MeshwrightError(
                f"this model cannot be planned yet: its layers have {', '.join(unknown)} in "
                f"{name}, whose work is not declared; name a mesh yourself to train or serve it"
            )
    leaves = list(array_leaves(arrays))
    norms = [one for one in leaves if one.dims[-1] == "latent" and not one.inputs and one.trained]
    biases = [one for one in leaves if one.dims[1:] == ("experts",)]
    return StackSizes(
        name="" if stack.path == ("layers",) else stack.path[0].replace("_", " "),
        field=stack.field,
        layers=stack.layers,
        period=stack.period,
        blocks=tuple(
            _block(block, arrays[block.beside or block.name], rules) for block in stack.blocks
        ),
        dims=_sizes(leaves),
        latent_norms=sum(one.size for one in norms) // stack.layers,
        router_biases=sum(one.size for one in biases) // stack.layers,
    )


def _sizes(arrays: Iterable[ArraySpec]) -> dict[str, int]:
    """The sizes of dims."""
    return {
        dim: size
        for array in arrays
        for dim, size in zip(array.dims, array.shape, strict=True)
        if dim is not None and dim != "layers"
    }


def _block(block: Block, arrays: Mapping[str, ArraySpec], rules: Rules) -> BlockSizes:
    matrices = []
    for name, array in arrays.items():
        if not array.inputs or name not in block.outputs:
            continue
        sizes = dict(zip(array.dims, array.shape, strict=True))
        layers, embed = sizes.pop("layers"), sizes.get("embed")
        weights = math.prod(array.shape) // layers
        output = block.outputs[name]
        back = array.dims[-1] == "embed"
        of_keys = output in ("k", "v")
        copies, share = 1, 1.0
        if array.kind == "expert" and block.experts is not None:
            copies = block.experts.count
            share = block.experts.per_token / copies
        first = 1 + (array.kind == "expert")  # after layers, and experts
        inputs = math.prod(array.shape[first : first + array.inputs])
        outputs = weights // inputs
        inner = outputs if embed is None else round(weights * share) // embed
        trained = 0 if array.trained_part is None else array.trained_part.shape[0]
        kind = array.kind if array.kind in ("expert", "router") else "matrix"
        whole = not any("tp" in axes for axes in rules.layout(" ".join(map(str, sizes))).axes)
        matrices.append(
            Matrix(
                name, weights, inner, output, back, of_keys, outputs, trained, kind, share, inputs,
                whole, of_latent=embed is None,
            )
        )  # fmt: skip
    saved = {name: tuple(dims.split()) for name, dims in block.saved.items()}
    return BlockSizes(
        block.name, tuple(matrices), saved, block.attention, block.experts, bool(block.beside)
    )

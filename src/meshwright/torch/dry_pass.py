"""Forward passes of a model whose layers give random numbers, on complete activations and on parts.

So no weight matrix is needed, and a pass falls apart into what lies between the layers.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.errors import MeshwrightError
from meshwright.torch.dry_copy import DryCopy, as_float

Call = tuple[str, int]  # the path of a module and the number of its call
_TOLERANCE = 1e-4  # of the largest value; float32 has seven digits


@dataclasses.dataclass(frozen=True)
class Example:
    """The arguments of a forward pass."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def example_of(model: nn.Module, given: Any = None, repeats: int = 1) -> Example | None:
    """What to run a model on: the given arguments, or a few tokens for a Hugging Face model.

    `repeats`: how often these tokens follow each other.
    """
    if isinstance(given, Mapping):
        return Example(kwargs=dict(given))
    if given is not None:
        return Example(given if isinstance(given, tuple) else (given,))
    if getattr(model, "main_input_name", None) != "input_ids" or not hasattr(model, "dummy_inputs"):
        return None
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    size = getattr(embedding, "num_embeddings", 2)
    tokens = {name: (ids % size).repeat(1, repeats) for name, ids in model.dummy_inputs.items()}
    return Example(kwargs=tokens)


@dataclasses.dataclass(frozen=True)
class Cut:
    """What a rank has a part of: modules that take, and modules that give, a part of this dim."""

    takes: frozenset[str]
    gives: frozenset[str]
    dim: int
    rank: int
    ranks: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rank's part of a complete tensor."""
        return tensor.chunk(self.ranks, self.dim)[self.rank]


class MismatchError(Exception):
    """A run on a part calls other layers, or gives them other shapes."""


class Run:
    """What the layers got and gave in one forward pass of each mode."""

    def __init__(self) -> None:
        self.inputs: dict[Call, torch.Tensor] = {}  # copies: code may write to them later
        self.given: dict[Call, torch.Tensor] = {}  # the very tensors of `inputs`
        self.outputs: dict[Call, torch.Tensor] = {}  # leaves of the autograd graph
        self.calls: collections.Counter[str] = collections.Counter()
        self.random: set[bool] = set()  # whether any module trains, where numbers were drawn


class DryPasses:
    """A copy of a model without weight matrices, and its run on complete activations."""

    complete: Run

    def __init__(self, model: nn.Module, example: Example, in_training: bool) -> None:
        self._example = tree_map_only(torch.Tensor, as_float, (example.args, example.kwargs))
        self._generator = torch.Generator().manual_seed(0)
        self._copy = DryCopy(model, self._generator, in_training)
        self.model = self._copy.model
        self.params = dict(self.model.named_parameters())
        self._cut: Cut | None = None  # None: the run is the complete one
        self.run = Run()
        self._is_training, self._seeded = False, torch.empty(0)
        for path, module in self.model.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.forward = self._layer(path, module)

    def run_complete(self) -> None:
        """Run it on complete activations, with which `run_part` is compared."""
        self.complete = self._forward()
        self._cotangents = {
            call: self._random(site.shape)
            for call, site in self.complete.inputs.items()
            if site.requires_grad
        }
        leaves = (*self.complete.outputs.values(), *self.params.values())
        self.bits = {id(leaf): 1 << i for i, leaf in enumerate(leaves)}

    @property
    def is_complete(self) -> bool:
        """Whether the run is that on complete activations."""
        return self._cut is None

    def run_part(self, cut: Cut) -> Run:
        """Run it as a rank that has parts."""
        self._cut = cut
        return self._forward()

    def differing_inputs(self, run: Run, cut: Cut) -> set[str]:
        """The modules whose inputs are not those of the complete run, or their parts."""
        return {
            path
            for (path, number), site in self.complete.inputs.items()
            if not same(run.inputs[path, number], cut.of(site) if path in cut.takes else site)
        }

    def differing_gradients(self, run: Run, cut: Cut) -> set[str]:
        """The modules and parameters whose gradients are not those of the complete run."""
        differing = set()
        for of_parts in (False, True):
            complete = self._gradients(self.complete, cut, of_parts)
            for (path, number), gradient in self._gradients(run, cut, of_parts).items():
                wanted = complete[path, number]
                if path in cut.gives and wanted is not None:
                    wanted = cut.of(wanted)
                if not same(gradient, wanted):
                    differing.add(path)
        return differing

    def _gradients(self, run: Run, cut: Cut, of_parts: bool) -> dict[Call, torch.Tensor | None]:
        """Of what the inputs that are parts, or all others, weigh: by outputs and parameters.

        The part of a parameter's gradient that comes from one rank's part is that of the complete
        run with all other parts of the cotangents at zero.
        """
        total = torch.zeros(())
        for call, cotangent in self._cotangents.items():
            if (call[0] in cut.takes) != of_parts:
                continue
            site = run.inputs[call]
            if of_parts and run is self.complete:
                site = cut.of(site)
            if of_parts:
                cotangent = cut.of(cotangent)
            total = total + (site * cotangent).sum()
        named = run.outputs | {(name, -1): param for name, param in self.params.items()}
        leaves = {name: leaf for name, leaf in named.items() if leaf.requires_grad}
        if not total.requires_grad:
            return dict.fromkeys(leaves)
        gradients = torch.autograd.grad(
            total, list(leaves.values()), retain_graph=True, allow_unused=True
        )
        return dict(zip(leaves, gradients, strict=True))

    def _forward(self) -> Run:
        """One forward pass in each mode, as one run."""
        self.run = Run()
        outputs = []
        default = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float32)
            with torch.device("cpu"), torch.enable_grad(), torch.random.fork_rng(devices=[]):
                for is_training in self._copy.modes():
                    self._is_training = is_training
                    self._seed()
                    args, kwargs = tree_map_only(torch.Tensor, self._input, self._example)
                    outputs.append(self.model(*args, **kwargs))
                    self._note_random()
        finally:
            torch.set_default_dtype(default)
        for number, tensor in enumerate(tensors_of(outputs)):
            self.run.inputs["the output of the model", number] = tensor
        return self.run

    def _seed(self) -> None:
        """Random numbers begin anew, so that more or fewer of them change no later ones."""
        generator = torch.default_generator
        generator.manual_seed(len(self.run.outputs))
        self._seeded = generator.get_state()

    def _note_random(self) -> None:
        if not torch.equal(self._seeded, torch.default_generator.get_state()):
            self.run.random.add(self._is_training)

    def _input(self, value: torch.Tensor) -> torch.Tensor:
        return self.give("an input of the model", lambda: value)

    def _layer(self, path: str, module: Any) -> Callable[..., torch.Tensor]:
        width = module.out_features if isinstance(module, nn.Linear) else module.embedding_dim

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if not tensors:
                raise TypeError(f"{path!r} got no tensor")
            value = tensors[0]
            shape = value.shape[:-1] if isinstance(module, nn.Linear) else value.shape
            call = (path, self.run.calls[path])
            self.run.inputs[call], self.run.given[call] = value * 1, value
            output = self.give(path, lambda: self._random((*shape, width)))
            if self._cut is not None and self._cut.dim != -1:
                return output  # it may take a part of the sequence and give all of it
            if output.shape[:-1] != shape:
                raise MismatchError(path)
            return output

        return forward

    def give(self, path: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The output of a call: made in the complete run, its part or itself in any other."""
        call = (path, self.run.calls[path])
        self.run.calls[path] += 1
        if self._cut is None:
            value = make()
        else:
            if call not in self.complete.outputs:
                raise MismatchError(f"{path!r} is called again, as by torch.utils.checkpoint")
            value = self.complete.outputs[call].detach()
            if path in self._cut.gives:
                value = self._cut.of(value)
        leaf = value.clone().requires_grad_(value.is_floating_point())
        self.run.outputs[call] = leaf
        self._note_random()
        self._seed()
        return leaf * 1 if leaf.requires_grad else leaf  # code may write to it in place

    def _random(self, shape: Any) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float32, generator=self._generator, device="cpu")


def with_first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any], change: Any) -> Any:
    """The arguments with their first tensor of floating point changed."""

    def is_hidden(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_floating_point()

    for i, value in enumerate(args):
        if is_hidden(value):
            return (*args[:i], change(value), *args[i + 1 :]), kwargs
    for name in ("hidden_states", *kwargs):
        if is_hidden(kwargs.get(name)):
            return args, {**kwargs, name: change(kwargs[name])}
    raise MeshwrightError("a module that is split over tp got no tensor as its input")


def tensors_of(output: Any) -> Iterator[torch.Tensor]:
    """All tensors of a model's output, also of dataclasses and other objects in it."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):
            yield from tensors_of(list(vars(leaf).values()))


def same(tensor: torch.Tensor | None, wanted: torch.Tensor | None) -> bool:
    """Whether both are alike but for rounding; None is as good as zeros."""
    if tensor is None or wanted is None:
        other = wanted if tensor is None else tensor
        return other is None or not bool(other.count_nonzero())
    if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
        return False
    if not wanted.is_floating_point() or not wanted.numel():
        return torch.equal(tensor, wanted)
    finite = wanted.detach().nan_to_num(posinf=0.0, neginf=0.0)
    limit = _TOLERANCE * finite.abs().max().item()
    return torch.allclose(tensor, wanted, rtol=0.0, atol=limit, equal_nan=True)


def reached(
    tensor: torch.Tensor, bits: Mapping[int, int], marks: Mapping[Any, int], known: dict[Any, int]
) -> int:
    """The leaves, as bits, and the marked nodes that a tensor was computed from."""
    if tensor.grad_fn is None:
        return bits.get(id(tensor), 0)
    stack = [tensor.grad_fn]
    while stack:
        node = stack[-1]
        before = [one for one, _ in node.next_functions if one is not None]
        waiting = [one for one in before if one not in known]
        if waiting and node not in known:
            stack.extend(waiting)
            continue
        stack.pop()
        own = bits.get(id(getattr(node, "variable", None)), 0) | marks.get(node, 0)
        for one in before:
            own |= known[one]
        known[node] = own
    return known[tensor.grad_fn]

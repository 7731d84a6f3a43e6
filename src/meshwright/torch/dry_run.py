"""Which activations may stay split over tp, found by a dry run of the model before it is split.

Between a column-parallel layer and the row-parallel layer after it, each rank may work on its part
of the activations alone, if the code between them does the same to a part as to the whole. Neither
names nor the module tree tell: the code decides. So it runs, on the CPU in float32, once on
complete activations and once on one rank's part, and both runs are compared, values and gradients.
Each run is one forward pass in evaluation and one in training, with the same random numbers:
dropout of a part of the activations is not the part of their dropout, and so needs complete ones.
Every Linear and Embedding gives random numbers in place of its output: no weight matrix is needed,
and the run falls apart into what lies between those layers. A layer for which the comparison fails
all-gathers its output, or splits its input, and is right in any model.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.errors import MeshwrightError
from meshwright.torch.dry_copy import DryCopy, as_float
from meshwright.torch.placement import generic

Call = tuple[str, int]  # the path of a module and the number of its call
_TOLERANCE = 1e-4  # of the largest value; float32 has seven digits
_DROPOUT = "as dropout does unless its p is 0"


@dataclasses.dataclass(frozen=True)
class SplitActivations:
    """What the dry run has shown.

    `layers`: column-parallel layers whose output, and row-parallel ones whose input, stays split.
    `parameters`: whole parameters that are used on split activations, so that the gradient of each
    rank is a part. `blocks`: modules whose input only `readers` read, column-parallel children of
    theirs in `layers`. `problem`: why the model could not run. `note`: what is all-gathered.
    `not_in_training`: layers for which the comparison holds in evaluation alone, and
    `training_problem` why training could not run. `random`: in which modes random numbers may be
    drawn, by whether any module trains.
    """

    layers: frozenset[str] = frozenset()
    parameters: frozenset[str] = frozenset()
    blocks: frozenset[str] = frozenset()
    readers: frozenset[str] = frozenset()
    problem: str | None = None
    note: str | None = None
    not_in_training: frozenset[str] = frozenset()
    training_problem: str | None = None
    random: frozenset[bool] = frozenset((False, True))

    @property
    def why_not_train(self) -> str | None:
        """Why a model that was split so may not be trained, if so."""
        split = self.not_in_training & self.layers
        if not split:
            return None
        needs = f"the code around {_shown(split)} needs complete activations, {_DROPOUT}"
        return (
            "this model was parallelized in evaluation mode, and in training mode "
            f"{self.training_problem or needs}; call model.train() before parallelize"
        )


@dataclasses.dataclass(frozen=True)
class Example:
    """The arguments of a forward pass."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def example_of(model: nn.Module, given: Any = None) -> Example | None:
    """What to run a model on: the given arguments, or a few tokens for a Hugging Face model."""
    if isinstance(given, Mapping):
        return Example(kwargs=dict(given))
    if given is not None:
        return Example(given if isinstance(given, tuple) else (given,))
    if getattr(model, "main_input_name", None) != "input_ids" or not hasattr(model, "dummy_inputs"):
        return None
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    size = getattr(embedding, "num_embeddings", 2)
    return Example(kwargs={name: ids % size for name, ids in model.dummy_inputs.items()})


def split_activations(
    model: nn.Module, kinds: Mapping[str, str], tp: int, head: str | None, example: Example
) -> SplitActivations:
    """Compare the parts of the first and of the last of `tp` ranks with the complete run.

    `kinds`: how each module that owns parameters is split. The output of `head` is never split.
    A model in evaluation mode keeps what is right there; training it is refused if more is needed.
    """
    both = _compare(model, kinds, tp, head, example, in_training=True)
    layers = {path for path, kind in kinds.items() if kind in ("colwise", "rowwise")} - {head}
    if both.layers >= layers:
        return both
    in_evaluation = _compare(model, kinds, tp, head, example, in_training=False)
    lost = in_evaluation.layers - both.layers
    is_trained = any(module.training for module in model.modules())
    kept, problem = both, both.problem
    if lost and not is_trained:
        kept = dataclasses.replace(in_evaluation, training_problem=problem)
    elif problem and not in_evaluation.problem:
        kept = dataclasses.replace(both, problem=f"{problem}, in training mode")
    return dataclasses.replace(kept, not_in_training=lost)


def _compare(
    model: nn.Module,
    kinds: Mapping[str, str],
    tp: int,
    head: str | None,
    example: Example,
    in_training: bool,
) -> SplitActivations:
    try:
        dry = _DryRun(model, kinds, head, example, in_training)
        split = dry.closed(dry.candidates)
        while split:
            ranks = (dry.wrong(split, rank, tp) for rank in {0, tp - 1})
            wrong = next(filter(None, ranks), None)
            if not wrong:
                break
            alike = {generic(path) for path in wrong}
            split = dry.closed({path for path in split if generic(path) not in alike})
    except MeshwrightError:
        raise
    except Exception as reason:  # whatever the model's code raises, also in its backward pass
        text = str(reason).partition("\n")[0]
        return SplitActivations(problem=f"a dry run failed with {type(reason).__name__}: {text}")
    blocks = dry.blocks(split)
    readers = frozenset().union(*blocks.values())
    return SplitActivations(
        frozenset(split), dry.partial(split), frozenset(blocks), readers, random=dry.random
    )


def all_gather_note(split: SplitActivations, layers: Iterable[str]) -> str | None:
    """Which of the column- and row-parallel layers do not pass parts on, and why."""
    names = {path for path in layers if path not in split.layers}
    if not names:
        return None
    needs = "the code between them needs complete activations"
    in_training = names & split.not_in_training if split.problem is None else set()
    reasons = [
        (names - in_training, split.problem or needs),
        (in_training, f"{needs} in training mode, {_DROPOUT}"),
    ]
    notes = (f"around {_shown(paths)}: {reason}" for paths, reason in reasons if paths)
    return f"activations are all-gathered {'; '.join(notes)}"


def _shown(paths: Iterable[str]) -> str:
    names = sorted({generic(path) for path in paths})
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def from_first_rank(run: Callable[[], SplitActivations]) -> SplitActivations:
    """Run it on one rank for all: CPUs that round differently must not decide differently."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return run()
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [run()]
        except MeshwrightError as refused:
            answer = [str(refused)]
    dist.broadcast_object_list(answer, 0)
    if isinstance(answer[0], str):
        raise MeshwrightError(answer[0])
    return answer[0]


class _MismatchError(Exception):
    """A run on a part calls other layers, or gives them other shapes."""


class _Run:
    """What the layers got and gave in one forward pass."""

    def __init__(self) -> None:
        self.inputs: dict[Call, torch.Tensor] = {}  # copies: code may write to them later
        self.given: dict[Call, torch.Tensor] = {}  # the very tensors of `inputs`
        self.outputs: dict[Call, torch.Tensor] = {}  # leaves of the autograd graph
        self.calls: collections.Counter[str] = collections.Counter()
        self.random: set[bool] = set()  # whether any module trains, where numbers were drawn


class _DryRun:
    """A copy of a model without weight matrices, and its run on complete activations."""

    def __init__(
        self,
        model: nn.Module,
        kinds: Mapping[str, str],
        head: str | None,
        example: Example,
        in_training: bool,
    ) -> None:
        self._kinds = kinds
        self._example = tree_map_only(torch.Tensor, as_float, (example.args, example.kwargs))
        self._generator = torch.Generator().manual_seed(0)
        self._copy = DryCopy(model, self._generator, in_training)
        self._model = self._copy.model
        self._part: tuple[frozenset[str], int, int] = (frozenset(), 0, 1)  # layers, rank, tp
        self._run = _Run()
        self._is_training, self._seeded = False, torch.empty(0)
        self._full: _Run | None = None
        self._block_inputs: dict[str, list[torch.Tensor]] = collections.defaultdict(list)
        self._marked: dict[str, list[Any]] = collections.defaultdict(list)  # nodes that made those
        for path, module in self._model.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.forward = self._layer(path, module)
        parents = {path.rpartition(".")[0] for path, kind in kinds.items() if kind == "colwise"}
        hooks = [self._mark_input(path) for path in sorted(parents)]
        self._full = self._forward()
        self.random = frozenset(self._full.random)
        for hook in hooks:
            hook.remove()
        self.candidates = {
            path
            for path, _ in self._full.inputs
            if kinds.get(path) in ("colwise", "rowwise") and path != head
        }
        self._cotangents = {
            call: self._random(site.shape)
            for call, site in self._full.inputs.items()
            if site.requires_grad
        }
        self._params = dict(self._model.named_parameters())
        self._leaves = [*self._full.outputs.values(), *self._params.values()]
        bits = {id(leaf): 1 << i for i, leaf in enumerate(self._leaves)}
        self._marks = {path: 1 << (len(bits) + i) for i, path in enumerate(self._block_inputs)}
        marks = {node: self._marks[path] for path, nodes in self._marked.items() for node in nodes}
        known: dict[Any, int] = {}
        self._reach: dict[str, int] = collections.defaultdict(int)
        for (path, _), site in self._full.inputs.items():
            self._reach[path] |= _reached(site, bits, marks, known)
        self._param_bits = {name: bits[id(param)] for name, param in self._params.items()}
        self._output_bits: dict[str, int] = collections.defaultdict(int)
        for (path, _), leaf in self._full.outputs.items():
            self._output_bits[path] |= bits[id(leaf)]
        self._check_weights()

    def closed(self, split: set[str]) -> set[str]:
        """The largest subset whose activations meet complete ones in its own layers only."""
        params, outputs = _union(self._param_bits), _union(self._output_bits)
        while True:
            columns = {path for path in split if self._kinds[path] == "colwise"}
            own = _union(self._output_bits, columns)
            complete = _union(self._reach, self._reach.keys() - (split - columns))
            kept = {path for path in columns if not self._output_bits[path] & complete}
            for path in split - columns:
                reached = self._reach[path]
                meets = reached & (outputs & ~own | params & complete)
                if reached & own and not meets:
                    kept.add(path)
            used = _union(self._reach, kept - columns)
            kept -= {path for path in kept & columns if not self._output_bits[path] & used}
            if kept == split:
                return split
            split = kept

    def partial(self, split: set[str]) -> frozenset[str]:
        """The parameters that the inputs of split row-parallel layers depend on."""
        reached = _union(self._reach, {path for path in split if self._kinds[path] == "rowwise"})
        return frozenset(name for name, bit in self._param_bits.items() if bit & reached)

    def blocks(self, split: set[str]) -> dict[str, set[str]]:
        """Modules whose input goes as it is to column-parallel children in `split`, and to which.

        It goes nowhere else, and the children get nothing else.
        """
        assert self._full is not None
        found = {}
        for block, inputs in self._block_inputs.items():
            readers = {
                path for path, reached in self._reach.items() if reached & self._marks[block]
            }
            own = {id(tensor) for tensor in inputs if tensor._version == 0}
            if readers and all(
                path in split
                and path.rpartition(".")[0] == block
                and all(
                    id(tensor) in own
                    for (other, _), tensor in self._full.given.items()
                    if other == path
                )
                for path in readers
            ):
                found[block] = readers
        return found

    def wrong(self, split: set[str], rank: int, tp: int) -> set[str]:
        """The layers of `split` for which a rank's run is not its part of the complete run."""
        assert self._full is not None
        rows = {path for path in split if self._kinds[path] == "rowwise"}
        self._part = (frozenset(split), rank, tp)
        try:
            run = self._forward()
        except Exception:  # the code does not run on a part: whatever it raises
            return self._open(split, rows) or split
        if run.inputs.keys() != self._full.inputs.keys():
            return split
        wrong = set()
        for call, site in self._full.inputs.items():
            is_part = call[0] in rows
            wanted = _part_of(site, rank, tp) if is_part else site
            if not _same(run.inputs[call], wanted):
                if not is_part:
                    return split
                wrong.add(call[0])
        if wrong:
            return wrong
        for of_rows in (False, True):
            full = self._gradients(self._full, rows, of_rows, rank, tp, complete=True)
            part = self._gradients(run, rows, of_rows, rank, tp, complete=False)
            for call, wanted in full.items():
                path = call[0]
                is_part = path in split - rows
                if is_part and wanted is not None:
                    wanted = _part_of(wanted, rank, tp)
                if not _same(part[call], wanted):
                    wrong |= {path} if is_part else split
        return wrong

    def _gradients(
        self, run: _Run, rows: set[str], of_rows: bool, rank: int, tp: int, complete: bool
    ) -> dict[Call, torch.Tensor | None]:
        """Of what the inputs of rows, or of all others, weigh: by outputs and parameters.

        The part of a parameter's gradient that comes from one rank's part is that of the complete
        run with all other parts of the cotangents at zero.
        """
        total = torch.zeros(())
        for call, cotangent in self._cotangents.items():
            if (call[0] in rows) != of_rows:
                continue
            site = run.inputs[call]
            if of_rows and complete:
                site = _part_of(site, rank, tp)
            if of_rows:
                cotangent = _part_of(cotangent, rank, tp)
            total = total + (site * cotangent).sum()
        named = run.outputs | {(name, -1): param for name, param in self._params.items()}
        leaves = {name: leaf for name, leaf in named.items() if leaf.requires_grad}
        if not total.requires_grad:
            return dict.fromkeys(leaves)
        gradients = torch.autograd.grad(
            total, list(leaves.values()), retain_graph=True, allow_unused=True
        )
        return dict(zip(leaves, gradients, strict=True))

    def _open(self, split: set[str], rows: set[str]) -> set[str]:
        """Column-parallel layers that were called, and not yet all rows that they go to."""
        assert self._full is not None
        called = self._run.calls
        return {
            path
            for path in split - rows
            if called[path]
            and any(
                self._reach[row] & self._output_bits[path] and called[row] < self._full.calls[row]
                for row in rows
            )
        }

    def _forward(self) -> _Run:
        """One forward pass in each mode, as one run."""
        self._run = _Run()
        outputs = []
        default = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float32)
            with torch.device("cpu"), torch.enable_grad(), torch.random.fork_rng(devices=[]):
                for is_training in self._copy.modes():
                    self._is_training = is_training
                    self._seed()
                    args, kwargs = tree_map_only(torch.Tensor, self._input, self._example)
                    outputs.append(self._model(*args, **kwargs))
                    self._note_random()
        finally:
            torch.set_default_dtype(default)
        for number, tensor in enumerate(_tensors(outputs)):
            self._run.inputs["the output of the model", number] = tensor
        return self._run

    def _seed(self) -> None:
        """Random numbers begin anew, so that more or fewer of them change no later ones."""
        generator = torch.default_generator
        generator.manual_seed(len(self._run.outputs))
        self._seeded = generator.get_state()

    def _note_random(self) -> None:
        if not torch.equal(self._seeded, torch.default_generator.get_state()):
            self._run.random.add(self._is_training)

    def _input(self, value: torch.Tensor) -> torch.Tensor:
        return self._give("an input of the model", lambda: value)

    def _layer(self, path: str, module: Any) -> Callable[..., torch.Tensor]:
        width = module.out_features if isinstance(module, nn.Linear) else module.embedding_dim

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if not tensors:
                raise TypeError(f"{path!r} got no tensor")
            value = tensors[0]
            shape = value.shape[:-1] if isinstance(module, nn.Linear) else value.shape
            call = (path, self._run.calls[path])
            self._run.inputs[call], self._run.given[call] = value * 1, value
            given = self._give(path, lambda: self._random((*shape, width)))
            if given.shape[:-1] != shape:
                raise _MismatchError(path)
            return given

        return forward

    def _give(self, path: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The output of a call: made in the complete run, its part or itself in any other."""
        call = (path, self._run.calls[path])
        self._run.calls[path] += 1
        if self._full is None:
            value = make()
        else:
            if call not in self._full.outputs:
                raise _MismatchError(f"{path!r} is called again, as by torch.utils.checkpoint")
            value = self._full.outputs[call].detach()
            split, rank, tp = self._part
            if path in split and self._kinds[path] == "colwise":
                value = _part_of(value, rank, tp)
        leaf = value.clone().requires_grad_(value.is_floating_point())
        self._run.outputs[call] = leaf
        self._note_random()
        self._seed()
        return leaf * 1 if leaf.requires_grad else leaf  # code may write to it in place

    def _mark_input(self, path: str) -> Any:
        def mark(_: nn.Module, args: Any, kwargs: Any) -> Any:
            def marked(value: torch.Tensor) -> torch.Tensor:
                own = value * 1
                if own.requires_grad:
                    self._block_inputs[path].append(own)
                    self._marked[path].append(own.grad_fn)
                return own

            with contextlib.suppress(MeshwrightError):
                return with_first_tensor(args, kwargs, marked)
            return args, kwargs

        return self._model.get_submodule(path).register_forward_pre_hook(mark, with_kwargs=True)

    def _random(self, shape: Any) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float32, generator=self._generator, device="cpu")

    def _check_weights(self) -> None:
        """A split weight is used by its own layer only, which has the part that belongs to it."""
        reached = _union(self._reach)
        for name, bit in self._param_bits.items():
            module = name.rpartition(".")[0]
            if bit & reached and self._kinds.get(module, "whole") != "whole":
                raise MeshwrightError(
                    f"parameter {name!r} is split over tp, and code outside of its "
                    f"{type(self._model.get_submodule(module)).__name__} reads it, which would get "
                    "a part; give it a rule that keeps it whole over tp"
                )


def _union(bits: Mapping[str, int], paths: Iterable[str] | None = None) -> int:
    found = 0
    for path in bits if paths is None else paths:
        found |= bits[path]
    return found


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


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """All tensors of a model's output, also of dataclasses and other objects in it."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):
            yield from _tensors(list(vars(leaf).values()))


def _part_of(tensor: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    """A rank's part of the last dim."""
    return tensor.chunk(tp, -1)[rank]


def _same(tensor: torch.Tensor | None, wanted: torch.Tensor | None) -> bool:
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


def _reached(
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

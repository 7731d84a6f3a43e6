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
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.errors import MeshwrightError
from meshwright.torch.dry_pass import Cut, DryPasses, Example, reached, with_first_tensor
from meshwright.torch.placement import generic

DROPOUT = "as dropout does unless its p is 0"
EVALUATION_ONLY = "this model was parallelized in evaluation mode, and in training mode"


@dataclasses.dataclass(frozen=True)
class SplitActivations:
    """What the dry run has shown.

    `layers`: column-parallel layers whose output, and row-parallel ones whose input, stays split.
    `parameters`: whole parameters that are used on split activations, so that the gradient of each
    rank is a part. `blocks`: modules whose input only `readers` read, column-parallel children of
    theirs in `layers`. `problem`: why the model could not run. `note`: what is all-gathered.
    `not_in_training`: layers for which the comparison holds in evaluation alone. `why_not_train`:
    why a model that was split so is not trained. `random`: in which modes random numbers may be
    drawn, by whether any module trains. `sequence_parameters`: those that sequence parallelism uses
    on a part of the sequence.
    """

    layers: frozenset[str] = frozenset()
    parameters: frozenset[str] = frozenset()
    blocks: frozenset[str] = frozenset()
    readers: frozenset[str] = frozenset()
    problem: str | None = None
    note: str | None = None
    not_in_training: frozenset[str] = frozenset()
    why_not_train: str | None = None
    random: frozenset[bool] = frozenset((False, True))
    sequence_parameters: frozenset[str] = frozenset()


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
    kept, problem = both, both.problem
    if lost and not is_trained(model):
        why = problem or f"the code around {_shown(lost)} needs complete activations, {DROPOUT}"
        why = f"{EVALUATION_ONLY} {why}; call model.train() before parallelize"
        kept = dataclasses.replace(in_evaluation, why_not_train=why)
    elif problem and not in_evaluation.problem:
        kept = dataclasses.replace(both, problem=f"{problem}, in training mode")
    return dataclasses.replace(kept, not_in_training=lost)


def is_trained(model: nn.Module) -> bool:
    """Whether any module is in training mode."""
    return any(module.training for module in model.modules())


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
        frozenset(split),
        dry.partial(split),
        frozenset(blocks),
        readers,
        random=frozenset(dry.complete.random),
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
        (in_training, f"{needs} in training mode, {DROPOUT}"),
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


class _DryRun(DryPasses):
    """Which of the layers can pass on parts of the activations."""

    def __init__(
        self,
        model: nn.Module,
        kinds: Mapping[str, str],
        head: str | None,
        example: Example,
        in_training: bool,
    ) -> None:
        super().__init__(model, example, in_training)
        self._kinds = kinds
        self._block_inputs: dict[str, list[torch.Tensor]] = collections.defaultdict(list)
        self._marked: dict[str, list[Any]] = collections.defaultdict(list)  # nodes that made those
        parents = {path.rpartition(".")[0] for path, kind in kinds.items() if kind == "colwise"}
        hooks = [self._mark_input(path) for path in sorted(parents)]
        self.run_complete()
        for hook in hooks:
            hook.remove()
        self.candidates = {
            path
            for path, _ in self.complete.inputs
            if kinds.get(path) in ("colwise", "rowwise") and path != head
        }
        bits = self.bits
        self._marks = {path: 1 << (len(bits) + i) for i, path in enumerate(self._block_inputs)}
        marks = {node: self._marks[path] for path, nodes in self._marked.items() for node in nodes}
        known: dict[Any, int] = {}
        self._reach: dict[str, int] = collections.defaultdict(int)
        for (path, _), site in self.complete.inputs.items():
            self._reach[path] |= reached(site, bits, marks, known)
        self._param_bits = {name: bits[id(param)] for name, param in self.params.items()}
        self._output_bits: dict[str, int] = collections.defaultdict(int)
        for (path, _), leaf in self.complete.outputs.items():
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
                    for (other, _), tensor in self.complete.given.items()
                    if other == path
                )
                for path in readers
            ):
                found[block] = readers
        return found

    def wrong(self, split: set[str], rank: int, tp: int) -> set[str]:
        """The layers of `split` for which a rank's run is not its part of the complete run."""
        rows = {path for path in split if self._kinds[path] == "rowwise"}
        cut = Cut(frozenset(rows), frozenset(split - rows), -1, rank, tp)
        try:
            run = self.run_part(cut)
        except Exception:  # the code does not run on a part: whatever it raises
            return self._open(split, rows) or split
        if run.inputs.keys() != self.complete.inputs.keys():
            return split
        if wrong := self.differing_inputs(run, cut):
            return wrong if wrong <= cut.takes else split
        wrong = self.differing_gradients(run, cut)
        return wrong if wrong <= cut.gives else split

    def _open(self, split: set[str], rows: set[str]) -> set[str]:
        """Column-parallel layers that were called, and not yet all rows that they go to."""
        called = self.run.calls
        return {
            path
            for path in split - rows
            if called[path]
            and any(
                self._reach[row] & self._output_bits[path]
                and called[row] < self.complete.calls[row]
                for row in rows
            )
        }

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

        return self.model.get_submodule(path).register_forward_pre_hook(mark, with_kwargs=True)

    def _check_weights(self) -> None:
        """A split weight is used by its own layer only, which has the part that belongs to it."""
        reached = _union(self._reach)
        for name, bit in self._param_bits.items():
            module = name.rpartition(".")[0]
            if bit & reached and self._kinds.get(module, "whole") != "whole":
                raise MeshwrightError(
                    f"parameter {name!r} is split over tp, and code outside of its "
                    f"{type(self.model.get_submodule(module)).__name__} reads it, which would get "
                    "a part; give it a rule that keeps it whole over tp"
                )


def _union(bits: Mapping[str, int], paths: Iterable[str] | None = None) -> int:
    found = 0
    for path in bits if paths is None else paths:
        found |= bits[path]
    return found

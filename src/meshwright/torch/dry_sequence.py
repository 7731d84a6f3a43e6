"""Whether sequence parallelism is right for a model, found by a dry run on parts of the sequence.

From the first block on, each rank has a part of the sequence, which it all-gathers for attention
and MLP blocks and for the LM head. So code between those must do the same to a part of the sequence
as to all of it. It runs on complete activations and as the first and last rank, as in `dry_run`.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from meshwright.errors import MeshwrightError
from meshwright.torch.checks import check_sequence
from meshwright.torch.dry_pass import Cut, DryPasses, Example, reached, with_first_tensor
from meshwright.torch.dry_run import DROPOUT, EVALUATION_ONLY, SplitActivations, is_trained

SEQUENCE = 1  # the dim of the sequence in [batch, length, embed]
_INPUT = "the input of "


def with_sequence_parallel(
    model: nn.Module,
    split: SplitActivations,
    first_blocks: Collection[str],
    head: str,
    tp: int,
    example: Example,
) -> SplitActivations:
    """`split` with the parameters that are used on parts of the sequence.

    A model that is wrong on parts is refused; where it is so in training alone, a model in
    evaluation mode is refused when it trains.
    """

    def compare(in_training: bool) -> tuple[frozenset[str], str | None]:
        return _compare(model, split, first_blocks, head, tp, example, in_training)

    parameters, why = compare(in_training=True)
    if why is None:
        return dataclasses.replace(split, sequence_parameters=parameters)
    parameters, in_evaluation = compare(in_training=False)
    if in_evaluation or is_trained(model):
        mode = "" if in_evaluation else f" in training mode, {DROPOUT}"
        raise MeshwrightError(
            f"sequence_parallel=True: {in_evaluation or why}{mode}; leave sequence_parallel out "
            "for this model"
        )
    refused = f"{EVALUATION_ONLY} {why}, {DROPOUT}; leave sequence_parallel out to train this model"
    return dataclasses.replace(split, sequence_parameters=parameters, why_not_train=refused)


def _compare(
    model: nn.Module,
    split: SplitActivations,
    first_blocks: Collection[str],
    head: str,
    tp: int,
    example: Example,
    in_training: bool,
) -> tuple[frozenset[str], str | None]:
    """The parameters that are used on parts of the sequence, and what is wrong, if anything."""
    inner_blocks = split.blocks - frozenset(first_blocks)
    takes = {_input_of(path) for path in inner_blocks} | {head}
    last_layers = {path for path in split.layers if path.rpartition(".")[0] in split.blocks}
    last_layers -= split.readers
    gives = {_input_of(path) for path in first_blocks} | last_layers
    try:
        dry = _SequencePasses(model, [*inner_blocks, *first_blocks], tp, example, in_training)
        for rank in (0, tp - 1):
            cut = Cut(frozenset(takes), frozenset(gives), SEQUENCE, rank, tp)
            run = dry.run_part(cut)
            if run.inputs.keys() != dry.complete.inputs.keys():
                return frozenset(), "the model calls other layers on a part of the sequence"
            wrong = dry.differing_inputs(run, cut)
            first = next((path for path, _ in run.inputs if path in wrong), None)
            if first is None and (wrong := dry.differing_gradients(run, cut)):
                first = min(wrong)
            if first is not None:
                around = first.removeprefix(_INPUT)
                return frozenset(), f"the code around {around} needs the complete sequence"
    except MeshwrightError:
        raise
    except Exception as reason:  # whatever the model's code raises
        text = str(reason).partition("\n")[0]
        name = type(reason).__name__
        return frozenset(), f"the code fails on a part of the sequence with {name}: {text}"
    on_parts = dry.parameters_of(takes)
    on_complete = dry.parameters_of(takes | last_layers, others=True)
    if both := on_parts & on_complete:
        return frozenset(), f"{min(both)} is used on the complete sequence and on parts of it"
    return on_parts, None


class _SequencePasses(DryPasses):
    """Passes that fall apart at the inputs of blocks too."""

    def __init__(
        self, model: nn.Module, blocks: Collection[str], tp: int, example: Example, training: bool
    ) -> None:
        super().__init__(model, example, training)
        for path in blocks:
            self._cut_before(path, tp)
        self.run_complete()

    def parameters_of(self, paths: Collection[str], others: bool = False) -> frozenset[str]:
        """The parameters that the inputs of these modules, or of all others, depend on."""
        known: dict[Any, int] = {}
        bits = 0
        for (path, _), site in self.complete.inputs.items():
            if (path in paths) != others:
                bits |= reached(site, self.bits, {}, known)
        return frozenset(name for name, param in self.params.items() if self.bits[id(param)] & bits)

    def _cut_before(self, path: str, tp: int) -> None:
        name = _input_of(path)

        def site(value: torch.Tensor) -> torch.Tensor:
            if self.is_complete:
                check_sequence(value.shape[SEQUENCE], tp, "tp")
            call = (name, self.run.calls[name])
            self.run.inputs[call] = self.run.given[call] = value * 1
            return self.give(name, value.detach)

        self.model.get_submodule(path).register_forward_pre_hook(
            lambda _, args, kwargs: with_first_tensor(args, kwargs, site), with_kwargs=True
        )


def _input_of(path: str) -> str:
    """What the site before a block is called, which is no module."""
    return f"{_INPUT}{path}"

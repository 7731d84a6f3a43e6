"""One step of a workload on a machine: what it holds, computes and sends, written down once.

>>> from meshwright.machines import Machine
>>> from meshwright.training import TrainConfig
>>> config = TrainConfig("llama-3.1-8b", batch=256, seq=4096)
>>> workload = Workload.of(config, Machine.parse("v5p:4x4x4"))
>>> step = StepModel(workload, Choice.of(fsdp=64))
>>> len(step.collectives), max(step.peaks, key=lambda name: sum(step.peaks[name].values()))
(15, 'attention')

A schedule (planner/schedules) says what is all-gathered and kept when. Memory, time, reports and
the comparison with compiled programs read these lists.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from meshwright.audits import Collective
from meshwright.lazy import cached_property
from meshwright.meshes import STANDARD_AXES
from meshwright.models import describe_padding
from meshwright.planner.attention import kernels_of, standard_rules, with_strategy
from meshwright.planner.constraints import Constraints
from meshwright.planner.device import Device, DeviceStack
from meshwright.planner.sizes import Vectors, adapter_numbers
from meshwright.planner.terms import MakeNumber, Number, plain
from meshwright.planner.workload import Choice, Made, Workload

Kinds = dict[str, Number]
"""Bytes by kind: parameters, gradients, saved activations …"""


@dataclasses.dataclass(frozen=True)
class Work:
    """What a device computes in a step; seconds of layers also by pass, for sends to hide under."""

    flops: float  # useful
    computed: float  # with what remat computes again
    memory_bytes: float
    seconds: dict[str, Number]  # by part
    forward: float = 0.0  # seconds of the layers
    backward: float = 0.0
    attention_forward: float = 0.0
    attention_backward: float = 0.0


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a program runs a step: XLA's train step, PyTorch's FSDP2, the inference engine."""

    meshes: Callable[[int], Iterator[Choice]]
    """Number of devices → the meshes to consider."""
    refusal: Callable[[Workload, Choice], str | None]
    """Why sizes do not divide, in a sentence; None if they do."""
    remat: Callable[[Mapping[str, frozenset[str]]], Mapping[str, frozenset[str]]]
    """The family's remat policies → those that there are."""
    kinds: tuple[str, ...]
    """Kinds of memory, in the order they are shown."""
    always: Callable[["StepModel"], Kinds]
    """Bytes that are there all through the step."""
    peaks: Callable[["StepModel"], Iterable[tuple[str, Kinds]]]
    """Bytes that come and go, at each moment when memory can be highest."""
    written: Callable[["StepModel"], Iterable[Collective]]
    """Collectives as the program has them."""
    compiled: Callable[["StepModel", list[Collective]], list[Collective]]
    """The same as the machine's compiler has them."""
    work: Callable[["StepModel"], Work]
    seconds: Callable[["StepModel", Number], Mapping[str, Number]]
    """(step, seconds that links are waited for) → seconds by part."""
    held: Callable[[Workload, Choice], Workload] = lambda workload, choice: workload
    """The workload with the model as a mesh holds it."""
    check: Callable[[Workload], None] = lambda workload: None
    """Raises if it cannot run a workload, on whatever mesh."""
    narrowed: Callable[[Workload, Constraints], Constraints] = lambda workload, limits: limits
    """The limits as the program reads them."""
    mesh_sizes: Callable[[Mapping[str, int], str], Mapping[str, int]] = lambda sizes, text: sizes
    """(sizes by role, the text they are from) → the sizes of the mesh that is meant."""
    mesh_text: Callable[[Choice], str] = lambda choice: choice.mesh
    """As the program's --mesh takes it."""
    axes: tuple[str, ...] = STANDARD_AXES
    """Of its meshes."""
    overlaps: Callable[[Workload], str] = lambda workload: ""
    """What is sent while it computes, in words, where that does not depend on a setting."""
    is_proved: bool = True
    """Whether `meshwright prove` compiles the step."""
    fused_attention: bool = False
    """Whether attention never falls back to a slower kernel."""
    hides_sums_over_hosts: bool = False
    """Whether all-reduces between hosts overlap as others do."""
    scans: bool = False
    """Whether a loop may run over the layers."""
    chunks_mlp: bool = False
    """Whether the mlp may take a long sequence in chunks."""
    splits_experts: bool = False
    """Whether experts may be split over ep."""


class StepModel:
    """A step: its arrays on a device, its collectives, what is live when, what is computed."""

    def __init__(
        self, workload: Workload, choice: Choice | None = None, number: MakeNumber = plain
    ) -> None:
        choice = workload.choice if choice is None else choice
        self.workload = workload = workload.schedule.held(workload, choice)
        if choice.context_parallel == "auto":
            choice = with_strategy(workload, choice)
        self.choice, self.machine, self.number = choice, workload.machine, number
        self.sizes, self.schedule = workload.sizes, workload.schedule

    @cached_property
    def device(self) -> Device:
        """The sizes of a device's share."""
        return Device(self.workload, self.choice, self.number)

    @cached_property
    def stacks(self) -> list[DeviceStack]:
        # they know the device, not this: without a cycle, a search leaves nothing to collect
        sizes = self.device.sizes
        return [DeviceStack(self.device, i, stack) for i, stack in enumerate(sizes.stacks)]

    @property
    def last(self) -> DeviceStack:
        """The stack before the LM head."""
        return self.stacks[-1]

    @cached_property
    def saved_up_to(self) -> list[Number]:
        """Bytes that the stacks up to each save for the backward pass."""
        return list(itertools.accumulate(stack.saved for stack in self.stacks))

    @cached_property
    def _layer_weights(self) -> list[Number]:
        return list(
            itertools.accumulate(stack.layers * stack.stored_weights for stack in self.stacks)
        )

    @cached_property
    def layers_up_to(self) -> list[Number]:
        """Weights on a device of the stacks up to each."""
        return [weights / self.device.devices for weights in self._layer_weights]

    @property
    def layers(self) -> Number:
        """Weights of all layers, on a device."""
        return self.layers_up_to[-1]

    @cached_property
    def _table_weights(self) -> Number:
        sizes = self.device.sizes
        return self.number(sizes.tables * self.device.padded_vocab * sizes.embed)

    @property
    def tables(self) -> Number:
        """Weights of embedding and LM head, on a device."""
        return self._table_weights / self.device.devices

    @cached_property
    def layers_and_tables(self) -> Number:
        return (self._layer_weights[-1] + self._table_weights) / self.device.devices

    @cached_property
    def vectors(self) -> Number:
        """Norms and biases; biases are split over tp with their heads."""
        return self._vectors(lambda vectors: vectors.numbers)

    @cached_property
    def adapter(self) -> Number:
        """Numbers of an adapter, all of them trained, on a device."""
        axes = tuple(self.choice.sizes.items())
        return self.number(adapter_numbers(self.workload.model, self.workload.config.lora, axes))

    @cached_property
    def trained_vectors(self) -> Number:
        return self._vectors(lambda vectors: vectors.trained)

    @cached_property
    def vectors_with_gradients(self) -> Number:
        return self._vectors(lambda vectors: vectors.gradients)

    def _vectors(self, numbers: Callable[[Vectors], int]) -> Number:
        sizes = self.device.sizes
        kinds = sizes.residual_vectors, sizes.other_vectors, sizes.latent_vectors
        whole = sum(map(numbers, kinds)) + numbers(sizes.expert_vectors) // self.choice.size("ep")
        of_heads = numbers(sizes.head_vectors) + numbers(sizes.position_vectors)
        return self.number(whole + of_heads // self.choice.tensor)

    @cached_property
    def _trained_tables(self) -> Number:
        sizes = self.device.sizes
        return self.number(sizes.trained_tables * self.device.padded_vocab * sizes.embed)

    @property
    def trained_tables(self) -> Number:
        """Weights of embedding and LM head that are trained, on a device."""
        return self._trained_tables / self.device.devices

    @cached_property
    def trained_layers(self) -> Number:
        """Weights of layers that are trained, on a device."""
        return sum(stack.trained_weights for stack in self.stacks) / self.device.devices

    @cached_property
    def trained_layers_and_tables(self) -> Number:
        layers = sum(stack.trained_weights for stack in self.stacks)
        return (layers + self._trained_tables) / self.device.devices

    def gradients_from(self, number: int) -> Number:
        """Weights on a device that have gradients, of the stacks from this one on."""
        stacks = self.stacks[number:]
        return sum(stack.layers * stack.gradient_weights for stack in stacks) / self.device.devices

    @cached_property
    def gradients(self) -> Number:
        """Weights of layers and tables on a device that have gradients."""
        layers = sum(stack.layers * stack.gradient_weights for stack in self.stacks)
        return (layers + self._trained_tables) / self.device.devices

    @cached_property
    def written(self) -> list[Collective]:
        """Collectives as the program has them, those over more than one device."""

        def sent() -> list[Collective]:
            found = self.schedule.written(self)
            return [one for one in found if one.axes and one.bytes and one.times]

        return self._once(("written", self.machine.chip.platform == "cpu"), sent)

    def _once(self, what: tuple[Any, ...], make: Callable[[], Made]) -> Made:
        """What is made once for all machines of the same kind, where many are compared."""
        if self.number is not plain:
            return make()
        return self.workload.once((*what, *self.choice.key), make)

    @cached_property
    def collectives(self) -> list[Collective]:
        """Collectives as the machine's compiler has them."""
        shape = self.machine.chip.platform, self.machine.shape, self.machine.slices
        return self._once(
            ("collectives", shape if self.machine.is_tpu else (shape[0], self.machine.slices)),
            lambda: self.schedule.compiled(self, self.written),
        )

    @cached_property
    def peaks(self) -> dict[str, Kinds]:
        """What is live at each moment when memory can be highest."""
        always, kinds = self.schedule.always(self), self.schedule.kinds
        return {
            name: {kind: always.get(kind, 0) + live.get(kind, 0) for kind in kinds}
            for name, live in self.schedule.peaks(self)
        }

    @cached_property
    def fullest(self) -> Kinds:
        """What is live at the moment with the most of it."""
        machine, chip = self.machine, self.machine.chip
        by = (
            (chip, machine.shape, machine.slices)
            if machine.is_tpu
            else kernels_of(self.workload, self.choice)
        )

        def highest() -> Kinds:
            always, peaks = self.schedule.always(self), self.schedule.peaks(self)
            _, live = max(peaks, key=lambda peak: sum(peak[1].values()))
            return {kind: always.get(kind, 0) + live.get(kind, 0) for kind in self.schedule.kinds}

        return self._once(("fullest", chip.platform, by), highest)

    @property
    def padding(self) -> str | None:
        """What is padded, in words: `vocab 128257 padded to 128258 for tp=2`."""
        model = self.workload.model
        return describe_padding(model, standard_rules(model, self.choice.sizes), self.choice.sizes)

    @cached_property
    def work(self) -> Work:
        return self.schedule.work(self)

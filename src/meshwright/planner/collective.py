"""One collective of a step, as it is planned, timed, shown and compared with compiled programs."""

import dataclasses
from typing import Any, Literal

from meshwright.planner.terms import Number, value_of

Phase = Literal["forward", "backward", "optimizer"]
Payload = Literal[
    "layer weights", "layer gradients", "table", "embedding gradient", "LM head gradient",
    "vector gradients", "q/k norm gradients", "activations", "key gradients", "other",
]  # fmt: skip
"""What is sent: what compilers do with it, and what hides it, depends on this.

A table is the embedding or the LM head, vectors are norms and biases; other are ids, scalars and
the optimizer's."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of collective of a step.

    `bytes`: of the full array on a device, in one execution (see audits.Collective.bytes); a term
    where the formula is printed.
    """

    what: str  # in words: "weights of a layer", "sums of a block's outputs"
    operation: str  # all-gather, reduce-scatter, all-reduce, collective-permute, all-to-all
    axes: tuple[str, ...]  # of the mesh, in its order
    bytes: Number
    times: int  # in a step
    phase: Phase
    payload: Payload = "other"
    pieces: int = 1  # operations that send these bytes each time: a layer's matrices go one by one
    layers: int = 0  # of the stack it belongs to; 0: to none
    stack: str = ""  # its name, where a model has several
    link: str = ""  # what it goes over, in words: "ICI x+y, closed", "NVLink", "host network"
    seconds: float = 0.0  # all times together, if nothing hid it
    hidden: float = 0.0  # of those, the seconds that lie under compute

    @property
    def exposed(self) -> float:
        """Seconds that nothing hides."""
        return self.seconds - self.hidden

    def changed(self, **fields: Any) -> "Collective":
        return dataclasses.replace(self, **fields)

    def timed(self, link: str, seconds: float, hidden: float = 0.0) -> "Collective":
        """With its link and seconds, and bytes as a number."""
        return self.changed(
            bytes=int(value_of(self.bytes)), link=link, seconds=seconds, hidden=hidden
        )

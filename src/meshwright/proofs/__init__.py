"""Proof without the machine: its own compiler, run here, on the step that train would run there."""

from meshwright.proofs.compare import Compared, compare, expected
from meshwright.proofs.footprint import Buffer, Footprint, OutOfMemory
from meshwright.proofs.proof import Proof, prove

__all__ = [
    "Buffer", "Compared", "Footprint", "OutOfMemory", "Proof", "compare", "expected", "prove",
]  # fmt: skip

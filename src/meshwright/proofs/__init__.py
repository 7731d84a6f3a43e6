"""Proof without the machine: its own compiler, run here, on the step that train would run there."""

from meshwright.proofs.compare import Comparison, compare, expected, expected_serving
from meshwright.proofs.footprint import Buffer, Footprint, OutOfMemory
from meshwright.proofs.proof import Proof, prove, prove_serving

__all__ = [
    "Buffer", "Comparison", "Footprint", "OutOfMemory", "Proof", "compare",
    "expected", "expected_serving", "prove", "prove_serving",
]  # fmt: skip

"""Proof without the machine: its own compiler, run here, on the step that train would run there."""

from meshwright.proofs.compare import (
    Comparison,
    compare,
    comparison_table,
    expected,
    expected_serving,
)
from meshwright.proofs.footprint import Buffer, Footprint, OutOfMemory
from meshwright.proofs.program import ProgramProof, plan_program, prove_program
from meshwright.proofs.proof import Proof, prove, prove_serving

__all__ = [
    "Buffer", "Comparison", "Footprint", "OutOfMemory", "ProgramProof", "Proof", "compare",
    "comparison_table", "expected", "expected_serving", "plan_program", "prove", "prove_program",
    "prove_serving",
]  # fmt: skip

"""Proof without the machine: its own compiler, run here, on the step that train would run there."""

from meshwright.prove.footprint import Buffer, Footprint, OutOfMemory
from meshwright.prove.proof import Proof, prove

__all__ = ["Buffer", "Footprint", "OutOfMemory", "Proof", "prove"]

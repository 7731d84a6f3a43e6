"""Checkpoints of a run: asynchronous, atomic, verified on load, restored on any mesh."""

from meshwright.train.checkpoint.checkpoints import Checkpoints

__all__ = ["Checkpoints"]

"""Checkpoints of a run: asynchronous, atomic, verified on load, restored on any mesh."""

from meshwright.checkpoint.agreement import Channel
from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.checkpoint.folder import misnamed, not_a_folder

__all__ = [
    "Channel", "Checkpoints", "misnamed", "not_a_folder",
]  # fmt: skip

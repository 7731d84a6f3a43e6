"""Checkpoints of a run: asynchronous, atomic, verified on load, restored on any mesh."""

from typing import TYPE_CHECKING, Any

from meshwright.checkpoint import folder as folders
from meshwright.checkpoint.damage import Command, advice, read_intact_step, read_step
from meshwright.checkpoint.folder import lowest_loss, misnamed, not_a_folder
from meshwright.checkpoint.pieces import (
    Piece,
    bits_of,
    fingerprint_of,
    holds_pieces,
    overlap,
    read_pieces,
    sums_of_bits,
    write_pieces,
)
from meshwright.checkpoint.record import (
    Record,
    SavedArray,
    altered,
    as_json,
    check_files,
    list_files,
    read_record,
    write_record,
)

if TYPE_CHECKING:
    from meshwright.checkpoint.checkpoints import Checkpoints
    from meshwright.checkpoint.piece_tree import load_piece_tree

__all__ = [
    "Checkpoints", "Command", "Piece", "Record", "SavedArray", "advice", "altered", "as_json",
    "bits_of", "check_files", "fingerprint_of", "folders", "holds_pieces", "list_files",
    "load_piece_tree", "lowest_loss", "misnamed", "not_a_folder", "overlap", "read_intact_step",
    "read_pieces", "read_record", "read_step", "sums_of_bits", "write_pieces", "write_record",
]  # fmt: skip

_WITH_JAX = {
    "Checkpoints": "checkpoints",
    "load_piece_tree": "piece_tree",
}


def __getattr__(name: str) -> Any:
    """What needs jax is imported when it is used."""
    import importlib

    if name not in _WITH_JAX:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WITH_JAX[name]}"), name)

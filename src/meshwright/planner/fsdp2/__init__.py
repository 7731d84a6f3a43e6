"""The PyTorch backend in the plan: what FSDP2 and tensor parallelism hold, send and wait for.

Formulas only: PyTorch need not be installed. tests/torch compares them with real steps.
"""

from meshwright.planner.fsdp2.checks import check_backend, data_axis, meshes, micro_batches, refusal
from meshwright.planner.fsdp2.memory import moments, saved_by_block
from meshwright.planner.fsdp2.traffic import sends
from meshwright.planner.fsdp2.work import copied_bytes, elementwise_numbers, loss_numbers

__all__ = [
    "check_backend",
    "copied_bytes",
    "data_axis",
    "elementwise_numbers",
    "loss_numbers",
    "meshes",
    "micro_batches",
    "moments",
    "refusal",
    "saved_by_block",
    "sends",
]

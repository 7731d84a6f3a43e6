"""Audit a compiled program: a table of its collectives, each planned or a surprise."""

from typing import TYPE_CHECKING

from meshwright.lazy import import_when_used

if TYPE_CHECKING:
    from meshwright.audits.collective import (
        OPERATIONS,
        Collective,
        Payload,
        Phase,
        SentCollective,
        wire_bytes,
    )
    from meshwright.audits.compiled import audit, jax_stage
    from meshwright.audits.expected import BOOKKEEPING, expected_of, judged
    from meshwright.audits.groups import axes_between, part_of_axes, replica_groups
    from meshwright.audits.loops import instructions, trip_count
    from meshwright.audits.memory import Buffer, Replicated
    from meshwright.audits.program import Instruction, Program, array_bytes, arrays_of, read_program
    from meshwright.audits.read import collectives
    from meshwright.audits.result import Audit, Sum
    from meshwright.audits.step import expected_of_step
    from meshwright.audits.text import (
        buffers_table,
        headline,
        marks,
        merged,
        objections,
        replicated_table,
        row_line,
        rows_table,
        short_source,
        sums_table,
    )

__all__ = [
    "BOOKKEEPING", "OPERATIONS", "Audit", "Buffer", "Collective", "Instruction", "Payload", "Phase",
    "Program", "Replicated", "SentCollective", "Sum", "array_bytes", "arrays_of", "audit",
    "axes_between", "buffers_table", "collectives", "expected_of", "expected_of_step", "headline",
    "instructions", "jax_stage", "judged", "marks", "merged", "objections", "part_of_axes",
    "read_program", "replica_groups", "replicated_table", "row_line", "rows_table", "short_source",
    "sums_table", "trip_count", "wire_bytes",
]  # fmt: skip

import_when_used(__name__)

"""`audit(compiled)`: every collective of a compiled program, and its largest arrays.

found = audit(jax.jit(f).lower(x).compile(), expected=expected_of({"tp": ["all-reduce"]}))
print(found)
assert not found.surprises
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshwright.audits.collective import Collective, SentCollective
from meshwright.audits.expected import BOOKKEEPING, judged
from meshwright.audits.memory import MIB, largest_buffers, replicated
from meshwright.audits.program import Program, read_program
from meshwright.audits.read import collectives, sends_anything
from meshwright.audits.result import Audit
from meshwright.audits.sizes import axis_sizes, check_mesh
from meshwright.errors import MeshwrightError


def audit(
    compiled: Any,
    mesh: Any = None,
    *,
    expected: Sequence[Collective] | None = None,
    bookkeeping: int = BOOKKEEPING,
    replicated_from: int = MIB,
) -> Audit:
    """Read a compiled jax program: `jax.jit(f).lower(…).compile()`, or its text and a mesh.

    The mesh (also as text, "fsdp=4,tp=2", or axis sizes) is found in the program's shardings where
    it is not given. With `expected`, rows that match nothing are surprises, except for
    `bookkeeping` bytes of each operation per run. Programs of nnx.jit and eqx.filter_jit are read
    too.
    """
    compiled = jax_stage(compiled)
    text = compiled if isinstance(compiled, str) else _text(compiled)
    program = read_program(text)
    shape = _shape(compiled, mesh, program)
    rows: tuple[SentCollective, ...] = tuple(collectives(program, shape)) if shape else ()
    own = None if isinstance(compiled, str) else _mesh_of(compiled)
    if own is None or list(own.shape.items()) != list(shape.items()):
        check_mesh(program, rows, shape)
    if expected is not None:
        rows = judged(rows, expected, bookkeeping)
    copies = () if isinstance(compiled, str) else replicated(compiled, shape, replicated_from)
    return Audit(
        shape, rows, largest_buffers(program), copies,
        None if expected is None else tuple(expected), _notes(compiled, own, program, rows),
    )  # fmt: skip


def jax_stage(compiled: Any) -> Any:
    """The jax object inside the wrappers of flax's nnx.jit and eqx.filter_jit."""
    for name, stage in (("compiled", jax.stages.Compiled), ("lowered", jax.stages.Lowered)):
        inside = getattr(compiled, name, None)
        if not isinstance(compiled, stage) and isinstance(inside, stage):
            return inside
    return compiled


def _notes(
    compiled: Any, mesh: Any, program: Program, rows: Sequence[SentCollective]
) -> tuple[str, ...]:
    """A note that CPUs send bfloat16 as float32, if the program may contain that."""
    devices: Any = getattr(mesh, "devices", np.empty(0))  # an abstract mesh has none
    platforms = {device.platform for device in devices.flat}
    instructions = [one for body in program.computations.values() for one in body]
    # a text does not name its platform; only CPUs promote the sums of bfloat16
    on_cpu = platforms == {"cpu"} or (
        isinstance(compiled, str) and any("_promoted" in one.rest for one in instructions)
    )
    has_bfloat16 = any(dtype == "bf16" for one in instructions for dtype, _ in one.arrays)
    if on_cpu and has_bfloat16 and any(row.dtype == "f32" for row in rows):
        return (
            "compiled for CPUs, which send bfloat16 as float32: a row of f32 may be half as large "
            "on TPUs and GPUs",
        )
    return ()


def _text(compiled: Any) -> str:
    for stage, call in (
        (jax.stages.Lowered, ".compile()"),
        (jax.stages.Traced, ".lower().compile()"),
    ):
        if isinstance(compiled, stage):
            raise MeshwrightError(
                f"audit reads compiled programs, and this is a {stage.__name__}, which no compiler "
                f"has seen; call {call} first"
            )
    if not hasattr(compiled, "as_text"):
        raise MeshwrightError(
            f"audit reads compiled programs, not {type(compiled).__name__}; give "
            "jax.jit(f).lower(…).compile(), or its text and the mesh"
        )
    text = compiled.as_text()
    if not isinstance(text, str):
        raise MeshwrightError("this compiled program does not give its text (as_text() is None)")
    return text


def _shape(compiled: Any, mesh: Any, program: Program) -> Mapping[str, int]:
    """Axis sizes of the mesh given, or of the mesh in the program's shardings.

    A program without collectives needs none.
    """
    if mesh is None and not isinstance(compiled, str):
        mesh = _mesh_of(compiled)
    if mesh is not None:
        return axis_sizes(mesh)
    if sends_anything(program):
        raise MeshwrightError(
            "audit needs the mesh the program was compiled for, and found none in its shardings; "
            "give it: mesh='fsdp=4,tp=2', or a jax Mesh"
        )
    return {}


def _mesh_of(compiled: Any) -> Any:
    """The largest mesh that a sharding of an argument or output names."""
    found = []
    for name in ("input_shardings", "output_shardings"):
        try:
            shardings = jax.tree.leaves(getattr(compiled, name))
        except (AttributeError, NotImplementedError):
            continue
        found += [one.mesh for one in shardings if isinstance(one, NamedSharding)]
    found = [mesh for mesh in found if mesh.size > 0 and mesh.axis_names]
    return max(found, key=lambda mesh: mesh.size, default=None)

"""Check the collectives of a function in your own tests.

    from meshwright.testing import assert_collectives

    def test_my_step_is_fsdp():
        assert_collectives(step, {"fsdp": ["all-gather", "reduce-scatter"]}, params, batch)

It fails with a table of unexpected collectives, with their source lines, and of missing ones.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from meshwright.audits import (
    BOOKKEEPING,
    Audit,
    audit,
    expected_of,
    jax_stage,
    objections,
)
from meshwright.errors import MeshwrightError

__all__ = ["assert_collectives"]


def assert_collectives(
    function: Any,
    expected: Mapping[Any, Sequence[str]],
    *arguments: Any,
    mesh: Any = None,
    allow_missing: bool = False,
    bookkeeping: int = BOOKKEEPING,
    **keywords: Any,
) -> Audit:
    """Fail unless a function has exactly the expected collectives.

    `function` is a jitted or plain function with its arguments (arrays, or jax.ShapeDtypeStructs
    with shardings), or a compiled program; nnx.jit and eqx.filter_jit do as well. `expected` maps
    mesh axes ("tp", or ("fsdp", "sp") together) to operations; `{}` means no collectives,
    `"reduce-scatter/all-reduce"` that the compiler may rewrite the first as the second. Up to
    `bookkeeping` bytes of a run, such as the sum of a loss, may go over any axis that is named; 0:
    none. With `allow_missing`, less may be sent. The mesh is found in the shardings, or given:
    `mesh="fsdp=4,tp=2"`.
    """
    if not isinstance(expected, Mapping):
        raise MeshwrightError(
            f"assert_collectives(function, expected, …): expected is {expected!r}, not a mapping "
            'from axes to operations; write {"fsdp": ["all-gather"]}, or {} for nothing'
        )
    said = expected_of(expected)
    function = jax_stage(function)
    program = function if hasattr(function, "as_text") else _compiled(function, arguments, keywords)
    found = audit(program, mesh, expected=said, bookkeeping=bookkeeping)
    if found.mesh:
        expected_of(expected, found.mesh)  # an axis that is not there is a mistake
    if wrong := objections(found, allow_missing):
        raise AssertionError(wrong)
    return found


def _compiled(function: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    if isinstance(function, jax.stages.Traced):
        raise MeshwrightError(
            "this is a Traced, which no compiler has seen; call .lower().compile() first"
        )
    if not callable(function):
        raise MeshwrightError(
            f"assert_collectives takes a function or a compiled program, not "
            f"{type(function).__name__}"
        )
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    return jitted.lower(*arguments, **keywords).compile()

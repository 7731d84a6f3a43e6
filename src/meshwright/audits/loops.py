"""Trip counts of loops, and a program's instructions with the loops around them."""

import dataclasses
import re
from collections.abc import Iterator

from meshwright.audits.program import Instruction, Program, read_program

_KNOWN = re.compile(r'"?known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)"?\}')
# operations that return their operand unchanged
_SAME = {"copy", "bitcast", "copy-start", "copy-done", "convert", "reshape", "opt-barrier"}


def instructions(text: str | Program) -> list[Instruction]:
    """Every instruction with a buffer: in the entry, loops and branches, not inside fusions."""
    program = read_program(text) if isinstance(text, str) else text

    def walk(name: str, loops: tuple[int, ...]) -> Iterator[Instruction]:
        for one in program.computations.get(name, ()):
            yield dataclasses.replace(one, loops=loops)
            if one.operation == "while":
                trips = trip_count(program, name, one)
                count = 1 if trips is None else trips
                yield from walk(one.called("body") or "", (*loops, count))
            elif one.operation == "call":
                yield from walk(one.called("to_apply") or "", loops)
            elif one.operation == "conditional":
                for branch in one.branches:
                    yield from walk(branch, loops)

    return list(walk(program.entry, ()))


def trip_count(program: Program, computation: str, loop: Instruction) -> int | None:
    """Trip count of a while loop; None if the text does not contain it.

    The CPU and GPU compilers print it. The TPU compiler does not: there it follows from the
    constant of the condition, the initial value and the increment.
    """
    known = _KNOWN.search(loop.rest)
    if known:
        return int(known[1])
    body, condition = loop.called("body"), loop.called("condition")
    compared = _compared(program, condition)
    if compared is None or body is None:
        return None
    index, limit, direction = compared
    start = _tuple_part(program, computation, loop.operands[0] if loop.operands else "", index)
    step = _step(program, body, index)
    if start is None or not step:
        return None
    inclusive = direction in ("LE", "GE")
    if direction in ("LT", "LE") and step > 0:
        return max(-(-(limit - start + inclusive) // step), 0)
    if direction in ("GT", "GE") and step < 0:
        return max(-(-(start - limit + inclusive) // -step), 0)
    exact = direction == "NE" and (limit - start) % step == 0 and (limit - start) // step >= 0
    return (limit - start) // step if exact else None


def _compared(program: Program, name: str | None) -> tuple[int, int, str] | None:
    """Of a condition `counter < constant`: the counter's index in the state, and the constant."""
    by_name = _by_name(program, name)
    root = next((one for one in by_name.values() if one.root), None)
    while root is not None and root.operation in ("copy", "bitcast"):
        root = by_name.get(root.operands[0])
    if root is not None and root.operation == "fusion":  # GPU and CPU wrap the comparison
        inner = _by_name(program, root.called("calls"))
        outer, found = root, next((one for one in inner.values() if one.root), None)
        if found is None or found.operation != "compare":
            return None
        sides = [_through(inner, side) for side in found.operands]
        parts: list[Instruction | None] = []
        for side in sides:
            if side is not None and side.operation == "parameter":
                number = int(side.operands[0]) if side.operands[0].isdigit() else -1
                held = outer.operands[number] if 0 <= number < len(outer.operands) else ""
                side = _through(by_name, held)
            parts.append(side)
        root = found
    elif root is not None and root.operation == "compare":
        parts = [_through(by_name, side) for side in root.operands]
    else:
        return None
    direction = re.search(r"direction=(\w\w)", root.rest)
    if direction is None or len(parts) != 2:
        return None
    said = direction[1]
    one, other = parts
    if _constant(one) is not None:
        one, other = other, one
        said = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(said, said)
    limit, index = _constant(other), _index(one)
    return None if limit is None or index is None else (index, limit, said)


def _step(program: Program, body: str, index: int) -> int | None:
    """The increment of the loop counter, at an index of the loop state."""
    by_name = _by_name(program, body)
    root = next((one for one in by_name.values() if one.root), None)
    if root is None or root.operation != "tuple" or index >= len(root.operands):
        return None
    new = _through(by_name, root.operands[index])
    outer: Instruction | None = None
    inside = by_name
    part = 0
    if new is not None and new.operation == "get-tuple-element":  # of a fusion with several results
        part = _index(new) or 0
        new = _through(by_name, new.operands[0])
    if new is not None and new.operation == "fusion":
        outer, inside = new, _by_name(program, new.called("calls"))
        new = next((one for one in inside.values() if one.root), None)
        if new is not None and new.operation == "tuple":
            new = _through(inside, new.operands[part]) if part < len(new.operands) else None
    if new is None or new.operation not in ("add", "subtract"):
        return None
    amount = None
    counter = False
    for name in new.operands:
        side = _through(inside, name)
        if side is not None and side.operation == "parameter" and outer is not None:
            number = int(side.operands[0]) if side.operands[0].isdigit() else -1
            held = outer.operands[number] if 0 <= number < len(outer.operands) else ""
            side = _through(by_name, held)
        value = _constant(side)
        if value is not None:
            amount = value
        counter |= _index(side) == index
    if amount is None or not counter:
        return None
    return amount if new.operation == "add" else -amount


def _tuple_part(program: Program, computation: str, name: str, index: int) -> int | None:
    """The constant at an index of a tuple."""
    by_name = _by_name(program, computation)
    state = _through(by_name, name)
    if state is None or state.operation != "tuple" or index >= len(state.operands):
        return None
    return _constant(_through(by_name, state.operands[index]))


def _through(by_name: dict[str, Instruction], name: str) -> Instruction | None:
    """The instruction that made a value, past copies."""
    one = by_name.get(name)
    for _ in range(20):
        if one is None or one.operation not in _SAME or not one.operands:
            return one
        one = by_name.get(one.operands[0])
    return one


def _by_name(program: Program, name: str | None) -> dict[str, Instruction]:
    return {one.name: one for one in program.computations.get(name or "", ())}


def _constant(one: Instruction | None) -> int | None:
    if one is None or one.operation != "constant" or not one.operands:
        return None
    return int(one.operands[0]) if re.fullmatch(r"-?\d+", one.operands[0]) else None


def _index(one: Instruction | None) -> int | None:
    """Which part of a tuple a get-tuple-element takes."""
    if one is None or one.operation != "get-tuple-element":
        return None
    found = re.search(r"\bindex=(\d+)", one.rest)
    return int(found[1]) if found else None

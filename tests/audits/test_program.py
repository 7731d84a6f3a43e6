"""Reading a program's text: types, loops, branches, calls, and lines that break."""

from pathlib import Path

import pytest

import meshwright
from meshwright.audits import audit, collectives, expected_of, instructions, read_program
from meshwright.audits.loops import trip_count
from meshwright.audits.program import array_bytes
from meshwright.errors import MeshwrightError

MESH = {"x": 2, "y": 4}
OVER_Y = "replica_groups=[2,4]<=[8], use_global_device_ids=true, to_apply=%add"

ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def entry(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"HloModule m, num_partitions=8\n{ADD}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    )


def loop(limit: str, start: int = 0, step: int = 1, direction: str = "LT", add: str = "add") -> str:
    """A loop that all-reduces over y in every iteration, and does not say how many there are."""
    return f"""HloModule m, num_partitions=8
{ADD}
%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %s = (s32[], f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8]{{0}} get-tuple-element(%s), index=1
  %step = s32[] constant({step})
  %next = s32[] {add}(%i, %step)
  %r = f32[8]{{0}} all-reduce(%x), {OVER_Y}
  ROOT %t = (s32[], f32[8]{{0}}) tuple(%next, %r)
}}

%condition (s.1: (s32[], f32[8])) -> pred[] {{
  %s.1 = (s32[], f32[8]{{0}}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %limit = {limit}
  ROOT %less = pred[] compare(%i.1, %limit), direction={direction}
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  %start = s32[] constant({start})
  %copied = s32[] copy(%start)
  %state = (s32[], f32[8]{{0}}) tuple(%copied, %p)
  %while = (s32[], f32[8]{{0}}) while(%state), condition=%condition, body=%body
  ROOT %out = f32[8]{{0}} get-tuple-element(%while), index=1
}}
"""


@pytest.mark.parametrize(
    ("limit", "start", "step", "direction", "add", "trips"),
    [
        (12, 0, 1, "LT", "add", len(range(12))),
        (12, 0, 5, "LT", "add", len(range(0, 12, 5))),
        (12, 2, 5, "LE", "add", len(range(2, 13, 5))),
        (0, 12, 1, "GT", "subtract", len(range(12, 0, -1))),
        (0, 12, -5, "GE", "add", len(range(12, -1, -5))),
        (12, 0, 3, "NE", "add", 4),
        (0, 5, 1, "LT", "add", 0),
    ],
)
def test_trip_counts_are_found_from_condition_start_and_step(
    limit: int, start: int, step: int, direction: str, add: str, trips: int
) -> None:
    text = loop(f"s32[] constant({limit})", start, step, direction, add)
    program = read_program(text)
    (one,) = (one for one in program.computations["main"] if one.operation == "while")
    assert trip_count(program, "main", one) == trips
    assert [row.times for row in collectives(text, MESH)] == ([trips] if trips else [])


def test_a_loop_that_does_not_say_its_trip_count_is_counted_once_and_marked() -> None:
    text = loop("s32[] get-tuple-element(%s.1), index=0")
    (row,) = collectives(text, MESH)
    assert (row.times, row.unsure) == (1, True)
    assert " 1?  " in str(audit(text, MESH))


def test_what_a_program_says_of_a_loop_is_believed_first() -> None:
    said = 'body=%body, backend_config={"known_trip_count":{"n":"7"}}'
    text = loop("s32[] constant(3)").replace("body=%body", said)
    assert [row.times for row in collectives(text, MESH)] == [7]


@pytest.mark.parametrize(("trips", "surprises"), [(2, 0), (10_000, 1)])
def test_what_is_small_is_counted_as_often_as_it_is_sent(trips: int, surprises: int) -> None:
    text = loop(f"s32[] constant({trips})").replace("f32[8]", "f32[8192]")  # 32 KiB
    found = audit(text, MESH, expected=expected_of({"y": ["all-gather"]}))
    assert [row.times for row in found.rows] == [trips]
    assert len(found.surprises) == surprises


def test_what_is_small_is_counted_over_all_that_is_alike() -> None:
    """As layers that are unrolled send it: a row each. The smallest are bookkeeping first."""
    sums = [f"%r{i} = f32[8192]{{0}} all-reduce(%p), {OVER_Y}" for i in range(20)]
    text = entry("%p = f32[8]{0} parameter(0)", *sums, f"%s = f32[] all-reduce(%p), {OVER_Y}")
    found = audit(text, MESH, expected=expected_of({"y": ["all-gather"]}))
    assert len(found.surprises) == 19
    assert [row.shape for row in found.rows if row.planned] == [(8192,), ()]


def test_a_combined_collective_has_a_row_for_each_array() -> None:
    text = entry(
        "%p = f32[8]{0} parameter(0)",
        "%q = bf16[4,2]{1,0:T(8,128)(2,1)S(1)} convert(%p)",
        f"%r = (f32[8]{{0}}, bf16[4,2]{{1,0:T(8,128)(2,1)}}) all-reduce(%p, /*index=1*/%q), {OVER_Y}",
    )
    rows = collectives(text, MESH)
    assert [(row.dtype, row.shape, row.bytes) for row in rows] == [
        ("f32", (8,), 32),
        ("bf16", (4, 2), 16),
    ]


def test_each_operation_counts_the_bytes_of_the_whole_array() -> None:
    groups = "replica_groups=[2,4]<=[8]"
    text = entry(
        "%p = f32[8]{0} parameter(0)",
        f"%a = f32[32]{{0}} all-gather(%p), {groups}, dimensions={{0}}",
        f"%b = f32[2]{{0}} reduce-scatter(%p), {groups}, dimensions={{0}}, to_apply=%add",
        f"%c = f32[8]{{0}} all-reduce(%p), {groups}, to_apply=%add",
        f"%d = f32[8]{{0}} all-to-all(%p), {groups}, dimensions={{0}}",
        "%e = f32[8]{0} collective-permute(%p), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
    )
    rows = {row.operation: row for row in collectives(text, MESH)}
    assert {row.axes for row in rows.values()} == {("y",)}
    assert {name: row.bytes for name, row in rows.items()} == {
        "all-gather": 128, "reduce-scatter": 32, "all-reduce": 32, "all-to-all": 32,
        "collective-permute": 32,
    }  # fmt: skip
    # what a device puts on the wire, in a ring of four
    assert {name: row.wire_bytes for name, row in rows.items()} == {
        "all-gather": 96, "reduce-scatter": 24, "all-reduce": 48, "all-to-all": 24,
        "collective-permute": 32,
    }  # fmt: skip


@pytest.mark.parametrize(("into", "out"), [(8, 32), (32, 8)])
def test_a_ragged_all_to_all_sends_no_more_rows_than_go_in_or_come_out(into: int, out: int) -> None:
    """As the compilers of TPUs and GPUs write it: one operation, or a start and its end."""
    arrays = f"f32[{into},4], f32[{out},4], s32[2], s32[2], s32[2], s32[2]"
    parameters = [f"%p{i} = {text} parameter({i})" for i, text in enumerate(arrays.split(", "))]
    called = f"(%p0, %p1, %p2, %p3, %p4, %p5), {OVER_Y}"
    at_once = [f"%x = f32[{out},4] ragged-all-to-all{called}"]
    apart = [
        f"%s = (({arrays}), f32[{out},4]) ragged-all-to-all-start{called}",
        f"%d = f32[{out},4] ragged-all-to-all-done(%s)",
    ]
    for lines in (at_once, apart):
        (row,) = audit(entry(*parameters, *lines), MESH).rows
        assert (row.operation, row.bytes) == ("all-to-all", 4 * 4 * 8)


def test_what_stays_on_its_device_is_not_sent() -> None:
    text = entry(
        "%p = f32[8]{0} parameter(0)",
        "%e = f32[8]{0} collective-permute(%p), source_target_pairs={{0,0},{1,1},{2,2}}",
        "%c = f32[8]{0} all-reduce(%p), replica_groups=[8,1]<=[8], to_apply=%add",
    )
    assert collectives(text, MESH) == []


def test_a_collective_matmul_stands_for_the_all_gather_that_is_expected() -> None:
    """A collective matmul: permutes in a loop of that name, each beside a part of the product."""
    around = "collective-permute(%x), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
    text = loop("s32[] constant(3)").replace(f"all-reduce(%x), {OVER_Y}", around)
    expected = expected_of({"y": ["all-gather"]})
    plain = audit(text, MESH, expected=expected, bookkeeping=0)
    assert [row.why for row in plain.surprises] == ["over y only all-gather is expected"]
    named = text.replace("%body", "%windowed_dot_general_body_ag")
    found = audit(named, MESH, expected=expected, bookkeeping=0)
    assert [(row.times, row.collective_matmul) for row in found.rows] == [(3, True)]
    assert found.surprises == () == found.missing
    # the hop before the loop is part of it
    first = f"  %first = f32[8]{{0}} {around.replace('%x', '%p')}\n  %start ="
    found = audit(named.replace("  %start =", first), MESH, expected=expected, bookkeeping=0)
    assert [row.times for row in found.rows] == [1, 3]
    assert found.surprises == ()


@pytest.mark.parametrize(
    ("scope", "origin"),
    [
        ("jit(f)/transpose(jvp(mlp))/all_gather", "all-gather over y"),
        ("jit(f)/jvp(mlp)/unreduced_reduce_scatter", "reduce-scatter over y"),
        ("jit(f)/transpose(jvp(mlp))/dot_general", "reduce-scatter over y"),
        ("jit(f)/jvp(mlp)/dot_general", "all-gather over y"),
    ],
)
def test_of_two_things_it_may_be_made_of_the_likelier_is_named(scope: str, origin: str) -> None:
    text = entry(
        "%p = f32[8]{0} parameter(0)",
        f'%c = f32[8]{{0}} all-reduce(%p), {OVER_Y}, metadata={{op_name="{scope}"}}',
    )
    said = ["reduce-scatter/all-reduce", "all-gather/all-reduce"]
    for operations in (said, said[::-1]):
        found = audit(text, MESH, expected=expected_of({"y": operations}), bookkeeping=0)
        assert [row.rewritten for row in found.rewritten] == [origin]


def test_what_lies_between_is_counted_in_words() -> None:
    text = entry(
        "%p = f32[8]{0} parameter(0)",
        f"%s = f32[8]{{0}} all-reduce-start(%p), {OVER_Y}",
        "%w = f32[8]{0} custom-call(%p)",
        "%d = f32[8]{0} all-reduce-done(%s)",
    )
    assert "  beside 1 op\n" in str(audit(text, MESH))


def test_sources_are_shown_from_the_package_or_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    package = Path(meshwright.__file__).parent
    for source, shown in (
        (f"{package}/ops/loss.py:3", "meshwright/ops/loss.py:3"),
        (f"{tmp_path}/model/step.py:12", "model/step.py:12"),
        ("/somewhere/else/step.py:12", "/somewhere/else/step.py:12"),
        ("step.py:12", "step.py:12"),
    ):
        place, _, line = source.rpartition(":")
        text = entry(
            "%p = f32[8]{0} parameter(0)",
            f'%c = f32[8]{{0}} all-reduce(%p), {OVER_Y}, metadata={{op_name="a" '
            f'source_file="{place}" source_line={line}}}',
        )
        found = audit(text, MESH, expected=[], bookkeeping=0)
        assert found.rows[0].source == source  # data keep what the program says
        assert f" at {shown} (a)" in str(found)


def test_every_branch_of_a_conditional_is_listed_and_the_one_that_sends_most_counts() -> None:
    branches = "".join(
        f"%{name} (q: f32[8]) -> f32[{size}] {{\n  %q = f32[8]{{0}} parameter(0)\n"
        f"  ROOT %r.{name} = f32[{size}]{{0}} all-gather(%q), replica_groups=[2,4]<=[8], "
        "dimensions={0}\n}\n"
        for name, size in (("few", 32), ("many", 64))
    )
    text = entry(
        "%p = f32[8]{0} parameter(0)",
        "%i = s32[] constant(1)",
        "%c = f32[8]{0} conditional(%i, %p, %p), branch_computations={%few, %many}",
    ).replace("ENTRY", branches + "\nENTRY")
    few, many = collectives(text, MESH)
    assert (few.bytes, few.branch, few.counted) == (128, "1 of 2", False)
    assert (many.bytes, many.branch, many.counted) == (256, "2 of 2", True)
    found = audit(text, MESH, expected=expected_of({"x": ["all-gather"]}), bookkeeping=0)
    assert len(found.surprises) == 2, "what either branch may send is judged"
    assert [one.bytes for one in found.by_axis()] == [256]
    assert "1 collective in a run" in str(found)
    assert "all-gather ! (branch 1 of 2)" in str(found)
    allowed = audit(text, MESH, expected=expected_of({"y": ["all-gather"]}))
    assert not allowed.surprises
    assert not allowed.missing


def test_metadata_may_break_lines() -> None:
    """As that of Pallas kernels does, with braces of its own."""
    text = entry(
        "%p = f32[8]{0} parameter(0)",
        '%k = f32[8]{0} custom-call(%p), frontend_attributes={kernel_metadata={\n"a":"{1}"\n}}, '
        'metadata={op_name="kernel"}',
        f'%c = f32[8]{{0}} all-reduce(%k), {OVER_Y}, metadata={{op_name="after"}}',
    )
    found = {one.name: one.scope for one in instructions(text)}
    assert found == {"p": "", "k": "kernel", "c": "after"}
    assert [row.scope for row in collectives(text, MESH)] == ["after"]


def test_the_line_of_source_is_found_in_either_spelling() -> None:
    tables = """
FileNames
1 "model.py"
2 "train.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=40 end_line=40 column=1 end_column=2}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}

"""
    text = entry(
        "%p = f32[8]{0} parameter(0)",
        f'%c = f32[8]{{0}} all-reduce(%p), {OVER_Y}, metadata={{op_name="a" stack_frame_id=2}}',
        f'%d = f32[8]{{0}} all-reduce(%p), {OVER_Y}, metadata={{op_name="b" '
        'source_file="other.py" source_line=7}',
    ).replace("\n", "\n" + tables, 1)
    rows = collectives(text, MESH)
    assert rows[0].stack == ("model.py:12", "train.py:40")
    assert [row.source for row in rows] == ["model.py:12", "other.py:7"]


@pytest.mark.parametrize(
    ("array", "size"),
    [(("bf16", (3, 4)), 24), (("pred", (8,)), 8), (("s4", (6,)), 3), (("f8e4m3fn", (5,)), 5)],
)
def test_the_bytes_of_every_dtype(array: tuple[str, tuple[int, ...]], size: int) -> None:
    assert array_bytes(array) == size


@pytest.mark.parametrize("text", ["", "hello", "module @jit_f {\n}\n"])
def test_what_is_no_program_is_a_mistake(text: str) -> None:
    with pytest.raises(MeshwrightError, match=r"no ENTRY computation; give what compiled\.as_text"):
        audit(text, MESH)

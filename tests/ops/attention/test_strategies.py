"""Every strategy over a split length against a plain softmax in float64, values and gradients."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tests.ops.attention.programs import Case, agrees, run
from tests.ops.attention.reference import Sees, documents, in_float64, inputs

from meshwright.ops.attention import Mask
from meshwright.ops.attention.strategy import Split, refusal

ALL = Mask(causal=False)
EIGHT = {"heads": 8, "kv_heads": 8}

# every strategy with every mask, every number of devices, shared heads of every kind, documents or
# none: each pair of these at least once
CASES = {
    "ring over 2": Case("ring", "sp=2"),
    "ring over 8": Case("ring", "sp=8", heads=6, kv_heads=3),
    "ring, rows in order": Case("ring", "sp=4", order="contiguous"),
    "ring, all see all": Case("ring", "sp=4", ALL, kv_heads=4),
    "ring, blocks": Case("ring", "sp=4", Mask(block=4)),
    "ring, blocks of two parts": Case("ring", "sp=4", Mask(block=16)),
    "ring, blocks larger than a part": Case("ring", "sp=8", Mask(block=10), kv_heads=1),
    "ring, blocks across edges": Case("ring", "sp=4", Mask(block=3), packed=False),
    "ring, a window inside a part": Case("ring", "sp=2", Mask(window=5), kv_heads=1),
    "ring, a window of one part": Case("ring", "sp=4", Mask(window=8)),
    "ring, a window over one whole part": Case("ring", "sp=4", Mask(window=16), kv_heads=4),
    "ring, a window over several": Case("ring", "sp=8", Mask(window=15)),
    "ring, a window over nearly all": Case("ring", "sp=4", Mask(window=30), packed=False),
    "ring, a window of one": Case("ring", "sp=4", Mask(window=1), packed=False),
    "gathered over 8": Case("allgather", "sp=8"),
    "gathered over 2, all see all": Case("allgather", "sp=2", ALL, kv_heads=1, packed=False),
    "gathered, blocks": Case("allgather", "sp=8", Mask(block=4), kv_heads=4),
    "gathered, blocks of whole parts": Case("allgather", "sp=8", Mask(block=12), packed=False),
    "gathered, blocks larger than a part": Case("allgather", "sp=4", Mask(block=11), kv_heads=4),
    "gathered, a block of all": Case("allgather", "sp=2", Mask(block=40)),
    "gathered, a window over one edge": Case("allgather", "sp=4", Mask(window=3)),
    "gathered, a window over several": Case("allgather", "sp=8", Mask(window=11), kv_heads=1),
    "ulysses over 2": Case("ulysses", "sp=2"),
    "ulysses, blocks across edges": Case("ulysses", "sp=8", Mask(block=3), packed=False, **EIGHT),
    "ulysses over 8, a window": Case("ulysses", "sp=8", Mask(window=9), **EIGHT),
}


# beside those of PACKED, which are in the test of documents
QUICK = {
    "ring, rows in order", "ring, all see all", "ring, blocks larger than a part",
    "ring, a window of one", "gathered, blocks of whole parts", "gathered, a window over one edge",
    "ulysses, blocks across edges",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_values_and_gradients_are_those_of_a_plain_softmax(name: str) -> None:
    agrees(CASES[name])


MESHES = {
    "ring beside dp and tp": Case("ring", "dp=2,tp=2,sp=2", batch=6, heads=8, kv_heads=4),
    "ring beside fsdp": Case("ring", "fsdp=2,sp=4", Mask(window=11), batch=2),
    "ring beside tp, one key head each": Case("ring", "tp=2,sp=4", packed=False),
    "gathered beside dp and fsdp": Case("allgather", "dp=2,fsdp=2,sp=2", batch=4),
    "ulysses beside tp": Case("ulysses", "sp=4,tp=2", ALL, heads=16, kv_heads=8),
    # of which lax.ppermute alone goes by the order of the mesh
    "ring over two axes": Case("ring", "sp=2,fsdp=2", packed=False, along=("fsdp", "sp")),
}


@pytest.mark.parametrize(
    "name",
    [
        "ring beside dp and tp",
        "ring over two axes",
        "gathered beside dp and fsdp",
        pytest.param("ring beside fsdp", marks=pytest.mark.slow),
        pytest.param("ring beside tp, one key head each", marks=pytest.mark.slow),
        pytest.param("ulysses beside tp", marks=pytest.mark.slow),
    ],
)
def test_beside_other_axes_it_is_the_same_and_laid_out_as_the_queries(name: str) -> None:
    agrees(MESHES[name])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring", "allgather", "ulysses"])
def test_over_two_axes_in_any_order_it_is_the_same(strategy: str) -> None:
    for along in (("fsdp", "sp"), ("sp", "fsdp")):
        agrees(Case(strategy, "sp=2,dp=2,fsdp=2", heads=8, kv_heads=4, batch=2, along=along))


# ---- documents: one program each, many ways to cut the rows

PACKED = {
    name: CASES[name]
    for name in ("ring over 8", "ring, a window over several", "gathered over 8", "ulysses over 2")
}
EDGES = [4, 8, 12, 16, 20, 24, 28]  # of 8 parts; some are those of fewer


@st.composite
def packed_rows(draw: st.DrawFn, batch: int = 3, length: int = 32) -> np.ndarray:
    """Rows cut anywhere, often exactly on an edge between devices; then padding, or none."""
    rows = []
    for _ in range(batch):
        anywhere = st.sets(st.integers(1, length - 1), max_size=6)
        on_edges = st.sets(st.sampled_from(EDGES))
        cuts = draw(anywhere) | draw(on_edges)
        row = np.cumsum([1, *(place in cuts for place in range(1, length))])
        padding = draw(st.integers(0, length) if draw(st.booleans()) else st.just(0))
        rows.append(np.where(np.arange(length) < length - padding, row, 0))
    return np.array(rows, "i")


def rows_of(*row: int) -> np.ndarray:
    return np.tile(np.array(row, "i"), (3, 1))


@pytest.mark.parametrize("name", PACKED)
@settings(max_examples=8)
@given(segments=packed_rows(), seed=st.integers(0, 99))
@example(segments=rows_of(*range(1, 33)), seed=0)  # each token sees itself only
@example(segments=rows_of(*[0] * 32), seed=0)  # padding only
@example(segments=rows_of(*np.repeat(range(1, 9), 4)), seed=0)  # a document for each device
@example(segments=rows_of(*[1] * 31, 0), seed=0)
@example(segments=rows_of(*[7, 5] * 16), seed=0)  # numbers in any order, documents in pieces
def test_documents_may_begin_and_end_anywhere(name: str, segments: np.ndarray, seed: int) -> None:
    agrees(PACKED[name], segments, seed)


def test_what_another_document_holds_leaves_no_trace() -> None:
    case = CASES["ring over 8"]
    segments = np.repeat([[1] * 13 + [2] * 12 + [0] * 7], 3, axis=0).astype("i")
    arrays = inputs(3, 32, case.heads, case.kv_heads)
    others = tuple(np.where(segments[:, :, None, None] == 2, x, np.float32(50)) for x in arrays)
    ours, theirs = run(case, arrays, segments), run(case, others, segments)
    for one, other in zip(ours, theirs, strict=True):
        assert np.isfinite(other).all()
        np.testing.assert_array_equal(one[segments == 2], other[segments == 2])


# ---- precision, and parts longer than a block of queries


@pytest.mark.parametrize(
    "case",
    [
        Case("ring", "sp=4", dtype="bfloat16"),
        Case("ulysses", "sp=2", dtype="bfloat16"),
        pytest.param(
            Case("allgather", "sp=4", Mask(window=11), dtype="bfloat16"), marks=pytest.mark.slow
        ),
    ],
    ids=["ring", "ulysses", "gathered"],
)
def test_bfloat16_is_within_its_rounding(case: Case) -> None:
    arrays = tuple(
        np.asarray(jnp.asarray(x, jnp.bfloat16), "f")
        for x in inputs(case.batch, case.length, case.heads, case.kv_heads)
    )
    segments = documents(case.batch, case.length)
    expected, gradients = in_float64(*arrays, segments, Sees(window=case.mask.window))
    found = run(case, arrays, segments)
    # values and weights have 8 bits, sums have more: errors are a few units of the largest
    for one, right in zip(found, (expected, *gradients), strict=True):
        assert np.abs(one - right).max() <= 3 * 2**-8 * np.abs(right).max()
        assert np.sqrt(np.mean((one - right) ** 2)) <= 2 * 2**-8 * np.sqrt(np.mean(right**2))


@pytest.mark.parametrize(
    "mask",
    [Mask(), *(pytest.param(m, marks=pytest.mark.slow) for m in (ALL, Mask(window=43)))],
    ids=["causal", "all", "window"],
)
def test_bfloat16_gradients_are_as_exact_as_those_of_one_device(mask: Mask) -> None:
    """Splitting the sequence adds no rounding: parts of sums are kept in float32."""
    sizes = {"batch": 2, "length": 96, "heads": 4, "kv_heads": 4}
    sees = Sees(causal=mask.causal, window=mask.window)
    cases = {
        name: Case(
            "ring" if name == "one device" else name, "sp=1" if name == "one device" else "sp=4",
            mask, packed=False, dtype="bfloat16", **sizes,
        )
        for name in ("one device", "ring", "allgather", "ulysses")
    }  # fmt: skip
    largest: dict[str, list[list[float]]] = {name: [] for name in cases}
    squares: dict[str, list[list[float]]] = {name: [] for name in cases}
    for seed in range(8):
        arrays = tuple(
            np.asarray(jnp.asarray(x, jnp.bfloat16), "f")
            for x in inputs(**sizes, head_dim=16, seed=seed)
        )
        out, gradients = in_float64(*arrays, sees=sees)
        for name, case in cases.items():
            found = zip(run(case, arrays, None), (out, *gradients), strict=True)
            errors = [(x - y) / np.abs(y).max() for x, y in found]
            largest[name].append([np.abs(x).max() for x in errors])
            squares[name].append([np.mean(x**2) for x in errors])
    for name in cases:
        for found, most in ((largest, 1.2), (squares, 1.1)):
            alone, split = (np.mean(found[x], axis=0) for x in ("one device", name))
            assert (split <= most * alone).all(), (name, split, alone)


@pytest.mark.slow
def test_parts_longer_than_a_block_of_queries_are_the_same() -> None:
    """A part is 1,060 tokens, two chunks of 530; a block of queries is 512."""
    case = Case("ring", "sp=2", heads=2, kv_heads=1, batch=1, length=2120, kernel="blockwise")
    arrays = inputs(1, case.length, 2, 1)
    segments = documents(1, case.length)
    expected, gradients = in_float64(*arrays, segments)
    found, *found_gradients = run(case, arrays, segments)
    # sums over a thousand keys
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-6)
    for one, right in zip(found_gradients, gradients, strict=True):
        np.testing.assert_allclose(one, right, rtol=0, atol=1e-5)


# ---- all of it

HEADS = [(8, 8), (8, 4), (8, 2), (8, 1), (16, 8)]
REACHES = {
    "causal": lambda part: Mask(),
    "all": lambda part: ALL,
    "blocks": lambda part: Mask(block=4),
    "blocks of two parts": lambda part: Mask(block=2 * part),
    "blocks across edges": lambda part: Mask(block=part + 3),
    "window inside a part": lambda part: Mask(window=part // 2),
    "window over one edge": lambda part: Mask(window=part + 1),
    "window over several": lambda part: Mask(window=2 * part + 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("ways", [2, 4, 8])
@pytest.mark.parametrize("strategy", ["ring", "allgather", "ulysses"])
def test_every_strategy_with_every_mask(strategy: str, ways: int, reach: str, packed: bool) -> None:
    heads, kv_heads = (16, 8) if strategy == "ulysses" else (4, 2 if packed else 1)
    mask = REACHES[reach](32 // ways)
    agrees(Case(strategy, f"sp={ways}", mask, heads, kv_heads, packed))


def possible(case: Case) -> bool:
    tensor = case.devices.shape.get("tp", 1)
    if case.kv_heads % tensor:
        return False
    heads, kv_heads = case.heads // tensor, case.kv_heads // tensor
    split = Split(case.ways, case.length, heads, kv_heads, 8, case.mask)
    return refusal(split, case.strategy) is None


@pytest.mark.slow
@settings(max_examples=60)
@given(data=st.data())
def test_any_combination(data: st.DataObject) -> None:
    strategy = data.draw(st.sampled_from(["ring", "allgather", "ulysses"]))
    rows, mesh = data.draw(
        st.sampled_from(
            [
                (1, "sp=2"),
                (1, "sp=4"),
                (1, "sp=8"),
                (2, "dp=2,sp=4"),
                (1, "tp=2,sp=2"),
                (2, "fsdp=2,tp=2,sp=2"),
            ]
        )
    )
    batch, length = rows * data.draw(st.integers(1, 3)), 16 * data.draw(st.integers(1, 4))
    windows = st.builds(lambda n: Mask(window=n), st.integers(1, length))
    blocks = st.builds(lambda n: Mask(block=n), st.integers(1, length))
    mask = data.draw(st.one_of(st.sampled_from([Mask(), ALL]), windows, blocks))
    heads, kv_heads = data.draw(st.sampled_from(HEADS))
    case = Case(strategy, mesh, mask, heads, kv_heads, data.draw(st.booleans()), batch, length)
    assume(possible(case))
    segments = data.draw(packed_rows(batch, length)) if case.packed else None
    agrees(case, segments, data.draw(st.integers(0, 99)))

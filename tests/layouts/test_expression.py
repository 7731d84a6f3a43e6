"""Expressions: the grammar, the arithmetic of numbers and stars, and every way to get them wrong."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import MeshwrightError
from meshwright.arithmetic import integer_root
from meshwright.layouts.expression import Entry, Expression

NAMES = st.sampled_from(["a", "b", "batch", "joined_kv", "Embed", "ключ", "形"])


@pytest.mark.parametrize(
    ("text", "devices", "factors"),
    [
        ("a b -> 2 a2* b*", 16, [(None, 2), ("a", 4), ("b", 2)]),
        ("a b -> * a2 b", 16, [(None, 8), ("a", 2), ("b", 1)]),
        ("x y -> x y*", 8, [("x", 1), ("y", 8)]),
        ("y z -> y* z", 8, [("y", 8), ("z", 1)]),
        ("... -> * ...", 8, [(None, 8)]),
        ("a b -> b4 a2", 8, [("b", 4), ("a", 2)]),
        ("a -> 2 a2 2", 8, [(None, 2), ("a", 2), (None, 2)]),
        ("a b c -> a* b* c*", 64, [("a", 4), ("b", 4), ("c", 4)]),
        ("a b c -> a* b* c*", 125, [("a", 5), ("b", 5), ("c", 5)]),
        ("a b c -> a* b* c*", 3**30, [("a", 3**10), ("b", 3**10), ("c", 3**10)]),
        ("a b -> a3* b2*", 24, [("a", 6), ("b", 4)]),
        ("a -> 2* a*", 8, [(None, 4), ("a", 2)]),
        ("-> *", 8, [(None, 8)]),
        ("a->a*", 8, [("a", 8)]),
    ],
)
def test_numbers_and_stars_divide_the_devices(
    text: str, devices: int, factors: list[tuple[str | None, int]]
) -> None:
    solved = Expression.parse(text).factors(devices)
    assert [(factor.dim, factor.size) for factor in solved] == factors


@given(st.integers(1, 10**6), st.integers(1, 6))
def test_integer_roots_are_exact(root: int, degree: int) -> None:
    assert integer_root(root**degree, degree) == root
    if degree > 1:
        assert integer_root(root**degree + 1, degree) is None


@st.composite
def expressions(draw: st.DrawFn) -> Expression:
    names = draw(st.lists(NAMES, max_size=4, unique=True))
    left = [*names]
    if draw(st.booleans()):
        left.insert(draw(st.integers(0, len(left))), "...")
    order = draw(st.permutations(left))
    if draw(st.booleans()):
        axes = iter(draw(st.permutations(["dp", "fsdp", "tp", "sp", "mp1", "mp2"])))
        right = [
            Entry(n, axes=tuple(itertools.islice(axes, draw(st.integers(0, 2)))))
            if n != "..."
            else Entry(n)
            for n in order
        ]
        return Expression(tuple(left), tuple(right))
    number = st.integers(1, 64)
    right = [Entry(n) if n == "..." else Entry(n, draw(number), draw(st.booleans())) for n in order]
    for _ in range(draw(st.integers(0, 2))):
        copies = Entry(None, draw(number), draw(st.booleans()))
        right.insert(draw(st.integers(0, len(right))), copies)
    return Expression(tuple(left), tuple(right))


@given(expressions())
def test_a_printed_expression_reads_back(expression: Expression) -> None:
    assert Expression.parse(str(expression)) == expression


@given(expressions(), st.integers(1, 4096))
def test_the_factors_multiply_to_the_devices_or_the_error_names_the_expression(
    expression: Expression, devices: int
) -> None:
    try:
        factors = expression.factors(devices)
    except MeshwrightError as error:
        assert str(expression) in str(error)
    else:
        assert math.prod(factor.size for factor in factors) == devices
        ratios = {
            factor.size / entry.number
            for factor, entry in zip(
                factors, [e for e in expression.right if e.dim != "..."], strict=True
            )
            if entry.star
        }
        assert len(ratios) <= 1


@given(
    st.text(max_size=40)
    | st.text(alphabet="ab *.->@+0123456789_é", max_size=40)
    | st.from_regex(r"[ab .]{0,8}->[ab 0-9*.@+]{0,12}", fullmatch=True)
)
def test_any_text_is_an_expression_or_a_readable_error(text: str) -> None:
    try:
        expression = Expression.parse(text)
    except MeshwrightError as error:
        assert repr(text) in str(error)
    else:
        assert Expression.parse(str(expression)) == expression


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a b", ["one '->'"]),
        ("a -> a -> a", ["one '->'"]),
        ("a b -> a b c", ["'c' right of the arrow is not a dim on the left"]),
        ("embed mlp -> embd mlp*", ["'embd'", "did you mean 'embed'?"]),
        ("a b -> a* a b", ["'a' twice on the right"]),
        ("a a -> a*", ["'a' twice on the left"]),
        ("a b -> a*", ["does not say where 'b' goes"]),
        ("a ... -> a*", ["ellipsis on the left only", "add ... on the right"]),
        ("a -> a* ...", ["ellipsis on the right only"]),
        ("... ... -> ... *", ["two ellipses"]),
        ("a4 b -> a b*", ["'a4' left of the arrow", "right of the arrow"]),
        ("a b -> a *2 b", ["'*2'", "'a2*'"]),
        ("a b -> a*2 b", ["'a*2'", "'a2*'"]),
        ("a -> a0", ["splits in 0"]),
        ("a -> a-2", ["'a-2'"]),
        ("a -> a4b", ["'a4b'"]),
        ("a -> a@", ["'dim@axis'"]),
        ("a -> @tp a", ["'@tp'"]),
        ("a b -> a@tp b@tp", ["'tp' twice"]),
        ("a b -> a@tp b4", ["mixes", "'b4'"]),
        ("a -> a@tp *", ["mixes", "'*'"]),
        ("a -> a99999999999999999999", ["'a99999999999999999999'"]),
    ],
)
def test_grammar_mistakes_name_the_token_and_the_rule(text: str, words: list[str]) -> None:
    with pytest.raises(MeshwrightError) as caught:
        Expression.parse(text)
    for word in [*words, repr(text)]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "devices", "words"),
    [
        ("a b -> a* b*", 8, ["no integer ratio on 8 devices", "4 or 9 devices", "'a b -> a2* b*'"]),
        ("a b -> a4 b", 8, ["uses 4 devices, 8 are here", "'a b -> * a4 b'"]),
        ("a b -> a3 b", 8, ["uses 3 devices, 8 are here", "multiply to 8"]),
        ("a b -> a b", 8, ["uses 1 device, 8 are here", "'a b -> * a b' makes copies"]),
        ("a b -> a3 b*", 8, ["multiply to 3", "'a b -> a2 b*' would fit"]),
        ("a b -> a16* b", 8, ["multiply to 16", "'a b -> a8* b' would fit"]),
    ],
)
def test_arithmetic_mistakes_propose_what_fits(text: str, devices: int, words: list[str]) -> None:
    with pytest.raises(MeshwrightError) as caught:
        Expression.parse(text).factors(devices)
    for word in [*words, text]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "ndim", "dims"),
    [("a ... b -> a* ... b", 4, ("a", None, None, "b")), ("... a -> ... a*", 1, ("a",)),
     ("a b -> a* b", None, ("a", "b")), ("... -> * ...", 0, ())],
)  # fmt: skip
def test_the_ellipsis_stands_for_the_dims_not_named(
    text: str, ndim: int | None, dims: tuple[str | None, ...]
) -> None:
    assert Expression.parse(text).dims(ndim) == dims


@pytest.mark.parametrize(
    ("text", "ndim", "words"),
    [("a b -> a* b", 3, ["names 2 dims, the array has 3", "'a b ... -> a* b ...'"]),
     ("a b ... -> a* b ...", 1, ["names 2 dims beside the ellipsis, the array has 1"]),
     ("... -> * ...", None, ["ndim="])],
)  # fmt: skip
def test_a_rank_that_does_not_fit_is_refused(text: str, ndim: int | None, words: list[str]) -> None:
    with pytest.raises(MeshwrightError) as caught:
        Expression.parse(text).dims(ndim)
    for word in words:
        assert word in str(caught.value)

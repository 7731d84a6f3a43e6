"""Mesh texts: what they mean, how they print, what is refused."""

import math
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright import MeshSpec, MeshwrightError

NAMES = ("dp", "fsdp", "tp", "sp", "data", "model", "ep", "pp")


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("dp=1,fsdp=-1,tp=4,sp=1", "dp=1,fsdp=-1,tp=4,sp=1"),
        ("1,-1,4,1", "dp=1,fsdp=-1,tp=4,sp=1"),
        ("1,-1,4", "dp=1,fsdp=-1,tp=4"),
        ("dp:1,fsdp:-1,mp:2", "dp=1,fsdp=-1,mp=2"),
        ("mp:2,fsdp:-1,dp:1", "mp=2,fsdp=-1,dp=1"),
        ("!1,-1,4,1", "!dp=1,fsdp=-1,tp=4,sp=1"),
        (" dp = 2 , tp = 4 ", "dp=2,tp=4"),
        ("rows=2,cols=4", "rows=2,cols=4"),
    ],
)
def test_every_form_reads_to_the_canonical_one(text: str, canonical: str) -> None:
    assert str(MeshSpec.parse(text)) == canonical


def test_declared_axes_may_have_any_name_and_take_positional_sizes() -> None:
    assert str(MeshSpec.parse("2,4", axes=("data", "expert_2"))) == "data=2,expert_2=4"
    assert str(MeshSpec.parse("b=2,a=4", axes=("a", "b"))) == "b=2,a=4"


@pytest.mark.parametrize(
    ("text", "fsdp", "devices", "resolved"),
    [
        ("8,1", False, 8, "dp=1,mp1=8,mp2=1"),
        ("-1,1", False, 8, "dp=1,mp1=8,mp2=1"),
        ("2,2", False, 16, "dp=4,mp1=2,mp2=2"),
        ("2,1", True, 8, "fsdp=4,mp1=2,mp2=1"),
        ("4", False, 8, "dp=2,mp1=4,mp2=1"),
    ],
)
def test_the_legacy_form_gives_data_what_is_left(
    text: str, fsdp: bool, devices: int, resolved: str
) -> None:
    assert str(MeshSpec.from_mp_mesh_dim(text, fsdp=fsdp).resolve(devices)) == resolved


@st.composite
def specs(draw: st.DrawFn) -> MeshSpec:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=5, unique=True))
    sizes = [draw(st.integers(1, 64)) for _ in names]
    if draw(st.booleans()):
        sizes[draw(st.integers(0, len(names) - 1))] = -1
    return MeshSpec(tuple(zip(names, sizes, strict=True)), draw(st.booleans()))


@given(specs())
def test_a_printed_spec_reads_back(spec: MeshSpec) -> None:
    assert MeshSpec.parse(str(spec)) == spec


@given(specs(), st.integers(1, 512))
def test_resolving_gives_exactly_the_devices_or_an_error_whose_proposals_fit(
    spec: MeshSpec, devices: int
) -> None:
    try:
        resolved = spec.resolve(devices)
    except MeshwrightError as error:
        proposals = [text for text in str(error).split("'") if "=" in text][1:]
        assert proposals
        for text in proposals:
            MeshSpec.parse(text).resolve(devices)
    else:
        assert math.prod(resolved.sizes) == devices
        kept = [(a, b) for a, b in zip(spec.sizes, resolved.sizes, strict=True) if a != -1]
        assert all(a == b for a, b in kept)


@given(st.text(max_size=30) | st.text(alphabet="dpfst=:,!-0123456789 ", max_size=30))
def test_any_text_is_a_mesh_or_a_readable_error(text: str) -> None:
    try:
        spec = MeshSpec.parse(text)
    except MeshwrightError as error:
        assert repr(text) in str(error)
    else:
        assert MeshSpec.parse(str(spec), axes=spec.names) == spec


@given(st.text(max_size=12) | st.text(alphabet="0123456789,- ", max_size=12), st.booleans())
def test_any_legacy_text_is_a_mesh_or_a_readable_error(text: str, fsdp: bool) -> None:
    try:
        spec = MeshSpec.from_mp_mesh_dim(text, fsdp=fsdp)
    except MeshwrightError as error:
        assert repr(text) in str(error)
    else:
        assume(spec.is_resolved is False)
        assert spec.names[1:] == ("mp1", "mp2")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1,-1", ["2 sizes", "three (dp,fsdp,tp) or four"]),
        ("1,2,3,4,5", ["5 sizes"]),
        ("dp=2,fdsp=4", ["'fdsp'", "did you mean 'fsdp'?", "takes a role"]),
        ("fdsp=8", ["did you mean 'fsdp'?"]),
        ("dp=2,lanes=4", ["'lanes' is not known", "takes a role: lanes=SIZE:dp"]),
        ("dp=2,dp=4", ["'dp' twice"]),
        ("dp=-1,tp=-1", ["dp and tp", "only one"]),
        ("dp=0", ["dp=0", "1 or more"]),
        ("dp=-2,tp=4", ["dp=-2", "-1 for what is left"]),
        ("dp=2,4", ["mixes", "'4'"]),
        ("dp=two", ["'two' is not a size"]),
        ("dp=2.5", ["'2.5' is not a size"]),
        ("dp=2,,tp=2", ["empty entry"]),
        ("", ["empty"]),
        ("2dp=4", ["'2dp' is not an axis name"]),
    ],
)
def test_mistakes_say_the_rule_and_what_would_work(text: str, words: list[str]) -> None:
    with pytest.raises(MeshwrightError) as caught:
        MeshSpec.parse(text)
    for word in [*words, repr(text)]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "axes", "words"),
    [
        ("dp=2", ("dp", "tp"), ["no size to tp", "add tp=1"]),
        ("dp=2,pt=4", ("dp", "tp"), ["'pt'", "did you mean 'tp'?"]),
        ("2,4,1", ("a", "b"), ["3 sizes for 2 axes (a,b)"]),
        ("2", (), ["at least one"]),
        ("2,2", ("a", "a"), ["'a' twice"]),
        ("2,2", ("a", "b c"), ["'b c' is not an axis name"]),
    ],
)
def test_declared_axes_are_held_to(text: str, axes: tuple[str, ...], words: list[str]) -> None:
    with pytest.raises(MeshwrightError) as caught:
        MeshSpec.parse(text, axes=axes)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "devices", "message"),
    [
        ("dp=2,tp=3", 8, "mesh 'dp=2,tp=3' needs 6 devices, 8 are here; "
                         "'dp=2,tp=4', 'dp=4,tp=2' or 'dp=1,tp=8' would fit"),
        ("2,2,1", 8, "mesh '2,2,1' (dp=2,fsdp=2,tp=1) needs 4 devices, 8 are here; "
                     "'dp=2,fsdp=2,tp=2', 'dp=2,fsdp=4,tp=1' or 'dp=4,fsdp=2,tp=1' would fit"),
        ("dp=3,tp=-1", 8, "mesh 'dp=3,tp=-1': the sizes given multiply to 3, which does not divide "
                          "the 8 devices here; "
                          "'dp=4,tp=-1', 'dp=2,tp=-1' or 'dp=8,tp=-1' would fit"),
        ("dp=7", 8, "mesh 'dp=7' needs 7 devices, 8 are here; 'dp=8' would fit"),
    ],
)  # fmt: skip
def test_a_mesh_that_does_not_fit_says_which_would(text: str, devices: int, message: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        MeshSpec.parse(text).resolve(devices)
    assert str(caught.value) == message


def test_a_printed_spec_with_axes_of_its_own_reads_back_with_them() -> None:
    spec = MeshSpec.parse("2,4", axes=("dp", "lanes"))
    assert MeshSpec.parse(str(spec), axes=spec.names) == spec


@pytest.mark.parametrize("text", ["fsdp=8,foo=1", "1,2"])
def test_a_mesh_that_is_refused_recommends_no_flag_that_does_not_exist(text: str) -> None:
    """`axes=` is an argument in Python, not a flag: a reader at a terminal must not try it."""
    with pytest.raises(MeshwrightError) as mistake:
        MeshSpec.parse(text)
    message = str(mistake.value)
    assert "fsdp" in message.replace(text, "")  # the names that would do


@pytest.mark.parametrize(
    ("text", "by_role"),
    [
        ("data=8:dp,model=4:tp", "dp=8,tp=4"),
        ("data=8,model=4", "dp=8,tp=4"),
        ("dp:2,fsdp:-1,mp:2", "dp=2,fsdp=-1,tp=2"),
        ("replica=2:dp,shard=4:fsdp,ring=2:sp", "dp=2,fsdp=4,sp=2"),
        ("hosts=2:dp,chips=4:dp,tp=2", "dp=8,tp=2"),
        ("!data=4:fsdp", "!fsdp=4"),
        ("expert=1,tp=2", "ep=1,tp=2"),
    ],
)
def test_axes_have_roles(text: str, by_role: str) -> None:
    spec = MeshSpec.parse(text)
    assert str(spec.by_role()) == by_role
    assert MeshSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data=8:dt,tp=2", "'dt' is not the role of an axis; known: dp, fsdp"),
        ("dp=8:tp", "axis 'dp' has the role of its name; write tp=8, or a name of your own"),
        ("data=-1,replica=2", "axes of one role, here 'dp', are one axis"),
        ("data=4=dp", "is not NAME=SIZE:ROLE"),
        ("lanes=8", "axis 'lanes' has no role; the axes are dp, fsdp, tp, sp"),
        ("a=2:dp,tp=2,b=2:dp", "of another axis that does not stand beside it"),
        ("pp=2,tp=2", "the models here have no pipeline stages, so pp must be 1"),
    ],
)
def test_roles_that_cannot_be_are_refused(text: str, words: str) -> None:
    with pytest.raises(MeshwrightError, match=re.escape(words)):
        MeshSpec.parse(text).with_standard_axes()

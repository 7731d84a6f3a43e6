"""What a user may say about a mesh that is to be chosen."""

import pytest

from meshwright.errors import MeshwrightError
from meshwright.planner.constraints import parse
from meshwright.planner.workload import Choice


@pytest.mark.parametrize(
    ("text", "allowed", "not_allowed"),
    [
        ("tp=4", Choice.of(tp=4, fsdp=2), Choice.of(tp=2, fsdp=4)),
        ("fsdp=*,tp<=8,sp=1", Choice.of(fsdp=64, tp=8), Choice.of(fsdp=32, tp=16)),
        ("tp >= 2 , dp=1", Choice.of(fsdp=4, tp=2), Choice.of(dp=2, tp=2)),
        ("tp>=2,tp<=4", Choice.of(tp=4), Choice.of(tp=8)),
        ("1,-1,2,1", Choice.of(fsdp=64, tp=2), Choice.of(dp=2, fsdp=32, tp=2)),
        ("fsdp=-1,sp=2", Choice.of(fsdp=64, sp=2), Choice.of(fsdp=128)),
        ("ep=4", Choice.of(fsdp=2, ep=4), Choice.of(fsdp=8)),
        ("fsdp=*,expert<=2:ep", Choice.of(fsdp=8), Choice.of(fsdp=2, ep=4)),
    ],
)
def test_limits_hold(text: str, allowed: Choice, not_allowed: Choice) -> None:
    limits = parse(text)
    assert limits.allows(allowed)
    assert not limits.allows(not_allowed)


@pytest.mark.parametrize("text", [None, "auto", "*", "dp=*,fsdp=*,tp=*,sp=*"])
def test_nothing_said_allows_everything(text: str | None) -> None:
    assert parse(text).allows(Choice.of(dp=2, fsdp=4, tp=8, sp=16))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pt=4", "'pt' is not an axis; did you mean 'tp'?"),
        ("tp=four", "'tp=four' is not a limit of an axis; write tp=8"),
        ("tp<8", "'tp<8' is not a limit of an axis"),
        ("tp=0", "the size in tp=0 must be at least 1"),
        ("fsdp<=-1", "the size in fsdp<=-1 must be at least 1"),
        ("tp>=*", "the size in tp>=* must be at least 1"),
        ("", "mesh '' is empty; write limits, such as 'fsdp=*,tp<=8', or leave it out"),
        (" ", "is empty"),
        ("tp=2,tp=4", "limits axis 'tp' twice"),
        ("tp=*,tp=4", "limits axis 'tp' twice"),
        ("tp<=2,tp<=4", "limits axis 'tp' twice"),
        ("tp>=2,tp=4", "limits axis 'tp' twice"),
        ("mp=2,tp=4", "limits axis 'tp' twice"),
        (f"tp={'9' * 5000}", "is not a limit of an axis"),
        ("tp=4,,sp=1", "'' is not a limit"),
    ],
)
def test_mistakes_say_what_would_work(text: str, says: str) -> None:
    with pytest.raises(MeshwrightError) as error:
        parse(text)
    assert says in str(error.value)


@pytest.mark.parametrize("limits", ["ep=1,tp=2", "expert<=4,tp=2", "ep=*,pp=1,tp=2"])
def test_axes_that_no_model_divides_may_be_named_with_one_device(limits: str) -> None:
    assert parse(limits).allows(Choice.of(fsdp=4, tp=2))
    assert not parse(limits).allows(Choice.of(fsdp=8))


def test_stages_are_refused() -> None:
    with pytest.raises(MeshwrightError, match="have no pipeline stages, so pp must be 1"):
        parse("stage>=2")

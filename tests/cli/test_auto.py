"""`--mesh auto`: what the command line says is kept."""

from meshwright.cli.auto import planned
from meshwright.cli.train import settings
from meshwright.machines import Machine

JOB = ["llama-3.1-8b", "--mesh", "auto", "--batch", "4", "--seq", "8192"]
MACHINE = Machine.parse("v5e:4x4")


def test_a_switch_that_is_turned_off_stays_off() -> None:
    by_plan, _ = planned(settings(JOB), MACHINE, JOB)
    assert by_plan.compute.sequence_parallel
    words = [*JOB, "--compute.no-sequence-parallel"]
    kept, _ = planned(settings(words), MACHINE, words)
    assert not kept.compute.sequence_parallel

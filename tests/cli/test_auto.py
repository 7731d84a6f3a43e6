"""`--mesh auto`: what the command line says is kept."""

from meshwright.cli.flags import named_settings
from meshwright.cli.train import settings
from meshwright.machines import Machine
from meshwright.planner import planned

JOB = ["llama-3.1-8b", "--mesh", "auto", "--batch", "4", "--seq", "8192"]
MACHINE = Machine.parse("v5e:4x4")


def test_a_switch_that_is_turned_off_stays_off() -> None:
    by_plan, _ = planned(settings(JOB), MACHINE, named_settings(JOB))
    assert by_plan.compute.sequence_parallel
    words = [*JOB, "--compute.no-sequence-parallel"]
    kept, _ = planned(settings(words), MACHINE, named_settings(words))
    assert not kept.compute.sequence_parallel


def test_a_mesh_for_pytorch_has_a_data_axis_and_no_sp() -> None:
    words = ["tiny", "--mesh", "auto", "--backend", "torch", "--batch", "7", "--seq", "64"]
    chosen, said = planned(settings(words), Machine.parse("cpu:2"), named_settings(words))
    assert chosen.mesh == "fsdp=1,tp=2"  # 7 sequences cannot be shared by two
    assert said.startswith("mesh auto: mesh fsdp=1,tp=2, remat none, accumulation 1, sequence_par")
    words = [*words, "--compute.no-sequence-parallel", "--compute.remat", "full"]
    chosen, _ = planned(settings(words), Machine.parse("cpu:2"), named_settings(words))
    assert (chosen.compute.sequence_parallel, chosen.compute.remat) == (False, "full")

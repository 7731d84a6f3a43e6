"""Flags of other systems are answered with the command that does the same here."""

import shlex

import pytest

from meshwright import MeshwrightError
from meshwright.cli.other_systems import check_flags
from meshwright.cli.train import settings


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("tiny --mp_mesh_dim=8,1", "tiny --mesh dp=-1,tp=8"),
        ("tiny --mp_mesh_dim '8,1' --fsdp", "tiny --mesh fsdp=-1,tp=8"),
        ("tiny --mesh_dim=1,-1,4,1 --steps 3", "tiny --steps 3 --mesh dp=1,fsdp=-1,tp=4,sp=1"),
        ("tiny --mesh_dim dp:1,fsdp:-1,mp:2", "tiny --mesh dp=1,fsdp=-1,tp=2"),
        ("tiny --fsdp", "tiny --mesh fsdp=-1"),
        ("tiny --fsdp 8 --tp 2", "tiny --mesh dp=-1,fsdp=8,tp=2"),
        ("tiny --tp 2 --batch 8", "tiny --batch 8 --mesh fsdp=-1,tp=2"),
        ("tiny --tp=2 --sp=4", "tiny --mesh fsdp=-1,tp=2,sp=4"),
        ("tiny --tensor-model-parallel-size 4", "tiny --mesh fsdp=-1,tp=4"),
        ("tiny --parallelism.tensor_parallel_degree 4", "tiny --mesh fsdp=-1,tp=4"),
        ("tiny --gin.partitioning.PjitPartitioner.num_partitions=4", "tiny --num-partitions 4"),
        ("tiny --model_parallel_submesh (2,1,1,2)", "tiny --submesh 2,1,1,2"),
        ("tiny --parameter_partitioning_dims=2", "tiny --rules t5x:1,2"),
        ("tiny --total_steps 100 --seq_length 64", "tiny --steps 100 --seq 64"),
    ],
)
def test_a_flag_of_another_system_names_the_command_here(theirs: str, ours: str) -> None:
    with pytest.raises(MeshwrightError, match="of another system; the same here") as said:
        check_flags("train", theirs.replace("(", "").replace(")", "").replace("'", "").split())
    command = str(said.value).partition("the same here: ")[2]
    assert command == f"meshwright train {ours}"
    settings(shlex.split(command)[2:])  # which this command takes


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ("tiny --tp two", "'two' is not a size"),
        ("tiny --fsdp --dp", "contradict each other"),
        ("tiny --mesh_dim 1,-1,4,1 --tp 2", "contradict each other"),
        ("tiny --mp 2 --tensor_parallel_size 4", "contradict each other"),
        ("tiny --seq_length", "--seq_length needs a value; here it is --seq"),
        ("tiny --activation_partitioning_dims 3", "are 1 or 2, not 3, 1"),
        (
            "tiny --mesh fsdp=4,tp=2 --tp 2",
            "the same here: meshwright train tiny --mesh fsdp=-1,tp=2",
        ),
        (
            "tiny --fsdp=False --mp_mesh_dim 4,1",
            "the same here: meshwright train tiny --mesh dp=-1,tp=4",
        ),
    ],
)
def test_what_cannot_be_translated_is_said(theirs: str, words: str) -> None:
    with pytest.raises(MeshwrightError) as said:
        check_flags("train", theirs.split())
    assert words in str(said.value)


def test_own_flags_are_left_alone() -> None:
    words = "tiny --mesh fsdp=8 --num-partitions 4 --submesh 2,1,1,2 --compute.remat full --seq=64"
    check_flags("train", words.split())
    check_flags("generate", ["runs/first", "--prompt", "dp and --tp", "--mesh", "tp=2"])


@pytest.mark.parametrize(
    ("flag", "now"),
    [
        ("--compute.no-scan", "--compute.layers unroll"),
        ("--compute.scan", "--compute.layers scan"),
        ("--compute.no-overlap", "--compute.overlap off"),
    ],
)
def test_a_flag_of_before_is_answered_with_the_one_of_now(flag: str, now: str) -> None:
    with pytest.raises(MeshwrightError, match=f"{flag} is now {now}"):
        check_flags("train", ["tiny", flag])

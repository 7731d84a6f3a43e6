"""Flags of other systems are answered with the command that does the same here."""

import shlex

import pytest

from meshwright import MeshwrightError
from meshwright.cli.flags import name_axes
from meshwright.cli.other_systems import check_flags
from meshwright.cli.train import settings
from meshwright.launch import flat_settings
from meshwright.serving import ServeConfig
from meshwright.training import TrainConfig


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
        ("tiny --lr 3e-4", "tiny --optimizer.learning-rate 3e-4"),
        ("tiny --learning_rate=1e-3 --max_steps 5", "tiny --optimizer.learning-rate 1e-3 --steps 5"),
        ("tiny --output-dir out", "tiny --run out"),
        ("tiny --grad_accum_steps 4 --bf16", "tiny --accumulation 4 --compute.dtype bfloat16"),
        ("tiny --bf16 True --gradient_checkpointing", "tiny --compute.dtype bfloat16 --compute.remat full"),
        ("tiny --sequence-parallel ring", "tiny --context-parallel ring"),
        ("tiny --sequence-parallel=ulysses --sp 2", "tiny --context-parallel ulysses --mesh fsdp=-1,sp=2"),
        ("tiny --sequence_parallel", "tiny --compute.sequence-parallel"),
        ("tiny --training.steps 10 --training.seq_len 64", "tiny --steps 10 --seq 64"),
        ("tiny max_target_length=64 ici_tensor_parallelism=2", "tiny --seq 64 --mesh fsdp=-1,tp=2"),
        ("tiny --optimizer.adamw_optimizer.lr 1e-4", "tiny --optimizer.learning-rate 1e-4"),
        ("tiny --weight-decay 0.1", "tiny --optimizer.weight-decay 0.1"),
        ("tiny --save_steps 9 --save_total_limit 2", "tiny --checkpoint.every 9 --checkpoint.keep-last 2"),
    ],
)  # fmt: skip
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


@pytest.mark.parametrize(
    ("command", "theirs", "words"),
    [
        ("train", "tiny --epochs 3", "there is no --epochs: a run is as long as its --steps"),
        ("train", "tiny --num_train_epochs=3", "tokens = steps x batch x seq"),
        ("train", "tiny --tokens 1e12", "tokens = steps x batch x seq"),
        ("train", "tiny --per_device_train_batch_size 4", "--batch is the global batch"),
        ("train", "tiny per_device_batch_size=4", "--batch is the global batch"),
        ("train", "tiny --resume_from_checkpoint", "the same command resumes the run"),
        ("train", "--model tiny", "the model is the first word"),
        ("plan", "tiny --total_tokens 1e12", "is --tokens here"),
        ("plan", "tiny --lr 3", "the same here: meshwright plan tiny --optimizer.learning-rate 3"),
        ("plan", "tiny --batch_size 8", "the same here: meshwright plan tiny --batch 8"),
        (
            "plan",
            "tiny --optim adamw",
            "the same here: meshwright plan tiny --optimizer.name adamw",
        ),
        ("generate", "runs/x --epochs 3", "leave it out of generate"),
        ("serve", "--model runs/x", "the model is the first word, as in meshwright serve FOLDER"),
        (
            "serve",
            "runs/x --max-model-len 4096 --gpu-memory-utilization=0.8",
            "the same here: meshwright serve runs/x --engine.max-length 4096 --engine.memory-frac",
        ),
        (
            "serve",
            "runs/x --quantization awq",
            "no --quantization awq here; give --engine.weights fp8 or",
        ),
        ("serve", "runs/x --kv-cache-dtype fp8_e4m3", "serve runs/x --engine.cache fp8$"),
        ("serve", "runs/x --kv-cache-dtype auto", "the same here: meshwright serve runs/x$"),
        ("generate", "runs/x --max_new_tokens 9", "the same here: .* runs/x --max-new 9"),
        ("serve", "runs/x --max_steps 3", "leave it out of serve"),
    ],
)
def test_what_has_no_flag_here_is_answered_for_the_command(
    command: str, theirs: str, words: str
) -> None:
    with pytest.raises(MeshwrightError, match=words):
        check_flags(command, theirs.split())


def test_no_flag_of_this_system_is_taken_for_one_of_another() -> None:
    own = [name.replace("_", "-") for name in flat_settings(TrainConfig("tiny"))]
    own += [name.replace("_", "-") for name in flat_settings(ServeConfig("tiny"))]
    for name in own:
        if name != "model":  # a word without a flag
            check_flags("train", [f"--{name}", "1"])
            check_flags("train", [f"--{name.replace('-', '_')}=1"])
            check_flags("serve", [f"--{name}", "1"])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            "t5-small --gin.TRAIN_STEPS=100 --gin.MODEL_DIR='runs/a'",
            "t5-small --steps 100 --run runs/a",
        ),
        ("--load_llama_config=7b --mesh_dim 1,-1,4,1", "lwm-7b --mesh dp=1,fsdp=-1,tp=4,sp=1"),
        ("--load_llama_config debug --steps 3", "tiny --steps 3"),
        (
            "--load_llama_config=7b --mesh_dim=1,-1,1 --load_checkpoint=params::/x",
            "llama-2-7b --init-from /x --mesh dp=1,fsdp=-1,tp=1",
        ),
        (
            "tiny per_device_batch_size=2 --mesh fsdp=4,tp=2",
            "tiny --batch 16 --mesh fsdp=4,tp=2",
        ),
        ("tiny --batch_size_per_rank 7 --mesh dp=4,tp=2", "tiny --batch 28 --mesh dp=4,tp=2"),
        (
            "tiny --per_device_train_batch_size 7 --mesh dp=2,fsdp=2,tp=2 --accumulation 2",
            "tiny --batch 56 --mesh dp=2,fsdp=2,tp=2 --accumulation 2",
        ),
    ],
)
def test_names_of_t5x_lwm_and_the_pytorch_guide_are_answered(theirs: str, ours: str) -> None:
    with pytest.raises(MeshwrightError, match="the same here: ") as said:
        check_flags("train", theirs.split())
    assert str(said.value).endswith(f"meshwright train {ours}")
    settings(ours.split())


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ("t5-small --gin_file=base.gin", "come from a file with --config FILE"),
        ("tiny --per_device_train_batch_size 7", "sequences of a data rank x data ranks"),
        ("tiny --per_device_train_batch_size 7 --mesh fsdp=-1", "sequences of a data rank"),
        ("tiny --update_llama_config dict(theta=1)", "theta is rope.theta"),
    ],
)
def test_what_has_no_flag_here_is_explained(theirs: str, says: str) -> None:
    with pytest.raises(MeshwrightError, match=says):
        check_flags("train", theirs.split())


@pytest.mark.parametrize(
    ("words", "mesh"),
    [
        ("tiny --mesh 8,32 --axes data,model", "dp=8,tp=32"),
        ("tiny --axes=dp,tp --mesh=-1,4 --steps 3", "dp=-1,tp=4"),
        ("tiny --mesh 2,2,2 --axes replica,fsdp,mp", "dp=2,fsdp=2,tp=2"),
    ],
)
def test_positional_sizes_have_the_names_of_axes(words: str, mesh: str) -> None:
    assert settings(name_axes(words.split())).mesh == mesh


def test_names_without_sizes_and_too_few_are_refused() -> None:
    assert name_axes(["tiny", "--steps", "3"]) == ["tiny", "--steps", "3"]
    with pytest.raises(MeshwrightError, match="names the sizes of --mesh; give it"):
        name_axes(["tiny", "--axes", "dp,tp"])
    with pytest.raises(MeshwrightError, match="has 3 sizes for 2 axes"):
        name_axes(["tiny", "--axes", "dp,tp", "--mesh", "1,2,3"])

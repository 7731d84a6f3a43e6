"""Flags of other systems are answered with the command that does the same here."""

import contextlib
import dataclasses
import importlib
import re
import shlex
import typing

import pytest

from meshwright import MeshwrightError
from meshwright.cli.commands import COMMANDS, WITH_MESH, run
from meshwright.cli.flags import name_axes
from meshwright.cli.other_systems import check_flags
from meshwright.cli.other_words import AXES, KEYS, OF_COMMAND, RENAMED, SWITCHES
from meshwright.cli.parser import _settings, read
from meshwright.cli.train import settings
from meshwright.launch import flat_settings
from meshwright.models.decoder import DecoderConfig
from meshwright.models.t5 import T5Config
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
        ("tiny --wd 0.1 --warmup 100 --out runs/x", "tiny --optimizer.weight-decay 0.1 --optimizer.warmup-steps 100 --run runs/x"),
        ("tiny --bs 8 --seq-len 64", "tiny --batch 8 --seq 64"),
        ("tiny --bsz 8 --ctx 64 --max-iters 9", "tiny --batch 8 --seq 64 --steps 9"),
        ("tiny --grad-accum 2 --clip 1.0 --beta2 0.95", "tiny --accumulation 2 --optimizer.clip-norm 1.0 --optimizer.b2 0.95"),
        ("tiny --save-every 9 --ckpt-dir x --amp", "tiny --checkpoint.every 9 --run x --compute.dtype bfloat16"),
        ("tiny --mesh fsdp=4 --mbs 2", "tiny --mesh fsdp=4 --batch 8"),
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
            "the same here: meshwright train tiny --mesh fsdp=4,tp=2",
        ),
        (
            "tiny --mesh fsdp=4,tp=4 --tp 2",
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
        ("train", "tiny --warmup 0.1", "a number of steps here, --optimizer.warmup-steps N"),
        ("train", "tiny --ckpt weights", "weights to start from are --init-from FOLDER"),
        ("train", "tiny --gpus 8", "--mesh fsdp=-1 takes all"),
        ("train", "tiny --nproc 8", "with --backend torch --processes N are started"),
        ("plan", "tiny --gpus 8", "plan and prove name a machine, as in --on h100:8"),
        ("train", "tiny --nnodes 2", "--coordinator HOST:PORT"),
        ("train", "tiny --n-embd 64", "--override NAME=VALUE"),
        ("serve", "runs/x --num-gpus 4", "as in --mesh tp=4"),
        ("generate", "--ckpt runs/x", "the model is the first word, as in meshwright generate"),
        ("eval", "runs/x --bs 8", "the same here: meshwright eval runs/x --batch 8"),
        ("export", "runs/x --output-dir y", "as in meshwright export RUN FOLDER"),
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


def _own_names(command: str) -> list[str]:
    """The flags of a command that has a settings type; of those that take train's, train's."""
    if command in ("train", "plan", "prove", "audit"):
        return list(flat_settings(TrainConfig("tiny")))
    module = importlib.import_module(f"meshwright.cli.{command}")
    function = getattr(module, COMMANDS[command].function)
    (kind,) = (hint for of, hint in typing.get_type_hints(function).items() if of != "return")
    return [setting.name for setting in _settings(kind, False)]


@pytest.mark.parametrize("command", WITH_MESH)
def test_no_flag_of_this_system_is_taken_for_one_of_another(command: str) -> None:
    for name in _own_names(command):
        if name != "model":  # a word without a flag
            check_flags(command, [f"--{name.replace('_', '-')}", "1"])
            check_flags(command, [f"--{name}=1"])


@pytest.mark.parametrize("command", WITH_MESH)
def test_nor_is_one_that_its_help_lists(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        run([command, "--help"])
    for flag in set(re.findall(r"--[a-z][\w.-]*", capsys.readouterr().out)):
        check_flags(command, [flag, "1"])


def test_values_of_own_flags_are_not_taken_for_maxtexts_words() -> None:
    fields = {
        field.name for kind in (DecoderConfig, T5Config) for field in dataclasses.fields(kind)
    }
    assert not fields & KEYS
    check_flags("train", ["tiny", "--override", "layers=4", "rope.theta=1e6"])
    check_flags("generate", ["runs/x", "--prompt", "steps=10"])


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
            "tiny --mesh fsdp=4,tp=2 --batch 16",
        ),
        ("tiny --batch_size_per_rank 7 --mesh dp=4,tp=2", "tiny --mesh dp=4,tp=2 --batch 28"),
        (
            "tiny --per_device_train_batch_size 7 --mesh dp=2,fsdp=2,tp=2 --accumulation 2",
            "tiny --mesh dp=2,fsdp=2,tp=2 --accumulation 2 --batch 56",
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


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        # MaxText
        ("tiny run_name=first", "tiny --run runs/first"),
        ("tiny run_name=first base_output_directory=/r", "tiny --run /r/first"),
        ("tiny steps=10 learning_rate=1e-3", "tiny --steps 10 --optimizer.learning-rate 1e-3"),
        ("tiny quantization=fp8", "tiny --compute.matmul fp8"),
        ("tiny dataset_path=/corpus", "tiny --data /corpus"),
        ("tiny dataset_type=hf hf_path=allenai/c4", "tiny --data allenai/c4"),
        ("tiny --hf_path allenai/c4", "tiny --data allenai/c4"),
        ("tiny ici_fsdp_parallelism=64 per_device_batch_size=4", "tiny --mesh fsdp=64 --batch 256"),
        (
            "tiny ici_fsdp_parallelism=8 ici_tensor_parallelism=2 per_device_batch_size=0.5",
            "tiny --mesh fsdp=8,tp=2 --batch 8",
        ),
        (
            "tiny dcn_data_parallelism=2 ici_fsdp_parallelism=16 ici_pipeline_parallelism=1",
            "tiny --mesh dp=2,fsdp=16",
        ),
        ("tiny dcn_fsdp_parallelism=2 ici_fsdp_parallelism=4", "tiny --mesh dp=-1,fsdp=8"),
        ("tiny ici_expert_parallelism=4", "tiny --mesh fsdp=-1,ep=4"),
        ("tiny ici_context_parallelism=4", "tiny --mesh fsdp=-1,sp=4"),
        ("tiny remat_policy=minimal", "tiny --compute.remat elementwise"),
        ("tiny remat_policy=save_dot_except_mlp", "tiny --compute.remat mlp"),
        ("tiny scan_layers=false", "tiny --compute.layers unroll"),
        ("tiny context_parallel_strategy=ring", "tiny --context-parallel ring"),
        ("base.yml model_name=llama3.1-8b steps=3", "llama-3.1-8b --steps 3"),
        # torchtitan
        (
            "tiny --parallelism.data_parallel_shard_degree 8 --training.local_batch_size 1",
            "tiny --mesh fsdp=8 --batch 8",
        ),
        (
            "tiny --training.local_batch_size 1 --training.global_batch_size 32 "
            "--parallelism.data_parallel_shard_degree 8",
            "tiny --batch 32 --mesh fsdp=8 --accumulation 4",
        ),
        ("tiny --parallelism.data_parallel_replicate_degree 2", "tiny --mesh dp=2,fsdp=-1"),
        ("tiny --parallelism.context_parallel_degree 4", "tiny --mesh fsdp=-1,sp=4"),
        (
            "tiny --parallelism.data_parallel_shard_degree 8 --parallelism.expert_parallel_degree 4",
            "tiny --mesh dp=-1,fsdp=2,ep=4",
        ),
        ("tiny --parallelism.enable_sequence_parallel", "tiny --compute.sequence-parallel"),
        ("tiny --activation_checkpoint.mode full", "tiny --compute.remat full"),
        ("tiny --activation_checkpoint.mode none", "tiny"),
        ("tiny --optimizer.lr 1e-4", "tiny --optimizer.learning-rate 1e-4"),
        ("tiny --lr_scheduler.warmup_steps 9", "tiny --optimizer.warmup-steps 9"),
        ("tiny --checkpoint.folder ckpt", "tiny --run ckpt"),
        ("tiny --job.dump_folder out --checkpoint.folder ckpt", "tiny --run out/ckpt"),
        ("tiny --checkpoint.interval 9", "tiny --checkpoint.every 9"),
        ("tiny --metrics.log_freq 9", "tiny --log.every 9"),
        ("tiny --metrics.enable_tensorboard", "tiny --log.tensorboard"),
        # Megatron
        ("tiny --save out --load out", "tiny --run out"),
        ("tiny --expert-model-parallel-size 2", "tiny --mesh fsdp=-1,ep=2"),
        (
            "tiny --mesh fsdp=4,tp=2 --tensor-model-parallel-size 2 --micro-batch-size 1 "
            "--global-batch-size 128",
            "tiny --mesh fsdp=4,tp=2 --batch 128 --accumulation 32",
        ),
        (
            "tiny --recompute-granularity full --recompute-method uniform --bf16",
            "tiny --compute.remat full --compute.dtype bfloat16",
        ),
        ("tiny --recompute-granularity selective", "tiny"),
        ("tiny --data-path corpus", "tiny --data corpus"),
        ("tiny --data-path 0.7 a 0.3 b --seq-length 9", "tiny --data a:0.7,b:0.3 --seq 9"),
        ("tiny --fp8-format hybrid", "tiny --compute.matmul fp8"),
        (
            "tiny --lr 3e-4 --min-lr 3e-5",
            "tiny --optimizer.learning-rate 3e-4 --optimizer.final-fraction 0.1",
        ),
        ("tiny --cp-comm-type a2a", "tiny --context-parallel ulysses"),
        # EasyLM
        (
            "tiny --train_dataset.json_dataset.path=a.jsonl "
            "--train_dataset.json_dataset.seq_length=64 --train_dataset.json_dataset.batch_size=8",
            "tiny --data a.jsonl --seq 64 --batch 8",
        ),
        ("tiny --train_dataset.huggingface_dataset.path=c4", "tiny --data c4"),
        ("tiny --optimizer.accumulate_gradient_steps=4", "tiny --accumulation 4"),
        ("tiny --optimizer.type=adamw", "tiny --optimizer.name adamw"),
        ("tiny --optimizer.adamw_optimizer.b2=0.95", "tiny --optimizer.b2 0.95"),
        ("tiny --optimizer.adamw_optimizer.clip_gradient=1", "tiny --optimizer.clip-norm 1"),
        ("tiny --optimizer.adamw_optimizer.lr_warmup_steps=9", "tiny --optimizer.warmup-steps 9"),
        (
            "tiny --optimizer.adamw_optimizer.lr=3e-4 --optimizer.adamw_optimizer.end_lr=3e-5",
            "tiny --optimizer.learning-rate 3e-4 --optimizer.final-fraction 0.1",
        ),
        (
            "tiny --optimizer.adamw_optimizer.bf16_momentum=True",
            "tiny --optimizer.moments bfloat16",
        ),
        ("tiny --logger.project=mine", "tiny --log.wandb mine"),
        ("tiny --dtype=bf16", "tiny --compute.dtype bfloat16"),
    ],
)
def test_words_of_maxtext_torchtitan_megatron_and_easylm_are_translated(
    theirs: str, ours: str
) -> None:
    with pytest.raises(MeshwrightError, match="of another system; the same here: ") as said:
        check_flags("train", theirs.split())
    assert str(said.value).endswith(f": meshwright train {ours}")
    settings(ours.split())


_PIPELINE = "pipeline parallelism is not supported; split the model over fsdp, tp and sp"


@pytest.mark.parametrize(
    ("command", "theirs", "words"),
    [
        ("train", "ici_pipeline_parallelism=4", _PIPELINE),
        ("train", "dcn_pipeline_parallelism=2", _PIPELINE),
        ("train", "--parallelism.pipeline_parallel_degree 4", _PIPELINE),
        ("train", "--pipeline-model-parallel-size 2", _PIPELINE),
        ("plan", "--pp 2", _PIPELINE),
        ("serve", "--pipeline-parallel-size 2", _PIPELINE),
        ("generate", "--pipeline-parallel-size 2", _PIPELINE),
        ("train", "enable_checkpointing=true", "true is not needed: checkpoints are always saved"),
        (
            "train",
            "enable_checkpointing=false",
            "no enable_checkpointing=false: checkpoints are al",
        ),
        (
            "train",
            "async_checkpointing=true",
            "not needed: checkpoints are saved in the background",
        ),
        (
            "train",
            "async_checkpointing=false",
            "there is no async_checkpointing=false: checkpoints",
        ),
        ("train", "dataset_type=synthetic", "--data embedded, the default, needs no download"),
        ("train", "dataset_type=tfds", "--data says by its name what it is"),
        ("train", "quantization=int8", "give --compute.matmul fp8, or leave it out"),
        ("train", "remat_policy=save_qkv_proj", "give --compute.remat elementwise or mlp or full"),
        ("train", "ici_fsdp_parallelism=-1 per_device_batch_size=4", "batch_size x all devices"),
        ("train", "base_output_directory=gs://b/r", "gs://b/r: paths are those of a file system"),
        ("train", "tokenizer_path=x", "the tokenizer is the model's own"),
        ("train", "profiler=xplane", "jax.profiler"),
        ("train", "compile_topology=v5p-256", "meshwright prove MODEL --on"),
        ("train", "ici_sequence_parallelism=2", "axes are dp, fsdp, tp, sp"),
        ("train", "--activation_checkpoint.mode selective", "--compute.remat elementwise or mlp"),
        ("train", "--job.config_file a.toml", "files of other systems are not read"),
        ("train", "--metrics.enable_wandb", "--log.wandb PROJECT"),
        ("train", "--metrics.disable_color_printing", "each run logs metrics.jsonl"),
        ("train", "--checkpoint.enable", "is not needed: checkpoints are always saved"),
        ("train", "--compile.enable", "is not needed: JAX compiles each step"),
        ("train", "--model.flavor 8B", "the model is the first word"),
        ("train", "--load out", "the same command resumes the run"),
        ("train", "--micro-batch-size 1 --global-batch-size 8", "--accumulation, the number of mi"),
        ("train", "--use-distributed-optimizer", "the fsdp axis of --mesh splits"),
        ("train", "--num-layers 4 --hidden-size 64", "there is no --num-layers, --hidden-size: "),
        ("train", "--min-lr 3e-5 --bf16", "min_lr is --optimizer.final-fraction here"),
        ("train", "--train_dataset.type=json", "data is one setting: --data FILE"),
        ("train", "--train_dataset.text_processor.fields=text", "--fields '[prompt],answer'"),
        ("train", "--optimizer.adamw_optimizer.lr_decay_steps=9", "until the last of --steps"),
        ("train", "--logger.online=True", "each run logs metrics.jsonl"),
        ("train", "--tokenizer.vocab_file=a", "the tokenizer is the model's own"),
        ("serve", "--seq_length 128", "the same here: meshwright serve m --engine.max-length 128"),
        ("serve", "--enable-prefix-caching", "is not needed: prompts that begin alike"),
        ("serve", "--no-enable-prefix-caching", "meshwright serve m --engine.no-prefix-cache"),
        ("serve", "--tensor-parallel-size 2", "meshwright serve m --mesh tp=2"),
        ("serve", "--quantization fp8", "meshwright serve m --engine.weights fp8"),
        ("serve", "--max-num-seqs 2", "meshwright serve m --engine.max-batch 2"),
        ("serve", "--served-model-name x", "meshwright serve m --name x"),
        ("serve", "--trust-remote-code", "no code of a model's folder is run"),
        ("serve", "--block-size 16", "meshwright serve m --engine.page-size 16"),
        ("serve", "--revision main", "org/name@main"),
        ("serve", "--speculative-config x", "speculative decoding is not supported"),
        ("serve", "--tool-call-parser llama3_json", "meshwright serve m --tool-calls llama"),
        ("serve", "--hf_path org/name", "the model is the first word"),
        ("generate", "--temp 0.5", "meshwright generate m --temperature 0.5"),
    ],
)
def test_words_without_a_counterpart_are_answered_in_a_sentence(
    command: str, theirs: str, words: str
) -> None:
    with pytest.raises(MeshwrightError) as said:
        check_flags(command, ["m", *theirs.split()])
    assert words in str(said.value)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            "tiny --min-lr 1e-5 --end-lr 1e-6 --lr 1e-4",
            "tiny --optimizer.learning-rate 1e-4 --optimizer.final-fraction 0.01",
        ),
        (
            "tiny --lr 1e-4 --min-lr 1e-5 --optimizer.final_fraction 0.5",
            "tiny --optimizer.learning-rate 1e-4 --optimizer.final-fraction 0.5",
        ),
        ("tiny --run-name a --checkpoint.folder b", "tiny --run b"),
        ("tiny --checkpoint.folder b --run-name a", "tiny --run runs/a"),
        ("tiny --run=out --run-name a", "tiny --run out/a"),
        ("tiny --steps=3 steps=4", "tiny --steps 4"),
        ("tiny steps=4 --steps 3", "tiny --steps 3"),
        ("tiny --max_steps 4 --total_steps 5", "tiny --steps 5"),
        ("tiny --bf16 --compute.dtype float32", "tiny --compute.dtype float32"),
        ("tiny --remat_policy full --activation_checkpoint.mode none", "tiny"),
        ("--compute.sequence_parallel tiny --sequence_parallel", "tiny --compute.sequence-parallel"),
        ("tiny --PjitPartitioner.num_partitions=4 --num-partitions=2", "tiny --num-partitions 2"),
        ("tiny --rules standard --parameter_partitioning_dims=2", "tiny --rules t5x:1,2"),
        (
            "tiny --micro-batch-size 1 --local_batch_size 2 --mesh fsdp=4",
            "tiny --mesh fsdp=4 --batch 8",
        ),
        ("tiny --load_llama_config 7b", "tiny"),
        # torchtitan's degree 0 is none, and takes no rank of those that shard the weights
        (
            "tiny --expert-parallel-degree 0 --data-parallel-shard-degree 8",
            "tiny --mesh dp=-1,fsdp=8",
        ),
    ],
)  # fmt: skip
def test_of_words_that_say_the_same_the_last_counts(theirs: str, ours: str) -> None:
    with pytest.raises(MeshwrightError, match="the same here: ") as said:
        check_flags("train", theirs.split())
    assert str(said.value).endswith(f": meshwright train {ours}")
    settings(ours.split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--run_name", "--run_name needs a value"),
        ("--min-lr --lr 1", "--min-lr needs a value"),
        ("--mesh_dim", "--mesh_dim needs a value"),
        ("--expert-model-parallel-size -1 --fsdp 8", "-1 ranks of experts do not divide the 8"),
        ("--expert-parallel-degree 3 --fsdp 8", "3 ranks of experts do not divide the 8"),
        ("--tp -8", "'-8' is not a size"),
    ],
)
def test_a_value_that_is_missing_or_fits_no_mesh_is_said(words: str, says: str) -> None:
    with pytest.raises(MeshwrightError) as said:
        check_flags("train", ["tiny", *words.split()])
    assert says in str(said.value)


@pytest.mark.parametrize("command", ["eval", "export", "serve", "generate", "chat"])
def test_the_model_is_the_first_word_of_each_command_that_reads_one(command: str) -> None:
    with pytest.raises(MeshwrightError, match=f"first word, as in meshwright {command} FOLDER"):
        check_flags(command, ["--model", "runs/x"])
    with pytest.raises(MeshwrightError, match="pipeline parallelism is not supported"):
        check_flags(command, ["runs/x", "--pp", "2"])


def test_a_switch_does_not_take_the_model_for_its_value() -> None:
    with pytest.raises(MeshwrightError, match=r"serve m --engine\.max-batch 2$"):
        check_flags("serve", ["--enable-prefix-caching", "m", "--max-num-seqs", "2"])


def test_every_flag_that_an_answer_names_is_there() -> None:
    trained, served = set(_own_names("train")), set(_own_names("serve"))
    for flag in (*RENAMED.values(), *(words.split()[0] for words in SWITCHES.values())):
        assert flag[2:].replace("-", "_") in trained, flag
    for flag in (*OF_COMMAND["serve"].renamed.values(), *OF_COMMAND["serve"].switches.values()):
        name = flag[2:].replace("-", "_")
        assert name.replace("no_", "") in served, flag
    assert set(AXES.values()) == {"dp", "fsdp", "tp", "sp", "ep"}


def test_a_dtype_that_is_not_here_is_named_with_those_that_are() -> None:
    with pytest.raises(
        MeshwrightError, match="'half' is not known; known: auto, bfloat16, float32"
    ):
        read(ServeConfig, ["m", "--dtype", "half"], "meshwright serve", "")

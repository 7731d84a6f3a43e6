"""Flags of other systems, answered with the command that does the same here."""

import math
import shlex
from collections.abc import Iterator, Sequence, Set

from meshwright.cli.flags import take_all
from meshwright.errors import MeshwrightError
from meshwright.meshes import STANDARD_AXES, MeshSpec

# sizes of single axes, as EasyLM, T5X, MaxText, Megatron, vLLM and torchtitan call them
_AXES = {
    "dp": "dp", "fsdp": "fsdp", "tp": "tp", "sp": "sp", "mp": "tp", "cp": "sp",
    "tensor_parallel_size": "tp", "tp_size": "tp", "tensor_model_parallel_size": "tp",
    "tensor_parallel_degree": "tp", "ici_tensor_parallelism": "tp",
    "context_parallel_size": "sp", "context_parallel_degree": "sp",
    "ici_context_parallelism": "sp", "data_parallel_size": "dp",
    "data_parallel_replicate_degree": "dp", "data_parallel_shard_degree": "fsdp",
    "ici_data_parallelism": "dp", "ici_fsdp_parallelism": "fsdp",
}  # fmt: skip
# whole meshes: EasyLM's and LWM's
_MESHES = frozenset({"mesh_dim", "mp_mesh_dim", "jax_mesh"})
# T5X's sets of rules, by how many dims of activations and of parameters are split
_RULES = {"activation_partitioning_dims": 0, "parameter_partitioning_dims": 1}
# settings of train, as EasyLM, Hugging Face's Trainer, torchtitan, MaxText and Megatron call them
_RENAMED = {
    "total_steps": "--steps", "train_steps": "--steps", "train_iters": "--steps",
    "max_steps": "--steps", "num_steps": "--steps", "training.steps": "--steps",
    "seq_length": "--seq", "seq_len": "--seq", "sequence_length": "--seq",
    "max_target_length": "--seq", "max_seq_length": "--seq", "max_seq_len": "--seq",
    "max_length": "--seq", "block_size": "--seq", "context_length": "--seq",
    "global_batch_size": "--batch", "batch_size": "--batch", "train_batch_size": "--batch",
    "gradient_accumulation_steps": "--accumulation", "accumulate_gradient_steps": "--accumulation",
    "grad_accum_steps": "--accumulation", "accumulation_steps": "--accumulation",
    "load_checkpoint": "--init-from", "load_parameters_path": "--init-from",
    "model_parallel_submesh": "--submesh",
    "lr": "--optimizer.learning-rate", "learning_rate": "--optimizer.learning-rate",
    "peak_lr": "--optimizer.learning-rate", "optimizer.lr": "--optimizer.learning-rate",
    "optimizer.adamw_optimizer.lr": "--optimizer.learning-rate",
    "weight_decay": "--optimizer.weight-decay",
    "optimizer.adamw_optimizer.weight_decay": "--optimizer.weight-decay",
    "warmup_steps": "--optimizer.warmup-steps", "lr_warmup_steps": "--optimizer.warmup-steps",
    "lr_warmup_iters": "--optimizer.warmup-steps",
    "optimizer.adamw_optimizer.lr_warmup_steps": "--optimizer.warmup-steps",
    "lr_scheduler_type": "--optimizer.schedule", "lr_decay_style": "--optimizer.schedule",
    "optim": "--optimizer.name", "opt_type": "--optimizer.name",
    "max_grad_norm": "--optimizer.clip-norm", "clip_grad": "--optimizer.clip-norm",
    "max_norm": "--optimizer.clip-norm", "grad_clip": "--optimizer.clip-norm",
    "gradient_clipping_threshold": "--optimizer.clip-norm",
    "adam_beta1": "--optimizer.b1", "adam_beta2": "--optimizer.b2",
    "adam_epsilon": "--optimizer.eps", "adam_eps": "--optimizer.eps",
    "output_dir": "--run", "out_dir": "--run", "base_output_directory": "--run",
    "logger.output_dir": "--run", "job.dump_folder": "--run", "save": "--run",
    "save_steps": "--checkpoint.every", "save_interval": "--checkpoint.every",
    "save_milestone_freq": "--checkpoint.every", "save_model_freq": "--checkpoint.every",
    "checkpoint_period": "--checkpoint.every", "save_total_limit": "--checkpoint.keep-last",
    "eval_steps": "--eval.every", "eval_interval": "--eval.every",
    "logging_steps": "--log.every", "log_freq": "--log.every", "log_interval": "--log.every",
    "dataset_path": "--data", "train_data": "--data", "dataset": "--data",
    "remat_policy": "--compute.remat", "wandb_project": "--log.wandb",
    # T5X's Gin names
    "TRAIN_STEPS": "--steps", "MODEL_DIR": "--run", "BATCH_SIZE": "--batch",
    "INITIAL_CHECKPOINT_PATH": "--init-from", "MIXTURE_OR_TASK_NAME": "--data",
}  # fmt: skip
# settings of commands that generate, as vLLM, SGLang, Transformers and llama.cpp call them
_SERVED = {
    "max_model_len": "--engine.max-length", "context_length": "--engine.max-length",
    "max_num_seqs": "--engine.max-batch", "max_running_requests": "--engine.max-batch",
    "gpu_memory_utilization": "--engine.memory-fraction",
    "mem_fraction_static": "--engine.memory-fraction",
    "max_num_batched_tokens": "--engine.chunk", "chunked_prefill_size": "--engine.chunk",
    "kv_cache_dtype": "--engine.cache", "quantization": "--engine.weights",
    "served_model_name": "--name", "lora_modules": "--adapters", "lora_paths": "--adapters",
    "max_lora_rank": "--engine.max-adapter-rank", "max_loras": "--engine.max-adapters",
}  # fmt: skip
# what their values are here; "": what is done without the flag
_VALUES = {
    "--engine.weights": {
        "fp8": "fp8", "w8a8_fp8": "fp8", "int8": "int8", "w8a8_int8": "int8", "none": "",
    },
    "--engine.cache": {"fp8": "fp8", "fp8_e4m3": "fp8", "auto": "", "bfloat16": "", "bf16": ""},
}  # fmt: skip
_GENERATED = dict.fromkeys(("max_new_tokens", "max_tokens", "n_predict"), "--max-new")
_OF_COMMAND = {"serve": _SERVED, "generate": _GENERATED, "chat": _GENERATED}
# without a value, or with one that is true
_SWITCHES = {
    "bf16": "--compute.dtype bfloat16", "fp16": "--compute.dtype bfloat16",
    "gradient_checkpointing": "--compute.remat full",
    "recompute_activations": "--compute.remat full",
}  # fmt: skip
# what has no flag of its own here, and what to do
_ADVICE = {
    **dict.fromkeys(
        ("epochs", "num_epochs", "num_train_epochs", "tokens", "num_tokens", "train_tokens",
         "total_tokens"),
        "a run is as long as its --steps, each of --batch sequences of --seq tokens: tokens = "
        "steps x batch x seq",
    ),
    **dict.fromkeys(
        ("gin_file", "gin_bindings", "gin_search_paths", "TASK_FEATURE_LENGTHS"),
        "settings are flags, or come from a file with --config FILE (a run's config.json); "
        "MODEL_DIR is --run, MIXTURE_OR_TASK_NAME --data, TASK_FEATURE_LENGTHS --seq, TRAIN_STEPS "
        "--steps, PjitPartitioner.num_partitions --num-partitions",
    ),
    "update_llama_config": "the same here is --override NAME=VALUE: theta is rope.theta, "
    "max_sequence_length is max_seq",
    **dict.fromkeys(
        ("resume", "resume_from_checkpoint", "resume_checkpoint", "load"),
        "the same command resumes the run in --run; --resume-from STEP takes another checkpoint",
    ),
    **dict.fromkeys(
        ("model", "model_name", "model_name_or_path", "model_path", "load_model_config"),
        "the model is the first word after the command; weights come from --init-from FOLDER",
    ),
}  # fmt: skip
# sequences of one data rank: Hugging Face, Megatron, torchtitan, the PyTorch guide
_PER_RANK = frozenset({
    "per_device_train_batch_size", "per_device_batch_size", "micro_batch_size", "local_batch_size",
    "training.local_batch_size", "batch_size_per_device", "batch_size_per_rank",
})  # fmt: skip
_GENERATING = ("serve", "generate", "chat", "eval")  # on as many devices as the mesh has
_WITH_TRAINS = ("train", "audit", "prove", "plan")  # commands that take train's settings
# flags that were here before
_BEFORE = {
    "compute.no-overlap": "--compute.overlap off",
    "compute.no-scan": "--compute.layers unroll",
    "compute.scan": "--compute.layers scan",
}
_OWN = {"plan": ("--tokens",)}  # flags of a command that others give to train
_STRATEGIES = ("auto", "ring", "allgather", "ulysses")
_KNOWN = {
    *_PER_RANK, *_AXES, *_MESHES, *_RULES, *_RENAMED, *_SWITCHES, *_ADVICE, "sequence_parallel",
    "load_llama_config",
}  # fmt: skip
# MaxText's settings are words KEY=VALUE
_KEYS = {*_RENAMED, *_ADVICE, *_PER_RANK, *(name for name in _AXES if "_" in name)}
_PREFIXES = ("gin.", "partitioning.", "PjitPartitioner.", "parallelism.", "training.")


def check_flags(command: str, words: Sequence[str]) -> None:
    """Raise for flags of other systems, with the same command in the flags of this one."""
    ours: list[str] = []
    theirs: list[str] = []
    given_flags: dict[str, str] = {}
    for word in words:
        if word.startswith("--") and word[2:] in _BEFORE:
            raise MeshwrightError(f"{word} is now {_BEFORE[word[2:]]}")
    of_command = _OF_COMMAND.get(command, {})
    for name, value, written in _flags(words, _KNOWN | of_command.keys()):
        if name in of_command and value:
            ours += _own_value(of_command[name], value, " ".join(written))
            theirs.append(" ".join(written))
            continue
        if written[0].partition("=")[0] in _OWN.get(command, ()):
            ours += written
            continue
        if name in _ADVICE:
            raise MeshwrightError(_advice(command, name, written[0]))
        if name in _RENAMED and not value:
            flag = _own_flag(command, _RENAMED[name], written[0])
            raise MeshwrightError(f"{written[0]} needs a value; here it is {flag}")
        if name in _PER_RANK:
            ours += ["--batch", _global_batch(words, value, written[0])]
        elif name == "load_llama_config":  # EasyLM's and LWM's, where it takes a size
            family = "llama-2" if _is_easylms(words) else "lwm"
            ours.insert(0, "tiny" if value == "debug" else f"{family}-{value}")
        elif name == "num_partitions" and "." in written[0]:
            ours += ["--num-partitions", value]
        elif name in _RENAMED:
            value = value.rpartition("::")[2]  # EasyLM's params::FOLDER
            ours += [_own_flag(command, _RENAMED[name], written[0]), value]
        elif name in _SWITCHES or name == "sequence_parallel":
            if value.lower() == "false":
                ours += []
            elif value in _STRATEGIES:
                ours += ["--context-parallel", value]
            else:
                flag, *rest = _SWITCHES.get(name, "--compute.sequence-parallel").split()
                ours += [_own_flag(command, flag, written[0]), *rest]
        elif name in _KNOWN:
            given_flags[name] = value
        else:
            ours += written
            continue
        theirs.append(" ".join(written))
    if not theirs:
        return
    mesh = _mesh(given_flags, rest_to="" if command in _GENERATING else "fsdp")
    if mesh:
        take_all(ours, "--mesh")  # theirs says it
    ours += [*mesh, *_rules(given_flags)]
    subject = "this is a flag" if len(theirs) == 1 else "these are flags"
    raise MeshwrightError(
        f"{', '.join(theirs)}: {subject} of another system; the same here: "
        f"meshwright {command} {shlex.join(ours)}"
    )


def _is_easylms(words: Sequence[str]) -> bool:
    """Whether the mesh has three sizes, as EasyLM's; LWM's has four."""
    return any(
        name == "mesh_dim" and value.count(",") == 2 for name, value, _ in _flags(words, _KNOWN)
    )


def _global_batch(words: Sequence[str], value: str, flag: str) -> str:
    """The batch over all data ranks, if the command says how many there are."""
    rest = list(words)
    meshes, times = take_all(rest, "--mesh"), take_all(rest, "--accumulation")
    spec = None
    if meshes and meshes[-1] != "auto":
        spec = MeshSpec.parse(meshes[-1]).by_role()
    factors = [value, *(times or ["1"])]
    if spec is None or not spec.is_resolved or not all(one.isdecimal() for one in factors):
        raise MeshwrightError(
            f"{flag}: --batch is the global batch: sequences of a data rank x data ranks (dp x "
            "fsdp of the mesh) x micro-batches (--accumulation); with a --mesh whose sizes are all "
            "given, the command is written for you"
        )
    # MaxText counts every device, others those that have sequences of their own
    of_maxtext = flag.startswith("per_device_batch_size=")
    ranks = math.prod(
        size for axis, size in spec.axes if of_maxtext or axis in ("dp", "fsdp", "ep")
    )
    return str(ranks * math.prod(map(int, factors)))


def _advice(command: str, name: str, flag: str) -> str:
    """What to do in place of a flag that has no other name here."""
    if command == "plan" and "tokens" in name:
        return f"{flag} is --tokens here, as in --tokens 1T"
    if command in _WITH_TRAINS:
        return f"there is no {flag}: {_ADVICE[name]}"
    if "model" in name:
        return f"there is no {flag}: the model is the first word, as in meshwright {command} FOLDER"
    return _not_of(command, flag)


def _own_flag(command: str, flag: str, theirs: str) -> str:
    """What a command calls a setting of train."""
    if command not in _WITH_TRAINS:
        raise MeshwrightError(_not_of(command, theirs, flag))
    return flag


def _own_value(flag: str, value: str, theirs: str) -> list[str]:
    """A flag with what a value of another system is here; nothing if that is the default."""
    if flag not in _VALUES:
        return [flag, value]
    own = _VALUES[flag].get(value.lower())
    if own is None:
        known = " or ".join(sorted({one for one in _VALUES[flag].values() if one}))
        raise MeshwrightError(f"there is no {theirs} here; give {flag} {known}, or leave it out")
    return [flag, own] if own else []


def _not_of(command: str, theirs: str, flag: str | None = None) -> str:
    here = "" if flag is None else f", where it is {flag}"
    return f"{theirs} is a setting of training (meshwright train){here}; leave it out of {command}"


def _flags(words: Sequence[str], known: Set[str]) -> Iterator[tuple[str, str, list[str]]]:
    """(name, value, words) of each flag that may be another system's; other words as they are."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        written = [word]
        name = name.replace("-", "_")
        for prefix in _PREFIXES:
            name = name if name in known else name.removeprefix(prefix)
        is_flag = word.startswith("--") or (equals and "." not in name and name in _KEYS)
        if not is_flag or name not in (*known, "num_partitions"):
            yield "", "", written
            continue
        if not equals and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
            written.append(value)
        yield name, value.strip("'\"()[] "), written


def _mesh(given_flags: dict[str, str], rest_to: str) -> list[str]:
    """`--mesh` with all that the flags say of it; an error if that is no mesh.

    Devices that are left are along `rest_to`, if it is named.
    """
    mesh_flags = [name for name in given_flags if name in _MESHES]
    named = {name: value for name, value in given_flags.items() if name in _AXES}
    if mesh_flags:
        switches = named if mesh_flags == ["mp_mesh_dim"] else {}  # EasyLM's --fsdp beside it
        if len(mesh_flags) > 1 or named.keys() - {"fsdp"} or (named and not switches):
            raise MeshwrightError(_ONE_MESH)
        if mesh_flags[0] == "mp_mesh_dim":
            is_fsdp = _size("fsdp", switches["fsdp"]) != 0 if "fsdp" in switches else False
            spec = MeshSpec.from_mp_mesh_dim(given_flags[mesh_flags[0]], is_fsdp)
        else:
            spec = MeshSpec.parse(given_flags[mesh_flags[0]])
        return ["--mesh", str(spec.by_role())]
    sizes: dict[str, int] = {}
    for name, value in named.items():
        axis, size = _AXES[name], _size(name, value)
        if axis in sizes or (size == -1 and -1 in sizes.values()):
            raise MeshwrightError(_ONE_MESH)
        sizes |= {axis: size} if size else {}
    if not sizes:
        return []
    if rest_to and -1 not in sizes.values():
        sizes = {rest_to if rest_to not in sizes else "dp": -1} | sizes
    return ["--mesh", ",".join(f"{axis}={sizes[axis]}" for axis in STANDARD_AXES if axis in sizes)]


_ONE_MESH = (
    "flags of other systems contradict each other; the mesh here is one setting, such as --mesh "
    "dp=1,fsdp=-1,tp=4,sp=1"
)


def _size(name: str, value: str) -> int:
    """The size of an axis; a switch without a value takes all devices, one that is false none."""
    switch = {"": -1, "true": -1, "false": 0}.get(value.lower())
    if switch is not None:
        return switch
    if not value.removeprefix("-").isdecimal():
        raise MeshwrightError(
            f"--{name} {value}: {value!r} is not a size; the mesh here is one setting, such as "
            "--mesh fsdp=-1,tp=2"
        )
    return int(value)


def _rules(given_flags: dict[str, str]) -> list[str]:
    if not given_flags.keys() & _RULES.keys():
        return []
    dims = [given_flags.get(name, "1") for name in _RULES]
    if not set(dims) <= {"1", "2"}:
        raise MeshwrightError(f"T5X's partitioning dims are 1 or 2, not {', '.join(dims)}")
    return ["--rules", f"t5x:{','.join(dims)}"]

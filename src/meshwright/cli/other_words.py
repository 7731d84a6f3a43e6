"""What settings of other systems are called here: one table for each group of commands."""

from collections.abc import Mapping
from typing import NamedTuple

# sizes of single axes, as EasyLM, T5X, Megatron, vLLM and torchtitan call them
AXES = {
    "dp": "dp", "fsdp": "fsdp", "tp": "tp", "sp": "sp", "mp": "tp", "cp": "sp", "ep": "ep",
    "tensor_parallel_size": "tp", "tp_size": "tp", "tensor_model_parallel_size": "tp",
    "tensor_parallel_degree": "tp", "context_parallel_size": "sp", "context_parallel_degree": "sp",
    "data_parallel_size": "dp", "dp_size": "dp", "data_parallel_replicate_degree": "dp",
    "data_parallel_shard_degree": "fsdp", "expert_model_parallel_size": "ep",
    "expert_parallel_degree": "ep", "ep_size": "ep",
}  # fmt: skip
# and MaxText, within a slice (ici) and across slices (dcn): the axis is their product
MAXTEXTS = {
    "data": "dp", "fsdp": "fsdp", "fsdp_transpose": "fsdp", "tensor": "tp",
    "tensor_transpose": "tp", "context": "sp", "expert": "ep",
}  # fmt: skip
AXES |= {
    f"{network}_{name}_parallelism": axis
    for network in ("ici", "dcn")
    for name, axis in MAXTEXTS.items()
}
# there the ranks of experts are some of those that shard the weights, here an axis of its own
WITHIN_DATA = ("expert_model_parallel_size", "expert_parallel_degree")
# whole meshes: EasyLM's and LWM's
MESHES = frozenset({"mesh_dim", "mp_mesh_dim", "jax_mesh"})
# T5X's sets of rules, by how many dims of activations and of parameters are split
RULES = {"activation_partitioning_dims": 0, "parameter_partitioning_dims": 1}
PIPELINES = dict.fromkeys(
    ("pp", "pp_size", "pipeline_parallel_size", "pipeline_model_parallel_size",
     "pipeline_parallel_degree", "ici_pipeline_parallelism", "dcn_pipeline_parallelism",
     "num_layers_per_virtual_pipeline_stage", "virtual_pipeline_model_parallel_size",
     "pipeline_parallel_schedule", "num_pipeline_microbatches"),
    "pipeline parallelism is not supported; split the model over fsdp, tp and sp instead",
)  # fmt: skip
MODEL_NAMES = ("model", "model_name", "model_name_or_path", "model_path", "load_model_config",
          "model.name", "model.flavor", "module", "hf_model")  # fmt: skip


CHECKPOINTS = ("ckpt", "ckpt_path", "checkpoint", "checkpoint_path", "pretrained")
FIRST_WORD = dict.fromkeys(
    (*MODEL_NAMES, *CHECKPOINTS, "hf_path"),
    "the model is the first word, as in meshwright {command} FOLDER",
)


class Words(NamedTuple):
    """What the words of other systems are for a group of commands."""

    renamed: Mapping[str, str]  # takes a value, which may have another name: VALUES
    switches: Mapping[str, str]  # without a value, or with one that is true
    always: Mapping[str, str]  # what is always so here, and why no flag is needed
    advice: Mapping[str, str]  # what has no flag of its own here, and what to do


RENAMED = {
    # EasyLM, Hugging Face's Trainer, torchtitan, MaxText and Megatron
    "total_steps": "--steps", "train_steps": "--steps", "train_iters": "--steps",
    "max_steps": "--steps", "num_steps": "--steps", "training.steps": "--steps",
    "seq_length": "--seq", "seq_len": "--seq", "sequence_length": "--seq",
    "max_target_length": "--seq", "max_seq_length": "--seq", "max_seq_len": "--seq",
    "max_length": "--seq", "block_size": "--seq", "context_length": "--seq",
    "global_batch_size": "--batch", "batch_size": "--batch", "train_batch_size": "--batch",
    "total_batch_size": "--batch",
    "gradient_accumulation_steps": "--accumulation", "accumulate_gradient_steps": "--accumulation",
    "grad_accum_steps": "--accumulation", "accumulation_steps": "--accumulation",
    "optimizer.accumulate_gradient_steps": "--accumulation", "num_microbatches": "--accumulation",
    "load_checkpoint": "--init-from", "load_parameters_path": "--init-from",
    "checkpoint.initial_load_path": "--init-from", "pretrained_checkpoint": "--init-from",
    "checkpoint.load_step": "--resume-from",
    "model_parallel_submesh": "--submesh",
    "lr": "--optimizer.learning-rate", "learning_rate": "--optimizer.learning-rate",
    "peak_lr": "--optimizer.learning-rate", "optimizer.lr": "--optimizer.learning-rate",
    "weight_decay": "--optimizer.weight-decay",
    "warmup_steps": "--optimizer.warmup-steps", "lr_warmup_steps": "--optimizer.warmup-steps",
    "lr_warmup_iters": "--optimizer.warmup-steps",
    "lr_scheduler_type": "--optimizer.schedule", "lr_decay_style": "--optimizer.schedule",
    "lr_scheduler.decay_type": "--optimizer.schedule",
    "lr_scheduler.decay_ratio": "--optimizer.decay-fraction",
    "lr_scheduler.min_lr_factor": "--optimizer.final-fraction",
    "lr_scheduler.lr_min": "--optimizer.final-fraction",
    "cosine_learning_rate_final_fraction": "--optimizer.final-fraction",
    "optim": "--optimizer.name", "opt_type": "--optimizer.name", "optimizer": "--optimizer.name",
    "optimizer.type": "--optimizer.name",
    "max_grad_norm": "--optimizer.clip-norm", "clip_grad": "--optimizer.clip-norm",
    "max_norm": "--optimizer.clip-norm", "grad_clip": "--optimizer.clip-norm",
    "gradient_clipping_threshold": "--optimizer.clip-norm",
    "clip_gradient": "--optimizer.clip-norm",
    "adam_beta1": "--optimizer.b1", "adam_beta2": "--optimizer.b2",
    "adam_b1": "--optimizer.b1", "adam_b2": "--optimizer.b2", "b1": "--optimizer.b1",
    "b2": "--optimizer.b2", "optimizer.beta1": "--optimizer.b1",
    "optimizer.beta2": "--optimizer.b2",
    "adam_epsilon": "--optimizer.eps", "adam_eps": "--optimizer.eps",
    "output_dir": "--run", "out_dir": "--run", "base_output_directory": "--run",
    "logger.output_dir": "--run", "job.dump_folder": "--run", "dump_folder": "--run",
    "save": "--run",
    "save_steps": "--checkpoint.every", "save_interval": "--checkpoint.every",
    "save_milestone_freq": "--checkpoint.keep-every", "save_model_freq": "--checkpoint.every",
    "checkpoint_period": "--checkpoint.every", "checkpoint.interval": "--checkpoint.every",
    "SaveCheckpointConfig.period": "--checkpoint.every",
    "save_total_limit": "--checkpoint.keep-last",
    "checkpoint.keep_latest_k": "--checkpoint.keep-last",
    "max_num_checkpoints_to_keep": "--checkpoint.keep-last",
    "eval_steps": "--eval.every", "eval_interval": "--eval.every",
    "logging_steps": "--log.every", "log_freq": "--log.every", "log_interval": "--log.every",
    "log_period": "--log.every",
    "dataset_path": "--data", "train_data": "--data", "dataset": "--data", "hf_path": "--data",
    "data_path": "--data", "train_data_path": "--data", "dataset_name": "--data",
    "hf_train_files": "--data", "train_dataset.json_dataset.path": "--data",
    "train_dataset.huggingface_dataset.path": "--data",
    "remat_policy": "--compute.remat", "recompute_granularity": "--compute.remat",
    "activation_checkpoint.mode": "--compute.remat",
    "quantization": "--compute.matmul", "fp8_format": "--compute.matmul",
    "dtype": "--compute.dtype", "training.mixed_precision_param": "--compute.dtype",
    "param_dtype": "--compute.param-dtype", "weight_dtype": "--compute.param-dtype",
    "training.dtype": "--compute.param-dtype",
    "context_parallel_strategy": "--context-parallel", "cp_comm_type": "--context-parallel",
    "moe_token_dispatcher_type": "--compute.experts", "moe_aux_loss_coeff": "--loss.load-balance",
    "load_balance_loss_weight": "--loss.load-balance", "moe_z_loss_coeff": "--loss.router-z",
    "moe_expert_capacity_factor": "--compute.capacity", "capacity_factor": "--compute.capacity",
    "scan_layers": "--compute.layers",
    "wandb_project": "--log.wandb", "logger.project": "--log.wandb",
    "logger.project_id": "--log.wandb",
    # short words of many scripts
    "iters": "--steps", "max_iters": "--steps", "n_steps": "--steps", "nsteps": "--steps",
    "bs": "--batch", "bsz": "--batch", "batchsize": "--batch", "train_bs": "--batch",
    "gbs": "--batch",
    "seqlen": "--seq", "ctx": "--seq", "ctx_len": "--seq", "context_len": "--seq",
    "n_ctx": "--seq", "max_len": "--seq",
    "grad_accum": "--accumulation", "grad_acc": "--accumulation", "accum_steps": "--accumulation",
    "wd": "--optimizer.weight-decay",
    "warmup": "--optimizer.warmup-steps", "warmup_iters": "--optimizer.warmup-steps",
    "num_warmup_steps": "--optimizer.warmup-steps",
    "scheduler": "--optimizer.schedule", "lr_scheduler": "--optimizer.schedule",
    "opt": "--optimizer.name", "clip": "--optimizer.clip-norm",
    "beta1": "--optimizer.b1", "beta2": "--optimizer.b2",
    "out": "--run", "outdir": "--run", "output": "--run", "save_dir": "--run",
    "ckpt_dir": "--run", "checkpoint_dir": "--run", "workdir": "--run", "work_dir": "--run",
    "logdir": "--run", "log_dir": "--run",
    "save_every": "--checkpoint.every", "save_freq": "--checkpoint.every",
    "ckpt_every": "--checkpoint.every", "checkpoint_every": "--checkpoint.every",
    "eval_freq": "--eval.every",
    "train_file": "--data", "dataset_dir": "--data",
    "precision": "--compute.dtype", "mixed_precision": "--compute.dtype",
    "random_seed": "--seed",
    # T5X's Gin names
    "TRAIN_STEPS": "--steps", "MODEL_DIR": "--run", "BATCH_SIZE": "--batch",
    "INITIAL_CHECKPOINT_PATH": "--init-from", "MIXTURE_OR_TASK_NAME": "--data",
}  # fmt: skip
SAME_DTYPES = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32",
    "float": "float32", "auto": "",
}  # fmt: skip
# what values are here, of a flag of another system or else of ours; "": what is done without it
VALUES = {
    "--engine.weights": {
        "fp8": "fp8", "w8a8_fp8": "fp8", "int8": "int8", "w8a8_int8": "int8", "none": "",
    },
    "--engine.cache": {"fp8": "fp8", "fp8_e4m3": "fp8", "auto": "", "bfloat16": "", "bf16": ""},
    "--tool-calls": {
        "hermes": "hermes", "qwen25": "hermes", "llama3_json": "llama", "llama3": "llama",
        "llama4_json": "llama", "auto": "",
    },
    "--compute.dtype": SAME_DTYPES,
    "--compute.param-dtype": SAME_DTYPES,
    "dtype": SAME_DTYPES,
    "--compute.matmul": {"fp8": "fp8", "fp8_full": "fp8", "hybrid": "fp8", "": "", "none": ""},
    "remat_policy": {
        "minimal": "elementwise", "minimal_with_context": "elementwise",
        "save_dot_except_mlp": "mlp", "save_dot_with_context_except_mlp": "mlp", "full": "full",
        "none": "",
    },
    # attention, which Megatron recomputes there, is never kept by the kernels here
    "recompute_granularity": {"full": "full", "selective": ""},
    "activation_checkpoint.mode": {
        "elementwise": "elementwise", "mlp": "mlp", "full": "full", "none": "",
    },
    "--context-parallel": {
        "p2p": "ring", "ring": "ring", "all_gather": "allgather", "a2a": "ulysses",
    },
    "--compute.layers": {"true": "scan", "false": "unroll"},
    "--compute.experts": {"alltoall": "all-to-all", "allgather": ""},
}  # fmt: skip
SWITCHES = {
    "bf16": "--compute.dtype bfloat16", "fp16": "--compute.dtype bfloat16",
    "amp": "--compute.dtype bfloat16",
    "gradient_checkpointing": "--compute.remat full",
    "recompute_activations": "--compute.remat full",
    "enable_sequence_parallel": "--compute.sequence-parallel",
    "bf16_momentum": "--optimizer.moments bfloat16",
    "enable_tensorboard": "--log.tensorboard", "metrics.enable_tensorboard": "--log.tensorboard",
}  # fmt: skip
DATA = (
    "data is one setting: --data FILE, STORE or org/name, with --seq and --batch; meshwright data "
    "pack FILE --out STORE --fields '[prompt],answer' --tokenizer FOLDER makes a store"
)
TOKENIZER = (
    "the tokenizer is the model's own; of a preset, it is that of the store (meshwright data pack "
    "FILE --out STORE --tokenizer FOLDER)"
)
LOGGED = (
    "each run logs metrics.jsonl and a page in its folder (--run); --log.every, --log.tensorboard "
    "and --log.wandb PROJECT are the settings"
)
SHAPE = (
    "the model is the first word, a preset or a config.json, which --override NAME=VALUE changes, "
    "as in --override layers=4"
)
FILE = (
    "settings are flags, or come from a file with --config FILE (a run's config.json); files of "
    "other systems are not read"
)
GPUS = ("gpus", "n_gpus", "num_gpus", "nproc", "nproc_per_node", "n_devices", "num_devices")
DEVICES = (
    "--mesh says how devices are used, and --mesh fsdp=-1 takes all that are here; with --backend "
    "torch --processes N are started; plan and prove name a machine, as in --on h100:8"
)
HOSTS = (
    "several processes are --coordinator HOST:PORT --processes N --process-id I, or --coordinator "
    "auto"
)
CHIPS = "it is a setting of planning: meshwright prove MODEL --on v5p-256 --mesh fsdp=-1"
OTHERS_RATES = (
    "learning rates rise over --optimizer.warmup-steps, then follow --optimizer.schedule until the "
    "last of --steps"
)
TRAINING = Words(
    renamed=RENAMED,
    switches=SWITCHES,
    always={
        "enable_checkpointing": "checkpoints are always saved, each --checkpoint.every steps and "
        "at the end",
        "checkpoint.enable": "checkpoints are always saved, each --checkpoint.every steps and at "
        "the end",
        **dict.fromkeys(
            ("async_checkpointing", "async_save"), "checkpoints are saved in the background"
        ),
        **dict.fromkeys(
            ("use_distributed_optimizer", "use_megatron_fsdp", "zero_stage", "use_fsdp"),
            "the fsdp axis of --mesh splits weights, gradients and optimizer state",
        ),
        **dict.fromkeys(
            ("overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap"),
            "the compiler overlaps collectives; --compute.overlap is the setting on TPUs",
        ),
        **dict.fromkeys(
            ("use_flash_attn", "enable_flash_attention", "attention_backend", "attention"),
            "--compute.attention auto takes the fastest kernel that supports the call",
        ),
        **dict.fromkeys(
            ("recompute_method", "recompute_num_layers", "recompute_modules"),
            "--compute.remat is the same in every layer",
        ),
        "compile.enable": "JAX compiles each step, and --torch.compile is on by default on GPUs",
        "initialize_jax_distributed": "--coordinator auto joins several processes",
        "dataset_type": "--data says by its name what it is: a file, a store or org/name",
        "save_optimizer_state": "checkpoints hold the whole state",
    },
    advice={
        **PIPELINES,
        **dict.fromkeys(
            ("epoch", "epochs", "num_epochs", "num_train_epochs", "tokens", "num_tokens",
             "train_tokens", "total_tokens", "train_samples"),
            "a run is as long as its --steps, each of --batch sequences of --seq tokens: tokens = "
            "steps x batch x seq",
        ),
        **dict.fromkeys(
            ("gin_file", "gin_bindings", "gin_search_paths", "TASK_FEATURE_LENGTHS"),
            "settings are flags, or come from a file with --config FILE (a run's config.json); "
            "MODEL_DIR is --run, MIXTURE_OR_TASK_NAME --data, TASK_FEATURE_LENGTHS --seq, "
            "TRAIN_STEPS --steps, PjitPartitioner.num_partitions --num-partitions",
        ),
        "update_llama_config": "the same here is --override NAME=VALUE: theta is rope.theta, "
        "max_sequence_length is max_seq",
        **dict.fromkeys(
            ("resume", "resume_from_checkpoint", "resume_checkpoint", "load",
             "load_full_state_path"),
            "the same command resumes the run in --run; --resume-from STEP takes another "
            "checkpoint",
        ),
        **dict.fromkeys(
            MODEL_NAMES,
            "the model is the first word after the command; weights come from --init-from FOLDER",
        ),
        **dict.fromkeys(
            CHECKPOINTS,
            "weights to start from are --init-from FOLDER; the same command resumes the run in "
            "--run, and --resume-from STEP takes another checkpoint",
        ),
        **dict.fromkeys(GPUS, DEVICES),
        **dict.fromkeys(("nodes", "nnodes", "n_nodes", "num_nodes", "world_size"), HOSTS),
        **dict.fromkeys(("config_file", "job.config_file"), FILE),
        **dict.fromkeys(
            ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size",
             "num_query_groups", "num_experts", "base_num_decoder_layers", "base_emb_dim",
             "base_mlp_dim", "base_num_query_heads", "base_num_kv_heads", "n_layer", "n_layers",
             "n_head", "n_heads", "num_heads", "n_embd", "d_model", "hidden_dim", "vocab_size"),
            SHAPE,
        ),
        **dict.fromkeys(
            ("tokenizer", "tokenizer_path", "tokenizer_type", "tokenizer_model", "vocab_file",
             "merge_file", "tokenizer_name_or_path", "model.tokenizer_path", "hf_assets_path",
             "model.hf_assets_path"),
            TOKENIZER,
        ),
        **dict.fromkeys(("compile_topology", "compile_topology_num_slices"), CHIPS),
        **dict.fromkeys(
            ("profiler", "profile", "enable_profiling", "profiling.enable_profiling"),
            "trace a script of your own with jax.profiler",
        ),
        **dict.fromkeys(
            ("ici_sequence_parallelism", "dcn_sequence_parallelism",
             "ici_fsdp_sequence_parallelism", "ici_autoregressive_parallelism",
             "dcn_autoregressive_parallelism"),
            "axes are dp, fsdp, tp, sp (context, ici_context_parallelism) and ep",
        ),
        **dict.fromkeys(
            ("report_to", "metrics.enable_wandb", "enable_wandb"),
            "--log.wandb PROJECT logs to W&B, --log.tensorboard to TensorBoard",
        ),
        **dict.fromkeys(
            ("init_lr", "lr_decay_steps", "lr_decay_iters", "learning_rate_schedule_steps",
             "warmup_steps_fraction", "multiply_by_parameter_size", "lr_warmup_fraction",
             "warmup_ratio"),
            OTHERS_RATES,
        ),
        "trust_remote_code": "no code of a model's folder is run; meshwright models and "
        "docs/train/hugging-face.md list the architectures",
        "fsdp_reshard_after_forward": "never is --torch.no-reshard-after-forward, with --backend "
        "torch; the default is always",
        "deepspeed": "the mesh says how training is split: --mesh fsdp=-1 is ZeRO-3",
        "fsdp_config": "the mesh says how training is split: --mesh fsdp=-1",
        "split": "--eval.sequences N holds out the last N sequences of the data",
    },
)  # fmt: skip
# commands that generate and evaluate
USES_MESH = dict.fromkeys(GPUS, "--mesh says how many devices are used, as in --mesh tp=4")
# as vLLM, SGLang, Transformers and llama.cpp call them
SERVING = Words(
    renamed={
        "max_model_len": "--engine.max-length", "context_length": "--engine.max-length",
        "seq_length": "--engine.max-length", "max_seq_len": "--engine.max-length",
        "ctx_size": "--engine.max-length", "n_ctx": "--engine.max-length",
        "max_len": "--engine.max-length",
        "max_num_seqs": "--engine.max-batch", "max_running_requests": "--engine.max-batch",
        "gpu_memory_utilization": "--engine.memory-fraction",
        "mem_fraction_static": "--engine.memory-fraction",
        "max_num_batched_tokens": "--engine.chunk", "chunked_prefill_size": "--engine.chunk",
        "kv_cache_dtype": "--engine.cache", "quantization": "--engine.weights",
        "block_size": "--engine.page-size", "num_gpu_blocks_override": "--engine.pages",
        "served_model_name": "--name", "lora_modules": "--adapters", "lora_paths": "--adapters",
        "max_lora_rank": "--engine.max-adapter-rank", "max_loras": "--engine.max-adapters",
        "tool_call_parser": "--tool-calls", "allowed_origins": "--allow-origin",
        "tokenizer_path": "--tokenizer", "lm_server.host": "--host", "lm_server.port": "--port",
        "input_length": "--easylm.input-length", "top_k": "--easylm.top-k",
    },
    switches={
        "no_enable_prefix_caching": "--engine.no-prefix-cache",
        "disable_radix_cache": "--engine.no-prefix-cache",
        "disable_log_requests": "--no-access-log",
        "disable_uvicorn_access_log": "--no-access-log",
    },
    always={
        "enable_prefix_caching": "prompts that begin alike share their pages "
        "(--engine.no-prefix-cache turns it off)",
        "enable_chunked_prefill": "prompts are computed in chunks of --engine.chunk tokens",
        "enable_lora": "--adapters NAME=FOLDER serves adapters",
        "enable_auto_tool_choice": "tool calls are read in the format of the chat template "
        "(--tool-calls)",
        "lm_server.pre_compile": "all shapes are compiled before the server answers",
    },
    advice={
        **PIPELINES,
        **FIRST_WORD,
        **USES_MESH,
        "load_checkpoint": FIRST_WORD["model"],
        "trust_remote_code": "no code of a model's folder is run; meshwright models and "
        "docs/train/hugging-face.md list the architectures",
        "revision": "write it after the model's name, as in meshwright serve org/name@main",
        "enforce_eager": "every step is compiled; --engine.no-compile-first compiles a program "
        "when it is first needed",
        **dict.fromkeys(
            ("speculative_config", "speculative_model", "speculative_algorithm",
             "num_speculative_tokens"),
            "speculative decoding is not supported",
        ),
        **dict.fromkeys(
            ("swap_space", "cpu_offload_gb"),
            "weights and KV cache stay in the memory of devices; --engine.weights int8 and "
            "--engine.cache fp8 take half of it",
        ),
        "enable_expert_parallel": "experts are split by the mesh, as in --mesh ep=8",
        "load_format": "safetensors are read, of a folder or of the Hub",
        "lm_server.batch_size": "requests are batched as they come; --engine.max-batch is the "
        "limit",
    },
)  # fmt: skip
GENERATED = Words(
    renamed=dict.fromkeys(("max_new_tokens", "max_tokens", "n_predict"), "--max-new")
    | {"temp": "--temperature", "random_seed": "--seed"},
    switches={},
    always={"do_sample": "--temperature says it: 0 is greedy"},
    advice={
        **PIPELINES,
        **FIRST_WORD,
        **USES_MESH,
        "trust_remote_code": SERVING.advice["trust_remote_code"],
    },
)
EVALUATED = Words(
    {name: flag for name, flag in RENAMED.items() if flag in ("--batch", "--seq", "--data")},
    {},
    {},
    advice=PIPELINES | FIRST_WORD | USES_MESH,
)
EXPORTED = Words({}, {}, {}, advice={
    **PIPELINES,
    **FIRST_WORD,
    **dict.fromkeys(
        ("output", "outdir", "output_dir", "out_dir", "save_dir"),
        "the folder to write is the second word, as in meshwright export RUN FOLDER",
    ),
})  # fmt: skip
OF_COMMAND = {
    "serve": SERVING, "generate": GENERATED, "chat": GENERATED, "eval": EVALUATED,
    "export": EXPORTED,
}  # fmt: skip
# whole groups of flags that have no counterpart one by one
SECTIONS = {
    "train_dataset.": DATA,
    "eval_dataset.": "--eval.sequences N holds out the last N sequences of the data",
    "logger.": LOGGED, "metrics.": LOGGED,
    "tokenizer.": TOKENIZER,
    "llama.": SHAPE,
    "job.": FILE,
    "profiling.": "trace a script of your own with jax.profiler",
    "jax_distributed.": HOSTS,
    "comm.": "--hang-timeout is the one limit on waiting for other processes",
    "validation.": "--eval.every and --eval.sequences are the settings",
}  # fmt: skip
# folders below --run: of MaxText, and of torchtitan
SUBFOLDERS = ("run_name", "checkpoint.folder")
LAST_RATE = ("min_lr", "end_lr")  # ours is a fraction of the peak
# sequences of one data rank: Hugging Face, Megatron, torchtitan, the PyTorch guide
PER_RANK = frozenset({
    "per_device_train_batch_size", "per_device_batch_size", "micro_batch_size", "local_batch_size",
    "training.local_batch_size", "batch_size_per_device", "batch_size_per_rank", "mbs",
    "micro_batch", "micro_bs", "micro_bsz", "per_gpu_batch_size", "per_gpu_train_batch_size",
})  # fmt: skip
GENERATING = ("serve", "generate", "chat", "eval")  # on as many devices as the mesh has
WITH_TRAINS = ("train", "audit", "prove", "plan")  # commands that take train's settings
# flags that were here before
BEFORE = {
    "compute.no-overlap": "--compute.overlap off",
    "compute.no-scan": "--compute.layers unroll",
    "compute.scan": "--compute.layers scan",
}
# flags of a command that others give to train
OWN = {
    "plan": {"tokens", "output"},
    "prove": {"dtype"},
    "export": {"dtype", "tokenizer", "out"},
} | {
    command: {"dtype", "precision", "tokenizer", "out", "outdir", "output"}
    for command in GENERATING
}
STRATEGIES = ("auto", "ring", "allgather", "ulysses")
SHARED = {*AXES, *MESHES, *RULES, *PIPELINES}  # by all commands
OF_TRAINING = {
    *PER_RANK, *RENAMED, *SWITCHES, *TRAINING.always, *TRAINING.advice, *SUBFOLDERS,
    *LAST_RATE, "sequence_parallel", "load_llama_config",
}  # fmt: skip
# MaxText's settings are words KEY=VALUE, some of which are flags here
BARE = {"steps": "--steps", "seed": "--seed"}
KEYS = {name for name in (*OF_TRAINING, *AXES, *BARE) if "_" in name or len(name) > 3}
PREFIXES = (
    "gin.", "partitioning.", "PjitPartitioner.", "utils.", "trainer.", "Trainer.", "parallelism.",
    "training.", "optimizer.adamw_optimizer.", "optimizer.palm_optimizer.",
    "train_dataset.json_dataset.", "train_dataset.huggingface_dataset.", "metrics.",
    "lr_scheduler.", "checkpointer.",
)  # fmt: skip
# flags that take no value, or true and false
VALUELESS = {
    *SWITCHES, *SERVING.switches, *SERVING.always, "enable_checkpointing", "checkpoint.enable",
    "async_checkpointing", "async_save", "use_distributed_optimizer", "use_megatron_fsdp",
    "use_fsdp", "overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap",
    "use_flash_attn", "enable_flash_attention", "compile.enable", "initialize_jax_distributed",
    "save_optimizer_state", "do_sample", "trust_remote_code", "enforce_eager",
    "enable_expert_parallel", "enable_wandb", "metrics.enable_wandb", "enable_profiling",
    "profiling.enable_profiling", "multiply_by_parameter_size", "resume",
}  # fmt: skip
BUCKETS = ("gs://", "s3://")

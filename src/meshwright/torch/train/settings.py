"""Which settings of a run PyTorch has, and what they mean there."""

from collections.abc import Mapping
from typing import Any

from meshwright.errors import MeshwrightError, UnsupportedModelError
from meshwright.launch import flat_settings
from meshwright.models import (
    BY_TRANSFORMERS,
    PRESETS,
    QUANTIZED_BASES,
    WITH_DIMS,
    family_of,
    is_torch_only,
    override,
    to_hf_config,
    torch_only_config,
)
from meshwright.training import TrainConfig, check_length, file_rules, model_of

# settings of JAX alone, and what to do instead
_JAX_ONLY = {
    "num_partitions": "say tp=… in --mesh",
    "submesh": "say tp=… in --mesh",
    "context_parallel": "PyTorch has no sp axis here",
    "cpu_devices": "start as many processes: --processes N",
    "coordinator": "torchrun joins the processes",
    "process_id": "torchrun gives it",
    "compute.matmul": "PyTorch runs in bfloat16 here",
    "compute.fp8_skips": "PyTorch runs in bfloat16 here",
    "compute.layers": "PyTorch has no scan",
    "compute.attention": "PyTorch's scaled_dot_product_attention chooses its kernel",
    "compute.mlp_chunk": "use --compute.remat full to save memory",
    "compute.experts": "PyTorch has no ep axis here",
    "compute.capacity": "PyTorch trains no mixtures of experts here",
    "compute.overlap": "FSDP2 always overlaps",
    "trainable": "PyTorch trains every array here",
    "lora.dropout": "PyTorch trains adapters without dropout here",
    "optimizer.moments": "PyTorch keeps moments in the dtype of the weights",
    "eval.prompts": "`meshwright generate` continues texts with the weights of any checkpoint",
    "loss.z_loss": "PyTorch has no z-loss here",
    "loss.load_balance": "PyTorch trains no mixtures of experts here",
    "loss.router_z": "PyTorch trains no mixtures of experts here",
    "loss.balance_bias": "PyTorch trains no mixtures of experts here",
    "loss.chunk": "use more --accumulation or a smaller --batch to save memory",
}


def _of_transformers(config: TrainConfig) -> Any:
    """A model with transformers' own masks; None where --backend torch does not train it."""
    if config.model in PRESETS:  # which has no folder that transformers could read
        return None
    try:
        return override(torch_only_config(config.model), config.override, config.seq)
    except UnsupportedModelError:
        return None


def _check_positions(seq: int, fields: Mapping[str, Any]) -> None:
    """Raise where transformers would choose LongRoPE's factors by the documents of a batch."""
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    name = "original_max_position_embeddings"
    original = fields.get(name) or scaling.get(name)
    if (
        original is not None
        and scaling.get("rope_type", scaling.get("type")) in ("longrope", "su")
        and seq > original
    ):
        raise MeshwrightError(
            f"--seq {seq}: this model's LongRoPE has other factors above {original} positions, and "
            "transformers' network chooses them by the longest document of a micro-batch; give "
            f"--seq {original}, or leave --backend torch out, which chooses them by --seq"
        )


def check_settings(config: TrainConfig) -> Any:
    """The model's config; raise if a setting is one that PyTorch does not have."""
    now, usual = flat_settings(config), flat_settings(TrainConfig(config.model))
    for name, instead in _JAX_ONLY.items():
        if now[name] != usual[name]:
            flag = f"--{name.replace('_', '-')}"
            raise MeshwrightError(
                f"{flag} {now[name]} is a setting of the JAX backend; with --backend torch leave "
                f"it out: {instead}"
            )
    if config.lora.base in QUANTIZED_BASES:
        raise MeshwrightError(
            f"--lora.base {config.lora.base} is of the JAX backend; leave --backend torch out, or "
            "give --lora.base bfloat16"
        )
    if config.optimizer.name != "adamw":
        raise MeshwrightError(
            f"--optimizer.name {config.optimizer.name}: with --backend torch the optimizer is "
            "adamw; leave one of the two out"
        )
    if config.compute.remat not in ("none", "full"):
        raise MeshwrightError(
            f"--compute.remat {config.compute.remat}: with --backend torch give none, or full, "
            "which recomputes every layer"
        )
    if config.rules.startswith("t5x:"):
        raise MeshwrightError(
            f"--rules {config.rules} are rules for JAX arrays; with --backend torch give standard "
            "or a file of rules"
        )
    if config.compute.dtype == "float32" and config.compute.param_dtype == "bfloat16":
        raise MeshwrightError(
            "--compute.dtype float32 with --compute.param-dtype bfloat16: with --backend torch "
            "weights are not converted upwards; leave one out"
        )
    if config.compute.param_dtype == "bfloat16" and config.accumulation > 1:
        raise MeshwrightError(
            f"--accumulation {config.accumulation} with --compute.param-dtype bfloat16: with "
            "--backend torch the gradients of micro-batches would add up in bfloat16; leave one out"
        )
    file_rules(config)  # a mistake in the file is found here
    others = "for others call mw.torch.parallelize in a script"
    try:
        model: Any = model_of(config)
    except UnsupportedModelError as unsupported:
        model = _of_transformers(config)
        if model is None:
            known = ", ".join(BY_TRANSFORMERS)
            raise MeshwrightError(f"{unsupported}, and by model_type {known}; {others}") from None
    if "next-token" not in family_of(model).objectives:
        raise MeshwrightError(
            f"{config.model} is not a dense decoder, and --backend torch trains Llama, Mistral, "
            f"Qwen2 and Qwen3 models; {others}"
        )
    fields = {} if is_torch_only(model) else to_hf_config(model)
    _check_positions(config.seq, fields)
    if fields and fields["model_type"] not in WITH_DIMS:
        model = _of_transformers(config)
        if model is None:
            raise MeshwrightError(
                f"{config.model} is not a model that --backend torch trains; it trains "
                f"{', '.join((*WITH_DIMS, *BY_TRANSFORMERS))}; {others}"
            )
    if config.lora.rank and is_torch_only(model):
        raise MeshwrightError(
            f"--lora.rank {config.lora.rank}: with --backend torch LoRA adapts models of "
            f"{', '.join(WITH_DIMS)}; {config.model} is none: leave one of the two out"
        )
    if config.objective == "dpo":
        raise MeshwrightError(
            "--objective dpo is of the JAX backend; leave --backend torch out, or the objective"
        )
    if config.objective not in ("auto", "next-token"):
        raise MeshwrightError(f"--objective {config.objective}: decoders predict next tokens")
    check_length(config, model)
    return model

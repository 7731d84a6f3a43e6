"""Model families: configs, arrays, rules, forward passes, Hugging Face files."""

from meshwright.models.activations import ActivationLayouts, activation_layouts
from meshwright.models.compute import OFFLOAD, Compute, default_dtype, scans_layers
from meshwright.models.decoder import DecoderConfig, decoder_rules
from meshwright.models.divisibility import indivisible, what_fits
from meshwright.models.family import HuggingFace, ModelFamily, Serving
from meshwright.models.huggingface import SOURCE, SPECIAL_TOKENS, load_tensors
from meshwright.models.lora import ADAPTER, LoraConfig, merged, with_adapter
from meshwright.models.loss import (
    ExtraLoss,
    LmHead,
    LossConfig,
    LossSums,
    Metric,
    lm_logits,
    next_token_loss,
    target_count,
    target_weight,
)
from meshwright.models.padding import describe_padding, padded_vocab
from meshwright.models.registry import (
    FAMILIES,
    PRESETS,
    abstract_arrays,
    encodes_prompts,
    family_of,
    from_hf_config,
    hf_names,
    layer_count,
    layer_counts,
    load_adapter,
    load_hf,
    model_config,
    model_from_dict,
    model_to_dict,
    override,
    preset,
    save_adapter,
    save_hf,
    serving_of,
    to_hf_config,
)
from meshwright.models.safetensors_read import DTYPES as TENSOR_DTYPES
from meshwright.models.safetensors_read import (
    MappedFiles,
    StoredTensor,
    read_folder,
    read_header,
)
from meshwright.models.torch_only import BY_TRANSFORMERS, TransformersConfig, is_torch_only
from meshwright.models.torch_only import read_config as torch_only_config
from meshwright.models.work import Attention, Block, Stack

__all__ = [
    "ADAPTER",
    "BY_TRANSFORMERS",
    "FAMILIES",
    "OFFLOAD",
    "PRESETS",
    "SOURCE",
    "SPECIAL_TOKENS",
    "TENSOR_DTYPES",
    "ActivationLayouts",
    "Attention",
    "Block",
    "Compute",
    "DecoderConfig",
    "ExtraLoss",
    "HuggingFace",
    "LmHead",
    "LoraConfig",
    "LossConfig",
    "LossSums",
    "MappedFiles",
    "Metric",
    "ModelFamily",
    "Serving",
    "Stack",
    "StoredTensor",
    "TransformersConfig",
    "abstract_arrays",
    "activation_layouts",
    "decoder_rules",
    "default_dtype",
    "describe_padding",
    "encodes_prompts",
    "family_of",
    "from_hf_config",
    "hf_names",
    "indivisible",
    "is_torch_only",
    "layer_count",
    "layer_counts",
    "lm_logits",
    "load_adapter",
    "load_hf",
    "load_tensors",
    "merged",
    "model_config",
    "model_from_dict",
    "model_to_dict",
    "next_token_loss",
    "override",
    "padded_vocab",
    "preset",
    "read_folder",
    "read_header",
    "save_adapter",
    "save_hf",
    "scans_layers",
    "serving_of",
    "target_count",
    "target_weight",
    "to_hf_config",
    "torch_only_config",
    "what_fits",
    "with_adapter",
]

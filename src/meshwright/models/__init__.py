"""Model families: configs, arrays, rules, forward passes, Hugging Face files."""

from meshwright.models.activations import ActivationLayouts, activation_layouts
from meshwright.models.compute import OFFLOAD, Compute, default_dtype, scans_layers
from meshwright.models.decoder import DecoderConfig, decoder_rules
from meshwright.models.divisibility import indivisible, what_fits
from meshwright.models.family import Generation, HuggingFace, ModelFamily, Serving
from meshwright.models.generation import batch_multiple, decode, prefill
from meshwright.models.huggingface import SOURCE, SPECIAL_TOKENS, load_tensors
from meshwright.models.loss import LmHead, LossConfig, lm_logits, next_token_loss
from meshwright.models.padding import describe_padding, padded_vocab
from meshwright.models.registry import (
    FAMILIES,
    PRESETS,
    abstract_arrays,
    family_of,
    from_hf_config,
    generation_of,
    layer_count,
    layer_counts,
    load_hf,
    model_config,
    model_from_dict,
    model_to_dict,
    override,
    preset,
    save_hf,
    to_hf_config,
)
from meshwright.models.safetensors_read import DTYPES as TENSOR_DTYPES
from meshwright.models.safetensors_read import (
    MappedFiles,
    StoredTensor,
    read_folder,
    read_header,
)
from meshwright.models.torch_only import MODEL_TYPES as TORCH_ONLY_TYPES
from meshwright.models.torch_only import TransformersConfig
from meshwright.models.torch_only import read_config as torch_only_config
from meshwright.models.work import Attention, Block, Stack

__all__ = [
    "FAMILIES",
    "OFFLOAD",
    "PRESETS",
    "SOURCE",
    "SPECIAL_TOKENS",
    "TENSOR_DTYPES",
    "TORCH_ONLY_TYPES",
    "ActivationLayouts",
    "Attention",
    "Block",
    "Compute",
    "DecoderConfig",
    "Generation",
    "HuggingFace",
    "LmHead",
    "LossConfig",
    "MappedFiles",
    "ModelFamily",
    "Serving",
    "Stack",
    "StoredTensor",
    "TransformersConfig",
    "abstract_arrays",
    "activation_layouts",
    "batch_multiple",
    "decode",
    "decoder_rules",
    "default_dtype",
    "describe_padding",
    "family_of",
    "from_hf_config",
    "generation_of",
    "indivisible",
    "layer_count",
    "layer_counts",
    "lm_logits",
    "load_hf",
    "load_tensors",
    "model_config",
    "model_from_dict",
    "model_to_dict",
    "next_token_loss",
    "override",
    "padded_vocab",
    "prefill",
    "preset",
    "read_folder",
    "read_header",
    "save_hf",
    "scans_layers",
    "to_hf_config",
    "torch_only_config",
    "what_fits",
]

"""Model families: configs, arrays, rules, forward passes, Hugging Face files."""

from typing import TYPE_CHECKING

from meshwright.lazy import import_when_used

if TYPE_CHECKING:
    from meshwright.models.activations import ActivationLayouts, activation_layouts
    from meshwright.models.compute import (
        OFFLOAD,
        Compute,
        choose_exchange,
        default_dtype,
        scans_layers,
    )
    from meshwright.models.decoder import DecoderConfig, decoder_rules
    from meshwright.models.divisibility import indivisible, indivisible_blocks, what_fits
    from meshwright.models.family import HuggingFace, ModelFamily, Serving
    from meshwright.models.huggingface import (
        QUANTIZED,
        SOURCE,
        SPECIAL_TOKENS,
        hf_tensors,
        is_adapter,
        load_tensors,
        read_adapter_config,
        tokenizer_files_of,
    )
    from meshwright.models.huggingface import WEIGHTS as ADAPTER_WEIGHTS
    from meshwright.models.lora import (
        ADAPTER,
        DROPOUT,
        AdapterSlots,
        adapted_names,
        for_tokens,
        merged,
        quantized_base,
        sequence_noise,
        with_adapter,
    )
    from meshwright.models.loss import (
        ExtraLoss,
        LmHead,
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
        adapter_files,
        encodes_prompts,
        experts_of,
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
        parameter_counts,
        preset,
        save_adapter,
        save_hf,
        serving_of,
        to_hf_config,
    )
    from meshwright.models.safetensors_dtypes import DTYPES as TENSOR_DTYPES
    from meshwright.models.safetensors_read import INDEX as TENSOR_INDEX
    from meshwright.models.safetensors_read import SINGLE as TENSOR_FILE
    from meshwright.models.safetensors_read import (
        MappedFiles,
        StoredTensor,
        read_folder,
        read_header,
    )
    from meshwright.models.settings import QUANTIZED_BASES, LoraConfig, LossConfig
    from meshwright.models.torch_only import BY_TRANSFORMERS, TransformersConfig, is_torch_only
    from meshwright.models.torch_only import read_config as torch_only_config
    from meshwright.models.torch_types import TENSOR_DIMS, WITH_DIMS
    from meshwright.models.work import Attention, Block, Experts, Stack

__all__ = [
    "ADAPTER", "ADAPTER_WEIGHTS", "BY_TRANSFORMERS", "DROPOUT", "FAMILIES", "OFFLOAD", "PRESETS",
    "QUANTIZED", "QUANTIZED_BASES", "SOURCE", "SPECIAL_TOKENS", "TENSOR_DIMS", "TENSOR_DTYPES",
    "TENSOR_FILE", "TENSOR_INDEX", "WITH_DIMS", "ActivationLayouts", "AdapterSlots", "Attention",
    "Block", "Compute", "DecoderConfig", "Experts", "ExtraLoss", "HuggingFace", "LmHead",
    "LoraConfig", "LossConfig", "LossSums", "MappedFiles", "Metric", "ModelFamily", "Serving",
    "Stack", "StoredTensor", "TransformersConfig", "abstract_arrays", "activation_layouts",
    "adapted_names", "adapter_files", "choose_exchange", "decoder_rules", "default_dtype",
    "describe_padding", "encodes_prompts", "experts_of", "family_of", "for_tokens",
    "from_hf_config", "hf_names", "hf_tensors", "indivisible", "indivisible_blocks", "is_adapter",
    "is_torch_only", "layer_count", "layer_counts", "lm_logits", "load_adapter", "load_hf",
    "load_tensors", "merged", "model_config", "model_from_dict", "model_to_dict", "next_token_loss",
    "override", "padded_vocab", "parameter_counts", "preset", "quantized_base",
    "read_adapter_config", "read_folder", "read_header", "save_adapter", "save_hf", "scans_layers",
    "sequence_noise", "serving_of", "target_count", "target_weight", "to_hf_config",
    "tokenizer_files_of", "torch_only_config", "what_fits", "with_adapter",
]  # fmt: skip

import_when_used(__name__)

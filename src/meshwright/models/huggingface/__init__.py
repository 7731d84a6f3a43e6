"""Hugging Face folders of any family: fields of config.json, tensors read and written."""

from typing import TYPE_CHECKING

from meshwright.lazy import import_when_used

if TYPE_CHECKING:
    from meshwright.models.huggingface.arrays import HfModel, hf_arrays
    from meshwright.models.huggingface.fields import (
        HARMLESS,
        QUANTIZED,
        SOURCE,
        SPECIAL_TOKENS,
        KnownFields,
        check_fields,
        flag,
        number,
        read_hf_config,
        remembered,
        short,
        whole,
    )
    from meshwright.models.huggingface.load import (
        OnLayer,
        OnRead,
        has_tensor,
        load_folder,
        load_tensors,
    )
    from meshwright.models.huggingface.peft import (
        WEIGHTS,
        adapter_model,
        is_adapter,
        read_adapter_config,
    )
    from meshwright.models.huggingface.save import hf_tensors, save_folder, tokenizer_files_of

__all__ = [
    "HARMLESS", "QUANTIZED", "SOURCE", "SPECIAL_TOKENS", "WEIGHTS", "HfModel", "KnownFields",
    "OnLayer", "OnRead", "adapter_model", "check_fields", "flag", "has_tensor", "hf_arrays",
    "hf_tensors", "is_adapter", "load_folder", "load_tensors", "number", "read_adapter_config",
    "read_hf_config", "remembered", "save_folder", "short", "tokenizer_files_of", "whole",
]  # fmt: skip

import_when_used(__name__)

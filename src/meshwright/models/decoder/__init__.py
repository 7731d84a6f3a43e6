"""Dense decoder language models (Llama and its kin)."""

from meshwright.models.decoder.arrays import VECTORS, abstract_arrays
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.decode import decode_layouts, generation_rules
from meshwright.models.decoder.forward import (
    REMAT,
    Compute,
    default_dtype,
    hidden_states,
    lm_head,
    logits,
)
from meshwright.models.decoder.hf_config import from_hf_config
from meshwright.models.decoder.hf_fields import SOURCE, SPECIAL_TOKENS
from meshwright.models.decoder.hf_load import load_hf
from meshwright.models.decoder.layouts import activation_layouts
from meshwright.models.decoder.padding import describe_padding, padded_vocab
from meshwright.models.decoder.presets import PRESETS, preset
from meshwright.models.decoder.rules import decoder_rules, t5x_rules
from meshwright.models.decoder.sequence import sequence_plan, sequence_split

__all__ = [
    "PRESETS",
    "REMAT",
    "SOURCE",
    "SPECIAL_TOKENS",
    "VECTORS",
    "Compute",
    "DecoderConfig",
    "abstract_arrays",
    "activation_layouts",
    "decode_layouts",
    "decoder_rules",
    "default_dtype",
    "describe_padding",
    "from_hf_config",
    "generation_rules",
    "hidden_states",
    "lm_head",
    "load_hf",
    "logits",
    "padded_vocab",
    "preset",
    "sequence_plan",
    "sequence_split",
    "t5x_rules",
]

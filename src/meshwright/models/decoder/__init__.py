"""Dense decoder language models (Llama and its kin)."""

from meshwright.models.decoder.arrays import VECTORS, abstract_arrays
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.decode import decode_layouts, generation_rules
from meshwright.models.decoder.forward import (
    REMAT,
    Compute,
    hidden_states,
    logits,
    output_head,
    usual_dtype,
)
from meshwright.models.decoder.hf_config import from_hf_config
from meshwright.models.decoder.hf_fields import SOURCE, SPECIAL_TOKENS
from meshwright.models.decoder.hf_load import load_hf
from meshwright.models.decoder.layouts import activation_layouts
from meshwright.models.decoder.padding import describe_padding, padded_vocab
from meshwright.models.decoder.presets import PRESETS, preset
from meshwright.models.decoder.rules import decoder_rules, t5x_rules
from meshwright.models.decoder.sequence import row_plan, split_of_rows

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
    "describe_padding",
    "from_hf_config",
    "generation_rules",
    "hidden_states",
    "load_hf",
    "logits",
    "output_head",
    "padded_vocab",
    "preset",
    "row_plan",
    "split_of_rows",
    "t5x_rules",
    "usual_dtype",
]

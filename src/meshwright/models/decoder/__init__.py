"""Dense decoder language models (Llama and its kin)."""

from meshwright.models.decoder.arrays import VECTORS, abstract_arrays
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.forward import (
    REMAT,
    Compute,
    hidden_states,
    logits,
    output_head,
    usual_dtype,
)
from meshwright.models.decoder.layouts import activation_layouts
from meshwright.models.decoder.padding import describe_padding, padded_vocab
from meshwright.models.decoder.presets import PRESETS, preset
from meshwright.models.decoder.rules import decoder_rules, t5x_rules

__all__ = [
    "PRESETS",
    "REMAT",
    "VECTORS",
    "Compute",
    "DecoderConfig",
    "abstract_arrays",
    "activation_layouts",
    "decoder_rules",
    "describe_padding",
    "hidden_states",
    "logits",
    "output_head",
    "padded_vocab",
    "preset",
    "t5x_rules",
    "usual_dtype",
]

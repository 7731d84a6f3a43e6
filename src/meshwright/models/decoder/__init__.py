"""Dense decoder language models (Llama and its kin)."""

from meshwright.models.decoder.arrays import abstract_arrays
from meshwright.models.decoder.config import PRESETS, DecoderConfig, preset
from meshwright.models.decoder.rules import decoder_rules

__all__ = ["PRESETS", "DecoderConfig", "abstract_arrays", "decoder_rules", "preset"]

"""Model families: configuration, arrays, the rules that place them, and the forward pass."""

from meshwright.models.decoder import PRESETS, DecoderConfig, abstract_arrays, decoder_rules, preset

__all__ = ["PRESETS", "DecoderConfig", "abstract_arrays", "decoder_rules", "preset"]

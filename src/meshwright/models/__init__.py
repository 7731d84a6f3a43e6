"""Model families, described: configuration, arrays, and the rules that place them."""

from meshwright.models.decoder import PRESETS, DecoderConfig, abstract_arrays, decoder_rules, preset

__all__ = ["PRESETS", "DecoderConfig", "abstract_arrays", "decoder_rules", "preset"]

"""Model families: configuration, arrays, the rules that place them, the forward pass."""

from meshwright.models.decoder import PRESETS, DecoderConfig, abstract_arrays, decoder_rules, preset
from meshwright.models.decoder.hf_config import from_hf_config, to_hf_config
from meshwright.models.decoder.hf_load import load_hf
from meshwright.models.decoder.hf_save import save_hf
from meshwright.models.divisibility import indivisible

__all__ = [
    "PRESETS",
    "DecoderConfig",
    "abstract_arrays",
    "decoder_rules",
    "from_hf_config",
    "indivisible",
    "load_hf",
    "preset",
    "save_hf",
    "to_hf_config",
]

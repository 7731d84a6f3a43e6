"""Dense decoder language models (Llama and its kin)."""

from typing import TYPE_CHECKING

from meshwright.lazy import import_when_used

if TYPE_CHECKING:
    from meshwright.models.blocks import REMAT
    from meshwright.models.decoder.arrays import abstract_arrays
    from meshwright.models.decoder.config import DecoderConfig
    from meshwright.models.decoder.family import DECODER
    from meshwright.models.decoder.forward import forward, logits
    from meshwright.models.decoder.presets import PRESETS
    from meshwright.models.decoder.rules import decoder_rules, t5x_rules

__all__ = [
    "DECODER", "PRESETS", "REMAT", "DecoderConfig", "abstract_arrays", "decoder_rules", "forward",
    "logits", "t5x_rules",
]  # fmt: skip

import_when_used(__name__)

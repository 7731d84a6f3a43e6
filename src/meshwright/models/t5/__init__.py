"""T5: encoder-decoder language models (T5 1.0 and 1.1, FLAN-T5, UL2)."""

from typing import TYPE_CHECKING

from meshwright.lazy import import_when_used

if TYPE_CHECKING:
    from meshwright.models.t5.arrays import abstract_arrays
    from meshwright.models.t5.config import T5Config
    from meshwright.models.t5.forward import forward, logits, loss
    from meshwright.models.t5.hf_config import from_hf_config, to_hf_config
    from meshwright.models.t5.presets import PRESETS
    from meshwright.models.t5.rules import t5_rules, t5x_rules

__all__ = [
    "PRESETS", "T5Config", "abstract_arrays", "forward", "from_hf_config", "logits", "loss",
    "t5_rules", "t5x_rules", "to_hf_config",
]  # fmt: skip

import_when_used(__name__)

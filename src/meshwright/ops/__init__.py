"""What models are made of: attention, rotary embedding, norms, the fused cross-entropy."""

from meshwright.ops.chunks import over_chunks
from meshwright.ops.cross_entropy import IGNORED, cross_entropy, keeps_logit_gradients
from meshwright.ops.embedding import embed
from meshwright.ops.exchange import (
    add_up,
    gather,
    gradients_together,
    narrow,
    partial_sums,
    platform_in_force,
    spec_of,
    split_axes,
    wide_axes,
)
from meshwright.ops.mosaic import switched_on
from meshwright.ops.norms import add_bias, norm_alone, norm_beside, rms_norm
from meshwright.ops.rope import LinearScaling, Llama3Scaling, Rope, Scaling, YarnScaling, rotate

__all__ = [
    "IGNORED",
    "LinearScaling",
    "Llama3Scaling",
    "Rope",
    "Scaling",
    "YarnScaling",
    "add_bias",
    "add_up",
    "cross_entropy",
    "embed",
    "gather",
    "gradients_together",
    "keeps_logit_gradients",
    "narrow",
    "norm_alone",
    "norm_beside",
    "over_chunks",
    "partial_sums",
    "platform_in_force",
    "rms_norm",
    "rotate",
    "spec_of",
    "split_axes",
    "switched_on",
    "wide_axes",
]

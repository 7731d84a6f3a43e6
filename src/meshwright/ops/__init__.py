"""Operations of models: attention, rotary embedding, norms, fused cross-entropy."""

from typing import TYPE_CHECKING

from meshwright.lazy import import_when_used

if TYPE_CHECKING:
    from meshwright.ops.chunks import over_chunks
    from meshwright.ops.collectives import (
        all_gather,
        current_device,
        current_platform,
        drop_trivial_axes,
        nontrivial_axes,
        partial_sums,
        reduce_part,
        reduce_to,
        spec_of,
        split_axes,
        stacks,
        tie_gradients,
        untyped,
        varying_like,
    )
    from meshwright.ops.cross_entropy import (
        IGNORED,
        cross_entropy,
        keeps_logit_gradients,
        target_log_probs,
    )
    from meshwright.ops.embedding import embed
    from meshwright.ops.experts import (
        EXCHANGES,
        Mlp,
        Rows,
        exchange_by_bytes,
        expert_capacity,
        over_capacity,
        rows_per_token,
        through_experts,
    )
    from meshwright.ops.experts_triton import FEW_TOKENS, few_tokens_mlp, top_experts
    from meshwright.ops.experts_triton import unavailable as few_tokens_unavailable
    from meshwright.ops.float32_matmul import float32_matmul
    from meshwright.ops.fp8 import (
        COMPILER_OPTIONS,
        SCALE,
        Fp8Weight,
        fp8_einsum,
        plain_weights,
        weight_in_fp8,
    )
    from meshwright.ops.grouped import (
        Fp8Groups,
        fp8_groups,
        group_alignment,
        grouped_low_rank,
        grouped_matmul,
    )
    from meshwright.ops.hopper_grouped import experts_not_in_fp8
    from meshwright.ops.low_rank import Dropout, hashed, low_rank_product
    from meshwright.ops.mosaic import is_hopper, switched_on
    from meshwright.ops.norms import NormKind, add_bias, normalize
    from meshwright.ops.quantized import (
        NF4,
        NF4_BLOCK,
        QUANTIZED_DTYPES,
        Quantized,
        dequantize_nf4,
        einsum,
        quantize,
        quantized_spec,
        scaled,
    )
    from meshwright.ops.relative_bias import relative_bias, relative_bias_at
    from meshwright.ops.rope import (
        LinearScaling,
        Llama3Scaling,
        LongRopeScaling,
        Rope,
        Scaling,
        YarnScaling,
    )
    from meshwright.ops.split_norm import PartialSums, Squares, scale_for_norm, scale_unavailable

__all__ = [
    "COMPILER_OPTIONS", "EXCHANGES", "FEW_TOKENS", "IGNORED", "NF4", "NF4_BLOCK",
    "QUANTIZED_DTYPES", "SCALE", "Dropout", "Fp8Groups", "Fp8Weight", "LinearScaling",
    "Llama3Scaling", "LongRopeScaling", "Mlp", "NormKind", "PartialSums", "Quantized", "Rope",
    "Rows", "Scaling", "Squares", "YarnScaling", "add_bias", "all_gather", "cross_entropy",
    "current_device", "current_platform", "dequantize_nf4", "drop_trivial_axes", "einsum", "embed",
    "exchange_by_bytes", "expert_capacity", "experts_not_in_fp8", "few_tokens_mlp",
    "few_tokens_unavailable", "float32_matmul", "fp8_einsum", "fp8_groups", "group_alignment",
    "grouped_low_rank", "grouped_matmul", "hashed", "is_hopper", "keeps_logit_gradients",
    "low_rank_product", "nontrivial_axes", "normalize", "over_capacity", "over_chunks",
    "partial_sums", "plain_weights", "quantize", "quantized_spec", "reduce_part", "reduce_to",
    "relative_bias", "relative_bias_at", "rows_per_token", "scale_for_norm", "scale_unavailable",
    "scaled", "spec_of", "split_axes", "stacks", "switched_on", "target_log_probs",
    "through_experts", "tie_gradients", "top_experts", "untyped", "varying_like", "weight_in_fp8",
]  # fmt: skip

import_when_used(__name__)

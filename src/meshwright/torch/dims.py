"""Dim names of the parameters of Hugging Face models, for logical rules.

>>> dims_of("model.layers.0.self_attn.q_proj.weight")
'heads embed'

`heads` and `kv_heads` stand for heads × head_dim, which are one dim in PyTorch.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

from meshwright.models import WITH_DIMS

_DIMS = {
    r"(embed_tokens|lm_head)\.weight": "vocab embed",
    r"q_proj\.weight": "heads embed",
    r"q_proj\.bias": "heads",
    r"[kv]_proj\.weight": "kv_heads embed",
    r"[kv]_proj\.bias": "kv_heads",
    r"o_proj\.weight": "embed heads",
    r"(gate|up)_proj\.weight": "mlp embed",
    r"down_proj\.weight": "embed mlp",
    r"self_attn\.[qk]_norm\.weight": "head_dim",
    r"o_proj\.bias|(norm|layernorm)\.weight": "norm",
}
MERGED = ("head_dim", "layers")  # dims of our own arrays that no parameter of theirs has alone
ACTIVATIONS = ("batch", "length")  # dims that rules of JAX place, and here follow from the styles


@functools.lru_cache(maxsize=65536)
def dims_of(name: str) -> str | None:
    """The dims of a parameter by its name, None if the table does not have it."""
    for pattern, dims in _DIMS.items():
        if re.search(rf"(?:^|[._])(?:{pattern})$", name):
            return dims
    return None


def has_table(model: Any) -> bool:
    """Whether the dims of every parameter of a model are known."""
    return getattr(getattr(model, "config", None), "model_type", None) in WITH_DIMS


def head_counts(model: Any) -> Mapping[str, int]:
    """How many heads there are: a shard must hold whole heads."""
    config = getattr(model, "config", None)
    if config is None:
        return {}
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", None)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    counts = {"heads": heads, "kv_heads": kv_heads}
    return {dim: count for dim, count in counts.items() if isinstance(count, int)}

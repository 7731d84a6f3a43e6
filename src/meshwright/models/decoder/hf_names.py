"""Hugging Face's names and shapes of a decoder's weights, beside ours.

Theirs are one tensor a layer, output dims first, heads and head_dim as one dim. Ours are stacked
over layers, input dims first. Both turn pair i of a head as (x[i], x[i + head_dim / 2]), so rotary
embedding needs no reordering.
"""

import dataclasses
import math

import jax

from meshwright.layouts import ArraySpec, tree_paths
from meshwright.models.decoder.arrays import abstract_arrays
from meshwright.models.decoder.config import DecoderConfig

_LAYER = "model.layers.{layer}."
# ours: theirs, and its dims; those in brackets are one dim there
NAMES = {
    "embedding": ("model.embed_tokens.weight", "vocab embed"),
    "layers/attention/norm": (_LAYER + "input_layernorm.weight", "norm"),
    "layers/attention/wq": (_LAYER + "self_attn.q_proj.weight", "(heads head_dim) embed"),
    "layers/attention/wk": (_LAYER + "self_attn.k_proj.weight", "(kv_heads head_dim) embed"),
    "layers/attention/wv": (_LAYER + "self_attn.v_proj.weight", "(kv_heads head_dim) embed"),
    "layers/attention/wo": (_LAYER + "self_attn.o_proj.weight", "embed (heads head_dim)"),
    "layers/attention/bq": (_LAYER + "self_attn.q_proj.bias", "(heads head_dim)"),
    "layers/attention/bk": (_LAYER + "self_attn.k_proj.bias", "(kv_heads head_dim)"),
    "layers/attention/bv": (_LAYER + "self_attn.v_proj.bias", "(kv_heads head_dim)"),
    "layers/attention/bo": (_LAYER + "self_attn.o_proj.bias", "norm"),
    "layers/attention/q_norm": (_LAYER + "self_attn.q_norm.weight", "head_dim"),
    "layers/attention/k_norm": (_LAYER + "self_attn.k_norm.weight", "head_dim"),
    "layers/mlp/norm": (_LAYER + "post_attention_layernorm.weight", "norm"),
    "layers/mlp/gate": (_LAYER + "mlp.gate_proj.weight", "mlp embed"),
    "layers/mlp/up": (_LAYER + "mlp.up_proj.weight", "mlp embed"),
    "layers/mlp/down": (_LAYER + "mlp.down_proj.weight", "embed mlp"),
    "norm": ("model.norm.weight", "norm"),
    "output": ("lm_head.weight", "vocab embed"),
}


@dataclasses.dataclass(frozen=True)
class HfArray:
    """One of our arrays and the tensor, or the tensor a layer, that it is made of."""

    path: str
    name: str  # theirs, with {layer} if there is one a layer
    shape: tuple[int, ...]  # of a tensor of theirs
    unfolded: tuple[int, ...]  # the same with the dims in brackets apart
    order: tuple[int, ...]  # our dim i, without layers, is their unfolded dim order[i]
    layers: int | None  # how many tensors, None for one that is no layer's

    @property
    def names(self) -> list[str]:
        """Theirs, in the order of our dim `layers`."""
        if self.layers is None:
            return [self.name]
        return [self.name.format(layer=layer) for layer in range(self.layers)]


def hf_arrays(config: DecoderConfig) -> dict[str, HfArray]:
    """Every array of the model by path, in the order a Hugging Face model has them."""
    specs = _specs_by_path(config)
    return {path: _hf_array(path, specs[path]) for path in NAMES if path in specs}


def _specs_by_path(config: DecoderConfig) -> dict[str, ArraySpec]:
    tree = abstract_arrays(config)
    return dict(zip(tree_paths(tree), jax.tree.leaves(tree), strict=True))


def _hf_array(path: str, spec: ArraySpec) -> HfArray:
    name, text = NAMES[path]
    size = dict(zip(spec.dims, spec.shape, strict=True))
    folds = [part.split() for part in _parts(text)]
    unfolded = [dim for fold in folds for dim in fold]
    ours = [dim for dim in spec.dims if dim != "layers"]
    return HfArray(
        path=path,
        name=name,
        shape=tuple(math.prod(size[dim] for dim in fold) for fold in folds),
        unfolded=tuple(size[dim] for dim in unfolded),
        order=tuple(unfolded.index(str(dim)) for dim in ours),
        layers=size.get("layers"),
    )


def _parts(text: str) -> list[str]:
    """`"(heads head_dim) embed"` as `["heads head_dim", "embed"]`."""
    parts: list[str] = []
    for i, piece in enumerate(text.replace(")", "(").split("(")):
        parts += [piece] if i % 2 else piece.split()
    return parts

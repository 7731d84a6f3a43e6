"""A T5's Hugging Face folder, read and written: their names and dims beside ours."""

from meshwright.models.huggingface import SOURCE, HfModel, hf_arrays
from meshwright.models.t5.arrays import abstract_arrays
from meshwright.models.t5.config import T5Config
from meshwright.models.t5.hf_config import HEAD, to_hf_config

_EMBEDDING = "shared.weight"


def _names(config: T5Config) -> dict[str, tuple[str, str]]:
    """Ours to theirs, and its dims; those in brackets are one dim there."""
    names = {"embedding": (_EMBEDDING, "vocab embed")}
    for stack, blocks in (
        ("encoder", {"attention": "SelfAttention"}),
        ("decoder", {"attention": "SelfAttention", "cross_attention": "EncDecAttention"}),
    ):
        names[f"{stack}/relative_bias"] = (
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            "relpos_buckets heads",
        )
        for number, (ours, theirs) in enumerate((blocks | {"mlp": "DenseReluDense"}).items()):
            path, block = f"{stack}/layers/{ours}", f"{stack}.block.{{layer}}.layer.{number}."
            names[f"{path}/norm"] = (block + "layer_norm.weight", "norm")
            names |= {
                f"{path}/{name}": (f"{block}{theirs}.{letter}.weight", dims)
                for name, letter, dims in (_mlp(config) if ours == "mlp" else _ATTENTION)
            }
        names[f"{stack}/norm"] = (f"{stack}.final_layer_norm.weight", "norm")
    names["output"] = (HEAD, "vocab embed")
    return names


_ATTENTION = (
    ("wq", "q", "(heads head_dim) embed"),
    ("wk", "k", "(kv_heads head_dim) embed"),
    ("wv", "v", "(kv_heads head_dim) embed"),
    ("wo", "o", "embed (heads head_dim)"),
)


def _mlp(config: T5Config) -> tuple[tuple[str, str, str], ...]:
    first = (
        (("gate", "wi_0", "mlp embed"), ("up", "wi_1", "mlp embed"))
        if config.gated
        else (("up", "wi", "mlp embed"),)
    )
    return (*first, ("down", "wo", "embed mlp"))


def hf_model(config: T5Config) -> HfModel:
    """What a folder of this config holds."""
    specs = abstract_arrays(config)
    tied = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    tied += [HEAD] if config.tied_embeddings else []
    return HfModel(
        specs=specs,
        arrays=hf_arrays(specs, _names(config)),
        write_config=lambda dtype: to_hf_config(config, dtype=dtype),
        source=(config.hf_config or {}).get(SOURCE),
        copies=dict.fromkeys(tied, _EMBEDDING),
        # of the first files that were published; no model uses it
        ignored=("EncDecAttention.relative_attention_bias.weight",),
    )

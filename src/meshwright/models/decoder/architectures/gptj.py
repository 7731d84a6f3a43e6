"""GPT-J: attention and mlp in parallel after one norm; pairs of neighbours are rotated."""

from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.models.decoder.architecture import Architecture, Field, Fields, Part
from meshwright.models.decoder.architectures.gpt2 import INNER
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.hf_parts import ONE_KEY_EACH, activation
from meshwright.models.huggingface import whole
from meshwright.ops import Rope


def _rope(fields: Fields, ours: Fields, where: str) -> dict[str, Any]:
    head_dim = ours["head_dim"]
    dims = whole({"rotary_dim": fields.get("rotary_dim", 64)}, "rotary_dim", where)
    if dims > head_dim:
        default = "" if "rotary_dim" in fields else ", as it is where config.json does not say it,"
        raise MeshwrightError(
            f"{where}: rotary_dim={dims}{default} is more than the {head_dim} dims of a head; "
            f"{head_dim} rotates whole heads"
        )
    return {"rope": Rope(dims=None if dims == head_dim else dims, interleaved=True)}


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    dims = None if config.rope is None else config.rope.dims
    return {"rotary_dim": dims or config.head_dim}


_LAYER = "transformer.h.{layer}."

GPTJ = Architecture(
    "GPTJForCausalLM",
    "gptj",
    fields={
        "vocab": Field("vocab_size"),
        "embed": Field("n_embd"),
        "layers": Field("n_layer"),
        "heads": Field("n_head"),
        "max_seq": Field("n_positions", 2048),
        "norm_eps": Field("layer_norm_epsilon", 1e-5),
    },
    tensors={
        "embedding": ("transformer.wte.weight", "vocab embed"),
        "layers/attention/norm": (_LAYER + "ln_1.weight", "norm"),
        "layers/attention/norm_bias": (_LAYER + "ln_1.bias", "norm"),
        "layers/attention/wq": (_LAYER + "attn.q_proj.weight", "(heads head_dim) embed"),
        "layers/attention/wk": (_LAYER + "attn.k_proj.weight", "(kv_heads head_dim) embed"),
        "layers/attention/wv": (_LAYER + "attn.v_proj.weight", "(kv_heads head_dim) embed"),
        "layers/attention/wo": (_LAYER + "attn.out_proj.weight", "embed (heads head_dim)"),
        "layers/mlp/up": (_LAYER + "mlp.fc_in.weight", "mlp embed"),
        "layers/mlp/up_bias": (_LAYER + "mlp.fc_in.bias", "mlp"),
        "layers/mlp/down": (_LAYER + "mlp.fc_out.weight", "embed mlp"),
        "layers/mlp/down_bias": (_LAYER + "mlp.fc_out.bias", "norm"),
        "norm": ("transformer.ln_f.weight", "norm"),
        "norm_bias": ("transformer.ln_f.bias", "norm"),
        "output": ("lm_head.weight", "vocab embed"),
        "output_bias": ("lm_head.bias", "vocab"),
    },
    parts=(
        INNER,
        ONE_KEY_EACH,
        Part(frozenset({"rotary_dim"}), _rope, _write_rope),
        activation("activation_function", "gelu_new"),
    ),
    fixed={
        "norm": "layer",
        "norm_bias": True,
        "gated": False,
        "mlp_bias": True,
        "parallel": True,
        "shared_norm": True,
        "head_bias": True,
    },
    only={"scale_attn_weights": (True,), "tie_word_embeddings": (False,), "rotary": (True,)},
    unused=frozenset(
        {"attn_pdrop", "embd_pdrop", "resid_pdrop", "gradient_checkpointing"}
        | {
            f"summary_{one}"
            for one in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")
        }
    ),
    prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
)

"""SmolLM3: Llama with every fourth layer without rotary positions."""

from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.models.decoder.architecture import Architecture, Field, Fields, Part
from meshwright.models.decoder.architectures.llama import FIELDS, ONLY, TENSORS, WRITTEN
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.hf_parts import OPTIONAL_BIAS, heads, no_window
from meshwright.models.decoder.hf_rope import rope_from_hf, rope_to_hf
from meshwright.models.huggingface import short, whole


def _rope(fields: Fields, ours: Fields, where: str) -> dict[str, Any]:
    rope = rope_from_hf(fields, ours["max_seq"], ours["head_dim"], where, 2000000.0)
    every, layers = whole(fields, "no_rope_layer_interval", where, 4), ours["layers"]
    rotated = fields.get("no_rope_layers")  # 1 where positions are rotated, in spite of the name
    if rotated is None:
        rotated = [int((i + 1) % every != 0) for i in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers or not {*rotated} <= {0, 1}:
        raise MeshwrightError(
            f"{where}: no_rope_layers={short(rotated)} must be a list with 0 or 1 for each of the "
            f"{layers} layers"
        )
    return {"pattern": [{"rope": rope if one else None} for one in rotated]}


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    ropes = [kind.attention.rope for kind in config.pattern]
    listed = [int(ropes[i % len(ropes)] is not None) for i in range(config.layers)]
    first = next((rope for rope in ropes if rope is not None), None)
    return rope_to_hf(first, config.head_dim) | {"no_rope_layers": listed}


_ROPE_FIELDS = frozenset(
    {"rope_theta", "rope_scaling", "rope_parameters", "no_rope_layers", "no_rope_layer_interval"}
)

SMOLLM3 = Architecture(
    "SmolLM3ForCausalLM",
    "smollm3",
    FIELDS
    | {
        "max_seq": Field("max_position_embeddings", 32768),
        "tied_embeddings": Field("tie_word_embeddings", True),
    },
    TENSORS,
    parts=(
        heads(),
        OPTIONAL_BIAS,
        no_window("SmolLM3ForCausalLM"),
        Part(_ROPE_FIELDS, _rope, _write_rope),
    ),
    written=WRITTEN | {"pad_token_id": None},
    only=ONLY,
)

"""T5 as a model family."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.lazy import when_called
from meshwright.models.activations import ActivationLayouts, attention_split
from meshwright.models.blocks import REMAT
from meshwright.models.family import HuggingFace, ModelFamily, Serving
from meshwright.models.overrides import override_fields
from meshwright.models.t5.arrays import abstract_arrays
from meshwright.models.t5.config import T5Config
from meshwright.models.t5.hf_config import ARCHITECTURE, MODEL_TYPE, from_hf_config, to_hf_config
from meshwright.models.t5.hf_folder import hf_model
from meshwright.models.t5.presets import PRESETS
from meshwright.models.t5.rules import serving_rules, t5_rules, t5x_rules
from meshwright.models.work import Attention, Stack, attention_block, mlp_block
from meshwright.ops.attention import EVERYTHING, Mask, Split


def sequence_split(
    config: T5Config, layouts: ActivationLayouts, sizes: Mapping[str, int], length: int
) -> Split:
    """How the encoder's attention is split; its length is not."""
    split = attention_split(config, layouts, sizes, length, EVERYTHING)
    if split.ways > 1:
        raise MeshwrightError(
            "a T5 cannot be trained with context parallelism: its decoder has another length than "
            "its encoder, and a ring adds no bias to scores; set sp=1 and use fsdp and tp"
        )
    return dataclasses.replace(split, biased=True)


def _override(config: T5Config, changes: Mapping[str, str], seq: int) -> T5Config:
    """Relative positions have no end: a longer sequence needs no change."""
    changed: T5Config = override_fields(config, changes)
    return dataclasses.replace(changed, max_seq=max(changed.max_seq, seq))


def _work(config: T5Config) -> tuple[Stack, ...]:
    mlp = mlp_block(config.gated)
    to_own = Attention(EVERYTHING, biased=True)
    causal = Attention(Mask(), biased=True)
    to_encoder = Attention(EVERYTHING, keys_from="encoder_tokens")
    cross = attention_block(to_encoder, "cross_attention", enters="middle")
    return (
        Stack(
            ("encoder", "layers"),
            "encoder_tokens",
            (attention_block(to_own), mlp),
            config.encoder_layers,
        ),
        Stack(
            ("decoder", "layers"),
            "tokens",
            (attention_block(causal), cross, mlp),
            config.decoder_layers,
        ),
    )


def _to_dict(config: T5Config) -> dict[str, Any]:
    data = dataclasses.asdict(config)
    del data["hf_config"]
    return data


_FORWARD, _SERVING = "meshwright.models.t5.forward", "meshwright.models.t5.serving"
T5 = ModelFamily(
    name="t5",
    config=T5Config,
    presets=PRESETS,
    arrays=abstract_arrays,
    rules=t5_rules,
    t5x_rules=t5x_rules,
    batch_fields=("encoder_tokens", "encoder_segments", "tokens", "targets"),
    objectives=("span-corruption", "prefix-lm", "examples"),
    loss=when_called(_FORWARD, "loss"),
    forward=when_called(_FORWARD, "forward"),
    lm_head=when_called(_FORWARD, "lm_head"),
    sequence_split=sequence_split,
    remat=REMAT,
    work=_work,
    flops=lambda config, lengths: config.flops(lengths["encoder_tokens"], lengths["tokens"]),
    split_dims={dim: dim for dim in ("experts", "heads", "mlp", "embed")},
    override=_override,
    to_dict=_to_dict,
    from_dict=lambda data: T5Config(**data),
    hugging_face=HuggingFace(
        architectures={ARCHITECTURE: MODEL_TYPE},
        read_config=from_hf_config,
        write_config=to_hf_config,
        model=hf_model,
    ),
    serving=Serving(
        rules=serving_rules,
        weights=when_called(_SERVING, "serving_weights"),
        layers=lambda config: config.decoder_layers,
        state=when_called("meshwright.models.t5.state", "T5PagedCache"),
        prompt_keys=when_called(_SERVING, "prompt_keys"),
        decoder_prompt=lambda config, prompt: (config.start_token,),
        biased=True,
    ),
)

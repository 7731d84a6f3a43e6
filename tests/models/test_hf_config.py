"""A Hugging Face config.json is read to the letter: honoured, known not to matter, or an error."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import MeshwrightError
from meshwright.models.decoder import PRESETS, DecoderConfig
from meshwright.models.decoder.architectures import ARCHITECTURES
from meshwright.models.decoder.hf_config import from_hf_config, to_hf_config
from meshwright.models.huggingface import HARMLESS
from meshwright.ops.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling

SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip

# as published, every field
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-2-7b": {
        "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
        "transformers_version": "4.31.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA3, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
    },
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
        "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28,
        "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False,
        "use_sliding_window": False, "vocab_size": 152064,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
        "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_its_preset(name: str) -> None:
    assert from_hf_config(PUBLISHED[name]) == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_goes_out_and_comes_back(name: str) -> None:
    assert from_hf_config(to_hf_config(PRESETS[name])) == PRESETS[name]


factors = st.floats(1.0, 64.0)
scalings = st.one_of(
    st.none(),
    st.builds(LinearScaling, factors),
    st.builds(Llama3Scaling, factors, st.floats(0.5, 2.0), st.floats(2.5, 8.0), st.integers(1, 10**5)),
    st.builds(YarnScaling, factors, st.integers(1, 10**5), st.floats(8.0, 64.0), st.floats(0.5, 4.0), st.none() | factors),
)  # fmt: skip
features = st.sampled_from(
    # qkv_bias, output_bias, qk_norm, may have a window
    [(False, False, False, True), (True, True, False, False), (True, False, False, True),
     (False, False, True, True), (True, True, True, True)]
)  # fmt: skip


@st.composite
def configs(draw: st.DrawFn) -> DecoderConfig:
    qkv_bias, output_bias, qk_norm, windowed = draw(features)
    kv_heads, groups = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    heads = kv_heads * groups
    return DecoderConfig(
        vocab=draw(st.integers(1, 200000)),
        layers=draw(st.integers(1, 200)),
        # Llama's heads divide embed; the other families are free
        embed=heads * draw(st.integers(1, 64))
        if output_bias and not qk_norm
        else draw(st.integers(1, 10**5)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 128)),
        mlp=draw(st.integers(1, 10**5)),
        tied_embeddings=draw(st.booleans()),
        max_seq=draw(st.integers(1, 10**6)),
        rope=Rope(draw(st.floats(1.5, 1e8)), draw(scalings)),
        norm_eps=draw(st.sampled_from([1e-5, 1e-6, 3e-7])),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        sliding_window=draw(st.none() | st.integers(1, 10**5)) if windowed else None,
    )


@given(configs())
def test_any_config_goes_out_as_json_and_comes_back(config: DecoderConfig) -> None:
    assert from_hf_config(json.loads(json.dumps(to_hf_config(config)))) == config


@pytest.mark.parametrize(
    ("change", "features"),
    [
        ({"output_bias": True}, "qkv_bias=False, output_bias=True"),
        ({"qkv_bias": True, "qk_norm": True}, "qkv_bias=True, output_bias=False, qk_norm=True"),
        ({"qkv_bias": True, "output_bias": True, "sliding_window": 8}, "sliding_window=8"),
    ],
)
def test_what_no_family_has_is_refused(change: dict[str, Any], features: str) -> None:
    config = DecoderConfig(64, 2, 32, 4, 2, 8, 48, **change)
    with pytest.raises(MeshwrightError, match=features):
        to_hf_config(config)


def test_heads_that_do_not_divide_embed_go_out_as_mistral() -> None:
    config = DecoderConfig(64, 2, 33, 4, 2, 8, 48)
    fields = to_hf_config(config)
    assert (fields["architectures"], fields["sliding_window"]) == (["MistralForCausalLM"], None)


REFERENCE = Path(__file__).parent / "hf_reference"


@pytest.mark.parametrize("name", sorted(path.name for path in REFERENCE.iterdir()))
def test_a_config_that_is_read_and_written_keeps_every_field(name: str) -> None:
    fields = json.loads((REFERENCE / name / "config.json").read_text())
    fields |= {"bos_token_id": 3, "eos_token_id": [4, 5], "pad_token_id": 6}
    assert to_hf_config(from_hf_config(fields)) == fields
    assert to_hf_config(from_hf_config(fields | {"_name_or_path": "a/b"})) == fields


@pytest.mark.parametrize("name", sorted(path.name for path in REFERENCE.iterdir()))
def test_a_config_that_is_changed_keeps_its_architecture(name: str) -> None:
    """Other sizes and a longer context, as a run may ask for."""
    fields = json.loads((REFERENCE / name / "config.json").read_text())
    fields |= {"bos_token_id": 3, "eos_token_id": [4, 5], "initializer_range": 0.5}
    config = from_hf_config(fields)
    longer = dataclasses.replace(config, max_seq=512, rope=Rope(77.0), layers=3)
    written = to_hf_config(longer, dtype="float32")
    for kept in ("architectures", "model_type", "bos_token_id", "eos_token_id"):
        assert written[kept] == fields[kept]
    assert written["initializer_range"] == 0.5
    assert written["torch_dtype" if "torch_dtype" in fields else "dtype"] == "float32"
    assert from_hf_config(written) == longer


def test_a_mistral_without_a_window_stays_a_mistral() -> None:
    fields = SIZES | MISTRAL | {"sliding_window": None}
    for config in (from_hf_config(fields), PRESETS["mistral-7b-v0.3"]):
        written = to_hf_config(dataclasses.replace(config, max_seq=64))
        assert written["architectures"] == ["MistralForCausalLM"]
        assert (written["model_type"], written["sliding_window"]) == ("mistral", None)
    # what the source's architecture cannot say is said by one that can
    biased = dataclasses.replace(from_hf_config(fields), qkv_bias=True)
    assert to_hf_config(biased)["model_type"] == "qwen2"


def test_where_a_config_came_from_is_no_part_of_the_model() -> None:
    config = from_hf_config(SIZES | {"eos_token_id": 3})
    plain = dataclasses.replace(config, hf_config=None)
    assert (config, hash(config), repr(config)) == (plain, hash(plain), repr(plain))


def test_what_is_said_beside_the_model_is_kept() -> None:
    fields = to_hf_config(PRESETS["tiny"], dtype="float32", extra={"eos_token_id": 7})
    assert (fields["torch_dtype"], fields["eos_token_id"]) == ("float32", 7)
    with pytest.raises(MeshwrightError, match="'hidden_size' could change the model"):
        to_hf_config(PRESETS["tiny"], extra={"hidden_size": 3})


def read(**fields: Any) -> DecoderConfig:
    return from_hf_config(SIZES | fields)


QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda one: one.model_type)
def test_every_field_that_is_left_out_is_what_transformers_takes(architecture: Any) -> None:
    transformers: Any = pytest.importorskip("transformers", reason="the outside reader")
    kind = {"architectures": [architecture.name], "model_type": architecture.model_type}
    usual = transformers.AutoConfig.for_model(architecture.model_type).to_dict()
    required = {one.name for one in architecture.fields.values() if one.default is None}
    said = {name: usual[name] for name in required | {"num_key_value_heads"} if name in usual}
    theirs = transformers.AutoConfig.for_model(**kind, **said).to_dict()
    assert from_hf_config(kind | said) == from_hf_config(theirs)


def test_what_gptj_cannot_rotate_is_refused() -> None:
    small = {
        "architectures": ["GPTJForCausalLM"], "vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 4,
    }  # fmt: skip
    assert from_hf_config(small | {"rotary_dim": 8}).rope.dims is None
    for said, message in (
        ({}, r"rotary_dim=64, as .* does not say it, is more than the 8 dims of a head"),
        ({"rotary_dim": 10}, r"rotary_dim=10 is more than the 8 dims of a head; 8 rotates"),
        ({"rotary_dim": None}, "rotary_dim is missing; it must be a whole number"),
    ):
        with pytest.raises(MeshwrightError, match=message):
            from_hf_config(small | said)


def test_what_is_left_out_is_what_transformers_takes() -> None:
    config = read()
    assert (config.head_dim, config.max_seq, config.norm_eps) == (8, 2048, 1e-6)
    assert (config.rope, config.tied_embeddings) == (Rope(10000.0), False)
    assert from_hf_config({k: v for k, v in SIZES.items() if "key_value" not in k}).kv_heads == 4
    assert read(num_key_value_heads=None).kv_heads == 4
    assert read(**QWEN3).head_dim == 128
    assert (read(**MISTRAL).sliding_window, read(**MISTRAL).max_seq) == (4096, 131072)
    assert read(**QWEN2).sliding_window is None
    without = {k: v for k, v in SIZES.items() if k != "architectures"}
    assert from_hf_config(without) == config


def test_rotary_embedding_is_read_in_both_styles() -> None:
    llama3 = Rope(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    assert read(rope_theta=500000.0, rope_scaling=LLAMA3).rope == llama3
    assert read(rope_parameters=LLAMA3 | {"rope_theta": 500000}).rope == llama3
    linear = {"type": "linear", "factor": 2}
    assert read(rope_scaling=linear).rope == Rope(10000.0, LinearScaling(2.0))
    assert read(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope == Rope(5e5)
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert read(rope_scaling=yarn).rope.scaling == YarnScaling(4.0, 512)
    assert read(rope_scaling=yarn | {"attention_factor": 1.5}).rope.magnitude == 1.5
    del yarn["original_max_position_embeddings"]
    assert read(rope_scaling=yarn, max_position_embeddings=64).rope.scaling == YarnScaling(4.0, 64)
    outside = read(rope_scaling=yarn, original_max_position_embeddings=32).rope.scaling
    assert outside == YarnScaling(4.0, 32)
    kinds = [read(**PHI3, rope_scaling=LONG | {"type": kind}) for kind in ("su", "longrope")]
    assert kinds[0] == kinds[1]


PHI3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
LINEAR = {"rope_type": "linear", "factor": 8.0}
LONG = {"type": "longrope", "short_factor": [1.0, 1.5, 2, 3], "long_factor": [2, 4, 8, 9.5]}
PLAIN = {"rope_type": "default"}
TWO_ROPES = {
    "sliding_attention": PLAIN | {"rope_theta": 50.0}, "full_attention": PLAIN | {"rope_theta": 3e5},
}  # fmt: skip
OPEN_ROPES = {"sliding_attention": PLAIN, "full_attention": PLAIN}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (PHI3, {"original_max_position_embeddings": 4096}),  # without a scaling
        (PHI3, {"original_max_position_embeddings": 32, "rope_scaling": LONG}),
        (PHI3, {"rope_scaling": LONG, "max_position_embeddings": 8192}),
        (PHI3, {"rope_scaling": LONG | {"factor": 3.0, "attention_factor": 1.5}}),
        (GEMMA3, {}),
        (GEMMA3, {"rope_scaling": LINEAR, "rope_theta": 3e5, "rope_local_base_freq": 7.0}),
        (GEMMA3, {"rope_parameters": TWO_ROPES, "rope_scaling": LINEAR}),
        (GEMMA3, {"rope_parameters": TWO_ROPES, "rope_theta": 9.0, "rope_local_base_freq": 7.0}),
        (GEMMA3, {"rope_parameters": OPEN_ROPES, "rope_theta": 3e5, "rope_local_base_freq": 7.0}),
        (GEMMA3, {"rope_parameters": OPEN_ROPES, "rope_scaling": LINEAR | {"rope_theta": 5e5}}),
    ],
)
def test_rotary_embedding_is_read_as_transformers_reads_it(
    kind: dict[str, Any], fields: dict[str, Any]
) -> None:
    transformers: Any = pytest.importorskip("transformers", reason="the outside reader")
    own = {**SIZES, "num_hidden_layers": 6, **kind, **fields}
    # by JSON: it changes the objects it is given
    theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(own))).to_dict()
    assert "rope_scaling" not in theirs
    assert from_hf_config(own) == from_hf_config(theirs)


def test_biases_are_those_of_the_family() -> None:
    def biases(config: DecoderConfig) -> tuple[bool, bool, bool]:
        return config.qkv_bias, config.output_bias, config.qk_norm

    assert biases(read()) == (False, False, False)
    assert biases(read(attention_bias=True)) == (True, True, False)
    assert biases(read(**QWEN2)) == (True, False, False)
    assert biases(read(**QWEN3)) == (False, False, True)
    assert biases(read(**QWEN3, attention_bias=True)) == (True, True, True)


FULL, SLIDING = ["full_attention"] * 4, ["sliding_attention"] * 4


def test_a_sliding_window_is_that_of_every_layer() -> None:
    assert read(**MISTRAL, sliding_window=7).sliding_window == 7
    assert read(**MISTRAL, sliding_window=None).sliding_window is None
    used = QWEN2 | {"use_sliding_window": True, "sliding_window": 7}
    assert read(**QWEN2, sliding_window=7, max_window_layers=0).sliding_window is None
    assert read(**used, max_window_layers=0).sliding_window == 7
    assert read(**used, max_window_layers=4).sliding_window is None
    assert read(**used, layer_types=SLIDING).sliding_window == 7
    assert read(**used, max_window_layers=0, layer_types=FULL).sliding_window is None
    assert read(layer_types=FULL).sliding_window is None


BAD: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GemmaForCausalLM"]}, r"GemmaForCausalLM.*supported are LlamaForCausalLM, Mistral.*Qwen3ForCausalLM"),
    ({"architectures": ["LlamaForCausalLM", "X"]}, "supported are"),
    ({"architectures": None, "model_type": "bloom"}, "model_type 'bloom'; supported are"),
    ({"architectures": None, "model_type": None}, "architectures is missing"),
    ({"model_type": "qwen2"}, "disagree"),
    ({"logit_scale": 0.5}, r"logit_scale=0\.5 is not a field this model honours.*remove it"),
    ({"rope_thetas": 1.0}, "did you mean 'rope_theta'"),
    ({"mlp_bias": True}, "mlp_bias=True is not honoured, only False"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' is not honoured, only 'silu'"),
    ({"attention_dropout": 0.1}, r"attention_dropout=0\.1 is not honoured, only 0"),
    ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5 is not honoured"),
    ({"quantization_config": {"bits": 4}}, "weights are quantized"),
    ({"vocab_size": None}, "vocab_size is missing"),
    ({"vocab_size": True}, "vocab_size=True must be a whole number from 1"),
    ({"hidden_size": 30.5}, r"hidden_size=30\.5 must be a whole number"),
    ({"hidden_size": 30}, "hidden_size=30 is not a multiple of num_attention_heads=4"),
    ({"num_key_value_heads": 3}, "heads=4 cannot share kv_heads=3"),
    ({"head_dim": 7}, "head_dim=7 is odd"),
    ({"rms_norm_eps": 0}, "rms_norm_eps=0 must be a number above 0"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' must be true or false"),
    ({"rope_theta": 0.5}, r"rope_theta=0\.5 must be above 1"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported; only default, linear, llama3, yarn, longrope are"),
    ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
    (PHI3 | {"rope_scaling": LONG | {"long_factor": 3}}, "long_factor=3 must be a list of numbers"),
    (PHI3 | {"rope_scaling": LONG | {"long_factor": [1.0, 2.0]}}, "LongRoPE with 2 long factors: heads rotate 4 pairs"),
    (PHI3 | {"rope_scaling": LONG | {"short_factor": [1.0, 2.0, 0, 1]}}, "short_factor=0 must be a number above 0"),
    (PHI3 | {"rope_scaling": LINEAR}, "rope_type 'linear' is not supported; only default, longrope are, of this"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, "beta_fast=3 is not a setting of rope_type 'linear'"),
    ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "said twice"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": "no"}}, "truncate='no'"),
    ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor=1 must be above"),
    ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 1e5}}, "rope_parameters and rope_scaling disagree"),
    ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e5}}, "rope_theta of the rotary embedding is said twice"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e5}}}, "full_attention="),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor=0\.5"),
    ({"original_max_position_embeddings": 64}, "means nothing with rope_type 'default'"),
    (GEMMA3 | {"rope_parameters": TWO_ROPES, "rope_scaling": 2.0}, r"rope_scaling=2\.0 must be an object"),
    ({"rope_scaling": 2.0}, r"rope_scaling=2\.0 must be an object"),
    ({"sliding_window": 16}, "sliding_window=16 is not honoured: LlamaForCausalLM has none"),
    ({"layer_types": SLIDING}, "disagree"),
    (MISTRAL | {"attention_bias": True}, "MistralForCausalLM has no biases"),
    (MISTRAL | {"num_key_value_heads": 2, "use_sliding_window": False}, "set sliding_window to null"),
    (MISTRAL | {"layer_types": FULL}, "disagree"),
    (QWEN2 | {"attention_bias": False}, "always has q, k and v biases"),
    (QWEN2 | {"use_sliding_window": True, "max_window_layers": 1}, "3 of 4 layers have a sliding window"),
    (QWEN2 | {"use_sliding_window": True, "layer_types": FULL[:2] + SLIDING[:2]}, "2 of 4 layers"),
    (QWEN2 | {"layer_types": SLIDING}, "disagree"),
    (QWEN3_MOE | {"use_sliding_window": True, "max_window_layers": 4}, "max_window_layers=4 is not honoured"),
    (QWEN2 | {"layer_types": FULL[:3]}, "each of the 4 layers"),
    (QWEN2 | {"layer_types": ["linear_attention"] * 4}, "'linear_attention' is not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_what_is_not_honoured_is_an_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(MeshwrightError, match=message):
        read(**fields)


def test_a_window_that_is_switched_off_is_none() -> None:
    assert read(sliding_window=16, use_sliding_window=False) == read()


def test_families_other_than_llama_must_say_their_key_heads() -> None:
    silent = {k: v for k, v in (SIZES | QWEN2).items() if k != "num_key_value_heads"}
    with pytest.raises(MeshwrightError, match="num_key_value_heads is missing"):
        from_hf_config(silent)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda one: one.model_type)
def test_a_field_is_in_one_list_only(architecture: Any) -> None:
    known = architecture.known
    assert not known.honoured & HARMLESS
    assert not known.only.keys() & (known.honoured | HARMLESS)


def test_a_file_and_its_folder_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    assert from_hf_config(tmp_path) == from_hf_config(tmp_path / "config.json") == read()
    assert from_hf_config(str(tmp_path)) == read()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not readable JSON"),
        (b"\xff\xfe", "is not readable JSON"),
        (b"[1]", "a config.json is a JSON object"),
        (b"[" * 100_000, "is not readable JSON"),
        (b"{}", "config.json: architectures is missing"),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(MeshwrightError, match=message) as raised:
        from_hf_config(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_a_config_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match=r"config\.json is not there"):
        from_hf_config(tmp_path)
    with pytest.raises(MeshwrightError, match="is not there"):
        from_hf_config(tmp_path / "nothing")


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 10**6) | st.floats() | st.text(max_size=5) | st.just("yarn"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
KNOWN = {name for one in ARCHITECTURES for name in (*one.known.honoured, *one.known.only)}
some_fields = st.dictionaries(
    st.sampled_from(sorted(KNOWN | {"dtype", "other"})), anything, max_size=4
)
some_rope = st.dictionaries(
    st.sampled_from(["rope_type", "type", "factor", "rope_theta", "beta_fast", "mscale", "low_freq_factor"]),
    anything,
    max_size=4,
)  # fmt: skip


@given(some_fields, st.none() | some_rope, st.sampled_from([{}, QWEN2, QWEN3, MISTRAL]))
def test_any_fields_give_a_config_or_a_meshwright_error(
    fields: dict[str, Any], rope: dict[str, Any] | None, family: dict[str, Any]
) -> None:
    try:
        config = from_hf_config(SIZES | {"rope_scaling": rope} | family | fields)
    except MeshwrightError as error:
        assert len(str(error)) > 10
        return
    assert from_hf_config(to_hf_config(config)) == config


@pytest.mark.parametrize("source", [None, 3, b"x", object(), "\0", {"a": object()}, {3: 4}, []])
def test_anything_else_is_an_error(source: Any) -> None:
    with pytest.raises(MeshwrightError):
        from_hf_config(source)

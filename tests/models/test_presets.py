"""Presets are what their publishers say: parameter counts, and what the config files hold."""

import math
import re

import jax
import pytest

from meshwright import MeshwrightError
from meshwright.models import from_hf_config, model_config, preset, registry, to_hf_config
from meshwright.models.decoder import PRESETS, abstract_arrays
from meshwright.ops.rope import Llama3Scaling

# of the published weights, tied arrays once
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "lwm-200m": 212_366_336,
    "lwm-1b": 1_244_227_584,
    "lwm-3b": 3_426_473_600,
    "lwm-7b": 6_738_415_616,
    "lwm-13b": 13_015_864_320,
    "lwm-30b": 32_528_943_616,
    "lwm-65b": 65_285_660_672,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "olmoe-1b-7b": 6_919_161_856,
    "deepseek-v3": 671_026_419_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_parameter_counts_are_the_published_ones(name: str, parameters: int) -> None:
    arrays = jax.tree.leaves(abstract_arrays(preset(name)))
    assert sum(math.prod(array.shape) for array in arrays) == parameters


def test_every_preset_but_the_tiny_ones_is_checked() -> None:
    assert set(PRESETS) == {*PUBLISHED, "tiny", "tiny-moe"}


@pytest.mark.parametrize(
    ("name", "theta", "factor"),
    [
        ("llama-2-7b", 1e4, None),
        ("llama-3-8b", 5e5, None),
        ("llama-3.1-405b", 5e5, 8.0),
        ("llama-3.2-1b", 5e5, 32.0),
        ("mistral-7b", 1e4, None),
        ("mistral-7b-v0.3", 1e6, None),
        ("qwen2.5-7b", 1e6, None),
        ("qwen3-0.6b", 1e6, None),
    ],
)
def test_rotary_embedding_is_the_published_one(
    name: str, theta: float, factor: float | None
) -> None:
    rope = preset(name).rope
    scaling = None if factor is None else Llama3Scaling(factor, 1.0, 4.0, 8192)
    assert (rope.theta, rope.scaling) == (theta, scaling)


def test_families_differ_where_they_should() -> None:
    small = {name for name in PRESETS if name.startswith("lwm-")} - {"lwm-65b"}
    for name, config in PRESETS.items():
        windows = [kind.attention.window for kind in config.pattern]
        assert config.qkv_bias == name.startswith(("qwen2", "gpt-oss")), name
        assert config.qk_norm == name.startswith(("qwen3", "olmoe")), name
        assert any(windows) == (name == "mistral-7b" or name.startswith("gpt-oss")), name
        assert config.output_bias == name.startswith("gpt-oss"), name
        assert config.norm_eps == (
            1e-6 if name in small or name.startswith(("qwen", "deepseek")) else 1e-5
        ), name


def test_presets_of_experts_are_the_published_files() -> None:
    # as in the published config.json; what is not here has transformers' default, which is theirs
    fields = {
        "gpt-oss-20b": {"num_hidden_layers": 24, "num_local_experts": 32},
        "gpt-oss-120b": {"num_hidden_layers": 36, "num_local_experts": 128},
        "deepseek-v3": {
            "max_position_embeddings": 163840,
            "rope_scaling": {
                "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
                "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            },
        },
    }  # fmt: skip
    transformers = pytest.importorskip("transformers", reason="the outside reader")
    kinds = {"gpt": transformers.GptOssConfig, "deepseek": transformers.DeepseekV3Config}
    for name, some in fields.items():
        theirs = kinds[name.partition("-")[0]](**some).to_dict()
        theirs["architectures"] = [to_hf_config(preset(name))["architectures"][0]]
        assert from_hf_config(theirs) == preset(name), name


def test_the_flops_of_a_token_are_six_a_weight_and_attention() -> None:
    config = preset("llama-3.2-1b")
    head = config.embed * config.vocab
    per_layer = 2048 * (2048 + 2 * 512) + 2048 * 2048 + 3 * 2048 * 8192
    assert config.matmul_params == 16 * per_layer + head
    # 2 matmuls of scores and values, forward once and backward twice, half of them masked
    attention = 16 * 32 * 64 * 4096 * 2 * 2 * 3 // 2
    assert config.flops_per_token(4096) == 6 * config.matmul_params + attention


def test_a_model_that_is_not_there_is_guessed_at() -> None:
    with pytest.raises(MeshwrightError, match=r"did you mean 'llama-3.1-8b'\?"):
        preset("llama3.1-8b")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Mixtral-8x22B", "did you mean 'mixtral-8x22b'?"),
        ("deepseek-v2-lite", "is of no architecture that is supported"),
        ("phi-3.5-moe-instruct", "is of no architecture that is supported"),
        ("gpt2", "has no preset; its architecture is supported: give its Hugging Face config.json"),
        ("gemma-2-9b", "has no preset"),
        ("gemma-7b", "is of no architecture that is supported; these are LlamaForCausalLM"),
        ("meta-llama/Llama-3.1-8B", "then give ./DIR; the preset 'llama-3.1-8b' needs no download"),
        ("llama-3.1-8", "did you mean 'llama-3.1-8b'?"),
        ("./nowhere", "'./nowhere' is not a folder, and no config.json is there; give a preset"),
        ("nowhere/at/all", "is not a folder, and no config.json is there"),
        ("weights.safetensors", "is not a folder, and no config.json is there"),
        ("", "is not a folder, and no config.json is there"),
        ("x" * 5000, "is not a preset"),
        ("a\0b", "is not a preset"),
    ],
)
def test_a_name_that_is_no_model_is_answered_with_the_reason(name: str, says: str) -> None:
    with pytest.raises(MeshwrightError) as refused:
        model_config(name)
    assert says in str(refused.value)


def test_no_preset_is_taken_for_a_model_that_is_not_supported() -> None:
    for name in PRESETS:
        assert model_config(name) is PRESETS[name]
        assert not re.search("experts|architecture", registry._unknown(f"{name}x"))


# of the publishers' pages, in billions
ACTIVE = {"qwen3-30b-a3b": 3.3, "qwen3-235b-a22b": 22, "mixtral-8x7b": 12.9, "mixtral-8x22b": 39,
          "deepseek-v3": 37, "olmoe-1b-7b": 1.3}  # fmt: skip


@pytest.mark.parametrize("name", ["llama-3.1-8b", "t5-small", *ACTIVE])
def test_the_parameters_that_a_token_meets_are_the_published_ones(name: str) -> None:
    total, active = registry.parameter_counts(registry.PRESETS[name])
    if name not in ACTIVE:
        assert active == total
        assert name != "llama-3.1-8b" or total == PUBLISHED[name]
        return
    assert total == PUBLISHED[name]
    assert active / 1e9 == pytest.approx(ACTIVE[name], rel=0.025)


def test_the_names_of_sizes_at_lwm_are_answered() -> None:
    with pytest.raises(MeshwrightError, match="'7b' is lwm-7b here: the size that LWM and EasyLM"):
        preset("7b")

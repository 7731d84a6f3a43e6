"""LoRA computes what PEFT computes, and reads and writes its files."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tests.models.peft_models import (
    INPUTS,
    LLAMA_MODULES,
    TOKENS,
    add_adapter,
    check_gradients,
    on_mesh,
)
from tests.models.tiny_architectures import DEEPSEEK
from tests.ops.attention.programs import QUICKLY

import meshwright as mw
from meshwright.models import (
    ADAPTER,
    LoraConfig,
    abstract_arrays,
    adapted_names,
    family_of,
    from_hf_config,
    hf_names,
    load_adapter,
    merged,
    save_adapter,
    with_adapter,
)

peft = pytest.importorskip("peft")


def tiny(name: str) -> tuple[Any, list[str]]:
    """A model of transformers, and modules to adapt."""
    from transformers import (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    torch.manual_seed(0)
    if name == "llama":
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=4, head_dim=8, max_position_embeddings=64,
        )  # fmt: skip
        return LlamaForCausalLM(config), LLAMA_MODULES
    if name == "gpt2":  # weights with input dims first
        config = GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
        )  # fmt: skip
        return GPT2LMHeadModel(config), ["c_fc", "mlp.c_proj"]
    if name == "deepseek_v3":  # two stacks of layers
        config = DeepseekV3Config(**{**DEEPSEEK, "vocab_size": 64})
        return DeepseekV3ForCausalLM(config), ["q_a_proj", "q_b_proj", "o_proj"]
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), ["q", "v", "wo"]


def adapted(name: str, folder: Path) -> Any:
    """PEFT's model with a random adapter; both are in folders, `base` and `adapter`."""
    model, modules = tiny(name)
    model.save_pretrained(folder / "base")
    return add_adapter(model, modules, folder, fan_in_fan_out=name == "gpt2")


def theirs(model: Any) -> np.ndarray:
    """PEFT's logits."""
    named = {"input_ids": INPUTS}
    if model.config.is_encoder_decoder:
        named["decoder_input_ids"] = INPUTS
    return model(**named).logits.detach().numpy()


def logits(step: Any, params: Any) -> np.ndarray:
    from meshwright.models import lm_logits

    family = family_of(step.model)
    batch = dict.fromkeys(family.batch_fields, jnp.asarray(TOKENS[:, :-1], jnp.int32))
    batch = {name: batch[name] for name in batch if name in ("tokens", "encoder_tokens")}

    def run(params: Any) -> Any:
        hidden, _ = family.forward(params, batch, step.model, step.compute)
        return lm_logits(hidden, family.lm_head(params, step.model), step.model.vocab, step.compute)

    with jax.set_mesh(step.mesh):
        return np.asarray(jax.jit(run, compiler_options=QUICKLY)(params))


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "deepseek_v3"])
def test_logits_and_files_are_those_of_peft(name: str, tmp_path: Path) -> None:
    model = adapted(name, tmp_path)
    expected = theirs(model)
    step, params = on_mesh(tmp_path, "fsdp=2,tp=2")
    scale = np.abs(expected).max()
    np.testing.assert_allclose(logits(step, params), expected, atol=1e-5 * scale)
    with jax.set_mesh(step.mesh):
        whole = merged(params, step.config.lora.scale)
    np.testing.assert_allclose(logits(step, whole), expected, atol=1e-5 * scale)
    base = {name: params[name] for name in params if name != ADAPTER}
    assert np.abs(logits(step, base) - expected).max() > 0.05 * scale

    out = save_adapter(
        tmp_path / "out", params, step.model, step.config.lora, str(tmp_path / "base")
    )
    again = peft.PeftModel.from_pretrained(tiny(name)[0], out).eval()
    np.testing.assert_array_equal(theirs(again), expected)


@pytest.mark.parametrize(
    ("mesh", "compute"),
    [
        pytest.param("fsdp=4,tp=2", {}, marks=pytest.mark.slow),
        ("dp=2,tp=4", {"sequence_parallel": True, "remat": "full"}),
        pytest.param("fsdp=2,tp=2,sp=2", {"layers": "unroll"}, marks=pytest.mark.slow),
        pytest.param("fsdp=2,tp=2", {"mlp_chunk": 4}, marks=pytest.mark.slow),
    ],
)
def test_every_gradient_is_that_of_peft(mesh: str, compute: Any, tmp_path: Path) -> None:
    model = adapted("llama", tmp_path)
    step, params = on_mesh(tmp_path, mesh, **compute)
    check_gradients(model, step, params, tmp_path)


def test_a_module_that_is_several_matrices_here_is_refused(tmp_path: Path) -> None:
    model, _ = tiny("gpt2")
    model.save_pretrained(tmp_path / "base")
    chosen = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    peft.get_peft_model(model, chosen).save_pretrained(tmp_path / "adapter")
    config = from_hf_config(tmp_path / "base")
    with pytest.raises(
        mw.MeshwrightError, match=r"adapts transformer\.h\.0\.attn\.c_attn, which is"
    ):
        load_adapter(tmp_path / "adapter", config)
    lora = LoraConfig(2, targets=("attention",))
    arrays = with_adapter(abstract_arrays(config), lora, jnp.float32)
    zeros = jax.tree.map(lambda spec: np.zeros(spec.shape, "f"), arrays)
    with pytest.raises(mw.MeshwrightError, match=r"PEFT has one adapter for all of .*c_attn"):
        save_adapter(tmp_path / "out", zeros, config, lora)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_adapters_of_other_than_all_layers_are_named_and_refused(tmp_path: Path) -> None:
    model, _ = tiny("llama")
    model.save_pretrained(tmp_path / "base")
    config = from_hf_config(tmp_path / "base")
    merge = r"merge it with PEFT \(merge_and_unload\) and take the merged model"
    for i, (modules, words) in enumerate((
        (r".*\.1\..*(q_proj|up_proj)",
         r"model\.layers\.1\.self_attn\.q_proj, and not model\.layers\.0\.self_attn\.q_proj: .* all"),
        (["q_proj", "lm_head"], r"lm_head, and here adapters are of matrices of the layers alone"),
    )):  # fmt: skip
        add_adapter(tiny("llama")[0], modules, tmp_path / str(i))
        with pytest.raises(mw.MeshwrightError, match=rf"adapter adapts {words}.*; {merge}"):
            load_adapter(tmp_path / str(i) / "adapter", config)


def test_adapters_that_are_not_plain_are_refused(tmp_path: Path) -> None:
    adapted("llama", tmp_path)
    file = tmp_path / "adapter" / "adapter_config.json"
    fields = json.loads(file.read_text())
    config = from_hf_config(tmp_path / "base")
    for change, words in (
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.* is not supported"),
        ({"r": "many"}, "r and lora_alpha must be numbers above 0"),
    ):
        file.write_text(json.dumps(fields | change))
        with pytest.raises(mw.MeshwrightError, match=words):
            load_adapter(tmp_path / "adapter", config)


def test_targets_are_paths_or_names_of_hugging_face(tmp_path: Path) -> None:
    model, _ = tiny("llama")
    model.save_pretrained(tmp_path / "base")
    config = from_hf_config(tmp_path / "base")

    def adapter(*targets: str) -> Any:
        lora = LoraConfig(2, targets=targets)
        arrays = with_adapter(abstract_arrays(config), lora, jnp.bfloat16, hf_names(config))
        trained = [spec.trained for spec in jax.tree.leaves({**arrays, ADAPTER: {}})]
        assert not any(trained)
        assert arrays["layers"]["mlp"]["up"].dtype == jnp.bfloat16
        assert arrays["norm"].dtype == jnp.float32
        return {block: set(found) for block, found in arrays[ADAPTER]["layers"].items()}

    assert adapter() == {"attention": {"wq", "wk", "wv", "wo"}, "mlp": {"gate", "up", "down"}}
    assert adapter("attention") == {"attention": {"wq", "wk", "wv", "wo"}}
    assert adapter("q_proj", "mlp/up") == {"attention": {"wq"}, "mlp": {"up"}}
    model, _ = tiny("t5")
    model.save_pretrained(tmp_path / "t5")
    config = from_hf_config(tmp_path / "t5")
    arrays = with_adapter(
        abstract_arrays(config), LoraConfig(2, targets=("k",)), jnp.float32, hf_names(config)
    )
    assert adapted_names(arrays) == ["wk"]  # not all whose names have the letter
    config = from_hf_config(tmp_path / "base")
    with pytest.raises(mw.MeshwrightError, match=r"'qproj' .* did you mean 'q_proj'\?"):
        adapter("qproj")
    with pytest.raises(mw.MeshwrightError, match=r"the settings lora\.… need --lora.rank"):
        LoraConfig(alpha=4)
    assert LoraConfig(16, 32, rslora=True).scale == 8

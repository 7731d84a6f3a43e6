"""Every architecture computes what transformers computes: logits, gradients, files, tokens."""

import copy
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.models.tiny_architectures import MODELS, save
from tests.training import toy

import meshwright as mw
from meshwright.data.tokenizers import ByteTokenizer
from meshwright.models import (
    Compute,
    DecoderConfig,
    LossConfig,
    abstract_arrays,
    family_of,
    from_hf_config,
    load_hf,
    model_from_dict,
    model_to_dict,
    override,
    save_hf,
)
from meshwright.models.decoder import decoder_rules, logits
from meshwright.models.decoder.forward import loss
from meshwright.serving import Engine, EngineConfig, Request, Sampling
from meshwright.serving.source import Source, generation_mesh, load_weights

by_name = pytest.mark.parametrize("name", MODELS)


def quick_for(*names: str) -> Any:
    """All models; those that are not named here are slow: between these every feature is tested."""
    slow = {name: () if name in names else (pytest.mark.slow,) for name in MODELS}
    return pytest.mark.parametrize("name", [pytest.param(n, marks=m) for n, m in slow.items()])


TOKENS = np.random.default_rng(0).integers(0, 48, (2, 24)).astype(np.int32)
ENGINE = EngineConfig(
    max_batch=2, max_length=64, page_size=8, chunk_shapes=((1, 8),), chunk=8, batch_buckets=(2,),
    compile_first=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def made(name: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("models") / name
        return folder, save(name, folder)

    return made


def loaded(folder: Path, mesh: str = "fsdp=2,tp=2") -> tuple[Any, Any, Any]:
    config, spec = from_hf_config(folder), mw.MeshSpec.parse(mesh)
    devices = jax.devices()[: np.prod(spec.sizes)]
    placed = mw.mesh(mesh, devices=devices, axis_types="explicit")
    shardings = mw.shardings(abstract_arrays(config), decoder_rules(), mesh=placed)
    return config, placed, load_hf(folder, config, shardings)


WITH_GRADIENTS = ("gpt2", "gptj", "gemma3", "phi3-partial", "olmo2")


@pytest.mark.parametrize("name", [name for name in MODELS if name not in WITH_GRADIENTS])
def test_logits_are_those_of_transformers(name: str, folders: Any) -> None:
    import torch

    folder, model = folders(name)
    expected = model(torch.as_tensor(TOKENS, dtype=torch.int64)).logits.detach().numpy()
    config, mesh, params = loaded(folder, "dp=1,fsdp=2,tp=2,sp=1")
    with jax.set_mesh(mesh):
        found = jax.jit(logits, static_argnums=(2, 3))(
            params, {"tokens": TOKENS}, config, Compute(decoder_rules())
        )
    assert np.abs(expected).max() > 1  # so that 1e-4 says something
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=1e-4)


def test_caps_of_scores_that_transformers_does_not_apply_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    kind, fields = MODELS["gemma3"]
    found = []
    for one, cap in (("none", None), ("capped", 1.0)):
        monkeypatch.setitem(MODELS, "gemma3", (kind, fields | {"attn_logit_softcapping": cap}))
        model = save("gemma3", tmp_path / one)
        found.append(model(torch.as_tensor(TOKENS, dtype=torch.int64)).logits.detach().numpy())
    np.testing.assert_array_equal(*found)
    assert from_hf_config(tmp_path / "none").score_softcap is None
    with pytest.raises(mw.MeshwrightError, match=r"attn_logit_softcapping=1\.0 is not honoured"):
        from_hf_config(tmp_path / "capped")


@quick_for(*WITH_GRADIENTS)
def test_logits_and_gradients_are_those_of_transformers(
    name: str, folders: Any, tmp_path: Path
) -> None:
    import torch

    folder, model = folders(name)
    tokens = torch.as_tensor(TOKENS, dtype=torch.int64)
    model.zero_grad()
    out = model(tokens, labels=tokens)
    out.loss.backward()
    config, mesh, params = loaded(folder, "dp=1,fsdp=2,tp=2,sp=1")
    compute = Compute(decoder_rules())
    targets = np.full_like(TOKENS, -1)
    targets[:, :-1] = TOKENS[:, 1:]
    batch = {"tokens": TOKENS, "targets": targets}
    scale = jnp.float32(1 / (targets >= 0).sum())

    def both(params: Any) -> Any:
        found = logits(params, batch, config, compute)
        return loss(params, batch, scale, config, compute, LossConfig()).scaled, found

    with jax.set_mesh(mesh):
        (value, found), gradients = jax.jit(jax.value_and_grad(both, has_aux=True))(params)
    expected = out.logits.detach().numpy()
    assert np.abs(expected).max() > 1  # so that 1e-4 says something
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(float(value), out.loss.item(), rtol=1e-5)
    save_hf(tmp_path / "gradients", gradients, config)
    written = load_file(tmp_path / "gradients" / "model.safetensors")
    theirs = copy.deepcopy(model)  # whose files have other names and shapes than its parameters
    for to, param in zip(theirs.parameters(), model.parameters(), strict=True):
        to.data = param.grad
    theirs.save_pretrained(tmp_path / "theirs")
    right = load_file(tmp_path / "theirs" / "model.safetensors")
    right |= {one: np.zeros_like(right[one]) for one, _ in model.named_buffers() if one in right}
    assert right.keys() == written.keys()
    for one, gradient in written.items():
        np.testing.assert_allclose(gradient, right[one], rtol=1e-3, atol=1e-5, err_msg=one)


@by_name
def test_a_model_that_is_written_again_is_bit_equal(
    name: str, folders: Any, tmp_path: Path
) -> None:
    import torch
    import transformers

    folder, model = folders(name)
    config, _, params = loaded(folder, "dp=1,fsdp=2,tp=2,sp=1")
    data = model_to_dict(config)
    assert model_from_dict(data) == config
    assert json.loads(json.dumps(data)) == data
    save_hf(tmp_path / "again", params, config)
    assert from_hf_config(tmp_path / "again") == config
    # without the config.json it came from, too
    save_hf(tmp_path / "anew", params, dataclasses.replace(config, hf_config=None))
    assert from_hf_config(tmp_path / "anew") == config
    tokens = torch.as_tensor(TOKENS, dtype=torch.int64)
    anew = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "anew", dtype=torch.float32, attn_implementation="eager"
    )
    np.testing.assert_array_equal(*(one(tokens).logits.detach().numpy() for one in (model, anew)))
    before, after = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    for one in before:
        np.testing.assert_array_equal(before[one], after[one], err_msg=one)


@quick_for("opt", "gpt_oss", "deepseek_v3")
def test_greedy_tokens_of_an_engine_are_those_of_transformers(name: str, folders: Any) -> None:
    check_greedy(name, folders, "tp=1")


@pytest.mark.parametrize(
    "mesh",
    [
        "fsdp=2,ep=2,tp=2",
        pytest.param("ep=2,tp=2", marks=pytest.mark.slow),
        pytest.param("ep=4", marks=pytest.mark.slow),
        pytest.param("fsdp=2,ep=2", marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_are_the_same_with_experts_on_several_devices(
    mesh: str, folders: Any
) -> None:
    check_greedy("qwen3_moe", folders, mesh)


def check_greedy(name: str, folders: Any, mesh: str) -> None:
    import torch

    folder, model = folders(name)
    config = from_hf_config(folder)
    source = Source(
        config, ByteTokenizer(), frozenset(), False, name,
        lambda targets: load_hf(folder, config, jax.tree.map(lambda one: one.sharding, targets)),
    )  # fmt: skip
    prompts = [TOKENS[0, :19], TOKENS[1, :3]]
    requests = [
        Request(tuple(one.tolist()), max_new=9, sampling=Sampling(temperature=0)) for one in prompts
    ]
    with Engine(load_weights(source, generation_mesh(mesh)), ENGINE) as engine:
        found = engine.generate(requests)
    for prompt, done in zip(prompts, found, strict=True):
        tokens = torch.as_tensor(prompt[None], dtype=torch.int64)
        right = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=9, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        assert list(done.tokens) == right[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["phi3", "gptj", "deepseek_v3", "gpt_neox"])
def test_longer_positions_that_are_advised_can_be_exported(
    name: str, folders: Any, tmp_path: Path
) -> None:
    import transformers

    config = from_hf_config(folders(name)[0])
    seq, accepted = 4 * config.max_seq, {}
    changes = [(f"rope.scaling={one}", "rope.factor=4") for one in ("linear", "yarn", "llama3")]
    for change in (*changes, ("rope.theta=5e7",)):
        try:
            accepted[change] = override(config, change, seq)
        except mw.MeshwrightError as refused:
            said = f"override {' '.join(change)}: the config.json of "
            assert str(refused).startswith(f"{said}{config.hf_config['architectures'][0]} cannot")
    advised = family_of(config).longer(config, seq)
    none, theta, scaled = (), [("rope.theta=5e7",)], [changes[1], ("rope.theta=5e7",)]
    assert (advised, [*accepted]) == {
        "phi3": (none, theta),
        "gptj": (none, []),
        "deepseek_v3": (changes[1], scaled),
        "gpt_neox": (changes[0], [*changes, ("rope.theta=5e7",)]),
    }[name]
    for i, longer in enumerate(accepted.values()):
        save_hf(tmp_path / str(i), load_hf(folders(name)[0], longer), longer)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(i))
        assert theirs.config.architectures == config.hf_config["architectures"]
    if name == "gptj":
        with pytest.raises(mw.MeshwrightError, match="give sequences of at most 64 tokens"):
            override(config, changes[0], seq)


def losses(config: DecoderConfig, mesh: str, **settings: Any) -> np.ndarray:
    return toy.train(toy.Setting(mesh=mesh, config=config, steps=4, **settings))[0]


losses_of_one_device = functools.cache(functools.partial(losses, mesh=toy.ONE))


def check_losses(name: str, folders: Any, mesh: str, **settings: Any) -> None:
    config = from_hf_config(folders(name)[0])
    found = losses(config, mesh, **settings)
    np.testing.assert_allclose(found, losses_of_one_device(config), rtol=1e-5)


@pytest.mark.slow
@by_name
def test_losses_are_the_same_on_a_mesh(name: str, folders: Any) -> None:
    check_losses(name, folders, "dp=1,fsdp=2,tp=2,sp=2")


@pytest.mark.slow
@by_name
@pytest.mark.parametrize(
    "mesh",
    [
        "dp=2,fsdp=2,tp=1,sp=1",
        "dp=1,fsdp=8,tp=1,sp=1",
        "dp=2,fsdp=1,tp=2,sp=1",
        "dp=1,fsdp=1,tp=2,sp=4",
    ],
)
def test_losses_are_the_same_on_any_mesh(name: str, mesh: str, folders: Any) -> None:
    check_losses(name, folders, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ("dp=1,fsdp=2,tp=2,sp=2", {"rules": decoder_rules(sp=True, sequence_parallel=True)}),
        ("dp=1,fsdp=1,tp=1,sp=2", {"context_parallel": "ulysses"}),
        ("dp=1,fsdp=2,tp=1,sp=1,ep=4", {"rules": decoder_rules(sp=True, ep=True)}),
        ("dp=1,fsdp=2,tp=1,sp=1", {"scan": False}),
    ],
)
def test_losses_are_the_same_in_every_way(
    name: str, mesh: str, settings: Any, folders: Any
) -> None:
    check_losses(name, folders, mesh, **settings)

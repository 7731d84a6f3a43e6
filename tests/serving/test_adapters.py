"""Several LoRA adapters in one batch: each gives what it gives alone, and what PEFT gives."""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tests.serving.models import whole_logits
from tests.serving.server.serving import Answer, Running

from meshwright.errors import MeshwrightError
from meshwright.serving.adapters import with_adapters, with_slots
from meshwright.serving.engine import Engine
from meshwright.serving.replicas import start_engine
from meshwright.serving.request import Completion, Delta, Request
from meshwright.serving.sampling import Sampling
from meshwright.serving.server import HttpServer, Service
from meshwright.serving.settings import EngineConfig, ServeConfig
from meshwright.serving.source import Source, generation_mesh, load_weights, model_source

peft = pytest.importorskip("peft")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# rank, alpha, modules, rank-stabilized
KINDS: dict[str, tuple[int, int, list[str], bool]] = {
    "all": (4, 6, ALL, False),
    "queries": (2, 8, ["q_proj", "v_proj"], False),
    "keys": (8, 4, ["k_proj", "o_proj"], True),
    "mlp": (3, 5, ["gate_proj", "down_proj"], False),
    "up": (1, 9, ["up_proj"], False),
}
NAMES = [*KINDS, ""]
CONFIG = EngineConfig(
    max_batch=8, max_length=128, page_size=4, pages=400, batch_buckets=(8,), chunk_shapes=((4, 16),),
    prompt_logprobs=False, strict=True, max_adapters=6,
)  # fmt: skip
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers in `base`, and adapters of PEFT beside it."""
    made = tmp_path_factory.mktemp("adapters")
    base().save_pretrained(made / "base")
    for name in KINDS:
        found = adapted(name)
        found.peft_config["default"].base_model_name_or_path = str(made / "base")
        found.save_pretrained(made / name)
    return made


def base() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, initializer_range=0.3,
        tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def adapted(name: str) -> Any:
    """PEFT's model with a random adapter."""
    rank, alpha, modules, rslora = KINDS[name]
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=modules, use_rslora=rslora, init_lora_weights=False
    )
    torch.manual_seed(1 + list(KINDS).index(name))
    return peft.get_peft_model(base(), config).eval()


def engine_on(folder: Path, mesh: str, names: list[str], config: EngineConfig = CONFIG) -> Engine:
    source = model_source(folder / "base", tokenizer="bytes")
    source = with_adapters(source, {name: folder / name for name in names})
    engine = start_engine(source, generation_mesh(mesh), jnp.float32, config)
    assert isinstance(engine, Engine)
    return engine


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with engine_on(folder, "tp=1", list(KINDS)) as made:
        yield made


def prompt_of(index: int) -> tuple[int, ...]:
    length = 3 + 7 * index  # some of several chunks
    return tuple(np.random.default_rng(index).integers(0, 256, length).tolist())


def request(name: str, index: int, **options: Any) -> Request:
    return Request(
        prompt_of(index), GREEDY, 12, logprobs=3, ignore_end=True, adapter=name, **options
    )


def logprobs(completion: Completion) -> list[float]:
    return [each.logprob for each in completion.logprobs]


def theirs(model: Any, completion: Completion, prompt: tuple[int, ...]) -> np.ndarray:
    """Log-probabilities of the tokens of a completion, by transformers; and that they are greedy."""
    tokens = torch.tensor([[*prompt, *completion.tokens]])
    with torch.no_grad():
        scores = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert scores.argmax(-1).tolist() == list(completion.tokens)
    return scores.gather(-1, tokens[0, len(prompt) :, None])[:, 0].numpy()


def test_a_batch_of_all_adapters_gives_what_peft_gives_for_each(engine: Engine) -> None:
    requests = [request(name, index) for index, name in enumerate(NAMES)]
    together = engine.generate(requests)
    for each, done, name in zip(requests, together, NAMES, strict=True):
        [alone] = engine.generate([each])
        assert alone.tokens == done.tokens
        np.testing.assert_allclose(logprobs(alone), logprobs(done), atol=1e-5)
        expected = theirs(adapted(name) if name else base(), done, each.prompt)
        np.testing.assert_allclose(logprobs(done), expected, atol=1e-4)
    assert len({done.tokens[:3] for done in together}) > 1
    assert engine.stats().compilations_after_ready == 0


def test_merged_weights_give_the_same(engine: Engine, folder: Path) -> None:
    merged = model_source(folder / "base", tokenizer="bytes", adapter=folder / "all")
    own = model_source(folder / "all", tokenizer="bytes")  # which names its base
    assert own.name == merged.name
    [done] = engine.generate([request("all", 2)])
    prompt = prompt_of(2)
    model = load_weights(own, generation_mesh())
    logits = whole_logits(model.params, model.config, [[*prompt, *done.tokens]])[0]
    scores = jax.nn.log_softmax(logits[len(prompt) - 1 : -1])
    assert scores.argmax(-1).tolist() == list(done.tokens)
    np.testing.assert_allclose(logprobs(done), scores.max(-1), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp=4", "fsdp=2,tp=2", "sp=2,tp=2"])
def test_so_they_do_on_a_mesh(engine: Engine, folder: Path, mesh: str) -> None:
    """With tp=4 the two KV heads are repeated; with sp whole prompts have programs of their own."""
    requests = [request(name, index) for index, name in enumerate(NAMES)]
    expected = engine.generate(requests)
    with engine_on(folder, mesh, list(KINDS)) as other:
        for done, one in zip(other.generate(requests), expected, strict=True):
            assert done.tokens == one.tokens
            np.testing.assert_allclose(logprobs(done), logprobs(one), atol=1e-4)


def test_keys_are_never_reused_between_adapters(engine: Engine) -> None:
    prompt = prompt_of(6)

    def cached(name: str, salt: str = "") -> int:
        asked = Request(prompt, GREEDY, 2, adapter=name, cache_salt=salt)
        return engine.generate([asked])[0].cached_tokens

    for name in ("mlp", "", "up"):
        assert cached(name) == 0
        assert cached(name) == (len(prompt) - 1) // 4 * 4
    number = engine._adapters.find("mlp").number
    assert cached("", f"{number}:") == 0  # a salt that looks like an adapter's


def test_adapters_are_loaded_and_unloaded_while_requests_run(
    engine: Engine, folder: Path, tmp_path: Path
) -> None:
    [first] = engine.generate([request("all", 3)])
    engine.load_adapter("sixth", folder / "keys")
    with pytest.raises(MeshwrightError, match="all 6 slots of adapters are in use"):
        engine.load_adapter("seventh", folder / "up")
    with pytest.raises(MeshwrightError, match="is called 'all' already"):
        engine.load_adapter("all", folder / "up")
    ended: SimpleQueue[Delta] = SimpleQueue()
    long = dataclasses.replace(request("all", 3), max_new=60)
    engine.submit([long], lambda _, delta: ended.put(delta), streams=False)
    engine.unload_adapter("all")
    with pytest.raises(MeshwrightError, match="no adapter is called 'all'; known: queries, keys"):
        engine.generate([request("all", 3)])
    assert ended.get().tokens[:12] == first.tokens  # what runs is finished
    engine.load_adapter("all", folder / "mlp")  # another one of this name
    [second] = engine.generate([request("all", 3)])
    assert second.tokens != first.tokens
    assert second.cached_tokens == 0
    theirs(adapted("mlp"), second, prompt_of(3))
    [kept] = engine.generate([request("sixth", 3)])
    theirs(adapted("keys"), kept, prompt_of(3))

    engine.unload_adapter("all")
    broken = shutil.copytree(folder / "up", tmp_path / "broken")
    tensors = load_file(broken / "adapter_model.safetensors")
    tensors = {name: array * np.float32(np.inf) for name, array in tensors.items()}
    save_file(tensors, broken / "adapter_model.safetensors")
    with pytest.raises(MeshwrightError, match="has NaN or infinite numbers"):
        engine.load_adapter("all", broken)
    engine.unload_adapter("sixth")
    engine.load_adapter("all", folder / "all")
    assert engine.generate([request("all", 3)])[0].tokens == first.tokens
    assert engine.stats().compilations_after_ready == 0


@pytest.fixture(scope="module")
def served(engine: Engine, folder: Path) -> Iterator[Running]:
    config = ServeConfig(str(folder / "base"), port=0, access_log=False, adapter_loading=True)
    with HttpServer(Service(engine, engine.source, config, None)) as server:
        yield Running(server, engine)


def test_a_request_names_an_adapter_as_its_model(served: Running, engine: Engine) -> None:
    cards = served.get("/v1/models").data["data"]
    assert [card["id"] for card in cards] == ["base", *engine.adapters]
    root = str(engine.adapters["keys"].folder)
    of_keys = served.get("/v1/models/base:keys").data
    assert (of_keys["id"], of_keys["parent"], of_keys["root"]) == ("keys", "base", root)
    assert (cards[0]["parent"], cards[0]["root"]) == (None, served.server.service.config.model)
    for model in ("base:keys", "keys", "base"):
        asked = request("keys" if "keys" in model else "", 4)
        answer = served.post(
            "/v1/completions", model=model, prompt=asked.prompt, max_tokens=12, temperature=0,
            ignore_eos=True,
        ).data  # fmt: skip
        [expected] = engine.generate([asked])
        assert (answer["model"], answer["choices"][0]["text"]) == (model, expected.text)
    unknown = served.post("/v1/completions", model="base:kyes", prompt="a")
    assert unknown.status == 404
    assert "model 'base:kyes' is not served here; this server has 'base', 'base:" in unknown.message


def test_clients_load_and_unload_adapters_as_in_vllm(served: Running, folder: Path) -> None:
    def load(name: str, path: Path | str) -> Answer:
        return served.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(path))

    def unload(name: str) -> Answer:
        return served.post("/v1/unload_lora_adapter", lora_name=name)

    loaded = load("new", folder / "up")
    assert (loaded.status, loaded.text) == (
        200,
        "Success: LoRA adapter 'new' added successfully.",
    )
    assert served.post("/v1/completions", model="new", prompt="a").status == 200
    assert load("new", folder / "up").status == 400
    removed = unload("new")
    assert (removed.status, removed.text) == (
        200,
        "Success: LoRA adapter 'new' removed successfully.",
    )
    assert served.post("/v1/completions", model="new", prompt="a").status == 404
    assert unload("new").status == 404
    assert "is the model's own name" in load("base", folder / "up").message
    assert "does not exist" in load("new", "/none").message
    with HttpServer(
        dataclasses.replace(served.server.service, config=ServeConfig("base", port=0))
    ) as server:
        refused = Running(server, served.engine).post(
            "/v1/load_lora_adapter", lora_name="new", lora_path="/"
        )
    assert refused.status == 403
    assert "start it with --adapter-loading" in refused.message


def test_mistakes_are_told(folder: Path, tmp_path: Path) -> None:
    source = model_source(folder / "base", tokenizer="bytes")
    with pytest.raises(MeshwrightError, match="base holds no adapter; give the folder of a run"):
        with_adapters(source, {"one": folder / "base"})
    with pytest.raises(MeshwrightError, match="'a:b' cannot be the name of an adapter"):
        with_adapters(source, {"a:b": folder / "all"})
    both = with_adapters(source, {"a": folder / "all", "b": folder / "up"})
    with pytest.raises(MeshwrightError, match="2 adapters are named, and max_adapters=1"):
        with_slots(EngineConfig(max_adapters=1), both)
    with pytest.raises(MeshwrightError, match="has rank 4, the engine has room for 2"):
        engine_on(folder, "tp=1", ["all"], dataclasses.replace(CONFIG, max_adapter_rank=2))
    alone = shutil.copytree(folder / "all", tmp_path / "alone")
    file = alone / "adapter_config.json"
    file.write_text(file.read_text().replace(str(folder / "base"), "/none/llama"))
    with pytest.raises(
        MeshwrightError, match="of '/none/llama', which is no folder here; give the"
    ):
        model_source(alone)
    with pytest.raises(MeshwrightError, match="has an adapter of its own, which is merged"):
        model_source(folder / "all", tokenizer="bytes", adapter=alone)


@pytest.mark.slow
def test_in_bfloat16_unmerged_is_as_close_to_peft_as_merged(folder: Path, tmp_path: Path) -> None:
    """Weights of the size that models start with: the mean difference is below 1e-3."""
    start = base()
    for weight in start.parameters():
        weight.data *= 1 / 15 if weight.ndim > 1 else 1
    start.save_pretrained(tmp_path)
    reference = peft.PeftModel.from_pretrained(start, folder / "keys").eval()
    source = model_source(tmp_path, tokenizer="bytes")
    merged = model_source(tmp_path, tokenizer="bytes", adapter=folder / "keys")
    config = dataclasses.replace(CONFIG, max_adapters=0, prompt_logprobs=True)

    def scores(source: Source, name: str) -> np.ndarray:
        asked = [
            Request(prompt_of(i), GREEDY, 0, prompt_logprobs=0, adapter=name) for i in range(1, 7)
        ]
        with start_engine(source, generation_mesh(), jnp.bfloat16, config) as engine:
            done = engine.generate(asked)
        return np.array([one.logprob for each in done for one in each.prompt_logprobs[1:] if one])

    def expected(prompt: tuple[int, ...]) -> np.ndarray:
        tokens = torch.tensor([prompt])
        with torch.no_grad():
            found = reference(input_ids=tokens).logits[0, :-1].log_softmax(-1)
        return found.gather(-1, tokens[0, 1:, None])[:, 0].numpy()

    exact = np.concatenate([expected(prompt_of(i)) for i in range(1, 7)])
    unmerged = scores(with_adapters(source, {"keys": folder / "keys"}), "keys")
    whole = scores(merged, "")
    assert np.abs(unmerged - whole).mean() < 1e-3
    errors = [np.abs(each - exact).mean() for each in (unmerged, whole)]
    assert errors[0] < 1.5 * errors[1]

"""Several LoRA adapters in one batch: each gives what it gives alone, and what PEFT gives."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from meshwright.serving.adapters import with_adapters
from meshwright.serving.engine import Engine
from meshwright.serving.replicas import start_engine
from meshwright.serving.request import Completion, Request
from meshwright.serving.sampling import Sampling
from meshwright.serving.settings import EngineConfig
from meshwright.serving.source import generation_mesh, model_source

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
    prompt_logprobs=False, strict=True,
)  # fmt: skip
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers in `base`, and adapters of PEFT beside it."""
    made = tmp_path_factory.mktemp("adapters")
    base().save_pretrained(made / "base")
    for name in KINDS:
        adapted(name).save_pretrained(made / name)
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
    source, config = with_adapters(source, config, {name: folder / name for name in names})
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

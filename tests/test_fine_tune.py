"""A .jsonl becomes a model that is trained, exported, read by transformers, served and asked."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers
from tests.forked import Commands

import meshwright as mw
from meshwright.data import load_chat_template
from meshwright.serving.server import HttpServer, Service

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ANSWERS = {"fox": "red", "owl": "brown", "bear": "black"}
# begins with the BOS token, as Llama's does
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def question(animal: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{animal}?"}]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A small Llama with a byte-level tokenizer that begins texts, and a chat template."""
    folder = tmp_path / "base"
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {letter: i for i, letter in enumerate(alphabet, 2)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128,
        bos_token_id=0, eos_token_id=1, initializer_range=0.1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@contextlib.contextmanager
def served(folder: Path) -> Iterator[openai.OpenAI]:
    config = mw.ServeConfig(str(folder), port=0)
    with mw.load(folder) as model:
        service = Service(model.engine, model.source, config, load_chat_template(folder))
        with HttpServer(service) as server:
            yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 8])
def test_from_conversations_to_the_client_of_openai(
    base: Path, tmp_path: Path, commands: Commands, rank: int
) -> None:
    data = tmp_path / "animals.jsonl"
    with data.open("w") as out:
        for animal, colour in ANSWERS.items():
            answer = {"role": "assistant", "content": f"{colour}."}
            for _ in range(16):
                print(json.dumps({"messages": [*question(animal), answer]}), file=out)
    run, said = tmp_path / "run", tmp_path / "said"
    lora = ["--lora.rank", str(rank), "--lora.alpha", "32"] if rank else []
    settings = [
        "train", str(base), "--run", str(run), "--data", str(data), "--batch", "4", "--seq", "64",
        "--steps", "120" if rank else "60", "--optimizer.warmup-steps", "2", "--optimizer.learning-rate",
        "1e-2" if rank else "3e-3", "--eval.sequences", "2", "--cpu-devices", "2", *lora,
    ]  # fmt: skip
    assert commands.run(settings, said) == 0, said.read_text()
    folder = mw.export(run, tmp_path / "model", merge=bool(rank), dtype="float32")

    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with served(folder) as client:
        for animal, colour in ANSWERS.items():
            prompt = tokenizer.apply_chat_template(
                question(animal), add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            made = network.generate(**prompt, max_new_tokens=12, do_sample=False)[0]
            expected = tokenizer.decode(
                made[prompt["input_ids"].shape[1] :], skip_special_tokens=True
            )
            messages: Any = question(animal)
            choice = client.chat.completions.create(
                model=folder.name, messages=messages, max_tokens=12, temperature=0
            ).choices[0]
            assert choice.message.content == expected == f"{colour}."
            assert choice.finish_reason == "stop"
    # a prompt of the run itself begins as its data does
    with mw.load(run) as model:
        assert model.source.encode("a") == tokenizer("a").input_ids
        assert model.chat("owl?", max_new=12, temperature=0).text == "brown."

"""Small models of every kind, on any mesh."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
from jax.sharding import Mesh

from meshwright.data.tokenizers import ByteTokenizer
from meshwright.models.decoder import DecoderConfig
from meshwright.serving.source import Model, Source, load_weights

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="session")
def random_model() -> Callable[..., Model]:
    return make_model


def make_model(config: DecoderConfig, mesh: Mesh, ends: frozenset[int] = frozenset()) -> Model:
    """Random weights, larger than a training starts with, so that logits lie apart."""

    def read(targets: Any) -> Any:
        random = np.random.default_rng(1)

        def value(target: jax.ShapeDtypeStruct) -> jax.Array:
            numbers = random.normal(scale=0.3, size=target.shape).astype(target.dtype)
            return jax.device_put(numbers, target.sharding)

        return jax.tree.map(value, targets)

    source = Source(config, ByteTokenizer(), ends, False, "random", read)
    return load_weights(source, mesh)


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    """A tokenizer.json of 30 tokens: begin, end, a space and the letters."""
    vocabulary = {"<s>": 0, "</s>": 1, " ": 2, "?": 3} | {c: i for i, c in enumerate(LETTERS, 4)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    return file


@pytest.fixture(scope="session")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json with as many tokens as the models have."""
    vocabulary = {"</s>" if i == 1 else f"<{i}>": i for i in range(48)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<0>"))
    tokenizer.add_special_tokens(["</s>"])
    file = tmp_path_factory.mktemp("numbers") / "tokenizer.json"
    tokenizer.save(str(file))
    return file

"""Echoed prompts: their text, tokens and offsets agree, with special tokens and without."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.serving.server.bigram_engine import BigramEngine
from tests.serving.server.serving import Answer, Running, serving
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from meshwright.data.tokenizers import HuggingFaceTokenizer

COMPLETIONS = "/v1/completions"
WORDS = ["the", "old", "er", "n", "t", "h", "e", "o", "l", "d", "r", "a", "<", ">", "s", "/"]


def library(pieces: list[str], **model: object) -> tokenizers.Tokenizer:
    """257 pieces, so that the engine can generate any of them."""
    pieces = [*pieces, *(f"w{index}" for index in range(257 - len(pieces)))]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    inner = tokenizers.Tokenizer(models.BPE(vocab, [], **model))
    inner.add_special_tokens(["<s>", "</s>", tokenizers.AddedToken("<mask>", lstrip=True)])
    return inner


def byte_level() -> HuggingFaceTokenizer:
    """As GPT-2, Llama 3 and Qwen: a space is part of the word after it."""
    parts = [*WORDS, "\u0120the", "\u0120old", "\u0120", "\u010a", "\u00c3", "\u00a9", "\u00a0"]
    inner = library(["<s>", "</s>", "<mask>", *parts], ignore_merges=True)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    return HuggingFaceTokenizer(json.loads(inner.to_str()), "</s>")


def sentencepiece() -> HuggingFaceTokenizer:
    """As Llama 2 and Mistral: a text begins with a space that decoding drops again."""
    parts = [*WORDS, "\u2581the", "\u2581old", "\u2581", "\n", "<0xC3>", "<0xA9>"]
    inner = library(["<s>", "</s>", "<mask>", *parts], byte_fallback=True, ignore_merges=True)
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    inner.pre_tokenizer = pre_tokenizers.Split(
        tokenizers.Regex("\u2581?[^\u2581\n]+|\u2581|\n"), "isolated"
    )
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip
    return HuggingFaceTokenizer(json.loads(inner.to_str()), "</s>")


@pytest.fixture(scope="module", params=[byte_level, sentencepiece])
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    engine = BigramEngine(tokenizer=request.param())
    with serving(engine, special_tokens=True) as running:
        yield running


def echoed(server: Running, **body: object) -> dict[str, Any]:
    """The choice of a completion with its prompt, the same at once and streamed."""
    fields = {"echo": True, "logprobs": 1, "seed": 1, "max_tokens": 6, "ignore_eos": True, **body}
    (choice,) = server.post(COMPLETIONS, **fields).data["choices"]
    streamed: Answer = server.post(COMPLETIONS, **fields, stream=True)
    parts = [event["choices"][0] for event in streamed.events[:-1]]
    assert "".join(part["text"] for part in parts) == choice["text"]
    for name, values in choice["logprobs"].items():
        pieces = [part["logprobs"][name] for part in parts if part["logprobs"]]
        assert [value for piece in pieces for value in piece] == values
    return choice


def check_slices(choice: dict[str, Any], number: int, hidden: int = 0) -> None:
    """Each token of the prompt has the text between its offset and the next one.

    The first `hidden` were added by the tokenizer, and have none.
    """
    text, logprobs = choice["text"], choice["logprobs"]
    tokens, offsets = logprobs["tokens"], [*logprobs["text_offset"], len(text)]
    assert offsets == sorted(offsets)
    for index in range(number):
        own = text[offsets[index] : offsets[index + 1]]
        if index < hidden:
            assert own == ""
        elif not tokens[index].startswith("token_id:"):
            # the space that a tokenizer adds before a text and after special tokens is in no text
            begins = index == hidden or tokens[index - 1] in ("<s>", "</s>")
            assert own == tokens[index] or (begins and f" {own}" == tokens[index])


IDS = st.lists(st.integers(0, 30) | st.sampled_from([0, 1, 2]), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(IDS)
def test_the_text_of_echoed_tokens_is_that_of_their_names(server: Running, ids: list[int]) -> None:
    choice = echoed(server, prompt=ids)
    tokenizer = server.engine.tokenizer
    assert choice["text"].startswith(tokenizer.decode(ids, special_tokens=True))
    for token, name in zip(ids, choice["logprobs"]["tokens"], strict=False):
        assert token > 2 or name == ("<s>", "</s>", "<mask>")[token]
    if not any(name.startswith("token_id:") for name in choice["logprobs"]["tokens"][: len(ids)]):
        check_slices(choice, len(ids))


PIECES = ["the", " old", "er", "<s>", "</s>", " ", "\n", "é", "<", "s>"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join), st.booleans())
def test_offsets_of_an_echoed_text_are_places_in_it(
    server: Running, text: str, special_tokens: bool
) -> None:
    choice = echoed(server, prompt=text, add_special_tokens=special_tokens)
    assert choice["text"].startswith(text)
    generated = echoed(server, prompt=text, add_special_tokens=special_tokens, echo=False)
    moved = [len(text) + offset for offset in generated["logprobs"]["text_offset"]]
    number = len(choice["logprobs"]["tokens"]) - len(moved)
    check_slices(choice, number, hidden=int(special_tokens))
    assert choice["logprobs"]["text_offset"][number:] == moved
    assert choice["text"] == text + generated["text"]


def test_white_space_that_a_special_token_takes_shifts_no_offset(server: Running) -> None:
    text = "the  <mask> old"
    choice = echoed(server, prompt=text, max_tokens=0)
    logprobs = choice["logprobs"]
    begins = dict(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))
    assert begins["<mask>"] == 3
    assert begins[" old"] == 11


def test_names_of_tokens_differ_by_their_space(server: Running) -> None:
    """Else one of two candidates is lost from `top_logprobs`."""
    ids = server.post("/tokenize", prompt="er the", add_special_tokens=False).data["tokens"]
    choice = echoed(server, prompt=[*ids, 3], max_tokens=0)
    assert choice["logprobs"]["tokens"][-2:] == [" the", "the"]

"""Text as tokens come."""

import itertools
import json
from typing import Any

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from meshwright.data import ByteTokenizer, TextStream, added_text, last_character
from meshwright.data.tokenizers import HuggingFaceTokenizer
from meshwright.serving.server.logprobs import TextOffsets, TokenTexts


@given(st.text(max_size=30))
def test_pieces_make_up_the_text(text: str) -> None:
    stream = TextStream(ByteTokenizer())
    tokens = list(text.encode("utf-8", errors="ignore"))
    pieces = [stream.add(token) for token in tokens]
    whole = ByteTokenizer().decode(tokens)
    assert "".join(pieces) + stream.end() == whole


def test_special_tokens_can_be_shown() -> None:
    tokens = [104, 256, 105]
    for shown, text in ((False, "hi"), (True, "h<|endoftext|>i")):
        stream = TextStream(ByteTokenizer(), shown)
        assert "".join(map(stream.add, tokens)) + stream.end() == text


def sentencepiece() -> HuggingFaceTokenizer:
    """As Llama 2 and Mistral: decoding drops the space before the first token."""
    pieces = ["</s>", "\u2581", "\u2581the", "\u2581old", "er", "the", "<0xC3>", "<0xA9>", "a"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    inner = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    inner.add_special_tokens(["</s>"])
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip
    return HuggingFaceTokenizer(json.loads(inner.to_str()), "</s>")


CHARACTERS = st.lists(st.sampled_from([(0,), (1,), (2,), (3,), (4,), (5,), (6, 7)]), max_size=6)


@given(CHARACTERS, CHARACTERS, st.booleans())
def test_an_output_is_what_it_adds_to_the_text_of_its_prompt(
    prompt: Any, output: Any, named: bool
) -> None:
    tokenizer = sentencepiece()
    library = tokenizers.Tokenizer.from_str(json.dumps(tokenizer.to_json()["definition"]))
    prompt, output = list(itertools.chain(*prompt)), list(itertools.chain(*output))
    added = library.decode(prompt + output, not named)[len(library.decode(prompt, not named)) :]
    assert added_text(tokenizer, prompt, output, named) == added
    before = last_character(tokenizer, prompt, named)
    stream = TextStream(tokenizer, named, before)
    assert "".join(map(stream.add, output)) + stream.end() == added
    offsets = TextOffsets(TokenTexts(tokenizer, named), before=before)
    begins = [*map(offsets.add, output), offsets.add(5)]
    assert begins[-1] == len(added)


def test_an_output_after_a_part_of_a_character_begins_anew() -> None:
    stream = TextStream(sentencepiece(), before=last_character(sentencepiece(), [5, 6]))
    assert "".join(map(stream.add, [7, 5])) + stream.end() == "\ufffdthe"

"""Text as tokens come, and where it stops."""

import itertools
import json
from typing import Any

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from meshwright.data import ByteTokenizer
from meshwright.data.tokenizers import HuggingFaceTokenizer
from meshwright.serving.server.logprobs import TextOffsets, TokenTexts
from meshwright.serving.text import StopTexts, TextStream, last_character


@given(st.text(max_size=30))
def test_pieces_make_up_the_text(text: str) -> None:
    stream = TextStream(ByteTokenizer())
    tokens = list(text.encode("utf-8", errors="ignore"))
    pieces = [stream.add(token) for token in tokens]
    whole = ByteTokenizer().decode(tokens)
    assert "".join(pieces) + stream.end() == whole


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_ends_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    texts = StopTexts(stops)
    given_out = ""
    for piece in pieces:
        given_out += texts.add(piece)
        whole = "".join(pieces)
        assert whole.startswith(given_out)
        if texts.found:
            break
    given_out += texts.end()
    starts = [at for at in (whole.find(stop) for stop in stops) if at >= 0] if pieces else []
    if not starts:
        assert given_out == "".join(pieces)
    else:
        assert texts.found
        assert not any(stop in given_out for stop in stops)


def stopped(pieces: list[str], stops: list[str], early: int, include: bool) -> tuple[str, bool]:
    """As vLLM has it: a stop text counts if it ends in a piece after the first `early`."""
    text = ""
    for number, piece in enumerate(pieces):
        before, text = len(text), text + piece
        places = [
            (at, at + len(stop))
            for stop in stops
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > before
        ]
        if places and number >= early:
            begin, end = min(places)
            return text[: end if include else begin], True
    return text, False


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 6),
    st.booleans(),
)
def test_early_pieces_end_nothing_and_stop_texts_can_be_included(
    pieces: list[str], stops: list[str], early: int, include: bool
) -> None:
    texts, shown = StopTexts(stops, include), ""
    for number, piece in enumerate(pieces):
        shown += texts.add(piece, number < early)
        if texts.found:
            break
    assert (shown + texts.end(), texts.found) == stopped(pieces, stops, early, include)


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


CHARACTERS = st.lists(st.sampled_from([(1,), (2,), (3,), (4,), (5,), (6, 7)]), max_size=6)


@given(CHARACTERS, CHARACTERS)
def test_an_output_is_what_it_adds_to_the_text_of_its_prompt(prompt: Any, output: Any) -> None:
    tokenizer = sentencepiece()
    library = tokenizers.Tokenizer.from_str(json.dumps(tokenizer.to_json()["definition"]))
    prompt, output = list(itertools.chain(*prompt)), list(itertools.chain(*output))
    added = library.decode(prompt + output)[len(library.decode(prompt)) :]
    before = last_character(tokenizer, prompt)
    stream = TextStream(tokenizer, before=before)
    assert "".join(map(stream.add, output)) + stream.end() == added
    offsets = TextOffsets(TokenTexts(tokenizer), before=before)
    begins = [*map(offsets.add, output), offsets.add(5)]
    assert begins[-1] == len(added)


def test_an_output_after_a_special_token_or_a_part_of_a_character_begins_anew() -> None:
    for prompt, output, text in (([5, 0], [2], "the"), ([5, 6], [7, 5], "\ufffdthe")):
        stream = TextStream(sentencepiece(), before=last_character(sentencepiece(), prompt))
        assert "".join(map(stream.add, output)) + stream.end() == text

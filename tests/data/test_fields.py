"""EasyLM's fields: tokens and masks as its text processor makes them (shared facts of EasyLM)."""

import base64
import decimal
from typing import Any

import numpy as np
import pytest

from meshwright.data import ByteTokenizer, Encoding, Fields
from meshwright.data.examples import drafts_of, encode_drafts
from meshwright.data.pieces import encode_pieces
from meshwright.errors import MeshwrightError

RECORD = {"q": "ab", "p": "c", "a": "de", "spec": "[p],q", "n": 7}


class EasyLMBytes(ByteTokenizer):
    """Byte tokens of EasyLM's example: a=67, space=223, BOS=1, EOS=2.

    As in GPT-2, printable characters come first, so a space is far behind the letters.
    """

    end_of_document = 2

    def encode(self, text: str) -> Any:
        return np.array([223 if c == " " else ord(c) - ord("a") + 67 for c in text], np.int32)


def encoded(
    spec: str, record: dict[str, Any] = RECORD, **options: Any
) -> tuple[list[int], list[int]]:
    fields = Fields(spec, **{"bos": 1, **options})
    ((ids, mask),) = encode_pieces(
        [fields.pieces(record, EasyLMBytes.end_of_document)], EasyLMBytes()
    )
    return ids.tolist(), mask.tolist()


def test_the_documented_example() -> None:
    assert encoded("[q+p],a") == ([1, 67, 68, 223, 69, 70, 71, 2], [0, 0, 0, 0, 0, 1, 1, 1])


def test_literal_tokens_have_loss_unless_bracketed() -> None:
    bare = {"add_bos": False, "add_eos": False}
    assert encoded("<|bos|>,[<|eos|>],<|17|>,[<|3|>]", **bare) == ([1, 2, 17, 3], [1, 0, 1, 0])


def test_base64_tokens() -> None:
    for dtype in ("int32", "uint16"):
        text = base64.b64encode(np.array([5, 300], dtype).tobytes()).decode()
        found = encoded("[{t}],a", {"t": text, "a": "d"}, base64_dtype=dtype)
        assert found == ([1, 5, 300, 70, 2], [0, 0, 0, 1, 1])


def test_separator_and_text_before_the_first_field() -> None:
    found = encoded("q+p,a", separator="", prepend_text="b", add_bos=False, add_eos=False)
    assert found == ([68, 67, 68, 69, 70, 71], [1] * 6)
    # only before text
    assert encoded("<|5|>,a", prepend_text="b", add_bos=False, add_eos=False)[0] == [5, 70, 71]


def test_the_fields_may_stand_in_the_record() -> None:
    assert encoded("", from_example="spec") == ([1, 69, 67, 68, 2], [0, 0, 1, 1, 1])


def test_a_tokenizer_without_bos_begins_without_it() -> None:
    assert encoded("q", bos=None) == ([67, 68, 2], [1, 1, 1])
    with pytest.raises(MeshwrightError, match=r"<\|bos\|>, which the tokenizer does not have"):
        encoded("<|bos|>,q", bos=None)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("[q,a]", "'[q' is not a field"), ("q,,a", "'' is not a field"), ("x", "has no 'x'"),
        ("q+x", "has no 'x'"), ("{q}", "base64-encoded int32"), ("", "--fields-from-example"),
    ],
)  # fmt: skip
def test_mistakes_are_named(spec: str, words: str) -> None:
    with pytest.raises(MeshwrightError) as said:
        encoded(spec)
    assert words in str(said.value)


def test_a_number_is_text() -> None:
    for value in (1.5, decimal.Decimal("1.5")):
        assert encoded("q", {"q": value}) == encoded("q", {"q": "1.5"})


@pytest.mark.parametrize("value", [["ab"], {"k": "ab"}, True, b"ab"])
def test_a_value_that_is_no_text_is_refused(value: Any) -> None:
    """EasyLM refuses it too; its Python text would be trained on."""
    with pytest.raises(MeshwrightError, match=f"'q' is {type(value).__name__}, not text"):
        encoded("[p+q],a", RECORD | {"q": value})


@pytest.mark.parametrize("token", [400, 10**20])
def test_an_id_that_the_tokenizer_does_not_have_is_named(token: int) -> None:
    encoding = Encoding(fields=Fields(f"[q],<|{token}|>", bos=1))
    with pytest.raises(MeshwrightError, match=f"token id {token} is not one of the tokenizer"):
        drafts_of(RECORD, "fields", encoding, EasyLMBytes())


def test_examples_may_count_equally() -> None:
    encoding = Encoding(fields=Fields("[q+p],a", bos=1), weigh="examples")
    drafts = drafts_of(RECORD, "fields", encoding, EasyLMBytes())
    ((_, weights),) = encode_drafts(drafts, encoding, EasyLMBytes())
    np.testing.assert_allclose(weights, np.array([0, 0, 0, 0, 0, 1, 1, 1]) / 3, rtol=1e-6)

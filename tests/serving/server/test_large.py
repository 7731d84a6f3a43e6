"""Large requests: others are answered meanwhile, and what cannot be served is refused early."""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.patience import PATIENCE_S
from tests.serving.server.bigram_engine import BigramEngine
from tests.serving.server.serving import Answer, Running, serving
from tests.serving.server.test_limits import in_background
from tokenizers import decoders, models, normalizers, pre_tokenizers
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from meshwright.data import ByteTokenizer, ChatTemplate
from meshwright.data.tokenizers import HuggingFaceTokenizer
from meshwright.serving.grammars import LARGEST
from meshwright.serving.server import chat, completions, easylm, formats, transport
from meshwright.serving.server.bodies import json_values
from meshwright.serving.server.encoding import encoded, encoded_answer
from meshwright.serving.server.logprobs import LogprobWriter
from meshwright.serving.settings import LimitsConfig

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = "a" * 20_000
MESSAGE = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}
IDS = [65 + index % 26 for index in range(200)]
SCORED = {"prompt": IDS, "max_tokens": 0, "echo": True, "logprobs": 20}
CHOICES = {
    "messages": [MESSAGE], "n": 5, "max_tokens": 50, "ignore_eos": True, "logprobs": True, "top_logprobs": 20,
}  # fmt: skip
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}


@pytest.fixture(scope="module")
def long_server() -> Iterator[Running]:
    with serving(BigramEngine(max_length=50_000)) as running:
        yield running


@pytest.mark.parametrize(
    ("owner", "name", "path", "body"),
    [
        (transport, "decoded", COMPLETIONS, {"prompt": LONG, "max_tokens": 1}),
        (transport, "decoded", "/detokenize", {"tokens": [65] * 9000}),
        (ByteTokenizer, "encode_batch", COMPLETIONS, {"prompt": LONG, "max_tokens": 1}),
        (ByteTokenizer, "encode_batch", COMPLETIONS, {"prompt": [LONG, "b"], "max_tokens": 1}),
        (ByteTokenizer, "encode_with_offsets", COMPLETIONS, {"prompt": LONG, "max_tokens": 0, "echo": True}),
        (ByteTokenizer, "decode", COMPLETIONS, {"prompt": [65] * 9000, "max_tokens": 0, "echo": True}),
        (ByteTokenizer, "decode", "/detokenize", {"tokens": [65] * 9000}),
        (ByteTokenizer, "encode_batch", "/tokenize", {"prompt": LONG}),
        (ByteTokenizer, "token_text", "/tokenize", {"prompt": LONG, "return_token_strs": True}),
        (ChatTemplate, "render", CHAT, {"messages": [MESSAGE] * 600, "max_tokens": 1}),
        (ChatTemplate, "render", CHAT, {"messages": [MESSAGE], "tools": [TOOL] * 400, "max_tokens": 1}),
        (ChatTemplate, "render", "/tokenize", {"messages": [MESSAGE] * 600}),
        (formats, "json_rule", CHAT, {"messages": [MESSAGE], "tools": [TOOL], "tool_choice": "required", "max_tokens": 1}),
        (formats.Grammar, "json", CHAT, {"messages": [MESSAGE], "response_format": SCHEMA, "max_tokens": 1}),
        (ByteTokenizer, "encode_batch", "/generate", {"prefix_text": [LONG]}),
        (ByteTokenizer, "encode", "/loglikelihood", {"text": [LONG]}),
        (ByteTokenizer, "encode", "/loglikelihood-rolling", {"text": [LONG]}),
        (ByteTokenizer, "encode_batch", "/greedy-until", {"prefix_text": [LONG], "until": ["a"]}),
        # small bodies, large answers
        (LogprobWriter, "_by_name", COMPLETIONS, SCORED),
        (LogprobWriter, "_by_name", COMPLETIONS, SCORED | {"stream": True}),
        (LogprobWriter, "_ranked", COMPLETIONS, {"prompt": IDS, "max_tokens": 0, "prompt_logprobs": 20}),
        (LogprobWriter, "_ranked", CHAT, {"messages": [MESSAGE] * 10, "n": 10, "max_tokens": 1, "prompt_logprobs": 20}),
        (LogprobWriter, "_entry", CHAT, CHOICES),
        (completions, "encoded_answer", COMPLETIONS, SCORED),
        (completions, "event", COMPLETIONS, SCORED | {"stream": True}),
        (chat, "encoded_answer", CHAT, CHOICES),
        (easylm, "_sums", "/loglikelihood", {"text": ["a" * 3000]}),
    ],
)  # fmt: skip
def test_other_requests_are_answered_while_a_large_one_is_worked_on(
    long_server: Running,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    path: str,
    body: dict[str, Any],
) -> None:
    """`name` waits until /health was answered, which never comes if it runs on the event loop."""
    begun, answered = threading.Event(), threading.Event()
    plain: Callable[..., Any] = getattr(owner, name)

    def waiting(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        assert answered.wait(PATIENCE_S), "/health was not answered"
        return plain(*args, **kwargs)

    monkeypatch.setattr(owner, name, waiting)
    with in_background(lambda: long_server.post(path, **body)) as answers:
        assert begun.wait(PATIENCE_S)
        health = long_server.get("/health")
        answered.set()
    assert health.status == 200
    assert answers[0].status == 200, answers[0].text


def test_a_small_request_does_not_wait_for_large_ones(
    long_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, answered = ByteTokenizer.decode, threading.Event()

    def waiting(self: ByteTokenizer, ids: Any, special_tokens: bool = False) -> str:
        assert len(ids) < 100 or answered.wait(PATIENCE_S), "the small request was not answered"
        return plain(self, ids, special_tokens)

    monkeypatch.setattr(ByteTokenizer, "decode", waiting)
    with (
        in_background(lambda: long_server.post("/detokenize", tokens=[65] * 9000)) as first,
        in_background(lambda: long_server.post("/detokenize", tokens=[65] * 9000)) as second,
        in_background(lambda: long_server.post("/detokenize", tokens=[65] * 9000)) as third,
    ):
        assert long_server.post("/detokenize", tokens=[65]).data == {"prompt": "A"}
        answered.set()
    assert [answers[0].status for answers in (first, second, third)] == [200] * 3


# ---- large answers ------------------------------------------------------------------------------


def test_a_large_answer_has_every_choice_of_every_prompt_in_order(long_server: Running) -> None:
    prompts = [IDS[:index] for index in range(100, 164)]
    fields = SCORED | {"prompt": prompts, "n": 2, "prompt_logprobs": 3}
    large = long_server.post(COMPLETIONS, **fields)
    assert len(large.text) > 4 * transport._SENT_BYTES
    assert large.headers["content-length"] == str(len(large.text.encode()))
    assert list(large.data) == ["id", "object", "created", "model", "choices", "usage"]
    choices = large.data["choices"]
    assert [choice.pop("index") for choice in choices] == list(range(128))
    for prompt, *pair in zip(prompts, choices[::2], choices[1::2], strict=True):
        small = long_server.post(COMPLETIONS, **fields | {"prompt": prompt, "n": 1})
        (expected,) = small.data["choices"]
        assert expected.pop("index") == 0
        assert pair == [expected, expected]


def test_a_large_event_is_that_of_the_answer_at_once(long_server: Running) -> None:
    fields = SCORED | {"prompt": IDS * 20}
    (expected,) = long_server.post(COMPLETIONS, **fields).data["choices"]
    *events, end = long_server.post(COMPLETIONS, **fields, stream=True).events
    assert (events[0]["choices"], end) == ([expected], "[DONE]")


def test_an_error_while_a_large_answer_is_assembled_is_answered(
    long_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("no name")

    monkeypatch.setattr(LogprobWriter, "_by_name", fails)
    answer = long_server.post(COMPLETIONS, **SCORED)
    assert (answer.status, answer.data["error"]["type"]) == (500, "server_error")
    assert long_server.server.service.in_flight == 0


ENTRIES = st.lists(st.integers() | st.text(max_size=3) | st.lists(st.none(), max_size=2), max_size=200)  # fmt: skip


@given(ENTRIES, ENTRIES, ENTRIES)
def test_iterators_are_encoded_as_lists(first: list[Any], second: list[Any], third: list[Any]) -> None:  # fmt: skip
    value = {"a": first, "b": {"c": second}, "d": [{"e": third}]}
    lazy = {"a": iter(first), "b": {"c": iter(second)}, "d": iter([{"e": iter(third)}])}
    assert json.loads(encoded(lazy)) == value
    lazy = {"a": iter(first), "b": {"c": iter(second)}, "d": [{"e": iter(third)}]}
    parts = encoded_answer({"id": "x"}, [lazy, 1], {"usage": iter(second)})
    assert json.loads(b"".join(parts)) == {"id": "x", "choices": [value, 1], "usage": second}


def test_what_is_no_json_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match="object is no JSON"):
        encoded({"a": object()})


def test_others_are_served_between_parts_of_a_body(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one byte take the parser long, so the event loop gives it little at once."""
    sizes = []
    plain = AutoHTTPProtocol.data_received

    def data_received(self: AutoHTTPProtocol, data: bytes) -> None:
        sizes.append(len(data))
        plain(self, data)

    monkeypatch.setattr(AutoHTTPProtocol, "data_received", data_received)
    assert server.post("/tokenize", prompt="a" * 300_000).data["count"] == 300_000
    assert sum(sizes) > 300_000
    assert max(sizes) <= 1 << 14


# ---- lists that are too long --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {"messages": [MESSAGE] * 21}, "messages has 21 entries; the server takes 20 (--limits.messages)"),
        ("/tokenize", {"messages": [MESSAGE] * 21}, "(--limits.messages)"),
        (CHAT, {"messages": [MESSAGE], "tools": [TOOL] * 11}, "tools has 11 entries; the server takes 10 (--limits.tools)"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [1] * 1025}, "stop_token_ids has 1,025 entries; the server takes 1,024"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias has 1,025 entries"),
        ("/generate", {"prefix_text": ["a"] * 31}, "prefix_text has 31 entries; the server takes 30 (--limits.texts)"),
        ("/greedy-until", {"prefix_text": ["a"] * 31, "until": ["b"] * 31}, "(--limits.texts)"),
        ("/loglikelihood", {"text": ["a"] * 31}, "text has 31 entries"),
        ("/loglikelihood-rolling", {"text": ["a"] * 31}, "text has 31 entries"),
    ],
)  # fmt: skip
def test_a_list_that_is_too_long_is_refused_with_the_setting(
    path: str, body: dict[str, Any], message: str
) -> None:
    with serving(limits=LimitsConfig(messages=20, tools=10, texts=30)) as server:
        answer = server.post(path, **body)
        is_easylm = path in ("/generate", "/greedy-until") or path.startswith("/loglikelihood")
        assert answer.status == (422 if is_easylm else 400), answer.text
        assert message in answer.text
        assert not server.engine.seen


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": [1] * 2000}),
        (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 2000}),
        (COMPLETIONS, {"prompt": "a", "metadata": [[]] * 2000}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 600}]}),
        (CHAT, {"messages": [MESSAGE], "tools": [{"function": {str(i): i for i in range(2000)}}]}),
        ("/detokenize", {"tokens": [1] * 2000}),
        ("/loglikelihood", {"text": ["a"] * 2000}),
        ("/chat", {"prompt": "a", "other": [{}] * 2000}),
    ],
)
def test_a_body_of_too_many_values_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    def decode(*args: object, **kwargs: object) -> None:
        raise AssertionError("the body was decoded")

    with serving(limits=LimitsConfig(body_values=1100)) as server:
        monkeypatch.setattr("meshwright.serving.server.bodies.msgspec.json.decode", decode)
        answer = server.post(path, **body)
        monkeypatch.undo()
        assert answer.status == 413, answer.text
        assert "the server takes 1,100 (--limits.body-values)" in answer.message
        # the longest prompt is taken in any case
        ids = server.post(COMPLETIONS, prompt=[65] * 500, max_tokens=1, metadata=[1, [2], {}])
        assert ids.status == 200


def test_a_text_that_takes_too_long_to_tokenize_is_refused() -> None:
    with serving(limits=LimitsConfig(characters=1000)) as server:
        for path, body in (
            ("/tokenize", {"prompt": "a" * 1001}),
            ("/generate", {"prefix_text": ["a", "a" * 1001]}),
            ("/loglikelihood-rolling", {"text": ["a" * 1001]}),
            (COMPLETIONS, {"prompt": " " * 1001}),
        ):
            answer = server.post(path, **body)
            assert answer.status == 413
            assert "the server tokenizes 1,000 at once (--limits.characters)" in answer.message
    with serving(limits=LimitsConfig(characters=100)) as server:  # the longest prompt is taken
        assert server.post(COMPLETIONS, prompt="a" * 511, max_tokens=1).status == 200


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('",[]{}\\:aé\n'), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.sampled_from('",\\{a'), max_size=4), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


def counted(value: Any) -> int:
    """As json_values documents it."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return 1 + sum(map(counted, inner)) + (not value)
    return 1


@given(VALUES, st.booleans())
@example(["\\", '"', "\\\\", '\\"', ","], False)
def test_values_of_json_are_counted_without_decoding_it(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert json_values(text) == counted(value)


def test_values_are_counted_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    value = ["a,[{", 'b"\\', {"c,": [1, [], ","]}] * 5
    for size in range(1, 30):
        monkeypatch.setattr("meshwright.serving.server.bodies._BLOCK", size)
        assert json_values(json.dumps(value).encode()) == counted(value)


def test_a_schema_that_is_too_large_is_refused(long_server: Running) -> None:
    properties = {f"p{index}": {"type": "string"} for index in range(8000)}
    schema = {"type": "object", "properties": properties}
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    answer = long_server.post(CHAT, messages=[MESSAGE], max_tokens=1, response_format=wanted)
    assert (answer.status, answer.data["error"]["param"]) == (400, "response_format")
    assert f"more than {LARGEST:,} characters" in answer.message


# ---- refused by the number of characters --------------------------------------------------------


def tokenizer(**parts: Any) -> HuggingFaceTokenizer:
    """A byte-level BPE tokenizer with a few merges; `parts` replace some of it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "a"), ("aa", "aa"), ("aaaa", "aaaa"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("Ã", "©")]
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [*alphabet, *("".join(merge) for merge in merges), *bytes_of, "[UNK]"]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    inner = tokenizers.Tokenizer(models.BPE(vocab, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    for name, part in parts.items():
        value = part(vocab, merges) if name == "model" else part
        setattr(inner, name, value)
    inner.add_special_tokens(["<s>", tokenizers.AddedToken("<mask>", lstrip=True, rstrip=True)])
    return HuggingFaceTokenizer(json.loads(inner.to_str()), "<s>")


def fallback(vocab: dict[str, int], merges: list[tuple[str, str]]) -> models.BPE:
    return models.BPE(vocab, merges, byte_fallback=True)


def sentencepiece_steps() -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])


LIMITED = {
    "byte level": tokenizer(),
    "with NFC": tokenizer(normalizer=normalizers.NFC()),
    "with NFKC, lower case": tokenizer(
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "byte fallback": tokenizer(
        model=fallback,
        pre_tokenizer=pre_tokenizers.Metaspace(),
        normalizer=sentencepiece_steps(),
    ),
}
UNLIMITED = {
    "removes words": tokenizer(pre_tokenizer=pre_tokenizers.Split("b", "removed")),
    "one id for unknown characters": tokenizer(
        model=lambda vocab, merges: models.BPE(vocab, merges, unk_token="[UNK]", fuse_unk=True),
        pre_tokenizer=pre_tokenizers.Metaspace(),
    ),
    "strips accents": tokenizer(
        normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    ),
    "removes by an expression": tokenizer(
        normalizer=normalizers.Replace(tokenizers.Regex("b+"), "b")
    ),
    "words": tokenizer(model=lambda vocab, _: models.WordPiece(vocab, unk_token="[UNK]")),
}
PIECES = st.sampled_from(
    ["a" * 8, "a" * 64, "aaaa", " " * 4, " " * 40, "é", "e\u0301", "<mask>", " <mask>   ", "<s>", "b", "\n",
     "\u1112\u1161\u11ab", "\u03b1\u0313\u0300\u0345", "\u2581", "İ", "😀"]
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.lists(PIECES, max_size=12).map("".join) | st.text(max_size=30))
def test_a_text_has_no_fewer_tokens_than_its_characters_allow(text: str) -> None:
    for name, each in LIMITED.items():
        assert each.longest_token is not None, name
        characters = len("".join(text.split()))
        assert len(each.encode(text)) * each.longest_token >= characters, name


@pytest.mark.parametrize("name", UNLIMITED)
def test_there_is_no_limit_for_tokenizers_that_drop_characters(name: str) -> None:
    assert UNLIMITED[name].longest_token is None


def test_a_text_that_cannot_fit_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*args: object) -> None:
        raise AssertionError("the text was tokenized")

    def refused(server: Running, path: str, **body: Any) -> Answer:
        answer = server.post(path, **body)
        assert (answer.status, answer.data["error"]["code"]) == (400, "context_length_exceeded")
        return answer

    with serving() as server:  # its tokens are bytes
        for name in ("encode", "encode_batch"):
            monkeypatch.setattr(ByteTokenizer, name, encode)
        answer = refused(server, COMPLETIONS, prompt="b" * 513)
        assert "513 characters, which are at least 513 tokens" in answer.message
        assert answer.data["error"]["param"] == "prompt"
        refused(server, COMPLETIONS, prompt=["a", "b" * 200_000])
        answer = refused(server, CHAT, messages=[{"role": "user", "content": "b" * 200_000}])
        assert answer.data["error"]["param"] == "messages"


def test_a_text_that_is_truncated_may_be_longer() -> None:
    with serving() as server:
        fields = {"truncate_prompt_tokens": 5, "max_tokens": 1}
        assert server.post(COMPLETIONS, prompt="a" * 20_000, **fields).status == 200
        messages = [{"role": "user", "content": "a" * 20_000}]
        assert server.post(CHAT, messages=messages, **fields).status == 200
        assert [len(request.prompt) for request in server.engine.seen] == [5, 5]


def test_the_longest_text_that_fits_is_served() -> None:
    with serving(BigramEngine(max_length=512, tokenizer=LIMITED["byte level"])) as server:
        longest = server.engine.tokenizer.longest_token
        assert longest == 8
        only_echo = {"echo": True, "max_tokens": 0}
        for text in ("a" * 512 * 8, " " * 4 * 512, " " * 100_000 + "<mask>" + " " * 100_000):
            answer = server.post(COMPLETIONS, prompt=text, **only_echo)
            assert answer.status == 200, answer.text
        for text in ("a" * (512 * 8 + 1), "a" * 100_000):
            assert server.post(COMPLETIONS, prompt=text, **only_echo).status == 400
        # a text that is only counted may have any length
        assert server.post("/tokenize", prompt="a" * 100_000).data["count"] == 12_500
        messages = [{"role": "user", "content": "a" * 100_000}]
        assert server.post("/tokenize", messages=messages).data["count"] > 12_500

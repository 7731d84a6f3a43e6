"""Text to token ids and back: bytes, or any Hugging Face tokenizer.json.

>>> tokenizer = load_tokenizer("bytes")
>>> tokenizer.encode("Hi!").tolist(), tokenizer.decode([72, 105, 33, 256])
([72, 105, 33], 'Hi!')
>>> tokenizer.vocab, tokenizer.end_of_document
(257, 256)
"""

import functools
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.hub import TOKENIZER, local_folder

Ids = npt.NDArray[np.int32]
Span = tuple[int, int]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# usual end-of-document tokens, for a tokenizer.json without a config beside it
USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>")


class Tokenizer(Protocol):
    """The tokenizer interface that packing, training and sampling use."""

    kind: ClassVar[str]

    @property
    def vocab(self) -> int:
        """Vocabulary size: the largest id plus one."""

    @property
    def missing(self) -> tuple[int, ...]:
        """Ids below `vocab` that no token has."""

    @property
    def end_of_document(self) -> int:
        """The id that ends each document."""

    @property
    def identity(self) -> str:
        """A hash of everything that affects ids: equal for equivalent tokenizers."""

    @property
    def longest_token(self) -> int | None:
        """Most characters of a text that one id stands for, white space not counted.

        A text of n such characters has at least n / longest_token ids. None: there is no such
        limit, as where all unknown characters of a word become one id.
        """

    def encode(self, text: str) -> Ids:
        """The ids of one text, without special tokens."""

    def encode_batch(self, texts: Sequence[str], special_tokens: bool = False) -> list[Ids]:
        """The ids of several texts, in parallel where the tokenizer can."""

    def encode_with_offsets(self, text: str, special_tokens: bool) -> tuple[list[int], list[int]]:
        """The ids of a text, and the character of it where each begins.

        Ids that share a character begin at the same one; a special id that is not in the text has
        no characters.
        """

    def encode_spans(
        self, texts: Sequence[str], spans: Sequence[Sequence[Span]], special_tokens: bool = False
    ) -> list[tuple[Ids, list[slice]]]:
        """The ids of several texts, and for each span of a text the ids that hold characters of it.

        A span is from its first character to before its last.
        """

    def decode(self, ids: Iterable[int], special_tokens: bool = False) -> str:
        """The text of any ids. Cut characters and unknown ids become `�`.

        Special ids vanish, or are shown by name with `special_tokens`.
        """

    def token_text(self, token: int) -> str:
        """The text of one id: special tokens by name, a part of a character as `�`."""

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes of one id, also of a part of a character; None if they are not known."""

    def to_json(self) -> dict[str, Any]:
        """Everything `tokenizer_from_json` needs to rebuild this tokenizer."""


class ByteTokenizer:
    """UTF-8 bytes are the ids 0 to 255; 256 ends a document."""

    kind: ClassVar[str] = "bytes"
    vocab = 257
    missing = ()
    end_of_document = 256
    identity = "bytes-1"
    longest_token = 1

    def encode(self, text: str) -> Ids:
        return np.frombuffer(_utf8(text), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str], special_tokens: bool = False) -> list[Ids]:
        return [self.encode(text) for text in texts]

    def encode_with_offsets(self, text: str, special_tokens: bool) -> tuple[list[int], list[int]]:
        lengths = [len(_utf8(character)) for character in text]
        return self.encode(text).tolist(), np.repeat(np.arange(len(text)), lengths).tolist()

    def encode_spans(
        self, texts: Sequence[str], spans: Sequence[Sequence[Span]], special_tokens: bool = False
    ) -> list[tuple[Ids, list[slice]]]:
        return [
            (self.encode(text), [slice(*(len(_utf8(text[:at])) for at in span)) for span in marked])
            for text, marked in zip(texts, spans, strict=True)
        ]

    def decode(self, ids: Iterable[int], special_tokens: bool = False) -> str:
        tokens = np.fromiter(ids, np.int64)
        ends = np.flatnonzero(tokens == self.end_of_document)
        # 0xff never occurs in UTF-8, so an id outside the vocabulary becomes �
        known = np.where((tokens >= 0) & (tokens < 256), tokens, 255).astype(np.uint8)
        if not special_tokens:
            return np.delete(known, ends).tobytes().decode("utf-8", errors="replace")
        documents = (part.tobytes() for part in np.split(known, ends))
        first, *rest = (part.decode("utf-8", errors="replace") for part in documents)
        return first + "".join("<|endoftext|>" + text[1:] for text in rest)

    def token_text(self, token: int) -> str:
        return self.decode([token], special_tokens=True)

    def token_bytes(self, token: int) -> bytes | None:
        return bytes([token]) if 0 <= token < 256 else _utf8(self.token_text(token))

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind}


class HuggingFaceTokenizer:
    """A tokenizer.json, run by the `tokenizers` library."""

    kind: ClassVar[str] = "huggingface"

    def __init__(self, definition: dict[str, Any], end_token: str):
        # a tokenizer.json may truncate or pad texts, which is meant for inference, not for packing
        self._definition = definition | {"truncation": None, "padding": None}
        self._end_token = end_token
        text = json.dumps(self._definition, ensure_ascii=False, sort_keys=True)
        self._inner = _from_definition(text)
        _keep_spaces(self._inner.post_processor)
        vocabulary: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        if end_token not in vocabulary:
            raise MeshwrightError(
                f"end-of-document token {end_token!r} is not in the tokenizer's vocabulary"
                f"{did_you_mean(end_token, _special_tokens(definition))}"
            )
        self.vocab = max(vocabulary.values()) + 1
        self.missing = tuple(sorted(set(range(self.vocab)) - set(vocabulary.values())))
        self.longest_token = longest_token(self._definition, vocabulary)
        self.end_of_document = vocabulary[end_token]
        digest = hashlib.sha256(f"{self.end_of_document}\n{text}".encode())
        self.identity = f"huggingface-{digest.hexdigest()[:32]}"

    def encode(self, text: str) -> Ids:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], special_tokens: bool = False) -> list[Ids]:
        try:
            encodings = self._inner.encode_batch_fast(
                list(texts), add_special_tokens=special_tokens
            )
        except (UnicodeEncodeError, TypeError):
            for text in texts:
                _utf8(text)
            raise
        return [_as_array(encoding.ids) for encoding in encodings]

    def encode_with_offsets(self, text: str, special_tokens: bool) -> tuple[list[int], list[int]]:
        _utf8(text)
        # of a batch: the library lets other threads run only then
        (encoding,) = self._inner.encode_batch([text], add_special_tokens=special_tokens)
        begins, end = [], 0
        for first, last in encoding.offsets:
            # characters that no token has, as white space before a special token, go to the next
            begins.append(min(first, end) if last > first else end)
            end = max(end, last)
        return encoding.ids, begins

    def encode_spans(
        self, texts: Sequence[str], spans: Sequence[Sequence[Span]], special_tokens: bool = False
    ) -> list[tuple[Ids, list[slice]]]:
        encodings = self._inner.encode_batch(list(texts), add_special_tokens=special_tokens)
        return [
            (_as_array(encoding.ids), [_ids_of_span(encoding, *span) for span in marked])
            for encoding, marked in zip(encodings, spans, strict=True)
        ]

    def decode(self, ids: Iterable[int], special_tokens: bool = False) -> str:
        text = ""
        for known, run in _runs(ids, self.vocab):
            if known:  # as a batch: the library lets other threads run only then
                (decoded,) = self._inner.decode_batch([run], not special_tokens)
                text += decoded
            else:
                text += REPLACEMENT * len(run)
        return text

    def token_text(self, token: int) -> str:
        return self.decode([token], special_tokens=True)

    def token_bytes(self, token: int) -> bytes | None:
        text = self.token_text(token)
        if REPLACEMENT not in text:
            return text.encode()
        piece = self._inner.id_to_token(token)
        if piece is None:
            return None
        if found := re.fullmatch("<0x([0-9A-F]{2})>", piece):
            return bytes.fromhex(found[1])
        characters = byte_characters()
        return bytes(map(characters.index, piece)) if {*piece} <= {*characters} else None

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "end_token": self._end_token,
            "definition": self._definition,
        }


def load_tokenizer(name: str | Path, end_token: str | None = None) -> Tokenizer:
    """`"bytes"`, a tokenizer.json, a folder that holds one, or the name of a model on the Hub.

    The end-of-document token is `end_token`, else the `eos_token` of the files beside
    tokenizer.json, else the only usual name among its special tokens.
    """
    if str(name) == "bytes":
        if end_token is not None:
            raise MeshwrightError(
                f"end token {end_token!r}: the byte tokenizer always uses id 256; leave it out"
            )
        return ByteTokenizer()
    path = local_folder(name, TOKENIZER)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise MeshwrightError(
            f"tokenizer {str(name)!r}: file '{file}' does not exist; give 'bytes', a "
            "tokenizer.json or a folder that holds one"
        )
    definition = _read_json(file)
    if definition == _bytes_definition(ByteTokenizer.end_of_document) and end_token is None:
        return ByteTokenizer()  # whose stores are as good
    return HuggingFaceTokenizer(definition, end_token or _find_end_token(file, definition))


def added_tokens(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer itself puts before a text, such as begin-of-text, and after it."""
    plain, whole = (tokenizer.encode_batch(["a"], special)[0].tolist() for special in (False, True))
    first = next(at for at in range(len(whole) + 1) if whole[at : at + len(plain)] == plain)
    return whole[:first], whole[first + len(plain) :]


def tokenizer_folder(name: str | Path) -> Path:
    """The folder of the files beside a tokenizer that `load_tokenizer` takes."""
    path = local_folder(name, TOKENIZER)
    return path.parent if path.is_file() else path


def tokenizer_from_json(saved: dict[str, Any]) -> Tokenizer:
    """Rebuild a tokenizer from the data of `to_json`."""
    if saved.get("kind") == ByteTokenizer.kind:
        return ByteTokenizer()
    if saved.get("kind") == HuggingFaceTokenizer.kind:
        return HuggingFaceTokenizer(saved["definition"], saved["end_token"])
    raise MeshwrightError(
        f"tokenizer of kind {saved.get('kind')!r} is not known"
        f"{did_you_mean(str(saved.get('kind')), [ByteTokenizer.kind, HuggingFaceTokenizer.kind])}"
    )


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """The files from which transformers makes the same tokenizer, by name."""
    saved = tokenizer.to_json()
    if saved["kind"] == HuggingFaceTokenizer.kind:
        definition, end = saved["definition"], saved["end_token"]
    else:
        definition, end = _bytes_definition(tokenizer.end_of_document), _BYTES_END
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    settings |= {"clean_up_tokenization_spaces": False}
    return {"tokenizer.json": definition, "tokenizer_config.json": settings}


_BYTES_END = "<|endoftext|>"


@functools.cache
def byte_characters() -> tuple[str, ...]:
    """The characters by which byte-level tokenizers write bytes: printable ones as they are."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in plain else next(others)) for byte in range(256))


def _bytes_definition(end: int) -> dict[str, Any]:
    """A tokenizer.json whose ids are the bytes of UTF-8, without merges."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": end, "content": _BYTES_END, **special, "special": True}],
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": False},
        "post_processor": None,
        "decoder": {**level, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(byte_characters())},
            "merges": [],
        },
    }


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as reason:
        # JSON can spell half of a surrogate pair, which is no character
        raise MeshwrightError(f"text contains an unpaired surrogate ({reason.reason})") from None


def _runs(ids: Iterable[int], vocab: int) -> Iterator[tuple[bool, list[int]]]:
    """Runs of ids that are all in the vocabulary, or all not."""
    tokens = np.fromiter(ids, np.int64)
    known = (tokens >= 0) & (tokens < vocab)
    for run in np.split(tokens, np.flatnonzero(np.diff(known)) + 1) if len(tokens) else ():
        yield bool(0 <= run[0] < vocab), run.tolist()


def _ids_of_span(encoding: Any, start: int, stop: int) -> slice:
    """The ids of an encoding that hold characters of a span."""

    def first_of(characters: range) -> int | None:
        # no id has some characters, as white space before a special token
        found = (encoding.char_to_token(at) for at in characters)
        return next((one for one in found if one is not None), None)

    first, last = first_of(range(start, stop)), first_of(range(start, stop)[::-1])
    if first is None or last is None:
        return slice(0)
    # a character may have several ids, of which the first was found
    while (place := encoding.token_to_chars(last + 1)) and start <= place[0] < stop:
        last += 1
    return slice(first, last + 1)


def _as_array(ids: list[int]) -> Ids:
    """In parts, between which other threads run: a list of millions takes long to read."""
    parts = (ids[at : at + _PART] for at in range(0, len(ids), _PART))
    return np.concatenate([np.empty(0, np.int32), *(np.array(part, np.int32) for part in parts)])


def longest_token(definition: dict[str, Any], vocabulary: Collection[str]) -> int | None:
    """`Tokenizer.longest_token` of a tokenizer.json; None where a part of it may drop characters.

    >>> bpe, pieces = {"type": "BPE", "byte_fallback": True}, [f"<0x{b:02X}>" for b in range(256)]
    >>> longest_token({"model": bpe}, [*pieces, "<|end|>"])
    7
    >>> longest_token({"model": bpe, "pre_tokenizer": {"type": "Whitespace"}}, pieces)
    """
    from tokenizers.pre_tokenizers import ByteLevel

    model = definition["model"]
    normalizers = _steps(definition.get("normalizer"), "normalizers")
    splits = _steps(definition.get("pre_tokenizer"), "pretokenizers")
    # every byte must have an id: unknown characters are dropped, or many of them become one id
    by_bytes = any(step["type"] == "ByteLevel" for step in (*normalizers, *splits))
    byte_names = ByteLevel.alphabet() if by_bytes else [f"<0x{byte:02X}>" for byte in range(256)]
    knows_all = (by_bytes or model.get("byte_fallback")) and {*vocabulary}.issuperset(byte_names)
    keeps_all = all(map(_keeps_characters, (*normalizers, *splits)))
    if model.get("type") not in ("BPE", "Unigram") or not knows_all or not keeps_all:
        return None
    composed = any(step["type"] in ("NFC", "NFKC") for step in normalizers)
    # Unicode composes at most four characters to one
    return max(map(len, vocabulary)) * (4 if composed else 1)


def _steps(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, which may be sequences of sequences."""
    if part is None:
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [step for inner in part[name] for step in _steps(inner, name)]


def _keeps_characters(step: dict[str, Any]) -> bool:
    """Whether a normalizer or pre-tokenizer never makes a text shorter, white space aside."""
    if step["type"] == "Replace":
        replaced = step["pattern"].get("String")
        return replaced is not None and len(step["content"]) >= len(replaced)
    if step["type"] == "Split":
        return bool(step["behavior"] != "Removed")
    return step["type"] in _KEEPING


_KEEPING = frozenset(
    ("ByteLevel", "Metaspace", "Digits", "Prepend", "Lowercase", "NFC", "NFD", "NFKC", "NFKD")
)
_PART = 1 << 16


def _from_definition(text: str) -> Any:
    try:
        from tokenizers import Tokenizer as Inner
    except ImportError:
        raise MeshwrightError(
            "a Hugging Face tokenizer needs the 'tokenizers' library: pip install tokenizers"
        ) from None
    try:
        return Inner.from_str(text)
    except Exception as reason:  # the library raises plain Exception
        raise MeshwrightError(
            f"the 'tokenizers' library cannot read tokenizer.json: {reason}"
        ) from None


def _keep_spaces(post_processor: Any) -> None:
    """Have the offsets of a token begin at its space; ids are not affected."""
    steps = post_processor if type(post_processor).__name__ == "Sequence" else (post_processor,)
    for step in steps:
        if hasattr(step, "trim_offsets"):
            step.trim_offsets = False


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as reason:
        raise MeshwrightError(f"tokenizer file '{file}' cannot be read: {reason}") from None
    if not isinstance(value, dict):
        raise MeshwrightError(f"tokenizer file '{file}' is not a JSON object")
    return value


def _find_end_token(file: Path, definition: dict[str, Any]) -> str:
    for beside in ("tokenizer_config.json", "special_tokens_map.json"):
        if (file.parent / beside).is_file():
            token = _read_json(file.parent / beside).get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                return token
    special = _special_tokens(definition)
    usual = [token for token in special if token in USUAL_ENDS]
    if len(usual) == 1:
        return usual[0]
    raise MeshwrightError(
        f"tokenizer '{file}' does not say which token ends a document (no eos_token in "
        f"tokenizer_config.json beside it); name it with --end-token, one of: "
        f"{', '.join(special[:8]) or 'its tokens'}"
    )


def _special_tokens(definition: dict[str, Any]) -> list[str]:
    added = definition.get("added_tokens") or []
    return [str(token["content"]) for token in added if token.get("special")]

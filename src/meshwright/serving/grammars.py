"""Constrained decoding: the tokens that a grammar and the rules of a request allow next.

    grammar = Grammar.json({"type": "object", "properties": {"age": {"type": "integer"}}})
    [completion] = engine.generate([Request(prompt, grammar=grammar, max_new=100)])

A grammar is text in llguidance's Lark. A tokenizer's `Grammars` compiles it, once for all requests
that use it; a `Constraint` follows the output of one request, by the grammar and by `TokenRules`
(bad words, allowed ids, a minimum of tokens), which need no library. The masks it gives are of the
host: the device computes the logits of a token while the host reads the token before.
"""

import dataclasses
import functools
import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from meshwright.data import ByteTokenizer, Tokenizer
from meshwright.errors import MeshwrightError, not_installed

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Masks = npt.NDArray[np.int32]
LARGEST = 2**17  # characters of a grammar; larger ones take seconds to compile
_KEPT = 64  # compiled grammars
_ALONE = 8  # masks that one thread computes: waking others takes longer
# one space, or a new line with its indentation: a model cannot fill its output with white space
_JSON_OPTIONS = {"whitespace_pattern": r" |\n[ \t]{0,40}", "lenient": False}
_LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}  # 2 kB each


@dataclasses.dataclass(frozen=True)
class Grammar:
    """What the output of a request must be; `rules` define `answer`, in llguidance's Lark."""

    rules: str
    start: str = "answer"

    @staticmethod
    def json(schema: Mapping[str, Any]) -> "Grammar":
        """JSON that a schema allows; {"type": "object"} is any JSON object."""
        return Grammar(f"answer: {json_rule(schema)}")

    @staticmethod
    def regex(pattern: str) -> "Grammar":
        """Text that a regular expression matches as a whole."""
        escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL)
        escaped = escaped.replace("\n", r"\n")
        return Grammar(f"answer: /{escaped}/")

    @staticmethod
    def choice(texts: Sequence[str]) -> "Grammar":
        """One of some texts; as one expression, since rules have at most 2,000 alternatives."""
        escaped = (re.escape(text).replace("\\\n", "\n") for text in texts)
        return Grammar.regex(f"({'|'.join(escaped)})")

    @property
    def text(self) -> str:
        return f"%llguidance {{}}\nstart: {self.start}\n{self.rules}\n"


def json_rule(schema: Mapping[str, Any]) -> str:
    """The part of a rule that stands for JSON of a schema."""
    text = ""
    try:
        # in pieces: a schema that is too large is not written to its end
        for piece in json.JSONEncoder().iterencode({**schema, "x-guidance": _JSON_OPTIONS}):
            text += piece
            if len(text) > LARGEST:
                raise MeshwrightError(
                    f"the JSON schema has more than {LARGEST:,} characters; send a smaller one"
                )
    except RecursionError:
        raise MeshwrightError("the JSON schema is nested too deeply") from None
    return f"%json {text}"


@dataclasses.dataclass(frozen=True)
class TokenRules:
    """Which ids the output may have, whatever its text."""

    allowed: frozenset[int] | None = None
    """None: all of them."""
    banned: tuple[tuple[int, ...], ...] = ()
    """Sequences of ids that it must not have."""
    ends: frozenset[int] = frozenset()
    min_new: int = 0
    """Ids that it has before one of `ends`."""

    @property
    def excludes_any(self) -> bool:
        return self.allowed is not None or bool(self.banned) or self.min_new > 0


class Constraint:
    """What the next token of a request may be, by its grammar and its rules; used by one thread."""

    def __init__(self, matcher: "LLMatcher | None", rules: TokenRules | None = None) -> None:
        self.matcher, self.rules = matcher, rules or TokenRules()
        self.output: list[int] = []
        self.unread: tuple[Any, int] | None = None
        """The sampled tokens of a step, on the device, and the index of the request's."""
        self.failed: tuple[int, str] | None = None
        """From which token on none can follow, and why, as where the grammar became too complex.

        The tokens before may end the output first.
        """

    def holds_at(self, index: int) -> bool:
        """Whether it says anything of the token of this index."""
        rules = self.rules
        is_permanent = self.matcher is not None or rules.allowed is not None or bool(rules.banned)
        return is_permanent or index < rules.min_new

    def advance(self, token: int) -> None:
        self.output.append(token)
        if self.matcher is not None and not self.matcher.is_stopped():
            self.matcher.consume_token(token)

    def restrict(self, row: Masks) -> None:
        """Clear the bits of tokens that the rules exclude, in a mask of what the grammar allows."""
        bits, rules = row.view(np.uint32), self.rules
        if rules.allowed is not None:
            bits &= _bits(rules.allowed, bits.size)
        last = (
            banned[-1]
            for banned in rules.banned
            if len(banned) == 1 or tuple(self.output[1 - len(banned) :]) == banned[:-1]
        )
        bits &= ~_bits(last, bits.size)
        if len(self.output) < rules.min_new:
            later = bits & ~_bits(rules.ends, bits.size)
            if later.any():  # a grammar may be complete before
                bits[:] = later
        if not bits.any():
            self.fail("the request excludes every token that could follow")

    def fail(self, why: str) -> None:
        self.failed = self.failed or (len(self.output), why)

    def error_at(self, index: int) -> str | None:
        """Why there is no token of this index."""
        return self.failed[1] if self.failed is not None and index >= self.failed[0] else None


def _bits(tokens: Iterable[int], words: int) -> npt.NDArray[np.uint32]:
    """A mask with the bits of these tokens."""
    ids = np.fromiter(tokens, np.int64)
    ids = ids[ids < 32 * words]
    bits = np.zeros(words, np.uint32)
    np.bitwise_or.at(bits, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return bits


class Grammars:
    """The grammars of a tokenizer; llguidance is loaded with the first of them."""

    def __init__(self, tokenizer: Tokenizer, ends: frozenset[int]) -> None:
        """`ends`: tokens that may follow a finished output."""
        known = frozenset(end for end in ends if end < tokenizer.vocab)
        self.ends = known or frozenset({tokenizer.end_of_document})
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self.compile = functools.lru_cache(_KEPT)(self._compile)

    def mark(self, text: str) -> str:
        """The part of a rule that stands for a text which may be a token of its own.

        As `<think>` is in many vocabularies. The library takes such tokens for none of the text's.
        """
        added = self._tokenizer.to_json().get("definition", {}).get("added_tokens") or ()
        ids = [f"<[{each['id']}]>" for each in added if each["content"] == text]
        return ids[0] if ids else json.dumps(text)

    def start(self, grammar: Grammar | None, rules: TokenRules | None = None) -> Constraint:
        """A constraint for a new output."""
        return Constraint(None if grammar is None else self.compile(grammar).deep_copy(), rules)

    def masks(self, size: int, constraints: Sequence[tuple[int, Constraint]] = ()) -> Masks:
        """Allowed tokens as bits [size, words]; everything where no constraint has the index."""
        masks = np.full((size, -(-self._tokenizer.vocab // 32)), -1, np.int32)
        if not constraints:
            return masks
        self._advance([constraint for _, constraint in constraints])
        matchers = [
            (constraint.matcher, index)
            for index, constraint in constraints
            if constraint.matcher is not None
        ]
        row, address = masks.strides[0], masks.ctypes.data
        if len(matchers) > _ALONE:
            self._executor.unsafe_compute_mask_ptr(matchers, address, row, size)
        else:
            for matcher, index in matchers:
                matcher.unsafe_compute_mask_ptr(address + index * row, row)
        for index, constraint in constraints:
            if constraint.matcher is None:
                masks[index] = self._known
            elif constraint.matcher.is_error():
                reason = _reason(constraint.matcher.get_error())
                constraint.fail(f"the output cannot follow its grammar further: {reason}")
            constraint.restrict(masks[index])
        return masks

    @functools.cached_property
    def _known(self) -> Masks:
        """The mask of all ids that the tokenizer has."""
        words = -(-self._tokenizer.vocab // 32)
        known = _bits(range(self._tokenizer.vocab), words)
        return (known & ~_bits(self._tokenizer.missing, words)).view(np.int32)

    def _advance(self, constraints: Sequence[Constraint]) -> None:
        """Wait for the tokens that were sampled last, and follow them."""
        read: dict[int, list[int]] = {}  # most are in one array
        for constraint in constraints:
            if constraint.unread is None:
                continue
            tokens, index = constraint.unread
            if id(tokens) not in read:
                read[id(tokens)] = np.asarray(tokens).tolist()
            constraint.advance(read[id(tokens)][index])
        for constraint in constraints:
            constraint.unread = None

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        """A matcher at the start of the grammar, or an error that names what it cannot do.

        Takes a millisecond, or many for large schemas: not for the thread of an event loop.
        """
        text = grammar.text
        if len(text) > LARGEST:
            raise MeshwrightError(
                f"the grammar has {len(text):,} characters; at most {LARGEST:,} are taken"
            )
        llguidance = _library()
        limits = llguidance.LLParserLimits(**_LIMITS)
        matcher = llguidance.LLMatcher(self._inner, text, log_level=0, limits=limits)
        if not matcher.is_error():
            first = matcher.deep_copy()
            first.compute_bitmask()  # finds more errors
            matcher = first if first.is_error() else matcher
        if matcher.is_error():
            raise MeshwrightError(_reason(matcher.get_error()))
        return matcher

    @functools.cached_property
    def _executor(self) -> Any:
        return _library().LLExecutor()

    @property
    def _inner(self) -> "LLTokenizer":
        with self._lock:
            return self._loaded

    @functools.cached_property
    def _loaded(self) -> "LLTokenizer":
        """The tokenizer as llguidance has it; a large one takes a second."""
        llguidance = _library()
        saved = self._tokenizer.to_json()
        tokenizer: Any = llguidance.TokenizerWrapper(_Bytes())
        if saved["kind"] != ByteTokenizer.kind:
            tokenizer = json.dumps(saved["definition"])
        try:
            return llguidance.LLTokenizer(
                tokenizer, n_vocab=self._tokenizer.vocab, eos_token=sorted(self.ends)
            )
        except ValueError as reason:
            raise MeshwrightError(
                f"constrained decoding does not support the tokenizer of this model: {reason}"
            ) from None


class _Bytes:
    """The byte tokenizer in the form that llguidance expects."""

    eos_token_id = ByteTokenizer.end_of_document
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<|endoftext|>")
    special_token_ids = (ByteTokenizer.end_of_document,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise MeshwrightError(
            f"constrained decoding needs llguidance: {not_installed('serve')}"
        ) from None
    return llguidance


def _reason(text: str) -> str:
    """The reason in an error of llguidance, without the grammar and the place in it."""
    text = re.split(r"\n<|\n +1 \|", text)[0].strip()
    text = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", text)
    if text.startswith("oneOf constraints are not supported"):
        return "oneOf is not supported; use anyOf"
    return "no output can satisfy it" if text == "NoExtensionBias" else " ".join(text.split())

"""Every finished output satisfies its grammar, and other requests do not notice."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
import tokenizers
from tests.serving.models import BASE

from meshwright.data import ByteTokenizer
from meshwright.data.tokenizers import HuggingFaceTokenizer
from meshwright.errors import MeshwrightError
from meshwright.serving import (
    Completion,
    Engine,
    EngineConfig,
    Grammar,
    Grammars,
    Model,
    Request,
    Sampling,
    generation_mesh,
)
from meshwright.serving.device_sampling import allowed_only
from meshwright.serving.grammars import Constraint, TokenRules

SCHEMAS: dict[str, dict[str, Any]] = {
    "nested": {
        "type": "object",
        "properties": {
            "person": {
                "type": "object",
                "properties": {
                    "age": {"type": "integer", "minimum": 0, "maximum": 130},
                    "email": {"type": ["string", "null"], "maxLength": 12},
                },
                "required": ["age", "email"],
                "additionalProperties": False,
            },
            "active": {"type": "boolean"},
        },
        "required": ["person", "active"],
        "additionalProperties": False,
    },
    "enum": {"enum": ["red", "dark green", "blau", 7, None, ["x"]]},
    "bounded array": {
        "type": "array",
        "items": {"type": "integer", "multipleOf": 5, "minimum": -50, "maximum": 50},
        "minItems": 2,
        "maxItems": 5,
    },
    "unicode": {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 3, "maxLength": 9}},
        "required": ["name"],
        "additionalProperties": False,
    },
    "numbers": {
        "type": "object",
        "properties": {
            "ratio": {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5},
            "Größe": {"type": "string", "pattern": "^[0-9]{1,3} (cm|m)$"},
        },
        "required": ["ratio", "Größe"],
        "additionalProperties": False,
    },
    "references": {
        "$defs": {"leaf": {"enum": ["a", "b"]}},
        "type": "object",
        "properties": {
            "left": {"$ref": "#/$defs/leaf"},
            "right": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"const": {"k": []}}]},
        },
        "required": ["left", "right"],
        "additionalProperties": False,
    },
}
CONFIG = EngineConfig(
    max_batch=16, max_length=256, page_size=8, chunk_shapes=((2, 16),), chunk=16,
    batch_buckets=(4,), strict=True,
)  # fmt: skip
PROMPT = tuple(b"Answer in JSON: ")


@pytest.fixture(scope="module")
def model(random_model: Callable[..., Model]) -> Model:
    return random_model(dataclasses.replace(BASE, vocab=300), generation_mesh())


@pytest.fixture(scope="module")
def engine(model: Model) -> Iterator[Engine]:
    with Engine(model, CONFIG) as engine:
        yield engine
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
        assert stats.compilations_after_ready == 0


def constrained(schema: dict[str, Any], seed: int | None, **settings: Any) -> Request:
    """Greedy without a seed."""
    sampling = Sampling(temperature=0.0 if seed is None else 1.0, seed=seed or 0)
    settings = {"max_new": 230, "sampling": sampling, **settings}
    return Request(PROMPT, grammar=Grammar.json(schema), **settings)


def check(schema: dict[str, Any], completion: Completion) -> None:
    """A whole output is valid; one that was cut is not called whole."""
    assert completion.finish_reason in ("stop", "length")
    if completion.finish_reason == "stop":
        jsonschema.validate(json.loads(completion.text), schema)


@pytest.mark.parametrize("name", SCHEMAS)
def test_outputs_of_random_weights_satisfy_their_schema(engine: Engine, name: str) -> None:
    schema = SCHEMAS[name]
    seeds = [None, *range(5)]
    results = engine.generate([constrained(schema, seed) for seed in seeds])
    for result in results:
        check(schema, result)
    assert [result.finish_reason for result in results].count("stop") >= 3
    assert len({result.text for result in results}) > 1 or "enum" in name


def test_any_object_and_other_settings_of_a_request(engine: Engine) -> None:
    anything = {"type": "object"}
    sampling = Sampling(0.8, top_k=300, top_p=0.9, min_p=0.001, presence_penalty=0.5, seed=3)
    results = engine.generate(
        [
            constrained(anything, None, sampling=sampling, logprobs=3),
            constrained(anything, 1, ignore_end=True),  # an output that is whole ends
            constrained(SCHEMAS["nested"], 2, logprobs=20),
            constrained(SCHEMAS["nested"], 2, stop=('"age',)),
        ]
    )
    check(anything, results[0])
    check(anything, results[1])
    for result in results[0], results[2]:
        assert len(result.logprobs) == len(result.tokens)
        # those of the model: all are finite, and the chosen token need not be among the first
        assert all(np.isfinite([value for _, value in at.top]).all() for at in result.logprobs)
        assert any(at.rank > 5 for at in result.logprobs)
    assert results[3].finish_reason == "stop"
    assert results[2].text.startswith(results[3].text + '"age')


def test_length_cuts_an_output(engine: Engine) -> None:
    [result] = engine.generate([constrained(SCHEMAS["unicode"], 1, max_new=6)])
    assert (result.finish_reason, len(result.tokens)) == ("length", 6)
    assert result.text.startswith("{")


def test_a_choice_of_thousands_is_followed(engine: Engine) -> None:
    texts = [f"item {i}\n" for i in range(3000)]
    [done] = engine.generate([Request(PROMPT, Sampling(seed=1), 30, grammar=Grammar.choice(texts))])
    assert done.finish_reason == "stop"
    assert done.text in texts


def test_regex_and_choice(engine: Engine) -> None:
    choice, pattern = Grammar.choice(["yes", 'no "x"', "né/"]), Grammar.regex(r"a/[b\/]{3}\d+\n\.")
    results = engine.generate(
        [
            Request(PROMPT, Sampling(seed=seed), 60, grammar=grammar)
            for seed in range(4)
            for grammar in (choice, pattern)
        ]
    )
    for chosen, matched in zip(results[::2], results[1::2], strict=True):
        assert chosen.text in ("yes", 'no "x"', "né/")
        assert chosen.finish_reason == "stop"
        assert matched.text.startswith("a/")
        assert matched.finish_reason == "length" or matched.text.endswith("\n.")


def free_requests() -> list[Request]:
    samplings = (
        Sampling(temperature=0), Sampling(seed=3), Sampling(0.7, top_p=0.8, seed=4),
        Sampling(1.2, top_k=9, frequency_penalty=0.3, seed=5),
    )  # fmt: skip
    return [Request(PROMPT[: 4 + i], samplings[i % 4], 20 + i, ignore_end=True) for i in range(20)]


def test_free_requests_do_not_notice_constrained_neighbours(engine: Engine) -> None:
    free = free_requests()
    alone = engine.generate(free)
    schemas = [schema for schema in SCHEMAS.values() for _ in range(4)][:20]
    strict = [
        constrained(schema, seed % 4 or None, logprobs=2 if seed % 5 == 0 else None)
        for seed, schema in enumerate(schemas)
    ]
    mixed = engine.generate(
        [request for pair in zip(free, strict, strict=True) for request in pair]
    )
    assert [result.tokens for result in mixed[::2]] == [result.tokens for result in alone]
    for schema, result in zip(schemas, mixed[1::2], strict=True):
        check(schema, result)
    assert [result.tokens for result in mixed[1::2]] == [
        result.tokens for result in engine.generate(strict)
    ]


def test_preemption_continues_where_the_grammar_was(model: Model) -> None:
    schema = SCHEMAS["nested"]
    requests = [constrained(schema, seed) for seed in range(1, 7)]
    with Engine(
        model, dataclasses.replace(CONFIG, strict=False, compile_first=False, pages=34)
    ) as engine:
        crowded = engine.generate(requests)
        assert engine.stats().preemptions > 0
        alone = [engine.generate([request])[0] for request in requests]
    assert [result.tokens for result in crowded] == [result.tokens for result in alone]
    for result in crowded:
        check(schema, result)


def test_a_mesh_gives_the_same_outputs(engine: Engine, random_model: Callable[..., Model]) -> None:
    schema = SCHEMAS["references"]
    requests = [constrained(schema, 1), constrained(schema, 2, logprobs=1)]
    model = random_model(dataclasses.replace(BASE, vocab=300), generation_mesh("tp=2"))
    config = dataclasses.replace(CONFIG, strict=False, compile_first=False)
    with Engine(model, config) as split:
        found = [result.tokens for result in split.generate(requests)]
    assert found == [result.tokens for result in engine.generate(requests)]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "objekt"}, "Invalid type: objekt"),
        ({"type": "object", "properties": {"x": {"not": {}}}}, 'keys: \\["not"\\]'),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
        ({"type": "number", "minimum": 5, "maximum": 2}, "minimum \\(5\\) is greater than"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"$ref": "#/$defs/none"}, "/none' does not exist"),
        ({"$ref": "http://127.0.0.1:1/schema"}, "127.0.0.1:1/schema"),
        ({"$ref": "#"}, "no output can satisfy it"),
        ({"enum": ["x" * 2**17]}, "more than 131,072"),
        ({"type": "string", "format": "nonsense"}, "nonsense"),
    ],
)
def test_schemas_that_cannot_be_followed(
    engine: Engine, schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises(MeshwrightError, match=reason) as found:
        engine.generate([constrained(schema, 1)])
    assert "x-guidance" not in str(found.value)


def test_a_grammar_that_fails_on_the_way_is_an_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(grammar: Grammar, rules: TokenRules) -> Constraint:
        constraint = Constraint(engine.source.grammars.compile(grammar).deep_copy())
        constraint.advance(ord("z"))  # which the grammar does not allow
        constraint.output.clear()
        return constraint

    monkeypatch.setattr(engine.source.grammars, "start", start)
    with pytest.raises(MeshwrightError, match="cannot follow its grammar further: "):
        engine.generate([constrained(SCHEMAS["enum"], 1), Request(PROMPT, max_new=3)])


def test_an_error_is_of_the_tokens_after_it() -> None:
    constraint = Constraint(None, TokenRules(allowed=frozenset({1}), banned=((1, 1),)))
    constraint.advance(1)
    constraint.restrict(np.full(1, -1, np.int32))
    assert constraint.error_at(0) is None  # the token that is known may end the output
    assert constraint.error_at(1) == "the request excludes every token that could follow"


def test_masks_are_bits_of_tokens() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(size=(3, 70)).astype(np.float32)
    allowed = random.integers(0, 2, (3, 64)).astype(bool)
    allowed[0] = True
    masks = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    found = np.asarray(allowed_only(jnp.asarray(logits), jnp.asarray(masks)))
    np.testing.assert_array_equal(found[:, :64], np.where(allowed, logits[:, :64], -np.inf))
    assert np.isneginf(found[:, 64:]).all()


def test_a_byte_level_tokenizer_spells_what_its_grammar_allows() -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    inner.train_from_iterator(
        ['{"name": "Zoë", "age": 12}, {"name": "Ann", "age": 7}'] * 50, trainer
    )
    tokenizer = HuggingFaceTokenizer(json.loads(inner.to_str()), "<end>")
    grammars, end = Grammars(tokenizer, frozenset()), tokenizer.end_of_document
    random, schema = np.random.default_rng(0), SCHEMAS["unicode"]
    for _ in range(20):
        constraint = grammars.start(Grammar.json(schema))
        tokens: list[int] = []
        while end not in tokens:
            masks = grammars.masks(2, [(1, constraint)])
            assert (masks[0] == -1).all()
            bits = np.unpackbits(masks[1].view(np.uint8), bitorder="little")
            tokens.append(int(random.choice(np.flatnonzero(bits))))
            constraint.unread = np.array([tokens[-1]]), 0
            assert len(tokens) < 200
        jsonschema.validate(json.loads(tokenizer.decode(tokens)), schema)


def test_the_byte_tokenizer_has_its_own_end() -> None:
    assert Grammars(ByteTokenizer(), frozenset({9999})).ends == {256}

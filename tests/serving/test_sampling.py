"""Sampling: filters against plain NumPy, draws against the probabilities they should have."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright.serving.device_sampling import Settings, _kept, _order, full
from meshwright.serving.sampling import KnownTokens, Sampling

VOCAB, BATCH = 12, 6
keep = jax.jit(_kept)
choose = jax.jit(full, static_argnums=5)


def reference(logits: np.ndarray, sampling: Sampling) -> set[int]:
    """The tokens that stay, one filter after the other, in float64."""
    scaled = logits.astype(np.float64) / sampling.temperature
    kept = sorted(range(len(logits)), key=lambda token: (-scaled[token], token))

    def probabilities() -> np.ndarray:
        weights = np.exp(scaled[kept] - scaled[kept].max())
        return weights / weights.sum()

    if sampling.top_k is not None:
        kept = kept[: sampling.top_k]
    if sampling.top_p is not None:
        reached = np.cumsum(probabilities())
        kept = kept[: int(np.searchsorted(reached, sampling.top_p)) + 1]
    if sampling.min_p is not None:
        now = probabilities()
        kept = [token for token, p in zip(kept, now, strict=True) if p >= sampling.min_p * now[0]]
    return set(kept)


def near_a_limit(logits: np.ndarray, sampling: Sampling) -> bool:
    """Whether float32 may decide otherwise than float64."""
    scaled = np.sort(logits.astype(np.float64) / sampling.temperature)[::-1]
    scaled = scaled[: sampling.top_k]
    weights = np.exp(scaled - scaled[0])
    reached = np.cumsum(weights / weights.sum())
    close = [np.abs(reached - sampling.top_p)] if sampling.top_p is not None else []
    close += [np.abs(weights - sampling.min_p)] if sampling.min_p is not None else []
    return any((distance < 1e-5).any() for distance in close)


# few values, so that equal logits come up
rows = st.lists(st.integers(-8, 8).map(lambda i: i / 2), min_size=VOCAB, max_size=VOCAB)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.25, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([None, 1, 4, VOCAB + 3]),
    top_p=st.none() | st.floats(0.01, 1.0),
    min_p=st.none() | st.floats(0.0, 1.0),
)


@settings(max_examples=60)
@given(
    st.lists(rows, min_size=BATCH, max_size=BATCH),
    st.lists(samplings, min_size=BATCH, max_size=BATCH),
)
def test_filters_keep_the_tokens_that_numpy_keeps(
    rows: list[list[float]], wanted: list[Sampling]
) -> None:
    logits = np.asarray(rows, np.float32)
    temperature = np.array([each.temperature for each in wanted], np.float32)
    scaled = (logits - logits.max(-1, keepdims=True)) / temperature[:, None]
    found = keep(
        scaled,
        np.array([each.top_k or VOCAB for each in wanted], np.int32),
        np.array([each.top_p or 1.0 for each in wanted], np.float32),
        np.array([each.min_p or 0.0 for each in wanted], np.float32),
    )
    for kept, row, sampling in zip(np.asarray(found), logits, wanted, strict=True):
        assert kept.any()
        if not near_a_limit(row, sampling):
            assert set(np.flatnonzero(kept).tolist()) == reference(row, sampling)


def test_integers_have_the_order_of_floats() -> None:
    x = np.array([-np.inf, -3e38, -2.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, 3e38, np.inf], np.float32)
    order = np.asarray(_order(jnp.asarray(x))).astype(np.int64)
    assert (np.diff(order) >= 0).all()
    assert order[4] == order[5]
    assert (np.diff(order[[0, 1, 2, 4, 7, 8, 9]]) > 0).all()


def draw(logits: Any, sampling: Sampling, known: KnownTokens | None = None) -> np.ndarray:
    """A token of each row of logits, at positions that differ, by all settings."""
    logits = np.asarray(logits, np.float32)
    count, vocab = logits.shape
    slots = Settings.empty(1, vocab)
    slots.set(0, sampling, vocab)
    counts = np.zeros((1, vocab), np.int32), np.zeros((1, vocab), np.int32)
    where = np.zeros(count, np.int32), 7 * np.arange(count, dtype=np.int32)
    return np.asarray(choose(logits, slots, *where, counts, known or KnownTokens(vocab)))


def test_draws_have_the_probabilities_that_the_filters_leave() -> None:
    sampling = Sampling(0.8, top_k=5, min_p=0.05, seed=3)
    logits = np.random.default_rng(0).normal(size=VOCAB, scale=2).astype(np.float32)
    kept = sorted(reference(logits, sampling))
    weights = np.exp(logits[kept].astype(np.float64) / 0.8)
    count = 4096
    tokens = draw(np.tile(logits, (count, 1)), sampling)
    assert set(tokens.tolist()) <= set(kept)
    share = np.array([(tokens == token).mean() for token in kept])
    np.testing.assert_allclose(share, weights / weights.sum(), atol=4 * 0.5 / np.sqrt(count))


def test_temperature_0_takes_the_likeliest_and_the_first_of_equals() -> None:
    logits = np.random.default_rng(0).normal(size=(16, VOCAB))
    assert draw(logits, Sampling(0)).tolist() == logits.argmax(-1).tolist()
    assert draw([[0.0, 2.0, 2.0, 1.0]], Sampling(0)).tolist() == [1]


def test_a_temperature_near_0_is_as_good_as_0() -> None:
    logits = np.random.default_rng(0).normal(size=(16, VOCAB), scale=100)
    assert draw(logits, Sampling(1e-38, top_p=0.9)).tolist() == logits.argmax(-1).tolist()


def test_a_draw_depends_on_seed_and_position() -> None:
    logits = np.zeros((8, 64))
    first = draw(logits, Sampling(seed=1)).tolist()
    assert len(set(first)) > 4
    assert draw(logits, Sampling(seed=2)).tolist() != first
    assert draw(logits[:3], Sampling(seed=1)).tolist() == first[:3]


def test_tokens_that_the_tokenizer_lacks_are_never_taken() -> None:
    logits = np.tile(np.arange(64.0), (64, 1))
    assert draw(logits, Sampling(0), known=KnownTokens(10)).max() == 9
    assert draw(logits, Sampling(100.0), known=KnownTokens(10)).max() == 9
    # nor an id between others that no token has
    holes = KnownTokens(10, missing=(0, 7, 9))
    assert set(draw(logits, Sampling(0), known=holes)) == {8}
    assert set(draw(logits, Sampling(1000.0), known=holes)) == {1, 2, 3, 4, 5, 6, 8}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be a number >= 0"),
        ({"top_k": 0}, "top_k=0 would remove every token"),
        ({"top_k": 1.5}, "top_k=1.5 is not a whole number"),
        ({"top_p": 0.0}, "top_p=0 would remove every token"),
        ({"top_p": 1.1}, "top_p=1.1 must be a probability"),
        ({"min_p": -1}, "min_p=-1 must be a probability"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**32}, "must be a whole number from 0 to 4294967295"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"top_p": math.nan}, "top_p=nan"),
        ({"min_p": math.nan}, "min_p=nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(mw.MeshwrightError, match=words.replace("^", r"\^")):
        Sampling(**wrong)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty=0 must be a finite number above 0"),
        ({"repetition_penalty": -1.5}, "repetition_penalty=-1.5 must be"),
        ({"repetition_penalty": math.nan}, "repetition_penalty=nan must be"),
        ({"presence_penalty": math.inf}, "presence_penalty=inf must be a finite number"),
        ({"frequency_penalty": "1"}, "frequency_penalty='1' must be a finite number"),
        ({"logit_bias": ((7, math.nan),)}, "adds nan to token 7; give a finite number"),
        ({"logit_bias": ((7, -math.inf),)}, "adds -inf to token 7; .* -100 to avoid"),
        ({"logit_bias": {7: 1.0}}, "must be pairs of a token and a number"),
        ({"logit_bias": (7, 1.0)}, "must be pairs of a token and a number"),
        ({"logit_bias": ((1.5, 1.0),)}, "a token of logit_bias"),
    ],
)
def test_penalties_and_biases_must_be_finite(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(mw.MeshwrightError, match=message):
        Sampling(**settings_)


def test_any_finite_penalty_is_allowed() -> None:
    Sampling(repetition_penalty=0.1, presence_penalty=-7, frequency_penalty=5.5)

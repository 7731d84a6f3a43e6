"""The kernels for the experts of few tokens, in interpret mode, against numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.ops import few_tokens_mlp, few_tokens_unavailable, quantize, top_experts


def _numbers(array: jax.Array) -> np.ndarray:
    return np.asarray(array.astype(jnp.float32))


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize(
    ("tokens", "experts", "per_token", "is_gated", "biased", "dtype", "sizes"),
    [
        (1, 8, 3, True, False, None, (128, 192)),
        (2, 16, 4, True, False, "fp8", (128, 192)),
        (5, 16, 4, True, True, None, (192, 80)),  # as gpt-oss with tp=4
        (5, 16, 4, True, False, "int8", (192, 80)),
        (33, 8, 2, False, False, "int8", (128, 192)),
        (33, 8, 2, False, False, None, (128, 160)),
    ],
)
def test_each_token_gets_the_sum_of_its_experts(
    tokens: int,
    experts: int,
    per_token: int,
    is_gated: bool,
    biased: bool,
    dtype: str | None,
    sizes: tuple[int, int],
) -> None:
    rng, (embed, mlp) = np.random.default_rng(tokens), sizes

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), jnp.bfloat16)

    names = ("gate", "up") if is_gated else ("up",)
    arrays = {name: drawn(experts, embed, mlp) for name in names}
    arrays["down"] = drawn(experts, mlp, embed)
    if biased:
        arrays |= {f"{name}_bias": drawn(experts, mlp) for name in names}
        arrays["down_bias"] = drawn(experts, embed)
    x = drawn(tokens, embed)
    # from -1 and to one more than there are: experts of other devices
    chosen = np.stack([rng.permutation(experts + 2)[:per_token] - 1 for _ in range(tokens)])
    weights = rng.random((tokens, per_token)).astype(np.float32)

    def activate(up: jax.Array, gate: jax.Array | None) -> jax.Array:
        return jax.nn.silu(up) if gate is None else jax.nn.silu(gate) * up

    given: dict[str, Any] = dict(arrays)
    if dtype is not None:  # compared with the numbers that its 8 bits are
        given |= {name: quantize(arrays[name], 1, dtype, groups=1) for name in (*names, "down")}
        arrays = {
            name: (one.values.astype(jnp.float32) * one.scale[..., None]).swapaxes(1, 2)
            for name, one in given.items()
        }
    y = few_tokens_mlp(
        x, jnp.asarray(chosen, jnp.int32), jnp.asarray(weights), given, activate, interpret=True
    ).total()
    expected = np.zeros((tokens, embed), np.float32)
    for token, places in enumerate(chosen):
        for expert, weight in zip(places, weights[token], strict=True):
            if not 0 <= expert < experts:
                continue
            own = {name: _numbers(array[expert]) for name, array in arrays.items()}
            hidden = {
                name: _numbers(x[token]) @ own[name] + own.get(f"{name}_bias", 0) for name in names
            }
            activated = _silu(hidden[names[0]]) * (hidden["up"] if is_gated else 1)
            expected[token] += weight * (activated @ own["down"] + own.get("down_bias", 0))
    np.testing.assert_allclose(np.asarray(y), expected, atol=0.01 * np.abs(expected).max())


@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_the_experts_with_the_highest_scores_are_chosen(softmax: bool, biased: bool) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(7, 60)).astype(np.float32)
    logits[0] = 0  # all alike: the first are chosen
    bias = rng.normal(size=60).astype(np.float32) if biased else np.zeros(60, np.float32)
    chosen, weights, _ = top_experts(
        jnp.asarray(logits), jnp.asarray(bias) if biased else None, 6,
        softmax=softmax, normalized=True, scale=2.5, padding=jnp.arange(7) == 5, interpret=True,
    )  # fmt: skip
    scores = 1 / (1 + np.exp(-logits))
    if softmax:
        scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    best = np.argsort(-(scores + bias), axis=1, kind="stable")[:, :6]
    np.testing.assert_array_equal(chosen[5], 60)  # none
    is_token = np.arange(7) != 5
    np.testing.assert_array_equal(chosen[is_token], best[is_token])
    of_best = np.take_along_axis(scores, best, axis=1)
    expected = 2.5 * of_best / of_best.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


def test_they_are_for_gpus() -> None:
    assert few_tokens_unavailable(1, jnp.bfloat16, 128) == "it runs on NVIDIA GPUs"

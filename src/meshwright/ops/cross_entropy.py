"""Cross-entropy fused with the LM head.

    loss, entropy = cross_entropy(hidden, head, targets, scale)

Logits never exist in full: they are computed for one chunk of tokens at a time. Their gradient is
computed at the same time, and accumulated into the gradients of `hidden` and `head`, which the
backward pass only returns. The vocabulary may be sharded: maxima and sums are then reduced over its
mesh axes, and the result is exact.

    log_probs = target_log_probs(hidden, head, targets)

gives each token's part, for losses that are no sum over tokens. What its gradient is multiplied
with is known in the backward pass only, which computes the logits again.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.layouts import axes_of
from meshwright.ops.collectives import (
    current_platform,
    drop_trivial_axes,
    nontrivial_axes,
    spec_of,
    split_axes,
)

IGNORED = -1  # a target that the loss ignores


def cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    scale: jax.Array,
    *,
    z_loss: float = 0.0,
    chunk: int = 2048,
    tied: bool = False,
    vocab: int | None = None,
    bias: jax.Array | None = None,
    softcap: float | None = None,
    weights: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sums over tokens: `scale` times (entropy + z_loss · logsumexp²), and the entropy.

    `hidden` [batch, length, embed], `head` [embed, vocab] (`tied`: [vocab, embed]), `targets`
    [batch, length], IGNORED where they do not count. Only the first sum has a gradient. `chunk` is
    the number of tokens whose logits a device computes at a time. In a padded head only the first
    `vocab` entries are tokens: the others have probability 0 and no gradient. Logits are the
    product plus `bias` [vocab], x, and with a softcap: softcap · tanh(x / softcap). With `weights`
    [batch, length], each token's part of both sums is multiplied by its weight.
    """
    marks = (targets,) if weights is None else (targets, weights)
    split = _split(head, targets, tied, vocab)

    def local(
        hidden: jax.Array, head: Any, marks: Any, scale: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        sums = _fused(split, z_loss, chunk, tied, softcap).summed(hidden, head, marks, scale)
        over = split.tokens_over
        return tuple(lax.psum(part, over) for part in sums) if over else sums

    arguments, specs = _arguments(hidden, head, bias, marks, split)
    out = (jax.P(), jax.P())
    mapped: Any = jax.shard_map(local, in_specs=(*specs, jax.P()), out_specs=out)
    return mapped(*arguments, scale)


def target_log_probs(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    chunk: int = 2048,
    tied: bool = False,
    vocab: int | None = None,
    bias: jax.Array | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Log-probabilities of the targets [batch, length] in float32; 0 where they are IGNORED.

    The arguments are those of `cross_entropy`.
    """
    split = _split(head, targets, tied, vocab)

    def local(hidden: jax.Array, head: Any, marks: Any) -> jax.Array:
        found: jax.Array = _fused(split, 0.0, chunk, tied, softcap).log_probs(hidden, head, marks)
        return found

    arguments, specs = _arguments(hidden, head, bias, (targets,), split)
    return jax.shard_map(local, in_specs=specs, out_specs=split.targets_spec)(*arguments)


class _Split(NamedTuple):
    """How tokens and the vocabulary are split over the mesh."""

    targets_spec: jax.P
    tokens_over: tuple[str, ...]
    vocab_over: tuple[str, ...]
    tokens_of_head: int | None  # entries of the head that are tokens, None if all are


def _split(head: jax.Array, targets: jax.Array, tied: bool, vocab: int | None) -> _Split:
    targets_spec = drop_trivial_axes(spec_of(targets), nontrivial_axes())
    vocab_dim = 0 if tied else 1
    vocab_over = axes_of(spec_of(head)[vocab_dim], "head")
    tokens_of_head = None if vocab == head.shape[vocab_dim] else vocab
    return _Split(targets_spec, split_axes(targets_spec.partitions), vocab_over, tokens_of_head)


def _arguments(hidden: Any, head: Any, bias: Any, marks: tuple[Any, ...], split: _Split) -> Any:
    """The arguments of a device's part, and their specs."""
    marks = tuple(jax.sharding.reshard(mark, split.targets_spec) for mark in marks)
    head_arrays = (head,) if bias is None else (head, bias)
    head_types = tuple(jax.typeof(x).sharding.spec for x in head_arrays)
    specs = (jax.typeof(hidden).sharding.spec, head_types, (split.targets_spec,) * len(marks))
    return (hidden, head_arrays, marks), specs


def keeps_logit_gradients(tokens: int, embed: int, item_bytes: int) -> bool:
    """Whether the gradients of all logits are no larger than the LM head's gradient in float32.

    If so they are kept, and the gradient of the head is one matmul over all tokens. If not, it is
    accumulated over chunks in float32. TPUs always accumulate.
    """
    return item_bytes * tokens <= 4 * embed


class _Fused(NamedTuple):
    summed: Any  # (hidden, head, marks, scale) to the two sums
    log_probs: Any  # (hidden, head, marks) to the log-probability of each target


@functools.lru_cache(maxsize=64)
def _fused(split: _Split, z_loss: float, chunk: int, tied: bool, softcap: float | None) -> _Fused:
    """The loss on one device, with its own backward pass.

    The head is a tuple of its weight and, if it has one, its bias; so are its gradients. The marks
    of tokens are a tuple too: the targets and, if there are any, the weights.
    """
    _, tokens_over, vocab_over, tokens_of_head = split
    to_logits = "te,ve->tv" if tied else "te,ev->tv"
    to_hidden = "tv,ve->te" if tied else "tv,ev->te"
    to_head = "tv,te->ve" if tied else "te,tv->ev"

    def over_vocab(reduce: Any, x: jax.Array) -> jax.Array:
        return reduce(x, vocab_over) if vocab_over else x

    def logsumexp(logits: jax.Array) -> jax.Array:
        """Of each token, over the full vocabulary; float32."""
        most = over_vocab(lax.pmax, jnp.max(logits, axis=-1)).astype(jnp.float32)
        total = jnp.sum(jnp.exp(logits.astype(jnp.float32) - most[:, None]), axis=-1)
        return jnp.log(over_vocab(lax.psum, total)) + most

    def logits_of(h: jax.Array, head: Any, targets: jax.Array) -> Any:
        """Logits of a chunk [tokens], their normalizers, and those of the targets.

        Logits have the dtype of the matmul; everything computed from them is float32.
        """
        weight, *bias = head
        vocab = weight.shape[0 if tied else 1]
        logits = jnp.einsum(to_logits, h, weight)
        if bias:
            logits += bias[0].astype(logits.dtype)[None]
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        first = lax.axis_index(vocab_over) * vocab if vocab_over else 0
        if tokens_of_head is not None:
            entry = first + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
            # not -inf: a device may hold only padding, and -inf - -inf is NaN
            nothing = jnp.finfo(logits.dtype).min
            logits = jnp.where(entry < tokens_of_head, logits, jnp.full((), nothing, logits.dtype))
        normalizer = logsumexp(logits)
        index = targets - first
        local = (index >= 0) & (index < vocab)
        index = jnp.where(local, index, 0)
        at_index = jnp.take_along_axis(logits, index[:, None], axis=1)[:, 0].astype(jnp.float32)
        at_target = over_vocab(lax.psum, jnp.where(local, at_index, 0.0))
        return logits, normalizer, at_target, (local, index, at_index)

    def one_chunk(h: jax.Array, head: Any, marks: Any, scale: jax.Array) -> Any:
        """Sums of a chunk [tokens], and the gradient of its logits."""
        targets, *weights = marks
        logits, normalizer, at_target, (local, index, at_index) = logits_of(h, head, targets)
        vocab = logits.shape[1]
        counts = (targets != IGNORED).astype(jnp.float32)
        if weights:
            counts *= weights[0]
        entropy = jnp.sum((normalizer - at_target) * counts)
        weighted = scale * (entropy + z_loss * jnp.sum(normalizer**2 * counts))
        dnormalizer = counts * scale * (1 + 2 * z_loss * normalizer)
        gradient = jnp.exp(logits.astype(jnp.float32) - normalizer[:, None]) * dnormalizer[:, None]
        # minus one at the target: a scatter, which costs less than a comparison everywhere
        below = jnp.exp(at_index - normalizer) * dnormalizer - counts * scale
        if softcap is not None:  # the derivative of tanh; padding has no gradient anyway
            gradient *= jnp.maximum(1 - (logits.astype(jnp.float32) / softcap) ** 2, 0)
            below *= 1 - (at_index / softcap) ** 2
        gradient = gradient.astype(h.dtype)
        tokens = jnp.arange(targets.size)
        index = jnp.where(local, index, vocab)  # out of range: dropped
        gradient = gradient.at[tokens, index].set(
            below.astype(h.dtype), mode="drop", unique_indices=True
        )
        return (weighted, entropy), gradient

    def chunks(hidden: jax.Array, marks: Any) -> tuple[jax.Array, Any]:
        """[chunks, tokens, embed] and [chunks, tokens], padded with ignored tokens."""
        tokens = marks[0].size
        size = min(chunk, tokens)
        missing = -tokens % size
        h = jnp.pad(hidden.reshape(tokens, -1), ((0, missing), (0, 0)))
        padded = (
            jnp.pad(mark.reshape(tokens), (0, missing), constant_values=IGNORED) for mark in marks
        )
        return h.reshape(-1, size, h.shape[-1]), tuple(x.reshape(-1, size) for x in padded)

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(-1, x.shape[-1])

    def varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        missing = tuple(a for a in axes if a not in jax.typeof(x).manual_axis_type.varying)
        return lax.pcast(x, missing, to="varying") if missing else x

    @jax.custom_vjp
    def fused(hidden: jax.Array, head: Any, marks: Any, scale: jax.Array) -> Any:
        def step(sums: Any, part: Any) -> Any:
            more, _ = one_chunk(part[0], head, part[1], scale)
            return jax.tree.map(jnp.add, sums, more), None

        zero = varying(jnp.zeros(()), tokens_over)
        return lax.scan(step, (zero, zero), chunks(hidden, marks))[0]

    def forward(hidden: jax.Array, head: Any, marks: Any, scale: jax.Array) -> Any:
        h, t = chunks(hidden, marks)
        kept = keeps_logit_gradients(t[0].size, hidden.shape[-1], hidden.dtype.itemsize)
        whole = kept and current_platform() != "tpu"
        by_chunks = head_gradient_at_once if whole else head_gradient_by_chunks
        sums, head_gradient, hidden_gradient = by_chunks(h, head, t, scale)
        tokens = hidden_gradient.reshape(-1, hidden.shape[-1])[: marks[0].size]
        head_gradients = tuple(g.astype(x.dtype) for g, x in zip(head_gradient, head, strict=True))
        return sums, (tokens.reshape(hidden.shape), head_gradients)

    def bias_gradient(head: Any, gradient: jax.Array) -> tuple[jax.Array, ...]:
        """Of gradients [.., vocab] of logits; empty for a head without bias."""
        axes = tuple(range(gradient.ndim - 1))
        return (jnp.sum(gradient, axis=axes, dtype=jnp.float32),) if len(head) > 1 else ()

    def head_gradient_at_once(h: jax.Array, head: Any, t: Any, scale: Any) -> Any:
        """The sums, and the gradients of head and hidden [chunks, tokens, embed].

        The gradient of the head is one matmul over all tokens.
        """

        def step(sums: Any, part: Any) -> Any:
            more, gradient = one_chunk(part[0], head, part[1], scale)
            hidden_gradient = jnp.einsum(to_hidden, gradient, head[0])
            return jax.tree.map(jnp.add, sums, more), (gradient, hidden_gradient)

        zero = varying(jnp.zeros(()), tokens_over)
        start = (zero, zero)
        if len(h) == 1:  # a single chunk needs no loop
            sums, made = step(start, jax.tree.map(lambda x: x[0], (h, t)))
            gradients, hidden_gradient = (x[None] for x in made)
        else:
            sums, (gradients, hidden_gradient) = lax.scan(step, start, (h, t))
        operands = (gradients, h) if tied else (h, gradients)
        of_weight = jnp.einsum(to_head, *(flat(x) for x in operands))
        return sums, (of_weight, *bias_gradient(head, gradients)), hidden_gradient

    def head_gradient_by_chunks(h: jax.Array, head: Any, t: Any, scale: Any) -> Any:
        """The same, with the gradient of the head accumulated over chunks in float32."""

        def fold(i: Any) -> Any:
            """A chunk's sums, its part of the head's gradient, and its hidden gradient."""
            chunk_hidden, marks = jax.tree.map(
                lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), (h, t)
            )
            sums, gradient = one_chunk(chunk_hidden, head, marks, scale)
            operands = (gradient, chunk_hidden) if tied else (chunk_hidden, gradient)
            of_weight = jnp.einsum(to_head, *operands, preferred_element_type=jnp.float32)
            head_gradient = (of_weight, *bias_gradient(head, gradient))
            return (sums, head_gradient), jnp.einsum(to_hidden, gradient, head[0])

        def step(i: Any, carry: Any) -> Any:
            (folded, hidden_gradient), (more, chunk_gradient) = carry, fold(i)
            hidden_gradient = lax.dynamic_update_index_in_dim(hidden_gradient, chunk_gradient, i, 0)
            return jax.tree.map(jnp.add, folded, more), hidden_gradient

        if current_platform() == "tpu" and len(h) > 1:
            # all chunks in the loop: logits outside of it would get memory of their own
            zero = varying(jnp.zeros(()), tokens_over)
            everywhere = (*tokens_over, *vocab_over)
            head_sum = tuple(varying(jnp.zeros(x.shape, jnp.float32), everywhere) for x in head)
            carry, start = (((zero, zero), head_sum), varying(jnp.zeros_like(h), everywhere)), 0
        else:
            # start with the first chunk: zeros would cost a write and a read of the head
            first, chunk_gradient = fold(0)
            carry = first, jnp.pad(chunk_gradient[None], ((0, len(h) - 1), (0, 0), (0, 0)))
            start = 1
        if start < len(h):
            carry = lax.fori_loop(start, len(h), step, carry)
        (sums, head_gradient), hidden_gradient = carry
        return sums, head_gradient, hidden_gradient

    def backward(gradients: Any, cotangents: Any) -> Any:
        hidden_gradient, head_gradient = gradients
        weight = cotangents[0]  # of the first sum; the entropy is only reported
        hidden_gradient = hidden_gradient * weight.astype(hidden_gradient.dtype)
        head_gradient = tuple(x * weight.astype(x.dtype) for x in head_gradient)
        if vocab_over:
            hidden_gradient = lax.pcast(hidden_gradient, vocab_over, to="unreduced")
        if tokens_over:
            head_gradient = tuple(lax.pcast(x, tokens_over, to="unreduced") for x in head_gradient)
        return hidden_gradient, head_gradient, None, None

    fused.defvjp(forward, backward)

    @jax.custom_vjp
    def log_probs(hidden: jax.Array, head: Any, marks: Any) -> jax.Array:
        def step(_: Any, part: Any) -> Any:
            h, (targets,) = part
            _, normalizer, at_target, _ = logits_of(h, head, targets)
            return None, jnp.where(targets == IGNORED, 0.0, at_target - normalizer)

        (targets,) = marks
        _, found = lax.scan(step, None, chunks(hidden, marks))
        return found.reshape(-1)[: targets.size].reshape(targets.shape)

    def log_probs_forward(hidden: jax.Array, head: Any, marks: Any) -> Any:
        return log_probs(hidden, head, marks), (hidden, head, marks)

    def log_probs_backward(kept: Any, cotangent: jax.Array) -> Any:
        """The gradient of a weighted cross-entropy, whose weights are known by now."""
        hidden, head, marks = kept
        scale = jnp.float32(1)
        _, gradients = forward(hidden, head, (*marks, -cotangent), scale)
        return backward(gradients, (scale,))[:3]

    log_probs.defvjp(log_probs_forward, log_probs_backward)
    return _Fused(fused, log_probs)

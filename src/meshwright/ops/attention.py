"""Attention: one function, the fastest kernel that can serve the call, the dense reference last.

    out = attention(q, k, v, segments, window=None)

q is [batch, length, heads, head_dim], k and v [batch, length, kv_heads, head_dim]: query heads
share key heads in order. A token sees itself and those before it in its row, of its own document
(`segments`, 0 is padding), at most `window` of them. Runs on each device's heads and rows; where
the length is split, keys and values are gathered over it.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.layout.layout import axes_of
from meshwright.ops.exchange import spec_of

_log = logging.getLogger("meshwright")
# primitives whose results a fused kernel's backward pass needs
FUSED_FORWARD = frozenset({"dot_product_attention_fwd", "dot_product_attention_fwd_wrapper"})
_BLOCK = 512  # queries at a time, of the blockwise kernel


@dataclasses.dataclass(frozen=True)
class Call:
    """What a kernel is asked to do; each says whether it can, from this alone."""

    platform: str
    dtype: str
    length: int
    key_length: int
    head_dim: int
    window: int | None
    segmented: bool


@dataclasses.dataclass(frozen=True)
class Local:
    """One device's part: where its queries begin in the row, and the documents of both sides."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_segments: jax.Array | None
    k_segments: jax.Array | None
    first: jax.Array | int
    window: int | None


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None = None,
    window: int | None = None,
    kernel: str = "auto",
) -> jax.Array:
    """Causal attention within each document, laid out as `q`."""
    q_spec, k_spec = spec_of(q), spec_of(k)
    over = axes_of(q_spec[1], q_spec)
    if window is not None and window >= k.shape[1]:
        window = None  # it reaches over the whole row
    call = Call(
        jax.default_backend(),
        str(q.dtype), q.shape[1], k.shape[1], q.shape[-1], window, segments is not None,
    )  # fmt: skip
    run = KERNELS[choose(call, kernel, split=bool(over))].run

    def local(q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> jax.Array:
        first: jax.Array | int = 0
        q_segments = k_segments = segments[0] if segments else None
        if over:
            first = lax.axis_index(over) * q.shape[1]
            k = lax.all_gather(k, over, axis=1, tiled=True)
            v = lax.all_gather(v, over, axis=1, tiled=True)
            if q_segments is not None:
                k_segments = lax.all_gather(q_segments, over, axis=1, tiled=True)
        return run(Local(q, k, v, q_segments, k_segments, first, window))

    given = () if segments is None else (segments,)
    specs = (q_spec, k_spec, k_spec, *(spec_of(x) for x in given))
    return jax.shard_map(local, in_specs=specs, out_specs=q_spec)(q, k, v, *given)


def dense(part: Local) -> jax.Array:
    """The reference: every score at once, softmax in float32."""
    return checkpoint_name(_attend(part.q, part, part.q_segments, part.first), "attention")


def blockwise(part: Local) -> jax.Array:
    """Queries a block at a time; scores are made again in the backward pass, never kept."""
    batch, length, *heads = part.q.shape
    block = min(_BLOCK, length)
    blocks = -(-length // block)

    def cut(x: jax.Array) -> jax.Array:  # [batch, length, ..] -> [blocks, batch, block, ..]
        filled = ((0, 0), (0, blocks * block - length)) + ((0, 0),) * (x.ndim - 2)
        return jnp.moveaxis(jnp.pad(x, filled).reshape(batch, blocks, block, *x.shape[2:]), 1, 0)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    def one(q: jax.Array, segments: jax.Array | None, index: jax.Array) -> jax.Array:
        return _attend(q, part, segments, part.first + index * block)

    segments = None if part.q_segments is None else cut(part.q_segments)
    out = lax.map(lambda xs: one(*xs), (cut(part.q), segments, jnp.arange(blocks)))
    out = jnp.moveaxis(out, 0, 1).reshape(batch, blocks * block, *heads)[:, :length]
    return checkpoint_name(out, "attention")


def cudnn(part: Local) -> jax.Array:
    """NVIDIA's fused kernel; documents as a mask, which it reads as a bias."""
    mask = None
    if part.q_segments is not None and part.k_segments is not None:
        mask = part.q_segments[:, None, :, None] == part.k_segments[:, None, None, :]
    window = None if part.window is None else (part.window - 1, 0)
    return jax.nn.dot_product_attention(
        part.q, part.k, part.v, mask=mask, is_causal=True, local_window_size=window,
        implementation="cudnn",
    )  # fmt: skip


def _attend(
    q: jax.Array, part: Local, q_segments: jax.Array | None, first: jax.Array | int
) -> jax.Array:
    batch, length, heads, head_dim = q.shape
    keys, kv_heads = part.k.shape[1:3]
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", grouped, part.k, preferred_element_type=jnp.float32)
    scores = scores * head_dim**-0.5
    ahead = (first + jnp.arange(length))[:, None] - jnp.arange(keys)[None, :]
    seen = ahead >= 0
    if part.window is not None:
        seen &= ahead < part.window
    seen = seen[None]
    if q_segments is not None and part.k_segments is not None:
        seen = seen & (q_segments[:, :, None] == part.k_segments[:, None, :])
    scores = jnp.where(seen[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(part.v.dtype)
    return jnp.einsum("bkgqs,bskd->bqkgd", weights, part.v).reshape(q.shape)


def _cudnn_refuses(call: Call) -> str | None:
    if call.platform not in ("gpu", "cuda"):
        return "it runs on NVIDIA GPUs"
    if call.dtype not in ("bfloat16", "float16"):
        return f"it computes in bfloat16 and float16, not {call.dtype}"
    if call.head_dim > 128 or call.head_dim % 8:
        return f"head_dim {call.head_dim} is not a multiple of 8 up to 128"
    if call.window is not None and call.segmented:
        return "it takes a sliding window or packed documents, not both"
    return None


def _dense_refuses(call: Call) -> str | None:
    if call.length > 2 * _BLOCK:
        return f"its scores grow with the square of the length ({call.length})"
    return None


@dataclasses.dataclass(frozen=True)
class Kernel:
    run: Callable[[Local], jax.Array]
    refuses: Callable[[Call], str | None]  # why not, None if it can
    split_length: bool  # whether queries may begin inside the row


KERNELS: dict[str, Kernel] = {
    "cudnn": Kernel(cudnn, _cudnn_refuses, split_length=False),
    "dense": Kernel(dense, _dense_refuses, split_length=True),
    "blockwise": Kernel(blockwise, lambda call: None, split_length=True),
}


@functools.lru_cache(maxsize=256)
def choose(call: Call, kernel: str = "auto", split: bool = False) -> str:
    """The first kernel that can serve the call; what was passed over and why is logged once."""
    if kernel != "auto" and kernel not in KERNELS:
        raise MeshwrightError(
            f"attention={kernel!r} is not a kernel{did_you_mean(kernel, ['auto', *KERNELS])}"
        )
    passed: list[str] = []
    for name, candidate in KERNELS.items():
        why = candidate.refuses(call)
        if split and not candidate.split_length:
            why = "the length is split over sp"
        if kernel == name:
            if why is not None and name != "dense":
                raise MeshwrightError(f"attention={name!r} cannot serve this: {why}")
            return name
        if kernel == "auto" and why is None:
            because = f" ({'; '.join(passed)})" if passed else ""
            _log.info("attention: %s%s", name, because)
            return name
        passed.append(f"not {name}: {why}")
    raise AssertionError("the last kernel serves every call")

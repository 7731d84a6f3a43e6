"""cuDNN's fused attention, one pass at a time, by the primitives jax has for it.

jax's public functions give the output, or its gradient as a whole; a ring needs one block's part of
the gradient from the output over all blocks. The primitives take just that. They are jax's own, so
what they must look like is checked here, and `unavailable` says what is amiss.
"""

import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshwright.ops.attention.block import Gradients, Partial
from meshwright.ops.collectives import varying_like

_PASSES = ("_dot_product_attention_fwd_p_wrapper", "_dot_product_attention_bwd_p_wrapper")
# what jax's rule for the backward pass is told; score_mod came with jax 0.12
_KNOWN = frozenset({
    "scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout",
    "sliding_window_length", "score_mod", "is_training", "cudnn_version", "return_residual", "res",
    "grad_output",
})  # fmt: skip


class Rows(NamedTuple):
    """What one call reads, and how it is masked."""

    q: jax.Array  # [rows, queries, heads, head_dim]
    k: jax.Array  # [rows, keys, kv_heads, head_dim]
    v: jax.Array
    causal: bool = False
    window: int | None = None  # the nearest so many, itself counted; causal only
    bias: jax.Array | None = None  # [rows, 1, queries, keys], added to the scores
    counts: tuple[jax.Array, jax.Array] | None = None  # of each row, the queries and keys that are


def forward(rows: Rows) -> Partial:
    """Output and log-sum (natural, of scaled scores); past a row's counts they are undefined."""
    out, log_sum = _bind(_PASSES[0], rows, (), is_training=True)
    return Partial(out, jnp.swapaxes(log_sum, 1, 2))


def backward(rows: Rows, whole: Partial, given: jax.Array) -> Gradients:
    """Gradients by these keys, where `whole` may be over more keys than these."""
    log_sum = jnp.swapaxes(whole.log_sum, 1, 2)
    out, given = whole.out.astype(rows.q.dtype), given.astype(rows.q.dtype)
    return Gradients(*_bind(_PASSES[1], rows, (log_sum, out, given)))


def unavailable() -> str | None:
    """Why the calls cannot be made, None if they can."""
    from jax._src import xla_bridge
    from jax._src.lib import cuda_versions

    # elsewhere the program is only lowered, for a machine that is not here; and a plan must not
    # start this machine's devices to ask
    started = xla_bridge.backends_are_initialized()
    if cuda_versions is None and started and jax.default_backend() == "gpu":
        return "cuDNN is not installed beside jax"
    return _unknown_calls()


@functools.cache
def _unknown_calls() -> str | None:
    """Why jax's way of calling cuDNN is not the one known here, None if it is."""
    unknown = sorted(_backward_arguments() - _KNOWN)
    if unknown or not all(hasattr(_jax(), name) for name in _PASSES):
        said = f" ({', '.join(unknown)})" if unknown else ""
        return f"jax {jax.__version__} calls cuDNN in a way that is not known here{said}"
    return None


def _bind(name: str, rows: Rows, more: tuple[jax.Array, ...], **options: Any) -> Any:
    jaxs = _jax()
    names = {(False, False): "NO_MASK", (True, False): "CAUSAL"}
    names |= {(False, True): "PADDING", (True, True): "PADDING_CAUSAL"}
    unused = jnp.zeros(0, rows.q.dtype)
    bias = unused if rows.bias is None else rows.bias
    counts = (unused, unused) if rows.counts is None else rows.counts
    arrays = (rows.q, rows.k, rows.v, bias, *counts, *(unused,) * 4, *more)
    if "score_mod" in _backward_arguments():
        options["score_mod"] = None
    # results take their type from single operands: all must vary over the same mesh axes
    return getattr(jaxs, name).bind(
        *(varying_like(x, *arrays) for x in arrays),
        scale=rows.q.shape[-1] ** -0.5,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(rows.bias is not None, False),  # a bias, and no gradient of it
        mask_type=jaxs.MaskType[names[rows.causal, rows.counts is not None]],
        layout=jaxs.AttentionLayout.BTNH.value,
        sliding_window_length=rows.window,
        **options,
    )


def _backward_arguments() -> frozenset[str]:
    rule = getattr(_jax(), "_dot_product_attention_bwd_rule", None)
    return frozenset(inspect.signature(rule).parameters) if rule else frozenset({"no rule"})


def _jax() -> Any:
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo

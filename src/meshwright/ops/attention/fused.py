"""cuDNN's fused attention, forward and backward passes, by jax's private primitives.

jax's public functions compute the output, or the complete gradient. A ring needs one block's part
of the gradient, from the output over all blocks; the primitives compute that. They are private, so
their signature is checked here, and `unavailable` returns what does not match.
"""

import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshwright.ops.attention.block import Gradients, Partial
from meshwright.ops.collectives import varying_like

_PASSES = ("_dot_product_attention_fwd_p_wrapper", "_dot_product_attention_bwd_p_wrapper")
# arguments of jax's rule for the backward pass; score_mod came with jax 0.12
_KNOWN = frozenset({
    "scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout",
    "sliding_window_length", "score_mod", "is_training", "cudnn_version", "return_residual", "res",
    "grad_output",
})  # fmt: skip


class Inputs(NamedTuple):
    """Inputs of one call, with its mask."""

    q: jax.Array  # [batch, queries, heads, head_dim]
    k: jax.Array  # [batch, keys, kv_heads, head_dim]
    v: jax.Array
    causal: bool = False
    window: int | None = None  # sliding window size, including itself; causal only
    bias: jax.Array | None = None  # [batch, 1, queries, keys], added to the scores
    counts: tuple[jax.Array, jax.Array] | None = None  # per sequence: valid queries and keys
    tables: tuple[jax.Array, jax.Array] | None = None
    """[batch, width] of keys and of values: k and v are pools of pages (with counts)."""


def forward(inputs: Inputs) -> Partial:
    """Output and lse (natural log, scaled scores); undefined past the counts of a sequence."""
    out, lse = _bind(_PASSES[0], inputs, (), is_training=True)
    return Partial(out, jnp.swapaxes(lse, 1, 2))


def output(inputs: Inputs) -> jax.Array:
    """The output alone."""
    return _bind(_PASSES[0], inputs, (), is_training=False)[0]


def backward(inputs: Inputs, output: Partial, dout: jax.Array) -> Gradients:
    """Gradients from these keys; `output` may be over more keys."""
    lse = jnp.swapaxes(output.lse, 1, 2)
    out, dout = output.out.astype(inputs.q.dtype), dout.astype(inputs.q.dtype)
    return Gradients(*_bind(_PASSES[1], inputs, (lse, out, dout)))


def refuses(platform: str, dtype: str, head_dim: int) -> str | None:
    """Why cuDNN does not compute such attention, None if it does."""
    if platform not in ("gpu", "cuda"):
        return "it runs on NVIDIA GPUs"
    if dtype not in ("bfloat16", "float16"):
        return f"it computes in bfloat16 and float16, not {dtype}"
    if head_dim > 128 or head_dim % 8:
        return f"head_dim {head_dim} is not a multiple of 8 up to 128"
    return unavailable()


def unavailable() -> str | None:
    """Why cuDNN cannot be used, None if it can."""
    from jax._src import xla_bridge
    from jax._src.lib import cuda_versions

    # on other backends the program is only lowered, for an absent machine; and planning must not
    # initialize this machine's backend
    started = xla_bridge.backends_are_initialized()
    if cuda_versions is None and started and jax.default_backend() == "gpu":
        return "cuDNN is not installed"
    return _unknown_calls()


@functools.cache
def _unknown_calls() -> str | None:
    """Why jax's private interface to cuDNN is unknown, None if it is known."""
    unknown = sorted(_backward_arguments() - _KNOWN)
    if unknown or not all(hasattr(_jax(), name) for name in _PASSES):
        said = f" ({', '.join(unknown)})" if unknown else ""
        return f"jax {jax.__version__} has an unknown interface to cuDNN{said}"
    return None


def _bind(name: str, inputs: Inputs, more: tuple[jax.Array, ...], **options: Any) -> Any:
    jaxs = _jax()
    names = {(False, False): "NO_MASK", (True, False): "CAUSAL"}
    names |= {(False, True): "PADDING", (True, True): "PADDING_CAUSAL"}
    unused = jnp.zeros(0, inputs.q.dtype)
    bias = unused if inputs.bias is None else inputs.bias
    counts = (unused, unused) if inputs.counts is None else inputs.counts
    tables = (unused, unused)
    if inputs.tables is not None:
        tables = inputs.tables[0][:, None, :, None], inputs.tables[1][:, None, :, None]
    arrays = (inputs.q, inputs.k, inputs.v, bias, *counts, unused, unused, *tables, *more)
    if "score_mod" in _backward_arguments():
        options["score_mod"] = None
    # a result takes its type from one operand, so all must vary over the same mesh axes
    return getattr(jaxs, name).bind(
        *(varying_like(x, *arrays) for x in arrays),
        scale=inputs.q.shape[-1] ** -0.5,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(inputs.bias is not None, False),  # a bias, and no gradient of it
        mask_type=jaxs.MaskType[names[inputs.causal, inputs.counts is not None]],
        layout=jaxs.AttentionLayout.BTNH.value,
        sliding_window_length=inputs.window,
        **options,
    )


def _backward_arguments() -> frozenset[str]:
    rule = getattr(_jax(), "_dot_product_attention_bwd_rule", None)
    return frozenset(inspect.signature(rule).parameters) if rule else frozenset({"no rule"})


def _jax() -> Any:
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo

"""What layers keep for their backward pass: each array once, with and without kernels of rows."""

import collections
import contextlib
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.models import Compute
from meshwright.models.decoder import REMAT, DecoderConfig, abstract_arrays, decoder_rules
from meshwright.models.decoder import forward as model_forward
from meshwright.ops import row_kernels
from meshwright.ops.collectives import varying_like
from meshwright.ops.rope import Rope

# widths that tell the arrays of a layer apart
CONFIG = DecoderConfig(
    vocab=40, layers=2, embed=1024, heads=6, kv_heads=2, head_dim=8, mlp=96, rope=Rope(100.0)
)
ONE, FOUR = "dp=1,fsdp=1,tp=1,sp=1", "dp=1,fsdp=2,tp=2,sp=1"
BATCH, LENGTH = 2, 10
# arrays of a layer's tokens by their width: embed (the input, the middle and two norms) and mlp
KEPT = {
    "none": {1024: 4, 96: 3},
    "elementwise": {1024: 2, 96: 2},
    "mlp": {1024: 2},
    "full": {1024: 1},
    "offload": {1024: 1},
}


def hidden(params: Any, tokens: Any, config: DecoderConfig, compute: Compute) -> jax.Array:
    return model_forward(params, {"tokens": tokens}, config, compute)[0]


@contextlib.contextmanager
def mesh_in_force(text: str) -> Any:
    size = math.prod(mw.MeshSpec.parse(text).sizes)
    mesh = mw.mesh(text, devices=jax.devices()[:size], axis_types="explicit")
    with jax.set_mesh(mesh):
        yield mesh


def kept(layers: int, text: str, compute: Compute) -> collections.Counter[int]:
    """How many arrays of every token are kept until the backward pass, by their width."""
    config = dataclasses.replace(CONFIG, layers=layers)
    with mesh_in_force(text) as mesh:
        arrays = abstract_arrays(config)
        params = jax.tree.map(
            lambda a, sharding: jax.ShapeDtypeStruct(a.shape, jnp.float32, sharding=sharding),
            arrays, mw.shardings(arrays, compute.rules, mesh=mesh),
        )  # fmt: skip

        def forward(params: Any, tokens: jax.Array) -> Any:
            _, backward = jax.vjp(lambda p: hidden(p, tokens, config, compute), params)
            return jax.tree.leaves(backward)

        tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
        found = {id(v): v.aval for v in jax.make_jaxpr(forward)(params, tokens).jaxpr.outvars}
    count: collections.Counter[int] = collections.Counter()
    for aval in found.values():
        if LENGTH in aval.shape[-2:]:
            count[aval.shape[-1]] += layers if aval.ndim == 4 else 1  # of a loop, stacked
    return count


@pytest.mark.parametrize("text", [ONE, FOUR])
@pytest.mark.parametrize("kernels", [False, True], ids=["compiler", "kernels"])
@pytest.mark.parametrize("scan", [True, False], ids=["loop", "unrolled"])
@pytest.mark.parametrize("remat", REMAT)
def test_a_layer_keeps_what_its_policy_names_and_each_array_once(
    request: pytest.FixtureRequest, remat: str, scan: bool, kernels: bool, text: str
) -> None:
    if kernels:
        request.getfixturevalue("pretended_h200")
    compute = Compute(decoder_rules(sp=True), jnp.bfloat16, remat, scan, kernel="dense")
    more, fewer = (kept(layers, text, compute) for layers in (3, 2))
    for width in (CONFIG.embed, CONFIG.mlp):
        assert more[width] - fewer[width] == KEPT[remat].get(width, 0)


def in_float32(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels' work done by formulas (tests/ops/test_row_kernels has the kernels); gives the calls."""
    called = []

    def norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
        shrink = jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + eps)
        return x * shrink * scale[None]

    def add_and_norm(x: jax.Array, update: jax.Array, scale: jax.Array, eps: float) -> Any:
        called.append("add_and_norm")
        total = x + update
        return total, norm(total.astype(jnp.float32), scale, eps).astype(x.dtype)

    def norm_gradient(x: jax.Array, scale: jax.Array, eps: float, through: Any, *given: Any) -> Any:
        called.append("norm_gradient")
        wide, *gradients = (part.astype(jnp.float32) for part in (x, *given))
        # differs from device to device as x does, or it would come back added up
        scale = varying_like(scale, x)
        _, backward = jax.vjp(lambda x, scale: norm(x, scale, eps), wide, scale)
        of_x, of_scale = backward(sum(gradients[1:], gradients[0]))
        of_x = of_x if through is None else of_x + through.astype(jnp.float32)
        return of_x.astype(x.dtype), of_scale

    monkeypatch.setattr(row_kernels, "add_and_norm", add_and_norm)
    monkeypatch.setattr(row_kernels, "norm_gradient", norm_gradient)
    return called


@pytest.mark.parametrize(
    ("remat", "scan", "text"),
    [
        ("none", False, FOUR),
        *(
            pytest.param(*rest, marks=pytest.mark.slow)
            for rest in (("none", False, ONE), ("none", True, FOUR), ("full", False, FOUR))
        ),
    ],
)
def test_gradients_are_the_same_where_sums_and_norms_are_made_together(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, remat: str, scan: bool,
    text: str,
) -> None:  # fmt: skip
    rng = np.random.default_rng(0)
    drawn = jax.tree.map(lambda a: rng.normal(size=a.shape, scale=0.05), abstract_arrays(CONFIG))
    tokens = rng.integers(0, CONFIG.vocab, (BATCH, LENGTH)).astype("i")
    compute = Compute(decoder_rules(sp=True), jnp.bfloat16, remat, scan, kernel="dense")

    def gradients() -> Any:
        def loss(params: Any) -> jax.Array:
            out = hidden(params, tokens, CONFIG, compute).astype(jnp.float32)
            return jnp.sum(jnp.sin(out) ** 2)

        with mesh_in_force(text) as mesh:
            shardings = mw.shardings(abstract_arrays(CONFIG), compute.rules, mesh=mesh)
            params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), drawn)
            return jax.jit(jax.grad(loss))(jax.device_put(params, shardings))

    right = gradients()
    request.getfixturevalue("pretended_h200")
    called = in_float32(monkeypatch)
    found = gradients()
    assert set(called) == {"add_and_norm", "norm_gradient"}
    for (path, one), other in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(right), strict=True
    ):
        assert one.sharding == other.sharding
        away = np.linalg.norm(np.asarray(one) - np.asarray(other))
        assert away <= 0.02 * np.linalg.norm(other), jax.tree_util.keystr(path)

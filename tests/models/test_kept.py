"""What layers keep for their backward pass: each array once."""

import collections
import contextlib
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.models import Compute
from meshwright.models.decoder import REMAT, DecoderConfig, abstract_arrays, decoder_rules
from meshwright.models.decoder import forward as model_forward
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


@pytest.mark.parametrize("text", [pytest.param(ONE, marks=pytest.mark.slow), FOUR])
@pytest.mark.parametrize("scan", [True, False], ids=["loop", "unrolled"])
@pytest.mark.parametrize("remat", REMAT)
def test_a_layer_keeps_what_its_policy_names_and_each_array_once(
    remat: str, scan: bool, text: str
) -> None:
    compute = Compute(decoder_rules(sp=True), jnp.bfloat16, remat, scan, kernel="dense")
    more, fewer = (kept(layers, text, compute) for layers in (3, 2))
    for width in (CONFIG.embed, CONFIG.mlp):
        assert more[width] - fewer[width] == KEPT[remat].get(width, 0)

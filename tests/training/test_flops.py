"""The FLOPs that plan and train count, against those of the program's matmuls."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.machines import Machine
from meshwright.models import family_of
from meshwright.models.decoder import DecoderConfig
from meshwright.planner import Workload
from meshwright.planner.step import StepModel
from meshwright.planner.workload import Choice
from meshwright.training import TrainConfig, abstract_step, with_settings

MODEL = DecoderConfig(
    vocab=512, layers=2, embed=512, heads=4, kv_heads=2, head_dim=128, mlp=1024, max_seq=512
)
BATCH, SEQ = 16, 256
SETTINGS = {"compute.layers": "unroll", "compute.attention": "dense", "loss.chunk": BATCH * SEQ}


def made(model):
    config = with_settings(TrainConfig("", batch=BATCH, seq=SEQ), SETTINGS)
    mesh = mw.mesh("dp=1,fsdp=1,tp=1,sp=1", devices=jax.devices()[:1], axis_types="explicit")
    return abstract_step(config, mesh, model)


def packed(documents):
    """Segments and positions of sequences that hold so many documents each, of equal length."""
    positions = np.tile(np.arange(SEQ // documents, dtype=np.int32), documents)
    segments = np.repeat(np.arange(1, documents + 1, dtype=np.int32), SEQ // documents)
    shape = (1, BATCH, SEQ)
    return {
        "segments": np.broadcast_to(segments, shape),
        "positions": np.broadcast_to(positions, shape),
    }


DOT = re.compile(
    r"dot_general .*contracting_dims = \[([\d, ]*)\].*: \(tensor<([\dx]+)x\w+>, .* -> tensor<([\dx]+)x\w+>"
)


def matmul_flops(text):
    """Of a lowered program: two for each element of a product and of what is summed for it.

    Compilers count what is not a matmul as well, each in its own way. Loops are of one turn here.
    """
    functions = re.split(r"func\.func \w+ @", text)[1:]
    bodies = {re.match(r"\w+", body)[0]: body for body in functions}

    @functools.cache
    def flops(name):
        total = 0
        for summed, left, product in DOT.findall(bodies[name]):
            sizes = [*map(int, left.split("x"))]
            depth = math.prod(sizes[int(dim)] for dim in summed.split(","))
            total += 2 * depth * math.prod(map(int, product.split("x")))
        return total + sum(map(flops, re.findall(r"call @(\w+)", bodies[name])))

    return flops("main")


def without_scores_again(step):
    """The FLOPs of a program, whose plain attention computes scores twice: a fused one does not."""
    model = step.model
    pairs = model.layers * model.heads * model.head_dim * BATCH * SEQ
    return matmul_flops(step.lower().as_text()) - 2 * pairs * SEQ


@pytest.mark.parametrize("window", [None, 64])
def test_planned_and_reported_flops_are_those_of_the_programs_matmuls(window):
    model = dataclasses.replace(MODEL, sliding_window=window)
    step = made(model)
    # plain attention computes every pair of a sequence, seen or not
    pairs = 12 * model.layers * model.heads * model.head_dim * BATCH * SEQ
    everything = without_scores_again(step)

    run = Workload.of(step.config, Machine.parse("cpu:1"), model)
    planned = StepModel(run, Choice.of()).work
    assert planned.flops == pytest.approx(planned.computed, rel=1e-6)
    seen = model.keys_seen(SEQ)
    assert planned.flops == pytest.approx(everything - pairs * (SEQ - seen), rel=1e-6)

    batch = {"positions": jnp.asarray(packed(4)["positions"])}
    seen = float(family_of(model).keys_seen(model, batch))
    reported = step.work.flops_per_token(seen) * BATCH * SEQ
    assert reported == pytest.approx(everything - pairs * (SEQ - seen), rel=1e-6)
    if window is None:
        assert reported < 0.97 * planned.flops


def test_layers_that_differ_are_counted_each_with_its_own_window():
    """Of two layers one has a window; the mlp has no gate, and biases cost nothing."""
    model = dataclasses.replace(
        MODEL, pattern=[{"sliding_window": 64}, {}], gated=False, activation="gelu",
        mlp_bias=True, qkv_bias=True, norm="layer", norm_bias=True, mlp=1024, heads=4, kv_heads=2,
        head_dim=128,
    )  # fmt: skip
    distance = np.arange(SEQ)[:, None] - np.arange(SEQ)[None]
    seen = [((distance >= 0) & (distance < window)).sum() / SEQ for window in (64, SEQ)]
    step = made(model)
    pairs = 12 * 4 * 128 * BATCH * SEQ * sum(SEQ - keys for keys in seen)
    useful = without_scores_again(step) - pairs
    # exact counts have the diagonal, which the formula for whole sequences leaves out
    reported = step.work.flops_per_token(sum(seen) / 2) * BATCH * SEQ
    assert reported == pytest.approx(useful, rel=1e-6)
    assert step.work.flops_per_token() == pytest.approx(useful / BATCH / SEQ, rel=1e-3)
    batch = {"positions": jnp.asarray(packed(1)["positions"])}
    assert float(family_of(model).keys_seen(model, batch)) == pytest.approx(sum(seen) / 2)
    machine = Machine.parse("cpu:1")
    planned = StepModel(Workload.of(step.config, machine, model), Choice.of()).work
    assert planned.flops == pytest.approx(useful, rel=1e-3)


@pytest.mark.parametrize("q_rank", [None, 192])
def test_latent_attention_is_counted_with_its_latents_computed_again(q_rank):
    """No remat policy saves latents, and values are padded to the size of keys."""
    model = dataclasses.replace(
        MODEL, kv_heads=4, head_dim=96, rope_dim=32, value_dim=64, kv_rank=128, q_rank=q_rank
    )
    step = made(model)
    pairs = 12 * model.layers * model.heads * model.head_dim * BATCH * SEQ
    everything = without_scores_again(step)
    seen = model.keys_seen(SEQ)
    planned = StepModel(Workload.of(step.config, Machine.parse("cpu:1"), model), Choice.of()).work
    assert planned.computed == pytest.approx(everything - pairs * (SEQ - seen), rel=1e-6)
    again = 2 * model.layers * model.embed * (model.kv_rank + (q_rank or 0)) * BATCH * SEQ
    padding = pairs / 2 / model.head_dim * (model.head_dim - model.value_dim) * seen
    assert planned.flops == pytest.approx(planned.computed - again - padding, rel=1e-6)


def test_keys_seen_counts_documents_and_windows_pair_by_pair():
    batch = packed(4)
    for window in (None, 20):
        model = dataclasses.replace(MODEL, sliding_window=window)
        segments, positions = batch["segments"][0, 0], batch["positions"][0, 0]
        same = segments[:, None] == segments[None]
        distance = positions[:, None] - positions[None]
        visible = same & (distance >= 0) & (distance < (window or SEQ))
        counted = family_of(model).keys_seen(model, {"positions": jnp.asarray(batch["positions"])})
        assert float(counted) == visible.sum() / SEQ


def test_the_formula_is_shown_with_the_run():
    step = made(MODEL)
    weights = 6 * MODEL.matmul_params
    assert f"{weights / 1e6:.3g} MFLOP (6 a weight)" in step.work.formula
    assert "12.3 kFLOP × keys seen" in step.work.formula  # 12 × 2 layers × 4 heads × 128

"""Initializers: the same bits on every mesh, and created in place."""

import contextlib
import dataclasses
import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.audits import collectives, instructions
from meshwright.errors import MeshwrightError
from meshwright.layouts import create
from meshwright.models import preset
from meshwright.models.decoder import abstract_arrays, decoder_rules, t5x_rules

CONFIG = dataclasses.replace(
    preset("tiny"), layers=2, kv_heads=8, qkv_bias=True, qk_norm=True, max_seq=64
)
slow = pytest.mark.slow
MESHES = [
    pytest.param("dp=8,fsdp=1,tp=1,sp=1", marks=slow),
    pytest.param("dp=1,fsdp=8,tp=1,sp=1", marks=slow),
    pytest.param("dp=1,fsdp=1,tp=8,sp=1", marks=slow),
    pytest.param("dp=2,fsdp=2,tp=2,sp=1", marks=slow),
    "dp=1,fsdp=2,tp=2,sp=2",
]


def made(text: str, rules: mw.Rules, seed: int = 0, dtype: object = jnp.float32) -> dict:
    specs = abstract_arrays(CONFIG, dtype)
    count = np.prod([int(part.split("=")[1]) for part in text.split(",")])
    mesh = mw.mesh(text, devices=jax.devices()[:count], axis_types="explicit")
    shardings = mw.shardings(specs, rules, mesh=mesh)
    with jax.set_mesh(mesh):
        arrays = create(specs, shardings, seed)
    for array, sharding in zip(jax.tree.leaves(arrays), jax.tree.leaves(shardings), strict=True):
        assert array.sharding == sharding
    return jax.tree.map(np.asarray, arrays)


@pytest.fixture(scope="module")
def on_one_device() -> dict:
    return made("dp=1,fsdp=1,tp=1,sp=1", decoder_rules(sp=True))


@pytest.mark.parametrize("text", MESHES)
def test_values_are_the_same_bits_on_every_mesh(text: str, on_one_device: dict) -> None:
    found = made(text, decoder_rules(sp=True))
    jax.tree.map(np.testing.assert_array_equal, found, on_one_device)


@slow
def test_values_are_the_same_bits_under_other_rules(on_one_device: dict) -> None:
    found = made("dp=2,fsdp=2,tp=2,sp=1", t5x_rules(2, 2))
    jax.tree.map(np.testing.assert_array_equal, found, on_one_device)


def test_bfloat16_starts_from_the_rounded_float32_values(on_one_device: dict) -> None:
    found = made("dp=1,fsdp=4,tp=2,sp=1", decoder_rules(), dtype=jnp.bfloat16)
    rounded = jax.tree.map(lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16)), on_one_device)
    jax.tree.map(np.testing.assert_array_equal, found, rounded)


def test_every_array_and_every_seed_has_its_own_values(on_one_device: dict) -> None:
    other = made("dp=1,fsdp=1,tp=1,sp=1", decoder_rules(sp=True), seed=1)
    matrices = [
        leaf for tree in (on_one_device, other) for leaf in jax.tree.leaves(tree) if leaf.std() > 0
    ]
    assert len(matrices) == 18
    for a, b in itertools.combinations(matrices, 2):
        n = min(a.size, b.size, 1000)
        assert abs(np.corrcoef(a.ravel()[:n], b.ravel()[:n])[0, 1]) < 0.15
    # nor do layers repeat
    gate = on_one_device["layers"]["mlp"]["gate"]
    assert abs(np.corrcoef(gate[0].ravel(), gate[1].ravel())[0, 1]) < 0.02


def test_values_are_normal_with_the_spread_asked_for(on_one_device: dict) -> None:
    gate, down = (on_one_device["layers"]["mlp"][name].ravel() for name in ("gate", "down"))
    assert gate.std() == pytest.approx(0.02, rel=0.01)
    assert abs(gate.mean()) < 1e-4
    assert np.mean(np.abs(gate) < 0.02) == pytest.approx(0.6827, abs=0.005)  # one sigma
    assert down.std() == pytest.approx(0.02 / 2, rel=0.01)  # / sqrt(2 * layers)


@pytest.mark.parametrize("is_current", [True, False])
def test_no_device_ever_holds_a_whole_array(
    monkeypatch: pytest.MonkeyPatch, is_current: bool
) -> None:
    """The compiled program's own account of its memory, and of every array in it."""
    specs = {
        "a": mw.ArraySpec((256, 1024), "embed mlp", init=mw.Normal(0.02)),
        "b": mw.ArraySpec((1024, 256), "mlp embed", jnp.bfloat16, init=mw.Normal(0.02)),
        "c": mw.ArraySpec((4, 256, 16, 16), "layers embed mlp head", init=mw.Normal(0.02)),
        "d": mw.ArraySpec((4, 16, 16, 256), "layers mlp head embed", init=mw.Normal(0.02)),
    }
    mesh = mw.mesh("fsdp=4,tp=2", devices=jax.devices()[:8], axis_types="explicit")
    rules = [("embed", "fsdp"), ("mlp", "tp"), ("layers", None), ("head", None)]
    shardings = mw.shardings(specs, mw.Rules(rules), mesh=mesh)
    compiled = []
    real = jax.jit

    def watched(function: object, **options: object) -> object:
        def call(*args: object) -> object:
            compiled.append(real(function, **options).lower(*args).compile())
            return compiled[-1](*args)

        return call

    monkeypatch.setattr(jax, "jit", watched)
    with jax.set_mesh(mesh) if is_current else contextlib.nullcontext():  # train sets it
        create(specs, shardings)
    monkeypatch.undo()
    bits, program = compiled
    elements = sum(int(np.prod(spec.shape)) for spec in specs.values())
    nbytes = sum(spec.nbytes for spec in specs.values())
    for each, expected in ((bits, 4 * elements), (program, nbytes)):
        memory = each.memory_analysis()
        assert memory.output_size_in_bytes == pytest.approx(expected / 8, rel=0.01)
        assert memory.temp_size_in_bytes < specs["a"].nbytes
        largest = max(
            int(np.prod(shape)) for i in instructions(each.as_text()) for _, shape in i.arrays
        )
        assert largest <= 256 * 1024 / 8
        assert collectives(each.as_text(), mesh) == []  # each device makes its own part


SHARDED = [
    ((4, 32, 8, 16), "l e h k -> l e@fsdp h@tp k"),
    ((4, 8, 16, 32), "l h k e -> l h@tp k e@fsdp"),
    ((3, 5, 7), "a b c -> a b c"),
    ((6, 5, 8, 3), "a b c d -> a@tp b c@fsdp d"),
    ((8, 3), "a b -> a@fsdp+tp b"),
    ((7,), "a -> a"),
    ((), "-> "),
]


@pytest.mark.parametrize(("shape", "layout"), SHARDED)
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=slow)])
def test_values_are_those_of_jax_random_normal(shape: tuple, layout: str, dtype: object) -> None:
    names = layout.partition("->")[0]
    specs = {"w": mw.ArraySpec(shape, names, dtype, init=mw.Normal(0.02))}
    mesh = mw.mesh("fsdp=4,tp=2", devices=jax.devices()[:8], axis_types="explicit")
    values = create(specs, mw.shardings(specs, layout, mesh=mesh), seed=3)["w"]
    key = jax.random.fold_in(jax.random.key(3), zlib.crc32(b"w"))
    with jax.threefry_partitionable(True):
        wanted = jax.random.normal(key, shape, jnp.float32) * 0.02
        at_once = mw.Normal(0.02)(key, shape, dtype)  # as on other platforms
    for drawn in (values, at_once):
        np.testing.assert_array_equal(np.asarray(drawn), np.asarray(wanted.astype(dtype)))


def test_the_program_that_draws_bits_is_not_optimized(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's CPU compiler takes 15 s to optimize random bits of four dims."""
    options, real = [], jax.jit
    monkeypatch.setattr(
        jax,
        "jit",
        lambda f, **given: options.append(given.get("compiler_options")) or real(f, **given),
    )
    specs = {"w": mw.ArraySpec((4, 16, 8, 4), "a b c d", init=mw.Normal(0.02))}
    create(specs, mw.shardings(specs, "a b c d -> a b@tp c d", mesh="tp=16"))
    bits, values = options
    assert bits["xla_backend_optimization_level"] == 0
    assert values is None  # floating point is rounded as ever


def test_a_padded_array_has_the_values_of_its_own_shape() -> None:
    """Also with an initializer that depends on the shape."""
    mesh = mw.mesh("fsdp=4,tp=2", devices=jax.devices()[:8])
    shapes = []

    def fan_in(key: jax.Array, shape: tuple, dtype: object) -> jax.Array:
        shapes.append(tuple(shape))
        return jax.random.normal(key, shape, dtype) / shape[0] ** 0.5

    specs = {
        "padded": mw.ArraySpec((8, 6, 2), "v e f", init=mw.Normal(0.02), unpadded=(7, 6, 2)),
        "own": mw.ArraySpec((8, 6, 2), "v e f", init=fan_in),
    }
    made = create(specs, mw.shardings(specs, "v e f -> v@fsdp e f", mesh=mesh))
    assert shapes == [(8, 6, 2)]
    plain = {"padded": mw.ArraySpec((7, 6, 2), "v e f", init=mw.Normal(0.02))}
    unpadded = create(plain, mw.shardings(plain, "v e f -> v e f", mesh=mesh))["padded"]
    np.testing.assert_array_equal(made["padded"][:7], unpadded)
    assert not made["padded"][7:].any()


def test_an_array_without_an_initializer_is_an_error() -> None:
    specs = {"w": mw.ArraySpec((16,), "a")}
    with pytest.raises(MeshwrightError, match=r"array 'w' has no init; give ArraySpec"):
        create(specs, mw.shardings(specs, "a -> a@tp", mesh="tp=16"))

"""Plans and proofs of programs that are not ours: jax's own counts are the reference."""

import inspect
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.audits import read_program
from meshwright.errors import MeshwrightError
from meshwright.planner.program_work import program_work

pytestmark = pytest.mark.usefixtures("fast_proofs")
WIDTH, HIDDEN, TOKENS, LAYERS = 64, 256, 512, 3
MESH = mw.mesh("fsdp=4,tp=2", machine="cpu:8").abstract_mesh


@pytest.fixture(autouse=True)
def usual_promotion() -> Iterator[None]:
    """Of other libraries' steps."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


def array(shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, P(*spec)))


def loss(weights: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, weight: Any) -> Any:
        return x + jnp.tanh(x @ weight["in"]) @ weight["out"], None

    out, _ = jax.lax.scan(layer, x, weights)
    return jnp.mean(jnp.square(out))


def step(weights: Any, x: jax.Array) -> Any:
    value, gradient = jax.value_and_grad(loss)(weights, x)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient)


PLAIN = (
    jax.jit(step, donate_argnums=0),
    (
        {
            "in": array((LAYERS, WIDTH, HIDDEN), None, "fsdp", "tp"),
            "out": array((LAYERS, HIDDEN, WIDTH), None, "tp", "fsdp"),
        },
        array((TOKENS, WIDTH), "fsdp", None),
    ),
)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


@nnx.jit(donate_argnums=(0, 1))
def nnx_step(model: Net, optimizer: Any, x: jax.Array) -> jax.Array:
    def loss(model: Net) -> jax.Array:
        return jnp.mean(jnp.square(model(x)))

    value, gradient = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradient)
    return value


def of_nnx() -> tuple[Any, Any]:
    def make() -> Any:
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        spec = ("fsdp", None) if len(leaf.shape) == 2 else ()
        return array(leaf.shape, *spec, dtype=leaf.dtype)

    model, optimizer = jax.tree.map(place, nnx.eval_shape(make))
    return nnx_step, (model, optimizer, array((TOKENS, WIDTH), "fsdp", None))


@eqx.filter_jit(donate="all-except-first")
def eqx_step(x: jax.Array, model: eqx.nn.MLP) -> eqx.nn.MLP:
    def loss(model: eqx.nn.MLP) -> jax.Array:
        return jnp.mean(jnp.square(jax.vmap(model)(x)))

    gradient = eqx.filter_grad(loss)(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradient))


def of_equinox() -> tuple[Any, Any]:
    def place(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf  # an activation function
        return array(leaf.shape, *(("fsdp", None) if len(leaf.shape) == 2 else ()))

    model = eqx.filter_eval_shape(eqx.nn.MLP, WIDTH, WIDTH, HIDDEN, 2, key=jax.random.key(0))
    return eqx_step, (array((TOKENS, WIDTH), "fsdp", None), jax.tree.map(place, model))


def traffic(plan: mw.ProgramPlan) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for one in plan.collectives:
        found[one.operation, "+".join(one.axes)] += one.bytes * one.times
    return found


def on_devices(args: Any, mesh: Mesh) -> Any:
    """The same arguments on simulated devices."""

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, leaf.sharding.spec)
        )

    return jax.tree.map(place, args)


@pytest.fixture(scope="module")
def plain(cache: Path) -> mw.ProgramPlan:
    return mw.plan(*PLAIN, on="h100:8", cache=cache)


def test_the_flops_of_a_plan_are_those_of_its_matmuls(plain: mw.ProgramPlan) -> None:
    a_pass = 2 * 2 * TOKENS * WIDTH * HIDDEN * LAYERS  # two matmuls a layer
    assert plain.flops == 3 * a_pass / 8  # forward, and two backward, over eight devices


def test_a_plan_sends_what_fsdp_and_tp_must(plain: mw.ProgramPlan) -> None:
    weights = 4 * 2 * WIDTH * HIDDEN // 2 * LAYERS  # float32, of one part of tp
    activations = 4 * TOKENS // 4 * WIDTH * LAYERS
    found = traffic(plain)
    assert found["reduce-scatter", "fsdp"] == weights
    assert found["all-gather", "fsdp"] == 2 * weights  # forward and backward
    assert found["all-reduce", "tp"] == 2 * activations
    assert {axes for _, axes in found} <= {"fsdp", "tp"}


def test_only_what_a_matmul_waits_for_is_exposed(plain: mw.ProgramPlan) -> None:
    for one in plain.collectives:
        if one.axes == ("tp",):
            assert one.exposed == one.seconds
        elif one.bytes > 64:
            assert 0 < one.hidden < one.seconds
    parts = plain.seconds
    assert parts["waiting"] == pytest.approx(sum(one.exposed for one in plain.collectives))
    assert plain.step_seconds == pytest.approx(sum(parts.values()))


def test_arguments_of_a_plan_are_shards_and_outputs_take_their_place(
    plain: mw.ProgramPlan,
) -> None:
    weights = 4 * 2 * WIDTH * HIDDEN * LAYERS // 8
    x = 4 * TOKENS * WIDTH // 4
    assert plain.memory.kinds["arguments"] == weights + x
    assert plain.memory.kinds["outputs beside them"] < 100  # the loss
    saved = 4 * (WIDTH + HIDDEN // 2) * TOKENS // 4 * LAYERS  # inputs and tanh of every layer
    assert saved <= plain.memory.kinds["temporaries"] < 3 * saved


@pytest.mark.parametrize("make", [of_nnx, of_equinox])
def test_a_step_of_another_library_is_planned_with_sources_in_the_users_file(
    make: Any, cache: Path
) -> None:
    function, args = make()
    plan = mw.plan(function, args, on="v5e:2x4", cache=cache)
    assert {one.what.rpartition(":")[0] for one in plan.collectives} == {__file__}
    lines, start = inspect.getsourcelines(Net)
    call = start + next(i for i, line in enumerate(lines) if "self.down(" in line)
    if make is of_nnx:
        gathers = {one.what for one in plan.collectives if one.operation == "all-gather"}
        assert gathers == {f"{__file__}:{call}"}
        matrices = 4 * 2 * WIDTH * HIDDEN
        assert traffic(plan)["reduce-scatter", "fsdp"] == matrices
        # parameters and both moments of adam are donated, and take no second place
        assert plan.memory.kinds["outputs beside them"] < 1024
    assert plan.flops > 0
    assert "waits" in str(plan)


@pytest.mark.parametrize(
    "make",
    [
        of_nnx,
        pytest.param(of_equinox, marks=pytest.mark.slow),
        pytest.param(lambda: PLAIN, marks=pytest.mark.slow),
    ],
)
def test_a_proof_for_cpus_is_what_jax_compiles_for_them(
    make: Any, cache: Path, eight: list[Any]
) -> None:
    function, args = make()
    proof = mw.prove(function, args, on="cpu:8", cache=cache)
    assert proof.plan is not None
    mesh = mw.mesh("fsdp=4,tp=2", devices=eight)
    if make is of_equinox:  # for which abstract arrays are no arrays
        args = jax.tree.map(
            lambda leaf: (
                jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
                if isinstance(leaf, jax.ShapeDtypeStruct)
                else leaf
            ),
            on_devices(args, mesh),
        )
    else:
        args = on_devices(args, mesh)
    compiled = function.lower(*args).compile()
    stats = getattr(compiled, "compiled", compiled).memory_analysis()
    kinds = proof.footprint.kinds
    assert kinds["arguments"] == stats.argument_size_in_bytes
    assert kinds["temporaries"] == pytest.approx(stats.temp_size_in_bytes, rel=0.02)
    sent = Counter((row.operation, row.axes, row.bytes * row.times) for row in proof.audit.rows)
    own = mw.audit(compiled, mesh)
    assert sent == Counter((row.operation, row.axes, row.bytes * row.times) for row in own.rows)
    assert proof.plan.memory.total == pytest.approx(proof.footprint.total, rel=0.02)
    assert "compiler" in str(proof)


def test_the_work_of_a_program_without_loops_is_jaxs_own_count() -> None:
    def chain(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.batch_matmul(jnp.tanh(jnp.einsum("bij,jk->bik", x, a)), b)

    shapes = ((4, 128, 64), (64, 96), (4, 96, 32))
    lowered = jax.jit(chain).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    work = program_work(read_program(lowered.as_text(dialect="hlo")))
    counted = lowered.compile().cost_analysis()["flops"]  # with those of elementwise operations
    assert work.flops == 2 * 4 * 128 * (64 * 96 + 96 * 32)
    assert work.flops == pytest.approx(counted, rel=0.02)


def test_a_convolution_is_counted_as_a_matmul() -> None:
    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    shapes = ((2, 16, 16, 8), (1, 1, 8, 32))
    lowered = jax.jit(convolve).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    work = program_work(read_program(lowered.as_text(dialect="hlo")))
    assert work.flops == lowered.compile().cost_analysis()["flops"] == 2 * 2 * 256 * 8 * 32


def test_one_device_needs_no_shardings(cache: Path) -> None:
    side = 1024
    a = jax.ShapeDtypeStruct((side, side), jnp.bfloat16)
    plan = mw.plan(lambda a, b: a @ b, (a, a), on="h100:1", cache=cache)
    assert plan.flops == 2 * side**3
    assert plan.memory.total == 3 * 2 * side**2
    assert not plan.collectives
    assert plan.bound in ("compute", "memory")


@pytest.mark.parametrize(
    ("args", "on", "message"),
    [
        ((jnp.ones((8, 8)),), "h100:8", "no argument of square has a sharding"),
        ((array((8, 8), "fsdp"),), "h100:4", "needs 8 devices, and 'h100:4' has 4 devices"),
        (jnp.ones((8, 8)), "h100:1", r"as a tuple, \(x,\)"),
        (
            (
                array((8, 8)),
                jax.ShapeDtypeStruct(
                    (8,),
                    jnp.float32,
                    sharding=NamedSharding(
                        mw.mesh("fsdp=8", machine="cpu:8").abstract_mesh, P("fsdp")
                    ),
                ),
            ),
            "h100:8",
            "different meshes",
        ),
    ],
)
def test_a_mistake_is_one_sentence(args: Any, on: str, message: str) -> None:
    def square(x: jax.Array, y: Any = None) -> jax.Array:
        return x @ x

    with pytest.raises(MeshwrightError, match=message) as caught:
        mw.plan(square, args, on=on)
    assert "\n" not in str(caught.value)

"""Plans of programs that are not ours against the compilers for TPUs and GPUs.

    python benchmarks/any_program.py            # prints a table
    python benchmarks/any_program.py --write    # and puts it into RESULTS.md

Train steps as users write them, in Flax NNX (layers unrolled), Equinox and plain jax (a scan, with
and without remat): `mw.prove` compiles each for machines that are not here. It needs
meshwright[tpu,cuda], flax and equinox, and takes minutes.
"""

import argparse
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import meshwright as mw
from results import here, write_section

WIDTH, HIDDEN, TOKENS, LAYERS = 4096, 16384, 8 * 8192, 6
MACHINES = ("h100:8", "v5p:2x2x2")
Program = tuple[Any, tuple[Any, ...]]


def places(mesh: Any) -> Callable[..., jax.ShapeDtypeStruct]:
    """An abstract array with these axes of the mesh."""

    def place(shape: tuple[int, ...], dtype: Any, *spec: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return place


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        options: dict[str, Any] = {"rngs": rngs, "dtype": jnp.bfloat16}
        self.norm = nnx.RMSNorm(WIDTH, **options)
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, **options)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


@nnx.jit(donate_argnums=(0, 1))
def nnx_step(model: Net, optimizer: Any, x: jax.Array) -> jax.Array:
    def loss(model: Net) -> jax.Array:
        return jnp.mean(jnp.square(model(x).astype(jnp.float32)))

    value, gradient = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradient)
    return value


def of_nnx(mesh: Any) -> Program:
    place = places(mesh)

    def make() -> Any:
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    model, optimizer = jax.tree.map(
        lambda leaf: place(leaf.shape, leaf.dtype, *(["fsdp"] if len(leaf.shape) == 2 else [])),
        nnx.eval_shape(make),
    )
    return nnx_step, (model, optimizer, place((TOKENS, WIDTH), jnp.bfloat16, "fsdp"))


@eqx.filter_jit(donate="all-except-first")
def eqx_step(x: jax.Array, model: eqx.nn.MLP) -> eqx.nn.MLP:
    def loss(model: eqx.nn.MLP) -> jax.Array:
        return jnp.mean(jnp.square(jax.vmap(model)(x).astype(jnp.float32)))

    gradient = eqx.filter_grad(loss)(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradient))


def of_equinox(mesh: Any) -> Program:
    place = places(mesh)
    model = eqx.filter_eval_shape(
        eqx.nn.MLP, WIDTH, WIDTH, HIDDEN, LAYERS, key=jax.random.key(0), dtype=jnp.bfloat16
    )
    model = jax.tree.map(
        lambda leaf: (
            place(leaf.shape, leaf.dtype, *(["fsdp"] if len(leaf.shape) == 2 else []))
            if isinstance(leaf, jax.ShapeDtypeStruct)
            else leaf
        ),
        model,
    )
    return eqx_step, (place((TOKENS, WIDTH), jnp.bfloat16, "fsdp"), model)


def of_jax(mesh: Any, remat: bool) -> Program:
    place = places(mesh)

    def layer(x: jax.Array, weights: Any) -> Any:
        wide = jax.nn.gelu(x @ weights["in"].astype(jnp.bfloat16))
        return x + wide @ weights["out"].astype(jnp.bfloat16), None

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        out, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, weights)
        return jnp.mean(jnp.square(out.astype(jnp.float32)))

    def step(weights: Any, x: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(weights, x)
        return value, jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradient)

    weights = {
        "in": place((LAYERS, WIDTH, HIDDEN), jnp.float32, None, "fsdp", "tp"),
        "out": place((LAYERS, HIDDEN, WIDTH), jnp.float32, None, "tp", "fsdp"),
    }
    x = place((TOKENS, WIDTH), jnp.bfloat16, "fsdp")
    return jax.jit(step, donate_argnums=0), (weights, x)


PROGRAMS: dict[str, tuple[str, Callable[[Any], Program]]] = {
    "Flax NNX, layers unrolled": ("fsdp=8", of_nnx),
    "Equinox MLP": ("fsdp=8", of_equinox),
    "jax, scan": ("fsdp=4,tp=2", lambda mesh: of_jax(mesh, False)),
    "jax, scan with remat": ("fsdp=4,tp=2", lambda mesh: of_jax(mesh, True)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    lines = [
        "| program | mesh | machine | memory: plan / compiler (GiB) | off "
        "| sent: plan / compiler (GiB) | off |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (text, make) in PROGRAMS.items():
        for machine in MACHINES:
            program = make(mw.mesh(text, machine=machine).abstract_mesh)
            proof = mw.prove(*program, on=machine)
            memory, *traffic = proof.compared
            # a collective matmul sends as permutes what it would gather or scatter
            sent = [sum(getattr(one, side) for one in traffic) for side in ("planned", "compiled")]
            cells = [name, text, machine]
            for planned, compiled in ((memory.planned, memory.compiled), sent):
                cells.append(f"{planned / 2**30:.2f} / {compiled / 2**30:.2f}")
                cells.append(f"{100 * (planned / compiled - 1):+.1f}%")
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    if write:
        intro = (
            "`mw.plan` of train steps that are not ours beside what the machine's compiler makes: "
            f"{LAYERS} layers of {WIDTH} × {HIDDEN}, {TOKENS:,} tokens, bfloat16; compiled "
            f"without hardware on {here()} by {proof.compiler.split(',')[0]}. Sent: bytes of all "
            "collectives (`Collective.bytes`). The TPU compiler makes collective matmuls of the "
            "steps over fsdp alone, whose permutes and copies count apart."
        )
        write_section("Plans of any program", intro, lines)


if __name__ == "__main__":
    main()

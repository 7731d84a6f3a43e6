"""A tour of the placement core on 8 simulated devices: `python examples/layout_demo.py`.

A two-layer MLP is placed by one expression an array, by path rules and by logical rules: three ways
to say the same. Then a mesh on a machine that is not here, and a model's table.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import meshwright as mw
from meshwright.models import abstract_arrays, decoder_rules, preset
from meshwright.show import array_grid, axis_table, machine_grid, page, scene

console = Console()


def three_notations() -> None:
    """Column-parallel, then row-parallel: the same placement said three ways."""
    console.rule("one MLP, three notations")
    mesh = mw.mesh("dp=2,tp=4")
    key1, key2, key3 = jax.random.split(jax.random.key(0), 3)
    weights = {
        "w1": jax.random.normal(key1, (64, 256)),
        "w2": jax.random.normal(key2, (256, 64)),
    }
    x = mw.shard(jax.random.normal(key3, (16, 64)), "batch embed -> batch@dp embed", mesh=mesh)

    by_expression = {"w1": "x y -> x y@tp", "w2": "y z -> y@tp z"}
    by_path = mw.PathRules([("w1", (None, "tp")), ("w2", ("tp", None))])
    by_dims = mw.Rules([("mlp", "tp"), ("embed", None)])
    dims = {"w1": "embed mlp", "w2": "mlp embed"}
    placed = {
        "expressions": mw.shard(weights, by_expression, mesh=mesh),
        "path rules": mw.shard(weights, by_path, mesh=mesh),
        "logical rules": mw.shard(weights, by_dims, mesh=mesh, dims=dims),
    }
    expected = np.maximum(np.asarray(x) @ np.asarray(weights["w1"]), 0) @ np.asarray(weights["w2"])

    @jax.jit
    def mlp(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        return jnp.maximum(x @ w["w1"], 0) @ w["w2"]

    for name, w in placed.items():
        error = float(np.abs(np.asarray(mlp(x, w)) - expected).max())
        text = mlp.lower(x, w).compile().as_text() or ""
        specs = {key: str(value.sharding.spec) for key, value in w.items()}
        console.print(
            f"{name:14} {specs}, {text.count(' all-reduce(')} all-reduce, "
            f"off by {error:.1e} from NumPy",
            highlight=False,
        )


def machine_and_model(html: Path | None) -> None:
    """A mesh on 32 chips that are not here, one array, and Llama-3.1-8B under its rules."""
    mesh = mw.mesh("dp=1,fsdp=-1,tp=4,sp=1", machine="v5p:2x4x4")
    table = mw.explain(abstract_arrays(preset("llama-3.1-8b")), decoder_rules(), mesh)
    arrays = [((4096, 14336), "embed mlp -> embed@fsdp mlp@tp")]
    drawn = scene(mesh, arrays, table)
    console.rule(f"mesh {mesh} on {mesh.machine}")
    console.print(axis_table(mesh), machine_grid(mesh), array_grid(drawn.arrays[0], mesh))
    console.rule("Llama-3.1-8B on it")
    console.print(table)
    if html is not None:
        html.write_text(page(drawn))
        console.print(f"\nThe same as a page: open {html}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--html", type=Path, help="also write a page here")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    three_notations()
    machine_and_model(arguments.html)

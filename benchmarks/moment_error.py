"""What fewer bits in the optimizer's moments do to the loss: `python benchmarks/moment_error.py`.

A small decoder learns from the stories in the package, on the CPU, with moments kept in float32
and in other ways. Besides the ways that train has there are two usual ones for comparison: rounding
to the nearest bfloat16, and 8 bits in blocks of 128 with a scale each (the second moment as its
square root, both linear, rounded to the nearest).
"""

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshwright.layouts import create
from meshwright.training import TrainConfig
from meshwright.training.config import EvalConfig
from meshwright.training.moments import stored_moments
from meshwright.training.optimizer import OptimizerConfig, make_optimizer
from meshwright.training.prepare import prepare
from meshwright.training.state import abstract_state, new_state
from meshwright.training.step import step_functions
from results import here, write_section

BLOCK = 128


def nearest_bfloat16(optimizer: Any) -> Any:
    """mu and nu rounded to the nearest bfloat16 after each step."""
    return _kept(optimizer, lambda moment, _: moment.astype(jnp.bfloat16).astype(jnp.float32))


def blocks_of_int8(optimizer: Any) -> Any:
    """mu and nu as int8 and uint8 with one scale for each block of the last dim."""

    def rounded(moment: jax.Array, name: str) -> jax.Array:
        x = jnp.sqrt(moment) if name == "nu" else moment
        levels = 255 if name == "nu" else 127
        last = x.shape[-1]
        padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -last % BLOCK)])
        blocks = padded.reshape(*x.shape[:-1], -1, BLOCK)
        scale = jnp.max(jnp.abs(blocks), -1, keepdims=True) / levels
        code = jnp.round(blocks / jnp.where(scale == 0, 1, scale))
        x = (code * scale).reshape(padded.shape)[..., :last]
        return jnp.square(x) if name == "nu" else x

    return _kept(optimizer, rounded)


def _kept(optimizer: Any, rounded: Any) -> Any:
    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        updates, state = optimizer.update(updates, state, params, **extra)

        def change(node: Any) -> Any:
            if not hasattr(node, "mu"):
                return node
            names = [name for name in ("mu", "nu") if hasattr(node, name)]
            return node._replace(
                **{
                    name: jax.tree.map(lambda x, name=name: rounded(x, name), getattr(node, name))
                    for name in names
                }
            )

        return updates, jax.tree.map(change, state, is_leaf=lambda node: hasattr(node, "mu"))

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


WAYS = {
    "float32": lambda optimizer: optimizer,
    "bfloat16": functools.partial(stored_moments, kept_as="bfloat16"),
    "int8": functools.partial(stored_moments, kept_as="int8"),
    "bfloat16, nearest": nearest_bfloat16,
    "int8, linear blocks": blocks_of_int8,
}
SEEDS = (0, 1)
SMALL = ("layers=2", "embed=64", "mlp=256")  # of tiny; --override with nothing after it is tiny
# optimizer, learning rate, decay rate of the second moment (of lion: of its one moment)
RUNS = (("adamw", 3e-3, 0.999), ("adamw", 3e-3, 0.95), ("lion", 1e-3, 0.99), ("muon", 1e-2, 0.95))


@functools.cache
def first_params(config: TrainConfig, seed: int) -> Any:
    """On the host: a step takes what it is given, and to make random numbers takes a while."""
    step = prepare(config).step
    shardings = jax.tree.map(lambda leaf: leaf.sharding, step.state.params)
    return jax.tree.map(np.asarray, create(step.arrays, shardings, seed))


def losses(config: TrainConfig, way: str) -> Iterator[float]:
    """The loss of held-out sequences at the end, for each seed."""
    step = prepare(config).step
    plain, rate = make_optimizer(config.optimizer, config.steps, step.arrays)
    optimizer = WAYS[way](optax.with_extra_args_support(plain))
    functions = step_functions(
        step.model, step.compute, optimizer, rate, step.mesh,
        loss=config.loss, clip_norm=config.optimizer.clip_norm,
    )  # fmt: skip
    target = abstract_state(step.arrays, step.rules, optimizer, step.mesh)
    for seed in SEEDS:
        setup = prepare(dataclasses.replace(config, seed=seed))
        assert setup.eval_loader is not None
        start = first_params(dataclasses.replace(config, optimizer=OptimizerConfig()), seed)
        params = jax.device_put(start, jax.tree.map(lambda leaf: leaf.sharding, target.params))
        state = new_state(step.arrays, target, optimizer, step.mesh, params=params)
        for number, batch in setup.loader.iterate(0, functions.batch_sharding):
            if number == config.steps:
                break
            state, _ = functions.train(state, batch)
        entropy = tokens = 0.0
        for _, batch in setup.eval_loader.iterate(0, functions.batch_sharding):
            loss = jax.device_get(functions.evaluate(state.params, batch))["loss"]
            entropy += loss.sum.item()
            tokens += loss.count.item()
        yield entropy / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--override", nargs="*", default=SMALL)
    parser.add_argument("--optimizers", nargs="*", default=[name for name, _, _ in RUNS])
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    lines = [
        "| optimizer | moments | loss of held-out text | against float32, of each seed |",
        "|---|---|---|---|",
    ]
    print(*lines, sep="\n", flush=True)
    for name, peak, b2 in (run for run in RUNS if run[0] in options.optimizers):
        config = TrainConfig(
            "tiny", batch=8, seq=64, steps=options.steps, eval=EvalConfig(sequences=64),
            override=tuple(options.override),
            optimizer=OptimizerConfig(name, learning_rate=peak, b2=b2),
        )  # fmt: skip
        usual: list[float] = []
        for way in list(WAYS)[: None if name == "adamw" else 3]:
            found = list(losses(config, way))
            usual = usual or found
            differences = ", ".join(
                f"{new - old:+.4f}" for new, old in zip(found, usual, strict=True)
            )
            mean = statistics.mean(found)
            lines.append(f"| {name}, b2 {b2} | {way} | {mean:.4f} | {differences} |")
            print(lines[-1], flush=True)
    if options.write:
        write_section(
            "Moments in fewer bits",
            f"`python benchmarks/moment_error.py --write`: tiny with {' '.join(options.override)}, "
            f"{options.steps} steps of 8 × 64 bytes of the embedded stories, two seeds. "
            f"{here()}.",
            lines,
        )


if __name__ == "__main__":
    main()

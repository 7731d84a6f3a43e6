"""What placement costs: `python benchmarks/placement.py [--check] [--write]`.

1. `mw.shard` of a tree of 1,000 arrays, by each notation, beside plain `jax.device_put` with
   NamedShardings written by hand, in turn in one process: median ratio, at most 1.10.
2. `mw.explain` of a 405B-parameter model on 512 devices: under 1 s.
3. What `import meshwright` adds to `import jax`, in fresh processes: at most 0.15 s.

`--check` fails if a limit is broken; `--write` puts the table into benchmarks/RESULTS.md.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.models import DecoderConfig, abstract_arrays, decoder_rules, preset
from results import here, write_section

BY_HAND = "device_put by hand"
ARRAYS, ROUNDS = 1000, 41
RATIO_LIMIT, EXPLAIN_LIMIT, IMPORT_LIMIT = 1.10, 1.0, 0.15  # times, seconds, seconds


def placement_ratios() -> dict[str, float]:
    """The time of each notation over that of device_put by hand: medians of paired rounds."""
    mesh = mw.mesh("fsdp=2,tp=4", devices=jax.devices()[:8])
    tree = {
        f"layer{i}": {
            "up": np.ones((64, 128), np.float32),
            "down": np.ones((128, 64), np.float32),
            "norm": np.ones(64, np.float32),
            "bias": np.ones(128, np.float32),
        }
        for i in range(ARRAYS // 4)
    }
    specs = {"up": P("fsdp", "tp"), "down": P("tp", "fsdp"), "norm": P(), "bias": P("tp")}
    by_hand = {
        layer: {name: NamedSharding(mesh, specs[name]) for name in arrays}
        for layer, arrays in tree.items()
    }
    expressions = {
        "up": "x y -> x@fsdp y@tp",
        "down": "x y -> x@tp y@fsdp",
        "norm": "x -> x",
        "bias": "x -> x@tp",
    }
    dims = {"up": "embed mlp", "down": "mlp embed", "norm": "norm", "bias": "mlp"}
    by_expression = {layer: dict(expressions) for layer in tree}
    all_dims = {layer: dict(dims) for layer in tree}
    path_rules = mw.PathRules(list(specs.items()))
    rules = mw.Rules([("mlp", "tp"), ("embed", "fsdp"), ("norm", None)])
    ways: dict[str, Callable[[], Any]] = {
        BY_HAND: lambda: jax.device_put(tree, by_hand),
        "expressions": lambda: mw.shard(tree, by_expression, mesh=mesh),
        "path rules": lambda: mw.shard(tree, path_rules, mesh=mesh),
        "logical rules": lambda: mw.shard(tree, rules, mesh=mesh, dims=all_dims),
    }
    wanted = jax.tree.leaves(ways[BY_HAND]())
    for name, place in ways.items():
        for ours, theirs in zip(jax.tree.leaves(place()), wanted, strict=True):
            assert ours.sharding == theirs.sharding, name
    ratios: dict[str, list[float]] = {name: [] for name in ways if name != BY_HAND}
    for _ in range(ROUNDS):
        for name in ratios:  # each beside its own base, so that a busy moment hits both
            ratios[name].append(1 / seconds(ways[BY_HAND]) * seconds(ways[name]))
    return {name: statistics.median(each) for name, each in ratios.items()}


def seconds(place: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(place())
    return time.perf_counter() - start


def unstacked(config: DecoderConfig) -> dict[str, Any]:
    """A model with an array for each layer, as most users' trees have."""
    arrays = abstract_arrays(config)

    def layer() -> Any:
        return jax.tree.map(
            lambda spec: mw.ArraySpec(spec.shape[1:], spec.dims[1:], spec.dtype), arrays["layers"]
        )

    return arrays | {"layers": [layer() for _ in range(config.layers)]}


def explain_seconds() -> float:
    """Median time to describe a 405B model and to explain, print and export its placement."""
    mesh = mw.mesh("dp=1,fsdp=64,tp=8,sp=1", machine="v5p:8x8x8")
    rules = mw.Rules([rule for rule in decoder_rules().rules if rule.dim != "layers"],
                     optional=decoder_rules().optional)  # fmt: skip
    times = []
    for _ in range(5):
        start = time.perf_counter()
        table = mw.explain(unstacked(preset("llama-3.1-405b")), rules, mesh)
        str(table), table.data()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def import_seconds() -> float:
    """Median time of `import meshwright` in a fresh process that has imported jax."""
    code = (
        "import time, jax; start = time.perf_counter(); import meshwright; "
        "print(time.perf_counter() - start)"
    )
    runs = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        for _ in range(7)
    ]
    return statistics.median(runs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    ratios = placement_ratios()
    measured = [
        (f"`mw.shard`, {ARRAYS:,} arrays, {name} / device_put by hand", ratio, RATIO_LIMIT, "×")
        for name, ratio in ratios.items()
    ]
    measured.append(
        (
            "`mw.explain`, 405B parameters, 1,137 arrays, 512 chips",
            explain_seconds(),
            EXPLAIN_LIMIT,
            " s",
        )
    )
    measured.append(
        ("`import meshwright` after `import jax`", import_seconds(), IMPORT_LIMIT, " s")
    )
    conditions = (
        f"`python benchmarks/placement.py --write`, {here()}; medians of {ROUNDS} paired rounds, "
        "5 runs and 7 processes."
    )
    rows = [
        f"| {what} | {value:.3f}{unit} | {limit:.2f}{unit} |"
        for what, value, limit, unit in measured
    ]
    table = ["| what | measured | limit |", "|---|---|---|", *rows]
    print("\n".join([conditions, "", *table]))
    if arguments.write:
        write_section("Placement", conditions, table)
    broken = [what for what, value, limit, _ in measured if value > limit]
    if arguments.check and broken:
        raise SystemExit(f"over the limit: {', '.join(broken)}")


if __name__ == "__main__":
    main()

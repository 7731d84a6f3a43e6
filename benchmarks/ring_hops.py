"""How far the hops of a ring go: `python benchmarks/ring_hops.py [--check] [--write]`.

For meshes with a ring along sp, the links each hop takes in the order of jax's
`create_device_mesh` and in ours, counted on the torus of the described machine. No device is
needed. `--check` fails if a hop of ours is longer than the table of this file allows.
"""

import argparse
import collections
import dataclasses

from jax.experimental import mesh_utils

import meshwright as mw
from results import here, write_section

# machine, mesh, the longest hop that is allowed
MESHES = [
    ("v4:8x8x8", "dp=1,fsdp=1,tp=4,sp=128", 1),
    ("v4:8x8x8", "dp=1,fsdp=8,tp=16,sp=4", 1),
    ("v4:8x8x8", "dp=1,fsdp=1,tp=16,sp=32", 1),
    ("v5e:2x4", "sp=8", 1),
    ("v5e:4x4", "sp=16", 1),
    ("v5e:4x4", "fsdp=4,sp=4", 3),
    ("v5p:4x4x4", "sp=64", 1),
    ("v5p:4x4x4", "fsdp=4,sp=16", 1),
    ("v5p:4x4x4", "fsdp=8,sp=8", 1),
    ("v5p:4x4x4", "fsdp=16,sp=4", 1),
    ("v6e:16x16", "fsdp=16,sp=16", 1),
    ("v6e:16x16", "sp=256", 1),
    ("v6e:16x16", "fsdp=4,sp=64", 1),
    ("v3:4x4", "sp=32", 1),
    ("7x:4x4x4", "fsdp=4,sp=32", 1),
]


def in_words(hops: tuple[int, ...]) -> str:
    """`"64 of 1, 56 of 2"`."""
    counts = collections.Counter(hops)
    return ", ".join(f"{counts[links]} of {links}" for links in sorted(counts))


def box(mesh: mw.MachineMesh) -> str:
    """`"x 8, y 8, z 2"`: where sp lies."""
    return ", ".join(f"{dim} {size}" for dim, size in mesh.axis_extent("sp").items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if a hop is too long")
    parser.add_argument("--write", action="store_true", help="write into benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    rows = ["| machine | mesh | jax: sp lies on | hops of n links | ours | hops of n links |"]
    rows += ["|---|---|---|---|---|---|"]
    too_long = []
    for machine, text, limit in MESHES:
        ours = mw.mesh(text, machine=machine)
        placed = mesh_utils.create_device_mesh(
            ours.axis_sizes, ours.machine.devices, allow_split_physical_axes=True
        )
        theirs = dataclasses.replace(ours, devices=placed)
        hops = ours.ring_hops("sp")
        cells = [f"{box(mesh)} | {in_words(mesh.ring_hops('sp'))}" for mesh in (theirs, ours)]
        rows.append(f"| {machine} | {text} | {cells[0]} | {cells[1]} |")
        if max(hops) > limit:
            too_long.append(f"{text} on {machine}: {in_words(hops)}")
    about = f"`python benchmarks/ring_hops.py --write`, {here()}; counted on absent machines."
    print("\n".join([about, "", *rows]))
    if arguments.write:
        write_section("Ring hops", about, rows)
    if arguments.check and too_long:
        raise SystemExit(f"over the limit: {'; '.join(too_long)}")


if __name__ == "__main__":
    main()

"""Draw a mesh on its machine and sharded arrays, in the terminal or as an HTML page."""

from meshwright.show.page import page
from meshwright.show.scene import Scene, ShownArray, scene
from meshwright.show.terminal import array_grid, axis_table, machine_grid, ring_lines

__all__ = [
    "Scene", "ShownArray", "array_grid", "axis_table", "machine_grid", "page", "ring_lines",
    "scene",
]  # fmt: skip

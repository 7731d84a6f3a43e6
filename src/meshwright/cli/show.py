"""`meshwright show`: draw a mesh on its machine, sharded arrays, and the table of a model."""

import dataclasses
import json
import re
import sys
from pathlib import Path

from rich.console import Console

from meshwright.errors import MeshwrightError
from meshwright.layouts import Explanation, PathRules, Rules, explain
from meshwright.machines import Machine
from meshwright.meshes import MachineMesh, MeshSpec
from meshwright.meshes import mesh as build_mesh
from meshwright.present import write_page


@dataclasses.dataclass(frozen=True)
class ShowSettings:
    mesh: str = dataclasses.field(kw_only=True)
    """Mesh axes and sizes: fsdp=-1,tp=4 or 1,-1,4,1."""
    on: str = "here"
    """Machine: v5p:4x4x8, v5p-256, h100:16x8, 2*v5e:16x16, cpu:8, here."""
    axes: str | None = None
    """Your own names of the mesh axes, as in data,model; sizes may then be positional."""
    array: tuple[str, ...] = ()
    """Shape and layout of an array: "4096x1024 embed mlp -> embed@fsdp mlp@tp". Repeatable."""
    model: str | None = None
    """Model preset whose arrays to show, such as llama-3.1-8b."""
    rules: Path | None = None
    """File of rules for the model: "dim -> axis" or "regex => layout", one per line."""
    html: Path | None = None
    """Write a self-contained HTML page to this file instead of drawing in the terminal."""
    json: bool = False
    """Print JSON instead of drawing."""


def show(settings: ShowSettings) -> None:
    """Draw a mesh on its machine, with sharded arrays and the table of a model.

    meshwright show --mesh fsdp=4,tp=4 --on v5e:4x4 --array "64x32 a b -> a@fsdp b@tp"
    """
    model, rules, html = settings.model, settings.rules, settings.html
    # here, after the settings are read: it imports jax
    from meshwright.show import array_grid, axis_table, machine_grid, page, ring_lines, scene

    if rules is not None and model is None:
        raise MeshwrightError("--rules needs --model: rules place a model's arrays")
    placed = _mesh(settings, own_rules=model is not None and rules is None)
    arrays = [_array(text) for text in settings.array]
    table = None if model is None else _explained(model, rules, placed)
    drawn = scene(placed, arrays, table)
    if html is not None:
        write_page(html, page(drawn))
        print(f"wrote {html}", file=sys.stderr if settings.json else sys.stdout)
    if settings.json:
        data = drawn.data() | ({} if table is None else {"model": table.data()})
        print(json.dumps(data))
    if settings.json or html is not None:
        return
    console = Console()
    console.print(f"mesh {placed} on {placed.machine}: {placed.size} devices")
    console.print(axis_table(placed))
    for line in ring_lines(placed):
        console.print(line, highlight=False)
    console.print(machine_grid(placed))
    for shown in drawn.arrays[: len(arrays)]:
        console.print(array_grid(shown, placed))
    if table is not None:
        console.print(table)


def _mesh(settings: ShowSettings, own_rules: bool) -> MachineMesh:
    axes = settings.axes
    spec = MeshSpec.parse(settings.mesh, axes=None if axes is None else axes.split(","))
    if own_rules and not {"fsdp", "tp"} <= set(spec.names):  # which a model's own rules name
        spec = spec.with_standard_axes()
    machine = Machine.parse(settings.on)
    try:
        return build_mesh(spec, machine=machine)
    except MeshwrightError as mistake:
        if settings.on != "here":
            raise
        raise MeshwrightError(f"{mistake}. For an absent machine, name it: --on v5e:4x4") from None


def _array(text: str) -> tuple[tuple[int, ...], str]:
    shape, _, layout = text.strip().partition(" ")
    if not re.fullmatch(r"[0-9]{1,12}(x[0-9]{1,12})*", shape) or "->" not in layout:
        raise MeshwrightError(
            f"--array {text!r} is not a shape and a layout; write "
            "'4096x1024 embed mlp -> embed@fsdp mlp@tp'"
        )
    return tuple(map(int, shape.split("x"))), layout.strip()


def _explained(model: str, rules_file: Path | None, placed: MachineMesh) -> Explanation:
    from meshwright.models import abstract_arrays, family_of, padded_vocab, preset

    config = preset(model)
    if rules_file is None:
        rules = family_of(config).rules()
        vocab = padded_vocab(config, rules, placed.shape)
        return explain(abstract_arrays(config, vocab=vocab), rules, placed)
    try:
        text = rules_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        raise MeshwrightError(f"--rules {str(rules_file)!r} cannot be read: {reason}") from None
    if "=>" in text:
        return explain(abstract_arrays(config), PathRules.parse(text), placed)
    rules = Rules.parse(text)
    vocab = padded_vocab(config, rules, placed.shape)
    return explain(abstract_arrays(config, vocab=vocab), rules, placed)

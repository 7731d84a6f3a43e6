"""What a notebook shows of a mesh, a layout, a table, a plan, an audit and a proof is HTML."""

import dataclasses
import xml.etree.ElementTree as ET
from typing import Any

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright.present import Column, Row, table_html, text_html
from meshwright.proofs.footprint import Footprint


def texts(value: Any) -> tuple[str, list[list[str]]]:
    """All text that a value shows in a notebook, and the cells of its tables; it is well formed."""
    tree = ET.fromstring(f"<html>{value._repr_html_().replace('<br>', '<br/>')}</html>")
    rows = [["".join(cell.itertext()) for cell in line] for line in tree.iter("tr")]
    return " ".join(tree.itertext()), rows


def test_cells_are_escaped_and_notes_stand_below() -> None:
    columns = [Column("<a>", right=False), Column("b")]
    html = table_html(columns, [Row(("x & y", "1"), note="why <b>", style="green")])
    assert "<b>" not in html
    assert html.index("x &amp; y") < html.index("why &lt;b&gt;")
    assert '<td style="text-align:right">1</td>' in html
    assert text_html("1 < 2", "3") == "<div>1 &lt; 2<br>3</div>"


def test_meshes_and_layouts_are_tables() -> None:
    shown, rows = texts(mw.mesh("fsdp=4,tp=4", machine="v5e:4x4"))
    assert "mesh fsdp=4,tp=4 on v5e:4x4: 16 devices" in shown
    assert ["fsdp", "4", "4 in y"] in rows
    assert texts(mw.MeshSpec.parse("dp=2,fsdp=-1"))[1][1:] == [
        ["dp", "2"],
        ["fsdp", "what is left"],
    ]
    _, rows = texts(mw.Layout.parse("embed mlp -> embed@fsdp+sp mlp"))
    assert rows[1:] == [["embed", "fsdp+sp"], ["mlp", "nothing"]]


def test_an_explanation_has_its_arrays_and_its_sum() -> None:
    table = mw.explain({"w": np.ones((8, 8))}, "a b -> a@tp b", "tp=8")
    shown, rows = texts(table)
    assert rows[1][:4] == ["w", "8×8", "float32", "a@tp b"]
    assert table.summary() in shown


def test_a_plan_prints_and_shows_its_table() -> None:
    plan = mw.plan("llama-3.1-8b", "h100:8", batch=64, seq=4096)
    shown, rows = texts(plan)
    assert rows[0][:2] == ["#", "mesh"]
    assert plan.best.reason in shown
    assert "meshwright train llama-3.1-8b" in shown
    printed = str(plan)
    assert "llama-3.1-8b on h100:8: 8 chips" in printed
    assert "meshwright train llama-3.1-8b" in printed
    assert max(map(len, printed.splitlines())) <= 120
    assert repr(plan).startswith("Plan(llama-3.1-8b on h100:8")


def test_an_audit_shows_its_collectives() -> None:
    mesh = mw.mesh("tp=16")
    x = mw.shard(np.ones((16, 16), np.float32), "a b -> a@tp b", mesh=mesh)
    audit = mw.audit(jax.jit(lambda x: x.sum()).lower(x).compile(), mesh)
    shown, rows = texts(audit)
    assert any("all-reduce" in row for row in rows)
    assert "mesh tp=16" in shown


@pytest.mark.parametrize("fits", [True, False])
def test_a_proof_shows_its_verdict_and_memory(fits: bool, tmp_path: Any) -> None:
    used = Footprint(
        100 * 2**20, (200 if fits else 50) * 2**20, {"arguments": 2**20, "program": 0}, ()
    )
    fields = {field.name: None for field in dataclasses.fields(mw.Proof)}
    proof = mw.Proof(**fields | {
        "machine": mw.Machine.parse("cpu:8"), "mesh": "fsdp=8", "compiler": "jax 0.10", "footprint": used,
        "folder": tmp_path, "times": {}, "cached": False,
    })  # fmt: skip
    shown, rows = texts(proof)
    assert ("does not fit" in shown) is not fits
    assert ["arguments", "1.0 MiB"] in rows
    assert not any("program" in row for row in rows)

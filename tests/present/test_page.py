"""What the HTML pages have in common: how one is made, and that its script draws what it is given."""

import dataclasses
import math
import tomllib
from pathlib import Path

import jax
import pytest
from jinja2 import UndefinedError
from tests.planner.made_plan import made_plan
from tests.present.run_script import needs_node, of, run_script

import meshwright as mw
from meshwright.machines import Machine
from meshwright.planner import Choice
from meshwright.planner.report import page as plan_page
from meshwright.planner.report.phrases import short_mesh
from meshwright.present import render
from meshwright.show import page as show_page
from meshwright.show import scene
from meshwright.training.run import MetricsLog, write_run_page

SOURCE = Path(mw.__file__).parent


def template(folder: Path, text: str) -> Path:
    file = folder / "own.html"
    file.write_text('{% extends "base.html" %}{% block main %}' + text + "{% endblock %}")
    return file


def test_a_page_is_its_template_on_the_common_base(tmp_path: Path) -> None:
    text = render(template(tmp_path, "<p>{{ word }}</p>"), title="a < b", data=[1], word="<i>")
    assert text.startswith("<!doctype html>\n")
    assert text.endswith("</html>")
    assert text.count("<h1>a &lt; b</h1>") == text.count("<p>&lt;i&gt;</p>") == 1
    assert 'JSON.parse("[1]")' in text


def test_a_name_that_the_template_lacks_is_not_left_blank(tmp_path: Path) -> None:
    with pytest.raises(UndefinedError, match="word"):
        render(template(tmp_path, "{{ word }}"), title="", data=None)


def test_what_a_browser_cannot_read_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        render(template(tmp_path, ""), title="", data=[math.nan])


def test_every_template_is_part_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    packaged = project["tool"]["setuptools"]["package-data"]["meshwright"]
    found = {file for pattern in packaged for file in SOURCE.glob(pattern)}
    templates = set(SOURCE.rglob("*.html"))
    assert len(templates) >= 4
    assert templates <= found


# ---- the scripts --------------------------------------------------------------------------------


@needs_node
def test_a_device_on_the_page_holds_what_jax_puts_there(
    tmp_path: Path, eight: list[jax.Device]
) -> None:
    mesh, shape, layout = mw.mesh("fsdp=2,tp=4", machine="cpu:8"), (16, 32), "a b -> a@tp b@fsdp"
    drawn, fired = run_script(show_page(scene(mesh, [(shape, layout)])), tmp_path)
    assert len(of(drawn, "rect", "shard")) == 8
    told = {one["id"]: one["told"] for one in fired if one["kind"] == "mouseenter" and "id" in one}
    assert len(told) == len(of(drawn, "rect", "device")) == 8
    placed = mw.sharding(layout, mesh=mesh.to_jax(eight)).devices_indices_map(shape)
    for device, (a, b) in placed.items():
        assert told[str(device.id)].endswith(f"a {a.start}:{a.stop}, b {b.start}:{b.stop}")


@needs_node
@pytest.mark.parametrize("machine", ["v3:4x4", "v5p:2x4x4", "h100:4x8", "2*v5e:4x4"])
def test_every_machine_is_drawn_on_both_pages(machine: str, tmp_path: Path) -> None:
    mesh = mw.mesh("fsdp=4,tp=8", machine=machine)
    drawn, _ = run_script(show_page(scene(mesh)), tmp_path)
    places = {(one["x"], one["y"]) for one in of(drawn, "rect", "device")}
    assert len(places) == 32
    made = made_plan()
    choice = Choice.of(fsdp=4, tp=8)
    best = dataclasses.replace(made.best, choice=choice)
    plan = dataclasses.replace(made, machine=Machine.parse(machine), ranked=(best,))
    drawn, _ = run_script(plan_page(plan), tmp_path)
    assert len({(one["x"], one["y"]) for one in of(drawn, "rect", "device")}) == 32


@needs_node
@pytest.mark.parametrize("cost", [None, 4.2])
def test_the_page_of_a_plan_draws_every_mesh_and_its_memory(
    cost: float | None, tmp_path: Path
) -> None:
    plan = made_plan(cost)
    drawn, _ = run_script(plan_page(plan), tmp_path)
    meshes = [one["text"] for one in of(drawn, "td", "mono")]
    estimates = [*plan.ranked, *plan.refused]
    fastest = min(plan.ranked, key=lambda one: one.step_seconds)
    assert meshes == [
        short_mesh(one.choice) + ("fastest" if one is fastest else "") for one in estimates
    ]
    # the limit's line and the pieces are to the same scale
    (limit,) = of(drawn, "line", "limit")
    pieces = of(drawn, "rect", "bar")
    left = min(float(one["x"]) for one in pieces)
    scale = (float(limit["x1"]) - left) / plan.best.memory.limit
    sizes = [size for one in plan.ranked for size in one.memory.kinds.values()]
    assert [float(one["width"]) for one in pieces] == pytest.approx([s * scale for s in sizes])


@needs_node
@pytest.mark.parametrize("steps", [0, 1, 50, 9000])
def test_the_page_of_a_run_draws_its_points(steps: int, tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        for step in range(1, steps + 1):
            log.write(step, {"loss": math.nan if step == 7 else 10 / step, "learning_rate": 0.0})
        log.note(steps // 2, "resumed", mesh="fsdp=4")
    drawn, _ = run_script(write_run_page(tmp_path).read_text(), tmp_path)
    assert len(of(drawn, "section", "chart")) == (2 if steps else 0)
    assert len(of(drawn, "line", "lost")) == (steps >= 7)
    if steps == 50:
        dots = [one for one in of(drawn, "circle") if "curve-0" in one["style"]][:49]
        heights = [float(one["cy"]) for one in dots]
        assert heights == sorted(heights), "the loss falls, so the points go down the page"
        # a point is as far down as its loss is low
        shares = [(y - heights[0]) / (heights[-1] - heights[0]) for y in heights]
        kept = [step for step in range(1, 51) if step != 7]
        losses = [float(f"{10 / step:.6g}") for step in kept]
        assert shares == pytest.approx([(10 - y) / (10 - losses[-1]) for y in losses])

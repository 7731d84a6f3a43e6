"""Every page in a real browser: at two widths, light and dark; and what a person does on it."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.browser import WIDTHS, browser_fixture, check_page, page_fixture, watched  # noqa: F401
from tests.planner.made_plan import made_plan

import meshwright as mw
from meshwright.data import ByteTokenizer, TokenStore, documents_page, shown_documents
from meshwright.machines import Machine
from meshwright.planner import Run, compare
from meshwright.planner.report import comparison_page
from meshwright.planner.report import page as plan_page
from meshwright.show import page as show_page
from meshwright.show import scene
from meshwright.training import TrainConfig
from meshwright.training.run import ENDED, Board, MetricsLog, only_run_in, write_run_page

GIB = 1 << 30


def made_run(folder: Path, speed: float = 1.0, steps: int = 60) -> Path:
    """A run with all that its page can show."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"steps": 100}')
    (folder / "run.json").write_text(
        '{"model": "tiny", "mesh": "fsdp=4,tp=2", "machine": "8 × cpu"}'
    )
    with MetricsLog(folder) as log:
        for step in range(1, steps + 1):
            log.write(step, {"loss": 6 / (1 + speed * step / 10), "step_seconds": 0.5, "mfu": 0.4, "tokens_per_second": 1e5, "memory_bytes": 30 * GIB, "memory_limit_bytes": 80 * GIB})  # fmt: skip
        log.write(steps, {"eval_loss": 2.0})
        log.note(steps, "sample", prompt="Once upon", text=" a time " * 30)
        log.note(steps, "expert_loads", loads=[[1.5, 0.5], [0.25, 1.75]])
        log.note(30, "resumed", mesh="fsdp=8")
        log.note(steps, ENDED, state="stopped", reason="SIGTERM")
    return folder


def run(folder: Path) -> str:
    return write_run_page(made_run(folder / "run")).read_text()


def show(folder: Path) -> str:
    arrays = [((4096, 1024), "a b -> a@fsdp b@tp")] * 2 + [((64, 8, 32), "l a b -> l a b@tp")]
    return show_page(scene(mw.mesh("fsdp=16,tp=8", machine="v5p:4x4x8"), arrays))


def data(folder: Path) -> str:
    examples = [(list(b"What is 2+2? 4" * 20), ([0] * 13 + [1]) * 20)]
    store = TokenStore.of_examples(examples, ByteTokenizer(), "sums")
    return documents_page(store, shown_documents(store, 0, 1))


def plan(folder: Path) -> str:
    return plan_page(made_plan())


def machines(folder: Path) -> str:
    config = TrainConfig("tiny", batch=64, seq=128)
    names = ("h100:8", "v5e:2x4", "l4:1")
    found = compare(config, [Machine.parse(name) for name in names], Run(1e9, within=600.0))
    return comparison_page(found)


# of each page, a text that its script or its template writes
PAGES: dict[str, tuple[Callable[[Path], str], str]] = {
    "run": (run, "30.0 of 80.0 GiB"),
    "show": (show, "b@tp"),
    "data": (data, "tokens with loss"),
    "plan": (plan, "fsdp"),
    "machines": (machines, "h100"),
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_every_page_fits_and_can_be_read(
    name: str, width: int, scheme: str, browser: Any, tmp_path: Path
) -> None:
    make, text = PAGES[name]
    file = tmp_path / "page.html"
    file.write_text(make(tmp_path), encoding="utf-8")
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
    page = context.new_page()
    problems = watched(page)
    page.goto(file.as_uri())
    assert text in page.locator("body").inner_text()
    check_page(page, width)
    context.close()
    assert not problems


@pytest.fixture
def board(tmp_path: Path) -> Iterator[str]:
    for name, speed in (("slow", 1.0), ("fast", 3.0), ("a/" + "long" * 20, 2.0)):
        made_run(tmp_path / name, speed)
    with Board([tmp_path], port=0) as board:
        thread = threading.Thread(target=board.serve)
        thread.start()
        yield board.url
        board.close()
        thread.join()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_board_fits_and_can_be_read(width: int, scheme: str, browser: Any, board: str) -> None:
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
    page = context.new_page()
    problems = watched(page)
    page.goto(board)
    assert page.get_by_text("SIGTERM").count() == 3
    check_page(page, width)
    page.get_by_role("link", name="fast").click()
    page.get_by_text("Sample texts").wait_for()
    check_page(page, width)
    context.close()
    assert not problems


def test_runs_are_compared_and_followed(page: Any, board: str, tmp_path: Path) -> None:
    page.goto(board)
    loss = page.locator(".chart", has_text="loss").first
    assert loss.locator("path.raw").count() == 3
    page.get_by_label("compare slow").uncheck()
    loss.locator("path.raw").nth(2).wait_for(state="detached")
    assert "run=fast" in page.url
    assert "slow" not in page.url
    page.reload()
    assert loss.locator("path.raw").count() == 2
    # news come by themselves
    page.get_by_role("link", name="fast").click()
    page.get_by_text("stopped").wait_for()
    with only_run_in(tmp_path / "fast"), MetricsLog(tmp_path / "fast") as log:
        log.note(60, "resumed", mesh="tp=8")
        log.write(77, {"loss": 0.0625, "step_seconds": 2.0})
        page.get_by_text("running").wait_for()
        page.get_by_text("step 77 of 100, about 46s left").wait_for()
        page.locator(".readout", has_text="0.0625").wait_for()


def test_a_chart_is_read_and_zoomed_by_keys(page: Any, tmp_path: Path) -> None:
    page.goto(write_run_page(made_run(tmp_path / "run")).as_uri())
    chart = page.locator(".chart").first
    titles = chart.locator(".axis-title").all_text_contents()
    assert titles == ["step", "loss"]
    chart.locator("svg").focus()
    page.keyboard.press("ArrowLeft")
    assert "step 59" in chart.locator(".readout").inner_text()
    page.keyboard.press("+")
    assert page.get_by_role("button", name="whole run").is_enabled()
    page.reload()  # the view stays
    assert page.get_by_role("button", name="whole run").is_enabled()
    chart.locator("svg").focus()
    page.keyboard.press("Escape")
    assert page.get_by_role("button", name="whole run").is_disabled()


def test_the_torus_turns_and_tells_without_a_mouse(page: Any, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(show(tmp_path), encoding="utf-8")
    page.goto(file.as_uri())
    assert page.locator(".array").count() == 2, "equal arrays are one drawing"
    assert "a b -> a@fsdp b@tp, a b -> a@fsdp b@tp" in page.locator(".array h3").first.inner_text()
    assert page.locator("text.dim").all_text_contents()[:2] == [
        "b@tp: 1,024 in 8 →",
        "← a@fsdp: 4,096 in 16",
    ]

    def places() -> list[tuple[str, str]]:
        shapes = page.locator("rect.device")
        return shapes.evaluate_all(
            "all => all.map(one => [one.getAttribute('x'), one.getAttribute('y')])"
        )

    panel, drawn = page.locator("#panel").bounding_box(), page.locator("#torus g").bounding_box()
    assert max(drawn["width"] / panel["width"], drawn["height"] / (0.55 * 720)) > 0.75, "it fills"
    first = places()
    assert len({tuple(place) for place in first}) == 128
    page.locator("#torus").focus()
    page.keyboard.press("ArrowRight")
    turned = places()
    assert turned != first
    page.get_by_role("button", name="turn left").click()
    box = page.locator("#torus").bounding_box()
    page.mouse.move(box["x"] + 20, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 120, box["y"] + 60, steps=4)
    page.mouse.up()
    assert places() not in (first, turned)
    page.get_by_role("button", name="planes").click()
    assert len({y for _, y in places()}) <= 32
    page.get_by_label("device", exact=True).fill("5")
    assert "device 5" in page.locator("#told").inner_text()
    page.mouse.move(0, 0)  # what was picked stays
    assert "device 5" in page.locator("#told").inner_text()
    assert page.locator("rect.device.lit").count() == 1
    page.locator(".array svg").first.focus()
    page.keyboard.press("ArrowRight")
    assert "a 0:256, b 0:128" in page.locator("#told").inner_text()
    page.keyboard.press("Escape")
    assert "Point at a device" in page.locator("#told").inner_text()


def test_tokens_and_weights_are_shown_without_a_mouse(page: Any, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(data(tmp_path), encoding="utf-8")
    page.goto(file.as_uri())
    assert "weight 0" not in page.locator("#documents").inner_text()
    page.get_by_label("tokens and weight of each part").check()
    assert "[13 tokens, weight 0]" in page.locator("#documents").inner_text()
    assert "[1 token, weight 1]" in page.locator("#documents").inner_text()

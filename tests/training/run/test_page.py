"""The run page: self-contained, nothing in it can break out, and no spike is lost."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import MeshwrightError
from meshwright.training.run import MetricsLog, read_metrics, write_run_page
from meshwright.training.run.summary import curves, summary, thinned

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & 'quoted' \"twice\""


def run(folder: Path, steps: int = 50) -> Path:
    with MetricsLog(folder) as log:
        for step in range(1, steps + 1):
            loss = math.nan if step == 7 else 10 / step
            log.write(
                step,
                {
                    "loss": loss,
                    "step_seconds": 0.5,
                    "tokens": step * 100,
                    "skipped_steps": int(step >= 7),
                },
            )
            if step % 10 == 0:
                log.write(step, {"eval_loss": 11 / step})
        log.note(20, "resumed", mesh="fsdp=4,tp=2")
    return folder


def data_of(page: Path) -> dict[str, object]:
    found = re.search(r"JSON\.parse\((\".*\")\)", page.read_text())
    assert found is not None
    return json.loads(json.loads(found[1]))


def test_the_numbers_at_the_top_are_those_of_the_run(tmp_path: Path) -> None:
    told = dict(summary(read_metrics(run(tmp_path))))
    assert told == {
        "steps": "50",
        "tokens": "5.00K",
        "loss": "0.2000",
        "eval loss": "0.2200",
        "median step": "0.5 s",
        "skipped steps": "1",
        "resumes": "1",
    }


def test_the_curves_are_those_of_the_run(tmp_path: Path) -> None:
    data = data_of(write_run_page(run(tmp_path)))
    drawn = {curve["column"]: curve for curve in data["curves"]}  # type: ignore[attr-defined]
    assert list(drawn) == ["loss", "eval_loss", "step_seconds"]
    assert drawn["eval_loss"]["x"] == [10, 20, 30, 40, 50]
    assert drawn["loss"]["lost"] == [7]
    assert len(drawn["loss"]["x"]) == 49
    assert data["resumes"] == [{"step": 20, "mesh": "fsdp=4,tp=2"}]


def test_nothing_is_loaded_from_outside(tmp_path: Path) -> None:
    text = write_run_page(run(tmp_path)).read_text()
    addresses = set(re.findall(r"https?://[^\"'\s]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not a place to fetch
    assert not re.search(r"(src|href)\s*=|@import|url\((?!#)|fetch\(|XMLHttpRequest", text)


def test_no_name_breaks_out_of_the_page(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    with MetricsLog(folder) as log:
        log.note(30, "resumed", mesh=NASTY)
    page = write_run_page(folder, about={"name": NASTY, NASTY: NASTY}, config={NASTY: [NASTY]})
    text = page.read_text()
    assert text.count("<script") == text.count("</script>") == 1
    assert "<img" not in text
    assert NASTY in str(data_of(page)["resumes"][1]["mesh"])  # type: ignore[index]


def test_files_beside_the_metrics_are_shown(tmp_path: Path) -> None:
    run(tmp_path)
    (tmp_path / "run.json").write_text('{"name": "a run", "model": "tiny", "mesh": "fsdp=8"}')
    (tmp_path / "config.json").write_text('{"optimizer": {"name": "adamw"}}')
    text = write_run_page(tmp_path).read_text()
    assert "<h1>a run</h1>" in text
    assert "<dt>mesh</dt>" in text
    assert "adamw" in text
    (tmp_path / "run.json").write_text('{"name": ')
    with pytest.raises(MeshwrightError, match=r"run\.json.* cannot be read"):
        write_run_page(tmp_path)


def test_a_run_without_a_step_still_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert data_of(write_run_page(tmp_path))["curves"] == []


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(4, 60))
def test_thinning_keeps_the_ends_and_the_extremes(values: list[float], most: int) -> None:
    kept = thinned(values, most)
    assert len(kept) <= max(most, 4)
    assert kept == sorted(set(kept))
    assert (kept[0], kept[-1]) == (0, len(values) - 1)
    shown = [values[i] for i in kept]
    assert (min(shown), max(shown)) == (min(values), max(values))


def test_a_long_curve_is_thinned_with_its_true_mean(tmp_path: Path) -> None:
    values = np.random.default_rng(0).exponential(size=5000)
    values[3210] = 500.0
    with MetricsLog(tmp_path) as log:
        for step, value in enumerate(values):
            log.write(step, {"grad_norm": value})
    (curve,) = curves(read_metrics(tmp_path), most=400)
    assert len(curve["x"]) <= 400
    assert curve["y"][curve["x"].index(3210)] == 500.0
    # the smoothed line is drawn from means over every step, not from the points that were kept
    assert np.mean(curve["mean"]) == pytest.approx(values.mean(), rel=1e-3)
    assert np.mean(curve["y"]) > 1.5 * values.mean()


def test_sample_texts_are_shown_newest_first_and_escaped(tmp_path: Path) -> None:
    folder = run(tmp_path)
    with MetricsLog(folder) as log:
        for step, text in ((10, " old"), (20, " gone"), (20, f" new {NASTY}")):
            log.note(step, "sample", prompt=f"Once {NASTY}", text=text)
        log.note(20, "sample", prompt="The fox", text="\n ran")
    text = write_run_page(folder).read_text()
    assert text.count("<script") == text.count("</script>") == 1
    assert "<img" not in text
    shown = [text.index(part) for part in ("step 20", " new ", "The fox", "step 10", " old")]
    assert shown == sorted(shown)
    assert " gone" not in text  # of a part of the run that was repeated


def test_the_newest_loads_of_experts_are_drawn(tmp_path: Path) -> None:
    folder = run(tmp_path)
    with MetricsLog(folder) as log:
        log.note(10, "expert_loads", loads=[[1.0, 1.0]])
        log.note(50, "expert_loads", loads=[[1.5, 0.5], [0.25, 1.75]])
    page = write_run_page(folder)
    assert data_of(page)["loads"] == {"step": 50, "layers": [[1.5, 0.5], [0.25, 1.75]]}
    assert '<canvas id="heat"' in page.read_text()


def test_a_run_without_experts_has_no_loads(tmp_path: Path) -> None:
    page = write_run_page(run(tmp_path))
    assert data_of(page)["loads"] is None
    assert "<canvas" not in page.read_text()


def test_a_run_without_samples_has_no_place_for_them(tmp_path: Path) -> None:
    assert "Sample texts" not in write_run_page(run(tmp_path)).read_text()

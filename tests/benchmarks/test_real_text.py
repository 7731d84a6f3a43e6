"""fp8 against bfloat16: what the report makes of the losses of runs."""

import argparse
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import real_text
from real_text import BF16, FP8, MARKS, between_marks, curves, final_loss, page_lines, pairs, table

approx = pytest.approx
FLAGS = [*real_text.train_flags(2000, ""), "--steps", "200"]  # the last one counts


def trained(seed: int, matmul: str, *losses: float | str, not_finite: bool = False) -> Any:
    """A run as the record has it, evaluated each 100 steps."""
    return {
        "seed": seed, "matmul": matmul, "losses": [[20, 9.5]], "not_finite": not_finite,
        "eval_losses": [[100 * i, loss] for i, loss in enumerate(losses, start=1)],
        "steps_per_second": 50.0, "parameters": "1,000", "machine": "1 × H200",
    }  # fmt: skip


def record(*runs: Any) -> dict[str, Any]:
    return {"flags": FLAGS, "jax": "0.11.2", "runs": list(runs)}


def test_the_difference_is_of_final_evaluation_losses_in_percent() -> None:
    both = record(
        trained(0, BF16, 5.0, 4.0), trained(0, FP8, 6.0, 4.01),
        trained(1, FP8, 5.0, 3.994), trained(1, BF16, 5.0, 4.0),
        trained(2, BF16, 5.0, 4.0),  # fp8 was not run
    )  # fmt: skip
    lines, largest = table(both)
    assert largest == approx(0.25)  # 4.01 / 4
    assert lines[2:] == [
        "| 0 | 4.0000 | 4.0100 | +0.25% | +0.00% |",
        "| 1 | 4.0000 | 3.9940 | -0.15% | +0.00% |",
        "| mean | 4.0000 | 4.0020 | +0.05% | |",
    ]
    assert "between 0.15% lower and 0.25% higher than" in page_lines(both, largest)[0]


@pytest.mark.parametrize("fp8", [3.97, 4.03])
def test_beyond_the_limit_is_marked_in_both_directions(fp8: float) -> None:
    lines, largest = table(record(trained(0, BF16, 5.0, 4.0), trained(0, FP8, 5.0, fp8)))
    assert "**(limit 0.5%)**" in lines[2]
    assert largest == approx(0.75)


@pytest.mark.parametrize(
    "lost",
    [
        trained(0, FP8, 5.0, 4.0, not_finite=True),
        trained(0, FP8, 5.0, "nan"),
        trained(0, FP8, 5.0, 5.1),
        trained(0, FP8, 5.0),  # ended before step 200
        trained(0, FP8),
    ],
)
def test_a_divergence_is_marked_and_is_no_difference(lost: Any) -> None:
    both = record(trained(0, BF16, 5.0, 4.0), lost)
    assert final_loss(lost, 200) is None
    assert final_loss(both["runs"][0], 200) == 4.0
    lines, largest = table(both)
    assert lines[2].startswith("| 0 | 4.0000 | **diverged** |  |")
    assert largest is None
    assert "diverged" in page_lines(both, largest)[0]
    ElementTree.fromstring(curves(both))


def test_only_runs_that_the_record_lacks_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        real_text, "train", lambda store, flags, seed, matmul, at_once: trained(seed, matmul, 5.0, 4.0)
        | {"wall_seconds": 1.0, "flags_seen": list(flags)},
    )  # fmt: skip
    out = tmp_path / "record.json"
    (tmp_path / "text.store").mkdir()
    options = argparse.Namespace(
        folder=tmp_path, seeds="0", matmul=f"{BF16},{FP8}", steps=200, flags="", out=out, at_once=2
    )
    real_text.run(options)
    first = json.loads(out.read_text())["runs"]
    options.seeds = "0,1"
    real_text.run(options)
    runs = json.loads(out.read_text())["runs"]
    assert runs[:2] == first  # those of seed 1 in any order
    assert list(pairs({"runs": runs})) == [0, 1]
    assert len(runs) == 4
    options.steps = 300
    with pytest.raises(SystemExit, match="other flags"):
        real_text.run(options)


def test_a_page_keeps_what_is_outside_the_marks() -> None:
    page = f"above\n{MARKS[0]}\nold\n{MARKS[1]}\nbelow\n"
    assert between_marks(page, ["new"]) == f"above\n{MARKS[0]}\nnew\n{MARKS[1]}\nbelow\n"
    assert "\nnew\n" in between_marks(real_text.PAGE.read_text(), ["new"])
    with pytest.raises(SystemExit, match="lacks the marks"):
        between_marks("no marks", ["new"])

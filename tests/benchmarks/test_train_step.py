"""Step times of training: tables of recorded runs."""

import json
import sys
from pathlib import Path

import pytest

import train_step


def recorded(folder: Path, *results: tuple[str, str, list[float]]) -> Path:
    """A file of --record: a ceiling of 800 TFLOP/s and the seconds of steps."""
    top = {"flops": 800e12, "device": "NVIDIA H200", "date": "2026-11-16"}
    lines = [{"shape": "", "side": "ceiling", "result": top}]
    for shape, side, seconds in results:
        result = {
            "seconds": seconds, "peak_bytes": 40 * 2**30, "versions": "jax 0.11.2, cuda 13",
            "losses": [], "compile": 1.0,
        }  # fmt: skip
        lines.append({"shape": shape, "side": side, "result": result})
    file = folder / "record.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def tabulate(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["train_step.py", "--tabulate", *map(str, words)])
    train_step.main()


def test_a_table_has_medians_and_ratios_to_the_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recorded(
        tmp_path,
        ("8x2048", "command", [0.3, 0.2, 0.25]),
        ("8x2048", "peer", [0.3]),
        ("8x2048", "peer", [0.4, 0.3, 9.0]),  # run again: the newer one counts
    )
    tabulate(monkeypatch, "--record", file)
    conditions, _, _, _, *rows = capsys.readouterr().out.splitlines()
    assert "2026-11-16, one NVIDIA H200, jax 0.11.2" in conditions
    assert "ceiling 800 TFLOP/s" in conditions
    cells = {row.split(" | ")[1]: row.split(" | ") for row in rows}
    assert (cells["peer"][2], cells["peer"][5]) == ("400.0", "1.00×")
    assert (cells["command"][2], cells["command"][5].split()[0]) == ("250.0", "1.60×")
    tflops = train_step.flops(8, 2048) / 0.25 / 1e12
    assert cells["command"][3:5] == [f"{tflops:.0f}", f"{tflops / 800:.3f}"]


def test_a_table_of_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        ([], "--tabulate needs --record FILE"),
        (["--record", tmp_path / "none"], "--tabulate needs --record FILE"),
        (["--sides", "pear", "--record", recorded(tmp_path)], "pear: choose from"),
    ):
        with pytest.raises(SystemExit):
            tabulate(monkeypatch, *words)
        assert message in capsys.readouterr().err

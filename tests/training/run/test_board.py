"""The board: every run below a folder, compared, served on this machine alone."""

import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.training.run.test_status import made

from meshwright import MeshwrightError
from meshwright.training.run import MetricsLog, only_run_in
from meshwright.training.run.board import Board, board_page, find_runs

NASTY = "<img src=x onerror=alert(1)> & 50%"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, steps in (("first", 10), ("sweep/small", 3), (NASTY, 5)):
        made(tmp_path / name, steps)
    made(tmp_path / "first/checkpoints/copied", 1)  # inside a run: not one of its own
    made(tmp_path / ".trash/old", 1)
    (tmp_path / "notes").mkdir()
    return tmp_path


@pytest.fixture
def board(runs: Path) -> Iterator[str]:
    with Board([runs], port=0) as board:
        thread = threading.Thread(target=board.serve)
        thread.start()
        yield board.url
        board.close()
        thread.join()


def get(url: str, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, dict(answer.headers), answer.read().decode()


def compared(text: str) -> list[str]:
    found = re.search(r"JSON\.parse\((\".*\")\)", text)
    assert found is not None
    return [run["name"] for run in json.loads(json.loads(found[1]))["runs"]]


def test_runs_are_found_at_and_below_the_folders(runs: Path) -> None:
    assert set(find_runs([runs])) == {"first", "sweep/small", NASTY}
    assert find_runs([runs / "first"]) == {"first": (runs / "first").resolve()}
    assert set(find_runs([runs / "sweep", runs / "first"])) == {"sweep/small", "first"}


def test_the_board_lists_every_run_and_compares_those_asked_for(board: str, runs: Path) -> None:
    with only_run_in(runs / "sweep/small"):
        status, headers, text = get(board, "/?run=first&run=sweep%2Fsmall&run=gone")
    assert status == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert text.count('type="checkbox" id="run-') == 3
    assert text.count(" checked>") == 2
    assert re.findall(r"state (\w+)\">", text).count("running") == 1
    assert "step 3 of 10, about 14s left" in text
    assert set(compared(text)) == {"first", "sweep/small"}
    assert "<img" not in text
    assert compared(get(board, "/?run=")[2]) == []
    assert len(compared(get(board, "/")[2])) == 3


def test_the_page_of_a_run_is_that_of_its_folder_and_asks_for_news(board: str, runs: Path) -> None:
    address = re.findall(r'href="(run/[^"]*)"', board_page([runs]))
    assert len(address) == 3
    for one in address:
        assert get(board, f"/{one}")[0] == 200
    status, _, text = get(board, "/run/sweep%2Fsmall/")
    assert status == 200
    assert "step 3 of 10" in text
    assert "fetch(location.href" in text
    with MetricsLog(runs / "sweep/small") as log:
        log.write(4, {"loss": 0.25})
    assert "step 4 of 10" in get(board, "/run/sweep%2Fsmall/")[2]
    assert "step 4 of 10" in get(board, "/")[2]


@pytest.mark.parametrize(
    "path", ["/run/notes/", "/run/..%2F..%2Fetc/", "/run/../../etc/passwd", "/etc/passwd", "/run/x"]
)
def test_nothing_but_runs_is_served(board: str, path: str) -> None:
    assert get(board, path)[0] == 404


def test_other_names_of_this_machine_are_refused(board: str) -> None:
    assert get(board, "/", Host="evil.example:80")[0] == 403
    assert get(board, "/", Host=f"localhost:{urlsplit(board).port}")[0] == 200


def test_a_broken_run_does_not_hide_the_others(runs: Path) -> None:
    (runs / "first/config.json").write_text("{")
    text = board_page([runs])
    assert "config.json" in text
    assert text.count('type="checkbox" id="run-') == 3


def test_mistakes_are_one_sentence(runs: Path) -> None:
    with pytest.raises(MeshwrightError, match="is not a folder; give one that holds runs"):
        Board([runs / "nowhere"], 0)
    with (
        Board([runs], 0) as board,
        pytest.raises(MeshwrightError, match=r"cannot listen at .*; --port 0 takes a free one"),
    ):
        Board([runs], urlsplit(board.url).port or 0)

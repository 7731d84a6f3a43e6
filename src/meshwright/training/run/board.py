"""A page of many runs, live: which there are, how they go, and their curves in one chart.

    with Board([Path("runs")], port=6007) as board:
        print(board.url)
        board.serve()

It serves on this machine alone, and reads nothing but the folders of runs below those given.
"""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from meshwright.errors import MeshwrightError
from meshwright.present import CONTENT_POLICY, duration_text, render
from meshwright.training.run.metrics import FILE as METRICS
from meshwright.training.run.metrics import Metrics, read_metrics
from meshwright.training.run.page import progress_text, run_page
from meshwright.training.run.status import run_status
from meshwright.training.run.summary import curves, summary

TEMPLATE = Path(__file__).with_name("board.html")
EVERY_S = 5.0  # between two looks of a browser
COMPARED = 8  # runs in a chart: as many as it has colours
POINTS = 1000  # of a curve
DEEPEST = 4  # folders between one that is given and a run
HOST = "127.0.0.1"


def find_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """The folders of runs at or below those given, by their names on the board.

    A name is the path below the folder; with several folders, it begins with the folder's name.
    """
    runs: dict[str, Path] = {}
    for folder in folders:
        top = folder.resolve()
        for place, below, files in os.walk(top):
            path = Path(place)
            depth = len(path.relative_to(top).parts)
            if METRICS in files or depth == DEEPEST:
                below.clear()
            below[:] = sorted(name for name in below if not name.startswith("."))
            if METRICS in files:
                name = path.relative_to(top).as_posix() if depth else top.name
                name = f"{top.name}/{name}" if len(folders) > 1 and depth else name
                runs[name if name not in runs else str(path).lstrip("/")] = path
    return runs


@dataclasses.dataclass(frozen=True)
class _Digest:
    """What the board shows of a run's metrics, which may be large."""

    numbers: dict[str, str]
    curves: list[dict[str, Any]]
    last: Metrics  # its last line, and how it ended
    unreadable: str = ""


def digest(folder: Path) -> _Digest:
    """The run's numbers and curves; read again only when the file has changed."""
    try:
        stat = (folder / METRICS).stat()
        return _digest(folder, stat.st_mtime_ns, stat.st_size)
    except (OSError, MeshwrightError) as reason:
        return _Digest({}, [], Metrics(), str(reason))


@functools.lru_cache(maxsize=512)
def _digest(folder: Path, modified: int, size: int) -> _Digest:
    metrics = read_metrics(folder)
    last = dataclasses.replace(metrics, records=metrics.records[-1:], events=())
    return _Digest(dict(summary(metrics)), curves(metrics, most=POINTS), last)


def board_page(folders: Sequence[Path], compared: Sequence[str] | None = None) -> str:
    """The board's HTML; `compared` are the runs in its charts, by default the newest ones."""
    runs = find_runs(folders)
    listed = [_entry(name, folder) for name, folder in runs.items()]
    # the order does not change while runs write: by when they started, running ones first
    listed.sort(key=lambda entry: (entry["state"] != "running", -entry["started"]))
    names = [entry["name"] for entry in listed]
    chosen = names[:4] if compared is None else [name for name in names if name in compared]
    chosen = sorted(chosen[:COMPARED])  # so that a run keeps its colour
    data = {
        "runs": [{"name": name, "curves": digest(runs[name]).curves} for name in chosen],
        "everyMs": EVERY_S * 1000,
    }
    return render(
        TEMPLATE,
        title="Runs",
        data=data,
        listed=listed,
        chosen={name: i for i, name in enumerate(chosen)},
        places=", ".join(map(str, folders)),
        live="fetch",
        most=COMPARED,
    )


def _entry(name: str, folder: Path) -> dict[str, Any]:
    read = digest(folder)
    changed, started = _modified(folder / METRICS), _modified(folder / "config.json")
    entry = {
        "name": name,
        "address": f"run/{quote(name, safe='')}/",
        "started": started or changed,
        "ago": f"{duration_text(max(0.0, time.time() - changed))} ago" if changed else "",
    }
    try:
        status = run_status(folder, read.last)
    except MeshwrightError as reason:
        return entry | {"state": "unknown", "reason": str(reason), "progress": "", "numbers": {}}
    return entry | {
        "state": status.state,
        "reason": read.unreadable or status.reason,
        "progress": progress_text(status, read.last),
        "numbers": read.numbers,
    }


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


class Board:
    """The HTTP server of the board, on the loopback interface."""

    def __init__(self, folders: Sequence[Path], port: int) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise MeshwrightError(f"{str(folder)!r} is not a folder; give one that holds runs")
        try:
            self._server = ThreadingHTTPServer((HOST, port), _handler(tuple(folders)))
        except (OSError, OverflowError) as reason:
            raise MeshwrightError(
                f"the board cannot listen at {HOST}:{port}: {reason}; --port 0 takes a free one"
            ) from None
        self._server.daemon_threads = True
        self.url = f"http://{HOST}:{self._server.server_address[1]}/"

    def serve(self) -> None:
        """Until `close` is called, or the process ends."""
        self._server.serve_forever()

    def close(self) -> None:
        self._server.shutdown()

    def __enter__(self) -> "Board":
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.server_close()


def _handler(folders: tuple[Path, ...]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # a page of another site that has its name point to this machine gets nothing
            host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
            if host not in (HOST, "localhost"):
                self._answer(HTTPStatus.FORBIDDEN, f"the board answers at {HOST} and localhost")
                return
            try:
                status, text = _page(folders, self.path)
            except MeshwrightError as mistake:
                status, text = HTTPStatus.INTERNAL_SERVER_ERROR, str(mistake)
            self._answer(status, text, is_page=status == HTTPStatus.OK)

        def _answer(self, status: HTTPStatus, text: str, is_page: bool = False) -> None:
            body = text.encode()
            self.send_response(status)
            kind = "text/html" if is_page else "text/plain"
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", CONTENT_POLICY)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Cache-Control", "no-store")
            with contextlib.suppress(ConnectionError):  # a browser that has left
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass  # polls are no news

    return Handler


def _page(folders: Sequence[Path], address: str) -> tuple[HTTPStatus, str]:
    """The answer to a path: `/?run=a&run=b` the board with these compared, `/run/NAME/` one run."""
    asked = urlsplit(address)
    if asked.path == "/":
        query = parse_qs(asked.query, keep_blank_values=True)
        return HTTPStatus.OK, board_page(folders, query.get("run"))
    parts = asked.path.split("/")
    if len(parts) == 4 and parts[1] == "run":
        folder = find_runs(folders).get(unquote(parts[2]))
        if folder is not None:
            return HTTPStatus.OK, run_page(folder, served=True)
    return HTTPStatus.NOT_FOUND, "there is no such run here; / lists all"

"""A Hugging Face Hub on this machine: the endpoints that huggingface_hub calls, over folders."""

import contextlib
import hashlib
import http.server
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

ANSWERS = {"token": (401, ""), "absent": (404, "RepoNotFound")}


class Hub(http.server.ThreadingHTTPServer):
    """Serves `root/models/ORG/NAME/REVISION/…` and `root/datasets/…`; a revision is a folder."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.commits: dict[Path, str] = {}
        """Commits of folders, where not by their names."""
        self.requests: Counter[str] = Counter()
        self.gets: Counter[str] = Counter()
        self.breaks: set[str] = set()
        """Files whose next transfer breaks in the middle."""
        self.damaged: set[str] = set()
        """Files that are sent with other bytes."""
        self.short: set[str] = set()
        """Files that are sent without their last byte."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def running(root: Path) -> Iterator[Hub]:
    with Hub(root) as hub:
        threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield hub
        finally:
            hub.shutdown()


def commit(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        self.server.requests[f"{self.command} {url.path}"] += 1
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        is_api = parts[0] == "api"
        parts = parts[1:] if is_api else parts
        kind = parts.pop(0) if parts[0] in ("models", "datasets") else "models"
        if is_api and not parts:
            asked = {name: values[0].lower() for name, values in parse_qs(url.query).items()}
            names = [f"{p.parent.name}/{p.name}" for p in self.server.root.glob(f"{kind}/*/*")]
            start, part = asked.get("author", ""), asked.get("search", "")
            self._json([{"id": name} for name in names if name.startswith(start) and part in name])
            return
        if len(parts) < 2:
            self._refuse(404, "")
            return
        (org, name, action), rest = [*parts, ""][:3], parts[3:]
        if name in ANSWERS:
            self._refuse(*ANSWERS[name])
            return
        repo = self.server.root / kind / org / name
        if not repo.is_dir():
            self._refuse(
                401, "RepoNotFound"
            )  # as the Hub does, so that it does not tell what is private
            return
        revision = rest.pop(0) if rest else "main"
        by_commit = {self._commit(one): one for one in repo.iterdir()}
        folder = by_commit.get(revision, repo / revision)
        if not folder.is_dir():
            self._refuse(404, "RevisionNotFound")
            return
        sha = self._commit(folder)
        files = {
            str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()
        }
        if is_api and action == "tree":
            self._json([_entry(path, file) for path, file in sorted(files.items())])
        elif is_api:
            self._json(
                {"id": f"{org}/{name}", "sha": sha, "siblings": [{"rfilename": p} for p in files]}
            )
        elif name == "gated":
            self._refuse(403, "GatedRepo")
        elif "/".join(rest) in files:
            self._file(files["/".join(rest)], sha)
        else:
            self._refuse(404, "EntryNotFound")

    def _commit(self, folder: Path) -> str:
        return self.server.commits.get(folder) or commit("/".join(folder.parts[-3:]))

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code} if code else {})

    def _file(self, file: Path, sha: str) -> None:
        data = file.read_bytes()
        size, etag = len(data), str(_entry("", file)["oid"])
        if _is_lfs(file):
            etag = hashlib.sha256(data).hexdigest()
        headers = {"X-Repo-Commit": sha, "ETag": f'"{etag}"', "X-Linked-Size": str(size)}
        status = 200
        if start := int((self.headers.get("Range") or "bytes=0-")[6:].partition("-")[0]):
            data, status = data[start:], 206
            headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
        if self.command == "GET":
            self.server.gets[file.name] += 1
            if file.name in self.server.damaged:
                data = bytes([data[0] ^ 1]) + data[1:]
            if file.name in self.server.short:
                data = data[:-1]
            if file.name in self.server.breaks:
                self.server.breaks.discard(file.name)
                self._send(status, data, headers, stop=len(data) // 2)
                return
        self._send(status, data, headers)

    def _send(
        self, status: int, data: bytes, headers: dict[str, str], stop: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[:stop])
        self.close_connection = stop is not None


def _is_lfs(file: Path) -> bool:
    return file.suffix in (".safetensors", ".parquet")


def _entry(path: str, file: Path) -> dict[str, object]:
    data = file.read_bytes()
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    entry: dict[str, object] = {"type": "file", "path": path, "size": len(data), "oid": oid}
    if _is_lfs(file):
        sha = hashlib.sha256(data).hexdigest()
        entry["lfs"] = {"oid": sha, "size": len(data), "pointerSize": 130}
    return entry

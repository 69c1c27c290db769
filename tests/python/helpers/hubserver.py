"""A local HTTP server that implements the routes of the hub, and a child process that resolves references with it.

``huggingface_hub`` reads its environment variables when it is imported, so references are resolved in a child process
whose environment names the local server (HF_ENDPOINT) and an empty cache (HF_HOME).
"""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.parse
from dataclasses import dataclass, field
from typing import Any

LARGE = 3000
CHILD = """
import contextlib, io, json, logging, sys
out, sys.stdout = sys.stdout, sys.stderr
from mpool import errors
from mpool.models import catalogue, describe, resolve
from mpool.models.sources import hub
own = catalogue.load
records = []
class Keep(logging.Handler):
    def emit(self, record): records.append(record.getMessage())
log = logging.getLogger('mpool.models'); log.addHandler(Keep()); log.setLevel(logging.INFO); log.propagate = False
for line in sys.stdin:
    request = json.loads(line)
    records.clear()
    rows = request.get('catalogue')
    given = catalogue.read(rows) if rows else None
    catalogue.load = (lambda: given) if given else own
    hub.LIST_SECONDS = request.get('list_seconds', 10.0)
    bars, counts, progress = io.StringIO(), [], request.get('progress', False)
    if progress == 'counts':
        progress = lambda *count: counts.append(count)
    try:
        with contextlib.redirect_stderr(bars):
            found = resolve(request['ref'], offline=request.get('offline'), progress=progress,
                            update=request.get('update', False))
        result = {**found.__dict__, 'bars': bars.getvalue(), 'counts': counts}
        if request.get('describe'):
            described = describe(request['ref'], progress=False)
            result['tensors'] = len(described.spec.tensors); result['described_revision'] = described.revision
    except errors.MpoolError as error:
        result = {'error': type(error).__name__, 'text': str(error)}
    out.write(json.dumps({**result, 'log': list(records)}) + '\\n'); out.flush()
"""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repo:
    """A repository of the test server.

    Attributes:
        files: files at ``commit``, by name.
        commit: commit of the branch main.
        older: files of older commits, by commit.
        corrupt: files that are sent with a changed first byte.
        cut_once: files whose connection is closed halfway, once.
        short: files that are sent without their last byte.
        gated: True to refuse every request with status 403.
        broken: True to fail every request with status 500.
        silent: True to accept every request and never to answer.
        redirected: True to redirect downloads of large files to another path, as the hub does to its storage.
    """

    files: dict[str, bytes]
    commit: str
    older: dict[str, dict[str, bytes]] = field(default_factory=dict)
    corrupt: set[str] = field(default_factory=set)
    cut_once: set[str] = field(default_factory=set)
    short: set[str] = field(default_factory=set)
    gated: bool = False
    broken: bool = False
    silent: bool = False
    redirected: bool = False

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision in ("main", self.commit, "refs/pr/1"):
            return self.commit, self.files
        return (revision, self.older[revision]) if revision in self.older else None


class Hub(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, Repo] = {}
        self.seen: list[tuple[str, str, str | None]] = []
        self.closing = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def downloaded(self) -> list[str]:
        """Return the sorted names of the files that were downloaded since the last call."""
        names = [path.partition("/resolve/")[2].partition("/")[2] for verb, path, _ in self.seen
                 if verb == "GET" and "/resolve/" in path]
        self.seen.clear()
        return sorted(names)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args: object) -> None:
        return

    def reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def missing(self, code: str, status: int = 404) -> None:
        self.reply(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.server.seen.append((self.command, path, self.headers.get("Range")))
        api = path.startswith("/api/models/")
        parts = path[len("/api/models/"):].split("/") if api else path[1:].split("/")
        repo = self.server.repos.get("/".join(parts[:2]))
        if repo is None:
            return self.missing("RepoNotFound", 401)
        if repo.gated:
            return self.missing("GatedRepo", 403)
        if repo.broken:
            return self.reply(500)
        if repo.silent:
            self.server.closing.wait(60)
            self.close_connection = True
            return
        what, rest = (parts[2] if len(parts) > 2 else "", parts[3:])
        if api and what in ("", "revision"):
            return self.info(repo, "/".join(rest) or "main", "/".join(parts[:2]))
        if api and what == "tree":
            return self.tree(repo, rest[0])
        if what == "stored":
            return self.file(repo, repo.commit, "/".join(rest), stored=True)
        if what == "resolve":
            size = 3 if rest[0] == "refs" else 1
            return self.file(repo, "/".join(rest[:size]), "/".join(rest[size:]))
        self.missing("EntryNotFound")

    def info(self, repo: Repo, revision: str, name: str) -> None:
        found = repo.at(revision)
        if found is None:
            return self.missing("RevisionNotFound")
        commit, files = found
        siblings = []
        for path, data in files.items():
            entry: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": git_id(data)}
            if len(data) > LARGE:
                entry["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        self.reply(200, json.dumps({"id": name, "modelId": name, "sha": commit, "siblings": siblings}).encode())

    def tree(self, repo: Repo, revision: str) -> None:
        found = repo.at(revision)
        if found is None:
            return self.missing("RevisionNotFound")
        entries = []
        for path, data in found[1].items():
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": git_id(data)}
            if len(data) > LARGE:
                entry["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 130}
            entries.append(entry)
        self.reply(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})

    def file(self, repo: Repo, revision: str, name: str, stored: bool = False) -> None:
        found = repo.at(revision)
        if found is None:
            return self.missing("RevisionNotFound")
        commit, files = found
        if name not in files:
            return self.missing("EntryNotFound")
        data = files[name]
        etag = sha256(data) if len(data) > LARGE else git_id(data)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes",
                   "X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{etag}"'}
        if repo.redirected and len(data) > LARGE and not stored:
            path = self.path.partition("/resolve/")[0] + "/stored/" + name
            return self.reply(302, b"", {**headers, "Location": self.server.url + path})
        if name in repo.corrupt:
            data = bytes([data[0] ^ 1]) + data[1:]
        if name in repo.short:
            data = data[:-1]
        start = 0
        wanted = self.headers.get("Range")
        if self.command == "GET" and wanted:
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        body = data[start:]
        if self.command == "GET" and name in repo.cut_once:
            repo.cut_once.discard(name)
            self.send_response(200)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body[:len(body) // 2])
            self.wfile.flush()
            self.close_connection = True
            return
        self.reply(206 if start else 200, body, headers)


class Child:
    """A child process that resolves references."""

    def __init__(self, environment: dict[str, str]) -> None:
        clean = {name: value for name, value in os.environ.items()
                 if not name.startswith(("HF_", "MPOOL_", "TRANSFORMERS_")) and not name.lower().endswith("_proxy")}
        self.process = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, env={**clean, **environment})

    def send(self, ref: str, **more: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"ref": ref, **more}) + "\n")
        self.process.stdin.flush()

    def result(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the child died"
        return json.loads(line)

    def resolve(self, ref: str, **more: Any) -> dict[str, Any]:
        self.send(ref, **more)
        return self.result()

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


def commit(number: int) -> str:
    """Return a commit id."""
    return f"{number:040x}"

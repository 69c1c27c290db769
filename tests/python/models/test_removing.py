"""``mpool rm``: the files of a model are deleted, and nothing else."""

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpool import errors
from mpool.cli import main
from mpool.models import describing, remove, resolve
from mpool.models.sources import Resolved

FIRST, SECOND = "1" * 40, "2" * 40


def blob_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Cache:
    """The hub's cache with one repository of GGUF files, in its documented layout."""

    def __init__(self, home: Path, name: str = "name") -> None:
        self.root = home / f"models--org--{name}"
        for folder in ("blobs", "refs", "snapshots"):
            (self.root / folder).mkdir(parents=True)
        (self.root / "refs" / "main").write_text(SECOND)

    def add(self, commit: str, name: str, data: bytes) -> Path:
        """Add a file to a snapshot. Equal files share a blob."""
        blob, link = self.root / "blobs" / blob_of(data), self.root / "snapshots" / commit / name
        blob.write_bytes(data)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
        return blob


@pytest.fixture()
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """An empty cache of the hub, and of mpool."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))  # the library reads its variables once
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("MPOOL_CACHE", str(tmp_path / "mpool"))
    return Cache(tmp_path / "hub")


def gguf(text: str) -> bytes:
    return b"GGUF" + text.encode() * 100


def test_only_the_files_of_the_model_are_deleted(cache: Cache) -> None:
    """Another quantisation, another file, and a blob of another commit are kept."""
    wanted = cache.add(SECOND, "m-Q4_K_M.gguf", gguf("a"))
    kept = [cache.add(SECOND, "m-Q8_0.gguf", gguf("b")), cache.add(SECOND, "README.md", b"text"),
            cache.add(FIRST, "m-Q8_0.gguf", gguf("b"))]
    size = wanted.stat().st_size
    trial = remove("org/name:Q4_K_M", dry_run=True)
    assert trial.freed == size and wanted.exists() and trial.files
    done = remove("org/name:Q4_K_M")
    assert done == trial and not wanted.exists() and not any(map(os.path.lexists, done.files))
    assert all(path.exists() for path in kept)
    assert resolve("org/name:Q8_0", offline=True).path.endswith("m-Q8_0.gguf")
    with pytest.raises((errors.OfflineError, errors.InvalidArgument)):
        resolve("org/name:Q4_K_M", offline=True)


def test_shared_blob_is_kept(cache: Cache) -> None:
    """A blob that another snapshot uses frees nothing and stays."""
    shared = cache.add(SECOND, "m-Q4_K_M.gguf", gguf("a"))
    cache.add(FIRST, "m-Q4_K_M.gguf", gguf("a"))
    assert remove("org/name:Q4_K_M").freed == 0 and shared.exists()
    assert resolve(f"org/name@{FIRST}:Q4_K_M", offline=True).path.endswith("m-Q4_K_M.gguf")


def test_empty_repository_is_deleted(cache: Cache) -> None:
    """Nothing of the repository is left after its last file; but a download in progress keeps its partial file."""
    cache.add(SECOND, "m-Q4_K_M.gguf", gguf("a"))
    (cache.root / "blobs" / "x.incomplete").write_bytes(b"part")
    remove("org/name:Q4_K_M")
    assert (cache.root / "blobs" / "x.incomplete").exists()
    (cache.root / "blobs" / "x.incomplete").unlink()
    cache.add(SECOND, "m-Q4_K_M.gguf", gguf("a"))
    remove("org/name:Q4_K_M")
    assert not cache.root.exists()


def test_models_that_were_not_downloaded_are_refused(cache: Cache, tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    """Local paths, bundled models and absent models are refused, each with what to do; the others are deleted."""
    local = tmp_path / "own.gguf"
    local.write_bytes(gguf("a"))
    blob = cache.add(SECOND, "m-Q4_K_M.gguf", gguf("a"))
    Cache(cache.root.parent, "half").add(SECOND, "config.json", b"{}")
    assert main(["rm", str(local), "digits-clip", "all-MiniLM-L12-v2", "org/half", "org/name", "--json"]) == 1
    seen = capsys.readouterr()
    assert [row["ref"] for row in json.loads(seen.out)] == ["org/name"] and not blob.exists() and local.exists()
    for part in ("is a local path", "is bundled with mpool",
                 "all-MiniLM-L12-v2 is not on this machine. `mpool list` lists the downloaded models",
                 "org/half is incomplete on this machine", "complete the download first: mpool pull org/half"):
        assert part in seen.err
    assert seen.err.count("mpool pull") == 1 and "hub was not asked" not in seen.err
    assert resolve("digits-clip").source == "bundled"


def test_hashes_that_the_catalogue_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """``mpool pull --verify`` compares each file with its own hash; the key of a single file is ``""``."""
    files = {"": SimpleNamespace(sha256="single"), "a/b": SimpleNamespace(sha256="inner")}
    rows = {"m": SimpleNamespace(files=files), "none": SimpleNamespace(files=None)}
    monkeypatch.setattr("mpool.models.catalogue.load", lambda: rows)

    def recorded(key: str | None, path: str) -> str | None:
        return describing._recorded(Resolved("r", "folder", "/m", "pip", key=key), path)

    assert (recorded("m", "/m"), recorded("m", "/m/a/b"), recorded("m", "/m/c")) == ("single", "inner", None)
    assert (recorded("none", "/m"), recorded("other", "/m"), recorded(None, "/m")) == (None, None, None)

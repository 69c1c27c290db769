"""A model that is not on this machine: the error says where mpool looked, why it did not download, and what to do."""

import importlib.metadata
import os
from pathlib import Path

import pytest

import mpool
from mpool.host import resources
from mpool.errors import DownloadError, FileError, OfflineError
from mpool.models import resolve
from mpool.models.sources import probe

VARIABLES = ("MPOOL_OFFLINE", "HF_HUB_OFFLINE")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory, an empty cache, and no variable that disables downloads."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HOME", "MPOOL_CACHE"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in (*VARIABLES, "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)


def test_a_missing_relative_folder_is_named_beside_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mpool.Pool(mpool.PoolConfig(offline=True)) as pool, pytest.raises(OfflineError) as caught:
        pool.embed("x", "models/mini")
    text = str(caught.value)
    assert f"there is no file or folder models/mini in {tmp_path} either" in text
    assert "the hub was not asked: downloads are disabled (offline)" in text
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(probe, "unreachable", lambda endpoint: "no route")
    with pytest.raises(DownloadError) as failed:
        resolve("models/mini", offline=False)
    text = str(failed.value)
    assert "cannot be reached: no route" in text and "no file or folder models/mini" in text and "not asked" not in text


def test_a_missing_path_says_that_the_hub_was_not_asked(tmp_path: Path) -> None:
    for name in ("./models/mini", "models/a/b", "m.gguf"):
        with pytest.raises(FileError, match="no such file or folder, and the hub was not asked") as caught:
            resolve(name)
        assert str(tmp_path) in str(caught.value)


def test_a_folder_of_the_name_is_used(tmp_path: Path) -> None:
    """With ``hf://``, the repository is meant: the folder beside it is not mentioned."""
    os.makedirs("models/mini")
    with pytest.raises(OfflineError) as caught:
        resolve("hf://models/mini", offline=True)
    assert "no file or folder" not in str(caught.value)


@pytest.mark.parametrize("given", [(), ("MPOOL_OFFLINE",), ("HF_HUB_OFFLINE",), VARIABLES])
@pytest.mark.parametrize("ref", ["org/name", "bge-small-en-v1.5", "all-MiniLM-L6-v2", "pip:package==1.0/model.gguf"])
def test_only_variables_that_are_set_are_named(given: tuple[str, ...], ref: str,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    for name in given:
        monkeypatch.setenv(name, "1")
    with pytest.raises(OfflineError) as caught:
        resolve(ref, offline=True)
    text = str(caught.value)
    for name in VARIABLES:
        assert (name in text) == (name in given), text
    assert ("unset " + " and ".join(given) in text) if given else "When online, run:" in text


def test_the_hint_names_the_packages_of_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package index has mpool: ``pip install "mpool[ray]"`` fails for those who installed the sources."""
    lines = ["numpy>=1", 'starlette<2,>=0.40; extra == "server"', 'msgspec>=0.18; extra == "server"',
             'mpool[server]; extra == "ray"', "ray[data,serve]>=2.60; extra == 'ray'", 'x; extra == "server2"',
             'torch>=2.2; extra == "sentence-transformers"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    assert resources.install_hint("server") == \
        'Run: pip install "starlette<2,>=0.40" "msgspec>=0.18" (the extra server of mpool)'
    assert resources.install_hint("ray") == 'Run: pip install "starlette<2,>=0.40" "msgspec>=0.18" ' \
        '"ray[data,serve]>=2.60" (the extra ray of mpool)'
    assert '"torch>=2.2"' in resources.install_hint("sentence-transformers")

    def missing(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert resources.install_hint("grammar") == 'Run this in the clone of mpool: pip install ".[grammar]"'


# ---- hints that install packages -------------------------------------------------------------------------------------

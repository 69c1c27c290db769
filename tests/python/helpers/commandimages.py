"""Files with the names of images that tests of commands use."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def image_files(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty files in the working folder: the commands look for them before they load a model."""
    folder = tmp_path_factory.mktemp("images")
    for name in ("a.png", "b.png", "i", "x.png"):
        (folder / name).touch()
    monkeypatch.chdir(folder)

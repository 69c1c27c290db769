"""Files with the names of images that tests of commands use."""

import pytest
from PIL import Image


@pytest.fixture(autouse=True)
def image_files(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images in the working folder: the commands read them before they load a model."""
    folder = tmp_path_factory.mktemp("images")
    for name in ("a.png", "b.png", "i", "x.png"):
        Image.new("RGB", (2, 2)).save(folder / name, "PNG")
    monkeypatch.chdir(folder)

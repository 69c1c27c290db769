"""The orientation of image files, and the silence about their metadata."""

import io
import os
import struct
import subprocess
import sys
import threading
import warnings
from typing import Any

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")

from PIL import ImageOps  # noqa: E402

import hostileimages  # noqa: E402
from mpool.images.loading import read_image  # noqa: E402
from mpool.images.orientation import orientation  # noqa: E402

XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="%d"/></x:xmpmeta>'


def exif(entries: list[tuple[int, int, int, bytes]], order: str = "<", more: bytes = b"", over: int = 0) -> bytes:
    """EXIF data: tag, type, number of values, and the value of each entry. ``over``: entries that are missing."""
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, len(entries) + over)
    body = b"".join(struct.pack(order + "HHI", *entry[:3]) + entry[3] for entry in entries)
    return b"Exif\0\0" + head + body + bytes(4) + more


def of_pillow(info: dict[str, Any]) -> Any:
    image = Image.new("L", (2, 2))
    image.info.update(info)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return image.getexif().get(274, 1)


@pytest.mark.parametrize("info, found", [
    ({}, 1), ({"exif": exif([(274, 3, 1, b"\6\0\0\0")])}, 6), ({"exif": exif([(274, 3, 1, b"\0\6\0\0")], ">")}, 6),
    ({"exif": b"Exif\0\0" + exif([(274, 3, 1, b"\3\0\0\0")])}, 3),
    ({"exif": exif([(274, 4, 1, b"\x08\0\0\0")])[6:]}, 8),
    ({"exif": exif([(256, 3, 1, bytes(4)), (274, 3, 1, b"\5\0\0\0")])}, 5),
    ({"exif": exif([(274, 3, 3, struct.pack("<I", 26))], more=b"\7\0\1\0\1\0")}, 7),
    ({"exif": exif([(274, 3, 3, struct.pack("<I", 999))], more=b"\7\0\1\0\1\0")}, 1),
    ({"exif": exif([(274, 3, 1, b"\2\0\0\0")], over=8)}, 2), ({"exif": exif([(274, 2, 1, b"\2\0\0\0")])}, 1),
    ({"exif": exif([(274, 3, 0, b"\2\0\0\0")])}, 1), ({"exif": exif([(274, 3, 1, b"\x63\0\0\0")])}, 1),
    ({"exif": b"Exif\0\0II*\0\xff\xff\xff\xff"}, 1), ({"exif": b"Exif\0\0II*"}, 1), ({"exif": b""}, 1),
    ({"Raw profile type exif": "\nexif\n  40\n" + exif([(274, 3, 1, b"\6\0\0\0")]).hex()}, 6),
    ({"Raw profile type exif": "\nexif\n  40\nzz"}, 1), ({"xmp": XMP % 8}, 8),
    ({"XML:com.adobe.xmp": (XMP % 4).decode()}, 4),
    ({"exif": exif([(256, 3, 1, bytes(4))]), "xmp": XMP % 3}, 3),
    ({"exif": exif([(274, 3, 1, b"\6\0\0\0")]), "xmp": XMP % 3}, 6)], ids=str)
def test_orientations(info: dict[str, Any], found: int) -> None:
    assert orientation(info) == found
    if found != 1:
        assert of_pillow(info) == found


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_files_are_rotated_once(kind: str, turn: int) -> None:
    data = exif([(274, 3, 1, bytes([turn, 0, 0, 0]))])
    options = {"lossless": True} if kind == "WEBP" else {}
    file = hostileimages.saved(hostileimages.noise(40, 24), kind, exif=data, **options)
    found = read_image(file)
    assert np.array_equal(np.asarray(found), np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(file)))))
    assert found.getexif().get(274, 1) == 1 and np.array_equal(np.asarray(read_image(found)), np.asarray(found))


def test_pillow_writes_no_warnings_about_metadata() -> None:
    """Pillow wrote two lines to the standard error for each invalid entry: 11 MB for a PNG of 720 KB."""
    code = """
import struct
import hostileimages as hi
from mpool.images.loading import read_image

def entries(count, tag=256):
    rows = b"".join(struct.pack("<HHII", tag + at, 1, 1 << 31, 8) for at in range(count))
    return b"II*\\0" + struct.pack("<IH", 8, count) + rows + bytes(4)

png, jpeg = (hi.saved(hi.noise(64, 64), kind) for kind in ("PNG", "JPEG"))
segment = lambda kind, data: b"\\xff" + bytes([kind]) + struct.pack(">H", len(data) + 2) + data
files = [png[:33] + hi.chunk(b"eXIf", entries(60_000)) + png[33:],
         jpeg[:2] + segment(0xE1, b"Exif\\0\\0" + entries(5000)) + jpeg[2:],
         jpeg[:2] + segment(0xE2, b"MPF\\0" + entries(5000, 0xB000)) + jpeg[2:]]
print([read_image(file).size for file in files])
"""
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, timeout=120,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert (done.stdout, done.stderr) == ("[(64, 64), (64, 64), (64, 64)]\n", "")


def test_one_image_in_several_threads_is_rotated_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow marks EXIF data as parsed before it parses them, so its parser is not asked."""
    parsing = threading.Event()
    monkeypatch.setattr(Image.Exif, "load", lambda self, data: parsing.set())
    data = exif([(274, 3, 1, b"\6\0\0\0")])
    shared = Image.open(io.BytesIO(hostileimages.saved(hostileimages.noise(40, 24), "PNG", exif=data)))
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(read_image(shared).size)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(24, 40)] * 2 and not parsing.is_set()


def test_orientation_that_the_caller_has_set() -> None:
    image = Image.fromarray(np.asarray(hostileimages.noise(40, 24)))
    image.getexif()[274] = 6
    assert read_image(image).size == (24, 40) and image.size == (40, 24)


def test_the_image_of_a_caller_keeps_its_metadata() -> None:
    image = Image.fromarray(np.asarray(hostileimages.noise(40, 24)))
    image.info["exif"] = exif([(274, 3, 1, b"\6\0\0\0")])
    found = read_image(image)
    assert "exif" in image.info and "exif" not in found.info
    assert found.size == read_image(found).size == (24, 40)

"""Image files that are small and expensive: refused before their decoder runs. GIF and BMP files, 16-bit and 1-bit
images: read as transformers reads them."""

import io
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpool.errors import InvalidArgument
from mpool.images import structure
from mpool.images.loading import read_image

import hostileimages

Image = pytest.importorskip("PIL.Image")


def refused(data: bytes, words: str, seconds: float = 2.0) -> None:
    """Check that a file is refused with these words, without the time that its decoder would take."""
    began = time.process_time()
    with pytest.raises(InvalidArgument, match=words):
        read_image(data)
    assert time.process_time() - began < seconds


# ---- JPEG ----------------------------------------------------------------------------------------------------------

@pytest.mark.builds
def test_progressive_jpeg_of_thousands_of_scans() -> None:
    """Each scan visits every block: the decoder's time is the product of scans and pixels, not of the file's size."""
    refused(hostileimages.with_scans(5000), "more than 100 scans")
    refused(hostileimages.with_scans(40, 8000, 8000), "more than 33 scans")
    assert read_image(hostileimages.with_scans(structure.MAX_SCANS)).size == (64, 64)
    refused(hostileimages.with_scans(structure.MAX_SCANS + 1), "scans")
    assert structure._count_scans(hostileimages.with_scans(5000), 100) == 101  # the count ends above the limit


def test_scans_are_counted_where_a_decoder_sees_them() -> None:
    """Bytes of a comment, and bytes after the end marker (the video of a motion photo), are no scans."""
    data = hostileimages.with_scans(12, hide=True)
    assert data.count(b"\xff\xda") > 900
    assert read_image(data).size == (64, 64)
    refused(hostileimages.with_scans(structure.MAX_SCANS + 1, hide=True), "scans")


@pytest.mark.parametrize("marker", [b"\xff\x01", b"\xff\xd8", b"\xff\xd0"], ids=bytes.hex)
def test_markers_without_a_length_hide_no_scans(marker: bytes) -> None:
    """The two bytes behind such a marker belong to the next segment."""
    data = hostileimages.with_scans(5000)
    head, rest = data[:2], data[2:].replace(b"\xff\xda", marker + b"\xff\xda")
    assert structure._count_scans(head + rest, 100) == 101


def test_restart_markers_and_fill_bytes_are_no_segments() -> None:
    image = hostileimages.noise(300, 200)
    data = hostileimages.saved(image, "JPEG", restart_marker_blocks=1, quality=95)
    assert data.count(b"\xff\xd0") > 20
    at = data.index(b"\xff\xda")
    filled = data[:at] + b"\xff" * 5000 + data[at:]
    for given in (data, filled, data[:-2] + b"\xff\xfe\0\x06abcd" + data[-2:]):
        assert structure._count_scans(given, 100) == 1
        assert np.array_equal(np.asarray(read_image(given)), np.asarray(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("head", [b"\xff\xfe\0\2" * 20_000, b"\xff\xe1\0\2" * 20_000,
                                  b"\xff\xe2\xff\xff" + bytes(65533), b"x" * 100_000])
def test_segments_before_the_first_scan(head: bytes) -> None:
    """Pillow reads segments, and bytes that belong to none, in Python loops."""
    data = hostileimages.saved(hostileimages.noise(32, 32), "JPEG")
    head *= 300 if head.startswith(b"\xff\xe2") else 1
    refused(data[:20] + head + data[20:], "before its first scan|between its segments")


# ---- PNG, GIF, BMP -------------------------------------------------------------------------------------------------

def test_chunks_of_a_png() -> None:
    empty = hostileimages.chunk(b"abCd", b"")
    refused(hostileimages.png(8, 8, empty * (structure.MAX_CHUNKS + 1)), "chunks")
    profile = hostileimages.chunk(b"iCCP", b"key\0\0" + zlib.compress(bytes(1_000_000)))
    refused(hostileimages.png(8, 8, profile * 1000), "colour profile")
    assert read_image(hostileimages.png(8, 8, empty * 100 + profile)).size == (8, 8)


def test_blocks_of_a_gif() -> None:
    data = hostileimages.saved(hostileimages.noise(32, 32), "GIF")
    at = data.index(b",", 13 + 768)
    comment = b"!\xfe" + (b"\xff" + b"c" * 255) * (structure.MAX_BLOCKS + 1) + b"\0"
    refused(data[:at] + comment + data[at:], "blocks before its first frame")
    assert read_image(data[:at] + b"!\xfe\x03abc\0" + data[at:]).size == (32, 32)


def test_run_lengths_of_a_bmp() -> None:
    refused(hostileimages.run_length_bmp(8000, 8000), "run-length-encoded BMP")
    assert read_image(hostileimages.run_length_bmp(50, 40)).size == (50, 40)


def jpeg(*segments: bytes) -> bytes:
    return b"".join((b"\xff\xd8\xff\xfe\0\2", *segments, b"\xff\xd9"))


def jpeg_of(size: int) -> bytes:
    """A JPEG whose segments end at this offset."""
    longest = b"\xff\xfe\xff\xff" + bytes(65533)
    count, rest = divmod(size - 6, len(longest))
    return jpeg(longest * count, b"\xff\xfe" + (rest - 2).to_bytes(2, "big") + bytes(rest - 4))


@pytest.mark.parametrize("make, most", [
    (lambda n: jpeg(b"\xff\xfe\0\2" * (n - 1)), structure.MAX_SEGMENTS), (jpeg_of, structure.MAX_HEAD),
    (lambda n: jpeg(b"x" * n), structure.MAX_JUNK),
    (lambda n: b"\x89PNG\r\n\x1a\n" + hostileimages.chunk(b"abCd", b"") * n, structure.MAX_CHUNKS),
    (lambda n: b"GIF89a" + bytes(7) + b"!\xfe" + b"\1c" * n + b"\0,", structure.MAX_BLOCKS)],
    ids=["segments", "bytes of segments", "other bytes", "chunks", "blocks"])
def test_a_file_at_the_limit_is_accepted(make: Callable[[int], bytes], most: int) -> None:
    structure.check_head(make(most), "image")
    with pytest.raises(InvalidArgument, match=f"with at most.* {most:,} "):
        structure.check_head(make(most + 1), "image")


def test_a_bmp_at_the_limit_is_accepted() -> None:
    structure.check_run_lengths(1, structure.MAX_RLE_PIXELS, "image")
    for compression in (1, 2):
        with pytest.raises(InvalidArgument, match="run-length-encoded"):
            structure.check_run_lengths(compression, structure.MAX_RLE_PIXELS + 1, "image")
    structure.check_run_lengths(3, structure.MAX_RLE_PIXELS + 1, "image")


# ---- as the reference reads them -----------------------------------------------------------------------------------

def reference(data: bytes) -> np.ndarray:
    """The pixels that a processor of transformers sees."""
    convert = pytest.importorskip("transformers.image_transforms").convert_to_rgb
    return convert(Image.open(io.BytesIO(data)), return_numpy=True)


def kinds() -> dict[str, bytes]:
    rgb = hostileimages.noise(30, 20)
    grey = np.asarray(rgb.convert("L"))
    sixteen = np.arange(600, dtype=np.uint16).reshape(20, 30) * 109
    palette = rgb.convert("P", palette=Image.Palette.ADAPTIVE, colors=16)
    save = hostileimages.saved
    frames = [hostileimages.noise(30, 20, seed) for seed in range(3)]
    return {
        "16-bit grey PNG": save(Image.fromarray(sixteen), "PNG"),
        "16-bit grey PNG of small values": save(Image.fromarray(grey.astype(np.uint16)), "PNG"),
        "1-bit PNG": save(rgb.convert("1"), "PNG"),
        "grey with alpha": save(rgb.convert("LA"), "PNG"),
        "palette with alpha": save(palette, "PNG", transparency=bytes(range(0, 256, 16))),
        "palette with one clear colour": save(palette, "PNG", transparency=3),
        "GIF": save(rgb, "GIF"), "GIF with a clear colour": save(palette, "GIF", transparency=2),
        "GIF of several frames": save(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "grey GIF": save(rgb.convert("L"), "GIF"),
        "BMP": save(rgb, "BMP"), "1-bit BMP": save(rgb.convert("1"), "BMP"), "grey BMP": save(rgb.convert("L"), "BMP"),
        "palette BMP": save(palette, "BMP"), "BMP with alpha": save(rgb.convert("RGBA"), "BMP"),
        "run-length-encoded BMP": hostileimages.run_length_bmp(30, 20),
    }


@pytest.mark.parametrize("kind", kinds())
def test_read_as_transformers_does(kind: str, tmp_path: Path) -> None:
    data = kinds()[kind]
    wanted = reference(data)
    assert np.array_equal(np.asarray(read_image(data)), wanted)
    (tmp_path / "image").write_bytes(data)
    assert np.array_equal(np.asarray(read_image(tmp_path / "image")), wanted)
    assert np.array_equal(np.asarray(read_image(Image.open(io.BytesIO(data)))), wanted)


def test_a_frame_larger_than_the_screen_of_a_gif() -> None:
    """The first frame may enlarge the image; its limits are those of the enlarged image."""
    data = bytearray(hostileimages.saved(hostileimages.noise(32, 32), "GIF"))
    at = data.index(b",", 13 + 768)
    data[at + 5:at + 9] = struct.pack("<HH", 60_000, 60_000)
    with pytest.raises(InvalidArgument, match="pixels"):
        read_image(bytes(data))


@pytest.mark.parametrize("given, name", [("TIFF", "TIFF"), ("ICO", "ICO"), ("EPS", "EPS"), ("JPEG2000", "JPEG 2000"),
                                         ("AVIF", "AVIF")])
def test_formats_that_are_refused_are_named(given: str, name: str) -> None:
    try:
        data = hostileimages.saved(hostileimages.noise(32, 32), given)
    except (KeyError, OSError):
        pytest.skip(f"this Pillow cannot write {given}")
    with pytest.raises(InvalidArgument) as caught:
        read_image(data)
    error: Any = caught.value
    assert f"got the format {name}" in str(error) and "PNG, JPEG, WebP, GIF or BMP" in str(error) and error.hint

"""Checks of an image file's structure that bound the time of its decoder. No pixel is decoded and nothing is inflated.

The time of a decoder is proportional to the pixels, with two exceptions, which these checks count. Each scan of a JPEG
visits every block of the image. Pillow reads segments, chunks and blocks one by one in Python.
"""

from __future__ import annotations

import re

from ..errors import InvalidArgument

#: Maximum number of scans of a JPEG, and of scans times pixels. Encoders write about 10 scans; libjpeg-turbo's own
#: fuzzer stops at 500.
MAX_SCANS, MAX_SCANNED_PIXELS = 100, 1 << 31
#: Maximum number of segments before the first scan of a JPEG, their bytes, and bytes between them that belong to none.
MAX_SEGMENTS, MAX_HEAD, MAX_JUNK = 4096, 16 << 20, 1 << 16
#: Maximum number of chunks of a PNG.
MAX_CHUNKS = 1 << 16
#: Maximum number of blocks before the first frame of a GIF.
MAX_BLOCKS = 1 << 13
#: Maximum number of pixels of a run-length-encoded BMP, which Pillow decodes in Python.
MAX_RLE_PIXELS = 1 << 22

_SOS, _EOI, _SOI = 0xDA, 0xD9, 0xD8
#: The end of a marker: its last fill byte, and the byte of its type (0 would be a stuffed zero, which is no marker). An
#: expression that also matched the other fill bytes would take quadratic time for fill bytes without an end.
_MARKER = re.compile(rb"\xff([^\xff\x00])", re.DOTALL)
#: A marker other than a restart marker. Restart markers are part of the entropy-coded data of a scan.
_SEGMENT = re.compile(rb"\xff([^\xff\x00\xd0-\xd7])", re.DOTALL)


def check_head(data: bytes, name: str) -> None:
    """Check the parts of a file that Pillow reads when it opens the file.

    Args:
        data: content of the file, in any format.
        name: name of the image, for error messages.

    Raises:
        InvalidArgument: the file has more parts than allowed.
    """
    if data.startswith(b"\xff\xd8\xff"):
        _check_segments(data, name)
    elif data.startswith(b"\x89PNG\r\n\x1a\n"):
        _check_chunks(data, name)
    elif data.startswith((b"GIF87a", b"GIF89a")):
        _check_blocks(data, name)


def png_size(data: bytes) -> tuple[int, int] | None:
    """Return the width and height that the header of a PNG states, or None for another file."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n") or data[12:16] != b"IHDR" or len(data) < 24:
        return None
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def check_scans(data: bytes, pixels: int, name: str) -> None:
    """Check the number of scans of a JPEG.

    Args:
        data: content of the file.
        pixels: number of pixels of the image.
        name: name of the image, for error messages.

    Raises:
        InvalidArgument: the file has too many scans.
    """
    most = min(MAX_SCANS, max(MAX_SCANNED_PIXELS // max(pixels, 1), 1))
    # other segments may contain the bytes of the marker, too
    if data.count(b"\xff\xda") > most and _count_scans(data, most) > most:
        raise InvalidArgument(param=name, got=f"a JPEG file of {pixels:,} pixels and more than {most} scans",
                              allowed=f"a JPEG file with at most {MAX_SCANS} scans, and {MAX_SCANNED_PIXELS:,} pixels "
                                      "in all scans", hint="Save it again as a baseline JPEG or a PNG")


def check_run_lengths(compression: object, pixels: int, name: str) -> None:
    """Check the size of a run-length-encoded BMP.

    Args:
        compression: compression method of the BMP, as in its header.
        pixels: number of pixels of the image.
        name: name of the image, for error messages.

    Raises:
        InvalidArgument: the image is run-length-encoded and too large.
    """
    if compression in (1, 2) and pixels > MAX_RLE_PIXELS:
        raise InvalidArgument(param=name, got=f"a run-length-encoded BMP file of {pixels:,} pixels",
                              allowed=f"a BMP file without compression, or of at most {MAX_RLE_PIXELS:,} pixels")


def _count_scans(data: bytes, most: int) -> int:
    """Return the number of scans, at most ``most + 1``. Follows the segments as libjpeg does, up to the end marker."""
    scans, at = 0, 2
    while (found := _SEGMENT.search(data, at)) is not None:
        marker, at = found[1][0], found.end()
        if marker == _EOI:
            break
        if marker in (1, _SOI):  # markers without a length
            continue
        if marker == _SOS:
            scans += 1
            if scans > most:
                break
        at += int.from_bytes(data[at:at + 2], "big")
    return scans


def _check_segments(data: bytes, name: str) -> None:
    at, junk, count = 2, 0, 0
    while (found := _MARKER.search(data, at)) is not None:
        marker, junk = found[1][0], junk + found.start(1) - at - 1
        if junk > MAX_JUNK:
            raise _too_many(name, "a JPEG file", f"{MAX_JUNK:,} bytes between its segments")
        at = found.end()
        if marker in (_SOS, _EOI):
            break
        if marker <= 1 or 0xD0 <= marker <= _SOI:
            continue
        count += 1
        at += int.from_bytes(data[at:at + 2], "big")
        if count > MAX_SEGMENTS or at > MAX_HEAD:
            raise _too_many(name, "a JPEG file",
                            f"{MAX_SEGMENTS:,} segments or {MAX_HEAD:,} bytes before its first scan")


def _check_chunks(data: bytes, name: str) -> None:
    at, count, profiles = 8, 0, 0
    while at + 8 <= len(data):
        kind = data[at + 4:at + 8]
        count += 1
        profiles += kind == b"iCCP"
        if count > MAX_CHUNKS or profiles > 1:
            raise _too_many(name, "a PNG file", f"{MAX_CHUNKS:,} chunks and one colour profile")
        if kind == b"IEND":
            break
        at += 12 + int.from_bytes(data[at:at + 4], "big")


def _check_blocks(data: bytes, name: str) -> None:
    at, count = 13 + ((3 << (data[10] & 7) + 1) if len(data) > 10 and data[10] & 128 else 0), 0
    while at < len(data) and data[at] == 0x21:
        at += 2
        while at < len(data) and data[at]:
            at, count = at + 1 + data[at], count + 1
            if count > MAX_BLOCKS:
                raise _too_many(name, "a GIF file", f"{MAX_BLOCKS:,} blocks before its first frame")
        at += 1


def _too_many(name: str, kind: str, most: str) -> InvalidArgument:
    return InvalidArgument(param=name, got=f"{kind} with more than {most}", allowed=f"{kind} with at most {most}",
                           hint="Save the image again without metadata")

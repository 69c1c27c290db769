"""Image files that are small and expensive to decode, assembled from bytes."""

import io
import re
import struct
import zlib

import numpy as np
from PIL import Image


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(width: int, height: int, seed: int = 1) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3)).astype(np.uint8))


def with_scans(scans: int, width: int = 64, height: int = 64, hide: bool = False) -> bytes:
    """A progressive JPEG whose last scan is repeated until it has this many. ``hide``: also append scans after the end
    marker and inside a segment, where no decoder sees them."""
    flat = Image.new("RGB", (width, height), (90, 120, 200))
    data = saved(flat, "JPEG", progressive=True, quality=60)
    starts = [found.start() for found in re.finditer(b"\xff\xda", data)]
    last = data[starts[-1]:-2]
    more = last * (scans - len(starts))
    if not hide:
        return data[:-2] + more + data[-2:]
    hidden = b"\xff\xda" * 500
    comment = b"\xff\xfe" + struct.pack(">H", len(hidden) + 2) + hidden
    return data[:2] + comment + data[2:-2] + more + data[-2:] + hidden


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, before: bytes = b"", bits: int = 1) -> bytes:
    """A black PNG of this size, with chunks before its pixels."""
    row = b"\0" + bytes((width * bits + 7) // 8)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)) + before \
        + chunk(b"IDAT", zlib.compress(row * height, 1)) + chunk(b"IEND", b"")


def run_length_bmp(width: int, height: int) -> bytes:
    """A BMP of one pixel per row, which Pillow fills up in a Python loop."""
    body = b"\1\1\0\0" * height + b"\0\1"
    palette = bytes(range(256)) * 4
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(body), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 54 + len(palette) + len(body), 0, 0, 54 + len(palette)) + head + palette + body

"""The orientation of an image file, without Pillow's parser of EXIF data.

Pillow's parser writes a warning for each invalid entry to the standard error, and remembers the text of each: a file of
720 KB made 120,000 lines. This module reads the one tag that matters.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import Any

from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

_ORIENTATION = 274
#: Types of integers in TIFF -> their formats for :mod:`struct`.
_FORMATS = {3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 13: "I"}
#: Orders of bytes, by the first four bytes of EXIF data. The last two are wrong, and Pillow reads them.
_ORDERS = {b"II*\0": "<", b"MM\0*": ">", b"MM*\0": ">", b"II\0*": "<"}
_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90}
#: Keys of ``Image.info`` with metadata that may state an orientation.
_METADATA = ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp")


class Jpeg(JpegImageFile):
    """A JPEG file. Its EXIF data is not parsed when it is opened, and neither is its list of further images (MPF)."""

    def getexif(self) -> Image.Exif:
        """Return no EXIF data."""
        return Image.Exif()


def upright(image: Image.Image) -> Image.Image:
    """Return a decoded file, rotated as its metadata says, and remove the metadata."""
    return _without_metadata(rotated(image, orientation(image.info)))


def rotated(image: Image.Image, number: int) -> Image.Image:
    """Return an image that is rotated as an orientation says: ``image`` itself if it is upright, else a new image
    without the metadata, which would rotate it again."""
    found = _TRANSPOSITIONS.get(number)
    return image if found is None else _without_metadata(image.transpose(found))


def _without_metadata(image: Image.Image) -> Image.Image:
    for key in _METADATA:
        image.info.pop(key, None)
    return image


def of_caller_image(image: Image.Image) -> int:
    """Return the orientation of a caller's image, 1 to 8. Must not run in two threads for one image: Pillow marks EXIF
    data as parsed before it parses them.

    Pillow's parser is asked only if the image has no stored metadata; it then has the orientation that the caller has
    set with ``getexif()``. Beside stored metadata, Pillow's public API does not tell whether the caller has set one.
    """
    if any(key in image.info for key in _METADATA):
        return orientation(image.info)
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # invalid EXIF data: do not rotate
        return 1


def orientation(info: Mapping[Any, Any]) -> int:
    """Return the orientation of an image, 1 to 8: of its EXIF data, else of its XMP data, else 1.

    Args:
        info: ``Image.info`` of the image. Pillow stores metadata there without parsing it.
    """
    data = info.get("exif")
    if data is None and isinstance(text := info.get("Raw profile type exif"), str):  # a text of ImageMagick
        try:
            data = bytes.fromhex("".join(text.split("\n", 3)[3:]))
        except ValueError:
            return 1
    found = _of_exif(data) if isinstance(data, bytes) else None
    if found is None:
        xmp = info.get("XML:com.adobe.xmp") or info.get("xmp") or b""
        match = _XMP.search(xmp.encode(errors="replace") if isinstance(xmp, str) else xmp)
        found = 1 if match is None else int(match[1])
    return found if 1 <= found <= 8 else 1


def _of_exif(data: bytes) -> int | None:
    """Return the orientation in EXIF data, the last one if there are several; None: it has none."""
    start = 0
    while start < 12 and data.startswith(b"Exif\0\0", start):
        start += 6
    data = data[start:]
    order = _ORDERS.get(data[:4])
    if order is None or len(data) < 8:
        return None
    at = int(struct.unpack_from(order + "I", data, 4)[0])
    if at + 2 > len(data):
        return None
    count = min(struct.unpack_from(order + "H", data, at)[0], (len(data) - at - 2) // 12)
    found: int | None = None
    for tag, kind, number, offset in struct.iter_unpack(order + "HHII", data[at + 2:at + 2 + 12 * count]):
        at += 12
        if tag == _ORIENTATION and kind in _FORMATS and number:
            form = order + _FORMATS[kind]
            size = number * struct.calcsize(form)
            place = offset if size > 4 else at - 2  # the entry holds up to four bytes, else their place
            if place + size <= len(data):
                found = int(struct.unpack_from(form, data, place)[0])
    return found


__all__ = ["Jpeg", "of_caller_image", "orientation", "rotated", "upright"]

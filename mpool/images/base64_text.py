"""Image files as text: base64, and ``data:`` URLs (RFC 2397), as clients of other services write them."""

from __future__ import annotations

import base64
from urllib.parse import unquote_to_bytes

#: First characters of the base64 text of a PNG, JPEG, WebP or GIF file. A BMP file has no such distinctive beginning:
#: its base64 needs a ``data:`` URL.
STARTS = ("iVBORw0KGgo", "/9j/", "_9j_", "UklGR", "R0lGODdh", "R0lGODlh")
#: The alphabet for URLs (RFC 4648) -> the standard one, and the characters that are skipped.
_STANDARD, _SKIPPED = bytes.maketrans(b"-_", b"+/"), b" \t\r\n\f\v"


def is_data_url(text: str) -> bool:
    """Return True for a ``data:`` URL. White space before it has no meaning, as before any URL (WHATWG URL)."""
    return text[:64].lstrip()[:5].lower() == "data:"


def decode(text: str) -> bytes:
    """Return the bytes of a file.

    Line breaks and spaces are skipped, the padding may be missing, and both alphabets of base64 are read. A ``data:``
    URL may have any media type or none, and parameters such as a charset. Without ``;base64`` at the end of its head,
    its data are percent-encoded bytes.

    Args:
        text: base64, or a ``data:`` URL.

    Raises:
        ValueError: the text is neither.
    """
    if is_data_url(text):
        head, comma, text = text.partition(",")
        if not comma:
            raise ValueError("a data: URL without data")
        if head.lower().rpartition(";")[2].strip() != "base64":
            return unquote_to_bytes(text)
        if "%" in text:
            text = unquote_to_bytes(text).decode("ascii")
    data = text.encode("ascii").translate(_STANDARD, _SKIPPED).rstrip(b"=")  # split() would make an object of each line
    return base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)


__all__ = ["STARTS", "decode", "is_data_url"]

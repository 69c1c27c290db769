"""Reads images from paths, URLs, bytes, base64, Pillow images and arrays.

PNG, JPEG, WebP, GIF and BMP are decoded, by Pillow, on the threads of :data:`mpool.host.native_calls.IMAGES`. Before
the pixels are decoded, the number of bytes, the format, the number of pixels, the sides, the aspect ratio, the number
of frames and the structure (:mod:`mpool.images.structure`) are checked. Errors have fixed texts; a decoder's message
about a corrupted file is never passed on.
"""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Set
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

import numpy as np

from ..checks import hint_for_set, is_table
from ..errors import FileError, InvalidArgument, LimitError, MpoolError
from ..host import native_calls
from ..host.address_space import require_if_limited
from ..host.resources import list_of_caller, of_caller
from ..models.files import close, open_regular, unreadable
from . import base64_text, structure
from .memory import ALPHA_BYTES, BYTES_PER_PIXEL, WEBP_BYTES, reserved

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

    ImageInput = str | os.PathLike[str] | bytes | bytearray | memoryview | Image | NDArray[Any]
else:
    ImageInput = Any

T = TypeVar("T")

#: Formats that are decoded, by Pillow's names.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
FORMAT_WORDS = "PNG, JPEG, WebP, GIF or BMP"
#: First bytes of formats that are refused -> their names, for the error message. Their decoders are large, and images
#: from strangers rarely use them.
_REFUSED = {b"II*\0": "TIFF", b"MM\0*": "TIFF", b"II+\0": "TIFF", b"MM\0+": "TIFF", b"8BPS": "PSD", b"%!PS": "EPS",
            b"\xc5\xd0\xd3\xc6": "EPS", b"\0\0\1\0": "ICO", b"\0\0\0\x0cjP": "JPEG 2000",
            b"\xff\x4f\xff\x51": "JPEG 2000", b"%PDF": "PDF", b"\xff\x0a": "JPEG XL",
            b"\0\0\0\x0cJXL ": "JPEG XL", b"qoif": "QOI", b"DDS ": "DDS", b"<svg": "SVG", b"<?xml": "SVG"}
#: Brands of ISO media files, at byte 8 -> their names.
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIC", b"msf1": "HEIC"}
_INPUTS = "a path, a URL, bytes, base64 text, a Pillow image or an array [height, width] or [height, width, 1, 3 or 4]"
MAX_BYTES = 1 << 26
MAX_PIXELS = 1 << 26
MIN_SIDE, MAX_SIDE = 1, 1 << 15
#: Number of bytes of an array that is resized in 1 to 2 ms: less work than this stays on the calling thread.
_SMALL = 1 << 20
#: Number of array elements that are converted to uint8 at a time.
_AT_ONCE = 1 << 18
#: Maximum ratio of the longer side to the shorter.
MAX_RATIO = 200
#: Minimum length of base64 without a ``data:`` URL: a GIF file of one pixel has 35 bytes.
_MIN_BASE64 = 40
#: Background for images with transparency.
_WHITE = (255, 255, 255, 255)


def images_of(images: Any, most: int,
              hint: str = "max_inputs= or PoolConfig.max_embed_inputs raises the limit") -> list[Any] | None:
    """Return the images of a request as a list, or None if ``images`` is a single image.

    Args:
        images: an image or a list of images.
        most: maximum number of images.
        hint: how to get below the limit or raise it, for the error message.

    Raises:
        InvalidArgument: ``images`` is neither an image nor a list.
        LimitError: there are more than ``most`` images.
    """
    if isinstance(images, np.ndarray):
        if images.ndim in (2, 3):
            return None
    elif isinstance(images, (str, bytes, bytearray, memoryview, os.PathLike)) or _is_pillow(images):
        return None
    if isinstance(images, (Mapping, Set)) or not hasattr(images, "__len__") or not hasattr(images, "__iter__") \
            or getattr(images, "ndim", 4) != 4 and not _is_column(images) or is_table(images):
        raise InvalidArgument(param="images", got=_kind(images), allowed=f"{_INPUTS}, or a list of them",
                              hint=hint_for_set(images) if isinstance(images, Set) else None)
    with of_caller():
        size = len(images)
    if size > most:
        raise LimitError(f"`images` must hold at most {most:,} images, got {size:,}", param="images", hint=hint)
    return list_of_caller(images.to_pylist() if hasattr(images, "to_pylist") else images)


def _is_column(value: Any) -> bool:
    """Return True for a Series of pandas or an array of objects or texts, of one dimension."""
    return getattr(value, "ndim", 0) == 1 and getattr(getattr(value, "dtype", None), "kind", "") in ("O", "U", "T")


def read_image(image: Any, name: str = "image", *, allow_urls: bool = False,
               timeout: float | None = None) -> Image:
    """Read an image as a Pillow image: decoded, RGB, rotated as its EXIF data says.

    As in transformers, transparent pixels are composited on white, values above 255 of greyscale images with 16 bits
    become 255, and the first frame of a GIF or WebP is read. CMYK, palette and 1-bit images are converted to RGB.
    The EXIF data of a Pillow image is that of ``info["exif"]``; changes of ``getexif()`` count only without it.

    Args:
        image: a path; a URL; the bytes of a file; their base64 text or a ``data:`` URL; a Pillow image; an array
            ``[height, width]`` or ``[height, width, 1, 3 or 4]`` of uint8, or of floats from 0 to 1.
        name: name of the image, for error messages.
        allow_urls: fetch http and https URLs.
        timeout: maximum duration of a fetch in seconds; None: 30 s.

    Raises:
        InvalidArgument: ``image`` is none of these, is corrupted, or is beyond a limit.
        FileError: the path cannot be read.
        DownloadError: the URL cannot be fetched.
        Timeout: the decoder took too long; see :mod:`mpool.host.native_calls`.
        Overloaded: all threads for images are stuck in a decoder.
    """
    return convert_image(image, name, _unchanged, allow_urls=allow_urls, timeout=timeout)


def check_image(image: Any, name: str, allow_urls: bool, read: bool) -> None:
    """Check an image for which a model will be downloaded. A URL is not fetched: only if it may be.

    Args:
        image: as for :func:`read_image`.
        name: name of the image, for error messages.
        allow_urls: as for :func:`read_image`.
        read: True: read it, and check all that :func:`read_image` checks before it decodes pixels. False: check its
            type, and if it is a path, that the file can be opened.

    Raises:
        InvalidArgument, FileError, Timeout, Overloaded: as :func:`read_image`.
    """
    path, kind = image, _kind_of_text(image, name, allow_urls) if isinstance(image, str) else "path"
    if kind == "url":
        return
    if isinstance(image, np.ndarray):
        return _converted(image, name, _nothing) if read else _check_array(image, name)
    if _is_pillow(image):
        _check_size(image.width, image.height, name)
        return _check_mode(image, name)
    if isinstance(image, os.PathLike):
        path = os.fspath(image)
    elif not isinstance(image, (str, bytes, bytearray, memoryview)):
        raise InvalidArgument(param=name, got=_kind(image), allowed=_INPUTS)
    if read:
        data = bytes(image) if not isinstance(image, (str, os.PathLike)) else \
            _from_file(path, name) if kind == "path" else _from_base64(path, name)
        native_calls.IMAGES.run(_check_file, data, name)
    elif isinstance(image, (str, os.PathLike)) and kind == "path":
        close(_open_file(path, name)[0])


def _check_file(data: bytes, name: str) -> None:
    _opened(data, name).close()


def convert_image(image: Any, name: str, convert: Callable[[Image], T], *, allow_urls: bool,
                  timeout: float | None) -> T:
    """Return ``convert(read_image(image, ...))``. Reads the file on this thread; decodes and converts the image on a
    thread of :data:`mpool.host.native_calls.IMAGES`.

    The memory of the decoded image counts towards :data:`mpool.images.memory.MAX` until ``convert`` returns.
    """
    if isinstance(image, str):
        image = _from_text(image, name, allow_urls, timeout)
    elif isinstance(image, os.PathLike):
        image = _from_file(os.fspath(image), name)
    if isinstance(image, np.ndarray):
        if image.nbytes <= _SMALL:
            return _converted(image, name, convert)
    elif isinstance(image, (bytes, bytearray, memoryview)):
        image = bytes(image)
    elif not _is_pillow(image):
        raise InvalidArgument(param=name, got=_kind(image), allowed=_INPUTS)
    return native_calls.IMAGES.run(_converted, image, name, convert)


def _unchanged(image: Image) -> Image:
    return image


def _nothing(image: Image) -> None:
    return None


def _converted(image: Any, name: str, convert: Callable[[Image], T]) -> T:
    """Decode an array, a Pillow image or the bytes of a file, and convert the result."""
    if isinstance(image, np.ndarray):
        _check_array(image, name)
        alpha = ALPHA_BYTES if image.ndim == 3 and image.shape[2] == 4 else 0
        with reserved(image.shape[0] * image.shape[1], BYTES_PER_PIXEL + alpha):
            return convert(_from_array(image, name))
    if _is_pillow(image):
        _check_size(image.width, image.height, name)
        with reserved(image.width * image.height, _bytes_per_pixel(image)):
            return convert(_decoded(image, name, from_caller=True))
    with _opened(image, name) as opened, reserved(opened.width * opened.height, _bytes_per_pixel(opened)):
        return convert(_decoded(opened, name))


def _bytes_per_pixel(image: Image) -> int:
    """Return the bytes per pixel that decoding and converting an image takes, before it is decoded."""
    return BYTES_PER_PIXEL + (ALPHA_BYTES if _has_alpha(image) else 0) + (WEBP_BYTES if image.format == "WEBP" else 0)


def _has_alpha(image: Image) -> bool:
    bands = image.getbands()
    return "A" in bands or "a" in bands or image.info.get("transparency") is not None


def _is_pillow(value: Any) -> bool:
    # A caller with a Pillow image has imported Pillow. If another thread is importing it, the module is incomplete.
    kind = getattr(sys.modules.get("PIL.Image"), "Image", None)
    return kind is not None and isinstance(value, kind)


def _kind(value: Any) -> str:
    return f"an array of {value.ndim} dimensions" if isinstance(value, np.ndarray) else type(value).__name__


# ---- sources ---------------------------------------------------------------------------------------------------------

def _kind_of_text(text: str, name: str, allow_urls: bool) -> Literal["base64", "url", "path"]:
    """Return what a text is.

    Raises:
        InvalidArgument: it is empty, or a URL that must not be fetched.
    """
    if not text:
        raise InvalidArgument(param=name, got="an empty string", allowed="a path, a URL or base64 of an image")
    if base64_text.is_data_url(text):
        return "base64"
    scheme, mark, _ = text[:16].partition("://")
    if mark:
        if scheme.lower() not in ("http", "https"):
            raise InvalidArgument(param=name, got=f"a URL with the scheme {scheme}", allowed="an http or https URL")
        if not allow_urls:
            raise InvalidArgument(f"`{name}` is a URL, and fetching is not allowed", param=name, got="a URL",
                                  allowed="a path, bytes or base64 of an image",
                                  hint="Pass allow_urls=True to fetch it")
        check_url(text, name)
        return "url"
    if len(text) >= _MIN_BASE64 and text.lstrip().startswith(base64_text.STARTS) \
            and not (len(text) < 4096 and os.path.exists(text)):
        return "base64"
    return "path"


def check_url(url: str, name: str) -> None:
    """Raise InvalidArgument for a URL that no server can have. Such a URL is the caller's mistake, not one of a server
    that cannot be reached."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets without an IPv6 address, or a port that is no number up to 65,535
        valid = False
    if not valid or " " in url or not url.isprintable():
        raise InvalidArgument(param=name, got="another URL", allowed="an http or https URL with a host, without "
                              "spaces, and with a port of 1 to 65,535 if it has one")


def _from_text(text: str, name: str, allow_urls: bool, timeout: float | None) -> bytes:
    kind = _kind_of_text(text, name, allow_urls)
    if kind == "base64":
        return _from_base64(text, name)
    if kind == "path":
        return _from_file(text, name)
    from .fetching import fetch

    return fetch(text, name, MAX_BYTES, timeout)


def _from_base64(text: str, name: str) -> bytes:
    if len(text) > MAX_BYTES // 3 * 4 + 4:
        raise InvalidArgument(param=name, got=f"more than {MAX_BYTES:,} bytes",
                              allowed=f"at most {MAX_BYTES:,} bytes")
    try:
        return base64_text.decode(text)
    except ValueError:
        raise InvalidArgument(param=name, got="invalid base64", allowed=f"base64 of a {FORMAT_WORDS} file") from None


def _open_file(path: str | bytes, name: str) -> tuple[int, int]:
    """Open the file of an image. Returns its descriptor and its size in bytes."""
    shown = os.fsdecode(path)
    if "\0" in shown or len(shown) > 4096:
        raise InvalidArgument(param=name, got="a string that is none of these",
                              allowed="a path, a URL or base64 of an image")
    try:
        return open_regular(shown)
    except MpoolError as error:
        if isinstance(error, FileError):
            raise FileError(f"`{name}` was read as a path: {error.message}", param=name,
                            hint=error.hint or "A string is a path, a URL or base64 of an image") from None
        raise InvalidArgument(param=name, got="a path that is not a regular file",
                              allowed=f"a {FORMAT_WORDS} file") from None


def _from_file(path: str | bytes, name: str) -> bytes:
    fd, size = _open_file(path, name)
    with os.fdopen(fd, "rb", closefd=True) as file:
        if size > MAX_BYTES:
            raise InvalidArgument(param=name, got=f"{size:,} bytes", allowed=f"at most {MAX_BYTES:,} bytes")
        try:
            return file.read(MAX_BYTES + 1)
        except OSError as error:
            raise unreadable(os.fsdecode(path), error) from error


# ---- decoding --------------------------------------------------------------------------------------------------------

def _opened(data: bytes, name: str) -> Image:
    """Open a file without decoding its pixels, and check everything that bounds the decoder's time and memory."""
    from PIL import Image, UnidentifiedImageError

    if not data or len(data) > MAX_BYTES:
        raise InvalidArgument(param=name, got=f"{len(data):,} bytes", allowed=f"1 to {MAX_BYTES:,} bytes")
    structure.check_head(data, name)
    if (size := structure.png_size(data)) is not None:
        _check_size(*size, name)
    from .orientation import Jpeg

    try:
        opened: Image.Image
        if data.startswith(b"\xff\xd8\xff"):
            opened = Jpeg(io.BytesIO(data))
        else:
            opened = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        count = re.search(r"(\d+) pixels", str(error))
        raise InvalidArgument(param=name, got=f"{int(count[1]):,} pixels" if count else "too many pixels",
                              allowed=f"at most {MAX_PIXELS:,} pixels") from None
    except (UnidentifiedImageError, SyntaxError):  # a SyntaxError of a JPEG file
        raise InvalidArgument(param=name, got=_format_of(data), allowed=f"a {FORMAT_WORDS} image",
                              hint="For other formats, open the file with Pillow and pass the Pillow image") from None
    except MemoryError:
        raise
    except Exception:  # a decoder may raise anything for a corrupted file; its message is not passed on
        raise _corrupted(name) from None
    pixels = opened.width * opened.height
    _check_size(*opened.size, name)
    frames = getattr(opened, "n_frames", 1) if opened.format == "PNG" else 1  # GIF and WebP: the first frame is read
    if frames > 1:
        raise InvalidArgument(param=name, got=f"{frames} frames", allowed="an image of one frame",
                              hint="Pass one of the frames")
    if data.startswith(b"\xff\xd8"):
        structure.check_scans(data, pixels, name)
    elif opened.format == "BMP":
        structure.check_run_lengths(opened.info.get("compression"), pixels, name)
    return opened


def _format_of(data: bytes) -> str:
    """Return the format of a file that is refused, as a phrase."""
    name = _BRANDS.get(data[8:12]) if data[4:8] == b"ftyp" else \
        next((name for head, name in _REFUSED.items() if data.startswith(head)), None)
    return "another format" if name is None else f"the format {name}"


def _corrupted(name: str) -> InvalidArgument:
    return InvalidArgument(param=name, got="a truncated or corrupted file",
                           allowed=f"a complete {FORMAT_WORDS} file")


def _check_size(width: int, height: int, name: str) -> None:
    if width * height > MAX_PIXELS:
        allowed = f"at most {MAX_PIXELS:,} pixels in total"
    elif not MIN_SIDE <= min(width, height) or max(width, height) > MAX_SIDE:
        allowed = f"{MIN_SIDE} to {MAX_SIDE:,} pixels per side"
    elif max(width, height) > MAX_RATIO * min(width, height):
        allowed = f"an image with an aspect ratio of at most {MAX_RATIO}"
    else:
        return
    raise InvalidArgument(param=name, got=f"{width:,} x {height:,} pixels", allowed=allowed)


#: Serialise loading of the caller's images: Pillow decodes their pixels and parses their metadata lazily, which is not
#: thread-safe. An image's address selects its lock, so a decoder that never returns blocks few other images.
_LOADING = [threading.Lock() for _ in range(64)]


def _decoded(image: Image, name: str, from_caller: bool = False) -> Image:
    """Convert to RGB, rotated as the EXIF data says. ``from_caller``: True for the caller's own image, which stays
    unchanged."""
    from .orientation import of_caller_image, rotated, upright

    try:
        if from_caller:
            with _LOADING[id(image) // 16 % len(_LOADING)]:
                image.load()
                orientation = of_caller_image(image)
            turned = rotated(image, orientation)
        else:
            image.load()
            turned = upright(image)
        found = _rgb(turned, name)
    except (MpoolError, MemoryError):
        raise
    except Exception:
        # decoders report a lack of memory as they report a damaged file
        require_if_limited(image.width * image.height * BYTES_PER_PIXEL, "an image")
        raise _corrupted(name) from None
    return found.copy() if found is image else found


def _rgb(image: Image, name: str) -> Image:
    from PIL import Image

    if image.mode == "RGB":
        return image if image.info.get("transparency") is None else _on_white(image)
    if image.mode.startswith("I"):
        # 16 or 32 bits: Pillow's conversion to RGB, which transformers uses, clips to 255
        return Image.fromarray(np.clip(np.asarray(image), 0, 255).astype(np.uint8)).convert("RGB")
    _check_mode(image, name)
    if _has_alpha(image):
        return _on_white(image)
    return image.convert("RGB")


def _check_mode(image: Image, name: str) -> None:
    if image.mode == "F":
        raise InvalidArgument(param=name, got="a Pillow image of floats",
                              allowed="an image with 8 or 16 bits per channel",
                              hint="Pass an array of floats from 0 to 1")


def _on_white(image: Image) -> Image:
    from PIL import Image

    if image.mode == "La":  # Pillow converts premultiplied greyscale only to LA
        image = image.convert("LA")
    layer = image if image.mode == "RGBA" else image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, _WHITE), layer).convert("RGB")


def _from_floats(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Convert floats from 0 to 1 to uint8, in blocks of rows: a float64 copy of the whole would take 8 times the
    result's memory."""
    found = np.empty(array.shape, dtype=np.uint8)
    rows = max(1, _AT_ONCE // array[0].size)
    for top in range(0, len(array), rows):
        part = array[top:top + rows].astype(np.float64)
        part *= 255
        np.rint(part, out=part)
        found[top:top + rows] = part
    return found


def _check_array(array: NDArray[Any], name: str) -> None:
    """Check the shape and the size of an array, not its values."""
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        first = array.ndim == 3 and array.shape[0] in (1, 3, 4)
        raise InvalidArgument(param=name, got=f"an array of shape {array.shape}",
                              allowed="an array [height, width] or [height, width, 1, 3 or 4]",
                              hint='Channels come last: array.transpose(1, 2, 0)' if first else None)
    _check_size(array.shape[1], array.shape[0], name)


def _from_array(array: NDArray[Any], name: str) -> Image:
    from PIL import Image

    if array.dtype.kind == "f":
        low, high = float(array.min()), float(array.max())
        if not (low >= 0 and high <= 1):  # NaN is in no range
            raise InvalidArgument(param=name, got=f"an array of {array.dtype.name} from {low:g} to {high:g}",
                                  allowed="an array of floats from 0 to 1, or uint8")
        array = _from_floats(array)
    elif array.dtype != np.uint8:
        raise InvalidArgument(param=name, got=f"an array of {array.dtype.name}",
                              allowed="an array of uint8, or of floats from 0 to 1")
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    return _rgb(Image.fromarray(np.ascontiguousarray(array)), name)


def _after_fork_in_child() -> None:
    _LOADING[:] = [threading.Lock() for _ in _LOADING]  # a thread of the parent may be decoding an image


os.register_at_fork(after_in_child=_after_fork_in_child)

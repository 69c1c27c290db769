"""Reading images from every kind of source, refusing damaged and malicious ones, and preparing them, compared bit for
bit with transformers' processors."""

import base64
import contextlib
import io
import ipaddress
import socket
import struct
import threading
import tracemalloc
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

import mpool
from mpool.models import ImageSettings
from mpool.errors import DownloadError, FileError, InvalidArgument, LimitError
from mpool.images import fetching, loading
from mpool.images.loading import images_of, read_image
from mpool.images.preparing import prepare

import imagemodels

Image = pytest.importorskip("PIL.Image")


def example(seed: int = 1, height: int = 20, width: int = 30) -> np.ndarray:
    return imagemodels.image(seed, height, width)


def encoded(image: Any, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, format, **options)
    return file.getvalue()


def pixels_of(image: Any, **options: Any) -> np.ndarray:
    found = read_image(image, **options)
    assert found.mode == "RGB"
    return np.asarray(found)


# ---- sources -------------------------------------------------------------------------------------------------------

def test_every_source_yields_the_same_pixels(tmp_path: Path) -> None:
    wanted = example()
    data = encoded(wanted)
    path = tmp_path / "image.png"
    path.write_bytes(data)
    text = base64.b64encode(data).decode()
    wrapped = base64.encodebytes(data).decode()
    opened = Image.open(io.BytesIO(data))
    for source in (path, str(path), data, bytearray(data), memoryview(data), text, wrapped,
                   f"data:image/png;base64,{text}", f"DATA:;BASE64,{text}", opened, wanted,
                   wanted / 255, (wanted / 255).astype(np.float32)):
        assert np.array_equal(pixels_of(source), wanted), type(source)
    assert np.array_equal(np.asarray(opened), wanted), "a caller's image is left as it is"


@pytest.mark.parametrize("change", [
    lambda text: text.replace("+", "-").replace("/", "_"), lambda text: text.rstrip("="), lambda text: "\n " + text,
    lambda text: "data:text/plain;charset=utf-8;base64," + text, lambda text: "data:image/png; base64," + text,
    lambda text: " \n\tdata:image/png;base64," + text,
    lambda text: "data:;base64," + text.replace("+", "%2B").replace("/", "%2F").replace("=", "%3d"),
    lambda text: "data:image/png," + "".join(f"%{byte:02x}" for byte in base64.b64decode(text))])
def test_forms_of_base64(change: Callable[[str], str]) -> None:
    """A file whose base64 has both signs and padding."""
    data = next(data for data in (encoded(example(seed)) for seed in range(50)) if len(data) % 3 == 1
                and b"+" in (text := base64.b64encode(data)) and b"/" in text)
    assert np.array_equal(np.asarray(read_image(change(base64.b64encode(data).decode()))), np.asarray(read_image(data)))


@pytest.mark.parametrize("format", ["PNG", "GIF", "WEBP", "JPEG"])
def test_base64_of_one_pixel(format: str) -> None:
    data = encoded(np.zeros((1, 1, 3), np.uint8), format)
    assert read_image(base64.b64encode(data).decode()).size == (1, 1)


def test_base64_of_jpeg_is_not_a_path() -> None:
    """Base64 of a JPEG file begins with a slash, like an absolute path."""
    data = encoded(example(), "JPEG")
    text = base64.b64encode(data).decode()
    assert text.startswith("/9j/")
    assert np.array_equal(pixels_of(text), pixels_of(data))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_arrays_of_floats(dtype: str) -> None:
    """Values are rounded as NumPy does, and the peak memory is little more than the result's."""
    given = np.random.default_rng(1).random((700, 900, 3)).astype(dtype)
    expected = np.rint(given.astype(np.float64) * 255).astype(np.uint8)
    tracemalloc.start()
    try:
        found = pixels_of(given)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(found, expected)
    assert most < 4 * expected.nbytes + (8 << 20), "a float64 copy would take 8 times the bytes of the result"


def test_grey_arrays_and_views() -> None:
    wanted = example()
    grey = wanted[:, :, 0]
    for given in (grey, grey[:, :, None], Image.fromarray(grey)):
        assert np.array_equal(pixels_of(given), np.repeat(grey[:, :, None], 3, axis=2))
    assert np.array_equal(pixels_of(wanted[::-1]), wanted[::-1])
    assert np.array_equal(pixels_of(wanted.transpose(1, 0, 2)), wanted.transpose(1, 0, 2))


def test_single_or_list(tmp_path: Path) -> None:
    one = example()
    for single in (one, one[:, :, 0], "path", b"bytes", tmp_path, Image.fromarray(one), bytearray(b"x")):
        assert images_of(single, 4) is None
    for several in ([one, "path"], (one,), np.stack([one, one]), []):
        assert len(images_of(several, 4) or []) == len(several)
    assert len(images_of([one] * 4, 4) or []) == 4
    for wrong in ({"a": one}, {1, 2}, 5, None, iter([one]), np.zeros(3), np.zeros((2, 2, 2, 2, 2))):
        with pytest.raises(InvalidArgument, match="^`images` must be "):
            images_of(wrong, 4)
    with pytest.raises(LimitError, match="`images` must hold at most 4 images, got 5"):
        images_of([one] * 5, 4)


@pytest.mark.parametrize("given, words", [
    (np.zeros((3, 20, 30), np.uint8), "shape"), (np.zeros((20, 30, 2), np.uint8), "shape"),
    (np.zeros((20, 30, 3), np.int32), "int32"), (np.zeros((20, 30, 3), bool), "bool"),
    (np.full((20, 30, 3), 1.5), "from 1.5 to 1.5"), (np.full((20, 30), np.nan), "nan"), (7, "int"), (None, "NoneType"),
    (np.zeros((0, 30, 3), np.uint8), "30 x 0 pixels"), ([1], "list")])
def test_invalid_images(given: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        read_image(given, "image 7")
    assert str(caught.value).startswith("image 7 must be") and caught.value.param == "image 7" and caught.value.allowed


def test_channels_first_gets_a_hint() -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_image(np.zeros((3, 20, 30), np.uint8))
    assert "transpose" in (caught.value.hint or "")


# ---- damaged and malicious images ----------------------------------------------------------------------------------

def png(width: int, height: int, body: bytes = b"", before: bytes = b"") -> bytes:
    """A PNG file with 1 bit per pixel whose header states this size."""
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + before + chunk(b"IDAT", body or zlib.compress(b"")) \
        + chunk(b"IEND", b"")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("width, height", [(8193, 8192), (10_000, 10_000), (100_000, 100_000), (2**31 - 1, 1000)])
def test_pixel_bombs_are_refused(width: int, height: int) -> None:
    """The header alone is enough to refuse the file: it has no pixel data."""
    with pytest.raises(InvalidArgument, match=f"at most 67,108,864 pixels in total, got {width:,} x {height:,} pixels"):
        read_image(png(width, height))


def test_the_maximum_number_of_pixels_is_accepted() -> None:
    """This image is one column narrower than the first one of the previous test."""
    rows = zlib.compress((b"\0" + bytes(8192 // 8)) * 8192)
    assert read_image(png(8192, 8192, rows)).size == (8192, 8192)


@pytest.mark.parametrize("width, height", [(52_800, 44), (32_769, 164), (401, 2), (0, 7), (7, 0)])
def test_sizes_out_of_range(width: int, height: int) -> None:
    with pytest.raises(InvalidArgument, match=f"must be .*, got {width:,} x {height:,} pixels"):
        read_image(png(width, height))
    if not width or not height:
        return
    with pytest.raises(InvalidArgument, match=f"must be .*, got {width:,} x {height:,} pixels"):
        read_image(np.zeros((height, width, 3), np.uint8))
    with pytest.raises(InvalidArgument, match=f"must be .*, got {width:,} x {height:,} pixels"):
        read_image(Image.new("RGB", (width, height)))


@pytest.mark.parametrize("width, height", [(2, 2), (400, 2), (2, 400), (32_768, 164)])
def test_the_limits_of_sizes_are_accepted(width: int, height: int) -> None:
    assert read_image(Image.new("RGB", (width, height))).size == (width, height)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_truncated_files(format: str) -> None:
    """A file truncated at any position is refused, with one of three fixed messages."""
    whole = encoded(example(2, 40, 50), format)
    for length in [*range(0, len(whole) - 40, 97), len(whole) - 40]:
        try:
            read_image(whole[:length])
        except InvalidArgument as error:
            assert any(words in str(error) for words in ("truncated or corrupted", "must be a PNG", "got 0 bytes"))
        else:
            raise AssertionError(f"{format} cut at {length} of {len(whole)} was read")


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("at", ["open", "load", "decoder"])
def test_a_lack_of_memory_is_no_damaged_file(format: str, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow raises MemoryError; the decoders of JPEG and WebP fail as they do for a damaged file."""
    from PIL import ImageFile

    def fail(*args: Any, **more: Any) -> Any:
        raise OSError("broken data stream when reading image file") if at == "decoder" else MemoryError

    def require(count: int, user: str) -> None:
        raise MemoryError(f"{user} needs {count} bytes of address space")

    data = encoded(example(), format)
    kind = type(Image.open(io.BytesIO(data)))
    if at == "open":
        monkeypatch.setattr(ImageFile.ImageFile, "__init__", fail)
    else:
        monkeypatch.setattr(kind, "load", fail)
    if at == "decoder":
        monkeypatch.setattr(loading, "require_if_limited", require)
    with mpool.Pool() as pool, pytest.raises(mpool.MemoryExhausted):
        pool.embed_image(data, "digits-clip")


def test_corrupted_file() -> None:
    whole = bytearray(encoded(example(2, 40, 50)))
    whole[len(whole) // 2] ^= 0xFF
    with pytest.raises(InvalidArgument, match="truncated or corrupted"):
        read_image(bytes(whole))


@pytest.mark.parametrize("format", ["TIFF", "PPM", "EPS", "ICO"])
def test_other_formats_with_a_png_name(tmp_path: Path, format: str) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(encoded(example(1, 32, 32), format))
    with pytest.raises(InvalidArgument, match="must be a PNG, JPEG, WebP, GIF or BMP"):
        read_image(path)


def test_psd_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="must be a PNG, JPEG, WebP, GIF or BMP"):
        read_image(b"8BPS" + b"\0\1" + bytes(200))


def test_compressed_chunks_are_not_inflated() -> None:
    """Text chunks and colour profiles that would inflate to 200 MiB."""
    packed = zlib.compress(bytes(200 << 20), 9)
    body = zlib.compress((b"\0" + bytes(4)) * 32)
    for bomb in (chunk(b"zTXt", b"key\0\0" + packed), chunk(b"iTXt", b"key\0\1\0\0\0" + packed)):
        with pytest.raises(InvalidArgument, match="truncated or corrupted"):
            read_image(png(32, 32, body, bomb))
    try:  # the profile is optional: the image may be read without it or refused
        assert read_image(png(32, 32, body, chunk(b"iCCP", b"key\0\0" + packed))).info.get("icc_profile") is None
    except InvalidArgument as error:
        assert "truncated or corrupted" in str(error)


def test_the_first_frame_of_a_webp_is_read() -> None:
    frames = [Image.fromarray(example(seed)) for seed in range(3)]
    data = encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    assert np.array_equal(np.asarray(read_image(data)), example(0))


@pytest.mark.parametrize("format", ["PNG"])
def test_several_frames_are_refused(format: str) -> None:
    frames = [Image.fromarray(example(seed)) for seed in range(3)]
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:])
    with pytest.raises(InvalidArgument, match="must be an image of one frame, got 3 frames"):
        read_image(data)


def test_modes() -> None:
    """CMYK, palette, greyscale and 16-bit images."""
    wanted = example()
    image = Image.fromarray(wanted)
    grey = np.asarray(image.convert("L"))
    three = np.repeat(grey[:, :, None], 3, axis=2)
    cmyk = image.convert("CMYK")
    assert np.array_equal(pixels_of(encoded(cmyk, "JPEG", quality=100)),
                          np.asarray(Image.open(io.BytesIO(encoded(cmyk, "JPEG", quality=100))).convert("RGB")))
    assert np.array_equal(pixels_of(cmyk), np.asarray(cmyk.convert("RGB")))
    palette = image.convert("P", palette=Image.Palette.ADAPTIVE, colors=64)
    assert np.array_equal(pixels_of(encoded(palette)), np.asarray(palette.convert("RGB")))
    assert np.array_equal(pixels_of(encoded(image.convert("L"))), three)
    assert np.array_equal(pixels_of(encoded(image.convert("1"))), np.asarray(image.convert("1").convert("RGB")))
    sixteen = Image.fromarray(grey.astype(np.uint16) * 3)
    clipped = np.minimum(three.astype(np.uint16) * 3, 255)
    assert np.array_equal(pixels_of(encoded(sixteen)), clipped)
    assert np.array_equal(pixels_of(Image.fromarray(grey.astype(np.int32) * 3)), clipped)
    assert np.array_equal(pixels_of(Image.fromarray(grey.astype(np.int32))), three)
    with pytest.raises(InvalidArgument, match="floats"):
        read_image(Image.fromarray(grey.astype(np.float32)))


def test_transparency_becomes_white() -> None:
    wanted = example()
    alpha = np.zeros(wanted.shape[:2], np.uint8)
    alpha[:, 10:] = 255
    rgba = np.dstack([wanted, alpha])
    expected = wanted.copy()
    expected[:, :10] = 255
    assert np.array_equal(pixels_of(encoded(rgba)), expected)
    assert np.array_equal(pixels_of(rgba), expected)
    assert np.array_equal(pixels_of(Image.fromarray(rgba)), expected)
    for mode in ("RGBa", "LA", "La"):  # "a": the colours are multiplied by alpha
        image = Image.fromarray(rgba).convert("RGBa" if mode == "RGBa" else "LA").convert(mode)
        wanted_here = expected if mode == "RGBa" else np.asarray(Image.fromarray(expected).convert("L").convert("RGB"))
        assert np.array_equal(pixels_of(image), wanted_here), mode
    clear = Image.new("P", (8, 8), 1)
    clear.putpalette([9, 9, 9, 200, 0, 0])
    assert (pixels_of(encoded(clear, transparency=1)) == 255).all()
    assert (pixels_of(encoded(clear)) == [200, 0, 0]).all()


@pytest.mark.parametrize("turn", range(1, 9))
def test_exif_orientation(turn: int) -> None:
    from PIL import ImageOps

    image = Image.fromarray(example())
    exif = Image.Exif()
    exif[0x0112] = turn
    data = encoded(image, "PNG", exif=exif)
    assert np.array_equal(pixels_of(data), np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data)))))
    assert read_image(data).size == ((30, 20) if turn < 5 else (20, 30))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_invalid_exif_data() -> None:
    data = encoded(example(), "PNG", exif=b"Exif\0\0MM\0\x2a\xff\xff\xff\xff" + bytes(range(40)))
    assert np.array_equal(pixels_of(data), example())


@pytest.mark.parametrize("given, words", [
    ("data:image/png;base64,@@@@", "base64"), ("data:image/png,plain", "must be a PNG"), ("data:", "base64"),
    ("iVBORw0KGgo" + "?" * 80, "base64"), ("file:///etc/passwd", "scheme file"), ("", "got an empty string"),
    ("ftp://host/image.png", "scheme ftp"),
    ("http://host/image.png", "not allowed"), ("HTTPS://host/image.png", "not allowed"),
    ("a\0b", "must be a path, a URL or base64"),
    ("data:image/png;base64," + base64.b64encode(b"no image").decode(), "must be a PNG"), (b"", "0 bytes")])
def test_invalid_base64_and_urls(given: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        read_image(given)


def test_invalid_paths(tmp_path: Path) -> None:
    import os

    with pytest.raises(FileError):
        read_image(tmp_path / "absent.png")
    with pytest.raises(FileError) as caught:
        read_image("absent words that are no path")
    assert "` was read as a path: " in caught.value.message
    with pytest.raises(InvalidArgument, match="not a regular file"):
        read_image(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidArgument, match="not a regular file"):  # opening a FIFO must not wait for a writer
        read_image(tmp_path / "pipe")


def test_the_number_of_bytes_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(example())
    monkeypatch.setattr(loading, "MAX_BYTES", len(data) - 1)
    (tmp_path / "image.png").write_bytes(data)
    for given in (data, tmp_path / "image.png", base64.b64encode(data).decode() + " " * len(data)):
        with pytest.raises(InvalidArgument, match="must be .* bytes, got"):
            read_image(given)
    monkeypatch.setattr(loading, "MAX_BYTES", len(data))
    for given in (data, tmp_path / "image.png", base64.b64encode(data).decode()):
        assert np.array_equal(pixels_of(given), example())


# ---- URLs ----------------------------------------------------------------------------------------------------------

class Server(NamedTuple):
    at: str
    exhausted: list[str]


@pytest.fixture()
def server() -> Iterator[Server]:
    """Serves by path: an image, redirects, and failures. ``exhausted`` lists the paths of clients that waited for the
    end of a slow response, or read the large body of a redirect."""
    data = encoded(example())
    ends, exhausted = threading.Event(), []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/image.png":
                self.send_response(200)
                self.end_headers()
                self.wfile.write(data)
            elif self.path == "/missing":
                self.send_error(404)
            elif self.path in ("/slow-body", "/slow-headers", "/slow-chunk"):
                with contextlib.suppress(OSError):
                    self.drip({"/slow-body": b"", "/slow-headers": b"HTTP/1.0 200 OK\r\n",
                               "/slow-chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"}[self.path])
            elif self.path == "/much":
                self.send_response(302)
                self.send_header("Location", "/image.png")
                self.end_headers()
                with contextlib.suppress(OSError):
                    for _ in range(64):
                        self.wfile.write(bytes(1 << 20))
                    exhausted.append(self.path)
            else:
                if self.path.startswith("/far"):
                    ends.wait(0.2)
                self.send_response(302)
                self.send_header("Location", {"/near": "/image.png", "/round": "/round", "/near-file": "/file",
                                              "/ftp": "ftp://127.0.0.1/x", "/far": "/far2", "/far2": "/far3",
                                              "/far3": "/image.png"}.get(self.path, "file:///etc/passwd"))
                self.end_headers()

        def drip(self, start: bytes) -> None:
            """Sends a few bytes every 0.22 s for 20 s."""
            if start:
                self.wfile.write(start)
            else:
                self.send_response(200)
                self.end_headers()
            for number in range(90):
                self.wfile.write({"/slow-headers": f"X-{number}: 1\r\n".encode()}.get(self.path, b"0"))
                if ends.wait(0.22):
                    return
            exhausted.append(self.path)

        def log_message(self, *given: object) -> None:
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield Server(f"http://127.0.0.1:{found.server_address[1]}", exhausted)
    ends.set()
    found.shutdown()
    found.server_close()
    thread.join()


def test_urls(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    for path in ("/image.png", "/near"):
        assert np.array_equal(pixels_of(server.at + path, allow_urls=True), example())
    for path, words in (("/missing", "status 404"), ("/file", "status 302"), ("/round", "status 302"),
                        ("/near-file", "status 302"), ("/ftp", "status 302")):
        with pytest.raises(DownloadError, match=words):
            read_image(server.at + path, allow_urls=True)
    with pytest.raises(DownloadError, match="cannot be reached"):
        read_image("http://127.0.0.1:1/image.png", allow_urls=True)
    monkeypatch.setattr(loading, "MAX_BYTES", 50)
    with pytest.raises(InvalidArgument, match="more than 50 bytes"):
        read_image(server.at + "/image.png", allow_urls=True)
    size = len(encoded(example()))
    assert len(fetching.fetch(server.at + "/image.png", "image", size)) == size
    with pytest.raises(InvalidArgument, match=f"more than {size - 1:,} bytes"):
        fetching.fetch(server.at + "/image.png", "image", size - 1)


@pytest.mark.parametrize("path", ["/slow-headers", "/slow-body", "/slow-chunk", "/far"])
def test_a_server_that_sends_slowly(server: Server, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One deadline covers the whole fetch, even if every single wait is short."""
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(DownloadError, match="in time"):
        read_image(server.at + path, allow_urls=True, timeout=0.4)
    assert not server.exhausted


def test_the_body_of_a_redirect_is_not_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The redirect has a body of 64 MiB."""
    monkeypatch.setenv("no_proxy", "*")
    assert np.array_equal(pixels_of(server.at + "/much", allow_urls=True), example())
    assert not server.exhausted


def slow_server(start: bytes, bit: bytes, exhausted: list[bool]) -> Iterator[int]:
    """Yields the port of a server that sends ``start`` to every connection, then ``bit`` every 0.22 s for 20 s."""
    ends, listener = threading.Event(), socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while not ends.is_set():
                line, _ = listener.accept()
                with line, contextlib.suppress(OSError):
                    line.sendall(start)
                    for _ in range(90):
                        line.sendall(bit)
                        if ends.wait(0.22):
                            return
                    exhausted.append(True)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    ends.set()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


@pytest.mark.parametrize("proxied", [False, True], ids=["tls", "proxy"])
def test_a_handshake_that_is_slow(proxied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The TLS handshake, or the handshake with a proxy before it."""
    exhausted: list[bool] = []
    start, bit = (b"HTTP/1.0 200 OK\r\n", b"X: 1\r\n") if proxied else (b"\x16\x03\x03\x40\x00", b"\x02")
    with contextlib.contextmanager(slow_server)(start, bit, exhausted) as port:
        if proxied:
            monkeypatch.delenv("no_proxy", raising=False)
            monkeypatch.delenv("NO_PROXY", raising=False)
            monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
        else:
            monkeypatch.setenv("no_proxy", "*")
        with pytest.raises(DownloadError, match="in time"):
            read_image("https://example.invalid/image.png" if proxied else f"https://127.0.0.1:{port}/image.png",
                       allow_urls=True, timeout=0.4)
        assert not exhausted


def test_a_name_that_is_not_resolved_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    ends = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args: ends.wait(20) and [])
    with pytest.raises(DownloadError, match="in time"):
        read_image("http://example.invalid/image.png", allow_urls=True, timeout=0.1)
    ends.set()


@pytest.mark.parametrize(("address", "public"), [
    ("93.184.216.34", True), ("8.8.8.8", True), ("2606:4700::1111", True), ("::ffff:8.8.8.8", True),
    ("64:ff9b::808:808", True), ("2002:808:808::1", True),
    ("127.0.0.1", False), ("0.0.0.0", False), ("10.1.2.3", False), ("172.16.0.1", False), ("192.168.1.1", False),
    ("169.254.169.254", False), ("100.64.0.1", False), ("224.0.0.1", False), ("255.255.255.255", False),
    ("240.0.0.1", False), ("198.18.0.1", False), ("::", False), ("::1", False), ("fe80::1%eth0", False),
    ("fc00::1", False), ("ff02::1", False), ("::ffff:127.0.0.1", False), ("::ffff:10.0.0.1", False),
    ("64:ff9b::7f00:1", False), ("64:ff9b:1::a00:1", False), ("2002:7f00:1::1", False), ("2001:db8::1", False),
    ("64:ff9b::c612:1", False), ("2002:cb00:7101::1", False), ("::ffff:192.0.2.1", False), ("::8.8.8.8", False),
    ("2001:0:808:808:0:0:f7f7:f7f7", True), ("2001:0:808:808:0:0:80ff:fffe", False),  # Teredo: server, inverted client
    ("2001:0:a00:1:0:0:f7f7:f7f7", False), ("4000::1", False), ("::ffff:0:8.8.8.8", False)])
def test_public_addresses(address: str, public: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the version of Python says of them."""
    for kind in (ipaddress.IPv4Address, ipaddress.IPv6Address):
        monkeypatch.setattr(kind, "is_global", property(lambda self: True))
    assert fetching.is_public(address) is public


#: Rows of https://www.iana.org/assignments/iana-ipv4-special-registry and iana-ipv6-special-registry that are not
#: globally reachable, deprecated site-local addresses (RFC 3879), and multicast.
NOT_PUBLIC = """
    0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24 192.88.99.0/24
    192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4 255.255.255.255/32
    ::/128 ::1/128 64:ff9b:1::/48 100::/64 100:0:0:1::/64 2001:2::/48 2001:10::/28 2001:db8::/32 3fff::/20 5f00::/16
    fc00::/7 fe80::/10 fec0::/10 ff00::/8""".split()


@pytest.mark.parametrize("network", NOT_PUBLIC)
def test_special_networks(network: str) -> None:
    found = ipaddress.ip_network(network)
    assert not fetching.is_public(str(found[0])) and not fetching.is_public(str(found[-1]))
    if found.version == 4:
        assert not fetching.is_public(f"::ffff:{found[-1]}")


def test_a_public_fetch_connects_to_public_addresses_only(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Private addresses are refused whatever a name resolves to. Proxies are not used: they would resolve the name."""
    port = int(server.at.rpartition(":")[2])
    monkeypatch.setenv("https_proxy", server.at)
    connected: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: connected.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, *rest: [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
        for address in ("10.0.0.1", "127.0.0.1", "203.0.113.1", "fec0::1", "3fff::1")])
    for url in (f"https://127.0.0.1:{port}/image.png", "https://images.example/x.png", "https://10.0.0.1/x.png"):
        with pytest.raises(DownloadError, match="cannot be reached"):
            fetching.fetch(url, "image", 1000, 5.0, public=True)
    with pytest.raises(InvalidArgument, match="https URL"):
        fetching.fetch(server.at + "/image.png", "image", 1000, 5.0, public=True)
    assert not connected
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, *rest: [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("10.0.0.1", "8.8.8.8")])
    with pytest.raises(DownloadError):  # the connection is not real, so that TLS fails
        fetching.fetch("https://images.example/x.png", "image", 1000, 5.0, public=True)
    assert connected == [("8.8.8.8", 443)]


def test_a_public_fetch_follows_redirects_to_https_only(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fetching._RedirectHandler(("https://",))
    request = urllib.request.Request("https://images.example/x.png")
    for url in ("http://images.example/", "ftp://images.example/", "file:///etc/passwd"):
        with pytest.raises(urllib.error.HTTPError):
            found.redirect_request(request, io.BytesIO(), 302, "", {}, url)
    assert found.redirect_request(request, io.BytesIO(), 302, "", {}, "https://b.example/").full_url \
        == "https://b.example/"


@pytest.mark.parametrize("target", ["10.0.0.1", "127.0.0.1", "[::1]", "169.254.169.254", "[fec0::1]", "[fd00::1]",
                                    "[64:ff9b::a00:1]", "203.0.113.1", "[3fff::1]", "hidden.example"])
def test_a_redirect_leads_to_public_addresses_only(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """A public server may redirect to the network of this machine, also by a name."""
    class Redirects(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", f"https://{target}/secret.png")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    connected: list[str] = []
    connect, addresses = socket.socket.connect, {"images.example": "8.8.8.8", "hidden.example": "100.64.0.1"}
    with HTTPServer(("127.0.0.1", 0), Redirects) as local:
        def reach(self: socket.socket, address: Any) -> None:
            connected.append(address[0])
            connect(self, local.server_address)

        thread = threading.Thread(target=local.handle_request)
        thread.start()
        monkeypatch.setattr(socket.socket, "connect", reach)
        monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, *rest: [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (addresses.get(host, host), port))])
        monkeypatch.setattr("ssl.create_default_context", lambda: SimpleNamespace(
            wrap_socket=lambda sock, server_hostname: sock))
        with pytest.raises(DownloadError, match="cannot be reached"):
            fetching.fetch("https://images.example/x.png", "image", 1000, 5.0, public=True)
        thread.join()
    assert connected == ["8.8.8.8"]


# ---- preparing -----------------------------------------------------------------------------------------------------

#: Settings of real processors, and two that pad or only crop.
STEPS = {
    "CLIP": ("CLIPImageProcessorPil", {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224},
                                       "resample": 3}),
    "DINOv2": ("BitImageProcessorPil", {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224},
                                        "resample": 3}),
    "SigLIP": ("SiglipImageProcessorPil", {"size": {"height": 256, "width": 256}, "resample": 2}),
    "pads": ("CLIPImageProcessorPil", {"size": {"shortest_edge": 21}, "crop_size": {"height": 31, "width": 50},
                                       "resample": 1}),
    "crops only": ("CLIPImageProcessorPil", {"do_resize": False, "crop_size": {"height": 45, "width": 24}}),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("height, width", [(480, 640), (333, 101), (57, 58), (224, 224), (17, 300)])
def test_prepared_to_the_bit(tmp_path: Path, name: str, height: int, width: int) -> None:
    """Compares resized and cropped bytes, normalised to floats as the core does."""
    transformers = pytest.importorskip("transformers")
    from mpool.models.formats import image_processor
    from mpool.models.files import Folder

    cls, options = STEPS[name]
    reference = getattr(transformers, cls)(**options)
    reference.save_pretrained(tmp_path)
    read = image_processor.read(Folder(str(tmp_path)))
    settings = ImageSettings(8, 8, read.resize, read.resample, read.crop, 1, 224, True)
    given = imagemodels.image(height, height, width)
    wanted = reference(Image.fromarray(given), return_tensors="np")["pixel_values"][0]
    got = prepare(read_image(given), settings)
    mean, std = (np.array(read.kv[f"mpool.image.{one}"], np.float32) for one in ("mean", "std"))
    factor = read.kv["mpool.image.rescale_factor"]
    floats = ((got.astype(np.float64) * factor).astype(np.float32) - mean) / std
    assert np.array_equal(floats.transpose(2, 0, 1), wanted)


def test_images_that_become_too_long_or_are_too_small() -> None:
    settings = ImageSettings(8, 8, ("shortest", 224), 3, (224, 224), 14, 224, True)
    with pytest.raises(InvalidArgument, match="resizes to 44,800 x 224"):
        prepare(Image.new("RGB", (400, 2)), settings)
    small = ImageSettings(8, 8, None, 3, None, 14, 224, True)
    with pytest.raises(InvalidArgument, match="at least 14 pixels per side"):
        prepare(Image.new("RGB", (13, 20)), small)


# ---- arbitrary bytes -----------------------------------------------------------------------------------------------

def _mutated(data: Any) -> bytes:
    """Return one of three files with some bytes changed, removed or inserted."""
    st = pytest.importorskip("hypothesis.strategies")
    whole = bytearray(data.draw(st.sampled_from(_files())))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(whole) - 1))
        kind = data.draw(st.sampled_from(("change", "cut", "put")))
        if kind == "change":
            whole[at] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del whole[at:at + data.draw(st.integers(1, 40))]
        else:
            whole[at:at] = data.draw(st.binary(min_size=1, max_size=20))
        if not whole:
            return b""
    return bytes(whole)


def _files() -> list[bytes]:
    exif = Image.Exif()
    exif[0x0112] = 6
    small = Image.fromarray(example(3, 24, 17))
    return [encoded(small, "PNG", exif=exif), encoded(small, "JPEG", exif=exif), encoded(small, "WEBP", exif=exif)]


@pytest.mark.filterwarnings("ignore")
def test_any_bytes_are_an_image_or_refused() -> None:
    """No other error is raised, and every image is RGB and within the limits."""
    hypothesis = pytest.importorskip("hypothesis")
    st = pytest.importorskip("hypothesis.strategies")

    @hypothesis.given(st.data())
    @hypothesis.settings(max_examples=600, deadline=None, database=None,
                         suppress_health_check=list(hypothesis.HealthCheck))
    def check(data: Any) -> None:
        try:
            found = read_image(_mutated(data))
        except InvalidArgument as error:
            assert "0x" not in str(error) and error.allowed
            return
        assert found.mode == "RGB" and np.asarray(found).shape == (found.height, found.width, 3)

    check()


@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_a_pillow_image_is_read_by_many_threads(format: str) -> None:
    """Pillow decodes the pixels on first use: one thread decodes while the others wait."""
    rng = np.random.default_rng(5)
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (400, 500, 3), dtype=np.uint8)).save(buffer, format)
    expected = np.asarray(read_image(buffer.getvalue()))
    for _ in range(4):
        image = Image.open(io.BytesIO(buffer.getvalue()))
        start = threading.Barrier(4)

        def load(image: Image.Image = image, start: threading.Barrier = start) -> np.ndarray:
            start.wait()
            return np.asarray(read_image(image))

        with ThreadPoolExecutor(4) as threads:
            found = [one.result() for one in [threads.submit(load) for _ in range(4)]]
        assert all(np.array_equal(one, expected) for one in found)

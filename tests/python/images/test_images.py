"""Reading images from whatever callers have, refusing bad ones (each case of the list of bad input by its number), and
preparing them to the bit as transformers' processors do."""

from __future__ import annotations

import base64
import contextlib
import io
import socket
import struct
import threading
import tracemalloc
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import mpool
from mpool.models import ImageSettings
from mpool.errors import DownloadError, FileError, InvalidArgument, LimitError
from mpool.images import images_of, loading, prepare, read_image

import imagemodels

Image = pytest.importorskip("PIL.Image")


def picture(seed: int = 1, height: int = 20, width: int = 30) -> np.ndarray:
    return imagemodels.image(seed, height, width)


def encoded(image: Any, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, form, **options)
    return file.getvalue()


def pixels_of(image: Any, **options: Any) -> np.ndarray:
    found = read_image(image, **options)
    assert found.mode == "RGB"
    return np.asarray(found)


# ---- sources -------------------------------------------------------------------------------------------------------

def test_every_source_gives_the_same(tmp_path: Path) -> None:
    wanted = picture()
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


def test_base64_of_jpeg_is_no_path() -> None:
    """It begins with a slash."""
    data = encoded(picture(), "JPEG")
    text = base64.b64encode(data).decode()
    assert text.startswith("/9j/")
    assert np.array_equal(pixels_of(text), pixels_of(data))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_arrays_of_floats(dtype: str) -> None:
    """Byte by byte as numpy rounds them, in little more memory than the bytes."""
    given = np.random.default_rng(1).random((700, 900, 3)).astype(dtype)
    expected = np.rint(given.astype(np.float64) * 255).astype(np.uint8)
    tracemalloc.start()
    try:
        found = pixels_of(given)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(found, expected)
    assert most < 4 * expected.nbytes + (8 << 20), "the whole in float64 is 8 times the bytes, and was there twice"


def test_grey_arrays_and_views() -> None:
    wanted = picture()
    grey = wanted[:, :, 0]
    for given in (grey, grey[:, :, None], Image.fromarray(grey)):
        assert np.array_equal(pixels_of(given), np.repeat(grey[:, :, None], 3, axis=2))
    assert np.array_equal(pixels_of(wanted[::-1]), wanted[::-1])
    assert np.array_equal(pixels_of(wanted.transpose(1, 0, 2)), wanted.transpose(1, 0, 2))


def test_single_or_list(tmp_path: Path) -> None:
    one = picture()
    for single in (one, one[:, :, 0], "path", b"bytes", tmp_path, Image.fromarray(one), bytearray(b"x")):
        assert images_of(single, 4) is None
    for several in ([one, "path"], (one,), np.stack([one, one]), []):
        assert len(images_of(several, 4) or []) == len(several)
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
def test_what_is_no_image(given: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        read_image(given, "image 7")
    assert str(caught.value).startswith("image 7 must be") and caught.value.param == "image 7" and caught.value.allowed


def test_channels_first_gets_a_hint() -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_image(np.zeros((3, 20, 30), np.uint8))
    assert "transpose" in (caught.value.hint or "")


# ---- bad input, by number ------------------------------------------------------------------------------------------

def png(width: int, height: int, body: bytes = b"", before: bytes = b"") -> bytes:
    """A PNG of 1 bit a pixel that says it has so many."""
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + before + chunk(b"IDAT", body or zlib.compress(b"")) \
        + chunk(b"IEND", b"")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("width, height", [(8193, 8192), (10_000, 10_000), (100_000, 100_000), (2**31 - 1, 1000)])
def test_71_pixel_bomb(width: int, height: int) -> None:
    """Refused before a pixel is decoded: the body is empty."""
    with pytest.raises(InvalidArgument, match="must be at most 67,108,864 pixels"):
        read_image(png(width, height))


def test_71_most_pixels_are_taken() -> None:
    """One pixel bit more is refused above; so many are read."""
    rows = zlib.compress((b"\0" + bytes(8192 // 8)) * 8192)
    assert read_image(png(8192, 8192, rows)).size == (8192, 8192)


@pytest.mark.parametrize("width, height", [(1, 1), (1, 50), (52_800, 44), (401, 2)])
def test_72_sizes(width: int, height: int) -> None:
    with pytest.raises(InvalidArgument, match=f"must be .*, got {width:,} x {height:,} pixels"):
        read_image(png(width, height))
    with pytest.raises(InvalidArgument, match=f"must be .*, got {width:,} x {height:,} pixels"):
        read_image(np.zeros((height, width, 3), np.uint8))
    with pytest.raises(InvalidArgument, match=f"must be .*, got {width:,} x {height:,} pixels"):
        read_image(Image.new("RGB", (width, height)))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_73_truncated(form: str) -> None:
    """Wherever it is cut: what is left of it is refused, with one of three fixed texts."""
    whole = encoded(picture(2, 40, 50), form)
    for length in [*range(0, len(whole) - 40, 97), len(whole) - 40]:
        try:
            read_image(whole[:length])
        except InvalidArgument as error:
            assert any(words in str(error) for words in ("truncated or corrupted", "must be a PNG", "got 0 bytes"))
        else:
            raise AssertionError(f"{form} cut at {length} of {len(whole)} was read")


def test_73_damaged() -> None:
    whole = bytearray(encoded(picture(2, 40, 50)))
    whole[len(whole) // 2] ^= 0xFF
    with pytest.raises(InvalidArgument, match="truncated or corrupted"):
        read_image(bytes(whole))


@pytest.mark.parametrize("form", ["TIFF", "GIF", "BMP", "PPM", "EPS", "ICO"])
def test_74_other_formats_under_another_name(tmp_path: Path, form: str) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(encoded(picture(1, 32, 32), form))
    with pytest.raises(InvalidArgument, match="must be a PNG, JPEG or WebP"):
        read_image(path)


def test_74_psd() -> None:
    with pytest.raises(InvalidArgument, match="must be a PNG, JPEG or WebP"):
        read_image(b"8BPS" + b"\0\1" + bytes(200))


def test_75_bombs_in_chunks() -> None:
    """Text and profiles that unpack to gigabytes are never unpacked."""
    packed = zlib.compress(bytes(200 << 20), 9)
    body = zlib.compress((b"\0" + bytes(4)) * 32)
    for bomb in (chunk(b"zTXt", b"key\0\0" + packed), chunk(b"iTXt", b"key\0\1\0\0\0" + packed)):
        with pytest.raises(InvalidArgument, match="truncated or corrupted"):
            read_image(png(32, 32, body, bomb))
    try:  # a profile is not needed: leaving it out is as good as refusing
        assert read_image(png(32, 32, body, chunk(b"iCCP", b"key\0\0" + packed))).info.get("icc_profile") is None
    except InvalidArgument as error:
        assert "truncated or corrupted" in str(error)


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_75_frames(form: str) -> None:
    frames = [Image.fromarray(picture(seed)) for seed in range(3)]
    data = encoded(frames[0], form, save_all=True, append_images=frames[1:])
    with pytest.raises(InvalidArgument, match="must be an image of one frame, got 3 frames"):
        read_image(data)


def test_76_modes() -> None:
    """CMYK, palettes, grey, 16 bits, transparency."""
    wanted = picture()
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
    sixteen = Image.fromarray(grey.astype(np.uint16) * 256 + 77)
    assert np.array_equal(pixels_of(encoded(sixteen)), three)
    assert np.array_equal(pixels_of(Image.fromarray(grey.astype(np.int32) * 256)), three)
    assert np.array_equal(pixels_of(Image.fromarray(grey.astype(np.int32))), three)
    with pytest.raises(InvalidArgument, match="floats"):
        read_image(Image.fromarray(grey.astype(np.float32)))


def test_76_transparency_becomes_white() -> None:
    wanted = picture()
    alpha = np.zeros(wanted.shape[:2], np.uint8)
    alpha[:, 10:] = 255
    rgba = np.dstack([wanted, alpha])
    expected = wanted.copy()
    expected[:, :10] = 255
    assert np.array_equal(pixels_of(encoded(rgba)), expected)
    assert np.array_equal(pixels_of(rgba), expected)
    assert np.array_equal(pixels_of(Image.fromarray(rgba)), expected)
    clear = Image.new("P", (8, 8), 1)
    clear.putpalette([9, 9, 9, 200, 0, 0])
    assert (pixels_of(encoded(clear, transparency=1)) == 255).all()
    assert (pixels_of(encoded(clear)) == [200, 0, 0]).all()


@pytest.mark.parametrize("turn", range(1, 9))
def test_76_turned_by_its_camera(turn: int) -> None:
    from PIL import ImageOps

    image = Image.fromarray(picture())
    exif = Image.Exif()
    exif[0x0112] = turn
    data = encoded(image, "PNG", exif=exif)
    assert np.array_equal(pixels_of(data), np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data)))))
    assert read_image(data).size == ((30, 20) if turn < 5 else (20, 30))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_76_notes_of_a_camera_that_cannot_be_read() -> None:
    data = encoded(picture(), "PNG", exif=b"Exif\0\0MM\0\x2a\xff\xff\xff\xff" + bytes(range(40)))
    assert np.array_equal(pixels_of(data), picture())


@pytest.mark.parametrize("given, words", [
    ("data:image/png;base64,@@@@", "base64"), ("data:image/png,plain", "without base64"), ("data:", "without base64"),
    ("iVBORw0KGgo" + "?" * 80, "base64"), ("file:///etc/passwd", "scheme file"), ("", "got an empty text"),
    ("ftp://host/image.png", "scheme ftp"),
    ("http://host/image.png", "not allowed"), ("HTTPS://host/image.png", "not allowed"),
    ("a\0b", "must be a path, a URL or base64"),
    ("data:image/png;base64," + base64.b64encode(b"no image").decode(), "must be a PNG"), (b"", "0 bytes")])
def test_77_base64_and_urls(given: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        read_image(given)


def test_77_paths(tmp_path: Path) -> None:
    import os

    with pytest.raises(FileError):
        read_image(tmp_path / "absent.png")
    with pytest.raises(FileError) as caught:
        read_image("absent words that are no path")
    assert "taken for a path" in (caught.value.hint or "")
    with pytest.raises(InvalidArgument, match="not a regular file"):
        read_image(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidArgument, match="not a regular file"):  # and nobody waits for a writer
        read_image(tmp_path / "pipe")


def test_77_bytes_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(picture())
    monkeypatch.setattr(loading, "MAX_BYTES", len(data) - 1)
    (tmp_path / "image.png").write_bytes(data)
    for given in (data, tmp_path / "image.png", base64.b64encode(data).decode() + " " * len(data)):
        with pytest.raises(InvalidArgument, match="must be .* bytes, got"):
            read_image(given)


def test_78_nothing_of_the_decoder_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of errors do not change with what goes wrong inside."""
    def fail(*given: object, **named: object) -> None:
        raise OSError("object at 0x7f00deadbeef")

    data = encoded(picture())
    monkeypatch.setattr(Image.Image, "load", fail)
    with pytest.raises(InvalidArgument) as caught:
        read_image(data)
    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(InvalidArgument) as again:
        read_image(data)
    for error in (caught.value, again.value):
        assert "0x" not in f"{error}{error.hint}" and error.__cause__ is None and error.__suppress_context__


# ---- URLs ----------------------------------------------------------------------------------------------------------

class Server(NamedTuple):
    at: str
    exhausted: list[str]


@pytest.fixture()
def server() -> Iterator[Server]:
    """Answers by path: an image, ways to go elsewhere, and failures. ``exhausted`` counts clients that waited for all
    that it sends bit by bit, or took all that nobody wants."""
    data = encoded(picture())
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
            """A little now and then, for twenty seconds."""
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
        assert np.array_equal(pixels_of(server.at + path, allow_urls=True), picture())
    for path, words in (("/missing", "answers 404"), ("/file", "answers 302"), ("/round", "answers 302"),
                        ("/near-file", "answers 302"), ("/ftp", "answers 302")):
        with pytest.raises(DownloadError, match=words):
            read_image(server.at + path, allow_urls=True)
    with pytest.raises(DownloadError, match="cannot be reached"):
        read_image("http://127.0.0.1:1/image.png", allow_urls=True)
    monkeypatch.setattr(loading, "MAX_BYTES", 50)
    with pytest.raises(InvalidArgument, match="more than 50 bytes"):
        read_image(server.at + "/image.png", allow_urls=True)


@pytest.mark.parametrize("path", ["/slow-headers", "/slow-body", "/slow-chunk", "/far"])
def test_a_server_that_drips(server: Server, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One deadline for all of a fetch, whatever comes bit by bit and each bit in time."""
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(DownloadError, match="in time"):
        read_image(server.at + path, allow_urls=True, timeout=0.4)
    assert not server.exhausted


def test_a_redirect_with_a_large_body(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not read."""
    monkeypatch.setenv("no_proxy", "*")
    assert np.array_equal(pixels_of(server.at + "/much", allow_urls=True), picture())
    assert not server.exhausted


def drips(start: bytes, bit: bytes, exhausted: list[bool]) -> Iterator[int]:
    """The port of a server without manners, at which every connection gets a start and then a bit now and then, for
    twenty seconds."""
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
def test_a_handshake_that_drips(proxied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of TLS, and of a proxy before it."""
    exhausted: list[bool] = []
    start, bit = (b"HTTP/1.0 200 OK\r\n", b"X: 1\r\n") if proxied else (b"\x16\x03\x03\x40\x00", b"\x02")
    with contextlib.contextmanager(drips)(start, bit, exhausted) as port:
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


# ---- preparing -----------------------------------------------------------------------------------------------------

#: Steps of real processors, and a few that cut into what is too small.
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
    """Resized and cropped bytes, and the floats that the core makes of them."""
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


def test_prepared_too_long() -> None:
    settings = ImageSettings(8, 8, ("shortest", 224), 3, (224, 224), 14, 224, True)
    with pytest.raises(InvalidArgument, match="resizes to 44,800 x 224"):
        prepare(Image.new("RGB", (400, 2)), settings)
    small = ImageSettings(8, 8, None, 3, None, 14, 224, True)
    with pytest.raises(InvalidArgument, match="at least 14 pixels a side"):
        prepare(Image.new("RGB", (13, 20)), small)


def test_import_is_lazy() -> None:
    import subprocess
    import sys

    code = "import mpool.images, sys; assert 'PIL' not in sys.modules and 'urllib.request' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert mpool.embed_image


# ---- whatever bytes come -------------------------------------------------------------------------------------------

def _mutated(data: Any) -> bytes:
    """One of three files with some bytes changed, cut out or put in."""
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
    small = Image.fromarray(picture(3, 24, 17))
    return [encoded(small, "PNG", exif=exif), encoded(small, "JPEG", exif=exif), encoded(small, "WEBP", exif=exif)]


@pytest.mark.filterwarnings("ignore")
def test_any_bytes_are_an_image_or_refused() -> None:
    """Never another error, and never an image that is not RGB within the limits."""
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


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_one_image_of_pillow_from_many_threads(form: str) -> None:
    """It reads its pixels when they are first wanted: one thread does, the others wait."""
    rng = np.random.default_rng(5)
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (400, 500, 3), dtype=np.uint8)).save(buffer, form)
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

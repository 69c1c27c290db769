"""The limit of the memory that all decoded images of the process take together."""

import base64
import os
import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

import mpool
from mpool.host import native_calls
from mpool.images import loading, memory


def test_decoded_images_share_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoded image waits until the others leave enough of the budget; one that exceeds all of it runs alone."""
    budget = memory._Budget()
    monkeypatch.setattr(memory, "_budget", budget)
    monkeypatch.setattr(memory, "MAX", 10 * memory.BYTES_PER_PIXEL)
    turns: list[str] = []

    def left() -> None:
        turns.append("waits")
        if len(turns) == 3:
            raise mpool.Timeout("the caller has left")

    monkeypatch.setattr(native_calls, "check_caller", left)
    with memory.reserved(11):
        assert budget.used == 11 * memory.BYTES_PER_PIXEL
    with memory.reserved(4), memory.reserved(6):  # exactly the whole budget
        assert turns == []
        with pytest.raises(mpool.Timeout), memory.reserved(1):
            raise AssertionError("there was no memory for this image")
        assert len(turns) == 3 and budget.used == memory.MAX
    assert budget.used == 0
    with pytest.raises(KeyError), memory.reserved(1):
        raise KeyError
    assert budget.used == 0


def test_a_waiting_image_goes_on_when_another_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the other image is a sign of progress, which keeps the wait from counting as stuck."""
    budget, waits, moved = memory._Budget(), threading.Event(), threading.Event()
    monkeypatch.setattr(memory, "_budget", budget)
    monkeypatch.setattr(memory, "MAX", 10 * memory.BYTES_PER_PIXEL)
    monkeypatch.setattr(memory, "_TICK", 60.0)
    monkeypatch.setattr(native_calls, "progress", moved.set)
    wait = budget.changed.wait
    monkeypatch.setattr(budget.changed, "wait", lambda seconds: waits.set() or wait(seconds))

    def second() -> bool:
        with memory.reserved(5):
            return moved.is_set()

    with ThreadPoolExecutor(1) as threads:
        with memory.reserved(6):
            found = threads.submit(second)
            assert waits.wait(50) and not found.done()
        assert found.result(50)


#: Prints the growth of the memory while an image is decoded, and the reservation, in bytes per pixel.
MEASURE = """
import io, sys
from PIL import Image
import hostileimages as hi
from mpool.images import loading, memory

kind, mode, options = sys.argv[1], sys.argv[2], eval(sys.argv[3])
SIDE = 2000
tile = hi.noise(SIDE // 8, SIDE // 8).convert("RGBA").resize((SIDE, SIDE), Image.Resampling.NEAREST)
data = hi.saved(tile.convert(mode), kind, **options)
small = hi.saved(tile.convert(mode).resize((64, 64)), kind, **options)
del tile

def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) << 10

def used(image):
    return memory._budget.used

loading.convert_image(small, "x", used, allow_urls=False, timeout=None)  # imports, and the threads
open("/proc/self/clear_refs", "w").write("5")  # resets the peak
before = status("VmRSS")
reserved = loading.convert_image(data, "x", used, allow_urls=False, timeout=None)
print((status("VmHWM") - before) / SIDE ** 2, reserved / SIDE ** 2)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux, which resets peaks of memory")
@pytest.mark.parametrize("kind, mode, options", [
    ("WEBP", "RGBA", {"lossless": True, "method": 0}), ("WEBP", "RGB", {"method": 0}), ("PNG", "LA", {}),
    ("PNG", "RGB", {"transparency": (1, 2, 3)}), ("PNG", "RGB", {}),
    ("JPEG", "CMYK", {"progressive": True, "subsampling": 0})], ids=str)
def test_the_reservation_covers_the_memory(kind: str, mode: str, options: dict[str, object]) -> None:
    """Before, 12 bytes per pixel were reserved for a WebP with transparency, which takes 24 to 28."""
    done = subprocess.run([sys.executable, "-c", MEASURE, kind, mode, repr(options)], capture_output=True, text=True,
                          timeout=120, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    taken, reserved = map(float, done.stdout.split())
    assert 4 < taken <= reserved + 0.5 and reserved < 30, done.stderr


def test_base64_with_much_white_space_takes_no_object_for_each_line() -> None:
    data = bytes(range(256)) * 4096
    text = base64.b64encode(data).decode()
    text = "\n".join(text[at:at + 2] for at in range(0, len(text), 2)) + " \t\r\f\v"
    tracemalloc.start()
    try:
        found = loading._from_base64(text, "x")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == data and peak < 4 * len(text)

"""A native call that never returns: its request ends at its deadline, other requests are served, /health names the
starved threads, and the process exits within its grace."""

import asyncio
import base64
import ctypes
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.host import native_calls
from mpool.conversation import grammar
from mpool.images import loading, memory
from mpool.tokenizers.tokenizer import Tokenizer

import hostileimages
import tinymodels
from servers import Raw, ask, serving
from waiting import until

pytest.importorskip("llguidance")

PNG = hostileimages.saved(hostileimages.noise(40, 40), "PNG")
CLIP, LLAVA = "digits-clip", "digits-llava"
FORM = {"type": "regex", "regex": "[a-z]{1,9}"}


class Planted:
    """A native call that holds no GIL and does not return before the test ends."""

    def __init__(self) -> None:
        self.ended, self.entered = False, 0
        self._usleep = ctypes.CDLL(None).usleep

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.entered += 1
        while not self.ended:
            self._usleep(10_000)
        raise ValueError("the test has ended")


GROUPS = (native_calls.IMAGES, native_calls.TEXTS, native_calls.GRAMMARS)


def limit(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set the time that calls of all groups may run. Calls that have to end may be slow on a busy machine."""
    for group in GROUPS:
        monkeypatch.setattr(group, "seconds", seconds)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Planted]:
    """A planted call; groups have as few threads as on a machine of one CPU, and short limits."""
    made = Planted()
    monkeypatch.setattr(native_calls, "SOON", 0.1)
    monkeypatch.setattr(native_calls, "_TICK", 0.05)
    limit(monkeypatch, 1.0)
    for group in GROUPS:
        monkeypatch.setattr(group, "_size", 1)
    yield made
    made.ended = True
    for group in GROUPS:
        until(lambda group=group: group.status().running == 0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tinymodels.cached(tmp_path_factory, "bert"), tinymodels.cached(tmp_path_factory, "llama")


@pytest.fixture
def pool(models: tuple[Path, Path]) -> Iterator[mpool.Pool]:
    with mpool.Pool(mpool.PoolConfig(shutdown_grace=1.0, offline=True)) as made:
        made.embed("warm", models[0])
        made.embed_image(PNG, CLIP)
        made.generate("a", models[1], max_tokens=1)
        yield made


def ends(call: Callable[[], Any], error: type[mpool.MpoolError]) -> None:
    began = time.monotonic()
    with pytest.raises(error):
        call()
    assert time.monotonic() - began < 60, "the call hangs"


def sticks(planted: Planted, call: Callable[[], Any]) -> None:
    """Make a request with a short timeout, until one has reached the planted call: on a busy machine the timeout may
    pass before."""
    before = planted.entered
    for _ in range(50):
        ends(call, mpool.Timeout)
        until(lambda: sum(group.status().running for group in GROUPS) == planted.entered)  # or it enters later
        if planted.entered > before:
            return
    raise AssertionError("no request reached the planted call")


# ---- the library ---------------------------------------------------------------------------------------------------

def test_a_decoder_that_never_returns(pool: mpool.Pool, models: tuple[Path, Path], planted: Planted,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(loading, "_decoded", planted)
        sticks(planted, lambda: pool.embed_image(PNG, CLIP, timeout=0.3))
        ends(lambda: pool.embed_image([PNG] * 20, CLIP), mpool.Timeout)  # the cap of a call without a deadline
        limit(monkeypatch, 60.0)
        assert pool.embed("others", models[0]).shape
        found = pool.health()
        assert found.status == "degraded" and found.native_calls["images"].starved
        assert any("image decodings are slow" in reason for reason in found.reasons)
        for _ in range(native_calls.SPARE - 1):
            sticks(planted, lambda: pool.embed_image(PNG, CLIP, timeout=0.3))
        until(lambda: native_calls.IMAGES.status().stuck == 1 + native_calls.SPARE)
        ends(lambda: pool.embed_image(PNG, CLIP), mpool.Overloaded)
        assert planted.entered == 1 + native_calls.SPARE
    planted.ended = True
    until(lambda: not pool.health().native_calls["images"].starved)
    assert pool.embed_image(PNG, CLIP).shape and pool.health().status == "healthy"


def test_a_decoder_stuck_in_one_slice_of_many_threads(pool: mpool.Pool, planted: Planted,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """One hostile image among those of eight threads: every other thread gets its vectors."""
    decode = loading._decoded
    hostile = hostileimages.saved(hostileimages.noise(33, 33), "PNG")
    monkeypatch.setattr(loading, "_decoded", lambda image, *rest, **more: planted() if image.size == (33, 33)
                        else decode(image, *rest, **more))
    results: list[Any] = [None] * 8

    def ask_for(at: int) -> None:
        try:
            results[at] = pool.embed_image([PNG, hostile] if at == 3 else [PNG, PNG], CLIP).shape
        except mpool.MpoolError as error:
            results[at] = type(error)

    threads = [threading.Thread(target=ask_for, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    until(lambda: results[3])
    with monkeypatch.context() as patch:
        limit(patch, 60.0)
        for thread in threads:
            thread.join(60)
    assert np.isnan(pool.embed_image([PNG, hostile], CLIP, on_error="null")).all(axis=1).tolist() == [False, True]
    ends(lambda: pool.embed_image([PNG, hostile, PNG], CLIP, on_error="null", timeout=0.3), mpool.Timeout)
    assert results[3] is mpool.Timeout and [found for found in results if found != (2, 64)] == [mpool.Timeout]


def test_a_tokenizer_that_never_returns(pool: mpool.Pool, models: tuple[Path, Path], planted: Planted,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Tokenizer._encode_many
    long = "word " * 20_000
    monkeypatch.setattr(Tokenizer, "_encode_many", lambda self, texts, *rest: planted() if long in texts
                        else encode(self, texts, *rest))
    sticks(planted, lambda: pool.embed(long, models[0], timeout=0.3))
    ends(lambda: pool.embed(["short", long], models[0]), mpool.Timeout)
    limit(monkeypatch, 60.0)
    assert pool.embed("short", models[0]).shape and pool.embed(["much " * 5000, "b"], models[0]).shape
    assert pool.health().native_calls["texts"].stuck == 2


def test_a_tokenizer_that_never_returns_from_a_prompt(pool: mpool.Pool, models: tuple[Path, Path], planted: Planted,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, conversations and pairs, on this thread and on an event loop."""
    long, short = "word " * 20_000, [{"role": "user", "content": "a"}]
    messages = [{"role": "user", "content": long}]
    monkeypatch.setattr(Tokenizer, "least_tokens", lambda self, *given: 0)  # else too long a chat is not tokenized
    for name in ("_encode_one", "_encode_marked"):
        encode = getattr(Tokenizer, name)
        monkeypatch.setattr(Tokenizer, name, lambda self, text, *rest, encode=encode: planted() if long in text
                            else encode(self, text, *rest))
    ends(lambda: pool.generate(long, models[1], timeout=0.3), mpool.Timeout)
    ends(lambda: pool.chat(messages, LLAVA), mpool.Timeout)
    ends(lambda: asyncio.run(mpool.aio.chat(messages, LLAVA, pool=pool)), mpool.Timeout)
    ends(lambda: asyncio.run(mpool.aio.generate(long, models[1], pool=pool, timeout=0.3)), mpool.Timeout)
    assert pool.chat(short, LLAVA, max_tokens=1, temperature=0).usage.completion_tokens == 1


def test_a_grammar_that_is_never_compiled(pool: mpool.Pool, models: tuple[Path, Path], planted: Planted,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    compile = grammar._Compiler._compile
    monkeypatch.setattr(grammar._Compiler, "_compile", lambda self, kind, source, *rest: planted()
                        if source == "endless" else compile(self, kind, source, *rest))
    bad = {"type": "regex", "regex": "endless"}
    sticks(planted, lambda: pool.generate("a", models[1], response_format=bad, timeout=0.3))
    ends(lambda: pool.generate("a", models[1], response_format=bad), mpool.Timeout)
    limit(monkeypatch, 60.0)
    assert pool.generate("a", models[1], response_format=FORM, max_tokens=5).text
    assert pool.health().native_calls["grammars"].stuck == 2


def test_a_mask_that_is_never_computed(pool: mpool.Pool, models: tuple[Path, Path], planted: Planted,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """The request ends at its deadline. The stuck thread is replaced; its other requests move to the new thread."""
    advance = grammar._MaskedRequest._advance
    stuck: list[Any] = []

    def slow(self: Any, choice: int) -> None:
        if not stuck:
            stuck.append(self)
        if stuck[0] is self:
            planted()
        advance(self, choice)

    monkeypatch.setattr(grammar, "_mask_threads", [])
    monkeypatch.setattr(grammar, "_MAX_THREADS", 1)
    monkeypatch.setattr(grammar, "_STUCK_SECONDS", 0.2)
    monkeypatch.setattr(grammar._MaskedRequest, "_advance", slow)
    options = dict(response_format={"type": "regex", "regex": "[a-z]{9}"}, seed=1)
    job = pool.submit("text_to_text", prompt="a", model=models[1], timeout=2.0, **options)
    until(lambda: bool(stuck))
    behind = pool.submit("text_to_text", prompt="b", model=models[1], **options)
    time.sleep(0.4)
    assert len(pool.generate("c", models[1], **options).text) == 9
    assert len(behind.result(20).text) == 9
    ends(job.result, mpool.Timeout)
    assert pool.health().native_calls["masks"].stuck == 1


def test_memory_of_decoded_images_is_bounded(pool: mpool.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of all threads share one budget. An image that is larger than the budget is decoded alone."""
    monkeypatch.setattr(native_calls.IMAGES, "_size", 16)
    monkeypatch.setattr(memory, "MAX", 3 * 1600 * memory.BYTES_PER_PIXEL)
    lock, seen, most = threading.Lock(), [0, 0], []
    decode = loading._decoded

    def watched(image: Any, *rest: Any, **more: Any) -> Any:
        with lock:
            seen[0] += image.width * image.height
            seen[1] += 1
            most.append(tuple(seen))
        time.sleep(0.02)
        found = decode(image, *rest, **more)
        with lock:
            seen[0] -= image.width * image.height
            seen[1] -= 1
        return found

    monkeypatch.setattr(loading, "_decoded", watched)
    large = hostileimages.saved(hostileimages.noise(100, 100), "PNG")
    threads = [threading.Thread(target=pool.embed_image, args=([large if at % 6 == 0 else PNG], CLIP))
               for at in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(most) == 24 and memory._budget.used == 0
    assert all(pixels <= 3 * 1600 or images == 1 for pixels, images in most) and max(images for _, images in most) > 1


@pytest.mark.slow
def test_many_images_at_the_pixel_limit(models: tuple[Path, Path]) -> None:
    """24 images of 64 million pixels at once: the memory is that of one or two, and embeddings of texts go on."""
    script = """
import json, sys, threading, time
import mpool
sys.path.insert(0, sys.argv[2])
import hostileimages
image = hostileimages.png(8192, 8192)
mpool.embed("warm", sys.argv[1]), mpool.embed_image(hostileimages.png(40, 40), "digits-clip")
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1e3
before, results = peak(), []
def ask():
    results.append(mpool.embed_image(image, "digits-clip", timeout=300).shape)
threads = [threading.Thread(target=ask) for _ in range(24)]
for thread in threads: thread.start()
slowest = 0
while any(thread.is_alive() for thread in threads):
    began = time.monotonic()
    mpool.embed(f"text {began}", sys.argv[1])
    slowest = max(slowest, time.monotonic() - began)
    time.sleep(0.01)
print(json.dumps([peak() - before, slowest, len(results)]))
"""
    done = subprocess.run([sys.executable, "-c", script, str(models[0]), str(Path(hostileimages.__file__).parent)],
                          capture_output=True, text=True, timeout=600, check=True)
    megabytes, slowest, count = json.loads(done.stdout)
    assert count == 24 and megabytes < 1500 and slowest < 60, done.stdout


# ---- the server ----------------------------------------------------------------------------------------------------

def chat_of(image: bytes) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(image).decode()
    return {"model": LLAVA, "max_tokens": 4, "messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]}]}


def test_a_server_whose_decoder_never_returns(models: tuple[Path, Path], planted: Planted,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    with serving([f"bert={models[0]}", LLAVA]) as server:
        assert ask(server, "/v1/chat/completions", chat_of(PNG))[0] == 200
        with monkeypatch.context() as patch:
            patch.setattr(loading, "_decoded", planted)
            with Raw(server) as gone:  # a client that leaves
                gone.request("/v1/chat/completions", json.dumps(chat_of(PNG)).encode())
                until(lambda: planted.entered == 1)
            status, found = ask(server, "/v1/chat/completions", chat_of(PNG))
            assert (status, found["error"]["code"]) == (504, "timeout")
            for text in ("short", "long " * 30_000):
                assert ask(server, "/v1/embeddings", {"model": "bert", "input": text})[0] == 200
            status, found = ask(server, "/health")
            assert (status, found["status"], found["starved"]) == (200, "degraded", ["images"])
        assert ask(server, "/v1/chat/completions", chat_of(PNG))[0] == 200, "replacements of the stuck threads serve"
        planted.ended = True
        until(lambda: ask(server, "/health")[1]["status"] == "healthy")


MAIN = """
import ctypes, sys
from mpool.host import native_calls
usleep = ctypes.CDLL(None).usleep
def endless(*args, **options):
    print("entered", file=sys.stderr, flush=True)
    usleep(1_000_000_000)
{plant}
from mpool.cli import main
sys.exit(main(["serve", "--port", "0", "--grace", "1", "--only", *sys.argv[1:]]))
"""
PLANTS = {
    "decoder": ("from mpool.images import loading\nloading._decoded = endless", "/v1/chat/completions", chat_of(PNG)),
    "tokenizer": ("from mpool.tokenizers.tokenizer import Tokenizer\nTokenizer._encode_many = endless",
                  "/v1/embeddings", {"model": "bert", "input": "long " * 30_000}),
    "grammar": ("from mpool.conversation import grammar\ngrammar._Compiler._compile = endless",
                "/v1/chat/completions", {"model": LLAVA, "messages": [{"role": "user", "content": "a"}],
                                         "response_format": {"type": "json_object"}}),
    "first use": ("from mpool.runtime.model_files import ModelFiles\nModelFiles._make_tokenizer = endless",
                  "/v1/embeddings", {"model": "bert", "input": "a"}),
    "template": ("from mpool.runtime.entry import Entry\nEntry._make_template = endless", "/v1/chat/completions",
                 {"model": LLAVA, "messages": [{"role": "user", "content": "a"}]}),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", PLANTS)
def test_sigterm_ends_a_server_within_its_grace(kind: str, models: tuple[Path, Path]) -> None:
    plant, path, body = PLANTS[kind]
    process = subprocess.Popen([sys.executable, "-c", MAIN.format(plant=plant), "-m", f"bert={models[0]}",
                                "-m", LLAVA], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stderr is not None
        port = int(process.stdout.readline().rsplit(":", 1)[1])

        class Server:
            pass

        server: Any = Server()
        server.port = port
        with Raw(server) as waiting:
            waiting.request(path, json.dumps(body).encode())
            assert any("entered" in line for line in process.stderr)  # after the lines of the start
            process.send_signal(signal.SIGTERM)
            errors = process.communicate(timeout=60)[1]  # the call takes 1,000 s
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors and "Fatal" not in errors, errors


def test_vectors_are_those_of_an_image_read_in_place(pool: mpool.Pool) -> None:
    """Where an image is decoded does not matter: a large array takes a thread, a small one does not."""
    image = np.asarray(hostileimages.noise(700, 700))
    file = hostileimages.saved(hostileimages.noise(700, 700), "PNG")
    assert image.nbytes > loading._SMALL
    assert np.array_equal(pool.embed_image(image, CLIP), pool.embed_image(file, CLIP))

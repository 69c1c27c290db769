"""Errors of the operating system leave every public function as one error of mpool, errors of a caller's code as they
are; and failures within the bookkeeping of processes leave nothing behind."""

import asyncio
import errno
import inspect
import os
import select
import signal
import threading
import time
import types
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.errors import FileError
from mpool import aio
from mpool.host import child_processes
from mpool.conversation import grammar, rendering
from mpool.host.resources import error_of, typed, typed_async

from childprograms import LIMITS, end, program
from waiting import until

#: Reading it is an error (EIO).
UNREADABLE = "/proc/self/mem"
#: Public methods that call nothing but a typed function, or convert nothing.
PLAIN = {"CallOptions.core", "CaptureJob.begins", "CaptureJob.follow", "CaptureComparison.departs"}


# ---- one place -------------------------------------------------------------------------------------------------------

def is_typed(function: Any) -> bool:
    return function.__code__.co_filename.endswith("resources.py")


def test_every_public_function_is_typed() -> None:
    """``resources.typed`` is the only place that turns errors of the system into errors of mpool."""
    wrong = []
    for home in (mpool, aio):
        for name in home.__all__:
            value = getattr(home, name)
            if inspect.isfunction(value) and not is_typed(value):
                wrong.append(name)
            elif inspect.isclass(value) and not issubclass(value, BaseException):
                wrong += [f"{name}.{method}" for method, function in vars(value).items()
                          if not method.startswith("_") and inspect.isfunction(function) and not is_typed(function)]
    assert set(wrong) <= PLAIN, sorted(set(wrong) - PLAIN)


@pytest.mark.parametrize(("number", "kind", "hint"), [
    (errno.EIO, FileError, ""), (errno.EACCES, FileError, ""), (errno.ENOSPC, FileError, "disk"),
    (errno.EMFILE, FileError, "ulimit -n"), (errno.ENOMEM, mpool.MemoryExhausted, "ulimit -v")])
def test_errors_of_the_system(number: int, kind: type[mpool.MpoolError], hint: str) -> None:
    found = error_of(OSError(number, os.strerror(number), "the/file"))
    assert type(found) is kind and "the/file" in str(found) and os.strerror(number) in str(found)
    assert hint in (found.hint or "") and bool(hint) == bool(found.hint)


def test_the_original_error_is_the_cause() -> None:
    async def closed() -> None:
        await asyncio.sleep(0)
        typed(os.close)(-1)

    for call in (lambda: typed(os.close)(-1), lambda: asyncio.run(typed_async(closed)())):
        with pytest.raises(FileError, match="Bad file descriptor") as caught:
            call()
        assert type(caught.value.__cause__) is OSError and caught.value.__cause__.errno == errno.EBADF


def test_images_that_cannot_be_read_or_written(pool: mpool.Pool, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=f"{UNREADABLE}: Input/output error"):
        pool.embed_image(UNREADABLE, "digits-clip")
    image = mpool.results.GeneratedImage(np.zeros((8, 8, 3), np.float32), np.zeros((1, 1, 1), np.float32), {})
    for name in ("a.png", "a.jpg"):  # mpool opens the first, Pillow the second
        with pytest.raises(FileError, match=f"none/{name}: No such file"):
            image.save(tmp_path / "none" / name)


# ---- code of callers -------------------------------------------------------------------------------------------------

def missing() -> str:
    return Path("/none/texts.txt").read_text()


def lines() -> Iterator[str]:
    yield "fine"
    yield missing()


async def alines() -> AsyncIterator[str]:
    for line in lines():
        yield line


class Lazy(Sequence[str]):
    """Reads its texts when they are needed."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any) -> Any:
        return missing()


def test_errors_of_iterables_keep_their_class(pool: mpool.Pool, bert: Path) -> None:
    async def each() -> None:
        async for _ in aio.embed_iter(alines(), bert, pool=pool):
            pass

    for call in (lambda: list(pool.embed_iter(lines(), bert)), lambda: asyncio.run(each()),
                 lambda: pool.embed(Lazy(), bert), lambda: pool.get(bert).batch_embed(lines())):
        with pytest.raises(FileNotFoundError, match="/none/texts.txt"):
            call()
    with open(UNREADABLE) as file, pytest.raises(OSError, match="Input/output error") as caught:
        list(pool.embed_iter(file, bert))  # no line of Python runs between mpool and the system
    assert type(caught.value) is OSError


def test_errors_of_functions_and_classes_of_callers_keep_their_class(pool: mpool.Pool, bert: Path, llama: Path) -> None:
    class Refusing:
        """A class with the interface of pydantic's, which reads a file."""

        @classmethod
        def model_json_schema(cls) -> dict[str, Any]:
            return {"const": missing()}

    class Length(list[str]):
        def __len__(self) -> int:
            return len(missing())

    for call in (lambda: pool.embed(["a", "b"], bert, progress=lambda done, total: missing()),
                 lambda: pool.generate("a", llama, response_format=Refusing, max_tokens=4),
                 lambda: pool.embed(Length(), bert), lambda: pool.embed_image(Lazy(), "digits-clip"),
                 lambda: pool.chat(Lazy(), llama, max_tokens=1)):  # type: ignore[arg-type]
        with pytest.raises(FileNotFoundError, match="/none/texts.txt"):
            call()


def test_other_errors_are_errors_of_mpool_whatever_file_raised_them() -> None:
    """A library that mpool calls may be anywhere: the names of files do not say whose code it is."""
    async def read() -> None:
        missing()

    for call in (typed(missing), lambda: asyncio.run(typed_async(read)())):
        with pytest.raises(FileError, match="/none/texts.txt"):
            call()


class Handler:
    """A handler of signals: a method, or an object that can be called."""

    def ring(self, number: int, frame: FrameType | None) -> None:
        raise FileNotFoundError(errno.ENOENT, "mine")

    __call__ = ring


@pytest.mark.parametrize("handler", [Handler(), Handler().ring, partial(Handler.ring, None)], ids=lambda one: type(one))
def test_every_kind_of_signal_handler_is_known(handler: Any) -> None:
    def busy() -> None:
        signal.raise_signal(signal.SIGALRM)
        time.sleep(10)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(FileNotFoundError, match="mine"):
            typed(busy)()
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", [TimeoutError, FileNotFoundError])
def test_errors_of_signal_handlers_keep_their_class(pool: mpool.Pool, llama: Path, kind: type[OSError]) -> None:
    def ring(number: int, frame: FrameType | None) -> None:
        raise kind(errno.ENOENT, "mine") if kind is FileNotFoundError else kind("mine")

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with pytest.raises(kind, match="mine") as caught:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            pool.generate("a", llama, max_tokens=15000, ignore_eos=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert type(caught.value) is kind


# ---- grammars --------------------------------------------------------------------------------------------------------

def test_an_error_of_the_tokenizer_is_no_error_of_the_schema(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llguidance calls the tokenizer while it compiles a format, and reports its errors as panics."""
    class Failing:
        """Tokenizer whose first calls of ``split`` fail: llguidance's constructor makes the first call."""

        calls = 0

        def split(self, text: str) -> list[str]:
            self.calls += 1
            if self.calls <= 2:
                raise mpool.SpawnFailed("planted")
            return [text]

    failing = Failing()
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        monkeypatch.setattr(grammar, "compile_trie", lambda words, group: failing)
        with pytest.raises(mpool.SpawnFailed, match="planted"):
            pool.generate("a", llama, max_tokens=2, response_format={"type": "json_object"})
        assert failing.calls == 2
        assert pool.generate("a", llama, max_tokens=2, response_format={"type": "json_object"}).text.startswith("{")


def test_a_thread_for_masks_that_cannot_poll_is_not_used(pool: mpool.Pool, llama: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests assigned to such a thread would wait until their timeouts."""
    def poll() -> Any:
        if not failed:
            failed.append("poll")
            raise MemoryError("planted")
        return real()

    failed: list[str] = []
    real = select.poll
    monkeypatch.setattr(grammar, "_mask_threads", [])
    monkeypatch.setattr(grammar, "select", types.SimpleNamespace(poll=poll, POLLIN=select.POLLIN))
    options: dict[str, Any] = {"max_tokens": 2, "response_format": {"type": "json_object"}, "timeout": 20}
    with pytest.raises(mpool.MemoryExhausted, match="planted"):
        pool.generate("a", llama, **options)
    assert pool.generate("a", llama, **options).finish_reason in ("stop", "length")


# ---- bookkeeping of processes ----------------------------------------------------------------------------------------

class Forgetful(OrderedDict[Any, Any]):
    """A dict whose length cannot be told once: there is no memory."""

    failed = False

    def __len__(self) -> int:
        if not self.failed:
            self.failed = True
            raise MemoryError("planted")
        return super().__len__()


def test_a_failure_in_the_records_of_a_template_blocks_no_request() -> None:
    """The template counted as being rendered forever, and all requests for it waited."""
    made = rendering.Renderers()
    made._records = Forgetful()
    source = rendering.Source("{{ a }}")
    try:
        with pytest.raises(MemoryError):
            made.run(source, "render", {"a": "1"})
        assert made.run(source, "render", {"a": "1"}, time.monotonic() + 20).text == "1"
    finally:
        end(made.children)


def test_failures_around_a_child_leave_its_place_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program may have one process. A failure after its start, or at its end, took the place forever."""
    planted: list[str] = []

    def failing(home: Any, name: str) -> None:
        real = getattr(home, name)

        def call(*args: Any) -> Any:
            if name not in planted:
                planted.append(name)
                if name == "end":
                    real(*args)
                raise MemoryError("planted")
            return real(*args)

        monkeypatch.setattr(home, name, call)

    children = child_processes.Children(program(tmp_path, handle="value == b'die' and kill()"))
    try:
        failing(child_processes, "_tidy_later")
        with pytest.raises(MemoryError):
            children.run((b"v",), LIMITS)
        assert children.run((b"v",), LIMITS, None, time.monotonic() + 20)[1] == b"v"
        failing(child_processes._Child, "end")
        with pytest.raises(MemoryError):
            children.run((b"die",), LIMITS)
        assert children.run((b"w",), LIMITS, None, time.monotonic() + 20)[1] == b"w"
        assert planted == ["_tidy_later", "end"] and len(children._all) == 1
    finally:
        end(children)


def test_the_thread_that_ends_idle_children_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_processes, "TIDY_SECONDS", 0.01)
    dead = threading.Thread(target=int)
    dead.start()
    dead.join()
    monkeypatch.setattr(child_processes, "_tidier", dead)  # an error ended it
    children = child_processes.Children(program(tmp_path, idle=0.05))
    try:
        children.run((b"v",), LIMITS)
        until(lambda: not children._all, 20)
    finally:
        end(children)

"""Failures injected into the Python layer, one at a time, each in a forked child of a process with nothing loaded.

Run as a program: ``injection.py WAY BERT LLAMA STRIDE OFFSET [FILE:CALL ...]``, with a name of :data:`WAYS`. A first
child records the sites of the package: each distinct line that calls a C function (of the core, of the operating
system, of Python), imports a module or starts a thread while the function of WAYS runs. Sites of the way ``texts`` are
left out of the other ways. If any FILE:CALL is given, only sites that call or import CALL in a file whose path begins
with FILE count. Then, for every ``STRIDE``-th site from ``OFFSET`` on, a child lets that site fail once, and afterwards
repeats the work without failures. Prints one line of JSON: [number of sites, number of failures, [[site, failure,
verdict], ...]] with the verdicts that are wrong.
"""

import asyncio
import builtins
import errno
import faulthandler
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any, TypeVar

import numpy  # noqa: F401 - loaded before the fork, which keeps children fast
import tokenizers  # noqa: F401

import mpool

ROOT = os.path.dirname(os.path.abspath(mpool.__file__)) + os.sep
#: Seconds after which a child counts as hanging.
LIMIT = 60
#: Calls that cannot fail: they only look something up (`fspath`, `globals`, `done`) or remove it (`pop`), or a failure
#: would leave a lock taken, which shows no fault of the package.
_CANNOT_FAIL = ("__exit__", "release", "set_result", "append", "register_at_fork", "fspath", "globals", "done", "pop")
Site = list[Any]
F = TypeVar("F", bound=FunctionType)


def texts(pool: mpool.Pool, bert: str, llama: str) -> None:
    """A blocking request, a stream, an event loop, a job; tokens, metrics, health."""
    pool.embed(["a", "b"], bert)
    try:
        from mpool import aio
    except (ImportError, MemoryError):
        raise ImportFailed from None
    assert "".join(chunk.text for chunk in pool.generate("a", llama, max_tokens=2, temperature=0, stream=True))
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(aio.embed("c", bert, pool=pool))
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
    pool.submit("text_embedding", inputs="d", model=bert).result(60)
    pool.tokenize("d", bert)
    pool.metrics()
    pool.health()


def images(pool: mpool.Pool, bert: str, llama: str) -> None:
    """Images from files and to files."""
    path = os.path.join(ROOT, "demo_models", "images", "7.png")
    pool.embed_image([path], "digits-clip")
    assert pool.vision(path, "What digit is this?", "digits-llava", temperature=0, max_tokens=2).text
    assert pool.generate_image("a handwritten seven", "digits-sd3", seed=1, num_inference_steps=1).image


def names(pool: mpool.Pool, bert: str, llama: str) -> None:
    """Names of models: given, replaced, taken away. Each call of this function uses its own."""
    name = f"name{len(pool._names.by_key)}"
    pool.register(name, bert, max_length=32)
    pool.load(name, name=name + "-alias", pin=True)
    pool.embed("a", name + "-alias")
    pool.swap(name, bert, max_length=48)
    assert pool.get(name).context_length == 48
    pool.embed("b", name)
    pool.unload(name)
    pool.embed("c", name)
    pool.load(llama, kv_dtype="int8")
    pool.ps()
    pool.ping()


def conversations(pool: mpool.Pool, bert: str, llama: str) -> None:
    """Chat templates, grammars and captures."""
    messages = [{"role": "user", "content": "a"}]
    pool.chat(messages, llama, max_tokens=2, temperature=0)
    pool.chat(messages, llama, max_tokens=3, response_format={"type": "json_object"})
    with tempfile.TemporaryDirectory() as folder, mpool.debug.capture(folder) as capture:
        pool.generate("a", llama, max_tokens=2, capture=capture)


#: Way in -> function, and the number of events ``request_complete`` of one run.
WAYS = {"texts": (texts, 4), "images": (images, 3), "names": (names, 3), "conversations": (conversations, 3)}


class ImportFailed(Exception):
    """An import statement of the caller failed, with an ImportError or MemoryError, as in any package."""


def _as_system(function: F) -> F:
    """Decorate a function: errors that it raises look like those of the operating system, not of a caller's code."""
    function.__code__ = function.__code__.replace(co_filename="<frozen planted>")
    return function


class Tracer:
    """Calls ``reached(site)`` at each site of the package, in all threads."""

    def __init__(self, reached: Callable[[Site], None]) -> None:
        self._reached, self._import = reached, builtins.__import__

    def __enter__(self) -> None:
        builtins.__import__ = self._imported
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        builtins.__import__ = self._import

    @_as_system
    def _profile(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and frame.f_code.co_filename.startswith(ROOT) and function.__name__ not in _CANNOT_FAIL:
            home = getattr(function, "__module__", None) or type(getattr(function, "__self__", None)).__module__
            self._reached([frame.f_code.co_filename[len(ROOT):], frame.f_lineno, f"{home}.{function.__name__}"])

    @_as_system
    def _imported(self, name: str, scope: Any = None, *rest: Any) -> Any:
        frame = sys._getframe(1)
        if frame.f_code.co_filename.startswith(ROOT):
            self._reached([frame.f_code.co_filename[len(ROOT):], frame.f_lineno, f"import {name}"])
        return self._import(name, scope, *rest)


def failure_of(site: Site) -> BaseException:
    """Return the error that a site raises when its resource is exhausted."""
    what = site[2]
    if what.startswith("import "):
        return ImportError(f"planted: {what}")
    if what.startswith(("posix.", "io.", "_io.", "mmap.")):
        return OSError(errno.EIO, "planted")
    if "start_new_thread" in what:
        return RuntimeError("can't start new thread")
    return MemoryError("planted")


def run(way: str, bert: str, llama: str, wanted: Site | None) -> Any:
    """Return the sites (``wanted`` None), or the verdict of a run in which one site fails once."""
    work, count = WAYS[way]
    sites: list[Site] = []
    seen, failed = set[tuple[Any, ...]](), []

    @_as_system
    def reached(site: Site) -> None:
        if wanted is None:
            if tuple(site) not in seen:
                seen.add(tuple(site))
                sites.append(site)
        elif site == wanted and not failed:
            failed.append(site)
            raise failure_of(site)

    pool, events = None, list[str]()
    try:
        with Tracer(reached):
            pool = mpool.Pool(mpool.PoolConfig(threads=1, max_workers_per_model=1))
            pool.on("request_complete", lambda event: events.append(event.event))
            work(pool, bert, llama)
    except mpool.MpoolError as error:
        if error.__cause__ is None and error.__context__ is None and "planted" not in str(error):
            return f"no cause: {error!r}"
    except ImportFailed:
        pass
    except BaseException as error:
        return f"bare {error!r} <- {error.__cause__!r}"
    if wanted is None:
        return sites
    try:
        if pool is None or not pool._callbacks:
            pool = mpool.Pool(mpool.PoolConfig(threads=1, max_workers_per_model=1))
            pool.on("request_complete", lambda event: events.append(event.event))
        work(pool, bert, llama)
        pause = threading.Event()  # for the events of the second round, whatever the first one delivered
        for _ in range(300):
            if len(events) >= count:
                break
            pause.wait(0.01)
        if len(events) < count:
            return f"silent: {events}"
        pool.close()
    except BaseException as error:
        return f"afterwards: {error!r} <- {error.__cause__!r}"
    return "ok"


def child(way: str, bert: str, llama: str, wanted: Site | None) -> tuple[Any, int]:
    """Call :func:`run` in a forked child. Returns its result and the child's exit status."""
    here, there = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(here)
            faulthandler.register(signal.SIGALRM, chain=True)
            signal.alarm(LIMIT)
            data = json.dumps(run(way, bert, llama, wanted)).encode()
            while data:
                data = data[os.write(there, data):]
        finally:
            os._exit(0)
    os.close(there)
    with os.fdopen(here, "rb") as pipe:
        text = pipe.read()
    status = os.waitpid(pid, 0)[1]
    return (json.loads(text) if text else None), status


def main(way: str, bert: str, llama: str, stride: int, offset: int, *named: str) -> None:
    sites, status = child(way, bert, llama, None)
    assert status == 0 and isinstance(sites, list), sites
    if way != "texts":  # leave out the sites that "texts" reaches too
        known = {tuple(site) for site in child("texts", bert, llama, None)[0]}
        sites = [site for site in sites if tuple(site) not in known]
    if named:
        chosen = [name.split(":", 1) for name in named]
        sites = [site for site in sites if any(site[0].startswith(file) and call in site[2] for file, call in chosen)]
    wrong = []
    for site in sites[offset::stride]:
        verdict, status = child(way, bert, llama, site)
        if verdict != "ok":
            wrong.append([site, repr(failure_of(site)), verdict if status == 0 else f"status {status}"])
            print(*wrong[-1], file=sys.stderr, flush=True)
    print(json.dumps([len(sites), len(sites[offset::stride]), wrong]))


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]), *sys.argv[6:])

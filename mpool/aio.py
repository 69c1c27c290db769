"""mpool for asyncio: the functions of the package as coroutines and asynchronous iterators.

    async with asyncio.TaskGroup() as group:
        vector = group.create_task(mpool.aio.embed("A sentence."))
        completion = group.create_task(mpool.aio.generate("The capital of France is"))

    async for chunk in mpool.aio.chat(messages, stream=True):
        print(chunk, end="")

A request needs no thread of its own: each event loop watches one file descriptor, which the core makes readable when
requests have progressed. Only operations that would block the loop run in a thread: reading the files of a model on
first use, ``load``, ``unload`` and ``swap``, tokenizing a long text, decoding images, compiling a grammar, and
searching a batch for the input that gave NaN.

Cancelling a task cancels its request. Several tasks may await one job or stream, also in event loops of different
threads; the request is cancelled with the last task that awaits it. Arguments, results and errors are those of the
functions of the same name in :mod:`mpool`. If a queue is full, the coroutine waits without blocking the loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from .api.functions import pool_of
from .api.methods import _named
from .checks import refuse
from .host import native_calls
from .host.resources import typed, typed_async
from .pool import Pool
from .tasks.async_streams import AsyncImageStream, AsyncStream
from .tasks.running import run_async
from .tasks.verbs import VERBS, Verb


def _pool_for(pool: Any, *arguments: object) -> Pool:
    """Return the pool of a call: ``pool``, or if it is None, that of the first model of ``arguments``, or the default
    pool."""
    if pool is not None and not isinstance(pool, Pool):
        refuse("pool", pool, "an mpool.Pool or None")
    return pool_of(*arguments) if pool is None else pool


def _of_verb(verb: Verb) -> Callable[..., Any]:
    @typed
    def function(*args: Any, pool: Pool | None = None, **keywords: Any) -> Any:
        given = verb.bind(args, keywords)
        return run_async(verb, _pool_for(pool, given.get("model")), given)

    return _named(function, verb, "aio", f"Asynchronous form of :func:`mpool.{verb.name}`. ``pool``: the pool to use; "
                  "None: that of ``model`` if it is a :class:`mpool.Model`, else the process-wide pool."
                  + (f" ``stream=True`` returns a :class:`{verb.stream[1]}`." if verb.stream else ""))


def _options_of(method: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a coroutine function that passes its options to a method of a pool: give it the signature of both."""
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        found = inspect.signature(method)
        pool = inspect.signature(function).parameters["pool"]
        function.__signature__ = found.replace(  # type: ignore[attr-defined]
            parameters=[*list(found.parameters.values())[1:], pool])
        return function

    return decorate


@typed_async
@_options_of(Pool.load)
async def load(model: Any, *, pool: Pool | None = None, **options: Any) -> Any:
    """Asynchronous form of :func:`mpool.load`, with its arguments and errors. ``pool``: the pool to use; None: that of
    ``model`` or ``draft`` if it is a :class:`mpool.Model`, else the process-wide pool. Runs in a thread.
    """
    return await native_calls.REQUESTS.arun(partial(_pool_for(pool, model, *options.values()).load, model, **options))


@typed_async
async def unload(model: Any, *, timeout: float | None = None, pool: Pool | None = None) -> None:
    """Asynchronous form of :func:`mpool.unload`, with its arguments and errors. ``pool``: as for :func:`load`.
    Runs in a thread.
    """
    await native_calls.REQUESTS.arun(partial(_pool_for(pool, model).unload, model, timeout=timeout))


@typed_async
@_options_of(Pool.swap)
async def swap(model: Any, new: Any, *, pool: Pool | None = None, **options: Any) -> Any:
    """Asynchronous form of :func:`mpool.swap`, with its arguments and errors. ``pool``: as for :func:`load`.
    Runs in a thread; a cancelled task leaves the swap running.
    """
    return await native_calls.SWAPS.arun(partial(_pool_for(pool, model, *options.values()).swap, model, new, **options))


for _verb in VERBS.values():
    globals()[_verb.name] = _of_verb(_verb)

__all__ = ["AsyncImageStream", "AsyncStream", "load", "swap", "unload", *VERBS]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

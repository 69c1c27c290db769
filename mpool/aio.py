"""mpool for asyncio: the functions of the module as coroutines and asynchronous iterators.

    async with asyncio.TaskGroup() as group:
        vector = group.create_task(mpool.aio.embed("A sentence."))
        answer = group.create_task(mpool.aio.generate("The capital of France is"))

    async for chunk in mpool.aio.chat(messages, stream=True):
        print(chunk, end="")

No call takes a thread: each event loop watches one file descriptor, through which the core says which calls have moved.
Only what would hold the loop up leaves it: a model's files on their first use, ``load`` and ``unload``, tokenising a
long text, and looking for the text that failed among many.
Cancelling a task cancels its call; several tasks may await one job or stream, in loops of several threads too, and it
is cancelled with the last that waits for it. Arguments, results and errors are those of the functions of the same name
in :mod:`mpool`; a full queue is waited for without blocking the loop.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
    Sized,
)
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from ._runtime import default_pool
from .errors import InvalidArgument
from .pool import DESCRIBE
from .runtime import threads as _threads
from .runtime.watching import watcher
from .tasks import options as _options
from .tasks import rerank as reranking
from .tasks import text_embedding as embedding
from .tasks import vectors
from .tasks.async_streams import AsyncPictureStream, AsyncStream

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from . import _core
    from .images import ImageInput
    from .model import Model
    from .pool import Pool
    from .results import Completion
    from .tasks.images_result import Pictures
    from .tasks.options import Call, Compute, EmbedOptions, ImageOptions, PictureOptions, RerankOptions, TextOptions
    from .tasks.rerank import Ranking
    from .tasks.text_to_image import Request as DrawRequest
    from .tasks.text_to_text import Request
    from .tasks.vectors import Kind

    ModelLike = str | os.PathLike[str] | Model | None

T = TypeVar("T")


async def _tokenised(function: Callable[..., T], *args: Any) -> T:
    """``function(*args)`` on a thread that tokenises."""
    return await asyncio.get_running_loop().run_in_executor(_threads.executor(), function, *args)


async def _prepared(pool: Pool, model: Any, capability: str, compute: str, function: Callable[[], T],
                    long: bool = False, chat: bool = False) -> T:
    """``function()``: here if the model's files were read before and nothing is long, else in a thread."""
    entry = pool._known(model, capability)
    if entry is None or not entry.ready(compute, chat):
        return await asyncio.to_thread(function)
    return await _tokenised(function) if long else function()


# ---- embeddings -----------------------------------------------------------------------------------------------------

async def _pack(kind: Kind, plan: Any, inputs: list[Any], start: int, single: bool, call: Call) -> Any:
    """On a thread if it takes long, which reading images does."""
    if kind is not embedding.TEXTS:
        return await _tokenised(kind.pack, plan, inputs, start, single, call)
    if inputs and isinstance(inputs[0], list):
        return embedding.pack_ids(plan, inputs, start)
    if sum(len(text) for text in inputs if isinstance(text, str)) >= _threads.LONG // 4:
        return await _tokenised(embedding.pack, plan, inputs, start, single)
    return embedding.pack(plan, inputs, start, single)


async def _submit(kind: Kind, plan: Any, pack: Any, call: Call, lane: int) -> _core.Ticket | None:
    wait = not call.fail_fast
    return await watcher().enter(f"{plan.core_key}\n{lane}",
                                 lambda: vectors.submit(kind, plan, pack, call, lane, True, wait), wait)


async def _rows(kind: Kind, plan: Any, pack: Any, ticket: _core.Ticket | None, call: Call) -> NDArray[Any]:
    """Of a pack whose call was started; on a thread if it may have to look for an input that gave NaN."""
    if ticket is not None:
        await watcher().done(ticket)
    if plan.null and ticket is not None:
        return await asyncio.to_thread(vectors.landed, kind, plan, pack, ticket, call)
    return vectors.landed(kind, plan, pack, ticket, call)


def _tokens(kind: Kind, pack: Any) -> int:
    return int(pack.offsets[-1]) if kind is embedding.TEXTS else 0


async def _single(kind: Kind, plan: Any, one: Any, call: Call) -> tuple[NDArray[Any], int]:
    """The vector of one input, and how many tokens were read for it."""
    packed = await _pack(kind, plan, [one], 0, True, call)
    rows = await _rows(kind, plan, packed, await _submit(kind, plan, packed, call, vectors.INTERACTIVE), call)
    vectors.tell(kind, plan, packed, rows)
    return vectors.quantize(rows[0], plan.precision), _tokens(kind, packed)


async def _many(kind: Kind, plan: Any, parts: list[tuple[int, list[Any]]], progress: Any,
                call: Call) -> tuple[NDArray[Any], int]:
    """As :func:`mpool.tasks.vectors.embed_many`; and how many tokens were read."""
    total, tokens = sum(len(inputs) for _, inputs in parts), 0
    if plan.precision in ("int8", "uint8") and total == 1:
        vectors.quantize(vectors.empty(plan, 1), plan.precision)
    out, faults = vectors.empty(plan, total), vectors.Faults(plan, kind.unit)
    bar = vectors.Bar(progress, total, plan.entry.key, kind.unit)
    flow = _run_slices(kind, plan, _each(parts), call, vectors.lane_of(total))
    try:
        async for start, packed, rows in flow:
            out[start:start + packed.count] = rows
            tokens += _tokens(kind, packed)
            faults.add(start, packed, rows)
            bar.add(packed.count)
    finally:
        await flow.aclose()
        bar.close()
    faults.tell(total)
    return vectors.quantize(out, plan.precision), tokens


async def embed(inputs: str | Sequence[str], model: ModelLike = None, *, pool: Pool | None = None,
                task: Literal["query", "document"] | None = None, max_inputs: int | None = None,
                **options: Unpack[EmbedOptions]) -> NDArray[Any]:
    """As :func:`mpool.embed`, for asyncio. ``pool``: the pool to use; None: the process-wide one.

    Example:
        >>> import asyncio
        >>> asyncio.run(mpool.aio.embed("A sentence.")).shape
        (384,)
    """
    return (await _embed(inputs, model, pool or default_pool(), task, max_inputs, dict(options)))[0]


async def _embed(inputs: Any, model: ModelLike, pool: Pool, task: str | None, max_inputs: int | None,
                 passed: dict[str, Any]) -> tuple[NDArray[Any], int]:
    """The vectors, and how many tokens were read for them. ``inputs`` may also be lists of token ids."""
    call, most = _options.begin(pool.config, passed), pool._most(max_inputs)
    progress = vectors.check_progress(passed.pop("progress", None))
    texts = None if isinstance(inputs, str) else embedding.texts_of(inputs, most)
    chosen = _options.embedding("embed", {"task": task, **passed})
    plan = await _prepared(pool, model, "text_embedding", chosen.compute, lambda: pool._plan(model, chosen))
    if texts is None:
        return await _single(embedding.TEXTS, plan, inputs, call)
    return await _many(embedding.TEXTS, plan, list(embedding.slices(texts)), progress, call)


async def rerank(query: str, documents: Sequence[str], model: ModelLike, *, pool: Pool | None = None,
                 top_k: int | None = None, **options: Unpack[RerankOptions]) -> Ranking:
    """As :func:`mpool.rerank`, for asyncio. ``pool``: the pool to use; None: the process-wide one."""
    return (await _rerank(query, documents, model, pool or default_pool(), top_k, dict(options)))[0]


async def _rerank(query: str, documents: Sequence[str], model: ModelLike, pool: Pool, top_k: int | None,
                  passed: dict[str, Any]) -> tuple[Ranking, int]:
    """The ranking, and how many tokens were read for it."""
    call = _options.begin(pool.config, passed)
    texts, count = reranking.check(query, documents, top_k, pool.config.max_embed_inputs)
    chosen = reranking.options(passed)
    plan = reranking.plan_of(
        await _prepared(pool, model, "text_embedding", chosen.compute, lambda: pool._plan(model, chosen)), query)
    scores, tokens = await _many(embedding.TEXTS, plan, list(embedding.slices(texts)), False, call)
    return reranking.ranking(plan, texts, scores, count), tokens


async def embed_image(images: ImageInput | Sequence[ImageInput], model: ModelLike = None, *, pool: Pool | None = None,
                      max_inputs: int | None = None, **options: Unpack[ImageOptions]) -> NDArray[Any]:
    """As :func:`mpool.embed_image`, for asyncio; images are read and decoded on a thread."""
    from .images import images_of
    from .tasks import image_embedding

    pool = pool or default_pool()
    passed: dict[str, Any] = dict(options)
    call, most = _options.begin(pool.config, passed), pool._most(max_inputs)
    progress = vectors.check_progress(passed.pop("progress", None))
    found = images_of(images, most)
    chosen = _options.image_embedding(passed)
    plan = await _prepared(pool, model, "image_embedding", chosen.compute, lambda: pool._image_plan(model, chosen))
    if found is None:
        return (await _single(image_embedding.IMAGES, plan, images, call))[0]
    return (await _many(image_embedding.IMAGES, plan, image_embedding.slices(found), progress, call))[0]


async def _each(items: Iterable[T]) -> AsyncIterator[T]:
    for item in items:
        yield item


async def _run_slices(kind: Kind, plan: Any, parts: AsyncIterable[tuple[int, list[Any]]], call: Call,
                      lane: int = vectors.BULK) -> Any:
    """As :func:`mpool.tasks.vectors.run_slices`."""
    flying: deque[tuple[int, Any, _core.Ticket | None]] = deque()
    try:
        async for start, inputs in parts:
            packed = await _pack(kind, plan, inputs, start, False, call)
            flying.append((start, packed, await _submit(kind, plan, packed, call, lane)))
            call = _options.patient(call)
            while len(flying) >= vectors.DEPTH or (flying and (flying[0][2] is None or flying[0][2].done())):
                start, packed, ticket = flying[0]
                yield start, packed, await _rows(kind, plan, packed, ticket, call)
                flying.popleft()
        while flying:
            start, packed, ticket = flying[0]
            yield start, packed, await _rows(kind, plan, packed, ticket, call)
            flying.popleft()
    finally:
        for _, _, ticket in flying:
            if ticket is not None:
                ticket.cancel()


async def _async_slices(items: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[tuple[int, list[Any]]]:
    """As :func:`mpool.tasks.text_embedding.slices`, for both kinds of iterable; yields to the loop between
    slices."""
    if not isinstance(items, AsyncIterable):
        for part in embedding.slices(items):
            yield part
            await asyncio.sleep(0)
        return
    start, chars, held = 0, 0, []  # type: int, int, list[Any]
    async for item in items:
        size = len(item) if isinstance(item, str) else 0
        if held and (chars + size > embedding.SLICE_CHARS or len(held) >= embedding.SLICE_TEXTS):
            yield start, held
            start, chars, held = start + len(held), 0, []
        held.append(item)
        chars += size
    if held:
        yield start, held


async def embed_iter(iterable: Iterable[str] | AsyncIterable[str], model: ModelLike = None, *, pool: Pool | None = None,
                     task: Literal["query", "document"] | None = None, batch_size: int | None = None,
                     **options: Unpack[EmbedOptions]) -> AsyncIterator[NDArray[Any]]:
    """As :func:`mpool.embed_iter`, for asyncio; takes asynchronous iterables too.

    Example:
        >>> import asyncio
        >>> async def count():
        ...     return len([vector async for vector in mpool.aio.embed_iter(["one", "two"])])
        >>> asyncio.run(count())
        2
    """
    pool = pool or default_pool()
    if isinstance(iterable, (str, bytes, Mapping)) or not isinstance(iterable, (Iterable, AsyncIterable)):
        raise InvalidArgument(f"iterable is {type(iterable).__name__}, allowed: an iterable of str")
    passed: dict[str, Any] = dict(options)
    call = _options.begin(pool.config, passed)
    progress = vectors.check_progress(passed.pop("progress", None))
    chosen = _options.embedding("embed_iter", {"task": task, **passed})
    batch_size = embedding.check_streamable(chosen, batch_size)
    plan = await _prepared(pool, model, "text_embedding", chosen.compute, lambda: pool._plan(model, chosen))
    total = len(iterable) if isinstance(iterable, Sized) else None
    out, faults, bar = embedding.Rebatch(batch_size), vectors.Faults(plan), \
        vectors.Bar(progress, total, plan.entry.key)
    done = 0
    flow = _run_slices(embedding.TEXTS, plan, _async_slices(iterable), call)
    try:
        async for start, packed, rows in flow:
            faults.add(start, packed, rows)
            done += packed.count
            bar.add(packed.count)
            for vector in out.add(vectors.quantize(rows, plan.precision)):
                yield vector
        for vector in out.rest():
            yield vector
        faults.tell(done)
    finally:
        await flow.aclose()
        bar.close()


# ---- text -----------------------------------------------------------------------------------------------------------

def _text(pool: Pool, model: Any, options: dict[str, Any], chars: int, stream: bool,
          make: Callable[[Call], Request], chat: bool = False, capability: str = "text_to_text") -> Any:
    if not isinstance(stream, bool):
        raise InvalidArgument(f"stream is {stream!r}, allowed: True or False")
    begun = _options.begin(pool.config, options)
    compute = options.get("compute", "auto")
    if isinstance(compute, str) and compute == "auto" and hasattr(model, "_compute"):
        compute = model._compute
    long = chars >= _threads.LONG // 4 or any(options.get(name) is not None  # grammars are compiled
                                              for name in ("response_format", "tools"))

    async def request() -> Request:
        return await _prepared(pool, model, capability, compute, lambda: make(begun), long, chat)

    call = AsyncStream(request, begun)
    return call if stream else _collect(call)


async def _collect(call: Any) -> Any:
    """The result of a stream; leaving it stops the work."""
    try:
        return await call.result()
    finally:
        call._leave()


@overload
def generate(prompt: str | Sequence[int], model: ModelLike = None, *, stream: Literal[False] = False,
             pool: Pool | None = None, **sampling: Unpack[TextOptions]) -> Awaitable[Completion]: ...
@overload
def generate(prompt: str | Sequence[int], model: ModelLike = None, *, stream: Literal[True],
             pool: Pool | None = None, **sampling: Unpack[TextOptions]) -> AsyncStream: ...
def generate(prompt: str | Sequence[int], model: ModelLike = None, *, stream: bool = False, pool: Pool | None = None,
             **sampling: Any) -> Awaitable[Completion] | AsyncStream:
    """As :func:`mpool.generate`, for asyncio: to be awaited, or with ``stream=True`` iterated over.

    Example:
        >>> import asyncio
        >>> asyncio.run(mpool.aio.generate("The capital of France is", temperature=0, max_tokens=2)).text
        ' Paris.'
    """
    use = pool or default_pool()
    chars = len(prompt) if isinstance(prompt, str) else 0
    return _text(use, model, sampling, chars, stream, lambda _: use._prompt_request(prompt, model, dict(sampling)))


@overload
def chat(messages: Sequence[Mapping[str, Any]], model: ModelLike = None, *, stream: Literal[False] = False,
         pool: Pool | None = None, **sampling: Unpack[TextOptions]) -> Awaitable[Completion]: ...
@overload
def chat(messages: Sequence[Mapping[str, Any]], model: ModelLike = None, *, stream: Literal[True],
         pool: Pool | None = None, **sampling: Unpack[TextOptions]) -> AsyncStream: ...
def chat(messages: Sequence[Mapping[str, Any]], model: ModelLike = None, *, stream: bool = False,
         pool: Pool | None = None, **sampling: Any) -> Awaitable[Completion] | AsyncStream:
    """As :func:`mpool.chat`, for asyncio: to be awaited, or with ``stream=True`` iterated over."""
    use = pool or default_pool()
    return _text(use, model, sampling, _chars(messages), stream,
                 lambda call: use._chat_request(messages, model, dict(sampling), call), chat=True)


@overload
def vision(images: ImageInput | Sequence[ImageInput], prompt: str, model: ModelLike = None, *,
           stream: Literal[False] = False, pool: Pool | None = None,
           **sampling: Unpack[TextOptions]) -> Awaitable[Completion]: ...
@overload
def vision(images: ImageInput | Sequence[ImageInput], prompt: str, model: ModelLike = None, *,
           stream: Literal[True], pool: Pool | None = None, **sampling: Unpack[TextOptions]) -> AsyncStream: ...
def vision(images: ImageInput | Sequence[ImageInput], prompt: str, model: ModelLike = None, *, stream: bool = False,
           pool: Pool | None = None, **sampling: Any) -> Awaitable[Completion] | AsyncStream:
    """As :func:`mpool.vision`, for asyncio: to be awaited, or with ``stream=True`` iterated over. Images are read and
    prepared in a thread."""
    use = pool or default_pool()
    return _text(use, model, sampling, _threads.LONG, stream,
                 lambda call: use._vision_request(images, prompt, model, dict(sampling), call), chat=True,
                 capability="vision")


async def describe_image(path: str | os.PathLike[str], query: str = DESCRIBE, model: ModelLike = None, *,
                         pool: Pool | None = None, **sampling: Unpack[TextOptions]) -> str:
    """As :func:`mpool.describe_image`, for asyncio."""
    use = pool or default_pool()
    return (await vision(use._described_path(path), query, model, pool=use, **sampling)).text


async def describe_url(url: str, query: str = DESCRIBE, model: ModelLike = None, *, pool: Pool | None = None,
                       **sampling: Unpack[TextOptions]) -> str:
    """As :func:`mpool.describe_url`, for asyncio."""
    use = pool or default_pool()
    sampling.setdefault("allow_urls", True)
    return (await vision(use._described_url(url), query, model, pool=use, **sampling)).text


def _chars(messages: Any) -> int:
    """Characters of a conversation, as far as it is one; what is wrong in it is said later. An image is many."""
    return sum(_length(message.get("content")) + (_threads.LONG if message.get("images") is not None else 0)
               for message in messages if isinstance(message, Mapping)) \
        if isinstance(messages, Sequence) and not isinstance(messages, (str, bytes)) else 0


def _length(content: Any) -> int:
    parts = content if isinstance(content, (list, tuple)) else (content,)
    found = 0
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        found += len(text) if isinstance(text, str) else _threads.LONG if isinstance(part, Mapping) else 0
    return found


@overload
def generate_image(prompt: str, model: ModelLike = None, *, stream: Literal[False] = False, pool: Pool | None = None,
                   **options: Unpack[PictureOptions]) -> Awaitable[Pictures]: ...
@overload
def generate_image(prompt: str, model: ModelLike = None, *, stream: Literal[True], pool: Pool | None = None,
                   **options: Unpack[PictureOptions]) -> AsyncPictureStream: ...
def generate_image(prompt: str, model: ModelLike = None, *, stream: bool = False, pool: Pool | None = None,
                   **options: Any) -> Awaitable[Pictures] | AsyncPictureStream:
    """As :func:`mpool.generate_image`, for asyncio: to be awaited, or with ``stream=True`` iterated over."""
    if not isinstance(stream, bool):
        raise InvalidArgument(f"stream is {stream!r}, allowed: True or False")
    use = pool or default_pool()
    begun = _options.begin(use.config, options)

    async def request() -> DrawRequest:
        return await asyncio.to_thread(use._draw_request, prompt, model, dict(options), stream)

    call = AsyncPictureStream(request, begun)
    return call if stream else _collect(call)


async def load(ref: str | os.PathLike[str] | Model, *, alias: str | None = None, pin: bool = False,
               keep_alive: float | str | None = None, compute: Compute = "auto", progress: bool | None = None,
               timeout: float | None = None, isolation: Literal["thread", "process"] | None = None,
               pool: Pool | None = None) -> Model:
    """As :func:`mpool.load`, in a thread."""
    use = pool or default_pool()
    return await asyncio.to_thread(use.load, ref, alias=alias, pin=pin, keep_alive=keep_alive, compute=compute,
                                   progress=progress, timeout=timeout, isolation=isolation)


async def unload(alias: str | os.PathLike[str] | Model, *, timeout: float | None = None,
                 pool: Pool | None = None) -> None:
    """As :func:`mpool.unload`, in a thread."""
    use = pool or default_pool()
    await asyncio.to_thread(use.unload, alias, timeout=timeout)


async def _job_result(job: Any) -> Any:
    if job._ticket is not None:
        await watcher().done(job._ticket)
        if job._recovers():
            return await asyncio.to_thread(job._finish)
    return job._finish()


__all__ = ["AsyncPictureStream", "AsyncStream", "chat", "describe_image", "describe_url", "embed", "embed_image",
           "embed_iter", "generate", "generate_image", "load", "rerank", "unload", "vision"]

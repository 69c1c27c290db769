"""Calls that were started and not waited for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgument, MpoolError, NumericError, Overloaded, Timeout
from ..runtime import threads as _threads
from ..runtime.awaiting import Waiter
from . import options as _options

if TYPE_CHECKING:
    from .. import _core
    from ..pool import Pool
    from ..results import Chunk
    from .image_embedding import ImagePlan
    from .images_result import PictureStep
    from .options import Call
    from .streams import Iteration, Stream
    from .text_embedding import Plan
    from .text_to_image import PictureStream
    from .vectors import Kind


class Job:
    """A call in flight. Made by :func:`mpool.submit`.

    ``result()`` waits for it, in any thread; in a coroutine, ``await job`` does. One that generates text or
    pictures can be iterated over, with ``for`` or ``async for``, and gives its text piece by piece, or steps. Dropping
    it cancels it.

    Any number of threads and tasks, in loops of several threads too, may wait for one job. Cancelling a task that
    awaits a job cancels the job only if nobody else waits for it; :meth:`cancel` always does.

    Attributes:
        capability: what was asked for.
        model: key of the model.
    """

    def __init__(self, capability: str, model: str) -> None:
        self.capability, self.model = capability, model

    @property
    def _ticket(self) -> _core.Ticket | None:
        raise NotImplementedError

    def _finish(self) -> Any:
        """The result of a ticket that is done."""
        raise NotImplementedError

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the result: what :func:`mpool.embed` or :func:`mpool.generate` return.

        Args:
            timeout: seconds to wait; 0: not at all; None: as long as it takes. The job goes on when they are over.

        Raises:
            InvalidArgument: the timeout is no number of seconds.
            Timeout: it is not done yet.
            Cancelled: it was cancelled.
            MpoolError: it failed.
        """
        seconds = _threads.seconds_of(timeout, zero=True)
        ticket = self._ticket
        if ticket is not None and not ticket.done():
            with Waiter(ticket):
                done = ticket.wait(seconds) if seconds is None or seconds > 0 else ticket.done()
            if not done:
                raise Timeout(f"the job is not done after {seconds:g} s; it goes on", key=self.model)
        return self._finish()

    def _recovers(self) -> bool:
        """Whether the result, once the ticket is done, takes computing of its own."""
        return False

    def done(self) -> bool:
        """Whether it is answered, with a result or an error."""
        return self._ticket is None or self._ticket.done()

    def cancel(self) -> bool:
        """Stops it, within a layer or a token if it runs. Returns False if it was done already."""
        if self.done():
            return False
        assert self._ticket is not None
        self._ticket.cancel()
        return True

    def position(self) -> int:
        """Calls ahead of it in the queue; -1 once it runs or is done."""
        return -1 if self._ticket is None else self._ticket.position()

    def eta(self) -> float | None:
        """Predicted seconds until it is done; 0.0 when it is; None: nobody knows, as for a model that is not loaded."""
        if self.done():
            return 0.0
        assert self._ticket is not None
        return self._ticket.eta() or None

    def __await__(self) -> Generator[Any, None, Any]:
        from .. import aio

        return aio._job_result(self).__await__()

    def __repr__(self) -> str:
        return f"<mpool.Job of {self.model}, {self.capability}, {'done' if self.done() else 'running'}>"


class _VectorJob(Job):
    """A job whose result is vectors of inputs of a kind; ``_call`` is None when none of them is to be computed."""

    def __init__(self, capability: str, kind: Kind, plan: Any, inputs: list[Any], single: bool, call: Call) -> None:
        from . import vectors

        super().__init__(capability, plan.entry.key)
        self._kind, self._plan, self._options, self._single, self._told = kind, plan, call, single, False
        self._pack = kind.pack(plan, inputs, 0, single, call)
        self._call = vectors.submit(kind, plan, self._pack, call, vectors.lane_of(len(inputs)), True)

    @property
    def _ticket(self) -> _core.Ticket | None:
        return self._call

    def _recovers(self) -> bool:
        if self._call is None or not self._plan.null:
            return False
        try:
            self._call.check()
        except NumericError:
            return True
        except MpoolError:
            pass
        return False

    def _finish(self) -> Any:
        from . import vectors

        rows = vectors.landed(self._kind, self._plan, self._pack, self._call, self._options)
        if not self._told:
            self._told = True
            vectors.tell(self._kind, self._plan, self._pack, rows)
        return vectors.quantize(rows[0] if self._single else rows, self._plan.precision)


class EmbedJob(_VectorJob):
    """A job whose result is vectors of texts."""

    def __init__(self, plan: Plan, inputs: Any, most: int, call: Call) -> None:
        from . import text_embedding as embedding

        single = isinstance(inputs, str)
        texts = [inputs] if single else embedding.texts_of(inputs, most)
        super().__init__("text_embedding", embedding.TEXTS, plan, texts, single, call)


class ImageJob(_VectorJob):
    """A job whose result is vectors of images."""

    def __init__(self, plan: ImagePlan, images: Any, most: int, call: Call) -> None:
        from ..images import images_of
        from . import image_embedding

        found = images_of(images, most)
        super().__init__("image_embedding", image_embedding.IMAGES, plan, [images] if found is None else found,
                         found is None, call)


class _StreamJob(Job):
    """What jobs have in common whose pieces can be iterated over."""

    _stream: Any  # each kind says which

    @property
    def _ticket(self) -> _core.Ticket:
        ticket: _core.Ticket = self._stream._ticket
        return ticket

    def _finish(self) -> Any:
        return self._stream.result()

    def __iter__(self) -> Iteration[Any]:
        return iter(self._stream)


class TextJob(_StreamJob):
    """A job whose result is a completion; its pieces are chunks."""

    _stream: Stream

    def __init__(self, stream: Stream, capability: str = "text_to_text") -> None:
        super().__init__(capability, stream._key)
        self._stream = stream

    def __aiter__(self) -> AsyncIterator[Chunk]:
        from .. import aio

        return aio.AsyncStream._of_job(self._stream).__aiter__()


class PictureJob(_StreamJob):
    """A job whose result is pictures; its pieces are steps."""

    _stream: PictureStream

    def __init__(self, stream: PictureStream) -> None:
        super().__init__("text_to_image", stream._key)
        self._stream = stream

    def __aiter__(self) -> AsyncIterator[PictureStep]:
        from .. import aio

        return aio.AsyncPictureStream._of_job(self._stream).__aiter__()


def submit(pool: Pool, capability: str, request: dict[str, Any]) -> Job:
    """See :func:`mpool.submit`."""
    try:
        return _submit(pool, capability, dict(request))
    except Overloaded as error:
        single = isinstance(request.get("inputs"), str)
        field = {"text_embedding": "embed_queue_capacity" if single else "batch_queue_capacity",
                 "image_embedding": "image_embed_queue_capacity", "vision": "vision_queue_capacity",
                 "text_to_image": "image_gen_queue_capacity"}.get(capability, "prompt_queue_capacity")
        error.hint = error.hint or f"Take a job's result first; PoolConfig.{field} makes the queue longer"
        raise


def _submit(pool: Pool, capability: str, request: dict[str, Any]) -> Job:
    call = _options.begin(pool.config, request)
    model = request.pop("model", None)
    if isinstance(capability, str) and capability == "text_embedding":
        from .options import Embedding as Options

        if "inputs" not in request:
            raise InvalidArgument("inputs is missing, allowed: a str or a list of str")
        inputs, most = request.pop("inputs"), pool._most(request.pop("max_inputs", None))
        if "progress" in request:
            raise InvalidArgument("progress is not an option of submit", hint="A job has done() and position()")
        try:
            options = Options(**request)
        except TypeError:
            names = ", ".join(("inputs", "model", "max_inputs", *Options.__slots__,
                               *_options.CallKeywords.__annotations__))
            wrong = next(name for name in request if name not in Options.__slots__)
            raise InvalidArgument(f"{wrong} is not an option of text_embedding", hint="Options: " + names) from None
        return EmbedJob(pool._plan(model, options), inputs, most, call)
    if isinstance(capability, str) and capability == "image_embedding":
        if "images" not in request:
            raise InvalidArgument("images is missing, allowed: an image or a list of images")
        images, most = request.pop("images"), pool._most(request.pop("max_inputs", None))
        if "progress" in request:
            raise InvalidArgument("progress is not an option of submit", hint="A job has done() and position()")
        slots = _options.ImageEmbedding.__slots__
        unknown = next((name for name in request if name not in slots), None)
        if unknown is not None:
            names = ", ".join(("images", "model", "max_inputs", *slots, *_options.CallKeywords.__annotations__))
            raise InvalidArgument(f"{unknown} is not an option of image_embedding", hint="Options: " + names)
        return ImageJob(pool._image_plan(model, _options.image_embedding(request)), images, most, call)
    if isinstance(capability, str) and capability == "text_to_text":
        from .streams import Stream

        if "stream" in request:
            raise InvalidArgument("stream is not an option of submit", hint="A job can be iterated over")
        given = [name for name in ("prompt", "messages") if name in request]
        if len(given) != 1:
            raise InvalidArgument(f"{' and '.join(given) or 'neither prompt nor messages'} given, allowed: one of "
                                  "prompt and messages")
        if given[0] == "prompt":
            return TextJob(Stream(pool._prompt_request(request.pop("prompt"), model, request), call, True))
        return TextJob(Stream(pool._chat_request(request.pop("messages"), model, request, call), call, True))
    if isinstance(capability, str) and capability == "vision":
        return _submit_vision(pool, model, request, call)
    if isinstance(capability, str) and capability == "text_to_image":
        from .text_to_image import PictureStream

        if "stream" in request:
            raise InvalidArgument("stream is not an option of submit", hint="A job can be iterated over")
        if "prompt" not in request:
            raise InvalidArgument("prompt is missing, allowed: a text")
        return PictureJob(PictureStream(pool._draw_request(request.pop("prompt"), model, request), call, True))
    from ..checks import nearest, shown

    allowed = _options.CAPABILITIES
    near = nearest(str(capability), list(allowed), 1)
    raise InvalidArgument(f"capability is {shown(capability)}" + (f"; the nearest is {near[0]}" if near else "")
                          + ", allowed: " + ", ".join(allowed))


def _submit_vision(pool: Pool, model: Any, request: dict[str, Any], call: Call) -> TextJob:
    from .streams import Stream

    if "stream" in request:
        raise InvalidArgument("stream is not an option of submit", hint="A job can be iterated over")
    if "messages" in request:
        for name in ("images", "prompt"):
            if name in request:
                raise InvalidArgument(f"messages and {name} given, allowed: messages, or images and prompt")
        made = pool._chat_request(request.pop("messages"), model, request, call, "vision")
    else:
        for name in ("images", "prompt"):
            if name not in request:
                raise InvalidArgument(f"{name} is missing, allowed: images and prompt, or messages")
        made = pool._vision_request(request.pop("images"), request.pop("prompt"), model, request, call)
    return TextJob(Stream(made, call, True), "vision")

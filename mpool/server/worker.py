"""``mpool worker``: a server for one model that runs one job at a time, for programs that keep many such processes.

Jobs run in the order of their arrival. A turn ends when the response is sent and the core has released the request, so
no two jobs overlap. Everything runs on the loop's thread: prompts and bodies are short enough to be parsed there, the
model is loaded before the first request, and the core computes on threads of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.responses import Response

from ..checks import refuse
from ..config import PoolConfig
from ..errors import ContextOverflow, InvalidArgument
from ..pool import Pool
from ..runtime.watching import watcher
from ..tasks import options as _options
from ..tasks import requests
from ..tasks.async_streams import AsyncStream
from .errors import Refusal, worker_error
from .operational import metrics
from .operations import Context, Operation, json_answer
from .serving import Serving
from .settings import Settings
from .streaming import EVENTS, Streamed, event

if TYPE_CHECKING:
    import os

    from ..results import Chunk
    from ..tasks.captures import Capture
    from ..tasks.text_to_text import Request

#: Seconds that the running job gets to complete when the worker stops, and seconds that its client gets to read the
#: last bytes: the process must end within 5 s.
GRACE, _LAST = 3.5, 0.5
#: Maximum bytes of a body: a prompt of 32,768 characters, each escaped as a surrogate pair, and the other fields.
_MAX_BODY = 32_768 * 12 + (64 << 10)
_MAX_SEED = 2**64 - 1
_encode = msgspec.json.Encoder().encode


# ---- on the wire -----------------------------------------------------------------------------------------------------

class ExecuteRequest(Struct, forbid_unknown_fields=True):
    """A job. Unset sampling options have the defaults of the model's authors, else those of :func:`mpool.generate`."""

    job_id: Annotated[str, Meta(min_length=1, max_length=256)]
    prompt: Annotated[str, Meta(min_length=1, max_length=32_768)]
    max_tokens: Annotated[int, Meta(ge=1, le=2048)] = 512
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=4)] | None = None
    seed: Annotated[int, Meta(ge=0)] | None = None  # up to _MAX_SEED; Meta allows no bound above 2**63 - 1


#: Fields of a job that are options of the library with the same names.
_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "seed")


class CancelRequest(Struct, forbid_unknown_fields=True):
    """The job to cancel."""

    job_id: Annotated[str, Meta(min_length=1, max_length=256)]


class CancelAnswer(Struct):
    """``cancelled``: false if the job has already ended or never existed, which is no error."""

    job_id: str
    cancelled: bool


class ShutdownAnswer(Struct):
    """The worker shuts down."""

    status: Literal["stopping"] = "stopping"


class HealthAnswer(Struct):
    """State of the worker.

    ``status``: ``ready``, ``busy`` (a job runs), ``stopping`` or ``unhealthy``. ``resident``: the model is in memory,
    in ``bytes_used`` bytes including caches. ``quant_kind``: the stored type of most of the weights' bytes.
    ``waiting``: queued jobs. ``uptime``: seconds.
    """

    status: str
    model: str
    resident: bool
    quant_kind: str
    bytes_used: int
    tokenizer_kind: str
    vocab_size: int
    context_length: int
    waiting: int
    uptime: float


class Started(Struct):
    """The first event: the job starts."""

    job_id: str
    model: str


class Token(Struct):
    """Generated text: ``t``, whole characters, and ``i``, the number of the last token in it, from 0."""

    t: str
    i: int


class End(Struct):
    """The last event of a job that succeeded. ``decode_time_ms``: from the first token to the last."""

    tokens_out: int
    decode_time_ms: float
    stop_reason: Literal["stop", "length"]


# ---- turns -----------------------------------------------------------------------------------------------------------

class Job:
    """A queued or running job.

    Attributes:
        turn: done when the job may run.
        stream: the stream of the library, once the job runs.
        cancelled: a client has cancelled the job.
    """

    def __init__(self, id: str) -> None:
        self.id, self.cancelled = id, False
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stream: AsyncStream | None = None


class Turns:
    """A queue that runs one job at a time, first come, first served. Must be used on the loop's thread only.

    Attributes:
        running: the job that may run.
    """

    def __init__(self) -> None:
        self.running: Job | None = None
        self._waiting: deque[Job] = deque()
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """Number of queued jobs."""
        return len(self._waiting)

    def find(self, id: str) -> Job | None:
        """The queued or running job of an id, or None."""
        if self.running is not None and self.running.id == id:
            return self.running
        return next((job for job in self._waiting if job.id == id), None)

    async def wait(self, job: Job) -> None:
        """Wait for the job's turn. The caller must call :meth:`leave` afterwards, even if this raises.

        Raises:
            Refusal: the job was cancelled meanwhile.
        """
        if self.running is None:
            self.running = job
            return
        self._waiting.append(job)
        await job.turn

    def cancel(self, job: Job) -> None:
        """Cancel a job: at once if it is queued, within one step if it runs."""
        job.cancelled = True
        if job.stream is not None:
            job.stream._cancel()
        elif not job.turn.done() and job is not self.running:
            job.turn.set_exception(Refusal("cancelled"))

    def leave(self, job: Job) -> None:
        """End a job's turn. The next job starts once the core has released the request."""
        if job is not self.running:
            if job in self._waiting:
                self._waiting.remove(job)
            return
        stream = job.stream
        if stream is not None:
            stream._cancel()
            if stream._ticket is not None and not stream._ticket.done():
                task = asyncio.ensure_future(self._pass_on(stream))
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
                return
        self._next()

    async def _pass_on(self, stream: AsyncStream) -> None:
        assert stream._ticket is not None
        try:
            await watcher().done(stream._ticket)
        finally:
            self._next()

    def _next(self) -> None:
        self.running = None
        while self._waiting and self.running is None:
            job = self._waiting.popleft()
            if not job.turn.done():  # a cancelled job leaves by itself
                self.running = job
                job.turn.set_result(None)


# ---- the server ------------------------------------------------------------------------------------------------------

class Worker:
    """A server for one model. Loads the model when it is made.

    Args:
        ref: reference of the model, also as ``NAME=REF``.
        settings: address, clients and limits.
        config: of its pool; see :func:`worker_config`.
        compute: compute type.
        busy: ``"wait"`` queues a job that arrives while another one runs; ``"refuse"`` refuses it with HTTP 409.
        timeout: time limit of a job in seconds, from its start; None: no limit.
        capture: records the layers of every job, under its ``job_id`` (:func:`mpool.capture`); None: no records.
        announce: called with the progress of the load: per cent, and the completed stage.

    Attributes:
        serving: the server.

    Raises:
        InvalidArgument: the model is not a language model.
        and what :func:`mpool.load` and :class:`mpool.server.serving.Serving` raise.
    """

    def __init__(self, ref: str | os.PathLike[str], settings: Settings, config: PoolConfig, compute: str = "auto",
                 busy: Literal["wait", "refuse"] = "wait", timeout: float | None = None, capture: Capture | None = None,
                 announce: Callable[[int, str], object] = lambda share, what: None) -> None:
        if busy not in ("wait", "refuse"):
            refuse("busy", busy, "'wait' or 'refuse'")
        self.busy, self.timeout, self.capture, self.turns = busy, timeout, capture, Turns()
        self._options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        _options.begin(config, dict(self._options))  # checks the timeout
        self.pool = Pool(config)
        try:
            announce(0, "searching the model")
            self.serving = Serving(settings, self.pool, [ref], False, compute, self._operations(), _LAST)
            try:
                self._load(announce)
            except BaseException:
                self.serving.close()
                raise
        except BaseException:
            self.pool.close()
            raise

    def _load(self, announce: Callable[[int, str], object]) -> None:
        served = self.serving.state.models.all()[0]
        self.name, self.model = served.name, served.model
        if "text_to_text" not in self.model.capabilities:
            raise InvalidArgument(param="model", got=f"{self.name}, a {self.model.capability} model",
                                  allowed="a text_to_text model")
        announce(25, "read the files")
        tokenizer = self.model._entry.tokenizer()
        tokenizer.finish()  # all of it now: no thread may do it later
        description = self.model.description
        bytes_of: Counter[str] = Counter()
        for tensor in description.spec.tensors:
            bytes_of[tensor.dtype] += tensor.nbytes
        self._facts: dict[str, Any] = {
            "model": self.name, "quant_kind": max(bytes_of, key=bytes_of.__getitem__),
            "tokenizer_kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size,
            "context_length": self.model.context_length}
        announce(50, "prepared the tokenizer")
        self.pool.load(self.model, pin=True)
        announce(75, "loaded the weights")
        self.model.generate("a", temperature=0, max_tokens=1)
        announce(100, "generated a token")

    def run(self, ready: Callable[[], object] | None = None) -> None:
        """Serve until SIGTERM, SIGINT or ``POST /shutdown``; see :meth:`mpool.server.serving.Serving.run`."""
        self.serving.run(ready)

    def _operations(self) -> tuple[Operation, ...]:
        return (
            Operation("POST", "/execute", self.execute, ExecuteRequest, None, "Run a job", EVENTS, "execute", True),
            Operation("POST", "/cancel", self.cancel, CancelRequest, CancelAnswer, "Cancel a job", None, "cancel",
                      True),
            Operation("POST", "/shutdown", self.shutdown, None, ShutdownAnswer, "Stop the worker", None, "shutdown"),
            Operation("GET", "/health", self.health, None, HealthAnswer, "State of the worker", None, "health"),
            Operation("GET", "/metrics", metrics, None, None, "Counters for Prometheus", None, "metrics"),
        )

    async def execute(self, context: Context, body: ExecuteRequest) -> Response:
        """Run a job and stream its events. An invalid job is refused before it is queued."""
        if body.seed is not None and body.seed > _MAX_SEED:
            raise Refusal("invalid_value", f"`seed` must be an integer from 0 to {_MAX_SEED}, got {body.seed}.", "seed")
        options = {name: value for name in _OPTIONS if (value := getattr(body, name)) is not None}
        if self.capture is not None:
            options["capture"] = self.capture.job(body.job_id)
        try:
            request = requests.prompt_request(self.pool, body.prompt, self.model,
                                              {**options, "max_tokens": body.max_tokens})
        except ContextOverflow as error:
            raise Refusal("context_length_exceeded", f"{error.message}.", "prompt") from None
        if self.turns.find(body.job_id) is not None:
            raise Refusal("invalid_value", "`job_id` must be new: a job of this id is queued or running.", "job_id")
        if self.busy == "refuse" and self.turns.running is not None:
            raise Refusal("busy")
        job = Job(body.job_id)
        try:
            await self.turns.wait(job)
            if job.cancelled:  # in the moment of its start
                raise Refusal("cancelled")
            await self._begin(job, request)
        except BaseException:
            self.turns.leave(job)
            raise
        return Streamed(context.state, context.id, self._events(job), _failed, EVENTS, lambda: self.turns.leave(job))

    async def _begin(self, job: Job, request: Request) -> None:
        async def made() -> Request:
            return request

        job.stream = AsyncStream(made, _options.begin(self.pool.config, dict(self._options)))
        await job.stream

    async def _events(self, job: Job) -> AsyncIterator[bytes]:
        stream = job.stream
        assert stream is not None
        yield event(_encode(Started(job.id, self.name)), "started")
        tokens = Tokens(stream)
        async for chunk in stream:
            for token in tokens.of(chunk):
                yield event(_encode(token), "token")
        if job.cancelled:
            raise Refusal("cancelled")
        done = await stream.result()
        if done.finish_reason not in ("stop", "length"):
            raise Refusal("cancelled")
        yield event(_encode(End(done.usage.completion_tokens, round(done.timings.generation * 1e3, 3),
                                done.finish_reason)), "end")

    async def cancel(self, context: Context, body: CancelRequest) -> Response:
        """Cancel a job. Idempotent."""
        job = self.turns.find(body.job_id)
        if job is not None:
            self.turns.cancel(job)
        return json_answer(CancelAnswer(body.job_id, job is not None))

    async def shutdown(self, context: Context, body: None) -> Response:
        """Shut down as after SIGTERM."""
        self.serving.stop()
        return json_answer(ShutdownAnswer(), 202)

    async def health(self, context: Context, body: None) -> Response:
        """Report the state. Never waits for jobs."""
        state = context.state
        row = next(iter(self.pool.ps()), None)
        status = "stopping" if state.stopping else "unhealthy" if self.pool.health().status == "unhealthy" \
            else "busy" if self.turns.running is not None else "ready"
        return json_answer(HealthAnswer(
            status=status, resident=row is not None and row.state in ("ready", "busy"),
            bytes_used=0 if row is None else row.model_bytes + row.engine_bytes, waiting=self.turns.waiting,
            uptime=round(time.monotonic() - state.started, 3), **self._facts),
            503 if status in ("stopping", "unhealthy") else 200)


def _failed(refusal: Refusal) -> bytes:
    return event(worker_error(refusal), "error")


class Tokens:
    """Splits stream chunks into events, one per token. A token that ends inside a character joins the token that
    completes it. A token without text has no event. A token of which the stream holds back a part, because it may begin
    a stop string, waits for that part."""

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream
        self._rest = b""  # bytes of incomplete tokens
        self._base = self._seen = 0  # bytes and tokens before them

    def of(self, chunk: Chunk) -> list[Token]:
        """The events of the next stream chunk."""
        ticket, found, at = self._stream._ticket, [], 0
        assert ticket is not None
        data = self._rest + chunk.text.encode()
        ends = ticket.tokens(0, self._seen)[2].tolist()
        last = self._seen + len(ends) - 1
        for end in ends:
            stop = end - self._base
            if stop > len(data):
                break
            self._seen += 1
            if stop > at and (stop == len(data) or data[stop] & 0xC0 != 0x80):
                found.append(Token(data[at:stop].decode(), self._seen - 1))
                at = stop
        if chunk.finish_reason is not None and at < len(data):  # a stop string or a cut character follows
            found.append(Token(data[at:].decode(), min(self._seen, last)))
            at = len(data)
        self._rest, self._base = data[at:], self._base + at
        return found


def worker_config(threads: int = 0, offline: bool | None = None, grace: float = GRACE) -> PoolConfig:
    """The configuration of a worker's pool: one engine, one request at a time, and the model is never unloaded."""
    return PoolConfig(threads=threads, offline=offline, shutdown_grace=grace, policy="sequential",
                      max_workers_per_model=1, keep_alive=-1)


def worker_settings(port: int, token: str | None = None, grace: float = GRACE) -> Settings:
    """The settings of a worker's server, on loopback."""
    return Settings(port=port, token=token, max_body=_MAX_BODY, grace=grace)


__all__ = ["GRACE", "Turns", "Worker", "worker_config", "worker_settings"]

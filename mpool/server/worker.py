"""``mpool worker``: a server for one model that runs one job at a time, for programs that manage many such processes.

Jobs run in order of arrival. A job ends when its response is sent and the core has released its request, so two jobs
never overlap. All Python code runs on the event loop's thread: prompts and bodies are short enough to be parsed there,
the model is loaded before the first request, and the core computes on its own threads.
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
from ..errors import ContextOverflow, InvalidArgument, sentence
from ..pool import Pool
from ..runtime.history import TrackedRequest
from ..runtime.watching import watcher
from ..tasks import options as _options
from ..tasks import requests
from ..tasks.async_streams import AsyncStream
from .errors import Refusal, worker_error
from .fields import Fields
from .operational import metrics
from .operations import Context, Operation, json_response
from .serving import Serving
from .settings import Settings
from .streaming import EVENTS, StreamedResponse, event

if TYPE_CHECKING:
    import os

    from ..completions import Chunk
    from ..tasks.captures import Capture
    from ..tasks.text_to_text import Request

#: When the worker stops: seconds that the running job has to complete, and seconds that its client then has to read the
#: end of the response. The process must exit within 5 s.
GRACE, _DRAIN = 3.5, 0.5
#: Maximum size of a body in bytes: a prompt of 32,768 characters, each escaped as a surrogate pair, and other fields.
_MAX_BODY = 32_768 * 12 + (64 << 10)
_MAX_SEED = 2**64 - 1
_encode = msgspec.json.Encoder().encode


# ---- requests, responses and events ----------------------------------------------------------------------------------

class ExecuteRequest(Fields):
    """A job. A sampling option that is not set has the model's default, else the default of :func:`mpool.generate`."""

    job_id: Annotated[str, Meta(min_length=1, max_length=256)]
    prompt: Annotated[str, Meta(min_length=1, max_length=32_768)]
    max_tokens: Annotated[int, Meta(ge=1, le=2048)] = 512
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=4)] | None = None
    seed: Annotated[int, Meta(ge=0)] | None = None  # at most _MAX_SEED; Meta cannot express a bound above 2**63 - 1


#: Fields of a job that have the same name in the library.
_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "seed")


class CancelRequest(Fields):
    """The job to cancel."""

    job_id: Annotated[str, Meta(min_length=1, max_length=256)]


class CancelResponse(Struct):
    """Result of a cancellation. ``cancelled`` is false if the job has already ended or never existed."""

    job_id: str
    cancelled: bool


class ShutdownResponse(Struct):
    """Confirmation that the worker is shutting down."""

    status: Literal["stopping"] = "stopping"


class HealthResponse(Struct):
    """State of the worker.

    ``status``: ``ready``, ``busy`` (a job is running), ``stopping`` or ``unhealthy``. ``resident``: the model is in
    memory. ``bytes_used``: memory of the model including caches. ``quant_kind``: storage type of the largest part of
    the weights, by bytes. ``waiting``: number of queued jobs. ``uptime``: seconds.
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


class StartedEvent(Struct):
    """The first event of a job, sent when the job starts."""

    job_id: str
    model: str


class TokenEvent(Struct):
    """Generated text. ``t``: complete characters. ``i``: index of the last token in ``t``, from 0."""

    t: str
    i: int


class EndEvent(Struct):
    """The last event of a successful job. ``decode_time_ms``: milliseconds from the first token to the last."""

    tokens_out: int
    decode_time_ms: float
    stop_reason: Literal["stop", "length"]


# ---- the queue -------------------------------------------------------------------------------------------------------

class Job:
    """A queued or running job.

    Attributes:
        id: ``job_id`` of the request.
        turn: Future that completes when the job may run.
        stream: Stream of the library; None until the job runs.
        cancelled: True if a client has cancelled the job.
    """

    def __init__(self, id: str) -> None:
        self.id, self.cancelled = id, False
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stream: AsyncStream | None = None


class JobQueue:
    """First-in, first-out queue that runs one job at a time. Must be used only on the event loop's thread.

    Attributes:
        running: Job that is running, or None.
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
        """Return the queued or running job with an id, or None."""
        if self.running is not None and self.running.id == id:
            return self.running
        return next((job for job in self._waiting if job.id == id), None)

    async def wait(self, job: Job) -> None:
        """Wait until the job may run. The caller must call :meth:`release` afterwards, even if this method raises.

        Raises:
            Refusal: The job was cancelled while it was queued.
        """
        if self.running is None:
            self.running = job
            return
        self._waiting.append(job)
        await job.turn

    def cancel(self, job: Job) -> None:
        """Cancel a job. A queued job ends immediately, a running one after at most one decoding step."""
        job.cancelled = True
        if job.stream is not None:
            job.stream._cancel()
        elif not job.turn.done() and job is not self.running:
            job.turn.set_exception(Refusal("cancelled"))

    def release(self, job: Job) -> None:
        """End a job. The next job starts when the core has released the request of this job."""
        if job is not self.running:
            if job in self._waiting:
                self._waiting.remove(job)
            return
        stream = job.stream
        if stream is not None:
            stream._cancel()
            if stream._ticket is not None and not stream._ticket.done():
                task = asyncio.ensure_future(self._release_when_done(stream))
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
                return
        self._start_next()

    async def _release_when_done(self, stream: AsyncStream) -> None:
        assert stream._ticket is not None
        try:
            await watcher().done(stream._ticket)
        finally:
            self._start_next()

    def _start_next(self) -> None:
        self.running = None
        while self._waiting and self.running is None:
            job = self._waiting.popleft()
            if not job.turn.done():  # skip a job that was cancelled while it was queued
                self.running = job
                job.turn.set_result(None)


# ---- the server ------------------------------------------------------------------------------------------------------

class Worker:
    """A server for one model. The constructor loads the model.

    Args:
        ref: Reference of the model, optionally as ``NAME=REF``.
        settings: Address, access control and limits.
        config: Configuration of the worker's pool; see :func:`worker_config`.
        compute: Compute type.
        busy: ``"wait"``: queue a job that arrives while another one runs; ``"refuse"``: refuse it with HTTP 409.
        timeout: Time limit of a job in seconds, from its start; None: no limit.
        capture: Capture that records the layers of every job under its ``job_id`` (:func:`mpool.debug.capture`);
            None: no recording.
        announce: Callback for the progress of loading, called with a percentage and a description of the stage.

    Attributes:
        serving: Server of the worker.
        jobs: Queue of jobs.
        pool: Pool that runs the model.
        name: Name of the model for clients.
        model: Model of the pool.

    Raises:
        InvalidArgument: An option is not valid, or the model is not a language model.
        MpoolError: The model cannot be loaded, or the server cannot listen on the address; see :func:`mpool.load` and
            :class:`mpool.server.serving.Serving`.
    """

    def __init__(self, ref: str | os.PathLike[str], settings: Settings, config: PoolConfig, compute: str = "auto",
                 busy: Literal["wait", "refuse"] = "wait", timeout: float | None = None, capture: Capture | None = None,
                 announce: Callable[[int, str], object] = lambda share, what: None) -> None:
        if busy not in ("wait", "refuse"):
            refuse("busy", busy, "'wait' or 'refuse'")
        self.busy, self.timeout, self.capture, self.jobs = busy, timeout, capture, JobQueue()
        self._options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        _options.begin(config, dict(self._options))  # checks the timeout
        self.pool = Pool(config)
        try:
            announce(0, "finding the model")
            self.serving = Serving(settings, self.pool, [ref], False, compute, self._operations(), _DRAIN)
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
        tokenizer = self.model.tokenizer
        tokenizer.finish()  # build all tables now: no other thread may build them later
        description = self.model.description
        bytes_of: Counter[str] = Counter()
        for tensor in description.spec.tensors:
            bytes_of[tensor.dtype] += tensor.nbytes
        self._model_fields: dict[str, Any] = {
            "model": self.name, "quant_kind": max(bytes_of, key=bytes_of.__getitem__),
            "tokenizer_kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size,
            "context_length": self.model.context_length}
        announce(50, "prepared the tokenizer")
        self.pool.load(self.model, pin=True)
        announce(75, "loaded the weights")
        self.model.generate("a", temperature=0, max_tokens=1)
        self.pool.ps(), self.pool.health()  # import now what the first /health would import on the event loop
        announce(100, "generated a token")

    def run(self, ready: Callable[[], object] | None = None) -> None:
        """Serve until SIGTERM, SIGINT or ``POST /shutdown``; see :meth:`mpool.server.serving.Serving.run`."""
        self.serving.run(ready)

    def _operations(self) -> tuple[Operation, ...]:
        return (
            Operation("POST", "/execute", self.execute, ExecuteRequest, None, "Run a job", EVENTS, "execute", True),
            Operation("POST", "/cancel", self.cancel, CancelRequest, CancelResponse, "Cancel a job", None, "cancel",
                      True),
            Operation("POST", "/shutdown", self.shutdown, None, ShutdownResponse, "Stop the worker", None, "shutdown",
                      owner_only=True),
            Operation("GET", "/health", self.health, None, HealthResponse, "State of the worker", None, "health"),
            Operation("GET", "/metrics", metrics, None, None, "Metrics in Prometheus' text format", None, "metrics"),
        )

    async def execute(self, context: Context, body: ExecuteRequest) -> Response:
        """Run a job and stream its events. Refuses an invalid job before it is queued."""
        if body.seed is not None and body.seed > _MAX_SEED:
            raise Refusal("invalid_value", f"`seed` must be an integer from 0 to {_MAX_SEED}, got {body.seed}.", "seed")
        options = {name: value for name in _OPTIONS if (value := getattr(body, name)) is not None}
        if self.capture is not None:
            options["capture"] = self.capture.job(body.job_id)
        try:
            request = requests.prompt_request(self.pool, body.prompt, self.model,
                                              {**options, "max_tokens": body.max_tokens})
        except ContextOverflow as error:
            raise Refusal("context_length_exceeded", sentence(error.message), "prompt") from None
        if self.jobs.find(body.job_id) is not None:
            raise Refusal("invalid_value", "`job_id` must be unique: a job with this id is queued or running.",
                          "job_id")
        if self.busy == "refuse" and self.jobs.running is not None:
            raise Refusal("busy")
        job = Job(body.job_id)
        try:
            await self.jobs.wait(job)
            if job.cancelled:  # cancelled between the end of the wait and this line
                raise Refusal("cancelled")
            await self._start(job, request)
        except BaseException:
            self.jobs.release(job)
            raise
        return StreamedResponse(context, self._events(job), _encode_error, EVENTS, lambda: self.jobs.release(job))

    async def _start(self, job: Job, request: Request) -> None:
        async def made() -> Request:
            return request

        running = TrackedRequest(self.pool._history, "generate", {"model": self.model})
        running.core_key = request.core_key
        job.stream = AsyncStream(made, _options.begin(self.pool.config, dict(self._options)), running)
        await job.stream

    async def _events(self, job: Job) -> AsyncIterator[bytes]:
        stream = job.stream
        assert stream is not None
        yield event(_encode(StartedEvent(job.id, self.name)), "started")
        splitter = TokenSplitter(stream)
        async for chunk in stream:
            for token in splitter.split(chunk):
                yield event(_encode(token), "token")
        if job.cancelled:
            raise Refusal("cancelled")
        done = await stream.result()
        if done.finish_reason not in ("stop", "length"):
            raise Refusal("cancelled")
        yield event(_encode(EndEvent(done.usage.completion_tokens, round(done.timings.generation * 1e3, 3),
                                done.finish_reason)), "end")

    async def cancel(self, context: Context, body: CancelRequest) -> Response:
        """Cancel a job. Idempotent."""
        job = self.jobs.find(body.job_id)
        if job is not None:
            self.jobs.cancel(job)
        return json_response(CancelResponse(body.job_id, job is not None))

    async def shutdown(self, context: Context, body: None) -> Response:
        """Shut down in the same way as after SIGTERM. Requires the token, or a client of the worker's own user."""
        self.serving.stop()
        return json_response(ShutdownResponse(), 202)

    async def health(self, context: Context, body: None) -> Response:
        """Report the state of the worker. Never waits for jobs."""
        state = context.state
        row = next(iter(self.pool.ps()), None)
        status = "stopping" if state.stopping else "unhealthy" if self.pool.health().status == "unhealthy" \
            else "busy" if self.jobs.running is not None else "ready"
        if status in ("stopping", "unhealthy"):  # for the log
            context.refused = Refusal("shutting_down" if state.stopping else "circuit_open",
                                      cause=f"the worker is {status}")
        return json_response(HealthResponse(
            status=status, resident=row is not None and row.state in ("ready", "busy"),
            bytes_used=0 if row is None else row.model_bytes + row.engine_bytes, waiting=self.jobs.waiting,
            uptime=round(time.monotonic() - state.started, 3), **self._model_fields),
            503 if status in ("stopping", "unhealthy") else 200)


def _encode_error(refusal: Refusal) -> bytes:
    return event(worker_error(refusal), "error")


class TokenSplitter:
    """Splits the stream chunks of a job into one event per token.

    A token that ends inside a character is merged with the token that completes the character. A token without text
    has no event. If the stream holds back the end of a token because a stop string may begin there, the event of the
    token waits for this text.
    """

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream
        self._rest = b""  # bytes of tokens whose event was not sent yet
        self._base = self._seen = 0  # bytes before `_rest`; tokens of which all bytes have arrived

    def split(self, chunk: Chunk) -> list[TokenEvent]:
        """Return the events that the next stream chunk completes."""
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
                found.append(TokenEvent(data[at:stop].decode(), self._seen - 1))
                at = stop
        if chunk.finish_reason is not None and at < len(data):  # the token ends in a stop string or inside a character
            found.append(TokenEvent(data[at:].decode(), min(self._seen, last)))
            at = len(data)
        self._rest, self._base = data[at:], self._base + at
        return found


def worker_config(threads: int = 0, offline: bool | None = None, grace: float = GRACE,
                  weights: str = "auto") -> PoolConfig:
    """Return the configuration of a worker's pool: one request at a time, and the model stays loaded.

    Args:
        threads: Number of compute threads; 0: the default of :class:`mpool.PoolConfig`.
        offline: True: never download; None: the default of :class:`mpool.PoolConfig`.
        grace: Seconds that the running job has to complete when the worker stops.
        weights: As in :class:`mpool.PoolConfig`.
    """
    return PoolConfig(threads=threads, offline=offline, shutdown_grace=grace, weights=weights, policy="sequential",
                      max_workers_per_model=1, keep_alive=-1)


def worker_settings(port: int, token: str | None = None, grace: float = GRACE) -> Settings:
    """Return the settings of a worker's server, which listens on loopback.

    Args:
        port: Port to listen on; 0: a free port.
        token: Token that clients must send; None: no token.
        grace: Seconds that the running job has to complete when the worker stops.
    """
    return Settings(port=port, token=token, strict=True, max_body=_MAX_BODY, grace=grace)


__all__ = ["GRACE", "JobQueue", "Worker", "worker_config", "worker_settings"]

"""Run the request of any verb: blocking, on an event loop, or as a job."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from ..host.lazy import import_numpy

import_numpy()  # the modules below import numpy with an import statement

from .. import tenants
from ..checks import refuse
from ..config import CAPACITIES
from ..errors import InvalidArgument, Overloaded
from ..host import native_calls
from ..host.resources import error_of, typed_async
from ..runtime import naming, tally
from ..runtime.history import TrackedRequest
from ..runtime.swapping import afor_current, for_current, is_current
from . import options as _options
from . import requests
from .iterating import EmbedIterator
from .jobs import StreamJob
from .options import Call
from .output_table import OUTPUTS
from .requests import Validated
from .steps import adrive, adrive_each, drive
from .streams import Stream
from .verbs import (
    CHAT,
    CLASSIFY,
    DESCRIBE_IMAGE,
    DESCRIBE_URL,
    EMBED,
    EMBED_IMAGE,
    GENERATE,
    GENERATE_IMAGE,
    RERANK,
    TOKEN_SCORES,
    VERBS,
    VISION,
    Verb,
    check_capability,
)

if TYPE_CHECKING:
    from ..config import PoolConfig
    from ..runtime.hosts import Host
    from .jobs import Job

T = TypeVar("T")

#: Verbs whose result is the text of a completion.
_OF_TEXT = (DESCRIBE_IMAGE, DESCRIBE_URL)
#: Verb name -> the function of the same name in ``requests``, which validates its arguments.
_VALIDATE: dict[str, Callable[[Any, dict[str, Any], Call], Validated]] = {
    name: getattr(requests, name) for name in (*VERBS, TOKEN_SCORES.name)}


def _begin(verb: Verb, pool: Host, given: dict[str, Any]) -> tuple[Validated, Call, bool]:
    """Validate the arguments. Returns the validated request, its call options, and ``stream``."""
    stream = given.pop("stream", False)
    if not isinstance(stream, bool):
        refuse("stream", stream, "True or False")
    call = _options.begin(pool.config, given)
    if verb is GENERATE_IMAGE:
        validated = requests.generate_image(pool, given, call, stream)
    else:
        validated = _VALIDATE[verb.name](pool, given, call)
    tally.begin(validated.capability)
    tenant, prepare = call.core.get("tenant", 0), validated.prepare
    if tenant:
        def prepare_for_tenant() -> Any:
            with tenants.preparing(tenant):
                return prepare()

        validated = replace(validated, prepare=prepare_for_tenant)
    return validated, call, stream


class _NoModels:
    """A host that has no model: the preparation of a request ends where it looks the model up."""

    def __init__(self, config: PoolConfig, name: str) -> None:
        self.config, self._name = config, name

    def _find(self, model: Any, capability: str | None = None) -> NoReturn:
        if self._name != "chat":  # `mpool run` begins as a chat with every model
            naming.check_row(model, capability)
        raise _Checked

    def _known(self, model: Any, capability: str | None) -> None:
        return None


class _Checked(Exception):
    """All checks of a request that need no model have passed."""


def check(name: str, config: PoolConfig, arguments: Mapping[str, Any]) -> None:
    """Check the arguments of a request without its model, as the request itself does first.

    Args:
        name: name of the function.
        config: configuration of the request's pool.
        arguments: arguments of the function.

    Raises:
        InvalidArgument, LimitError: an argument has a value that no model allows.
        WrongCapability: the catalogue has the model, and it cannot serve the function.
    """
    given = VERBS[name].bind((), dict(arguments), ())
    call, host = _options.begin(config, given), cast(Any, _NoModels(config, name))
    with contextlib.suppress(_Checked):
        _VALIDATE[name](host, given, call).prepare()


# ---- blocking --------------------------------------------------------------------------------------------------------

def run(verb: Verb, pool: Host, given: dict[str, Any]) -> Any:
    """Run a request and return its result or its stream. Consumes ``given``, the result of :meth:`Verb.bind`."""
    running = TrackedRequest(pool._history, verb.name, given)
    try:
        return _run(verb, pool, given, running)
    except BaseException as error:
        running.failed(error)
        raise


def _run(verb: Verb, pool: Host, given: dict[str, Any], running: TrackedRequest) -> Any:
    if verb.name == "embed_iter" and isinstance(given["texts"], AsyncIterable):  # needs an event loop
        refuse("texts", given["texts"], "an iterable of str",
               hint="mpool.aio.embed_iter accepts asynchronous iterables")
    validated, call, stream = _begin(verb, pool, given)

    def prepare() -> Any:
        if call.deadline is None:
            return validated.prepare()
        with native_calls.limited(call.deadline):
            return validated.prepare()

    if verb.name == "embed_iter":
        return for_current(prepare, lambda request: EmbedIterator(_named(request, running), running))
    if verb.stream is None:
        found, tokens = for_current(prepare, lambda request: drive(_named(request, running).steps()))
        running.completed(tokens)
        return found
    started = _stream(verb, prepare, call, running)
    if stream:
        return started
    completion = started.result()
    return completion.text if verb in _OF_TEXT else completion


def _named(request: Any, running: TrackedRequest) -> Any:
    """Record the model that a request was prepared for. Returns the request."""
    model = request.plan if hasattr(request, "plan") else request
    running.model, running.core_key = model.entry.key, model.core_key
    return request


def _stream(verb: Verb, prepare: Callable[[], Any], call: Call, running: TrackedRequest,
            fail_fast: bool | None = None) -> Any:
    kind: Any
    if verb is GENERATE_IMAGE:
        from .text_to_image import ImageStream

        kind = ImageStream
    else:
        kind = Stream

    def again() -> Any:
        return for_current(prepare, lambda request: kind(_named(request, running), call, running, fail_fast))

    return for_current(prepare, lambda request: kind(_named(request, running), call, running, fail_fast, again))


# ---- on an event loop ------------------------------------------------------------------------------------------------

def run_async(verb: Verb, pool: Host, given: dict[str, Any]) -> Any:
    """Start a request on the running event loop. Returns an awaitable, an async stream, or an async iterator."""
    if verb.name == "embed_iter":
        return _iterate(verb, pool, given)
    if verb.stream is None:
        return _vectors(verb, pool, given)
    from .async_streams import AsyncImageStream, AsyncStream

    running = TrackedRequest(pool._history, verb.name, given)
    try:
        validated, call, stream = _begin(verb, pool, given)
    except BaseException as error:
        running.failed(error)
        raise

    async def request() -> Any:
        return _named(await _prepared(pool, validated, call), running)

    made = (AsyncImageStream if verb is GENERATE_IMAGE else AsyncStream)(request, call, running)
    if stream:
        return made
    return _text(made) if verb in _OF_TEXT else _collect(made)


async def _text(stream: Any) -> str:
    text: str = (await _collect(stream)).text
    return text


async def _vectors(verb: Verb, pool: Host, given: dict[str, Any]) -> Any:
    return (await counted(verb, pool, given))[0]


@typed_async
async def counted(verb: Verb, pool: Host, given: dict[str, Any], most_bytes: int | None = None) -> tuple[Any, int]:
    """Run a request for vectors or scores. Returns its result and the number of prompt tokens.

    ``most_bytes``: maximum size of the arrays of a result of sparse vectors, token vectors or all outputs; a larger
    result raises LimitError. None: the limit of the library.
    """
    running = TrackedRequest(pool._history, verb.name, given)
    try:
        validated, call, _ = _begin(verb, pool, given)

        def started(request: Any) -> Any:
            if most_bytes is not None:
                request.most_bytes = most_bytes
            return adrive(_named(request, running).steps())

        found: tuple[Any, int] = await afor_current(lambda: _prepared(pool, validated, call), started)
    except BaseException as error:
        running.failed(error)
        raise
    running.completed(found[1])
    tally.add_tokens(found[1])
    return found


@typed_async
async def chat_ids(pool: Host, messages: Any, model: Any, options: dict[str, Any]) -> list[int]:
    """Return the token ids of the prompt of a conversation, without running it. Consumes ``options``."""
    call = _options.begin(pool.config, options)
    threads = native_calls.IMAGE_REQUESTS if requests.has_images(messages) else native_calls.REQUESTS
    found: list[int] = await threads.arun(requests.chat_ids, pool, messages, model, options, call,
                                          deadline=call.deadline)
    return found


async def _iterate(verb: Verb, pool: Host, given: dict[str, Any]) -> AsyncIterator[Any]:
    flow: Any = None
    running = TrackedRequest(pool._history, verb.name, given)
    try:
        validated, call, _ = _begin(verb, pool, given)
        request = _named(await _prepared(pool, validated, call), running)
        flow = adrive_each(request.steps())
        async for value in flow:
            yield value
        running.completed(request.tokens)
    except BaseException as error:
        running.failed(error)
        found = error_of(error) if isinstance(error, Exception) else None
        if found is None:
            raise
        raise found from error
    finally:
        if flow is not None:
            await flow.aclose()


async def _prepared(pool: Host, validated: Validated, call: Call) -> Any:
    """Return the request. Prepares it on this thread if the model's files were read and it is quick, else on another.

    Another process renders the chat template. This thread must not wait for that process, because the template of a
    hostile model takes as long as its limit allows.
    """
    entry = None
    if validated.capability != "text_to_image":
        entry = pool._known(validated.model, validated.capability)
    if entry is not None and entry.ready(validated.compute, validated.chat) and is_current(entry):
        if not (validated.long or validated.chat or entry.renders):
            return validated.prepare()
    threads = native_calls.IMAGE_REQUESTS if validated.images else native_calls.REQUESTS
    return await threads.arun(validated.prepare, deadline=call.deadline)


@typed_async
async def _collect(stream: Any) -> Any:
    """Return the result of a stream. An exception, such as a cancellation, cancels the request."""
    try:
        return await stream.result()
    finally:
        stream._cancel()


# ---- jobs ------------------------------------------------------------------------------------------------------------

#: Capability -> its verbs, each with the parameters that identify it in the arguments of ``submit``.
_JOBS: dict[str, tuple[tuple[Verb, tuple[str, ...]], ...]] = {
    "text_embedding": ((EMBED, ("inputs",)), (RERANK, ("query", "documents")),
                       (CLASSIFY, ("texts",))),
    "text_to_text": ((GENERATE, ("prompt",)), (CHAT, ("messages",))),
    "image_embedding": ((EMBED_IMAGE, ("images",)),),
    "vision": ((VISION, ("images", "prompt")), (CHAT, ("messages",))),
    "text_to_image": ((GENERATE_IMAGE, ("prompt",)),),
}


#: Verb -> values of ``output`` in the arguments of ``submit``, each with its verb.
_OUTPUTS = {verb: {name: VERBS[OUTPUTS[name].function] for name in names}
            for verb, names in (("embed", _options.OUTPUTS), ("classify", _options.CLASSIFIED))}


def submit(pool: Host, capability: Any, request: Mapping[str, Any]) -> Job:
    """See :func:`mpool.submit`."""
    check_capability(capability)
    try:
        return _job(pool, capability, dict(request))
    except Overloaded as error:
        name = CAPACITIES[capability][0 if isinstance(request.get("inputs"), str) else -1]
        error.hint = error.hint or f"Collect the results of earlier jobs first, or raise PoolConfig.{name}"
        raise


def _verb_of(capability: str, given: dict[str, Any]) -> Verb:
    """Return the verb that the arguments of a job select."""
    verbs = _JOBS[capability]
    chosen = [(verb, needed) for verb, needed in verbs if any(name in given for name in needed)]
    if len(chosen) > 1:
        first, second = (next(name for name in needed if name in given) for _, needed in chosen)
        raise InvalidArgument(f"`{first}` and `{second}` exclude each other", param=second,
                              hint="Pass " + _one_of(verbs))
    if not chosen and len(verbs) > 1 and capability == "text_to_text":
        raise _missing("`prompt` or `messages` is required", "prompt", "Pass " + _one_of(verbs), verbs, given)
    verb, needed = (chosen or verbs)[0]
    for name in needed:
        if name not in given:
            hint = "Pass " + _one_of(verbs) if len(verbs) > 1 or len(needed) > 1 else None
            raise _missing(f"`{name}` is required", name, hint, verbs, given)
    return verb


def _missing(message: str, name: str, hint: str | None, verbs: tuple[tuple[Verb, tuple[str, ...]], ...],
             given: Mapping[str, Any]) -> InvalidArgument:
    """Return the error for a missing argument of a job. It also names the arguments that no verb has.

    Args:
        message: text of the error.
        name: parameter that is missing.
        hint: what to do.
        verbs: verbs of the capability.
        given: arguments of the job.
    """
    known = {"output", *(one.name for verb, _ in verbs for one in verb.positional),
             *(name for verb, _ in verbs for name in verb.names)}
    unknown = [f"`{one}`" for one in given if one not in known]
    if unknown:
        listed = " and ".join([", ".join(unknown[:-1]), unknown[-1]] if unknown[1:] else unknown)
        message += f"; {listed} {'are not options' if unknown[1:] else 'is not an option'} of submit"
    return InvalidArgument(message, param=name, hint=hint)


def _one_of(verbs: tuple[tuple[Verb, tuple[str, ...]], ...]) -> str:
    return ", or ".join(" and ".join(needed) for _, needed in verbs)


def _job(pool: Host, capability: str, given: dict[str, Any]) -> Job:
    running = TrackedRequest(pool._history, "submit", given)
    try:
        return _submitted(pool, capability, given, running)
    except BaseException as error:
        running.failed(error)
        raise


def _submitted(pool: Host, capability: str, given: dict[str, Any], running: TrackedRequest) -> Job:
    for name, hint in (("progress", "Poll done() and position() of the job"), ("stream", "Iterate over the job")):
        if name in given:
            raise InvalidArgument(f"`{name}` is not an option of submit", param=name, hint=hint)
    verb = _verb_of(capability, given)
    if verb.name in _OUTPUTS and "output" in given:
        output, verbs = given.pop("output"), _OUTPUTS[verb.name]
        if not isinstance(output, str) or output not in verbs:
            refuse("output", output, "one of " + ", ".join(verbs))
        verb = verbs[output]
    running.verb = verb.name
    given = verb.bind((), given, ())
    call = _options.begin(pool.config, given)

    def prepare() -> Any:
        with native_calls.limited(call.deadline), tenants.preparing(call.core.get("tenant", 0)):
            if verb is CHAT:
                options = dict(given)
                messages, model = options.pop("messages"), options.pop("model", None)
                return requests.chat_request(pool, messages, model, options, call, capability)
            return _VALIDATE[verb.name](pool, dict(given), call).prepare()

    if verb.stream is not None:
        return StreamJob(capability, _stream(verb, prepare, call, running, True))

    def start(request: Any) -> Job:
        job: Job = request.job(capability, lambda: for_current(prepare, lambda again: drive(again.steps()))[0], running)
        return job

    return for_current(prepare, lambda request: start(_named(request, running)))


__all__ = ["VERBS", "chat_ids", "check", "counted", "run", "run_async", "submit"]

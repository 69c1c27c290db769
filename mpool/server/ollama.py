"""Ollama's protocol: text generation, embeddings and models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from .. import __version__, aio
from ..conversation.tool_calls import parse_arguments
from ..durations import seconds_of
from ..errors import ContextOverflow
from ..results import ToolCall
from ..tasks.running import counted
from ..tasks.verbs import EMBED
from . import forms, thinking
from . import ollama_models as facts
from .errors import Refusal, plain_error
from .ollama_structs import (
    Details,
    EmbedAnswer,
    EmbedRequest,
    GenerateAnswer,
    GenerateRequest,
    Logprob,
    ModelRow,
    ModelRows,
    NameRequest,
    OllamaAnswerMessage,
    OllamaCall,
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaEmbeddingsAnswer,
    OllamaEmbeddingsRequest,
    OllamaFunction,
    OllamaMessage,
    Options,
    Progress,
    PullRequest,
    Request,
    ShowAnswer,
    TextRequest,
    TopLogprob,
    Version,
)
from .operations import Context, Operation, image_of, json_answer, large_answer
from .streaming import LINES, Pieces, Streamed, line

if TYPE_CHECKING:
    from ..aio import AsyncStream
    from ..results import Chunk, Completion, TokenLogprob
    from .models import Served

_encode = msgspec.json.Encoder().encode
_LOWEST = -9999.0
#: Sampler options that the library does not have -> the value that turns each off.
_OFF = {"mirostat": 0, "tfs_z": 1.0, "typical_p": 1.0}
#: Options of a request that are options or aliases of the library.
_TAKEN = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty", "stop")


def now() -> str:
    """Format a time as Ollama does."""
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """Convert seconds to whole nanoseconds."""
    return max(0, round(seconds * 1e9))


# ---- options -------------------------------------------------------------------------------------------------------

def call_options(body: Request) -> dict[str, Any]:
    """The pool's option ``keep_alive`` in Ollama's grammar. A number without a unit is seconds."""
    return {} if body.keep_alive is None else {"keep_alive": _keep_alive(body.keep_alive)}


def _keep_alive(value: float | str) -> float | str:
    seconds_of(value, "keep_alive")
    return value


def sampling(context: Context, body: TextRequest) -> dict[str, Any]:
    """Options of the library.

    Raises:
        Refusal: an option is not supported.
    """
    given = body.options or Options()
    for name, off in _OFF.items():
        if getattr(given, name) not in (None, off):
            raise Refusal("unsupported_parameter", f"`options.{name}` must be {off}, which turns it off.", name)
    found = {name: value for name in _TAKEN if (value := getattr(given, name)) is not None}
    most = context.state.settings.max_tokens
    predict = given.num_predict
    if predict == 0:
        raise Refusal("invalid_value", "`options.num_predict` must be 1 or more, -1 or -2, got 0.", "num_predict")
    found["max_tokens"] = most if predict is None or predict < 0 else min(predict, most)
    if given.seed is not None:
        found["seed"] = given.seed % 2**64
    if body.logprobs:
        found |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return found | forms.of_ollama(body.format)


# ---- text ----------------------------------------------------------------------------------------------------------

#: Makes a response from its text, its reasoning and the fields of Counts.
Shape = Callable[[str, "str | None", dict[str, Any]], msgspec.Struct]


def _generated(text: str, thinking: str | None, fields: dict[str, Any]) -> msgspec.Struct:
    return GenerateAnswer(response=text, thinking=thinking, **fields)


def _answered(text: str, thinking: str | None, fields: dict[str, Any]) -> msgspec.Struct:
    return OllamaChatAnswer(message=OllamaAnswerMessage("assistant", text, thinking), **fields)


async def generate(context: Context, body: GenerateRequest) -> Response:
    """Complete a prompt: as a conversation of one message, or, with ``raw``, unchanged."""
    served = await context.model(body.model)
    for name in ("suffix", "template", "context"):
        if getattr(body, name):
            raise Refusal("unsupported_parameter", f"`{name}` is not supported.", name)
    if not body.prompt:
        return await _only_load(context, served, body, _generated)
    prompt, cold = context.check_text(body.prompt, "prompt"), not _resident(context, served)
    options = {**sampling(context, body), **call_options(body)}
    pool = context.state.pool
    if body.raw:
        if body.system or body.images:
            raise Refusal("invalid_value", "`raw` excludes `system` and `images`.", "raw")
        stream = aio.generate(prompt, served.model, stream=True, pool=pool, **options)
    else:
        messages = [_message(context, OllamaMessage("user", prompt, images=body.images), "prompt")]
        if body.system:
            messages.insert(0, {"role": "system", "content": context.check_text(body.system, "system")})
        options |= await thinking.of_ollama(served, body.think)
        stream = aio.chat(messages, served.model, stream=True, pool=pool, **options)
    return await _answer(context, served, body, stream, _generated, cold)


async def chat(context: Context, body: OllamaChatRequest) -> Response:
    """Complete a conversation."""
    served = await context.model(body.model)
    if not body.messages:
        return await _only_load(context, served, body, _answered)
    messages = [_message(context, message, f"messages[{at}]") for at, message in enumerate(body.messages)]
    options = {**sampling(context, body), **call_options(body), **forms.of_tools(body.tools),
               **await thinking.of_ollama(served, body.think)}
    cold = not _resident(context, served)
    while True:
        stream = aio.chat(messages, served.model, stream=True, pool=context.state.pool, **options)
        try:
            await stream
            break
        except ContextOverflow as error:
            if body.truncate is False or not (left := _shortened(messages, error)):
                raise
            messages = left
    return await _answer(context, served, body, stream, _answered, cold)


def _shortened(messages: list[dict[str, Any]], error: ContextOverflow) -> list[dict[str, Any]]:
    """Drop the oldest turns of a conversation, as many as the excess is of the text, at least one. System messages and
    the last turn stay; the result is empty if the conversation is one turn."""
    turns = [at for at, message in enumerate(messages) if message["role"] == "user"][1:]
    sizes = [len(message["content"]) for message in messages]
    tokens = error.tokens or 1
    surplus = sum(sizes) * (tokens - (error.limit or 0)) / tokens
    for turn in turns:
        gone = [at for at in range(turn) if messages[at]["role"] != "system"]
        if sum(sizes[at] for at in gone) >= surplus or turn == turns[-1]:
            return [message for at, message in enumerate(messages) if at not in gone]
    return []


def _message(context: Context, message: OllamaMessage, where: str) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": context.check_text(message.content, where)}
    if message.images:
        found["images"] = [image_of(image, f"{where}.images[{at}]") for at, image in enumerate(message.images)]
    for name, value in (("thinking", message.thinking), ("name", message.tool_name),
                        ("tool_call_id", message.tool_call_id)):
        if value:
            found[name] = value
    if message.tool_calls:
        found["tool_calls"] = [{"id": call.id, "function": {"name": call.function.name,
                                                            "arguments": call.function.arguments}}
                               for call in message.tool_calls]
    return found


async def _answer(context: Context, served: Served, body: TextRequest, stream: AsyncStream, shape: Shape,
                  cold: bool) -> Response:
    """Respond, streamed unless the request says otherwise. ``cold``: the model was not in memory."""
    if body.stream is False:
        try:
            done = await stream.result()
        finally:
            await stream.aclose()
        fields = {**_last(context, body.model, done, cold), "logprobs": _logprobs(served, done.logprobs)}
        return json_answer(_calling(shape(done.text, done.reasoning or None, fields), done.tool_calls))
    pieces = Pieces(context.state, [stream])
    await pieces.begin()

    async def lines() -> AsyncIterator[bytes]:
        told = 0
        begun: list[ToolCall] = []
        async for _, chunk in pieces:
            if chunk.text or chunk.reasoning or chunk.logprobs:
                yield line(_encode(_piece(served, body.model, chunk, shape)))
            _begin_calls(begun, chunk)
            if told < len(begun) - 1:  # a call is complete once another one follows
                yield line(_encode(_calling(_between(body.model, shape), begun[:-1], told)))
                told = len(begun) - 1
        done = await stream.result()
        if told < len(done.tool_calls):
            yield line(_encode(_calling(_between(body.model, shape), done.tool_calls, told)))
        yield line(_encode(shape("", None, _last(context, body.model, done, cold))))

    return Streamed(context.state, context.id, lines(), lambda refusal: line(plain_error(refusal)), LINES, pieces.close)


def _resident(context: Context, served: Served) -> bool:
    """True if the model is in memory."""
    return any(row.key == served.model.key and row.state in ("ready", "busy") for row in context.state.pool.ps())


def _begin_calls(begun: list[ToolCall], chunk: Chunk) -> None:
    """Add the call deltas of a chunk. A call is complete once another one follows."""
    for delta in chunk.tool_calls:
        if delta.index == len(begun):
            if begun:
                begun[-1] = replace(begun[-1], arguments=parse_arguments(begun[-1].raw))
            begun.append(ToolCall(delta.id or "", delta.name or "", None, ""))
        call = begun[delta.index]
        begun[delta.index] = replace(call, raw=call.raw + delta.arguments)


def _calling(answer: msgspec.Struct, calls: Sequence[ToolCall], told: int = 0) -> msgspec.Struct:
    """Make a chunk with the complete tool calls that were not sent yet: Ollama sends each call whole."""
    found = [(at, call, call.arguments) for at, call in enumerate(calls) if at >= told]
    made = [OllamaCall(OllamaFunction(call.name, arguments, at), call.id)
            for at, call, arguments in found if arguments is not None]
    if isinstance(answer, OllamaChatAnswer) and made:
        answer.message.tool_calls = made
    return answer


def _between(name: str, shape: Shape) -> msgspec.Struct:
    return shape("", None, {"model": name, "created_at": now(), "done": False})


def _piece(served: Served, name: str, chunk: Chunk, shape: Shape) -> msgspec.Struct:
    return shape(chunk.text, chunk.reasoning or None, {"model": name, "created_at": now(), "done": False,
                                                       "logprobs": _logprobs(served, chunk.logprobs)})


def _last(context: Context, name: str, done: Completion, cold: bool) -> dict[str, Any]:
    """Fields of the last chunk. ``cold``: the model was not in memory, so the request's queue time was the load."""
    timings, usage = done.timings, done.usage
    return {"model": name, "created_at": now(), "done": True,
            "done_reason": "length" if done.finish_reason == "length" else "stop",
            "total_duration": nanoseconds(time.monotonic() - context.begun),
            "load_duration": nanoseconds(timings.queued if cold else 0), "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(timings.prompt), "eval_count": usage.completion_tokens,
            "eval_duration": nanoseconds(timings.generation)}


def _logprobs(served: Served, found: tuple[TokenLogprob, ...] | None) -> list[Logprob] | None:
    if not found:
        return None
    bytes_of = served.model._entry.token_bytes
    return [Logprob(token.token, max(token.logprob, _LOWEST), list(bytes_of(token.token_id)),
                    [TopLogprob(other.token, max(other.logprob, _LOWEST), list(bytes_of(other.token_id)))
                     for other in token.top] or None) for token in found]


async def _only_load(context: Context, served: Served, body: TextRequest, shape: Shape) -> Response:
    """Serve a request without a prompt: load the model, or unload it with a ``keep_alive`` of 0."""
    pool, kept = context.state.pool, call_options(body).get("keep_alive")
    unloads = kept is not None and seconds_of(kept, "keep_alive") == 0
    if unloads:
        await aio.unload(served.model, pool=pool)
    else:
        await aio.load(served.model, keep_alive=kept, pool=pool, progress=False)
    fields = {"model": body.model, "created_at": now(), "done": True, "done_reason": "unload" if unloads else "load"}
    return json_answer(shape("", None, fields))


# ---- vectors -------------------------------------------------------------------------------------------------------

async def _loaded(context: Context, served: Served) -> float:
    """Load an embedding model. Returns the seconds it took; 0: it was in memory."""
    if _resident(context, served) or "text_embedding" not in await asyncio.to_thread(lambda: served.capabilities):
        return 0.0
    began = time.monotonic()
    await aio.load(served.model, pool=context.state.pool, progress=False)
    return time.monotonic() - began


async def embed(context: Context, body: EmbedRequest) -> Response:
    """Embed texts."""
    served = await context.model(body.model)
    texts = [body.input] if isinstance(body.input, str) else body.input
    texts = [context.check_text(text, f"input[{at}]") for at, text in enumerate(texts) if text]
    options = call_options(body)
    if body.truncate is not None:
        options["truncate"] = body.truncate
    if body.dimensions is not None:
        options["dimensions"] = body.dimensions
    loaded = nanoseconds(await _loaded(context, served))
    rows, tokens = await counted(EMBED, context.state.pool, {"inputs": texts, "model": served.model, **options})
    spent = nanoseconds(time.monotonic() - context.begun)
    return await large_answer(lambda: EmbedAnswer(body.model, rows.tolist(), spent, loaded, tokens), rows.size)


async def embeddings(context: Context, body: OllamaEmbeddingsRequest) -> Response:
    """Embed one text, by Ollama's former route."""
    served = await context.model(body.model)
    if not body.prompt:
        return json_answer(OllamaEmbeddingsAnswer([]))
    row, _ = await counted(EMBED, context.state.pool, {
        "inputs": context.check_text(body.prompt, "prompt"), "model": served.model, **call_options(body)})
    return json_answer(OllamaEmbeddingsAnswer(row.tolist()))


# ---- models --------------------------------------------------------------------------------------------------------

async def tags(context: Context, body: None) -> Response:
    """List the models that clients may name."""
    listed = await context.state.models.listed()
    return json_answer(ModelRows(await asyncio.to_thread(lambda: [_row(served) for served in listed])))


def _row(served: Served) -> ModelRow:
    found = facts.of(served)
    return ModelRow(served.name, served.name, found.size, found.digest, Details(**found.details),
                    modified_at=found.modified_at)


async def ps(context: Context, body: None) -> Response:
    """List the models that are in memory."""
    rows, seen = [], {row.key: row for row in context.state.pool.ps()}
    for served in context.state.models.all():
        found = seen.get(served.model.key)
        if found is None or found.state not in ("ready", "busy", "loading"):
            continue
        left = min(max(0.0, found.keep_alive - found.idle_seconds), 100 * 365 * 86400.0)
        known = await asyncio.to_thread(facts.of, served)
        rows.append(ModelRow(
            served.name, served.name, found.model_bytes + found.engine_bytes, known.digest, Details(**known.details),
            expires_at=(datetime.now(timezone.utc) + timedelta(seconds=left)).isoformat().replace("+00:00", "Z"),
            size_vram=0, context_length=known.context_length))
    return json_answer(ModelRows(rows))


def _named(body: NameRequest | PullRequest) -> str:
    name = body.model or body.name
    if not name:
        raise Refusal("invalid_value", "`model` is missing.", "model")
    return name


async def show(context: Context, body: NameRequest) -> Response:
    """Describe a model."""
    served = await context.model(_named(body))
    found, abilities = await asyncio.to_thread(lambda: (facts.of(served), facts.abilities(served)))
    return json_answer(ShowAnswer(Details(**found.details), found.info, found.capabilities + abilities,
                                  found.modified_at, found.license, found.parameters))


async def pull(context: Context, body: PullRequest) -> Response:
    """Fetch a model of the catalogue; clients may fetch no other."""
    name = _named(body).removesuffix(":latest")
    models, pool = context.state.models, context.state.pool
    if name not in models.names() and not models.is_in_catalogue(name):
        raise Refusal("model_not_found", param="model")
    if body.stream is False:
        await facts.fetch(name, models, pool)
        return json_answer(Progress("success"))
    context.state.begin_stream()

    async def lines() -> AsyncIterator[bytes]:
        yield line(_encode(Progress("pulling manifest")))
        await facts.fetch(name, models, pool)
        yield line(_encode(Progress("success")))

    return Streamed(context.state, context.id, lines(), lambda refusal: line(plain_error(refusal)), LINES,
                    context.state.end_stream)


async def version(context: Context, body: None) -> Response:
    """Report the version of mpool."""
    return json_answer(Version(__version__))


OPERATIONS = (
    Operation("POST", "/api/generate", generate, GenerateRequest, GenerateAnswer, "Complete a prompt", LINES,
              "ollama_generate"),
    Operation("POST", "/api/chat", chat, OllamaChatRequest, OllamaChatAnswer, "Complete a conversation", LINES,
              "ollama_chat"),
    Operation("POST", "/api/embed", embed, EmbedRequest, EmbedAnswer, "Embed texts", name="ollama_embed"),
    Operation("POST", "/api/embeddings", embeddings, OllamaEmbeddingsRequest, OllamaEmbeddingsAnswer,
              "Embed one text", name="ollama_embeddings"),
    Operation("GET", "/api/tags", tags, None, ModelRows, "List the models that clients may name", name="ollama_tags"),
    Operation("GET", "/api/ps", ps, None, ModelRows, "List the models in memory", name="ollama_ps"),
    Operation("POST", "/api/show", show, NameRequest, ShowAnswer, "Describe a model", name="ollama_show"),
    Operation("POST", "/api/pull", pull, PullRequest, Progress, "Fetch a model of the catalogue", LINES,
              "ollama_pull"),
    Operation("GET", "/api/version", version, None, Version, "The version of mpool", name="ollama_version"),
)

__all__ = ["OPERATIONS"]

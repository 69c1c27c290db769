"""Ollama's protocol: text generation, embeddings, and management of models."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from .. import __version__, aio
from ..checks import shown
from ..completions import ToolCall
from ..conversation.tool_calls import parse_arguments
from ..durations import seconds_of
from ..errors import ContextOverflow
from ..host import native_calls
from ..tasks.running import counted
from ..tasks.verbs import EMBED
from . import fill_in, formats, ollama_models, thinking
from .errors import Refusal, plain_error
from .ollama_models import PARAMETERS
from .ollama_structs import (
    CopyRequest,
    CreateRequest,
    Details,
    EmbedRequest,
    EmbedResponse,
    GenerateRequest,
    GenerateResponse,
    Logprob,
    ModelRow,
    ModelRows,
    NameRequest,
    OllamaChatRequest,
    OllamaChatResponse,
    OllamaEmbeddingsRequest,
    OllamaEmbeddingsResponse,
    OllamaFunction,
    OllamaMessage,
    OllamaResponseMessage,
    OllamaToolCall,
    Options,
    Progress,
    PullRequest,
    Request,
    ShowResponse,
    TextRequest,
    TopLogprob,
    Version,
)
from .openai.text import LOWEST
from .operations import Context, Operation, check_logprobs, json_response, large_response
from .sampling import image_tokens, narrow
from .streaming import LINES, MergedStreams, StreamedResponse, line

if TYPE_CHECKING:
    from ..aio import AsyncStream
    from ..completions import Chunk, Completion, TokenLogprob
    from .models import ServedModel

_encode = msgspec.json.Encoder().encode
#: Sampler options that the library does not support -> value that turns the sampler off.
_OFF = {"mirostat": 0, "tfs_z": 1.0, "typical_p": 1.0}
#: Parameters of the library -> fields of the requests, for errors.
_NAMES = {**PARAMETERS, "response_format": "format"}
#: Minimum of ``num_ctx`` in Ollama.
_MIN_CONTEXT = 4
#: Sampling options, and those of them that the library has under another name.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty",
             "stop")
_OWN = {other: own for own, other in PARAMETERS.items()}


def now() -> str:
    """Return the current time in ISO 8601, as Ollama formats it."""
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """Convert seconds to whole nanoseconds."""
    return max(0, round(seconds * 1e9))


# ---- options -------------------------------------------------------------------------------------------------------

def keep_alive_options(body: Request) -> dict[str, Any]:
    """Convert ``keep_alive`` to an option of the library. Accepts Ollama's durations; a number is in seconds."""
    return {} if body.keep_alive is None else {"keep_alive": _keep_alive(body.keep_alive)}


def _keep_alive(value: float | str) -> float | str:
    seconds_of(value, "keep_alive")
    return value


def options_of(context: Context, given: Options) -> dict[str, Any]:
    """Convert the sampling options that are set to options of the library. Samplers that it does not have are ignored.

    Raises:
        Refusal: A sampler is not supported, and the server is strict.
    """
    for name, off in _OFF.items():
        if getattr(given, name) not in (None, off):
            context.ignore(f"options.{name}", f"`options.{name}` must be {off}: this sampler is not supported.", name)
    found = {_OWN.get(name, name): value for name in _SAMPLING if (value := getattr(given, name)) is not None}
    narrow(found)
    if found.get("repetition_penalty") == 0:
        found["repetition_penalty"] = 1.0  # LiteLLM and Open WebUI send `frequency_penalty` under this name
    if given.num_predict is not None:
        limits = context.state.settings
        most = given.num_predict if given.num_predict > 0 else limits.max_tokens
        found["max_tokens"] = limits.completion_tokens(most)
    if given.num_ctx is not None:
        found["context_length"] = max(given.num_ctx, _MIN_CONTEXT)
    if given.seed is not None:
        found["seed"] = given.seed % 2**64
    if given.image_tokens is not None:
        found["image_tokens"] = given.image_tokens
    return found


def sampling(context: Context, served: ServedModel, body: TextRequest) -> dict[str, Any]:
    """Convert the sampling options and the format of a request to options of the library.

    Raises:
        Refusal: An option is not valid or not supported.
    """
    found = {**served.defaults, **options_of(context, body.options or Options())}
    found.pop("image_tokens", None)  # _image_tokens() converts it
    found["max_tokens"] = context.state.settings.completion_tokens(found.get("max_tokens"))
    if body.logprobs:
        found |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return found | formats.ollama_format(body.format)


async def _image_tokens(context: Context, served: ServedModel, body: TextRequest) -> dict[str, Any]:
    return await image_tokens(context, served, None if body.options is None else body.options.image_tokens,
                              "options.image_tokens")


# ---- text ----------------------------------------------------------------------------------------------------------

#: Creates a response from its text, its reasoning and the fields of ResponseFields.
ResponseFactory = Callable[[str, "str | None", dict[str, Any]], msgspec.Struct]


def _generate_response(text: str, thinking: str | None, fields: dict[str, Any]) -> msgspec.Struct:
    return GenerateResponse(response=text, thinking=thinking, **fields)


def _chat_response(text: str, thinking: str | None, fields: dict[str, Any]) -> msgspec.Struct:
    return OllamaChatResponse(message=OllamaResponseMessage("assistant", text, thinking), **fields)


async def generate(context: Context, body: GenerateRequest) -> Response:
    """Complete a prompt: as a conversation of one message or, with ``raw``, without the chat template."""
    served = await context.model(body.model)
    for name in ("template", "context"):
        if getattr(body, name):
            raise Refusal("unsupported_parameter", f"`{name}` is not supported.", name)
    if not body.prompt:
        return await _load_or_unload(context, served, body, _generate_response)
    prompt, cold = context.check_text(body.prompt, "prompt"), not _resident(context, served)
    options = {**await context.converted(lambda: sampling(context, served, body)), **keep_alive_options(body)}
    pool = context.state.pool
    if (body.suffix or body.raw) and body.options is not None and body.options.image_tokens is not None:
        kind = "suffix" if body.suffix else "raw"
        context.ignore("options.image_tokens", f"`options.image_tokens` must be absent: a request with `{kind}` has no "
                                               "images.", "image_tokens")
    if body.suffix:
        if body.system or body.images:
            raise Refusal("invalid_value", "`suffix` cannot be used with `system` or `images`.", "suffix")
        ids = await fill_in.prompt_ids(served, prompt, context.check_text(body.suffix, "suffix"))
        options["stop_token_ids"] = await fill_in.stop_ids(served)
        stream = aio.generate(ids, served.model, stream=True, pool=pool, **options)
    elif body.raw:
        if body.system or body.images:
            raise Refusal("invalid_value", "`raw` cannot be used with `system` or `images`.", "raw")
        stream = aio.generate(prompt, served.model, stream=True, pool=pool, parse_special=True, **options)
    else:
        message = OllamaMessage("user", prompt, images=body.images)
        messages = [await context.converted(lambda: _message(context, message))]
        if body.system:
            messages.insert(0, {"role": "system", "content": context.check_text(body.system, "system")})
        options |= await thinking.ollama_options(served, body.think)
        options |= await _image_tokens(context, served, body)
        stream = aio.chat(served.with_system(messages), served.model, stream=True, pool=pool, **options)
    return await _respond(context, served, body, stream, _generate_response, cold)


async def chat(context: Context, body: OllamaChatRequest) -> Response:
    """Complete a conversation."""
    served = await context.model(body.model)
    if not body.messages:
        return await _load_or_unload(context, served, body, _chat_response)
    given = [OllamaMessage("user", body.messages)] if isinstance(body.messages, str) else body.messages

    def convert() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return _messages(context, given), {**sampling(context, served, body), **keep_alive_options(body),
                                           **formats.tool_options(body.tools)}

    messages, options = await context.converted(convert)
    messages = served.with_system(messages)
    options |= await thinking.ollama_options(served, body.think)
    options |= await _image_tokens(context, served, body)
    last = messages[-1]
    if last["role"] == "assistant" and last["content"].strip() and not last.get("tool_calls"):
        options["template_options"] = {**options.get("template_options", {}), "continue_final_message": True}
    cold = not _resident(context, served)
    for attempt in itertools.count():
        stream = aio.chat(messages, served.model, stream=True, pool=context.state.pool, **options)
        try:
            await stream
            break
        except ContextOverflow as error:
            if body.truncate is False or not (left := _shortened(messages, error, attempt)):
                raise
            messages = left
    return await _respond(context, served, body, stream, _chat_response, cold)


def _shortened(messages: list[dict[str, Any]], error: ContextOverflow, attempt: int) -> list[dict[str, Any]]:
    """Drop the oldest turns of a conversation that exceeds the context window.

    The function estimates the number of turns to drop from the share of tokens in excess, and drops at least one. It
    keeps system messages and the last turn. Each attempt tokenizes the whole conversation, so the share doubles with
    every attempt: turns with fewer tokens per character than the rest would otherwise need one attempt each.

    Args:
        messages: Messages of the conversation.
        error: Error with the number of tokens and the limit.
        attempt: Number of earlier calls for this conversation.

    Returns:
        Remaining messages; empty if the conversation has only one turn.
    """
    roles = [message["role"] for message in messages]
    sizes = [len(message["content"]) for message in messages]
    turns = [at for at, role in enumerate(roles) if role == "user"][1:]
    tokens = error.tokens or 1
    surplus = sum(sizes) * min(1.0, (tokens - (error.limit or 0)) / tokens * 2 ** min(attempt, 64))
    dropped = begin = 0
    for turn in turns:
        dropped += sum(sizes[at] for at in range(begin, turn) if roles[at] != "system")
        begin = turn
        if dropped >= surplus or turn == turns[-1]:
            return [message for at, message in enumerate(messages) if at >= turn or roles[at] == "system"]
    return []


def _messages(context: Context, given: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Convert messages to those of the library. The text of a message with the role ``thinking`` is the reasoning of
    the message of the assistant that follows."""
    found: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for at, message in enumerate(given):
        if message.role == "thinking":
            thoughts.append(context.check_text(message.content, f"messages[{at}]"))
            continue
        found.append(_message(context, message, f"messages[{at}]."))
        if thoughts and message.role == "assistant":
            found[-1].setdefault("thinking", "".join(thoughts))
        thoughts = []
    return found


def _message(context: Context, message: OllamaMessage, where: str = "") -> dict[str, Any]:
    """Convert a message. ``where`` is the part of parameter names before ``images``, such as ``messages[0].``."""
    content = context.check_text(message.content, where.removesuffix(".") or "prompt")
    found: dict[str, Any] = {"role": message.role, "content": content}
    if message.images:
        found["images"] = [context.image_file(image, f"{where}images[{at}]") for at, image in enumerate(message.images)]
    for name, value in (("thinking", message.thinking), ("name", message.tool_name),
                        ("tool_call_id", message.tool_call_id)):
        if value:
            found[name] = value
    if message.tool_calls:
        found["tool_calls"] = [{"id": call.id, "function": {"name": call.function.name, "arguments": _arguments(
            context, call.function.arguments, f"{where}tool_calls[{at}].function.arguments")}}
                               for at, call in enumerate(message.tool_calls)]
    return found


def _arguments(context: Context, given: dict[str, Any] | str, where: str) -> Mapping[str, Any]:
    return formats.earlier_arguments(context, given, where) if isinstance(given, str) else given


async def _respond(context: Context, served: ServedModel, body: TextRequest, stream: AsyncStream,
                   make_response: ResponseFactory, cold: bool) -> Response:
    """Run a text request and stream the response unless ``stream`` is false. ``cold``: the model was not loaded."""
    if body.stream is False:
        try:
            done = await stream.result()
        finally:
            await stream.aclose()
        check_logprobs([done.logprobs], served.model.tokenizer.token_bytes)
        fields = {**_final_fields(context, body.model, done, cold), "logprobs": _logprobs(served, done.logprobs)}
        response = make_response(done.text, done.reasoning or None, fields)
        return json_response(_with_tool_calls(response, done.tool_calls))
    chunks = MergedStreams(context.state, [stream])
    await chunks.start()

    async def lines() -> AsyncIterator[bytes]:
        sent = 0
        tool_calls: list[ToolCall] = []
        async for _, chunk in chunks:
            if chunk.text or chunk.reasoning or chunk.logprobs:
                yield line(_encode(_text_chunk(served, body.model, chunk, make_response)))
            _add_tool_calls(tool_calls, chunk)
            if sent < len(tool_calls) - 1:  # a tool call is complete when the next one begins
                yield line(_encode(_with_tool_calls(_empty_chunk(body.model, make_response), tool_calls[:-1], sent)))
                sent = len(tool_calls) - 1
        done = await stream.result()
        if sent < len(done.tool_calls):
            yield line(_encode(_with_tool_calls(_empty_chunk(body.model, make_response), done.tool_calls, sent)))
        yield line(_encode(make_response("", None, _final_fields(context, body.model, done, cold))))

    return StreamedResponse(context, lines(), lambda refusal: line(plain_error(refusal)), LINES, chunks.close)


def _resident(context: Context, served: ServedModel) -> bool:
    """Return True if the model is in memory."""
    return any(row.model == served.model.key and row.state in ("ready", "busy") for row in context.state.pool.ps())


def _add_tool_calls(tool_calls: list[ToolCall], chunk: Chunk) -> None:
    """Add the tool-call deltas of a chunk to ``tool_calls``. A tool call is complete when the next one begins."""
    for delta in chunk.tool_calls:
        if delta.index == len(tool_calls):
            if tool_calls:
                tool_calls[-1] = replace(tool_calls[-1], arguments=parse_arguments(tool_calls[-1].raw))
            tool_calls.append(ToolCall(delta.id or "", delta.name or "", None, ""))
        call = tool_calls[delta.index]
        tool_calls[delta.index] = replace(call, raw=call.raw + delta.arguments)


def _with_tool_calls(response: msgspec.Struct, calls: Sequence[ToolCall], sent: int = 0) -> msgspec.Struct:
    """Add the tool calls from index ``sent`` to a response. Ollama sends each tool call as a whole."""
    found = [(at, call, call.arguments) for at, call in enumerate(calls) if at >= sent]
    made = [OllamaToolCall(OllamaFunction(call.name, arguments, at), call.id)
            for at, call, arguments in found if arguments is not None]
    if isinstance(response, OllamaChatResponse) and made:
        response.message.tool_calls = made
    return response


def _empty_chunk(name: str, make_response: ResponseFactory) -> msgspec.Struct:
    return make_response("", None, {"model": name, "created_at": now(), "done": False})


def _text_chunk(served: ServedModel, name: str, chunk: Chunk, make_response: ResponseFactory) -> msgspec.Struct:
    return make_response(chunk.text, chunk.reasoning or None, {"model": name, "created_at": now(), "done": False,
                                                       "logprobs": _logprobs(served, chunk.logprobs)})


def _final_fields(context: Context, name: str, done: Completion, cold: bool) -> dict[str, Any]:
    """Return the fields of the last chunk.

    Args:
        context: Context of the request.
        name: Model name in the request.
        done: Completion.
        cold: True if the model was not in memory, so that the queue time of the request was the load time.
    """
    timings, usage = done.timings, done.usage
    limited = done.finish_reason == "tool_calls" and done.stop is not None  # ended by a limit of tool calls
    return {"model": name, "created_at": now(), "done": True,
            "done_reason": "length" if done.finish_reason == "length" or limited else "stop",
            "total_duration": nanoseconds(time.monotonic() - context.started),
            "load_duration": nanoseconds(timings.queued if cold else 0), "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(timings.prompt), "eval_count": usage.completion_tokens,
            "eval_duration": nanoseconds(timings.generation)}


def _logprobs(served: ServedModel, found: tuple[TokenLogprob, ...] | None) -> list[Logprob] | None:
    if not found:
        return None
    bytes_of = served.model.tokenizer.token_bytes
    return [Logprob(token.token, max(token.logprob, LOWEST), list(bytes_of(token.token_id)),
                    [TopLogprob(other.token, max(other.logprob, LOWEST), list(bytes_of(other.token_id)))
                     for other in token.top] or None) for token in found]


async def _load_or_unload(context: Context, served: ServedModel, body: TextRequest,
                          make_response: ResponseFactory) -> Response:
    """Serve a request without a prompt: load the model, or unload it if ``keep_alive`` is 0."""
    pool, kept = context.state.pool, keep_alive_options(body).get("keep_alive")
    unloads = kept is not None and seconds_of(kept, "keep_alive") == 0
    if unloads:
        await aio.unload(served.model, pool=pool)
    else:
        await aio.load(served.model, keep_alive=kept, pool=pool, progress=False)
    fields = {"model": body.model, "created_at": now(), "done": True, "done_reason": "unload" if unloads else "load"}
    return json_response(make_response("", None, fields))


# ---- embeddings ----------------------------------------------------------------------------------------------------

def _load_seconds(context: Context, served: ServedModel) -> float:
    """Return the duration of the model's last load in seconds; 0 if it is not in memory any more."""
    keys = served.model.core_keys
    return max((row["load_seconds"] for row in context.state.pool.registry.entries() if row["key"] in keys),
               default=0.0)


def _ignore_context(context: Context, body: Request) -> None:
    """Report ``num_ctx`` of a request for embeddings. Other options have no effect on embeddings in Ollama either.

    Raises:
        Refusal: The server is strict.
    """
    if body.options is not None and body.options.num_ctx is not None:
        context.ignore("options.num_ctx", "`options.num_ctx` limits completions only: a text may be as long as the "
                       "model allows.", "num_ctx")


async def embed(context: Context, body: EmbedRequest) -> Response:
    """Embed texts."""
    served = await context.model(body.model)
    _ignore_context(context, body)
    texts = body.input if isinstance(body.input, list) else [body.input] if body.input else []
    context.check_inputs(texts, "input", context.state.max_inputs)
    options = keep_alive_options(body)
    if body.truncate is not None:
        options["truncate"] = body.truncate
    if body.dimensions is not None:
        options["dimensions"] = body.dimensions
    cold = not _resident(context, served)  # the request is checked before it loads the model
    rows, tokens = await counted(EMBED, context.state.pool, {"inputs": texts, **served.target, **options})
    duration = nanoseconds(time.monotonic() - context.started)
    load_duration = nanoseconds(_load_seconds(context, served)) if cold else 0
    return await large_response(
        lambda: EmbedResponse(body.model, rows.tolist(), duration, load_duration, tokens), rows.size)


async def embeddings(context: Context, body: OllamaEmbeddingsRequest) -> Response:
    """Embed one text, for the former route ``/api/embeddings``."""
    served = await context.model(body.model)
    _ignore_context(context, body)
    if not body.prompt:
        return json_response(OllamaEmbeddingsResponse([]))
    row, _ = await counted(EMBED, context.state.pool, {
        "inputs": context.check_text(body.prompt, "prompt"), **served.target, **keep_alive_options(body)})
    return json_response(OllamaEmbeddingsResponse(row.tolist()))


# ---- models --------------------------------------------------------------------------------------------------------

async def tags(context: Context, body: None) -> Response:
    """List the models that clients can use."""
    listed = await context.state.models.listed()
    return json_response(ModelRows(await native_calls.REQUESTS.arun(lambda: [_model_row(served) for served in listed])))


def _model_row(served: ServedModel) -> ModelRow:
    found = ollama_models.describe(served)
    return ModelRow(served.name, served.name, found.size, found.digest, Details(**found.details),
                    modified_at=found.modified_at)


async def ps(context: Context, body: None) -> Response:
    """List the models that are in memory."""
    rows, in_memory = [], {row.model: row for row in context.state.pool.ps()}
    for served in context.state.models.all():
        found = in_memory.get(served.model.key)
        if found is None or found.state not in ("ready", "busy", "loading"):
            continue
        left = min(max(0.0, found.keep_alive - found.idle_seconds), 100 * 365 * 86400.0)
        known = await native_calls.REQUESTS.arun(ollama_models.describe, served)
        rows.append(ModelRow(
            served.name, served.name, found.model_bytes + found.engine_bytes, known.digest, Details(**known.details),
            expires_at=(datetime.now(timezone.utc) + timedelta(seconds=left)).isoformat().replace("+00:00", "Z"),
            size_vram=0, context_length=known.context_length))
    return json_response(ModelRows(rows))


def _name_in(body: NameRequest | PullRequest | CreateRequest) -> str:
    name = body.model or body.name
    if not name:
        raise Refusal("invalid_value", "`model` is required.", "model")
    return name


async def show(context: Context, body: NameRequest) -> Response:
    """Describe a model."""
    served = await context.model(_name_in(body))
    found, more = await native_calls.REQUESTS.arun(
        lambda: (ollama_models.describe(served), ollama_models.template_capabilities(served)))
    parameters = ollama_models.parameters({**found.defaults, **served.defaults})
    return json_response(ShowResponse(Details(**found.details), found.info, found.capabilities + more,
                                  found.modified_at, found.license, parameters, served.system or "",
                                  "{{ .Prompt }}{{ .Suffix }}" if "insert" in more else ""))


async def copy(context: Context, body: CopyRequest) -> Response:
    """Serve a model under another name, too."""
    await context.state.models.add_alias(body.destination, body.source)
    return Response()


async def create(context: Context, body: CreateRequest) -> Response:
    """Serve a model under another name, with a system message and sampling options of its own."""
    for name in ("template", "adapters", "files", "quantize", "messages"):
        if getattr(body, name):
            raise Refusal("unsupported_parameter", f"`{name}` is not supported.", name)
    system = None if body.system is None else context.check_text(body.system, "system")
    defaults = options_of(context, body.parameters or Options())
    await context.state.models.add_alias(_name_in(body), body.source, system, defaults)
    if body.stream is False:
        return json_response(Progress("success"))
    return Response(line(_encode(Progress("success"))), media_type=LINES)


async def delete(context: Context, body: NameRequest) -> Response:
    """Remove a name that ``/api/create`` or ``/api/copy`` made. Never deletes files."""
    await context.state.models.remove_alias(_name_in(body))
    return Response()


async def pull(context: Context, body: PullRequest) -> Response:
    """Download a model of the catalogue. Clients cannot download any other model."""
    name = _name_in(body).removesuffix(":latest")
    models = context.state.models
    if name not in models.names() and not models.is_in_catalogue(name):
        raise Refusal("model_not_found", f"{shown(name)} is not in the catalogue, and clients can download only its "
                                         "models.", "model")
    if body.stream is False:
        await ollama_models.fetch(name, context.state)
        return json_response(Progress("success"))
    context.state.begin_stream()

    async def lines() -> AsyncIterator[bytes]:
        yield line(_encode(Progress("pulling manifest")))
        async for found in ollama_models.progress(name, context.state):
            if found.total is not None:
                yield line(_encode(Progress(f"pulling {name}", ollama_models.digest_of(name), found.total, found.done)))
        yield line(_encode(Progress("success")))

    return StreamedResponse(context, lines(), lambda refusal: line(plain_error(refusal)), LINES,
                            context.state.end_stream)


async def version(context: Context, body: None) -> Response:
    """Return the version of mpool."""
    return json_response(Version(__version__))


OPERATIONS = (
    Operation("POST", "/api/generate", generate, GenerateRequest, GenerateResponse, "Complete a prompt", LINES,
              "ollama_generate", names=_NAMES),
    Operation("POST", "/api/chat", chat, OllamaChatRequest, OllamaChatResponse, "Complete a conversation", LINES,
              "ollama_chat", names=_NAMES),
    Operation("POST", "/api/embed", embed, EmbedRequest, EmbedResponse, "Embed texts", name="ollama_embed",
              names={"inputs": "input"}),
    Operation("POST", "/api/embeddings", embeddings, OllamaEmbeddingsRequest, OllamaEmbeddingsResponse,
              "Embed one text", name="ollama_embeddings", names={"inputs": "prompt"}),
    Operation("GET", "/api/tags", tags, None, ModelRows, "List the models that clients can use", name="ollama_tags"),
    Operation("GET", "/api/ps", ps, None, ModelRows, "List the models in memory", name="ollama_ps"),
    Operation("POST", "/api/show", show, NameRequest, ShowResponse, "Describe a model", name="ollama_show"),
    Operation("POST", "/api/pull", pull, PullRequest, Progress, "Download a model of the catalogue", LINES,
              "ollama_pull"),
    Operation("POST", "/api/copy", copy, CopyRequest, None, "Serve a model under another name", name="ollama_copy"),
    Operation("POST", "/api/create", create, CreateRequest, Progress, "Serve a model under another name with defaults",
              LINES, "ollama_create"),
    Operation("DELETE", "/api/delete", delete, NameRequest, None, "Remove a name of a model", name="ollama_delete"),
    Operation("GET", "/api/version", version, None, Version, "Return the version of mpool", name="ollama_version"),
)

__all__ = ["OPERATIONS"]

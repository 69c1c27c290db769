"""``/v1/embeddings`` with the fields of OpenAI's and Jina's APIs, Jina's ``/v1/multi-vector``, and ``/v1/rerank``."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from ...host import native_calls
from ...tasks.running import counted
from ...tasks.vectors import quantize
from ...tasks.verbs import EMBED, RERANK
from ..computing import token_vectors
from ..errors import Refusal
from ..image_urls import with_images
from ..models import embedding_of, is_missing
from ..operations import Context, Operation, json_response, large_response
from .chat import message_of
from .structs import (
    Document,
    Embedding,
    EmbeddingsRequest,
    EmbeddingsResponse,
    InputObject,
    InputPart,
    InputUsage,
    Message,
    MultiVector,
    MultiVectorRequest,
    MultiVectorResponse,
    RankedResult,
    RerankRequest,
    RerankResponse,
    VideoPart,
    VideoURLPart,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...model import Model

#: Value of ``task`` in Jina's API -> task of the library. Other values name adapters in a model's files, or prompts.
_TASKS = {"retrieval.query": "query", "retrieval.passage": "document"}


def _own_adapters(model: Model) -> tuple[str, ...]:
    settings = model.description.embedding
    return settings.adapters if settings is not None else ()


async def embeddings(context: Context, body: EmbeddingsRequest) -> Response:
    """Embed texts, images or token ids."""
    served = await context.model(body.model)
    if (body.input is None) == (body.messages is None):
        raise Refusal("invalid_value", "One of `input` and `messages` is required.",
                      "input" if body.input is None else "messages")
    if body.late_chunking:
        raise Refusal("unsupported_parameter", "`late_chunking` must be false: every text is embedded on its own.",
                      "late_chunking")
    kind = body.encoding_format if body.embedding_type is None else _only(body.embedding_type)
    prompt = {}
    if body.messages is not None:
        messages, field = body.messages, "messages"
        context.names |= dict.fromkeys(("inputs", "input", "prompt"), field)
        turn, instruction = await context.converted(lambda: conversation(context, messages))
        prompt = {} if instruction is None else {"prompt": instruction}
        inputs: Any = await with_image_files(context, [turn])
    else:
        field = "input"
        inputs = texts_or_ids(context, *await with_objects(context, input=body.input))
    task = _TASKS.get(body.task or "", body.task)
    named = {"task": task}
    if task not in (None, "query", "document"):
        own = () if is_missing(served) else await native_calls.REQUESTS.arun(_own_adapters, served.model)
        named = {"adapter" if task in own else "prompt_name": task}
    given = {"inputs": inputs, **served.target, **named, **prompt, "truncate": body.truncate is not False}
    if body.return_multivector:
        for name, value in (("dimensions", body.dimensions), ("normalized", body.normalized)):
            if value is not None:
                raise Refusal("unsupported_parameter", f"`{name}` must be absent with `return_multivector`.", name)
        if isinstance(inputs, dict) or isinstance(inputs, list) and not all(isinstance(one, str) for one in inputs):
            raise Refusal("unsupported_parameter", f"`{field}` must be texts with `return_multivector`.", field)
        return await _multi_vectors(context, body.model, given, kind)
    precision = kind if kind in ("binary", "ubinary") else "float32"
    vectors, tokens = await counted(EMBED, context.state.pool, {
        **given, "dimensions": body.dimensions, "normalize": body.normalized, "precision": precision,
        "allow_token_ids": bool(body.allow_token_ids or context.state.settings.allow_token_ids)})
    rows = vectors if vectors.ndim == 2 else vectors[None]

    def made() -> EmbeddingsResponse:
        data = [Embedding(at, value) for at, value in enumerate(encoded(rows, kind))]
        return EmbeddingsResponse(data, body.model, InputUsage(tokens, tokens))

    return await large_response(made, rows.size)


async def multi_vector(context: Context, body: MultiVectorRequest) -> Response:
    """Embed the tokens of texts."""
    served = await context.model(body.model)
    inputs = texts_or_ids(context, plain_texts(body.input))
    settings = await embedding_of(served)
    width = None if settings is None else settings.hidden_size if settings.tokens is None else settings.tokens.size
    if not is_missing(served) and body.dimensions not in (None, width):
        raise Refusal("invalid_value", f"`dimensions` must be {width} for this model, got {body.dimensions}.",
                      "dimensions")
    return await _multi_vectors(context, body.model, {
        "inputs": inputs, **served.target, "task": body.input_type, "truncate": body.truncate is not False},
        _only(body.embedding_type))


async def _multi_vectors(context: Context, name: str, given: dict[str, Any], kind: str) -> Response:
    found, tokens = await token_vectors(context, given, "input")

    def made() -> MultiVectorResponse:
        data = [MultiVector(at, encoded(quantize(rows, kind) if kind in ("binary", "ubinary") else rows, kind))
                for at, rows in enumerate(found)]
        return MultiVectorResponse(data, name, InputUsage(tokens, tokens))

    return await large_response(made, found.values.size)


def _only(kinds: str | list[Any]) -> str:
    return kinds if isinstance(kinds, str) else kinds[0]


def plain_texts(given: Any) -> Any:
    """Replace the objects of Jina's API by their texts.

    Raises:
        Refusal: An object has no text.
    """
    def text_of(one: Any) -> Any:
        if not isinstance(one, InputObject):
            return one
        if one.text is None or any(value is not None for value in (one.image, one.image_url, one.content)):
            raise Refusal("unsupported_parameter", "`input` must be texts: objects with `text` alone.", "input")
        return one.text

    return [text_of(one) for one in given] if isinstance(given, list) else text_of(given)


def _parts_of(context: Context, given: InputPart, where: str) -> list[dict[str, Any]]:
    """Return the parts of an object, as in a message of the library: the image, then the text."""
    found: list[dict[str, Any]] = []
    url = given.image_url if isinstance(given.image_url, str) or given.image_url is None else given.image_url.url
    for name, image in (("image", given.image), ("image_url", url)):
        if image is not None:
            found.append({"type": "image", "image": context.image(image, f"{where}.{name}")})
    if given.text is not None:
        found.append({"type": "text", "text": context.check_text(given.text, f"{where}.text")})
    content = given.content if isinstance(given, InputObject) else None
    for at, part in enumerate(content or ()):
        found += _parts_of(context, part, f"{where}.content[{at}]")
    if not found:
        raise Refusal("invalid_value", f"`{where}` must have a text, an image or both.", where)
    if isinstance(given, InputObject) and all(part.get("text") == "" for part in found):
        raise Refusal("invalid_value", f"`{where}.text` must have at least 1 character without an image.",
                      f"{where}.text")
    return found


def conversation(context: Context, messages: list[Message]) -> tuple[list[dict[str, Any]], str | None]:
    """Return the parts of the input that a conversation is, and its instruction or None.

    Raises:
        Refusal: The conversation has other messages than one of the user, at most one of the system before it, and at
            most an empty one of the assistant after it.
    """
    for at, message in enumerate(messages):
        for number, part in enumerate(() if isinstance(message.content, str) else message.content or ()):
            if isinstance(part, (VideoPart, VideoURLPart)):
                where = f"messages[{at}].content[{number}]"
                raise Refusal("unsupported_parameter", f"`{where}` must be a text or an image: videos have no "
                                                       "embeddings. Send frames as images.", where)
    turns = [message_of(context, message, f"messages[{at}]") for at, message in enumerate(messages)]
    for turn in turns:
        if isinstance(turn["content"], str):
            turn["content"] = [{"type": "text", "text": turn["content"]}]
    prompt = None
    if turns[0]["role"] in ("system", "developer"):
        parts = turns.pop(0)["content"] or ()
        if any(part["type"] != "text" for part in parts):
            raise Refusal("invalid_value", "`messages[0]` must have texts only.", "messages[0]")
        prompt = "".join(part["text"] for part in parts)
    if turns and turns[-1]["role"] == "assistant" and not any(part.get("text") for part in turns[-1]["content"] or ()):
        turns.pop()
    if len(turns) != 1 or turns[0]["role"] != "user" or not turns[0]["content"]:
        raise Refusal("invalid_value", "`messages` must be one message of the user, with at most one of the system "
                                       "before it and an empty one of the assistant after it.", "messages")
    return turns[0]["content"], prompt


async def with_image_files(context: Context, inputs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Fetch images at URLs. Returns the inputs of the library for lists of parts."""
    found = []
    for message in await with_images(context, [{"content": parts} for parts in inputs]):
        one: dict[str, Any] = {}
        for part in message["content"]:
            one.setdefault(part["type"], []).append(part[part["type"]])
        found.append(one)
    return found


async def with_objects(context: Context, **fields: Any) -> list[Any]:
    """Replace objects of texts and images in fields of the body by the inputs of the library: texts, or dicts with
    images. Returns the values of the fields. The limits of URLs hold for all fields together."""
    places = {(name, at): one for name, given in fields.items()
              for at, one in enumerate(given if isinstance(given, list) else [given]) if isinstance(one, InputObject)}
    if not places:
        return list(fields.values())
    several = {name for name, given in fields.items() if isinstance(given, list)}
    for name in several & {name for name, _ in places}:
        context.check_inputs(fields[name], name, context.state.max_inputs)
    parts = await context.converted(lambda: [
        _parts_of(context, one, f"{name}[{at}]" if name in several else name) for (name, at), one in places.items()])
    found: dict[tuple[str, int], Any] = {
        place: "".join(one["text"]) if set(one) == {"text"} else one
        for place, one in zip(places, await with_image_files(context, parts))}
    return [[found.get((name, at), one) for at, one in enumerate(given)] if name in several else
            found.get((name, 0), given) for name, given in fields.items()]


def texts_or_ids(context: Context, given: Any, name: str = "input", most: int | None = None) -> Any:
    """Check a field that is a text, a list of texts, a list of token ids, or a list of such lists. An input with images
    counts as a text.

    Args:
        context: Context of the request.
        given: Value of the field.
        name: Name of the field.
        most: Maximum number of texts or lists of token ids; None: ``PoolConfig.max_embed_inputs``.

    Returns:
        The value; a single list of token ids is wrapped in a list.

    Raises:
        Refusal: The value contains texts and token ids, there are too many, or a text is too long.
    """
    if isinstance(given, dict):
        return given
    if isinstance(given, str):
        return context.check_text(given, name)
    if given and not isinstance(given[0], int):
        context.check_inputs(given, name, context.state.max_inputs if most is None else most)
    kinds = {str if isinstance(part, dict) else type(part) for part in given}
    if len(kinds) > 1:
        raise Refusal("invalid_value", f"`{name}` must be texts or token ids, got a list with both.", name)
    if kinds == {int}:
        return [given]
    return given


def encoded(rows: NDArray[Any], encoding: str) -> list[Any]:
    """Encode the rows of a (rows, size) array as lists of numbers, or as base64 of little-endian float32."""
    if encoding == "base64":
        return [encoded_one(row, encoding) for row in rows]
    found: list[Any] = rows.tolist()
    return found


def encoded_one(values: NDArray[Any], encoding: str) -> Any:
    """Encode an array as lists of numbers, or as base64 of little-endian float32."""
    if encoding == "base64":
        return base64.b64encode(values.astype("<f4", copy=False).tobytes()).decode()
    return values.tolist()


async def rerank(context: Context, body: RerankRequest) -> Response:
    """Rank documents by relevance to a query."""
    served = await context.model(body.model)
    context.check_inputs(body.documents, "documents", context.state.max_inputs)
    documents, query = await with_objects(context, documents=body.documents, query=body.query)
    if isinstance(query, str):
        context.check_text(query, "query")
    ranking, tokens = await counted(RERANK, context.state.pool, {
        "query": query, "documents": documents, **served.target, "top_k": body.top_n,
        **({} if body.prompt is None else {"prompt": context.check_text(body.prompt, "prompt")})})
    results = [RankedResult(found.index, found.score, Document(found.text) if body.return_documents else None)
               for found in ranking.results]
    return json_response(RerankResponse(f"rerank-{context.id}", body.model, results, {"total_tokens": tokens}))


OPERATIONS = (
    Operation("POST", "/v1/embeddings", embeddings, EmbeddingsRequest, (EmbeddingsResponse, MultiVectorResponse),
              "Embed texts, images or token ids", name="embeddings",
              names={"inputs": "input", "input": "input", "prompt_name": "task", "dimensions": "dimensions"}),
    Operation("POST", "/v1/multi-vector", multi_vector, MultiVectorRequest, MultiVectorResponse,
              "Embed the tokens of texts", name="multi_vector", names={"input": "input"}),
    Operation("POST", "/v1/rerank", rerank, RerankRequest, RerankResponse, "Rank documents by relevance to a query",
              name="rerank", names={"query": "query", "documents": "documents", "top_k": "top_n", "prompt": "prompt"}),
)

__all__ = ["OPERATIONS", "encoded", "encoded_one", "texts_or_ids"]

"""A plugin of the command ``llm`` (https://llm.datasette.io): chat models and embeddings (extra ``llm``).

``llm`` finds it by its entry point once both are installed in one environment. It offers as ``mpool/KEY`` the models of
the catalogue that are on this machine, and the two default ones, which are fetched on first use; nothing asks the
network before. ``llm mpool add NAME REF`` adds others: a path, ``org/name``, whatever :func:`mpool.embed` and
:func:`mpool.chat` take. Options of ``llm -o`` are those of :func:`mpool.chat` with the same names and ranges, and
schemas (``llm --schema``) are kept to by construction.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import llm
from llm.models import EmbeddingModel
from llm.parts import AttachmentPart, Message, ReasoningPart, StreamEvent, TextPart, ToolCallPart, ToolResultPart
from pydantic import Field, create_model

from .. import models as catalog
from .._functions import default_pool
from ..errors import InvalidArgument, MpoolError
from ..pool import Pool
from ..tasks.sampling import TABLE

if TYPE_CHECKING:
    from ..results import Chunk, Completion

log = logging.getLogger("mpool.llm")

#: Capability -> whether its models talk; others are not offered.
_TALKS = {"text_to_text": True, "vision": True, "text_embedding": False, "image_embedding": False}
_IMAGES = frozenset(("image/png", "image/jpeg", "image/webp"))
#: Texts of one call, so that vectors of a long list come as they are made.
_BATCH = 256

_FIELDS: dict[str, Any] = {
    name: (row.kind | None, Field(default=None, description=row.allowed))  # type: ignore[operator]
    for name, row in TABLE.items() if name != "n"}
_FIELDS |= {"stop": (str | None, Field(default=None, description="stop before this text")),
            "timeout": (float | None, Field(default=None, description="time limit in seconds"))}
Options: Any = create_model("Options", __base__=llm.Options, **_FIELDS)


# ---- which models ---------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Offer:
    """A model that ``llm`` knows: its name there without ``mpool/``, what mpool finds it by, its capability."""

    name: str
    ref: str
    capability: str


def offers() -> list[Offer]:
    """All of them, without network."""
    found = catalogued()
    return [*found, *added(found)]


def catalogued() -> list[Offer]:
    """Those of the catalogue."""
    catalogue = catalog.load_catalogue()
    defaults = {catalogue.default(capability).key for capability in ("text_embedding", "text_to_text")}
    return [Offer(key, key, row.capability) for key, row in catalogue.rows.items()
            if row.capability in _TALKS and (key in defaults or _is_here(key))]


def _is_here(key: str) -> bool:
    try:
        catalog.resolve(key, offline=True, progress=False)
    except MpoolError:
        return False
    return True


def _list() -> Path:
    return Path(llm.user_dir(), "mpool.json")


def added(known: Iterable[Offer] = ()) -> list[Offer]:
    """Those of ``llm mpool add``. A list that cannot be read is none, and the log says so: ``llm`` is to go on."""
    try:
        held = json.loads(_list().read_text(encoding="utf-8"))
        found = [Offer(name, row["ref"], row["capability"]) for name, row in held.items()]
        if not all(isinstance(offer.ref, str) and offer.capability in _TALKS for offer in found):
            raise ValueError("it has another form")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("%s cannot be read, so that its models are not offered: %s", _list(), error)
        return []
    taken = {offer.name for offer in known}
    return [offer for offer in found if offer.name not in taken]


def _save(rows: Iterable[Offer]) -> None:
    path = _list()
    text = json.dumps({row.name: {"ref": row.ref, "capability": row.capability} for row in rows}, indent=1)
    handle, made = tempfile.mkstemp(dir=path.parent, prefix=".mpool-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text + "\n")
    os.replace(made, path)


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    """Models that talk."""
    for offer in offers():
        if _TALKS[offer.capability]:
            register(MpoolChat(offer), AsyncMpoolChat(offer))


@llm.hookimpl
def register_embedding_models(register: Callable[..., None]) -> None:
    """Models that embed."""
    for offer in offers():
        if not _TALKS[offer.capability]:
            register(MpoolEmbedding(offer))


@llm.hookimpl
def register_commands(cli: click.Group) -> None:
    """``llm mpool``."""

    @cli.group(name="mpool")
    def group() -> None:
        """Models of mpool beside those of its catalogue"""

    @group.command()
    @click.argument("name")
    @click.argument("ref")
    def add(name: str, ref: str) -> None:
        """Offer the model REF (a path, org/name, ...) as mpool/NAME; reads its files, and fetches them if need be"""
        try:
            offer = _offer(name, ref)
        except MpoolError as error:
            raise click.ClickException(str(error)) from None
        _save([*(other for other in added() if other.name != name), offer])
        click.echo(f"mpool/{name} is a model of {offer.capability}")

    @group.command()
    @click.argument("name")
    def remove(name: str) -> None:
        """Offer mpool/NAME no longer; its files stay"""
        rows = added()
        if name not in {row.name for row in rows}:
            raise click.ClickException(f"mpool/{name} was not added")
        _save(row for row in rows if row.name != name)

    @group.command(name="list")
    def show() -> None:
        """What is offered, and what for"""
        for offer in offers():
            click.echo(f"mpool/{offer.name}  {offer.capability}  {offer.ref}")


def _offer(name: str, ref: str) -> Offer:
    if name in {offer.name for offer in catalogued()}:
        raise InvalidArgument(f"`name` must not be a key of the catalogue, got {name!r}", param="name", got=repr(name),
                                  allowed="no key of the catalogue")
    with Pool() as pool:
        pool._check_free("name", name, None)
        model = pool.get(str(catalog.parse_reference(ref)))
        return Offer(name, model.ref, model.capability)


# ---- chat -----------------------------------------------------------------------------------------------------------

class _Chat:
    can_stream = supports_schema = supports_tools = True

    def __init__(self, offer: Offer) -> None:
        self.model_id, self.ref = f"mpool/{offer.name}", offer.ref
        self.attachment_types: set[str] | frozenset[str] = _IMAGES if offer.capability == "vision" else frozenset()

    def _call(self, prompt: llm.Prompt) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        options = {name: value for name, value in prompt.options if value is not None}
        if prompt.schema:
            options["response_format"] = {"type": "json_schema",
                                          "json_schema": {"name": "answer", "schema": prompt.schema}}
        if prompt.tools:
            options["tools"] = [{"type": "function", "function": {
                "name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}}
                for tool in prompt.tools]
        return [plain for message in prompt.messages for plain in _messages(message)], options


class MpoolChat(_Chat, llm.Model):
    """A chat model of ``llm`` that is :func:`mpool.chat`."""

    Options = Options

    def execute(self, prompt: llm.Prompt, stream: bool, response: llm.Response,
                conversation: llm.Conversation | None) -> Iterator[str | StreamEvent]:
        """Answers, in pieces if ``stream`` asks for them; called by ``llm``."""
        messages, options = self._call(prompt)
        with default_pool().chat(messages, self.ref, stream=True, **options) as pieces:
            if stream:
                for chunk in pieces:
                    yield from _events(chunk)
            done = pieces.result()
        if not stream:
            yield from _events(done)
        _tell(response, done)


class AsyncMpoolChat(_Chat, llm.AsyncModel):
    """The same for asyncio."""

    Options = Options

    async def execute(self, prompt: llm.Prompt, stream: bool, response: llm.AsyncResponse,
                      conversation: llm.AsyncConversation | None) -> AsyncGenerator[str | StreamEvent, None]:
        """As :meth:`MpoolChat.execute`."""
        from .. import aio

        messages, options = self._call(prompt)
        async with aio.chat(messages, self.ref, stream=True, **options) as pieces:
            if stream:
                async for chunk in pieces:
                    for event in _events(chunk):
                        yield event
            done = await pieces.result()
        if not stream:
            for event in _events(done):
                yield event
        _tell(response, done)


def _events(piece: Chunk | Completion) -> Iterator[str | StreamEvent]:
    if piece.reasoning:
        yield StreamEvent("reasoning", piece.reasoning)
    if piece.text:
        yield StreamEvent("text", piece.text)


def _tell(response: Any, done: Completion) -> None:
    details = {"cached_tokens": done.usage.cached_tokens} if done.usage.cached_tokens else None
    for call in done.tool_calls:
        if call.arguments is not None:
            response.add_tool_call(llm.ToolCall(tool_call_id=call.id, name=call.name, arguments=call.arguments))
    response.set_usage(input=done.usage.prompt_tokens, output=done.usage.completion_tokens, details=details)
    response.response_json = {"finish_reason": done.finish_reason, "seed": done.seed}


def _messages(message: Message) -> Iterator[dict[str, Any]]:
    """A message as :func:`mpool.chat` takes it; each result of a tool is a message of its own there."""
    parts, thoughts, calls, results = list[Any](), "", list[Any](), list[Any]()
    for part in message.parts:
        if isinstance(part, TextPart):
            parts.append({"type": "text", "text": part.text})
        elif isinstance(part, ReasoningPart):
            thoughts += part.text
        elif isinstance(part, AttachmentPart) and part.attachment is not None:
            parts.append({"type": "image", "image": part.attachment.content_bytes()})
        elif isinstance(part, ToolCallPart):
            calls.append({"id": part.tool_call_id, "type": "function",
                          "function": {"name": part.name, "arguments": part.arguments}})
        elif isinstance(part, ToolResultPart):
            results.append({"role": "tool", "tool_call_id": part.tool_call_id, "content": part.output})
        else:
            raise InvalidArgument(f"a message has a {type(part).__name__}, allowed: texts, images, calls of tools")
    yield from results
    if parts or calls or thoughts or not results:
        yield {"role": message.role, "content": parts, **({"reasoning": thoughts} if thoughts else {}),
               **({"tool_calls": calls} if calls else {})}


# ---- embeddings -----------------------------------------------------------------------------------------------------

class MpoolEmbedding(EmbeddingModel):
    """An embedding model of ``llm`` that is :func:`mpool.embed`, and :func:`mpool.embed_image` for what is binary."""

    batch_size = _BATCH

    def __init__(self, offer: Offer) -> None:
        self.model_id, self.ref = f"mpool/{offer.name}", offer.ref
        self.supports_binary = offer.capability == "image_embedding"

    def embed_batch(self, items: Iterable[str | bytes], *, key: str | None = None) -> Iterator[list[float]]:
        """Vectors of texts and images, in their order; called by ``llm``."""
        given = list(items)
        pool, found = default_pool(), dict[int, list[float]]()
        for kind, embed in ((str, pool.embed), (bytes, pool.embed_image)):
            places = [at for at, item in enumerate(given) if isinstance(item, kind)]
            if places:
                call: Any = embed
                rows = call([given[at] for at in places], self.ref, max_inputs=len(places)).tolist()
                found |= dict(zip(places, rows))
        return iter([found[at] for at in range(len(given))])


__all__ = ["AsyncMpoolChat", "MpoolChat", "MpoolEmbedding", "Offer", "added", "catalogued", "offers",
           "register_commands", "register_embedding_models", "register_models"]

"""A plugin of the command ``llm`` (https://llm.datasette.io): chat models and embeddings (extra ``llm``).

``llm`` finds the plugin by its entry point once both packages are installed in one environment. The plugin registers
the models of the catalogue whose files are on this machine as ``mpool/KEY``, and the default models for text, which are
downloaded on first use. Listing models does not use the network. ``llm mpool add NAME REF`` adds other models: a path,
``org/name`` or any other reference that :func:`mpool.embed` and :func:`mpool.chat` accept. The options of ``llm -o``
are those of :func:`mpool.chat`, with the same names and ranges. With ``llm --schema``, a grammar ensures that the
completion matches the schema.
"""

from __future__ import annotations

import json
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

from .. import aio
from .. import models as _models
from ..api.functions import default_pool
from ..checks import refuse
from ..errors import InvalidArgument, MpoolError
from ..pool import Pool
from ..records import logger
from ..tasks.sampling import TABLE
from ._choices import call_limit

if TYPE_CHECKING:
    from ..completions import Chunk, Completion

log = logger("mpool.llm")

#: Capability -> True: chat models, False: embedding models. Models of other capabilities are not registered.
_IS_CHAT = {"text_to_text": True, "vision": True, "text_embedding": False, "image_embedding": False}
_IMAGES = frozenset(("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"))
#: Inputs per request: vectors of a long list are returned batch by batch.
_BATCH = 256

_FIELDS: dict[str, Any] = {
    name: (row.kind | None, Field(default=None, description=row.allowed))  # type: ignore[operator]
    for name, row in TABLE.items() if name != "n"}
_FIELDS |= {"stop": (str | None, Field(default=None, description="generation ends before this text")),
            "timeout": (float | None, Field(default=None, description="time limit in seconds"))}
Options: Any = create_model("Options", __base__=llm.Options, **_FIELDS)


# ---- list of models -------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class PluginModel:
    """A model that the plugin registers.

    Attributes:
        name: name in ``llm`` without ``mpool/``.
        ref: reference for mpool.
        capability: capability of the model.
    """

    name: str
    ref: str
    capability: str


def plugin_models() -> list[PluginModel]:
    """Return all models that the plugin registers. Does not use the network."""
    found = catalogue_models()
    return [*found, *added_models(found)]


def catalogue_models() -> list[PluginModel]:
    """Return the default models, and the models of the catalogue whose files are on this machine."""
    catalogue = _models.load_catalogue()
    defaults = {catalogue.default(capability).key for capability in ("text_embedding", "text_to_text")}
    return [PluginModel(key, key, row.capability) for key, row in catalogue.rows.items()
            if row.capability in _IS_CHAT and (key in defaults or _is_local(key))]


def _is_local(key: str) -> bool:
    try:
        _models.resolve(key, offline=True, progress=False)
    except MpoolError:
        return False
    return True


def _list_path() -> Path:
    """Return the path of the list of models that ``llm mpool add`` has added."""
    return Path(llm.user_dir(), "mpool.json")


def added_models(known: Iterable[PluginModel] = ()) -> list[PluginModel]:
    """Return the models that ``llm mpool add`` has added, except those with the name of a ``known`` model.

    If the list cannot be read, log a warning and return no models, so that ``llm`` keeps working.
    """
    try:
        rows = json.loads(_list_path().read_text(encoding="utf-8"))
        found = [PluginModel(name, row["ref"], row["capability"]) for name, row in rows.items()]
        if not all(isinstance(model.ref, str) and model.capability in _IS_CHAT for model in found):
            raise ValueError("an entry has an invalid ref or capability")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("%s cannot be read, so its models are not available: %s", _list_path(), error)
        return []
    names = {model.name for model in known}
    return [model for model in found if model.name not in names]


def _save(models: Iterable[PluginModel]) -> None:
    path = _list_path()
    text = json.dumps({model.name: {"ref": model.ref, "capability": model.capability} for model in models}, indent=1)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".mpool-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text + "\n")
    os.replace(temporary, path)


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    """Register the chat models. Called by ``llm``."""
    for model in plugin_models():
        if _IS_CHAT[model.capability]:
            register(MpoolChat(model), AsyncMpoolChat(model))


@llm.hookimpl
def register_embedding_models(register: Callable[..., None]) -> None:
    """Register the embedding models. Called by ``llm``."""
    for model in plugin_models():
        if not _IS_CHAT[model.capability]:
            register(MpoolEmbedding(model))


@llm.hookimpl
def register_commands(cli: click.Group) -> None:
    """Register the commands ``llm mpool add``, ``remove`` and ``list``. Called by ``llm``."""

    @cli.group(name="mpool")
    def group() -> None:
        """Manage the models of mpool"""

    @group.command()
    @click.argument("name")
    @click.argument("ref")
    def add(name: str, ref: str) -> None:
        """Add the model REF (a path, org/name, ...) as mpool/NAME; downloads its files if they are missing"""
        try:
            model = _find_model(name, ref)
        except MpoolError as error:
            raise click.ClickException(str(error)) from None
        _save([*(other for other in added_models() if other.name != name), model])
        click.echo(f"mpool/{name} was added, with the capability {model.capability}")

    @group.command()
    @click.argument("name")
    def remove(name: str) -> None:
        """Remove mpool/NAME from the list; its files are kept"""
        models = added_models()
        if name not in {model.name for model in models}:
            raise click.ClickException(f"mpool/{name} is not in the list of added models")
        _save(model for model in models if model.name != name)

    @group.command(name="list")
    def show() -> None:
        """List all models with their capabilities"""
        for model in plugin_models():
            click.echo(f"mpool/{model.name}  {model.capability}  {model.ref}")


def _find_model(name: str, ref: str) -> PluginModel:
    if name in {model.name for model in catalogue_models()}:
        refuse("name", name, "a name that is not in mpool's catalogue")
    with Pool() as pool:
        pool.check_free(name)
        model = pool.get(str(_models.parse_reference(ref)))
        return PluginModel(name, model.ref, model.capability)


# ---- chat -----------------------------------------------------------------------------------------------------------

class _Chat:
    can_stream = supports_schema = supports_tools = True

    def __init__(self, model: PluginModel) -> None:
        self.model_id, self.ref = f"mpool/{model.name}", model.ref
        self.attachment_types: set[str] | frozenset[str] = _IMAGES if model.capability == "vision" else frozenset()

    def _arguments(self, prompt: llm.Prompt) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the messages and options for :func:`mpool.chat`."""
        options = {name: value for name, value in prompt.options if value is not None}
        if prompt.schema:
            options["response_format"] = {"type": "json_schema",
                                          "json_schema": {"name": "answer", "schema": prompt.schema, "strict": False}}
        if prompt.tools:
            options["tools"] = [{"type": "function", "function": {
                "name": tool.name, "description": tool.description or None, "parameters": tool.input_schema}}
                for tool in prompt.tools]
        return [plain for message in prompt.messages for plain in _messages(message)], options


class MpoolChat(_Chat, llm.Model):
    """A chat model of ``llm`` that runs :func:`mpool.chat`."""

    Options = Options

    def execute(self, prompt: llm.Prompt, stream: bool, response: llm.Response,
                conversation: llm.Conversation | None) -> Iterator[str | StreamEvent]:
        """Yield the completion, in chunks if ``stream`` is true. Called by ``llm``."""
        messages, options = self._arguments(prompt)
        with default_pool().chat(messages, self.ref, stream=True, **options) as chunks:
            if stream:
                for chunk in chunks:
                    yield from _events(chunk)
            completion = chunks.result()
        if not stream:
            yield from _events(completion)
        _set_metadata(response, completion)


class AsyncMpoolChat(_Chat, llm.AsyncModel):
    """The asynchronous counterpart of :class:`MpoolChat`."""

    Options = Options

    async def execute(self, prompt: llm.Prompt, stream: bool, response: llm.AsyncResponse,
                      conversation: llm.AsyncConversation | None) -> AsyncGenerator[str | StreamEvent, None]:
        """See :meth:`MpoolChat.execute`."""
        messages, options = self._arguments(prompt)
        async with aio.chat(messages, self.ref, stream=True, **options) as chunks:
            if stream:
                async for chunk in chunks:
                    for event in _events(chunk):
                        yield event
            completion = await chunks.result()
        if not stream:
            for event in _events(completion):
                yield event
        _set_metadata(response, completion)


def _events(source: Chunk | Completion) -> Iterator[str | StreamEvent]:
    if source.reasoning:
        yield StreamEvent("reasoning", source.reasoning)
    if source.text:
        yield StreamEvent("text", source.text)


def _set_metadata(response: Any, completion: Completion) -> None:
    """Set the tool calls, the usage and the raw data of a response of ``llm``."""
    usage = completion.usage
    details = {"cached_tokens": usage.cached_tokens} if usage.cached_tokens else None
    for call in completion.tool_calls:
        if call.arguments is not None:
            response.add_tool_call(llm.ToolCall(tool_call_id=call.id, name=call.name, arguments=call.arguments))
    response.set_usage(input=usage.prompt_tokens, output=usage.completion_tokens, details=details)
    response.response_json = {"finish_reason": completion.finish_reason, "seed": completion.seed,
                              **call_limit(completion)}


def _messages(message: Message) -> Iterator[dict[str, Any]]:
    """Convert a message of ``llm`` to messages for :func:`mpool.chat`. Each tool result becomes a message."""
    parts, reasoning, calls, results = list[Any](), "", list[Any](), list[Any]()
    for part in message.parts:
        if isinstance(part, TextPart):
            parts.append({"type": "text", "text": part.text})
        elif isinstance(part, ReasoningPart):
            reasoning += part.text
        elif isinstance(part, AttachmentPart) and part.attachment is not None:
            parts.append({"type": "image", "image": part.attachment.content_bytes()})
        elif isinstance(part, ToolCallPart):
            calls.append({"id": part.tool_call_id, "type": "function",
                          "function": {"name": part.name, "arguments": part.arguments}})
        elif isinstance(part, ToolResultPart):
            results.append({"role": "tool", "tool_call_id": part.tool_call_id, "content": part.output})
        else:
            raise InvalidArgument(param="message part", got=type(part).__name__,
                                  allowed="a text, an image, reasoning, a tool call or a tool result")
    yield from results
    if parts or calls or reasoning or not results:
        yield {"role": message.role, "content": parts, **({"reasoning": reasoning} if reasoning else {}),
               **({"tool_calls": calls} if calls else {})}


# ---- embeddings -----------------------------------------------------------------------------------------------------

class MpoolEmbedding(EmbeddingModel):
    """An embedding model of ``llm`` that runs :func:`mpool.embed`, or :func:`mpool.embed_image` for binary items."""

    batch_size = _BATCH

    def __init__(self, model: PluginModel) -> None:
        self.model_id, self.ref = f"mpool/{model.name}", model.ref
        self.supports_binary = model.capability == "image_embedding"

    def embed_batch(self, items: Iterable[str | bytes], *, key: str | None = None) -> Iterator[list[float]]:
        """Return the vectors of texts and images in the order of the items. Called by ``llm``."""
        inputs = list(items)
        pool, vectors = default_pool(), dict[int, list[float]]()
        for kind, function in ((str, pool.embed), (bytes, pool.embed_image)):
            indices = [index for index, item in enumerate(inputs) if isinstance(item, kind)]
            if indices:
                embed: Any = function
                rows = embed([inputs[index] for index in indices], self.ref, max_inputs=len(indices)).tolist()
                vectors |= dict(zip(indices, rows))
        return iter([vectors[index] for index in range(len(inputs))])


__all__ = ["AsyncMpoolChat", "MpoolChat", "MpoolEmbedding", "PluginModel", "added_models", "catalogue_models",
           "plugin_models", "register_commands", "register_embedding_models", "register_models"]

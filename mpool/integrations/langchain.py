"""A chat model and embeddings for LangChain (extra ``langchain``)."""

from __future__ import annotations

import collections
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast

from .. import aio
from ..api.functions import pool_of
from ..checks import refuse, unknown_option
from ..host.resources import importing
from . import _requests as requests
from ._choices import call_limit, logprobs_of

with importing("langchain"):
    from langchain_core.embeddings import Embeddings
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import (
        AIMessage,
        AIMessageChunk,
        BaseMessage,
        InvalidToolCall,
        ToolCall,
        ToolCallChunk,
        ToolMessage,
        convert_to_openai_messages,
    )
    from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
    from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
    from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
    from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
    from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
    from langchain_core.utils.pydantic import is_basemodel_subclass
    from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun

    from ..completions import Choice, Chunk, Completion, TokenLogprob, Usage

#: Fields of the chat model that are options of mpool.chat with the same name.
_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "seed", "timeout")
_METHODS = ("json_schema", "function_calling", "json_mode")


class ChatMpool(BaseChatModel):
    """A LangChain chat model that runs :func:`mpool.chat`: ``invoke``, ``stream``, ``batch`` and their asynchronous
    counterparts.

    Concurrent requests (``batch``, ``abatch``) are batched by the pool. For vision models, messages may have images in
    every form that :func:`mpool.chat` accepts, and in LangChain's and its providers' forms.

    The messages may come from other models. Of their answers, the text, refusals, reasoning and calls of tools are
    used; only their service can read other content blocks, such as calls of its own tools, and they are left out.
    With ``output_version="v1"``, or the variable LC_OUTPUT_VERSION, the content of answers is a list of such blocks.

    Args:
        model: a key, a path, a reference or a :class:`mpool.Model`, as for :func:`mpool.chat`; None:
            SmolLM2-135M-Instruct. A single request can use another model: ``invoke(..., model=)``.
        temperature, top_k, top_p, min_p, max_tokens, seed, stop, timeout: see :func:`mpool.chat`; None: the default of
            the model or of :func:`mpool.chat`.
        options: further options of :func:`mpool.chat`.
        streaming: True: ``invoke`` streams internally, so that callbacks receive tokens.
        max_retries, api_key: ignored; they exist because LangChain's other chat models have them. A pool retries
            requests after worker faults by itself, and needs no API key.

    Messages have ``usage_metadata`` (``cache_read``: prompt tokens from the prefix cache), ``response_metadata`` with
    ``finish_reason``, ``model_name`` and ``seed``, and the model's reasoning in
    ``additional_kwargs["reasoning_content"]``. With the option ``logprobs``, ``response_metadata`` also has
    ``logprobs`` in OpenAI's format.

    Raises:
        MpoolError: a request fails as in :func:`mpool.chat`; constructing the model reads no files.

    Example:
        >>> from mpool.integrations.langchain import ChatMpool
        >>> model = ChatMpool(temperature=0, max_tokens=8, options={"compute": "float32"})
        >>> model.invoke("What is the capital of France?").content
        'The capital of France is Paris.'

    Source:
        https://docs.langchain.com/oss/python/contributing/standard-tests-langchain
    """

    model_config = ConfigDict(extra="forbid")

    model: Any = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: list[str] | None = None
    timeout: float | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    streaming: bool = False
    max_retries: int | None = None
    api_key: Any = Field(default=None, exclude=True, repr=False)

    @property
    def _llm_type(self) -> str:
        return "mpool"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model": requests.name_of(self.model), **self._own_options()}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        params = super()._get_ls_params(stop=stop, **kwargs)
        name = requests.name_of(kwargs.get("model", self.model))
        params["ls_model_name"] = name or pool_of(None).get(None, "text_to_text").key  # type: ignore[arg-type]
        return params

    def _own_options(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in _OPTIONS}
        return {**self.options, **{name: value for name, value in given.items() if value is not None}}

    def _arguments(self, messages: list[BaseMessage], stop: list[str] | None,
                   given: dict[str, Any]) -> tuple[list[Any], Any, dict[str, Any]]:
        """Return the messages, the model and the options for :func:`mpool.chat`."""
        options = {**self._own_options(), **given}
        model = options.pop("model", self.model)
        stop_strings = self.stop if stop is None else stop
        if stop_strings:
            options["stop"] = stop_strings
        return [plain for message in messages for plain in _plain_messages(message)], model, options

    def _generate(self, messages: list[BaseMessage], stop: list[str] | None = None,
                  run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any) -> ChatResult:
        converted, model, options = self._arguments(messages, stop, kwargs)
        return _chat_result(pool_of(model).chat(converted, model, **options))

    async def _agenerate(self, messages: list[BaseMessage], stop: list[str] | None = None,
                         run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Any) -> ChatResult:
        converted, model, options = self._arguments(messages, stop, kwargs)
        return _chat_result(await aio.chat(converted, model, pool=pool_of(model), **options))

    def _stream(self, messages: list[BaseMessage], stop: list[str] | None = None,
                run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        converted, model, options = self._arguments(messages, stop, kwargs)
        with pool_of(model).chat(converted, model, stream=True, **_check_single(options)) as stream:
            chunks = _Chunks(self.output_version)
            for chunk in stream:
                generated = chunks.make(chunk)
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=generated)
                yield generated
            yield chunks.last(stream.result())

    async def _astream(self, messages: list[BaseMessage], stop: list[str] | None = None,
                       run_manager: AsyncCallbackManagerForLLMRun | None = None,
                       **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        converted, model, options = self._arguments(messages, stop, kwargs)
        async with aio.chat(converted, model, stream=True, pool=pool_of(model), **_check_single(options)) as stream:
            chunks = _Chunks(self.output_version)
            async for chunk in stream:
                generated = chunks.make(chunk)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=generated)
                yield generated
            yield chunks.last(await stream.result())

    def bind_tools(self, tools: Sequence[Any], *, tool_choice: str | dict[str, Any] | bool | None = None,
                   **kwargs: Any) -> Runnable[Any, AIMessage]:
        """Returns a chat model that can call tools. The messages have the calls in ``tool_calls``; a grammar ensures
        that they are valid (see ``tools`` of :func:`mpool.chat`). The model's chat template must support tools.

        Args:
            tools: LangChain tools, functions, pydantic classes, or dicts in OpenAI's format.
            tool_choice: None or ``"auto"``: the model decides; ``"any"``, ``"required"`` or True: it must call a tool;
                the name of a tool, or OpenAI's dict with the name: it must call this tool; ``"none"``: it must not call
                a tool.
            **kwargs: further options of every request.
        """
        names = {True: "required", "any": "required"}
        choice = names.get(tool_choice, tool_choice) if isinstance(tool_choice, (str, bool)) else tool_choice
        if isinstance(choice, str) and choice not in ("auto", "required", "none"):
            choice = {"type": "function", "function": {"name": choice}}
        if choice:
            kwargs["tool_choice"] = choice
        return self.bind(tools=[_tool(tool) for tool in tools], **kwargs)

    def get_token_ids(self, text: str) -> list[int]:
        """Returns the token ids of a text, from the model's own tokenizer."""
        if not isinstance(text, str):
            refuse("text", text, "a str")
        pool = pool_of(self.model)
        return pool.tokenize(text, pool.get(self.model, "text_to_text"), add_special=False)

    def with_structured_output(self, schema: Any = None, *, method: str = "json_schema", include_raw: bool = False,
                               strict: bool | None = None, **kwargs: Any) -> Runnable[Any, Any]:
        """Returns a chat model whose completions match a schema: a grammar allows no other tokens. Needs the extra
        ``grammar``.

        Args:
            schema: a pydantic class, the results are instances of it; or a ``TypedDict`` or JSON schema, the results
                are dicts. None: any JSON object, only with ``method="json_mode"``.
            method: ``"json_schema"``, ``"function_calling"`` or ``"json_mode"``; with a schema, all three do the same.
            include_raw: True: the results are dicts with the message (``raw``), the value (``parsed``) and the parsing
                error (``parsing_error``), for example of a completion truncated by ``max_tokens``.
            strict: False: objects may have properties that the schema does not list, unless the schema forbids it;
                otherwise they may not. True: keywords that a grammar cannot enforce are errors; otherwise they are
                left out, with a warning in the log.

        Raises:
            InvalidArgument: an argument or the method is unknown, or the method needs a schema.
        """
        if kwargs:
            raise unknown_option(next(iter(kwargs)), ("schema", "method", "include_raw", "strict"),
                                 of="with_structured_output")
        if method not in _METHODS:
            refuse("method", method, "one of " + ", ".join(_METHODS))
        if schema is None and method != "json_mode":
            refuse("schema", None, f"a schema with the method {method}")
        plain = None if schema is None else convert_to_json_schema(schema)
        response_format = {"type": "json_object"} if plain is None else \
            {"type": "json_schema", "json_schema": {
                "name": "answer", "schema": convert_to_json_schema(schema, strict=strict is not False or None),
                "strict": strict is True}}
        model = self.bind(response_format=response_format, ls_structured_output_format={"kwargs": {"method": method},
                                                                             "schema": plain or {}})
        is_pydantic = isinstance(schema, type) and is_basemodel_subclass(schema)
        parser: Runnable[Any, Any] = PydanticOutputParser(pydantic_object=schema) if is_pydantic else JsonOutputParser()
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


# ---- messages to mpool.chat ------------------------------------------------------------------------------------------

def _plain_messages(message: BaseMessage) -> list[dict[str, Any]]:
    """Return a message in the shape of :func:`mpool.chat`, after the results of tools that its content has.

    ``content_blocks`` has LangChain's standard blocks for the content of any provider's message. Blocks that it does
    not know are ``non_standard``, with the provider's own as their value.
    """
    (plain,) = convert_to_openai_messages([message.model_copy(update={"content": ""})])
    if isinstance(message, AIMessage):
        return [{**plain, **_answer(message)}]
    blocks = _blocks(message)
    results = [plain for block in blocks if block.get("type") == "tool_result"
               for plain in _plain_messages(ToolMessage(block["content"], tool_call_id=block["tool_use_id"]))]
    parts = [_part(block) for block in blocks if block.get("type") != "tool_result"]
    if results and not parts:
        return results
    plain["content"] = "\n".join(part["text"] for part in parts) if all(part.get("type") == "text" for part in parts) \
        else parts
    return [*results, plain]


def _blocks(message: BaseMessage) -> list[dict[str, Any]]:
    blocks = cast("list[dict[str, Any]]", message.content_blocks)
    return [block["value"] if block.get("type") == "non_standard" else block for block in blocks]


def _answer(message: AIMessage) -> dict[str, Any]:
    """Return the content, reasoning and tool calls of an answer of any model. Only that model's service can read the
    other blocks, such as calls of its own tools; images are no part of an answer in OpenAI's format."""
    content = [message.content] if isinstance(message.content, str) else message.content
    given = [{"type": "text", "text": one} if isinstance(one, str) else one for one in content]
    texts: dict[str, str] = collections.defaultdict(str)
    for block in _blocks(message.model_copy(update={"content": given})):
        kind = block.get("type", "")
        if kind in ("text", "refusal", "reasoning", "thinking"):
            texts[kind] += block.get(kind) or ""
    extra = message.additional_kwargs
    found: dict[str, Any] = {"content": texts["text"] or texts["refusal"] or extra.get("refusal") or ""}
    reasoning = extra.get("reasoning_content") or texts["reasoning"] or texts["thinking"]
    if reasoning:
        found["reasoning"] = reasoning
    calls = [_call(one) for one in given if one.get("type") in ("tool_call", "tool_use", "function_call")]
    return {**found, "tool_calls": calls} if calls and not message.tool_calls else found


def _call(block: dict[str, Any]) -> dict[str, Any]:
    """Return the call of a block: LangChain's, Anthropic's, or that of OpenAI's Responses."""
    arguments: Any = next((block[name] for name in ("args", "input", "arguments") if name in block), {})
    return {"type": "function", "id": block.get("call_id", block.get("id")),
            "function": {"name": block.get("name"), "arguments": arguments}}


def _part(block: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a message that a user, a system or a tool wrote. :func:`mpool.chat` refuses what it does not
    know: nothing of these messages may be left out."""
    kind = block.get("type")
    if kind in ("text", "text-plain") and isinstance(block.get("text"), str):
        return {"type": "text", "text": block["text"]}
    if "json" in block:
        return {"type": "text", "text": json.dumps(block["json"])}
    if "guard_content" in block:  # Amazon Bedrock
        text = block["guard_content"]["text"]
        return {"type": "text", "text": text["text"] if isinstance(text, dict) else text}
    if kind == "media" and str(block.get("mime_type")).startswith("image/"):  # Google's Vertex AI
        return {"type": "image", "data": block["data"]}
    return block


# ---- completions to messages -----------------------------------------------------------------------------------------

def _tool(tool: Any) -> dict[str, Any]:
    """Return a tool in OpenAI's format. LangChain gives tools without a description an empty one, which costs tokens in
    the chat template."""
    found: dict[str, Any] = convert_to_openai_tool(tool)
    function = found.get("function")
    if isinstance(function, dict) and function.get("description") == "":
        found = {**found, "function": {name: value for name, value in function.items() if name != "description"}}
    return found


def _check_single(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a stream unchanged. LangChain's stream chunks have no index, so ``n`` must be 1."""
    if options.get("n", 1) != 1:
        refuse("n", options["n"], "1 in a stream")
    return options


def _chat_result(completion: Completion) -> ChatResult:
    generations = []
    for choice in completion.choices:
        message = _message(completion, choice)
        message.response_metadata.update(_logprobs(choice.logprobs))
        generations.append(ChatGeneration(message=message, generation_info={"finish_reason": choice.finish_reason}))
    return ChatResult(generations=generations, llm_output={"model_name": completion.model, "seed": completion.seed})


def _message(completion: Completion, choice: Choice) -> AIMessage:
    calls = [ToolCall(name=call.name, args=call.arguments, id=call.id) for call in choice.tool_calls
             if call.arguments is not None]
    truncated = [InvalidToolCall(type="invalid_tool_call", name=call.name, args=call.raw, id=call.id,
                                 error="the completion was truncated before the arguments were complete")
                 for call in choice.tool_calls if call.arguments is None]
    return AIMessage(
        content=choice.text, additional_kwargs=_reasoning(choice.reasoning), tool_calls=calls,
        invalid_tool_calls=truncated,
        response_metadata={"finish_reason": choice.finish_reason, "model_name": completion.model,
                           "model_provider": "mpool", "seed": completion.seed, **call_limit(choice)},
        # the usage covers all choices: only the first one reports it
        usage_metadata=_usage(completion.usage) if choice.index == 0 else None)


def _logprobs(tokens: tuple[TokenLogprob, ...] | None) -> dict[str, Any]:
    return {} if tokens is None else {"logprobs": logprobs_of(tokens)}


def _usage(usage: Usage) -> UsageMetadata:
    return UsageMetadata(input_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens,
                         total_tokens=usage.total_tokens,
                         input_token_details=InputTokenDetails(cache_read=usage.cached_tokens))


def _reasoning(text: str | None) -> dict[str, Any]:
    return {"reasoning_content": text} if text else {}


class _Chunks:
    """Make the chunks of one streamed message.

    LangChain merges the blocks of a message by their index. It numbers blocks of text and reasoning itself, from 0 as
    the tool calls, and would merge a call with them. With ``output_version="v1"``, each chunk therefore has its blocks,
    with the numbers that they have in the whole message.
    """

    def __init__(self, output_version: str | None) -> None:
        self._has_blocks = output_version == "v1"
        self._last: object = None
        self._numbers: dict[object, int] = {}
        self._count = 0

    def make(self, chunk: Chunk) -> ChatGenerationChunk:
        """Return the chunk of LangChain for a chunk of :func:`mpool.chat`."""
        blocks: list[dict[str, Any]] = []
        for kind, text in (("reasoning", chunk.reasoning), ("text", chunk.text)):
            if text:
                blocks.append({"type": kind, kind: text, "index": self._number(kind)})
        calls: dict[int, ToolCallChunk] = {}
        for delta in chunk.tool_calls:  # LangChain merges the parts of a tool call across chunks, not within a chunk
            number = self._number(delta.index) if self._has_blocks else delta.index
            call = calls.setdefault(number, ToolCallChunk(name=None, args="", id=None, index=number,
                                                          type="tool_call_chunk"))
            call["name"], call["id"] = call["name"] or delta.name, call["id"] or delta.id
            call["args"] = (call["args"] or "") + delta.arguments
        metadata = _logprobs(chunk.logprobs)
        content: Any = chunk.text
        if self._has_blocks:
            content = [*blocks, *(dict(call) for call in calls.values())]
            metadata["output_version"] = "v1"
        return ChatGenerationChunk(message=AIMessageChunk(
            content=content, additional_kwargs=_reasoning(chunk.reasoning), tool_call_chunks=list(calls.values()),
            response_metadata=metadata))

    def last(self, completion: Completion) -> ChatGenerationChunk:
        """Return the last chunk, with the usage and the metadata of the message."""
        message = _message(completion, completion.choices[0])
        return ChatGenerationChunk(message=AIMessageChunk(
            content=[] if self._has_blocks else "", response_metadata=message.response_metadata,
            usage_metadata=message.usage_metadata,
            chunk_position="last"), generation_info={"finish_reason": completion.finish_reason})

    def _number(self, block: object) -> int:
        """Return the number of a block in the message. ``block``: "text", "reasoning" or the number of a tool call."""
        if block != self._last and (isinstance(block, str) or block not in self._numbers):
            self._numbers[block] = self._count
            self._count += 1
        self._last = block
        return self._numbers[block]


class MpoolEmbeddings(BaseModel, Embeddings):
    """LangChain embeddings that run :func:`mpool.embed`, with the model's prompts for documents and queries.

    Args:
        model: a key, a path, a reference or a :class:`mpool.Model`, as for :func:`mpool.embed`; None:
            all-MiniLM-L6-v2.
        options: further options of :func:`mpool.embed`, such as ``dimensions`` or ``compute``.

    Raises:
        MpoolError: a request fails as in :func:`mpool.embed`; constructing the object reads no files.

    Example:
        >>> from mpool.integrations.langchain import MpoolEmbeddings
        >>> len(MpoolEmbeddings().embed_query("Where is the cat?"))
        384
    """

    model_config = ConfigDict(extra="forbid")

    model: Any = None
    options: dict[str, Any] = Field(default_factory=dict)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Returns the vectors of documents."""
        found: list[list[float]] = requests.embed(self.model, texts, "document", self.options).tolist()
        return found

    def embed_query(self, text: str) -> list[float]:
        """Returns the vector of a query."""
        found: list[list[float]] = requests.embed(self.model, [text], "query", self.options).tolist()
        return found[0]

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """Asynchronous form of :meth:`embed_documents`."""
        found: list[list[float]] = (await requests.aembed(self.model, texts, "document", self.options)).tolist()
        return found

    async def aembed_query(self, text: str) -> list[float]:
        """Asynchronous form of :meth:`embed_query`."""
        found: list[list[float]] = (await requests.aembed(self.model, [text], "query", self.options)).tolist()
        return found[0]


__all__ = ["ChatMpool", "MpoolEmbeddings"]

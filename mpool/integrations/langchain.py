"""A chat model and embeddings for LangChain (extra ``langchain``)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    InvalidToolCall,
    ToolCall,
    ToolCallChunk,
    convert_to_openai_messages,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel, ConfigDict, Field

from .. import aio
from .._functions import default_pool
from ..checks import refuse
from ..errors import InvalidArgument
from ..model import Model

if TYPE_CHECKING:
    from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun

    from ..pool import Pool
    from ..results import Choice, Chunk, Completion, Usage

#: Fields of a chat model that are options of mpool.chat by the same name.
_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "seed", "timeout")
_METHODS = ("json_schema", "function_calling", "json_mode")


def _pool_of(model: Any) -> Pool:
    return model.pool if isinstance(model, Model) else default_pool()


def _name_of(model: Any) -> str | None:
    return model.key if isinstance(model, Model) else None if model is None else str(model)


class ChatMpool(BaseChatModel):
    """A chat model of LangChain that is :func:`mpool.chat`: invoked, streamed, batched, awaited.

    Calls that run beside each other (``batch``, ``abatch``) are computed together. Messages hold images as
    :func:`mpool.chat` takes them, for models that see.

    Args:
        model: what :func:`mpool.chat` takes: a key, a path, a reference or a :class:`mpool.Model`; None:
            SmolLM2-135M-Instruct. A call may name another one (``invoke(..., model=)``).
        temperature, top_k, top_p, min_p, max_tokens, seed, stop, timeout: as of :func:`mpool.chat`; None: as it decides
            without.
        options: further options of :func:`mpool.chat`.
        streaming: ``invoke`` uses the stream, for callbacks that listen to tokens.
        max_retries, api_key: taken because LangChain's chat models have them, and looked at by nobody: a pool tries
            again by itself what is worth it, and has no keys.

    Messages carry ``usage_metadata`` (``cache_read``: tokens of the prompt that did not have to be computed), in
    ``response_metadata`` ``finish_reason``, ``model_name`` and ``seed``, and in ``additional_kwargs`` under
    ``reasoning_content`` what the model thought.

    Raises:
        what :func:`mpool.chat` raises, when it is called.

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
        return {"model": _name_of(self.model), **self._own_options()}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        params = super()._get_ls_params(stop=stop, **kwargs)
        name = _name_of(kwargs.get("model", self.model))
        params["ls_model_name"] = name or _pool_of(None).get(None, "text_to_text").key  # type: ignore[arg-type]
        return params

    def _own_options(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in _OPTIONS}
        return {**self.options, **{name: value for name, value in given.items() if value is not None}}

    def _call(self, messages: list[BaseMessage], stop: list[str] | None,
              given: dict[str, Any]) -> tuple[list[Any], Any, dict[str, Any]]:
        """Messages, model and options of a call."""
        options = {**self._own_options(), **given}
        model = options.pop("model", self.model)
        stops = self.stop if stop is None else stop
        if stops:
            options["stop"] = stops
        found = convert_to_openai_messages(messages)
        for message, plain in zip(messages, found):
            if isinstance(message, AIMessage) and message.additional_kwargs.get("reasoning_content"):
                plain["reasoning"] = message.additional_kwargs["reasoning_content"]
        return found, model, options

    def _generate(self, messages: list[BaseMessage], stop: list[str] | None = None,
                  run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any) -> ChatResult:
        found, model, options = self._call(messages, stop, kwargs)
        return _result(_pool_of(model).chat(found, model, **options))

    async def _agenerate(self, messages: list[BaseMessage], stop: list[str] | None = None,
                         run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Any) -> ChatResult:
        found, model, options = self._call(messages, stop, kwargs)
        return _result(await aio.chat(found, model, pool=_pool_of(model), **options))

    def _stream(self, messages: list[BaseMessage], stop: list[str] | None = None,
                run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        found, model, options = self._call(messages, stop, kwargs)
        with _pool_of(model).chat(found, model, stream=True, **_streamed(options)) as stream:
            for chunk in stream:
                piece = _piece(chunk)
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=piece)
                yield piece
            yield _last(stream.result())

    async def _astream(self, messages: list[BaseMessage], stop: list[str] | None = None,
                       run_manager: AsyncCallbackManagerForLLMRun | None = None,
                       **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        found, model, options = self._call(messages, stop, kwargs)
        async with aio.chat(found, model, stream=True, pool=_pool_of(model), **_streamed(options)) as stream:
            async for chunk in stream:
                piece = _piece(chunk)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=piece)
                yield piece
            yield _last(await stream.result())

    def bind_tools(self, tools: Sequence[Any], *, tool_choice: str | dict[str, Any] | bool | None = None,
                   **kwargs: Any) -> Runnable[Any, AIMessage]:
        """A chat model that may call tools; what it calls is valid by construction (see ``tools`` of
        :func:`mpool.chat`), and in ``tool_calls`` of its answers. The model's template has to know of tools.

        Args:
            tools: LangChain's tools, functions, pydantic classes, or dicts as OpenAI has them.
            tool_choice: None or ``"auto"``: it may answer instead; ``"any"``, ``"required"`` or True: it has to call
                one; a name, or OpenAI's dict of one: it has to call this one; ``"none"``: it may call none.
            **kwargs: further options of its calls.
        """
        names = {True: "required", "any": "required"}
        choice = names.get(tool_choice, tool_choice) if isinstance(tool_choice, (str, bool)) else tool_choice
        if isinstance(choice, str) and choice not in ("auto", "required", "none"):
            choice = {"type": "function", "function": {"name": choice}}
        if choice:
            kwargs["tool_choice"] = choice
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **kwargs)

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of a text's tokens, of the model's own tokenizer."""
        pool = _pool_of(self.model)
        return pool.tokenize(text, pool.get(self.model, "text_to_text"), add_special=False)

    def with_structured_output(self, schema: Any = None, *, method: str = "json_schema", include_raw: bool = False,
                               strict: bool | None = None, **kwargs: Any) -> Runnable[Any, Any]:
        """A chat model whose answers fit a schema by construction: no other tokens are drawn. Needs the extra
        ``grammar``.

        Args:
            schema: a pydantic class, of which answers are instances; a ``TypedDict`` or JSON schema, of which they are
                dicts. None: any JSON object, with ``method="json_mode"``.
            method: ``"json_schema"``, ``"function_calling"`` or ``"json_mode"``: with a schema they are the same here.
            include_raw: answers are dicts with the message (``raw``), the value (``parsed``) and what was wrong with
                it (``parsing_error``), as where ``max_tokens`` cut it.
            strict: objects have no properties but those of the schema; False: they may, unless it says otherwise.

        Raises:
            InvalidArgument: there is no such method, or no schema for it.
        """
        if kwargs:
            raise InvalidArgument(f"with_structured_output got {', '.join(kwargs)}, allowed: schema, method, "
                                  "include_raw, strict")
        if method not in _METHODS:
            refuse("method", method, "one of " + ", ".join(_METHODS))
        if schema is None and method != "json_mode":
            refuse("schema", None, f"a schema for the method {method}")
        plain = None if schema is None else convert_to_json_schema(schema)
        form = {"type": "json_object"} if plain is None else \
            {"type": "json_schema", "json_schema": {
                "name": "answer", "schema": convert_to_json_schema(schema, strict=strict is not False or None)}}
        model = self.bind(response_format=form, ls_structured_output_format={"kwargs": {"method": method},
                                                                             "schema": plain or {}})
        of_class = isinstance(schema, type) and is_basemodel_subclass(schema)
        parser: Runnable[Any, Any] = PydanticOutputParser(pydantic_object=schema) if of_class else JsonOutputParser()
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _streamed(options: dict[str, Any]) -> dict[str, Any]:
    if options.get("n", 1) != 1:
        refuse("n", options["n"], "1 in a stream")
    return options


def _result(done: Completion) -> ChatResult:
    generations = [ChatGeneration(message=_message(done, choice, at == 0), generation_info={
        "finish_reason": choice.finish_reason}) for at, choice in enumerate(done.choices)]
    return ChatResult(generations=generations, llm_output={"model_name": done.model, "seed": done.seed})


def _message(done: Completion, choice: Choice, first: bool) -> AIMessage:
    calls = [ToolCall(name=call.name, args=call.arguments, id=call.id) for call in choice.tool_calls
             if call.arguments is not None]
    cut = [InvalidToolCall(type="invalid_tool_call", name=call.name, args=call.raw, id=call.id,
                           error="the answer was cut before the arguments were complete")
           for call in choice.tool_calls if call.arguments is None]
    return AIMessage(
        content=choice.text, additional_kwargs=_thoughts(choice.reasoning), tool_calls=calls, invalid_tool_calls=cut,
        response_metadata={"finish_reason": choice.finish_reason, "model_name": done.model, "model_provider": "mpool",
                           "seed": done.seed},
        usage_metadata=_usage(done.usage) if first else None)  # of all answers together


def _usage(usage: Usage) -> UsageMetadata:
    return UsageMetadata(input_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens,
                         total_tokens=usage.total_tokens,
                         input_token_details=InputTokenDetails(cache_read=usage.cached_tokens))


def _thoughts(text: str | None) -> dict[str, Any]:
    return {"reasoning_content": text} if text else {}


def _piece(chunk: Chunk) -> ChatGenerationChunk:
    calls: dict[int, ToolCallChunk] = {}
    for call in chunk.tool_calls:  # one a call: LangChain joins those of several pieces only
        found = calls.setdefault(call.index, ToolCallChunk(name=None, args="", id=None, index=call.index))
        found["name"], found["id"] = found["name"] or call.name, found["id"] or call.id
        found["args"] = (found["args"] or "") + call.arguments
    return ChatGenerationChunk(message=AIMessageChunk(
        content=chunk.text, additional_kwargs=_thoughts(chunk.reasoning), tool_call_chunks=list(calls.values())))


def _last(done: Completion) -> ChatGenerationChunk:
    message = _message(done, done.choices[0], True)
    return ChatGenerationChunk(message=AIMessageChunk(
        content="", response_metadata=message.response_metadata, usage_metadata=message.usage_metadata,
        chunk_position="last"), generation_info={"finish_reason": done.finish_reason})


class MpoolEmbeddings(BaseModel, Embeddings):
    """Embeddings of LangChain that are :func:`mpool.embed`: documents and queries with the prompts that the model has
    for them.

    Args:
        model: what :func:`mpool.embed` takes; None: all-MiniLM-L6-v2.
        options: further options of :func:`mpool.embed`, such as ``dimensions`` or ``compute``.

    Raises:
        what :func:`mpool.embed` raises, when it is called.

    Example:
        >>> from mpool.integrations.langchain import MpoolEmbeddings
        >>> len(MpoolEmbeddings().embed_query("Where is the cat?"))
        384
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    model: Any = None
    options: dict[str, Any] = Field(default_factory=dict)

    def _call(self, texts: Sequence[str], task: str) -> dict[str, Any]:
        return {"inputs": texts, "model": self.model, "task": task, "max_inputs": max(len(texts), 1), **self.options}

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Vectors of texts that are searched."""
        found: list[list[float]] = _pool_of(self.model).embed(**self._call(texts, "document")).tolist()
        return found

    def embed_query(self, text: str) -> list[float]:
        """The vector of a question."""
        found: list[list[float]] = _pool_of(self.model).embed(**self._call([text], "query")).tolist()
        return found[0]

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """As :meth:`embed_documents`, for asyncio."""
        call = self._call(texts, "document")
        found: list[list[float]] = (await aio.embed(pool=_pool_of(self.model), **call)).tolist()
        return found

    async def aembed_query(self, text: str) -> list[float]:
        """As :meth:`embed_query`, for asyncio."""
        call = self._call([text], "query")
        found: list[list[float]] = (await aio.embed(pool=_pool_of(self.model), **call)).tolist()
        return found[0]


__all__ = ["ChatMpool", "MpoolEmbeddings"]

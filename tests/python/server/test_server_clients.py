"""Clients of other libraries: LiteLLM, instructor, LangChain's ChatOpenAI, and LlamaIndex's OpenAILike.

Each test compares texts and token counts with the library, streams with whole responses, and errors with the client's
exceptions. These packages require an older version of OpenAI's client than the other tests use, and many further
packages: the nightly run has them (extra ``clients``).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chainmodels
import pytest
import toolmodels as tm

from clientpackages import package
from servers import serving
from tooldata import WORDS, WRITES

pytest.importorskip("llguidance")

CHAT: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, wörld! 😀"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def server(llama: Path, bert: Path, ranker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    writes = chainmodels.save(tmp_path_factory.mktemp("writes"), tm.HERMES, WRITES, WORDS)
    with serving([f"llama={llama}", f"bert={bert}", f"writes={writes}", f"ranker={ranker}"]) as made:
        yield made


# ---- instructor ------------------------------------------------------------------------------------------------------

def test_instructor(server: Any) -> None:
    """Structured output in its JSON schema mode and its tools mode; a client adds fields of its own."""
    instructor, openai, pydantic = package("instructor"), package("openai"), package("pydantic")

    class Found(pydantic.BaseModel):  # type: ignore[name-defined,misc]
        kind: str = pydantic.Field(max_length=8)
        age: int = pydantic.Field(ge=0, le=99)

    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as plain:
        for mode, model in ((instructor.Mode.JSON_SCHEMA, "llama"), (instructor.Mode.TOOLS, "writes")):
            client = instructor.from_openai(plain, mode=mode)
            found, raw = client.chat.completions.create_with_completion(
                model=model, messages=[{"role": "user", "content": "A book"}], response_model=Found, max_retries=1,
                temperature=0, max_tokens=400, frequency_penalty=2, presence_penalty=2, user="me",
                metadata={"a": "b"})
            assert isinstance(found, Found) and 0 <= found.age <= 99 and len(found.kind) <= 8
            assert raw.usage.total_tokens == raw.usage.prompt_tokens + raw.usage.completion_tokens
            message = raw.choices[0].message
            text = message.content if mode == instructor.Mode.JSON_SCHEMA else message.tool_calls[0].function.arguments
            assert json.loads(text) == found.model_dump()


def test_instructor_streams_partial_objects(server: Any) -> None:
    """Each partial object extends the one before; the last one is the whole response, in both modes."""
    instructor, openai, pydantic = package("instructor"), package("openai"), package("pydantic")

    class Found(pydantic.BaseModel):  # type: ignore[name-defined,misc]
        kind: str = pydantic.Field(max_length=8)
        age: int = pydantic.Field(ge=0, le=99)

    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as plain:
        for mode, model in ((instructor.Mode.JSON_SCHEMA, "llama"), (instructor.Mode.TOOLS, "writes")):
            client = instructor.from_openai(plain, mode=mode)
            options: dict[str, Any] = dict(
                model=model, messages=[{"role": "user", "content": "A book"}], response_model=Found, max_retries=1,
                temperature=0, max_tokens=400, frequency_penalty=2, presence_penalty=2)
            whole = client.chat.completions.create(**options)
            partials = list(client.chat.completions.create_partial(**options))
            assert all(isinstance(one, pydantic.BaseModel) for one in partials), partials
            assert partials[-1].model_dump() == whole.model_dump()
            kinds = [one.kind or "" for one in partials]
            assert all(later.startswith(earlier) for earlier, later in zip(kinds, kinds[1:])), kinds


# ---- LangChain -------------------------------------------------------------------------------------------------------

def test_langchain(server: Any) -> None:
    chat, messages = package("langchain_openai"), package("langchain_core.messages")
    openai = package("openai")
    model = chat.ChatOpenAI(model="llama", base_url=server.url + "/v1", api_key="none", max_retries=0, temperature=0,
                            max_tokens=24, stream_usage=True)
    wanted = server.state.pool.chat(CHAT, "llama", **GREEDY)
    given = [messages.SystemMessage(CHAT[0]["content"]), messages.HumanMessage(CHAT[1]["content"])]
    found = model.invoke(given)
    assert found.content == wanted.text
    assert (found.usage_metadata["input_tokens"], found.usage_metadata["output_tokens"]) == (
        wanted.usage.prompt_tokens, wanted.usage.completion_tokens)
    chunks = list(model.stream(given))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert len(chunks) > 2 and whole.content == wanted.text
    assert whole.usage_metadata["output_tokens"] == wanted.usage.completion_tokens
    bound = chat.ChatOpenAI(model="writes", base_url=server.url + "/v1", api_key="none", max_retries=0, temperature=0,
                            max_tokens=200).bind_tools([tm.CLOCK], tool_choice="any")
    calls = bound.invoke("What time is it?").tool_calls
    assert calls and {call["name"] for call in calls} == {tm.CLOCK["function"]["name"]}
    streamed = [*bound.stream("What time is it?")]
    assert [call["name"] for chunk in streamed for call in chunk.tool_calls if call["name"]] == [calls[0]["name"]]
    with pytest.raises(openai.NotFoundError):
        chat.ChatOpenAI(model="nothing", base_url=server.url + "/v1", api_key="none", max_retries=0).invoke("x")
    vectors = chat.OpenAIEmbeddings(model="bert", base_url=server.url + "/v1", api_key="none",
                                    check_embedding_ctx_length=False).embed_documents(["one", "two"])
    assert vectors == server.state.pool.embed(["one", "two"], "bert").astype("f4").tolist()


def test_langchain_with_responses(server: Any) -> None:
    """ChatOpenAI's protocol of ``/v1/responses``: whole, streamed, asynchronous, and with the previous response."""
    chat, messages = package("langchain_openai"), package("langchain_core.messages")
    options: dict[str, Any] = {"base_url": server.url + "/v1", "api_key": "none", "max_retries": 0, "temperature": 0,
                               "max_tokens": 24, "use_responses_api": True}
    wanted = server.state.pool.chat(CHAT, "llama", **GREEDY)
    given = [messages.SystemMessage(CHAT[0]["content"]), messages.HumanMessage(CHAT[1]["content"])]
    model = chat.ChatOpenAI(model="llama", **options)
    found = model.invoke(given)
    assert found.text == wanted.text and found.usage_metadata["output_tokens"] == wanted.usage.completion_tokens
    assert "".join(chunk.text for chunk in model.stream(given)) == wanted.text
    assert asyncio.run(model.ainvoke(given)).text == wanted.text
    later = chat.ChatOpenAI(model="llama", **options, use_previous_response_id=True)
    first = later.invoke(given)
    again = later.invoke([*given, first, messages.HumanMessage("More.")])
    history = [*CHAT, {"role": "assistant", "content": wanted.text}, {"role": "user", "content": "More."}]
    assert again.text == server.state.pool.chat(history, "llama", **GREEDY).text


# ---- LlamaIndex ------------------------------------------------------------------------------------------------------

def test_llama_index(server: Any) -> None:
    like, core = package("llama_index.llms.openai_like"), package("llama_index.core.llms")
    openai = package("openai")
    options: dict[str, Any] = {"api_base": server.url + "/v1", "api_key": "none", "is_chat_model": True,
                               "max_retries": 0, "temperature": 0.0, "max_tokens": 24, "context_window": 1024}
    model = like.OpenAILike(model="llama", **options)
    wanted = server.state.pool.chat(CHAT, "llama", **GREEDY)
    given = [core.ChatMessage(role=message["role"], content=message["content"]) for message in CHAT]
    found = model.chat(given)
    assert found.message.content == wanted.text and found.raw.usage.prompt_tokens == wanted.usage.prompt_tokens
    chunks = list(model.stream_chat(given))
    assert "".join(chunk.delta or "" for chunk in chunks) == wanted.text and chunks[-1].message.content == wanted.text
    counted = like.OpenAILike(model="llama", **options, additional_kwargs={"stream_options": {"include_usage": True}})
    assert list(counted.stream_chat(given))[-1].raw.usage.completion_tokens == wanted.usage.completion_tokens
    assert asyncio.run(model.achat(given)).message.content == wanted.text
    raw = like.OpenAILike(model="llama", **{**options, "is_chat_model": False})
    assert raw.complete("The cat").text == server.state.pool.generate("The cat", "llama", **GREEDY).text
    with pytest.raises(openai.NotFoundError):
        like.OpenAILike(model="nothing", **options).chat(given)


def test_tools_of_llama_index(server: Any) -> None:
    """A function call arrives whole and in a stream; ``as_structured_llm`` fills a class in both ways that it has."""
    like, tools = package("llama_index.llms.openai_like"), package("llama_index.core.tools")
    pydantic = package("pydantic")

    class Found(pydantic.BaseModel):  # type: ignore[name-defined,misc]
        kind: str = pydantic.Field(max_length=8)
        age: int = pydantic.Field(ge=0, le=99)

    options: dict[str, Any] = {"api_base": server.url + "/v1", "api_key": "none", "is_chat_model": True,
                               "max_retries": 0, "temperature": 0.0, "max_tokens": 400, "context_window": 1024}
    model = like.OpenAILike(model="writes", **options, is_function_calling_model=True)
    clock = tools.FunctionTool.from_defaults(lambda: "noon", name=tm.CLOCK["function"]["name"], description="The time.")
    whole = model.chat_with_tools([clock], user_msg="What time is it?", tool_required=True)
    *_, last = model.stream_chat_with_tools([clock], user_msg="What time is it?", tool_required=True)
    for found in (whole, last):
        (call,) = model.get_tool_calls_from_response(found)
        assert (call.tool_name, call.tool_kwargs) == (tm.CLOCK["function"]["name"], {})
    schema = like.OpenAILike(model="llama", **options, should_use_structured_outputs=True)
    for one in (model, schema):
        filled = one.as_structured_llm(Found).complete("A book").raw
        assert isinstance(filled, Found) and 0 <= filled.age <= 99 and len(filled.kind) <= 8


# ---- LiteLLM ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("route", ["openai", "ollama_chat", "anthropic"])
def test_litellm(server: Any, route: str) -> None:
    """One client for three protocols of the server."""
    litellm = package("litellm")
    base = server.url + ("/v1" if route == "openai" else "")
    options: dict[str, Any] = {"model": f"{route}/llama", "api_base": base, "api_key": "none", "messages": CHAT,
                               "temperature": 0, "max_tokens": 24, "num_retries": 0}
    wanted = server.state.pool.chat(CHAT, "llama", **GREEDY)
    found = litellm.completion(**options)
    assert found.choices[0].message.content == wanted.text
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (wanted.usage.prompt_tokens,
                                                                         wanted.usage.completion_tokens)
    chunks = list(litellm.completion(**options, stream=True, stream_options={"include_usage": True}))
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(part.delta.content or "" for part in parts) == wanted.text
    ends = [part.finish_reason for part in parts if part.finish_reason]
    assert ends == [wanted.finish_reason] and chunks[-1].usage.completion_tokens == wanted.usage.completion_tokens

    async def answers() -> tuple[str, str]:
        """Return the texts of both asynchronous forms, which use another HTTP library."""
        whole = await litellm.acompletion(**options)
        stream = await litellm.acompletion(**options, stream=True)
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        return whole.choices[0].message.content, "".join(texts)

    assert asyncio.run(answers()) == (wanted.text, wanted.text)
    with pytest.raises(litellm.exceptions.NotFoundError if route != "ollama_chat" else Exception):
        litellm.completion(**{**options, "model": f"{route}/nothing"})


@pytest.mark.parametrize("route", ["openai", "ollama_chat", "anthropic"])
def test_tools_of_litellm(server: Any, route: str) -> None:
    """A function call arrives whole and in a stream."""
    litellm = package("litellm")
    base = server.url + ("/v1" if route == "openai" else "")
    options: dict[str, Any] = {"model": f"{route}/writes", "api_base": base, "api_key": "none", "temperature": 0,
                               "messages": [{"role": "user", "content": "What time is it?"}], "max_tokens": 200,
                               "tools": [tm.CLOCK], "tool_choice": "required", "num_retries": 0}
    whole = litellm.completion(**options)
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**options, stream=True)))
    for found in (whole, streamed):
        (call,) = found.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == (tm.CLOCK["function"]["name"], {})
        assert found.choices[0].finish_reason == "tool_calls"


def test_rankings_of_litellm(server: Any) -> None:
    """LiteLLM's forms of vLLM's, Jina's and Cohere's rerankers."""
    litellm = package("litellm")
    documents = ["a cat", "a dog", "the tax"]
    wanted = server.state.pool.rerank("the cat", documents, "ranker", top_k=2)
    for route, path in (("hosted_vllm", "/v1"), ("jina_ai", "/v1/rerank"), ("cohere", "/v1/rerank")):
        found = litellm.rerank(model=f"{route}/ranker", query="the cat", documents=documents, top_n=2, api_key="none",
                               api_base=server.url + path)
        assert [row["index"] for row in found.results] == [row.index for row in wanted], route
        assert [row["relevance_score"] for row in found.results] == pytest.approx([row.score for row in wanted]), route

"""The chat model and embeddings for LangChain: LangChain's standard tests, and tests of what these do not cover."""

import asyncio
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import mpool
import integrationexamples
from clientpackages import package

package("langchain_tests", "langchain-tests")

from langchain_core.exceptions import OutputParserException  # noqa: E402
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage  # noqa: E402
from langchain_core.prompts import ChatPromptTemplate  # noqa: E402
from langchain_core.vectorstores import InMemoryVectorStore  # noqa: E402
from langchain_tests.integration_tests import (  # noqa: E402
    ChatModelIntegrationTests,
    EmbeddingsIntegrationTests,
)
from langchain_tests.unit_tests import ChatModelUnitTests, EmbeddingsUnitTests  # noqa: E402
from pydantic import BaseModel  # noqa: E402

from mpool.integrations.langchain import ChatMpool, MpoolEmbeddings  # noqa: E402
from realmodels import real_path  # noqa: E402


#: Marks for LangChain's standard tests: some are asynchronous, and they assume another mode of pytest-asyncio.
ASYNC_MARKS = [pytest.mark.asyncio, pytest.mark.filterwarnings("ignore:.*is marked with.*asyncio")]


class TestChatUnit(ChatModelUnitTests):
    """Standard tests without a model."""

    @property
    def chat_model_class(self) -> type[ChatMpool]:
        return ChatMpool

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "SmolLM2-135M-Instruct", "seed": 1}


def calling_model() -> str:
    """SmolLM2 with a chat template that has tools."""
    import toolmodels

    return mpool.register("smollm2-with-tools", str(real_path("smollm2")), chat_template=toolmodels.HERMES).key


@pytest.mark.builds
class TestChat(ChatModelIntegrationTests):
    """Standard tests with a model, except those for images, documents and audio, which this model does not support.
    A grammar makes its tool calls valid; the penalty keeps its texts in JSON from repeating a word without end."""

    pytestmark = ASYNC_MARKS

    @property
    def chat_model_class(self) -> type[ChatMpool]:
        return ChatMpool

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": calling_model(), "seed": 1, "temperature": 0.0, "max_tokens": 200,
                "options": {"parallel_tool_calls": False, "frequency_penalty": 0.3}}

    @property
    def model_override_value(self) -> str:
        return calling_model()

    @pytest.mark.xfail(reason="135 million parameters are too few to call a tool unless they must")
    def test_agent_loop(self, model: Any) -> None:
        super().test_agent_loop(model)

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatMpool(model=str(real_path("smollm2")), max_tokens=4)
        text = "The quick brown fox jumps over the lazy dog. " * 30
        for _ in range(2):
            found = merged(model.stream(text)) if stream else model.invoke(text)
        assert found.usage_metadata["input_token_details"]["cache_read"] >= 64
        return found


def test_every_field_of_a_chat_model_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"temperature": 0.3, "top_k": 7, "top_p": 0.4, "min_p": 0.1, "max_tokens": 9, "seed": 11, "timeout": 60.0}
    model = ChatMpool(model="x", **fields, stop=["a"], options={"repetition_penalty": 1.5})
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(mpool.Pool, "chat", lambda *_, **options: asked.append(options) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.invoke("Hello")
    assert asked == [{**fields, "stop": ["a"], "repetition_penalty": 1.5}]


def merged(chunks: Any) -> Any:
    """Merge the chunks of a stream to one message."""
    found = None
    for chunk in chunks:
        found = chunk if found is None else found + chunk
    return found


class TestEmbeddingsUnit(EmbeddingsUnitTests):
    """Standard tests without a model."""

    @property
    def embeddings_class(self) -> type[MpoolEmbeddings]:
        return MpoolEmbeddings


class TestEmbeddings(EmbeddingsIntegrationTests):
    """Standard tests with a model."""

    pytestmark = ASYNC_MARKS

    @property
    def embeddings_class(self) -> type[MpoolEmbeddings]:
        return MpoolEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": str(real_path("minilm"))}


def test_completions_equal_those_of_chat(llama: Path) -> None:
    """``invoke``, ``stream``, their asynchronous counterparts and ``generate`` return the text of mpool.chat."""
    expected = mpool.chat([{"role": "system", "content": "Short."}, {"role": "user", "content": "A cat?"},
                           {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "A dog?"}],
                          str(llama), temperature=0.8, seed=5, max_tokens=12, repetition_penalty=1.1)
    model = ChatMpool(model=str(llama), temperature=0.8, seed=7, max_tokens=12, options={"repetition_penalty": 1.1})
    messages = [SystemMessage("Short."), HumanMessage("A cat?"), AIMessage("Yes."), HumanMessage("A dog?")]
    found = model.invoke(messages, seed=5)
    assert found.content == expected.text
    assert found.response_metadata == {"finish_reason": expected.finish_reason, "model_name": str(llama), "seed": 5,
                                       "model_provider": "mpool"}
    assert found.usage_metadata is not None and found.usage_metadata["output_tokens"] == 12
    streamed = merged(model.stream(messages, seed=5))
    assert streamed.content == expected.text and streamed.usage_metadata["output_tokens"] == 12
    assert streamed.response_metadata == found.response_metadata

    async def both() -> tuple[str, str]:
        whole = await model.ainvoke(messages, seed=5)
        return whole.content, "".join([chunk.content async for chunk in model.astream(messages, seed=5)])

    assert asyncio.run(both()) == (expected.text, expected.text)
    several = model.generate([messages], n=3, seed=5).generations[0]
    assert len(several) == 3 and several[0].text == expected.text
    with pytest.raises(mpool.InvalidArgument, match="`n` must be 1 in a stream, got 2"):
        list(model.stream(messages, n=2))


def test_log_probabilities(llama: Path) -> None:
    """They are in the metadata of a message, in OpenAI's format, also in a stream."""
    expected = mpool.chat([{"role": "user", "content": "A cat?"}], str(llama), seed=5, max_tokens=12, logprobs=True,
                          top_logprobs=2).logprobs
    assert expected is not None
    model = ChatMpool(model=str(llama), seed=5, max_tokens=12, options={"logprobs": True, "top_logprobs": 2})
    found = model.invoke("A cat?").response_metadata["logprobs"]
    assert [(row["token"], row["logprob"]) for row in found["content"]] == [
        (one.token, one.logprob) for one in expected]
    assert [[top["token"] for top in row["top_logprobs"]] for row in found["content"]] == [
        [top.token for top in one.top] for one in expected]
    assert merged(model.stream("A cat?")).response_metadata["logprobs"] == found


def test_closing_a_stream_cancels_the_request(llama: Path) -> None:
    with mpool.Pool() as pool:
        model = ChatMpool(model=pool.register("left", llama), max_tokens=8000, options={"ignore_eos": True})
        for _ in model.stream("A cat?"):
            break
        stream = model.stream("A cat?")
        next(stream)
        stream.close()
        done = pool.submit("text_to_text", prompt="x", model="left", max_tokens=1)
        done.result(timeout=30)
        assert not any(row.running or row.queued for row in pool.ps())


def test_structured_output(llama: Path) -> None:
    """Completions match the schema, even with random weights. A truncated completion is a parsing error."""
    pytest.importorskip("llguidance")

    class Answer(BaseModel):
        """An answer."""

        yes: bool
        number: int

    model = ChatMpool(model=str(llama), seed=3, max_tokens=60, temperature=1.0)
    schema = {"title": "Pair", "type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
              "required": ["a", "b"], "additionalProperties": False}
    assert isinstance(model.with_structured_output(Answer).invoke("?"), Answer)
    found = model.with_structured_output(schema, method="function_calling").invoke("?")
    assert found["a"] in ("x", "y") and isinstance(found["b"], bool)
    raw = model.with_structured_output(Answer, include_raw=True).invoke("?")
    assert isinstance(raw["raw"], AIMessage) and isinstance(raw["parsed"], Answer) and raw["parsing_error"] is None
    assert isinstance(model.with_structured_output(method="json_mode").invoke("?"), dict)
    cut = ChatMpool(model=str(llama), max_tokens=2).with_structured_output(Answer, include_raw=True).invoke("?")
    assert cut["parsed"] is None and isinstance(cut["parsing_error"], OutputParserException)
    for wrong in ({"method": "guess"}, {"schema": None}, {"temperature": 3}):
        with pytest.raises(mpool.InvalidArgument):
            model.with_structured_output(**{"schema": Answer, **wrong})


def test_tools(llama: Path) -> None:
    """Tool calls are forced, streamed and answered. A grammar makes them valid, even with random weights."""
    pytest.importorskip("llguidance")
    import toolmodels

    def weather(city: Literal["Rome", "Oslo"], days: int) -> str:
        """The weather of a city."""
        return f"Sun in {city}."

    class Clock(BaseModel):
        """The time."""

        zone: Literal["utc", "cet"]

    with mpool.Pool() as pool:
        model = ChatMpool(model=pool.register("tools", llama, chat_template=toolmodels.HERMES), seed=2, max_tokens=400)
        question = HumanMessage("Weather?")
        for choice, names in (("any", {"weather", "Clock"}), ("Clock", {"Clock"}), ("weather", {"weather"})):
            bound = model.bind_tools([weather, Clock], tool_choice=choice)
            found = bound.invoke([question])
            assert found.tool_calls and {call["name"] for call in found.tool_calls} <= names
            assert found.response_metadata["finish_reason"] == "tool_calls" and not found.invalid_tool_calls
            streamed = merged(bound.stream([question]))
            assert [(call["name"], call["args"]) for call in streamed.tool_calls] == [
                (call["name"], call["args"]) for call in found.tool_calls]
        call = found.tool_calls[0]
        assert call["args"]["city"] in ("Rome", "Oslo") and isinstance(call["args"]["days"], int)
        answer = model.bind_tools([weather], tool_choice="none").invoke(
            [question, found, *(ToolMessage(weather(**each["args"]), tool_call_id=each["id"])
                             for each in found.tool_calls)])
        assert not answer.tool_calls
        cut = model.bind_tools([weather], tool_choice="weather").invoke([question], max_tokens=14)
        assert not cut.tool_calls and len(cut.invalid_tool_calls) <= 1
    with pytest.raises(mpool.Unsupported):
        ChatMpool(model=str(llama)).bind_tools([weather]).invoke("Weather?")


#: Messages of other models and of users, in LangChain's and in their providers' forms, and what mpool.chat receives.
ANSWERS: list[tuple[AIMessage, dict[str, Any]]] = [
    (AIMessage([{"type": "reasoning", "reasoning": "Hm"}, {"type": "reasoning", "id": "rs_1"},
                {"type": "text", "text": "Sun in ", "annotations": [{"type": "citation", "url": "https://x.example"}]},
                {"type": "text", "text": "Rome", "index": 3},
                {"type": "server_tool_call", "name": "web_search", "args": {"q": "Rome"}, "id": "s"},
                {"type": "server_tool_result", "tool_call_id": "s", "status": "success", "output": "Sun"},
                {"type": "non_standard", "value": {"type": "compaction", "id": "c"}},
                {"type": "image", "base64": "aaaa", "mime_type": "image/png"},
                {"type": "invalid_tool_call", "name": "f", "args": "{", "id": "2", "error": "e"}],
               response_metadata={"output_version": "v1"}), {"content": "Sun in Rome", "reasoning": "Hm"}),
    (AIMessage([{"type": "refusal", "refusal": "No."}]), {"content": "No."}),
    (AIMessage("", additional_kwargs={"refusal": "No."}), {"content": "No.", "refusal": "No."}),
    (AIMessage([{"type": "tool_call", "name": "f", "args": {"a": 1}, "id": "7"}]), {"content": "", "tool_calls": "7"}),
    (AIMessage([{"type": "tool_call", "name": "f", "args": {"a": 1}, "id": "7"}],
               tool_calls=[{"name": "f", "args": {"a": 1}, "id": "7"}]), {"content": "", "tool_calls": "7"}),
    (AIMessage(content_blocks=[{"type": "text", "text": "Well"},
                               {"type": "tool_call", "name": "f", "args": {"a": 1}, "id": "7"}]),
     {"content": "Well", "tool_calls": "7"}),
    (AIMessage([{"type": "thinking", "thinking": "Hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Well"}, {"type": "tool_use", "id": "7", "name": "f", "input": {"a": 1}}],
               response_metadata={"model_provider": "anthropic"}),
     {"content": "Well", "reasoning": "Hm", "tool_calls": "7"}),
    (AIMessage([{"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "Hm"}]},
                {"type": "text", "text": "Well", "annotations": [], "id": "msg"},
                {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search"}},
                {"type": "function_call", "call_id": "7", "id": "fc", "name": "f", "arguments": '{"a": 1}'}],
               tool_calls=[{"name": "f", "args": {"a": 1}, "id": "7"}],
               response_metadata={"model_provider": "openai"}),
     {"content": "Well", "reasoning": "Hm", "tool_calls": "7"}),
    (AIMessage([{"type": "reasoning_content", "reasoning_content": {"text": "Hm", "signature": "s"}},
                {"type": "text", "text": "Well"}],
               response_metadata={"model_provider": "bedrock_converse"}), {"content": "Well", "reasoning": "Hm"}),
    (AIMessage(["Plain ", {"type": "text", "text": "text"}], additional_kwargs={"reasoning_content": "Hm"}),
     {"content": "Plain text", "reasoning": "Hm"})]
_IMAGE = "iVBORw0KGgo="
GIVEN: list[tuple[Any, list[dict[str, Any]]]] = [
    (HumanMessage(["a", {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]),
     [{"role": "user", "content": "a\nb"}]),
    (HumanMessage([{"type": "text-plain", "text": "A document.", "mime_type": "text/plain"}]),
     [{"role": "user", "content": "A document."}]),
    (HumanMessage([{"type": "tool_result", "tool_use_id": "7", "content": [{"type": "text", "text": "Sun"}]},
                   {"type": "text", "text": "And?"}]),
     [{"role": "tool", "content": "Sun", "tool_call_id": "7"}, {"role": "user", "content": "And?"}]),
    (ToolMessage([{"type": "text", "text": "Sun"}], tool_call_id="7"),
     [{"role": "tool", "content": "Sun", "tool_call_id": "7"}]),
    (SystemMessage([{"type": "text", "text": "Short."}]), [{"role": "system", "content": "Short."}])]
IMAGES: list[dict[str, Any]] = [
    {"type": "image", "base64": _IMAGE, "mime_type": "image/png"}, {"type": "image", "url": "https://x.example/a.png"},
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_IMAGE}"}},
    {"type": "image_url", "image_url": f"data:image/png;base64,{_IMAGE}"}, {"type": "image", "path": "a.png"},
    {"type": "image", "source_type": "base64", "data": _IMAGE, "mime_type": "image/png"},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _IMAGE}},
    {"image": {"format": "png", "source": {"bytes": b"\x89PNG\r\n\x1a\n"}}},
    {"type": "media", "mime_type": "image/png", "data": _IMAGE}]


def sent(monkeypatch: pytest.MonkeyPatch, messages: list[Any]) -> list[dict[str, Any]]:
    """Return the messages that mpool.chat receives for those of LangChain."""
    asked: list[Any] = []
    monkeypatch.setattr(mpool.Pool, "chat", lambda _, messages, *rest, **options: asked.append(messages) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ChatMpool(model="x").invoke(messages)
    return asked[0]


@pytest.mark.parametrize("message, expected", ANSWERS, ids=range(len(ANSWERS)))
def test_answers_of_other_models(monkeypatch: pytest.MonkeyPatch, message: AIMessage, expected: dict[str, Any]) -> None:
    """Their text, reasoning, refusals and calls of the caller's tools; the rest only the model's service can read."""
    first, answer, last = sent(monkeypatch, [HumanMessage("Weather?"), message, HumanMessage("Sure?")])
    assert (first["content"], last["content"], answer.pop("role")) == ("Weather?", "Sure?", "assistant")
    if "tool_calls" in expected:
        (call,) = answer["tool_calls"]
        arguments = call["function"]["arguments"]
        assert (call["function"]["name"], call["type"]) == ("f", "function")
        assert arguments == {"a": 1} or json.loads(arguments) == {"a": 1}
        answer["tool_calls"] = call["id"]
    assert answer == expected


@pytest.mark.parametrize("message, expected", GIVEN, ids=range(len(GIVEN)))
def test_messages_of_users_and_tools(monkeypatch: pytest.MonkeyPatch, message: Any,
                                     expected: list[dict[str, Any]]) -> None:
    assert sent(monkeypatch, [message]) == expected


@pytest.mark.parametrize("image", IMAGES, ids=range(len(IMAGES)))
def test_images_of_users(monkeypatch: pytest.MonkeyPatch, image: dict[str, Any]) -> None:
    """A vision model reads each form."""
    from mpool.conversation.messages import check_messages

    messages = sent(monkeypatch, [HumanMessage([{"type": "text", "text": "What?"}, image])])
    found: list[Any] = []
    (checked,) = check_messages(messages, found)
    assert [part["type"] for part in checked["content"]] == ["text", "image"]
    assert [one.image for one in found] in ([f"data:image/png;base64,{_IMAGE}"], ["https://x.example/a.png"], ["a.png"])


def test_chain_and_store() -> None:
    """Retrieval-augmented generation: a question finds a document, and the model answers from it."""
    store = InMemoryVectorStore(MpoolEmbeddings(model=str(real_path("minilm"))))
    store.add_texts(["The capital of France is Paris.", "Bread rises because of yeast.", "Shares fell on Monday."])
    assert store.similarity_search("What makes dough grow?", k=1)[0].page_content.startswith("Bread")
    prompt = ChatPromptTemplate([("user", "{context} {question}")])
    chain = prompt | ChatMpool(model=str(real_path("smollm2")), temperature=0, max_tokens=16)
    found = chain.invoke({"context": store.similarity_search("the capital of France", k=1)[0].page_content,
                          "question": "What is the capital of France?"})
    assert "Paris" in found.content


def test_embeddings_equal_those_of_embed(prompted: Path) -> None:
    """Documents and queries get the model's prompts for them."""
    texts = ["A cat sat on the mat.", "Numbers 0 1 2."]
    made = MpoolEmbeddings(model=str(prompted), options={"dimensions": 8, "compute": "float32"})
    same = {"dimensions": 8, "compute": "float32"}
    assert np.array_equal(np.float32(made.embed_documents(texts)),
                          mpool.embed(texts, str(prompted), task="document", **same))
    query = mpool.embed(texts[0], str(prompted), task="query", **same)
    assert np.array_equal(np.float32(made.embed_query(texts[0])), query)
    assert np.array_equal(np.float32(asyncio.run(made.aembed_query(texts[0]))), query)
    assert made.embed_documents([]) == []


def test_tokens_come_from_the_model_tokenizer(llama: Path) -> None:
    model = ChatMpool(model=str(llama))
    ids = mpool.tokenize("A cat sat.", str(llama), add_special=False)
    assert model.get_token_ids("A cat sat.") == ids and model.get_num_tokens("A cat sat.") == len(ids)


def test_errors(llama: Path) -> None:
    """Unknown fields, options and models are errors."""
    with pytest.raises(ValueError, match="temprature"):
        ChatMpool(model=str(llama), temprature=0)  # type: ignore[call-arg]
    with pytest.raises(mpool.InvalidArgument, match="did you mean `temperature`"):
        ChatMpool(model=str(llama)).invoke("A cat?", temprature=0)
    with pytest.raises(mpool.UnknownModel):
        ChatMpool(model="SmolLM3-135M-Instruct").invoke("A cat?")
    with pytest.raises(ValueError, match="extra"):
        MpoolEmbeddings(dimensions=8)  # type: ignore[call-arg]


def test_tools_without_a_description() -> None:
    """LangChain gives them an empty one, which a chat template renders as a line."""
    class Place(BaseModel):
        name: str

    def documented(name: str) -> str:
        """Say a name."""
        return name

    bound: Any = ChatMpool(model="x").bind_tools([Place, documented])
    first, second = (tool["function"] for tool in bound.kwargs["tools"])
    assert "description" not in first and second["description"] == "Say a name."


@pytest.mark.builds
def test_examples(tmp_path: Path) -> None:
    integrationexamples.check("langchain", "langchain_core", tmp_path)

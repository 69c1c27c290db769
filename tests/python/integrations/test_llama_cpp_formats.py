"""``Llama`` passes known options to mpool, and makes dicts in the format of llama-cpp-python of known results."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from mpool.integrations.llama_cpp import Llama, LlamaGrammar
from mpool.results import Chunk, Completion, Timings, TokenLogprob, ToolCallDelta, TopLogprob, Usage

#: Options of mpool for a call without arguments: the defaults of llama-cpp-python.
PLAIN: dict[str, Any] = {
    "temperature": 0.8, "top_p": 0.95, "min_p": 0.05, "top_k": 40, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    "repetition_penalty": 1.0, "context_length": None}
TOKENS = (TokenLogprob(1, "ab", -0.5, (TopLogprob(3, "x", -1.5),)), TokenLogprob(2, "c", -0.25))
USAGE = {"prompt_tokens": 12, "completion_tokens": 9, "total_tokens": 21}


class Recorder:
    """A model that records calls and returns known results."""

    context_length, dimensions = 64, 48

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.tokens: tuple[TokenLogprob, ...] | None = None
        self.chunks: list[Chunk] = []

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.calls.append(("closed",))

    def __iter__(self) -> Any:
        return iter(self.chunks)

    def _run(self, given: Any, stream: bool = False, **options: Any) -> Any:
        self.calls.append((given, options))
        return self if stream else Completion(
            text="abc", finish_reason="length", stop=None, token_ids=(), logprobs=self.tokens, usage=Usage(12, 9),
            timings=Timings(0.0, 0.0, 0.0, 0.0), model="m", seed=1, choices=(),
            reasoning="r" if self.tokens else None)

    generate = chat = _run


@pytest.fixture()
def model() -> Recorder:
    return Recorder()


@pytest.fixture()
def llama(model: Recorder) -> Llama:
    """``Llama`` of the recorder; no file is read."""
    made = object.__new__(Llama)
    settings = SimpleNamespace(bos_token_id=5, eog_token_ids=(7, 8))
    made.model_path, made._model, made._settings, made._context = "m.gguf", model, settings, None  # type: ignore
    made.set_seed(0xFFFFFFFF)
    return made


@pytest.mark.parametrize("given, changes", [
    ({}, {"max_tokens": 16}), ({"max_tokens": 1}, {"max_tokens": 1}),
    *(({"max_tokens": value}, {"max_tokens": 64}) for value in (None, 0, -1)),
    ({"temperature": 0.5}, {"temperature": 0.5}), ({"temperature": -1.0}, {"temperature": 0.0}),
    ({"top_p": 0.5}, {"top_p": 0.5}), ({"min_p": 0.5}, {"min_p": 0.5}), ({"top_k": 7}, {"top_k": 7}),
    ({"top_k": -1}, {"top_k": 0}), ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.5}),
    ({"presence_penalty": 0.5}, {"presence_penalty": 0.5}), ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"stop": "x"}, {"stop": "x"}), ({"stop": ("x", "y")}, {"stop": ["x", "y"]}), ({"stop": None}, {}),
    ({"seed": 3}, {"seed": 3}), ({"seed": 0}, {"seed": 0}), ({"seed": -1}, {}), ({"seed": 0xFFFFFFFF}, {}),
    ({"logit_bias": {5: 1.0}}, {"logit_bias": {5: 1.0}}), ({"logit_bias": {}}, {}),
    ({"grammar": 'root ::= "a"'}, {"response_format": {"type": "grammar", "grammar": 'root ::= "a"'}}),
    ({"grammar": LlamaGrammar(schema={})},
     {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": False}}})])
def test_options(llama: Llama, model: Recorder, given: dict[str, Any], changes: dict[str, Any]) -> None:
    """Each argument reaches the option that means the same, in a completion and in a chat."""
    llama.create_completion("p", **given)
    chat = {"max_tokens": 64, **changes} if "max_tokens" in given else {**changes, "max_tokens": 64}
    llama.create_chat_completion([], **given)
    assert model.calls == [("p", {**PLAIN, "max_tokens": 16, **changes, "parse_special": True}),
                           ([], {**PLAIN, "temperature": 0.2, **chat})]


def test_options_of_one_method(llama: Llama, model: Recorder) -> None:
    """Log probabilities, tools and formats."""
    llama.create_completion("p", logprobs=0)
    llama.create_chat_completion([], tools=[1], tool_choice="auto", logprobs=True, top_logprobs=0,  # type: ignore
                                 response_format={"type": "json_object"})
    llama.create_chat_completion([], response_format={"type": "text"})
    llama.create_chat_completion([], response_format={"type": "json_object", "schema": {"a": 1}})
    first, chat, plain, schema = (options for _, options in model.calls)
    assert first["logprobs"] == 0
    assert {name: chat[name] for name in ("tools", "tool_choice", "logprobs", "top_logprobs", "response_format")} == {
        "tools": [1], "tool_choice": "auto", "logprobs": True, "top_logprobs": 0,
        "response_format": {"type": "json_object"}}
    assert not {"tools", "tool_choice", "logprobs", "top_logprobs", "response_format"} & set(plain)
    assert schema["response_format"] == {"type": "json_schema", "json_schema": {"schema": {"a": 1}, "strict": False}}


def test_seeds_and_contexts(llama: Llama, model: Recorder) -> None:
    """A request without a seed draws one from the seed of the object, and a context the smaller number of tokens."""
    llama.set_seed(4)
    llama.create_completion("p")
    llama.create_completion("p", seed=5)
    assert [options["seed"] for _, options in model.calls] == [random.Random(4).randint(0, 2**32), 5]
    for context, limit in ((None, 64), (10, 10), (100, 64)):
        llama._context = context
        llama.create_completion("p")
        assert llama.n_ctx() == limit and model.calls[-1][1]["context_length"] == context
    assert (llama.n_embd(), llama.token_bos(), llama.token_eos()) == (48, 5, 7)
    llama._settings = None
    assert (llama.token_bos(), llama.token_eos()) == (-1, -1)


def head(found: dict[str, Any], prefix: str, kind: str, name: str = "m.gguf") -> list[Any]:
    """Check the fields that all results have, and return the choices."""
    assert found["id"].startswith(prefix + "-") and (found["object"], found["model"]) == (kind, name)
    assert found["created"] > 1_700_000_000
    return list(found["choices"])


@pytest.mark.parametrize("name", [None, "named"])
def test_completion(llama: Llama, model: Recorder, name: str | None) -> None:
    """Offsets count characters from the beginning of the prompt; the chosen token is among the top ones."""
    model.tokens = TOKENS
    logprobs = {"tokens": ["ab", "c"], "text_offset": [4, 6], "token_logprobs": [-0.5, -0.25],
                "top_logprobs": [{"x": -1.5, "ab": -0.5}, {"c": -0.25}]}
    found: Any = llama.create_completion("four", logprobs=1, model=name)
    assert found["usage"] == USAGE
    assert head(found, "cmpl", "text_completion", name or "m.gguf") == [
        {"text": "abc", "index": 0, "logprobs": logprobs, "finish_reason": "length"}]
    found = llama.create_completion([1, 2], logprobs=1)
    assert found["choices"][0]["logprobs"]["text_offset"] == [0, 2]
    model.tokens = None
    found = llama.create_completion("four", echo=True)
    assert found["choices"] == [{"text": "fourabc", "index": 0, "logprobs": None, "finish_reason": "length"}]


def test_parts_of_a_completion(llama: Llama, model: Recorder) -> None:
    """Offsets continue in the next part, and the last part has the finish reason alone."""
    model.chunks = [Chunk(text="ab", logprobs=TOKENS[:1]), Chunk(text=""), Chunk(text="c", logprobs=TOKENS[1:]),
                    Chunk(text="", finish_reason="stop")]
    parts = [head(part, "cmpl", "text_completion")[0]
             for part in llama.create_completion("four", stream=True)]  # type: ignore[arg-type]
    assert [(part["text"], part["finish_reason"], part["index"]) for part in parts] == [
        ("ab", None, 0), ("c", None, 0), ("", "stop", 0)]
    assert [part["logprobs"] and part["logprobs"]["text_offset"] for part in parts] == [[4], [6], None]
    assert model.calls[-1] == ("closed",)
    texts = [part["choices"][0]["text"] for part in llama.create_completion(  # type: ignore[index]
        "four", stream=True, echo=True)]
    assert texts == ["four", "ab", "c", ""]


def test_chat(llama: Llama, model: Recorder) -> None:
    """Reasoning has its own field."""
    found: Any = llama.create_chat_completion([])
    assert head(found, "chatcmpl", "chat.completion") == [
        {"index": 0, "message": {"role": "assistant", "content": "abc"}, "logprobs": None, "finish_reason": "length"}]
    assert found["usage"] == USAGE
    model.tokens = TOKENS
    found = llama.create_chat_completion([], logprobs=True, model="named")
    assert head(found, "chatcmpl", "chat.completion", "named") == [
        {"index": 0, "message": {"role": "assistant", "content": "abc", "reasoning_content": "r"}, "logprobs": {
            "content": [{"token": "ab", "logprob": -0.5, "bytes": None,
                         "top_logprobs": [{"token": "x", "logprob": -1.5, "bytes": None}]},
                        {"token": "c", "logprob": -0.25, "bytes": None, "top_logprobs": []}], "refusal": None},
         "finish_reason": "length"}]


def test_parts_of_a_chat(llama: Llama, model: Recorder) -> None:
    """The first part has the role, the last one the finish reason; chunks without contents have no part."""
    calls = (ToolCallDelta(0, "id", "f", ""), ToolCallDelta(0, None, None, "{}"))
    model.chunks = [Chunk(text="", reasoning="r"), Chunk(text="a", logprobs=TOKENS[1:]), Chunk(text=""),
                    Chunk(text="", tool_calls=calls), Chunk(text="", finish_reason="tool_calls")]
    parts = [head(part, "chatcmpl", "chat.completion.chunk")[0]
             for part in llama.create_chat_completion([], stream=True)]  # type: ignore[arg-type]
    assert [part["delta"] for part in parts] == [
        {"role": "assistant"}, {"reasoning_content": "r"}, {"content": "a"}, {"tool_calls": [
            {"index": 0, "type": "function", "id": "id", "function": {"name": "f", "arguments": ""}},
            {"index": 0, "type": "function", "function": {"name": None, "arguments": "{}"}}]}, {}]
    assert [part["finish_reason"] for part in parts] == [None] * 4 + ["tool_calls"]
    assert [part["logprobs"] is not None for part in parts] == [False, False, True, False, False]
    assert {part["index"] for part in parts} == {0} and model.calls[-1] == ("closed",)

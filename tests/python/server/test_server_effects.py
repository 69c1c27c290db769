"""Every sampling option has its effect over HTTP: the server answers as the library does with the same option, and
differently from a request without the option. An option that a protocol accepts and then drops fails here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import mpool
import workers
from mpool.server import ollama_structs
from mpool.server.anthropic.structs import MessagesRequest
from mpool.server.ollama_models import PARAMETERS
from mpool.server.openai import structs
from mpool.server.openai.response_structs import ResponsesRequest
from mpool.server.worker import ExecuteRequest
from mpool.tasks.sampling import OTHERS, TABLE
from servers import Raw, ask, serving

END = 2  # the end token of the model
CHAT = [{"role": "user", "content": "The quick brown fox"}]
PROMPT = "The quick brown"
#: Hot enough that each option changes the completion.
BASE: dict[str, Any] = {"temperature": 1.4, "top_k": 0, "top_p": 1.0, "seed": 5, "max_tokens": 20}
#: Option -> its value, and options that it needs to have an effect.
EFFECTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "temperature": (0.2, {}), "top_k": (2, {}), "top_p": (0.05, {}), "min_p": (0.7, {}),
    "repetition_penalty": (30.0, {"temperature": 0}), "presence_penalty": (2.0, {"temperature": 0}),
    "frequency_penalty": (2.0, {"temperature": 0}),
    "max_tokens": (4, {}), "min_tokens": (6, {"logit_bias": {"2": 100}}), "n": (3, {}), "seed": (6, {}),
    "ignore_eos": (True, {"logit_bias": {"2": 100}}), "stop": (["e", " ", "t", "a"], {}),
    "stop_token_ids": ([77], {"temperature": 0}),
    "logit_bias": ({"77": 100}, {"temperature": 0}), "logprobs": (2, {}), "top_logprobs": (2, {"logprobs": True}),
}
#: Names of the options in Anthropic's protocol, in `/v1/responses` and in Ollama's protocol.
ANTHROPIC = {"stop": "stop_sequences"}
RESPONSES = {"max_tokens": "max_output_tokens"}
OLLAMA = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}


def fields(struct: type) -> set[str]:
    """Return the sampling options for which a request has a field, under the library's names."""
    own = {**{other: name for name, other in PARAMETERS.items()}, "max_completion_tokens": "max_tokens"}
    names = {own.get(field.encode_name, field.encode_name) for field in msgspec.structs.fields(struct)}
    return names & {*TABLE, *OTHERS}


@pytest.fixture(scope="module")
def server(llama: Path) -> Iterator[Any]:
    with serving([f"llama={llama}"]) as made:
        yield made


def options_of(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the request without and with the option ``name``."""
    value, needed = EFFECTS[name]
    if name == "stop_token_ids":
        needed = {**needed, "logit_bias": {"77": 100}}
    without = {**BASE, **needed}
    return without, {**without, name: value}


def library(call: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    """Run a verb of the library. Return texts, token counts and log probabilities."""
    bias = {int(token): value for token, value in options.get("logit_bias", {}).items()}
    done = call(**{**options, **({"logit_bias": bias} if bias else {})})
    return ([choice.text for choice in done.choices], done.usage.completion_tokens, _numbers(done))


def _numbers(done: mpool.Completion) -> list[tuple[float, int]] | None:
    """Return the log probability of each token, and the number of alternatives with different texts."""
    return None if done.logprobs is None else [(row.logprob, len({one.token for one in row.top})) for row in
                                               done.logprobs]


def openai_answer(server: Any, path: str, body: dict[str, Any]) -> tuple[Any, ...]:
    status, done = ask(server, path, {"model": "llama", **body})
    assert status == 200, done
    chat = "message" in done["choices"][0]
    texts = [choice["message"]["content"] if chat else choice["text"] for choice in done["choices"]]
    logprobs = done["choices"][0].get("logprobs")
    numbers = None
    if logprobs and chat:
        numbers = [(row["logprob"], len({one["token"] for one in row["top_logprobs"]})) for row in logprobs["content"]]
    elif logprobs:  # a dict: tokens with the same text share a key
        numbers = list(zip(logprobs["token_logprobs"], map(len, logprobs["top_logprobs"]), strict=True))
    return texts, done["usage"]["completion_tokens"], numbers


def streamed(server: Any, path: str, body: dict[str, Any]) -> list[str]:
    """Return the texts of a streamed answer, by choice."""
    with Raw(server, 60) as raw:
        status, _, data = raw.request(path, json.dumps({"model": "llama", "stream": True, **body}).encode()).answer()
    assert status == 200, data
    texts: dict[int, str] = {}
    for block in data.decode().split("\n\n"):
        if block.startswith("data: {"):
            for choice in json.loads(block[6:])["choices"]:
                part = choice["delta"].get("content") if "delta" in choice else choice["text"]
                texts[choice["index"]] = texts.get(choice["index"], "") + (part or "")
    return [texts[index] for index in sorted(texts)]


@pytest.mark.parametrize("name", sorted(fields(structs.ChatRequest)))
def test_chat_completions(server: Any, name: str) -> None:
    without, with_ = options_of(name)
    pool = server.state.pool
    plain, wanted = (library(lambda **options: pool.chat(CHAT, "llama", **options), options)
                     for options in (without, with_))
    assert wanted != plain, "the option has no effect on this model: choose another value"
    sent = {**with_, "logprobs": True, "top_logprobs": 2} if name == "logprobs" else with_
    assert openai_answer(server, "/v1/chat/completions", {"messages": CHAT, **sent}) == wanted
    assert streamed(server, "/v1/chat/completions", {"messages": CHAT, **sent}) == wanted[0]
    assert openai_answer(server, "/v1/chat/completions", {"messages": CHAT, **without}) == plain


@pytest.mark.parametrize("name", sorted(fields(structs.CompletionRequest)))
def test_completions(server: Any, name: str) -> None:
    without, with_ = options_of(name)
    pool = server.state.pool
    plain, wanted = (library(lambda **options: pool.generate(PROMPT, "llama", **options), options)
                     for options in (without, with_))
    assert wanted != plain
    assert openai_answer(server, "/v1/completions", {"prompt": PROMPT, **with_}) == wanted
    assert streamed(server, "/v1/completions", {"prompt": PROMPT, **with_}) == wanted[0]
    assert openai_answer(server, "/v1/completions", {"prompt": PROMPT, **without}) == plain


@pytest.mark.parametrize("name", sorted({*fields(MessagesRequest), "stop"}))
def test_anthropic(server: Any, name: str) -> None:
    without, with_ = options_of(name)
    pool = server.state.pool
    plain, wanted = (library(lambda **options: pool.chat(CHAT, "llama", **options), options)
                     for options in (without, with_))
    assert wanted != plain

    def sent(options: dict[str, Any]) -> dict[str, Any]:
        return {"model": "llama", "messages": CHAT, **{ANTHROPIC.get(key, key): value for key, value in
                                                       options.items()}}

    def answer(options: dict[str, Any]) -> tuple[Any, ...]:
        status, done = ask(server, "/v1/messages", sent(options))
        assert status == 200, done
        return ["".join(block["text"] for block in done["content"])], done["usage"]["output_tokens"], None

    def stream(options: dict[str, Any]) -> tuple[Any, ...]:
        with Raw(server, 60) as raw:
            status, _, data = raw.request("/v1/messages", json.dumps({**sent(options), "stream": True}).encode()
                                          ).answer()
        assert status == 200, data
        events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")]
        text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
        return [text], events[-2]["usage"]["output_tokens"], None

    assert answer(with_) == stream(with_) == wanted and answer(without) == plain


@pytest.mark.parametrize("name", sorted({*fields(ResponsesRequest), "max_tokens"}))
def test_responses(server: Any, name: str) -> None:
    without, with_ = options_of(name)
    pool = server.state.pool
    plain, wanted = (library(lambda **options: pool.chat(CHAT, "llama", **options), options)
                     for options in (without, with_))
    assert wanted != plain

    def sent(options: dict[str, Any]) -> dict[str, Any]:
        return {"model": "llama", "input": CHAT, **{RESPONSES.get(key, key): value for key, value in options.items()}}

    def found(done: dict[str, Any]) -> tuple[Any, ...]:
        texts = [part["text"] for item in done["output"] for part in item["content"]]
        return ["".join(texts)], done["usage"]["output_tokens"], None

    def answer(options: dict[str, Any]) -> tuple[Any, ...]:
        status, done = ask(server, "/v1/responses", sent(options))
        assert status == 200, done
        return found(done)

    assert answer(with_) == wanted and answer(without) == plain
    assert found(last_of_stream(server, "/v1/responses", {**sent(with_), "stream": True})["response"]) == wanted


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
@pytest.mark.parametrize("name", sorted(fields(ollama_structs.Options)))
def test_ollama(server: Any, path: str, name: str) -> None:
    without, with_ = options_of(name)
    pool = server.state.pool
    plain, wanted = (library(lambda **options: pool.chat(CHAT, "llama", **options), options)[0][0]
                     for options in (without, with_))
    assert wanted != plain

    def answer(options: dict[str, Any]) -> str:
        sent = {OLLAMA.get(key, key): value for key, value in options.items()}
        content = {"prompt": CHAT[0]["content"]} if path == "/api/generate" else {"messages": CHAT}
        status, done = ask(server, path, {"model": "llama", "stream": False, **content, "options": sent})
        assert status == 200, done
        return done["response"] if path == "/api/generate" else done["message"]["content"]

    assert answer(with_) == wanted and answer(without) == plain


def last_of_stream(server: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the last object of a streamed answer."""
    with Raw(server, 60) as raw:
        status, _, data = raw.request(path, json.dumps({"model": "llama", **body}).encode()).answer()
    assert status == 200, data
    lines = [line.removeprefix("data: ") for line in data.decode().splitlines()]
    found: dict[str, Any] = json.loads([line for line in lines if line.startswith("{")][-1])
    return found


def test_usage_is_that_of_the_library(server: Any) -> None:
    """Token counts of several prompts and choices are added up, in streams too, with stops and without."""
    pool, prompts = server.state.pool, ["The quick brown", "fox"]
    options: dict[str, Any] = {**BASE, "n": 3, "max_tokens": 7, "ignore_eos": True}
    for path, sent, done in (
            ("/v1/completions", {"prompt": prompts}, [pool.generate(text, "llama", **options) for text in prompts]),
            ("/v1/completions", {"prompt": PROMPT, "stop": ["e"]}, [pool.generate(PROMPT, "llama", stop=["e"],
                                                                                 **options)]),
            ("/v1/chat/completions", {"messages": CHAT}, [pool.chat(CHAT, "llama", **options)])):
        prompt, written = (sum(getattr(one.usage, name) for one in done)
                           for name in ("prompt_tokens", "completion_tokens"))
        assert written == sum(len(choice.token_ids) for one in done for choice in one.choices)
        expected = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
        status, found = ask(server, path, {"model": "llama", **sent, **options})
        last = last_of_stream(server, path, {**sent, **options, "stream": True,
                                             "stream_options": {"include_usage": True}})
        assert status == 200 and last["choices"] == []
        for answer in (found, last):
            usage = answer["usage"]
            assert {**usage, "prompt_tokens_details": None} == {**expected, "prompt_tokens_details": None}
            assert usage["prompt_tokens_details"]["cached_tokens"] <= prompt
    body = {"prompt": CHAT[0]["content"], "options": {"num_predict": 7, "temperature": 0}}
    one = pool.chat(CHAT, "llama", max_tokens=7, temperature=0).usage
    for stream in (False, True):
        found = last_of_stream(server, "/api/generate", {**body, "stream": stream})
        assert (found["prompt_eval_count"], found["eval_count"]) == (one.prompt_tokens, one.completion_tokens)


@pytest.fixture(scope="module")
def worker(llama: Path) -> Iterator[Any]:
    with workers.working(llama) as made:
        yield made.serving


@pytest.mark.parametrize("name", sorted(fields(ExecuteRequest)))
def test_worker_protocol(worker: Any, llama: Path, name: str) -> None:
    without, with_ = options_of(name)
    with mpool.Pool() as pool:
        plain, wanted = (library(lambda **options: pool.generate(PROMPT, llama, **options), options)[0][0]
                         for options in (without, with_))
    assert wanted != plain
    texts = [workers.text_of(workers.run(worker, job_id=f"{name}-{at}", prompt=PROMPT, **options))
             for at, options in enumerate((without, with_))]
    assert texts == [plain, wanted]


def test_every_option_is_covered() -> None:
    assert set(EFFECTS) == {*TABLE, *OTHERS}
    assert fields(structs.ChatRequest) == {*TABLE, *OTHERS}
    assert {*TABLE, *OTHERS} - fields(ResponsesRequest) == {"n", "logprobs", "top_logprobs", "stop", "max_tokens"}
    # Anthropic's API has one completion per request, no log probabilities, and `stop_sequences`
    assert {*TABLE, *OTHERS} - fields(MessagesRequest) == {"n", "logprobs", "top_logprobs", "stop"}

"""Requests that routes refuse although their fields are valid: code and parameter; texts.json has status and text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import goldentexts
from rerankers import make_classifier

from mpool.server.errors import TABLE, Refusal
from servers import Raw, ask, serving

CHAT: list[Any] = [{"role": "user", "content": "x"}]
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
FLAT: dict[str, Any] = {"type": "function", "name": "clock", "parameters": {"type": "object"}}
CALL: dict[str, Any] = {"type": "function_call", "call_id": "a", "name": "clock", "arguments": "{}"}
RESULT: dict[str, Any] = {"type": "function_call_output", "call_id": "a", "output": "x"}
LONG = "x" * 1001
PARTS = ("v1/chat/completions", "v1/completions", "v1/responses", "v1/embeddings", "v1/multi-vector", "v1/score",
         "v1/images/generations", "v1/messages", "api/chat", "api/generate", "api/create", "api/pull", "tokenize",
         "detokenize", "embed", "embed_sparse", "rerank", "similarity", "predict", "pooling")
COMPLETIONS, RESPONSES, EMBEDDINGS, VECTORS, SCORE, IMAGES, MESSAGES, TALK, GENERATE, CREATE, PULL, TOKENIZE, \
    DETOKENIZE, EMBED, SPARSE, RERANK, SIMILARITY, PREDICT, POOLING = (f"/{part}" for part in PARTS[1:])
CHATS = f"/{PARTS[0]}"
#: Body without which a request of the route is not valid.
BASE: dict[str, dict[str, Any]] = {
    CHATS: {"model": "llama", "messages": CHAT}, COMPLETIONS: {"model": "llama", "prompt": "x"},
    RESPONSES: {"model": "llama", "input": "x"}, EMBEDDINGS: {"model": "bert", "input": "x"},
    VECTORS: {"model": "m3", "input": "x"}, SCORE: {"model": "bert", "text_1": "x", "text_2": "y"},
    IMAGES: {"model": "flux", "prompt": "x"}, MESSAGES: {"model": "llama", "messages": CHAT, "max_tokens": 5},
    TALK: {"model": "llama", "messages": CHAT}, GENERATE: {"model": "llama", "prompt": "x"},
    CREATE: {"model": "new", "from": "llama"}, PULL: {"model": "other"}, TOKENIZE: {"model": "llama"},
    DETOKENIZE: {"model": "llama"}, EMBED: {"model": "bert", "inputs": "x"}, SPARSE: {"model": "m3", "inputs": "x"},
    RERANK: {"model": "ranker", "query": "x", "texts": ["y"]},
    SIMILARITY: {"model": "bert", "inputs": {"source_sentence": "x", "sentences": ["y"]}},
    PREDICT: {"model": "nli", "inputs": "x"}, POOLING: {"model": "bert", "input": "x"}}

#: Route, changes of the body, code and parameter of the error. ``texts.json`` has its status and text.
ROWS: list[tuple[str, dict[str, Any], str, str]] = [
    (CHATS, {"n": 17}, "invalid_value", "n"),
    (CHATS, {"tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
    (CHATS, {"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    (CHATS, {"messages": [{"role": "user"}]}, "invalid_value", "messages[0]"),
    *((CHATS, {"chat_template_kwargs": {name: 1}}, "invalid_value", "chat_template_kwargs")
      for name in ("add_generation_prompt", "continue_final_message", "messages", "tools", "documents", "tokenizer",
                   "images", "deadline")),
    (CHATS, {"response_format": {"type": "xml"}}, "unsupported_parameter", "response_format"),
    (CHATS, {"response_format": {"type": "json_schema"}}, "invalid_value", "response_format"),
    *((CHATS, {"tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "allowed_tools": inner}}, "invalid_value",
       "tool_choice")
      for inner in ({}, {"mode": "none", "tools": [CLOCK]}, {"mode": "auto", "tools": []},
                    {"mode": "auto", "tools": [{"name": "other"}]}, "auto")),
    (CHATS, {"messages": [{"role": "user", "content": "x" * 1001}]}, "request_too_large", "messages[0]"),
    (CHATS, {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}, "request_too_large",
     "messages[0].content[0]"),
    (COMPLETIONS, {"best_of": 2}, "unsupported_parameter", "best_of"),
    (COMPLETIONS, {"n": 3, "best_of": 1}, "unsupported_parameter", "best_of"),
    (COMPLETIONS, {"prompt": ["x"] * 6, "n": 3}, "invalid_value", "n"),
    (COMPLETIONS, {"prompt": ["x"] * 17}, "invalid_value", "n"),
    *((COMPLETIONS, {"echo": True, **more}, "unsupported_parameter", "echo")
      for more in ({"logprobs": 0}, {"prompt": [5]})),
    (COMPLETIONS, {"suffix": "y", "prompt": [5]}, "invalid_value", "suffix"),
    (COMPLETIONS, {"prompt": ["x", [5]]}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": ["x", LONG]}, "request_too_large", "prompt[1]"),
    *((RESPONSES, {name: value}, "unsupported_parameter", name)
      for name, value in (("background", True), ("conversation", "x"), ("prompt", {"id": "x"}))),
    (RESPONSES, {"tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
    (RESPONSES, {"tools": [FLAT], "tool_choice": {"type": "function"}}, "invalid_value", "tool_choice"),
    (RESPONSES, {"tools": [FLAT], "tool_choice": {"type": "mcp", "name": "x"}}, "invalid_value", "tool_choice"),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "invalid_value", "text.format"),
    (RESPONSES, {"input": [RESULT]}, "invalid_value", "input[0].call_id"),
    (RESPONSES, {"input": [CALL, RESULT, RESULT]}, "invalid_value", "input[2].call_id"),
    (RESPONSES, {"input": [CALL, RESULT, CALL]}, "invalid_value", "input[2].call_id"),
    (EMBEDDINGS, {"late_chunking": True}, "unsupported_parameter", "late_chunking"),
    *((EMBEDDINGS, {"model": "m3", "return_multivector": True, name: value}, "unsupported_parameter", name)
      for name, value in (("dimensions", 4), ("normalized", True))),
    (EMBEDDINGS, {"model": "m3", "return_multivector": True, "input": [5]}, "unsupported_parameter", "input"),
    (EMBEDDINGS, {"input": [{"text": "x", "image": "y"}]}, "invalid_value", "input[0].image"),
    (EMBEDDINGS, {"input": [{}]}, "invalid_value", "input[0]"),
    (VECTORS, {"dimensions": 5}, "invalid_value", "dimensions"),
    (SCORE, {"text_1": ["x"] * 2, "text_2": ["y"] * 3}, "invalid_value", "text_1"),
    (SCORE, {"prompt": "x"}, "unsupported_parameter", "prompt"),
    (SCORE, {"text_1": LONG}, "request_too_large", "text_1"),
    (SCORE, {"text_2": ["x"] * 9}, "request_too_large", "text_2"),
    (IMAGES, {"stream": True, "n": 2}, "invalid_value", "n"),
    (IMAGES, {"partial_images": 1}, "invalid_value", "partial_images"),
    (IMAGES, {"n": 10, "prompt": LONG}, "request_too_large", "prompt"),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "invalid_value", "tool_choice"),
    (MESSAGES, {"tools": [{"name": "clock", "input_schema": {"type": "object"}}], "tool_choice": {"type": "tool"}},
     "invalid_value", "tool_choice.name"),
    (MESSAGES, {"tools": [{"name": "clock"}]}, "invalid_value", "tools[0].input_schema"),
    *((GENERATE, {name: value}, "unsupported_parameter", name)
      for name, value in (("template", "x"), ("context", [1]))),
    *((GENERATE, {"raw": True, **more}, "invalid_value", "raw")
      for more in ({"system": "x"}, {"images": ["aGVsbG8="]})),
    *((GENERATE, {"suffix": "y", **more}, "invalid_value", "suffix")
      for more in ({"system": "x"}, {"images": ["aGVsbG8="]})),
    (GENERATE, {"format": "xml"}, "unsupported_parameter", "format"),
    (GENERATE, {"think": "deep"}, "invalid_value", "think"),
    (GENERATE, {"think": True}, "unsupported_parameter", "think"),
    *((CREATE, {name: value}, "unsupported_parameter", name)
      for name, value in (("template", "x"), ("adapters", {"a": "b"}), ("files", {"a": "b"}), ("quantize", "q4_0"),
                          ("messages", CHAT))),
    (CREATE, {"model": None}, "invalid_value", "model"),
    (CREATE, {"model": "bert"}, "invalid_value", "model"),
    (CREATE, {"model": ".x"}, "invalid_value", "model"),
    (PULL, {}, "model_not_found", "model"),
    *((TOKENIZE, more, "invalid_value", "prompt") for more in ({}, {"prompt": "x", "messages": CHAT})),
    *((TOKENIZE, {"prompt": "x", name: value}, "invalid_value", name)
      for name, value in (("add_generation_prompt", False), ("continue_final_message", False), ("tools", []),
                          ("chat_template_kwargs", {}))),
    (TOKENIZE, {"messages": CHAT, "add_special_tokens": True}, "unsupported_parameter", "add_special_tokens"),
    (TOKENIZE, {"messages": CHAT, "add_generation_prompt": True, "continue_final_message": True}, "invalid_value",
     "continue_final_message"),
    (TOKENIZE, {"prompt": "x", "model": None}, "invalid_value", "model"),
    *((path, {"truncation_direction": value}, "unsupported_parameter", "truncation_direction")
      for path in (EMBED, SPARSE, RERANK, PREDICT) for value in ("Left", "left")),
    (SIMILARITY, {"parameters": {"truncation_direction": "Left"}}, "unsupported_parameter", "truncation_direction"),
    *((path, {"inputs": value}, "empty_input", "inputs")
      for path in (EMBED, SPARSE) for value in ([], "", ["x", ""], [[]])),
    *((EMBED, {"inputs": [5], name: "query"}, "invalid_value", "inputs") for name in ("prompt_name", "task")),
    (EMBED, {"inputs": ["x"] * 9}, "request_too_large", "inputs"),
    *((RERANK, {name: value}, "empty_input", name)
      for name, value in (("query", ""), ("texts", []), ("texts", ["x", ""]))),
    *((SIMILARITY, {"inputs": {"source_sentence": first, "sentences": rest}}, "empty_input", name)
      for first, rest, name in (("", ["x"], "inputs.source_sentence"), ("x", [], "inputs.sentences"),
                                ("x", [""], "inputs.sentences"))),
    (PREDICT, {"inputs": ["x", "y", "z"]}, "invalid_value", "inputs"),
    (PREDICT, {"inputs": ["x", ["y"]]}, "invalid_value", "inputs"),
    (PREDICT, {"inputs": [["x"], "y"]}, "invalid_value", "inputs"),
    (PREDICT, {"inputs": [["x"], ["y", LONG]]}, "request_too_large", "inputs[1]"),
    (POOLING, {"model": "nli"}, "invalid_value", "task"),
    (POOLING, {"model": "tagger"}, "invalid_value", "task"),
    *((POOLING, {"dimensions": 4, **more}, "unsupported_parameter", "dimensions")
      for more in ({}, {"task": "token_embed"}, {"model": "nli", "task": "classify"})),
    *((POOLING, {"model": model, "task": task, "input": [5]}, "unsupported_parameter", "input")
      for model, task in (("nli", "classify"), ("tagger", "token_classify"))),
    (POOLING, {"use_activation": False}, "unsupported_parameter", "use_activation"),
    (POOLING, {"input": [5]}, "invalid_value", "input"),
]


@pytest.fixture(scope="module")
def models(bert: Path, llama: Path, ranker: Path, tagger: Path, m3: Path, flux: Path,
           tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of a server with a model for every route."""
    nli = make_classifier(tmp_path_factory.mktemp("nli") / "model", "bert", ("no", "maybe", "yes"))
    return [f"{name}={folder}" for name, folder in (("bert", bert), ("llama", llama), ("ranker", ranker), ("nli", nli),
                                                    ("tagger", tagger), ("m3", m3), ("flux", flux))]


@pytest.fixture(scope="module")
def server(models: list[str]) -> Iterator[Any]:
    """A server that takes texts of 1,000 characters, and 8 texts per request."""
    import mpool

    config = mpool.PoolConfig(shutdown_grace=1.0, offline=True, max_embed_inputs=8)
    with serving(models, config, max_text=1000) as made:
        yield made


@pytest.mark.sample(3)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[3]}")
def test_refused_request(server: Any, request: pytest.FixtureRequest,
                         row: tuple[str, dict[str, Any], str, str]) -> None:
    """The text is that of the error's code and then that of the parameter. OpenAI's format also names both."""
    path, change, code, param = row
    status, found = ask(server, path, {**BASE[path], **change})
    error = found["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(TABLE[code].text)
    if not isinstance(error, str) and "param" in error:
        assert (error["code"], error["param"]) == (code, param)
    goldentexts.check(request, [status, message])


def _needs_no_model(row: tuple[str, dict[str, Any], str, str]) -> bool:
    path, change, _, param = row
    needs = path in (CREATE, PULL, VECTORS) or param in ("model", "task") or change.get("think") is True \
        or (path, param) == (SCORE, "prompt")
    return not needs


#: A schema that a grammar cannot enforce.
UNENFORCED = {"type": "object", "properties": {"a": {"not": {"const": 1}}}}
#: Routes, and values that their structs allow and the library refuses, with the parameter of the error.
OF_LIBRARY: list[tuple[str, dict[str, Any], str, str]] = [
    *((path, {"tools": [{"type": "function", "function": {"name": ""}}]}, "invalid_value", "tools")
      for path in (CHATS, TALK)),
    (RESPONSES, {"tools": [{"type": "function", "name": ""}]}, "invalid_value", "tools"),
    (MESSAGES, {"tools": [{"name": "", "input_schema": {"type": "object"}}]}, "invalid_value", "tools"),
    *((path, {"logit_bias": {"x": 1}}, "invalid_value", "logit_bias") for path in (CHATS, COMPLETIONS)),
    (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x!"}]}]}, "invalid_value",
     "messages[0].content[0].image_url"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {
        "type": "base64", "media_type": "image/png", "data": "x!"}}]}]}, "invalid_value",
     "messages[0].content[0].source.data"),
    (TALK, {"messages": [{"role": "user", "content": "x", "images": ["x!"]}]}, "invalid_value", ""),
    (GENERATE, {"images": ["x!"]}, "invalid_value", ""),
    (GENERATE, {"options": {"temperature": -1}}, "invalid_value", ""),
    (TALK, {"options": {"temperature": -1}}, "invalid_value", ""),
    (GENERATE, {"keep_alive": "soon"}, "invalid_value", ""), (TALK, {"keep_alive": "soon"}, "invalid_value", ""),
    (GENERATE, {"prompt": "", "keep_alive": "soon"}, "invalid_value", ""),
    *((IMAGES, {"size": "9999x16", **more}, "invalid_value", "size") for more in ({}, {"stream": True}, {
        "stream": True, "partial_images": 1})),
    (EMBEDDINGS, {"task": "nope"}, "invalid_value", "task"),
    (RERANK, {"texts": ["x"] * 9}, "request_too_large", ""), ("/v1/rerank", {"documents": ["x"] * 9},
                                                              "request_too_large", "documents"),
    (TOKENIZE, {"messages": CHAT, "tools": [{"type": "function", "function": {"name": ""}}]}, "invalid_value", "tools"),
    ("/v1/messages/count_tokens", {"tools": [{"name": "", "input_schema": {"type": "object"}}]}, "invalid_value",
     "tools"),
    ("/v1/fim/completions", {"logit_bias": {"x": 1}, "suffix": "y"}, "invalid_value", "logit_bias"),
    *((path, {"response_format": one}, "invalid_value", "response_format") for path in (CHATS, COMPLETIONS) for one in (
        {"type": "regex", "regex": "("}, {"type": "grammar", "grammar": "start: none"},
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": UNENFORCED}})),
    *((path, {"guided_regex": "("}, "invalid_value", "guided_regex") for path in (CHATS, COMPLETIONS)),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": UNENFORCED}}},
     "invalid_value", "text.format"),
    (CHATS, {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": UNENFORCED}}]},
     "invalid_value", "tools"),
    (CHATS, {"chat_template_kwargs": {"messages": []}}, "invalid_value", "chat_template_kwargs"),
    ("/api/mpool/embed_images", {"images": ["AAAA"]}, "invalid_value", ""),
]


@pytest.mark.parametrize("row", [*filter(_needs_no_model, ROWS), *OF_LIBRARY],
                         ids=lambda row: f"{row[0]}-{row[3]}")
def test_values_are_refused_before_an_unknown_model(server: Any, row: tuple[str, dict[str, Any], str, str]) -> None:
    """The error of an invalid value is the same with a model that the server does not serve."""
    path, change, code, param = row
    base = {"/v1/rerank": {"query": "x", "documents": ["y"]}, "/v1/fim/completions": {"prompt": "x"},
            "/v1/messages/count_tokens": {"messages": CHAT}}
    status, found = ask(server, path, {**base.get(path, BASE.get(path, {})), **change, "model": "unknown"})
    error = found["error"]
    assert status in (400, 413, 422), found
    if isinstance(error, dict):
        assert "param" not in error or (error["code"], error["param"]) == (code, param)
        assert error["type"] != "not_found_error"


@pytest.mark.parametrize("path", BASE)
def test_an_unchanged_request_is_not_refused(server: Any, path: str) -> None:
    """The changes are what the errors are about."""
    more = {TOKENIZE: {"prompt": "x"}, DETOKENIZE: {"tokens": [5]}, POOLING: {"task": "embed"},
            IMAGES: {"size": "16x16", "num_inference_steps": 1}}
    if path == PULL:
        return
    with Raw(server, 60) as raw:
        body = {**BASE[path], **more.get(path, {})}
        status, _, data = raw.request(path, json.dumps(body).encode()).response()
    assert status == 200, data


@pytest.mark.parametrize(("detail", "shown"), [
    ("the prompt has 5 tokens.", "The prompt has 5 tokens."), ("this model is full.", "This model is full."),
    ("model-7: the prompt is long.", "model-7: the prompt is long."), ("`top_k` is too low.", "`top_k` is too low."),
    ('think value "high" is not supported.', 'think value "high" is not supported.')])  # Ollama's words
def test_a_detail_is_a_sentence(detail: str, shown: str) -> None:
    assert Refusal("invalid_value", detail).message.endswith(f". {shown}")

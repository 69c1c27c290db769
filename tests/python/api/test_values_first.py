"""Values that no model allows are refused before the model's reference is resolved: by every verb, in every form."""

from __future__ import annotations

import asyncio
import inspect
import io
import socket
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mpool
from mpool import aio
from mpool.cli import main
from mpool.integrations import llama_cpp, sentence_transformers
from mpool.tasks import options as of
from mpool.tasks.running import _JOBS

#: A model that is neither on this machine nor downloaded, because the pool is offline.
MODEL = "org/none"
CHAT = [{"role": "user", "content": "Hi"}]
IMAGE = np.zeros((8, 8, 3), np.uint8)
#: Half of a surrogate pair, a schema that no grammar enforces, and formats that are faulty for every model.
HALF = "\ud800"
STRICT = {"type": "object", "properties": {"a": {"not": {"const": 1}}}}
FORMATS = [{"type": "regex", "regex": "("}, {"type": "grammar", "grammar": "start: none"},
           {"type": "grammar", "grammar": "root ::= none"}, {"type": "grammar", "grammar": "start: start"}, STRICT]
#: Verb -> its arguments and the dataclass of its options.
VERBS: dict[str, tuple[dict[str, Any], type]] = {
    "embed": ({"inputs": "x"}, of.EmbedOptions), "embed_iter": ({"texts": ["x"]}, of.EmbedIterOptions),
    "embed_sparse": ({"inputs": "x"}, of.SparseOptions), "embed_tokens": ({"inputs": "x"}, of.TokenOptions),
    "embed_all": ({"inputs": "x"}, of.AllOptions), "embed_image": ({"images": IMAGE}, of.ImageOptions),
    "rerank": ({"query": "x", "documents": ["y"]}, of.RerankOptions), "classify": ({"texts": "x"}, of.ClassifyOptions),
    "classify_tokens": ({"texts": "x"}, of.ClassifyTokensOptions), "generate": ({"prompt": "x"}, of.GenerateOptions),
    "chat": ({"messages": CHAT}, of.TextOptions), "vision": ({"images": IMAGE, "prompt": "x"}, of.TextOptions),
    "describe_image": ({"path": __file__}, of.TextOptions),
    "describe_url": ({"url": "http://127.0.0.1/x.png"}, of.TextOptions),
    "generate_image": ({"prompt": "x"}, of.GenerateImageOptions)}
#: Option -> a value that no model allows; options without a row refuse -1.
BAD: dict[str, Any] = {
    "ignore_labels": "O", "labels": [], "template": 5, "logit_bias": {-1: 1}, "stop": [""], "stop_token_ids": [-1],
    "response_format": {"type": "yaml"}, "tools": [{"type": "function", "function": {"name": ""}}], "latents": "x",
    "tool_choice": "required", "template_options": [1], "top_k": -2, "presence_penalty": 3, "frequency_penalty": 3,
    "max_tokens": 0, "keep_alive": "soon", "tenant": "", "timeout": float("nan")}
#: URLs that no server can have.
URLS = ["http://", "https:///a.png", "http://[::1", "http://h:99999/", "http://h:x/", "http://h:0/", "http://user@/x",
        "http://a b/x.png", f"http://h/{HALF}"]
#: Verb -> arguments that no model allows, each with the parameter that the error names.
ARGUMENTS = {"embed": [({"inputs": np.array([[1, 2]])}, "inputs"), ({"inputs": {"x": 1}.keys()}, "inputs"),
                       ({"inputs": [(1, -2)]}, "inputs[0][1]"), ({"inputs": ["x", 5]}, "inputs[1]"),
                       ({"inputs": [-1]}, "inputs[0]"),
                       ({"inputs": ["x"], "precision": "int8"}, "precision"), ({"inputs": HALF}, "inputs"),
                       ({"inputs": [[1], [True]]}, "inputs[1][0]"), ({"inputs": [[2**40]]}, "inputs[0][0]"),
                       ({"inputs": [[1], []]}, "inputs[1]")],
             "embed_iter": [({"texts": ["x", 5]}, "texts[1]"), ({"texts": [[1.5]]}, "texts[0][0]"),
                            ({"texts": [("x", HALF)], "output": "labels"}, "texts[0][1]"),
                            ({"texts": ("x", HALF), "output": "spans"}, "texts[1]")],
             "embed_sparse": [({"inputs": [None]}, "inputs[0]"), ({"inputs": ["x", HALF]}, "inputs[1]")],
             "rerank": [({"query": "x", "documents": ["y", 5]}, "documents[1]"),
                        ({"query": "x", "documents": ["y", HALF]}, "documents[1]")],
             "classify": [({"texts": ["x", 5]}, "texts[1]"), ({"texts": [("x", "y"), ("x", HALF)]}, "texts[1][1]")],
             "classify_tokens": [({"texts": ["x", 5]}, "texts[1]"), ({"texts": [HALF]}, "texts[0]")],
             "generate": [({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [-1]}, "prompt[0]"),
                          ({"prompt": "x", "min_tokens": 3, "max_tokens": 2}, "min_tokens"),
                          ({"prompt": "x", "temprature": 1}, "temprature"), ({"prompt": "x", "tools": []}, "tools"),
                          *(({"prompt": "x", "response_format": one}, "response_format") for one in FORMATS),
                          ({"prompt": "x", "response_format": {"type": "json_object"}, "ignore_eos": True},
                           "ignore_eos")],
             "chat": [({"messages": CHAT, "template_options": {"messages": []}}, "template_options"),
                      ({"messages": CHAT, "template_options": {"a": HALF}}, "template_options.a"),
                      ({"messages": CHAT, "template_options": {"chat_template": "x"}}, "template_options"),
                      ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
                      ({"messages": [{"role": "user", "content": HALF}]}, "messages[0].content"),
                      ({"messages": [{"role": "user", "content": [{"type": "image", "image": b"x"}]}]},
                       "messages[0].content[0]"),
                      ({"messages": CHAT, "tools": [{"type": "function", "function": {
                          "name": "f", "strict": True, "parameters": STRICT}}]}, "tools"),
                      ({"messages": []}, "messages"), ({"messages": [{"role": "me"}]}, "messages[0].role"),
                      ({"messages": CHAT, "parse_special": True}, "parse_special")],
             "vision": [({"images": [], "prompt": "x"}, "images"),
                        ({"images": "http://127.0.0.1/x.png", "prompt": "x"}, "images"),
                        ({"images": IMAGE, "prompt": ""}, "prompt"), ({"images": IMAGE, "prompt": HALF}, "prompt"),
                        ({"images": [IMAGE, b"x"], "prompt": "x"}, "images[1]"),
                        *(({"images": one, "prompt": "x", "allow_urls": True}, "images") for one in URLS)],
             "embed_image": [({"images": ["http://127.0.0.1/x.png"]}, "images[0]"),
                             ({"images": [IMAGE[0, 0]]}, "images[0]"), ({"images": [b"x"]}, "images[0]"),
                             ({"images": "data:image/png;base64,AAAA"}, "images"),
                             ({"images": Image.new("F", (2, 2))}, "images"),
                             ({"images": {"x": 1}.keys()}, "images"),
                             *(({"images": [one], "allow_urls": True}, "images[0]") for one in URLS)],
             "describe_image": [({"path": 5}, "path"), ({"path": __file__, "query": ""}, "query")],
             "describe_url": [({"url": "x.png"}, "url"), *(({"url": one}, "url") for one in URLS)],
             "generate_image": [({"prompt": 5}, "prompt"), ({"prompt": "x", "width": 10**6}, "width"),
                                ({"prompt": "x", "height": 7}, "height"),
                                ({"prompt": "x", "latents": [0.0]}, "latents"),
                                ({"prompt": "x", "latents": np.full((1, 4, 2, 2), np.nan)}, "latents"),
                                ({"prompt": "x", "latents": np.zeros((1, 4, 2, 2)), "n": 2}, "latents")]}


def _rows() -> Iterator[tuple[str, dict[str, Any], str]]:
    for verb, (arguments, options) in VERBS.items():
        for one in (*fields(options), *fields(of.CallOptions)):
            if one.name not in arguments:
                yield verb, {**arguments, one.name: BAD.get(one.name, -1)}, one.name
        for given, param in ARGUMENTS.get(verb, ()):
            yield verb, given, param


ROWS = list(_rows())


@pytest.fixture(scope="module")
def pool() -> Iterator[mpool.Pool]:
    with mpool.Pool(mpool.PoolConfig(offline=True)) as made:
        yield made


def _param(error: mpool.InvalidArgument) -> str:
    """Return the parameter without the place inside its value."""
    return (error.param or "").split("[")[0].split(".")[0]


def _check(caught: pytest.ExceptionInfo[mpool.InvalidArgument], param: str) -> None:
    assert caught.value.param == param or _param(caught.value) == param


@pytest.mark.parametrize(("verb", "given", "param"), ROWS, ids=lambda row: row if isinstance(row, str) else "")
def test_values_before_the_model(pool: mpool.Pool, verb: str, given: dict[str, Any], param: str) -> None:
    async def on_loop() -> None:
        made = getattr(aio, verb)(**given, model=MODEL, pool=pool)
        if verb == "embed_iter":
            async for _ in made:
                pass
        else:
            await made

    with pytest.raises(mpool.InvalidArgument) as caught:
        made = getattr(pool, verb)(**given, model=MODEL)
        if verb == "embed_iter":
            next(made, None)
    _check(caught, param)
    with pytest.raises(mpool.InvalidArgument) as caught:
        asyncio.run(on_loop())
    _check(caught, param)
    if verb in ("generate", "chat", "vision", "generate_image"):
        with pytest.raises(mpool.InvalidArgument) as caught:
            getattr(pool, verb)(**given, model=MODEL, stream=True)
        _check(caught, param)
    capability = next((name for name, verbs in _JOBS.items() if any(one.name == verb for one, _ in verbs)), None)
    if capability is not None and param not in ("progress", "temprature"):
        with pytest.raises(mpool.InvalidArgument) as caught:
            pool.submit(capability, **given, model=MODEL).result()
        _check(caught, param)


@pytest.mark.parametrize(("verb", "given"), [
    ("embed_image", {"images": ["/none.png"]}), ("vision", {"images": "/none.png", "prompt": "x"}),
    ("describe_image", {"path": "/none.png"})])
def test_missing_files_before_the_model(pool: mpool.Pool, verb: str, given: dict[str, Any]) -> None:
    with pytest.raises(mpool.errors.FileError, match="/none.png"):
        getattr(pool, verb)(**given, model=MODEL)


def test_adapters_and_templates_before_the_model(pool: mpool.Pool) -> None:
    for call in (lambda: pool.load(MODEL, adapters={"a": "/none.gguf"}), lambda: pool.load(MODEL, draft="/none.gguf"),
                 lambda: pool.register("name", MODEL, adapters={"a": "/none.gguf"})):
        with pytest.raises(mpool.errors.FileError, match="/none.gguf"):
            call()
    for template in ("{% if", "{{ messages | nofilter }}", "{{ messages is notest }}"):
        with pytest.raises(mpool.InvalidArgument) as caught:
            pool.register("name", MODEL, chat_template=template)
        assert caught.value.param == "chat_template"


#: Function -> its arguments with the model, and values that no model allows, by parameter.
FUNCTIONS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "tokenize": (("x", MODEL), {"text": 5, "add_special": "x", "parse_special": 1}),
    "detokenize": (([5], MODEL), {"ids": ["x"], "skip_special": 1}), "count_tokens": (("x", MODEL), {"text": 5}),
    "get": ((MODEL,), {"capability": "text"}), "unload": ((MODEL,), {"timeout": -1}),
    "check": ((MODEL,), {"timeout": -1}),
    "load": ((MODEL,), {"model": "http://x/y", "name": "a b", "pin": 1, "keep_alive": "soon", "compute": "int4",
                        "progress": 3, "timeout": -1, "isolation": "x", "weights": "x", "kv_dtype": "x",
                        "draft": "http://x/y", "adapters": {"a": "http://x/y"}}),
    "register": (("name", MODEL), {"name": "a b", "model": "http://x/y", "prompts": {"a": HALF},
                                   "default_prompt_name": HALF,
                                   "pooling": "sum", "normalize": 1, "max_length": 2, "chat_template": HALF,
                                   "isolation": "x", "weights": "x", "kv_dtype": "x", "draft": 5, "adapters": 5,
                                   "replace": 1}),
    "swap": (("name", MODEL), {"new": "http://x/y", "timeout": -1, "prompts": {HALF: "a"}, "pooling": "sum",
                               "max_length": "x", "weights": "x", "draft": 5})}


@pytest.mark.parametrize(("name", "param", "value"), [
    (name, param, value) for name, (_, bad) in FUNCTIONS.items() for param, value in bad.items()])
def test_values_of_functions_before_the_model(pool: mpool.Pool, name: str, param: str, value: Any) -> None:
    slots = [one for one in inspect.signature(getattr(mpool.Pool, name)).parameters if one != "self"]
    given = {**dict(zip(slots, FUNCTIONS[name][0])), param: value}
    with pytest.raises(mpool.InvalidArgument) as caught:
        getattr(pool, name)(**given)
    assert not isinstance(caught.value, TypeError), "the parameter does not exist"
    _check(caught, param)
    if name in ("load", "swap", "unload"):
        with pytest.raises(mpool.InvalidArgument) as caught:
            asyncio.run(getattr(aio, name)(**given, pool=pool))
        _check(caught, param)


@pytest.mark.parametrize(("name", "param", "value"), [
    ("Llama", "n_ctx", -5), ("Llama", "seed", "x"),
    *(("SentenceTransformer", param, value) for param, value in (
        ("device", "cuda"), ("truncate_dim", -1), ("prompts", {"a": 5}), ("default_prompt_name", 5),
        ("similarity_fn_name", "l3"), ("compute", "int4"), ("max_length", 0))),
    *(("CrossEncoder", param, value) for param, value in (
        ("device", "cuda"), ("max_length", -1), ("activation_fn", 5), ("compute", "int4")))])
def test_values_of_look_alikes_before_the_model(monkeypatch: pytest.MonkeyPatch, name: str, param: str,
                                                value: Any) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises((mpool.InvalidArgument, mpool.Unsupported)) as caught:
        getattr(llama_cpp if name == "Llama" else sentence_transformers, name)(MODEL, **{param: value})
    _check(caught, param)


@pytest.mark.parametrize(("command", "param"), [
    (["generate", "x", "--model", MODEL, "--temperature", "-1"], "temperature"),
    (["generate-image", "x", "--model", MODEL, "--width", "-5"], "width"),
    (["embed", "x", "--model", MODEL, "--dimensions", "0"], "dimensions"),
    (["rerank", "x", "y", "--model", MODEL, "--top-k", "0"], "top_k"),
    (["embed", "--file", "/none.txt", "--model", MODEL], "/none.txt"),
    (["search", "x", "--file", "/none.txt", "--model", MODEL], "/none.txt"),
    (["vision", "x", "--image", "/none.png", "--model", MODEL], "/none.png"),
    (["embed-image", "/none.png", "--model", MODEL], "/none.png"),
    (["serve", "--port", "0", "--model", MODEL, "--adapter", "x"], "adapter"),
    (["serve", "--port", "0", "--model", MODEL, "--draft", "http://x/y"], "draft"),
    (["serve", "--port", "0", "--model", MODEL, "--draft", "/none.gguf"], "/none.gguf"),
    (["serve", "--port", "0", "--model", MODEL, "--draft", "nonesuch"], "nonesuch"),
    (["generate", "x", "--model", MODEL, "--regex", "("], "regex"),
    (["embed", "x", "--model", MODEL, "--adapter", "a=/none.gguf"], "/none.gguf"),
    (["serve", "--port", "0", "--model", MODEL, "--adapter", "a=/none.gguf"], "/none.gguf"),
    (["serve", "--port", "0", "--model", MODEL, "--model", f"a b={MODEL}"], "a b"),
    (["quantize", MODEL, "/none/x.gguf", "--type", "Q4_0"], "/none/x.gguf"),
    *(([*command, "--model", MODEL], "at least one text") for command in (
        ["embed"], ["search", "x"], ["classify"], ["classify", "--tokens"]))])
def test_values_before_the_model_on_the_command_line(capsys: pytest.CaptureFixture[str],
                                                     monkeypatch: pytest.MonkeyPatch, command: list[str],
                                                     param: str) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(command) not in (0, None)
    printed = capsys.readouterr().err.replace("--", "").replace("-", "_")
    assert param in printed and "OfflineError" not in printed and "offline" not in printed


def test_the_port_before_the_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--port", "0", "--model", MODEL, "--port", str(taken.getsockname()[1])]) not in (0, None)
    assert "cannot listen" in capsys.readouterr().err

"""Every field of the request types of OpenAI's, Anthropic's and Ollama's Python clients, in requests to small models.

Each field, option and member of a union is sent once. It must be accepted, or stand in the table of its route: as
``reported`` (ignored, and named in the header ``x-mpool-ignored``) or as ``refused``, with the reason.
"""

from __future__ import annotations

import base64
import importlib
import importlib.metadata
import io
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import sdktypes
from PIL import Image

from mpool.server import bodies
from mpool.server.errors import Refusal
from mpool.server.openai.structs import ImagesRequest
from servers import Raw

pytest.importorskip("llguidance")

with io.BytesIO() as _file:
    Image.new("RGB", (8, 8)).save(_file, "PNG")
    PNG = base64.b64encode(_file.getvalue()).decode()
USER = {"role": "user", "content": "Is it?"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
#: Versions of the clients that the tables were made for. Later versions may have further fields, which the server
#: ignores and reports.
CHECKED = {"openai": "3.57.0", "anthropic": "2.13.0", "ollama": "0.6.3"}

ACCEPTED = ("accepted", "beside others that are not")
HOSTED = "OpenAI's servers run this tool, or only OpenAI's models know it; functions beside it still work"
ONLY_FUNCTIONS = "the choice names a tool that is not a function"
HOSTED_ITEM = "the item belongs to a tool that OpenAI's servers run, or that only OpenAI's models know"
ANTHROPIC_TOOL = "Anthropic's servers run this tool, or only its models know its schema; other tools still work"
ANTHROPIC_BLOCK = "the block belongs to a tool that Anthropic's servers run"
MODERATION = "the server has no moderation, and the client should know"

CHAT = {
    "messages[]:user.content[]:input_audio": ("refused", "no model hears"),
    "messages[]:user.content[]:file": ("refused", "the server reads no files of other programs"),
    "messages[]:function": ("refused", "functions before tools; deprecated since 2023"),
    "messages[]:assistant.function_call": ("reported", "functions before tools; deprecated since 2023"),
    "messages[]:assistant.audio": ("reported", "no model hears"),
    "messages[]:assistant.tool_calls[]:custom": ("refused", "a call of a tool that is not a function"),
    "function_call": ("reported", "functions before tools; deprecated since 2023"),
    "functions": ("reported", "functions before tools; deprecated since 2023"),
    "audio": ("reported", "no model speaks"), "modalities[]=audio": ("refused", "no model speaks"),
    "moderation": ("reported", MODERATION), "web_search_options": ("reported", "the server searches no web"),
    "response_format:json_schema": ("refused", "a schema is required, and the client's type has it as optional"),
    "tool_choice:custom": ("refused", ONLY_FUNCTIONS), "tools[]:custom": ("reported", HOSTED),
}
COMPLETIONS = {"suffix": ("refused", "the model of this test has no tokens to fill in the middle")}
RESPONSES = {
    "access_programs": ("reported", "programs of OpenAI"), "image": ("reported", "for images that a tool creates"),
    "background": ("refused", "there is no route to fetch the response later"),
    "background_options": ("reported", "see background"), "moderation": ("reported", MODERATION),
    "context_management": ("reported", "conversations are not shortened"),
    "conversation": ("refused", "conversations of OpenAI's servers"),
    "prompt": ("refused", "prompts that OpenAI's servers keep"),
    "previous_response_id": ("refused", "the response of this test does not exist"),
    "reasoning.context": ("reported", "templates decide what a model sees of earlier reasoning"),
    "reasoning.mode": ("reported", "models have no such modes"), "top_logprobs": ("reported", "only chat completions"),
    "input[]:user.content[]:input_image": ("refused", "the client's type has the image's URL as optional"),
    "input[]:user.content[]:input_file": ("refused", "the server reads no files of other programs"),
    "input[]:function_call_output.output[]:input_image": ("refused", "the client's type has the URL as optional"),
    "input[]:function_call_output.output[]:input_file": ("refused", "the server reads no files of other programs"),
    "input[]:": ("reported", HOSTED_ITEM),
    **{f"input[]:{name}": ACCEPTED for name in (
        "user", "message", "function_call", "function_call_output", "reasoning")},
    "input[]": ("reported", "a reference to an item that OpenAI's servers keep"),
    **{f"input[]:function_call.{name}": ("reported", "belongs to tools of OpenAI's servers") for name in (
        "async", "caller")},
    **{f"input[]:function_call_output.{name}": ("reported", "belongs to tools of OpenAI's servers") for name in (
        "name", "caller", "namespace")},
    "tool_choice:": ("refused", ONLY_FUNCTIONS),
    "tool_choice:function": ACCEPTED, "tool_choice:allowed_tools": ACCEPTED,
    "tools[]:": ("reported", HOSTED), "tools[]:function": ACCEPTED, "tools[]:namespace": ACCEPTED,
    "tools[]:namespace.tools[]:custom": ("reported", HOSTED),
}
MESSAGES = {
    **{f"messages[]:user.content[]:{name}": ("refused", "such blocks belong to the assistant") for name in (
        "thinking", "redacted_thinking", "tool_use")},
    "messages[]:user.content[]:": ("reported", ANTHROPIC_BLOCK),
    "messages[]:assistant.content[]:": ("reported", ANTHROPIC_BLOCK),
    "messages[]:user.content[]:container_upload": ("refused", "files of Anthropic's servers"),
    **{f"messages[]:assistant.content[]:{name}": ("refused", "such blocks belong to the user") for name in (
        "image", "document", "search_result", "tool_result", "container_upload")},
    **{f"messages[]:user.content[]:{name}": ACCEPTED for name in ("text", "image", "search_result", "tool_result")},
    **{f"messages[]:assistant.content[]:{name}": ACCEPTED for name in (
        "text", "thinking", "redacted_thinking", "tool_use")},
    "messages[]:user.content[]:document": ("refused", "PDF files are not read; the sources text and content are"),
    "messages[]:user.content[]:image.source:file": ("refused", "files of Anthropic's servers"),
    "messages[]:user.content[]:image.transformations": ("reported", "each model has its own size of images"),
    **{f"messages[]:user.content[]:tool_result.content[]:{name}": row for name, row in {
        "": ("refused", ANTHROPIC_BLOCK), "text": ACCEPTED, "search_result": ACCEPTED, "image": ACCEPTED,
        "image.source:file": ("refused", "files of Anthropic's servers"),
        "image.transformations": ("reported", "each model has its own size of images")}.items()},
    "messages[]:user.content[]:tool_result.toolset_name": ("reported", ANTHROPIC_TOOL),
    "messages[]:assistant.content[]:tool_use.toolset_name": ("reported", ANTHROPIC_TOOL),
    "tools[]:": ("reported", ANTHROPIC_TOOL),
    "diagnostics": ("reported", "diagnostics of Anthropic's servers"),
    "user_profile_id": ("reported", "accounts of Anthropic"), "workspace_id": ("reported", "accounts of Anthropic"),
}
OLLAMA_CHAT = {
    "options.num_ctx": ("refused", "a context of one token has no room for the prompt"),
    **{f"options.{name}": ("reported", "the library has no such sampler") for name in (
        "tfs_z", "typical_p", "mirostat")},
    "messages[]{}": ("refused", "a message has a role"),
}
OLLAMA_GENERATE = {
    **{name: row for name, row in OLLAMA_CHAT.items() if name.startswith("options.")},
    "template": ("refused", "templates of models cannot be replaced"),
    "context": ("refused", "conversations are messages; token ids would depend on the template"),
    "suffix": ("refused", "the model of this test has no tokens to fill in the middle"),
    **dict.fromkeys(("width", "height", "steps"), ("reported", "images have a route of their own")),
}


class Route(NamedTuple):
    """A route, a valid body, the client's type of a request (module and name), and the table."""

    path: str
    base: dict[str, Any]
    module: str
    name: str
    table: dict[str, tuple[str, str]]


ROUTES = {
    "chat": Route("/v1/chat/completions", {"model": "writes", "messages": [USER], "max_tokens": 1},
                  "openai.types.chat.completion_create_params", "CompletionCreateParamsNonStreaming", CHAT),
    "completions": Route("/v1/completions", {"model": "writes", "prompt": "x", "max_tokens": 1},
                         "openai.types.completion_create_params", "CompletionCreateParamsNonStreaming", COMPLETIONS),
    "embeddings": Route("/v1/embeddings", {"model": "bert", "input": "x"}, "openai.types.embedding_create_params",
                        "EmbeddingCreateParams", {}),
    "responses": Route("/v1/responses", {"model": "writes", "input": "x", "max_output_tokens": 1},
                       "openai.types.responses.response_create_params", "ResponseCreateParamsNonStreaming", RESPONSES),
    "messages": Route("/v1/messages", {"model": "writes", "messages": [USER], "max_tokens": 1},
                      "anthropic.types.message_create_params", "MessageCreateParamsNonStreaming", MESSAGES),
    "count_tokens": Route("/v1/messages/count_tokens", {"model": "writes", "messages": [USER]},
                          "anthropic.types.message_count_tokens_params", "MessageCountTokensParams",
                          {**{name: row for name, row in MESSAGES.items() if name != "diagnostics"},
                           "speed": ("reported", "the count does not depend on it")}),
    "ollama chat": Route("/api/chat", {"model": "writes", "messages": [USER], "stream": False,
                                       "options": {"num_predict": 1}}, "ollama._types", "ChatRequest", OLLAMA_CHAT),
    "ollama generate": Route("/api/generate", {"model": "writes", "prompt": "x", "stream": False,
                                               "options": {"num_predict": 1}}, "ollama._types", "GenerateRequest",
                             OLLAMA_GENERATE),
    "ollama embed": Route("/api/embed", {"model": "bert", "input": "x"}, "ollama._types", "EmbedRequest",
                          {"options.num_ctx": ("reported", "it limits completions only")}),
    "ollama embeddings": Route("/api/embeddings", {"model": "bert", "prompt": "x"}, "ollama._types",
                               "EmbeddingsRequest", {}),
}


IMAGES = Route("/v1/images/generations", {"model": "flux", "prompt": "x"}, "openai.types.image_generate_params",
               "ImageGenerateParamsNonStreaming", {
    "background=transparent": ("refused", "models draw no transparency"),
    "response_format=url": ("refused", "the server keeps no images"),
    "output_format=gif": ("refused", "one frame"), "output_format=svg": ("refused", "models draw pixels"),
    "svg": ("reported", "models draw pixels"), "complexity": ("reported", "models draw pixels"),
    "frame_count": ("reported", "one frame"), "frame_duration_ms": ("reported", "one frame"),
})


def mended(value: Any) -> Any:
    """Replace the placeholder ``x`` where a text has a format: images, arguments, roles, keys of token ids."""
    if isinstance(value, list):
        return [mended(one) for one in value]
    if not isinstance(value, dict):
        return value
    found = {name: mended(one) for name, one in value.items()}
    if isinstance(found.get("images"), list):
        found["images"] = [PNG]
    for name, wanted in (("url", f"data:image/png;base64,{PNG}"), ("image_url", f"data:image/png;base64,{PNG}"),
                         ("arguments", "{}"), ("role", "assistant"), ("keep_alive", "5m"), ("think", True),
                         ("type", "string"), ("type", ["string"]), ("size", "64x64")):
        if found.get(name) in ("x", ["x"]) and isinstance(found[name], type(wanted) if name == "type" else str):
            found[name] = wanted
    if found.get("type") == "base64" and found.get("media_type", "").startswith("image/"):
        found["data"] = PNG
    return found


def field_of(name: str) -> str:
    """Return the field of the request that a variant is in."""
    return re.split(r"[.\[{=:]", name)[0]


def body_of(route: Route, name: str, value: dict[str, Any]) -> dict[str, Any]:
    """Return a request with one variant, and what it needs: tools for a choice, a call for a result, a vision model."""
    field = field_of(name)
    body: dict[str, Any] = {**route.base, **(mended({field: value[field]}) if field != "model" else {})}
    called = {"id": "x", "function": {"name": "x", "arguments": "{}"}}
    function = {"name": "x", "parameters": SCHEMA}
    if route.path == "/v1/chat/completions":
        if field == "messages":
            body["messages"] = [USER, *([{"role": "assistant", "tool_calls": [called]}] * (":tool" in name)),
                                *body["messages"], USER]
        if field == "top_logprobs":
            body["logprobs"] = True
        if field == "tool_choice":
            body["tools"] = [{"type": "function", "function": function}]
        if field == "logit_bias":
            body["logit_bias"] = {"5": 1}
        if ":allowed_tools" in name:
            body["tool_choice"]["allowed_tools"]["tools"] = body["tools"]
    elif route.path == "/v1/completions" and field == "logit_bias":
        body["logit_bias"] = {"5": 1}
    elif route.path.startswith("/v1/messages"):
        if field == "messages":
            use = {"type": "tool_use", "id": "x", "name": "x", "input": {}}
            body["messages"] = [USER, *([{"role": "assistant", "content": [use]}] * (":tool_result" in name)),
                                *body["messages"], USER]
        if field == "tool_choice":
            body["tools"] = [{"name": "x", "input_schema": SCHEMA}]
    elif route.path == "/v1/responses":
        if field == "tool_choice":
            body["tools"] = [{"type": "function", **function}]
        if ":allowed_tools" in name:
            body["tool_choice"]["tools"] = body["tools"]
        if ":function_call_output" in name:
            body["input"] = [{"type": "function_call", "call_id": "x", "name": "x", "arguments": "{}"},
                             *({"call_id": "x", **item} for item in body["input"])]
        if field == "input" and isinstance(body["input"], list):
            body["input"] = [*body["input"], USER]
    elif route.path == "/v1/embeddings" and field == "input":
        body["allow_token_ids"] = True
    elif field == "think":
        body["model"] = "always"
    elif route.path == "/api/chat":
        body["messages"] = [*body["messages"], USER]
        body["tools"] = [{**tool, "type": "function", "function": {"name": "x", **tool.get("function", {})}}
                         for tool in body.get("tools", ())]
    if PNG in json.dumps(body):
        body["model"] = "llava"
    return body


def is_part(name: str, key: str) -> bool:
    """Return True if a variant is that of the key, or of a part of it. A key that ends with ``:`` is for all types."""
    return name == key or name.startswith(key) and (key.endswith(":") or name[len(key)] in ".[=:{")


def known(table: dict[str, tuple[str, str]], name: str) -> tuple[str, str] | None:
    """Return the row of a variant or of the field that contains it."""
    found = [key for key in table if is_part(name, key)]
    return table[max(found, key=len)] if found else None


def versions(package: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the version of a client, and the one that the tables were made for."""
    pytest.importorskip(package)
    given, checked = (tuple(int(part) for part in version.split(".")[:3])
                      for version in (importlib.metadata.version(package), CHECKED[package]))
    return given, checked


class Checked:
    """Compares the outcomes of variants with a table."""

    def __init__(self, route: Route) -> None:
        self.given, self.made_for = versions(route.module.partition(".")[0])
        self._kind, self._table = getattr(importlib.import_module(route.module), route.name), route.table
        self._names: set[str] = set()
        self._wrong: dict[str, tuple[str, object]] = {}
        self._served = 0

    def variants(self) -> Iterator[tuple[str, Any]]:
        """Yield names and values. Parts of a variant that is not accepted are left out."""
        done: set[str] = set()
        for name, value in sdktypes.variants(self._kind):
            self._names.add(name := name.removeprefix("."))
            if name and not any(is_part(name, key) for key in done):
                self._outcome = ""
                yield name, value
                if self._outcome != "accepted":
                    done.add(name)

    def add(self, name: str, outcome: str, why: object) -> None:
        """Compare the outcome of a variant: accepted, reported or refused."""
        self._outcome = outcome
        self._served += outcome == "accepted"
        expected, _ = known(self._table, name) or ("accepted", "")
        if outcome != expected and not (self.given > self.made_for and outcome == "reported"):
            self._wrong[name] = outcome, why

    def finish(self) -> None:
        assert not self._wrong, "\n".join(map(str, [*self._wrong.items()][:20]))
        assert self._served > 0
        missing = [key for key in self._table if not any(is_part(name, key) for name in self._names)]
        assert self.given != self.made_for or not missing, "rows without a field"


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ROUTES)
def test_every_field_is_accepted_or_in_the_table(server: Any, kind: str) -> None:
    route = ROUTES[kind]
    checked = Checked(route)
    with Raw(server, 60) as raw:
        for name, value in checked.variants():
            status, headers, data = raw.request(route.path, json.dumps(body_of(route, name, value)).encode()).response()
            assert status in (200, 400), (name, data)
            ignored = headers.get("x-mpool-ignored")
            checked.add(name, "refused" if status != 200 else "accepted" if ignored is None else "reported",
                        data if status != 200 else ignored)
    checked.finish()


def test_every_field_of_images(server: Any) -> None:
    """Bodies are only parsed: an image of 1536 x 1024 takes long with any model."""
    checked = Checked(IMAGES)
    for name, value in checked.variants():
        ignored: list[str] = []
        try:
            field = field_of(name)
            bodies.parse(json.dumps({**IMAGES.base, **mended({field: value[field]})}).encode(), ImagesRequest, ignored)
        except Refusal as refusal:
            checked.add(name, "refused", refusal.message)
        else:
            checked.add(name, "reported" if ignored else "accepted", ignored)
    checked.finish()

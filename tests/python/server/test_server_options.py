"""Request fields of the protocols compared with the options of the library: same names, same ranges."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
import pytest

from mpool.server import ollama as ollama_routes
from mpool.server import ollama_structs as ollama
from mpool.server.anthropic import structs as anthropic
from mpool.server.openai import structs as openai
from mpool.server.openai.response_structs import ResponsesRequest
from mpool.server.ollama_models import PARAMETERS
from mpool.tasks.options import CALL
from mpool.tasks.sampling import TABLE
from mpool.tasks.verbs import VERBS

#: Verb -> its request in OpenAI's protocol, and the options that have no field there, each with the reason.
REQUESTS: dict[str, tuple[type, dict[str, str]]] = {
    "chat": (openai.ChatRequest, {
        "compute": "a setting of the server", "capture": "writes files", "allow_urls": "a setting of the server",
        "template_options": "`chat_template_kwargs`", "adapter": "`model`: MODEL:ADAPTER",
        "context_length": "only Ollama's protocol has it: `num_ctx`"}),
    "generate": (openai.CompletionRequest, {
        "compute": "a setting of the server", "capture": "writes files",
        "parse_special": "only `raw` of Ollama's protocol has control tokens", "adapter": "`model`: MODEL:ADAPTER",
        "context_length": "only Ollama's protocol has it: `num_ctx`",
        "top_logprobs": "logprobs is a number in this protocol"}),
    "embed": (openai.EmbeddingsRequest, {
        "allow_urls": "a setting of the server", "inputs": "`input`", "compute": "a setting of the server",
        "max_inputs": "a limit of the server",
        "adapter": "`model`: MODEL:ADAPTER",
        "normalize": "`normalized`", "on_error": "a request fails as a whole",
        "precision": "`embedding_type`", "progress": "for terminals", "prompt": "task selects it",
        "prompt_name": "task selects it",
        "parse_special": "texts of clients are plain text"}),
    "rerank": (openai.RerankRequest, {
        "top_k": "`top_n`", "allow_urls": "a setting of the server", "compute": "a setting of the server",
        "truncate": "as the model's files say",
        "prompt_name": "as the model's files say", "adapter": "`model`: MODEL:ADAPTER",
        "function_to_apply": "as the model's files say; /rerank has `raw_scores`",
        "parse_special": "texts of clients are plain text"}),
    "generate_image": (openai.ImagesRequest, {
        "width": "`size`", "height": "`size`", "compute": "a setting of the server", "latents": "an array",
        "max_sequence_length": "the model's default", "preview_every": "`partial_images`"}),
}
#: Field -> option of the library that has another name.
OWN = {**{other: name for name, other in PARAMETERS.items()}, "max_completion_tokens": "max_tokens"}
#: Field -> its range in a request, where it differs from that of the library.
RANGES = {
    "max_tokens": (-1, 2**31 - 1),  # -1 is no limit
    "max_completion_tokens": (-1, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),  # clients send signed seeds
    "top_p": (0, 1),  # 0 is `top_k` 1; the library refuses other values below 1e-6
    "repetition_penalty": (0, 100),  # above 0; the library refuses values below 1e-3
    "repeat_penalty": (0, 100),  # 0 is no penalty
    "num_predict": (-2, 2**31 - 1),  # Ollama: 0, -1 and -2 mean no limit
}


def bounds(kind: Any) -> tuple[float, float] | None:
    """Return the range of an annotated number, or of the number in an optional one."""
    if get_origin(kind) is Annotated:
        low, high = ([getattr(meta, name) for meta in kind.__metadata__ for name in names
                      if getattr(meta, name, None) is not None] for names in (("ge", "gt"), ("le", "lt")))
        return (low[0], high[0]) if low and high else None
    return next((found for part in get_args(kind) if (found := bounds(part))), None) \
        if get_origin(kind) in (Union, type(int | None)) else None


@pytest.mark.parametrize("given, used", [(0, 1.0), (0.5, 0.5), (1, 1.0), (1.3, 1.3), (None, None)])
def test_a_repeat_penalty_of_0_is_no_penalty(given: float | None, used: float | None) -> None:
    context: Any = SimpleNamespace(ignore=None)
    found = ollama_routes.options_of(context, ollama.Options(repeat_penalty=given))
    assert found.get("repetition_penalty") == used


@pytest.mark.parametrize("request_", [openai.TextRequest, openai.ChatRequest, ollama.Options,
                                      anthropic.MessagesRequest, ResponsesRequest])
def test_ranges_are_those_of_the_library(request_: type) -> None:
    checked = 0
    for field in msgspec.structs.fields(request_):
        row = TABLE.get(OWN.get(field.encode_name, field.encode_name))
        if row is None or row.kind is bool:
            continue
        name = field.encode_name
        assert bounds(field.type) == RANGES.get(name, (row.low, row.high)), name
        checked += 1
    assert checked >= 9


@pytest.mark.parametrize("verb", REQUESTS)
def test_every_option_has_a_field(verb: str) -> None:
    """An option without a field is listed with a reason: a new option cannot be forgotten."""
    request_, without = REQUESTS[verb]
    known = {field.encode_name for field in msgspec.structs.fields(request_)}
    options = {*VERBS[verb].names, *(one.name for one in VERBS[verb].positional)} - set(CALL)
    assert options - known == set(without)

"""Requests and answers of Ollama's protocol, as they are on the wire.

A field that is not here is refused by its name, unless it is null; fields that are here for clients that send them, and
do nothing, say so. Durations are in nanoseconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(min_length=1)]
KeepAlive = float | str
Nanoseconds = int


class Options(Struct, forbid_unknown_fields=True):
    """How to sample. What concerns the machine (``num_ctx`` to ``main_gpu``) does nothing: the pool sees to it; nor
    does what tunes a sampler that is off. ``mirostat``, ``tfs_z`` and ``typical_p`` are refused unless they are off."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=2**31 - 1)] | None = None
    stop: Text | Annotated[list[Text], Meta(max_length=64)] | None = None
    mirostat: int | None = None
    tfs_z: float | None = None
    typical_p: float | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    repeat_last_n: int | None = None
    penalize_newline: bool | None = None
    num_ctx: int | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None
    main_gpu: int | None = None


class Request(Struct, forbid_unknown_fields=True, kw_only=True):
    """A request for a model."""

    model: Name
    options: Options | None = None
    keep_alive: KeepAlive | None = None


class TextRequest(Request, kw_only=True):
    """What both ways to generate text take. Streamed unless ``stream`` is false; ``format`` is "json" or a JSON
    schema; ``think`` is true, false, or for models that know degrees low, medium or high. ``truncate`` false: what is
    longer than the model's context is an error; else the oldest messages of a conversation that is are left out, but
    for the system's. ``shift`` does nothing: an answer ends where the context is full."""

    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    truncate: bool | None = None
    shift: bool | None = None


class GenerateRequest(TextRequest, kw_only=True):
    """A prompt; without one the model is only loaded, or unloaded by a ``keep_alive`` of 0. ``raw`` leaves the chat
    template out. ``images`` are base64. ``suffix``, ``template`` and
    ``context`` are refused."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[str] | None = None


class OllamaFunction(Struct, omit_defaults=True):
    """What is called, and with what; ``index``: which of the answer's calls."""

    name: str
    arguments: dict[str, Any]
    index: int | None = None


class OllamaCall(Struct, omit_defaults=True):
    """A call of a tool."""

    function: OllamaFunction
    id: str | None = None


class OllamaMessage(Struct, forbid_unknown_fields=True):
    """A message of a conversation; ``images`` are base64. Of the role ``tool``: the result of a call of
    ``tool_name``, or of the call ``tool_call_id``."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: Annotated[list[OllamaCall], Meta(max_length=1000)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(TextRequest, kw_only=True):
    """A conversation; without messages the model is only loaded, or unloaded. ``tools`` are functions, for models whose
    template knows tools; beside ``format`` an answer is calls of them or of that form."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=10_000)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=128)] | None = None


class EmbedRequest(Request, kw_only=True):
    """Texts to embed."""

    input: str | Annotated[list[Text], Meta(max_length=10_000)]
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None


class OllamaEmbeddingsRequest(Request, kw_only=True):
    """A text to embed, as it was once asked for."""

    prompt: str


class NameRequest(Struct, forbid_unknown_fields=True):
    """A model, by ``model`` or by ``name`` as it was once asked for; ``verbose`` does nothing."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class PullRequest(Struct, forbid_unknown_fields=True):
    """A model of the catalogue to fetch; ``insecure`` does nothing."""

    model: str | None = None
    name: str | None = None
    insecure: bool | None = None
    stream: bool | None = None


# ---- answers -------------------------------------------------------------------------------------------------------

class TopLogprob(Struct):
    """A token, its log probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class Logprob(Struct, omit_defaults=True):
    """A token of the answer, and the likeliest ones at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob] | None = None


class Counts(Struct, omit_defaults=True, kw_only=True):
    """What an answer, or a piece of it, says beside its text; counts and durations are in the last piece."""

    model: str
    created_at: str
    done: bool
    done_reason: str | None = None
    total_duration: Nanoseconds | None = None
    load_duration: Nanoseconds | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: Nanoseconds | None = None
    eval_count: int | None = None
    eval_duration: Nanoseconds | None = None
    logprobs: list[Logprob] | None = None


class GenerateAnswer(Counts, kw_only=True):
    """A text that goes on, or a piece of it."""

    response: str
    thinking: str | None = None


class OllamaAnswerMessage(Struct, omit_defaults=True):
    """The answer, or a piece of it."""

    role: str
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None


class OllamaChatAnswer(Counts, kw_only=True):
    """An answer to a conversation, or a piece of it."""

    message: OllamaAnswerMessage


class EmbedAnswer(Struct):
    """A vector for each text."""

    model: str
    embeddings: list[list[float]]
    total_duration: Nanoseconds
    load_duration: Nanoseconds
    prompt_eval_count: int


class OllamaEmbeddingsAnswer(Struct):
    """A vector."""

    embedding: list[float]


class Details(Struct):
    """What a model is."""

    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    parent_model: str = ""


class ModelRow(Struct, omit_defaults=True):
    """A model; ``expires_at``, ``size_vram`` and ``context_length`` of those that are in memory."""

    name: str
    model: str
    size: int
    digest: str
    details: Details
    modified_at: str | None = None
    expires_at: str | None = None
    size_vram: int | None = None
    context_length: int | None = None


class ModelRows(Struct):
    """Models."""

    models: list[ModelRow]


class ShowAnswer(Struct):
    """What is known of a model. The template stays with the model: no request can bring another."""

    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    license: str
    parameters: str
    template: str = ""
    modelfile: str = ""


class Progress(Struct):
    """How far a pull is."""

    status: str


class Version(Struct):
    """Of mpool."""

    version: str


__all__ = [name for name, value in list(globals().items()) if isinstance(value, type) and issubclass(value, Struct)]

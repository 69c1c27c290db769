"""Requests and responses of Ollama's protocol.

A null counts as absent. The docstrings list the fields that are accepted and have no effect. They are the descriptions
in the OpenAPI document. Durations are in nanoseconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from ..durations import MAX_CHARS
from .fields import Fields, ImageTokens, Name, Stops, Text

KeepAlive = float | Annotated[str, Meta(max_length=MAX_CHARS)]
Nanoseconds = int


class Options(Fields):
    """Sampling options. The samplers ``mirostat``, ``tfs_z`` and ``typical_p`` are ignored. ``mirostat_tau``,
    ``mirostat_eta``, ``repeat_last_n``, ``penalize_newline``, ``draft_num_predict`` and ``num_keep`` are
    ignored, and so are the hardware options (``num_batch`` to ``main_gpu``): mpool manages the hardware itself.
    ``num_ctx`` is the maximum number of tokens of the prompt and the completion together, as far as the context of the
    model allows; less than 4 counts as 4. ``num_predict``: 0, -1 and -2 mean no limit but that of the server. With
    ``top_p`` 0, only the most likely token is sampled. ``repeat_penalty`` 0 means no penalty. ``image_tokens`` (an
    extension) is the maximum number of tokens per image, for models that have a choice (Gemma 4)."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=2**31 - 1)] | None = None
    stop: Text | Stops | None = None
    mirostat: int | None = None
    tfs_z: float | None = None
    typical_p: float | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    repeat_last_n: int | None = None
    penalize_newline: bool | None = None
    draft_num_predict: int | None = None
    num_ctx: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
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
    image_tokens: ImageTokens | None = None


class Request(Fields, kw_only=True):
    """Base of the requests that use a model."""

    model: Name
    options: Options | None = None
    keep_alive: KeepAlive | None = None


class TextRequest(Request, kw_only=True):
    """Fields of the requests that generate text. The response is streamed unless ``stream`` is false. ``format`` is
    "json" or a JSON schema. ``think`` is true or false, or low, medium or high for models with reasoning levels. When a
    conversation exceeds the context window of the model, the oldest messages except system messages are dropped; with
    ``truncate`` false, the request fails instead. ``shift`` is ignored: a completion ends when the context is full."""

    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    truncate: bool | None = None
    shift: bool | None = None


class GenerateRequest(TextRequest, kw_only=True):
    """A prompt to complete. A request without a prompt loads the model, or unloads it if ``keep_alive`` is 0. With
    ``raw``, the chat template is skipped, and names of control tokens in the prompt become those tokens. ``images`` are
    base64. With ``suffix``, the completion belongs between the prompt and the suffix. ``template`` and ``context`` are
    refused."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[str] | None = None


class OllamaFunction(Fields, omit_defaults=True):
    """Name of a function and its arguments. ``index``: index of the tool call in the response."""

    name: Text
    arguments: dict[str, Any]
    index: int | None = None


class OllamaToolCall(Fields, omit_defaults=True):
    """A tool call."""

    function: OllamaFunction
    id: str | None = None
    type: str | None = None


class EarlierFunction(Fields):
    """Name of a function that was called, and its arguments: an object, or JSON text. ``index`` is ignored."""

    name: Text
    arguments: dict[str, Any] | str
    index: int | None = None


class EarlierToolCall(Fields):
    """A tool call of an earlier message. ``type`` is ignored."""

    function: EarlierFunction
    id: str | None = None
    type: str | None = None


class OllamaMessage(Fields):
    """A message of a conversation. ``images`` are base64. A message with the role ``tool`` contains the result of the
    tool ``tool_name``, or of the tool call ``tool_call_id``. A message with the role ``thinking`` contains the
    reasoning of the message of the assistant that follows; ``developer`` counts as ``system``."""

    role: Literal["system", "developer", "user", "assistant", "tool", "thinking"]
    content: str = ""
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: Annotated[list[EarlierToolCall], Meta(max_length=1000)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(TextRequest, kw_only=True):
    """A conversation to complete. A request without messages loads or unloads the model. ``tools`` are functions; the
    chat template of the model must support tools. With ``tools`` and ``format``, a completion has either tool calls or
    text in that format. ``messages`` may be a text (an extension), which is one message of the user."""

    messages: str | Annotated[list[OllamaMessage], Meta(max_length=10_000)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=128)] | None = None


class EmbedRequest(Request, kw_only=True):
    """Texts to embed. As in Ollama, an empty ``input`` has no embedding, and an empty text in a list has one."""

    input: str | Annotated[list[str], Meta(max_length=10_000)]
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None


class OllamaEmbeddingsRequest(Request, kw_only=True):
    """A text to embed, for the former route ``/api/embeddings``."""

    prompt: str


class NameRequest(Fields):
    """A model name in ``model``, or in its former spelling ``name``. ``verbose`` is ignored."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class PullRequest(Fields):
    """A model of the catalogue to download. ``insecure`` is ignored."""

    model: str | None = None
    name: str | None = None
    insecure: bool | None = None
    stream: bool | None = None


class CopyRequest(Fields):
    """A model or alias, and its further name, which lasts as long as the server."""

    source: Name
    destination: Name


class CreateRequest(Fields, kw_only=True):
    """A further name of the model or alias ``from``, with a system message for conversations without one, and with
    defaults of options. It lasts as long as the server. ``license`` is ignored. ``template``, ``adapters``, ``files``,
    ``quantize`` and ``messages`` are refused."""

    model: str | None = None
    name: str | None = None
    source: Name = field(name="from")
    system: str | None = None
    parameters: Options | None = None
    stream: bool | None = None
    license: Any = None
    template: str | None = None
    adapters: dict[str, str] | None = None
    files: dict[str, str] | None = None
    quantize: str | None = None
    messages: list[dict[str, Any]] | None = None


# ---- responses -----------------------------------------------------------------------------------------------------

class TopLogprob(Struct):
    """A token with its log probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class Logprob(Struct, omit_defaults=True):
    """A token of the completion, and the most likely alternatives at its position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob] | None = None


class ResponseFields(Struct, omit_defaults=True, kw_only=True):
    """Fields of a response or stream chunk in addition to its text. Only the last chunk has counts and durations."""

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


class GenerateResponse(ResponseFields, kw_only=True):
    """A completion of a prompt, or its next part in a stream."""

    response: str
    thinking: str | None = None


class OllamaResponseMessage(Struct, omit_defaults=True):
    """The message of the assistant, or its next part in a stream."""

    role: str
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None


class OllamaChatResponse(ResponseFields, kw_only=True):
    """A completion of a conversation, or its next part in a stream."""

    message: OllamaResponseMessage


class EmbedResponse(Struct):
    """One embedding per text."""

    model: str
    embeddings: list[list[float]]
    total_duration: Nanoseconds
    load_duration: Nanoseconds
    prompt_eval_count: int


class OllamaEmbeddingsResponse(Struct):
    """The embedding of a text."""

    embedding: list[float]


class Details(Struct):
    """Format, family and size of a model."""

    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    parent_model: str = ""


class ModelRow(Struct, omit_defaults=True):
    """A model. Only models in memory have ``expires_at``, ``size_vram`` and ``context_length``."""

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
    """A list of models."""

    models: list[ModelRow]


class ShowResponse(Struct):
    """The description of a model. ``system`` is that of an alias. ``template`` contains ``.Suffix`` if the model fills
    in the middle, because Continue looks for it; otherwise ``template`` is empty, as requests cannot replace the chat
    template. ``modelfile`` is always empty."""

    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    license: str
    parameters: str
    system: str = ""
    template: str = ""
    modelfile: str = ""


class Progress(Struct, omit_defaults=True):
    """Progress of a download. ``total``, ``completed``: bytes, of one digest per download."""

    status: str
    digest: str | None = None
    total: int | None = None
    completed: int | None = None


class Version(Struct):
    """The version of mpool."""

    version: str


__all__ = [name for name, value in list(globals().items()) if isinstance(value, type) and issubclass(value, Struct)]

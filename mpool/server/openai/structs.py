"""Requests and responses of OpenAI's protocol.

A null counts as absent. The docstrings list the fields that are accepted and have no effect. They are the descriptions
in the OpenAPI document.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from ..fields import ConstraintFields, Fields, ImageTokens, MaxTokens, Name, SamplingFields, Stops, Text, Token

Count = Annotated[int, Meta(ge=1, le=128)]
#: One text, its token ids, or a list of either.
Inputs = Text | Annotated[list[Text | Token | Annotated[list[Token], Meta(min_length=1)]],
                          Meta(min_length=1, max_length=1_000_000)]


# ---- models --------------------------------------------------------------------------------------------------------

class ModelCard(Struct):
    """A model, or a model with an adapter.

    ``capabilities`` is an extension of OpenAI's API; ``root``, ``parent`` and ``max_model_len`` are those of vLLM's
    API. ``root``: name of the model without the adapter; ``parent``: the same, but null for a model without an adapter.
    ``max_model_len``: length of the context of a language model, prompt and completion together; null for others.
    """

    id: str
    created: int
    capabilities: list[str]
    root: str
    parent: str | None = None
    max_model_len: int | None = None
    object: str = "model"
    owned_by: str = "mpool"


class ModelList(Struct):
    """The models that clients can use."""

    data: list[ModelCard]
    object: str = "list"


# ---- vectors -------------------------------------------------------------------------------------------------------

class ImageURL(Fields):
    """An image as ``data:image/png;base64,...``, or at an https URL if the server runs with ``--allow-image-urls``.
    In a conversation with a model that has a choice of tokens per image, ``detail`` selects the smallest number
    (``low``), the one above the usual number (``high``) or the largest one (``original``); it is ignored otherwise."""

    url: str
    detail: str | None = None


class InputPart(Fields, kw_only=True):
    """A text or an image, as a content part of OpenAI's API or as an object of Jina's. An image is base64, a data URL,
    or an https URL if the server runs with ``--allow-image-urls``."""

    type: Literal["text", "image_url", "image"] | None = None
    text: str | None = None
    image: str | None = None
    image_url: ImageURL | str | None = None


class InputObject(InputPart, kw_only=True):
    """An input: a text, an image or both (the image comes first), as in Jina's API, or ``content``: a list of parts."""

    content: Annotated[list[InputPart], Meta(min_length=1, max_length=1000)] | None = None


#: Type of the numbers of an embedding, as in Jina's API.
EmbeddingType = Literal["float", "base64", "binary", "ubinary"]
#: Values of ``task`` in Jina's API that are names of a model's own adapters or prompts.
JinaTask = Literal["retrieval.query", "retrieval.passage", "text-matching", "classification", "separation",
                   "clustering", "code.query", "code.passage"]


class EmbeddingsRequest(Fields):
    """Texts, images or both together to embed: ``input``, or as in vLLM's API ``messages``, a conversation that is one
    input: at most one message of the system (the instruction) and one of the user, and an empty one of the assistant.
    ``user``, ``add_special_tokens``, ``add_generation_prompt`` and ``continue_final_message`` are ignored. Token
    ids in ``input`` are refused unless ``allow_token_ids`` is true, the server allows them, or the model's
    vocabulary is OpenAI's cl100k_base: ids of another vocabulary would silently give wrong vectors. In LangChain's
    OpenAIEmbeddings, set ``check_embedding_ctx_length=False``.

    Jina's API has texts and images as objects, ``embedding_type`` (``binary`` and ``ubinary``: signs, eight per byte),
    ``normalized``, ``truncate``, ``return_multivector`` (one vector per token) and further values of ``task``.
    ``late_chunking`` must be false."""

    model: Name
    input: Text | InputObject | Annotated[
        list[Text | Token | Annotated[list[Token], Meta(min_length=1)] | InputObject],
        Meta(min_length=1, max_length=1_000_000)] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    task: Literal["query", "document"] | JinaTask | None = None
    allow_token_ids: bool | None = None
    user: str | None = None
    embedding_type: EmbeddingType | Annotated[list[EmbeddingType], Meta(min_length=1, max_length=1)] | None = None
    normalized: bool | None = None
    truncate: bool | None = None
    return_multivector: bool = False
    late_chunking: bool | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=3)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class MultiVectorRequest(Fields, kw_only=True):
    """Texts whose tokens are embedded, as in Jina's API. ``user`` is ignored."""

    model: Name
    input: Text | InputObject | Annotated[list[Text | InputObject], Meta(min_length=1, max_length=1_000_000)]
    input_type: Literal["query", "document"] = "document"
    embedding_type: EmbeddingType | Annotated[list[EmbeddingType], Meta(min_length=1, max_length=1)] = "float"
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    truncate: bool | None = None
    user: str | None = None


class MultiVector(Struct):
    """One vector per token of a text."""

    index: int
    embeddings: list[list[float] | str]
    object: str = "embeddings"


class Embedding(Struct):
    """An embedding: numbers, or base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class InputUsage(Struct):
    """Token counts of the inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(Struct):
    """One embedding per text."""

    data: list[Embedding]
    model: str
    usage: InputUsage
    object: str = "list"


class MultiVectorResponse(Struct):
    """The vectors of the tokens of each text."""

    data: list[MultiVector]
    model: str
    usage: InputUsage
    object: str = "list"


class Document(Struct):
    """The text of a ranked document; empty for an image."""

    text: str


class RerankRequest(Fields):
    """Documents to rank by relevance to a query, which may have images if the model reads images. ``prompt`` (an
    extension) says what makes a document relevant, for rerankers that are language models."""

    model: Name
    query: Text | InputObject
    documents: Annotated[list[Text | InputObject], Meta(min_length=1, max_length=10_000)]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool = False
    prompt: str | None = None


class RankedResult(Struct, omit_defaults=True):
    """A document with its score. ``index``: position of the document in the request."""

    index: int
    relevance_score: float
    document: Document | None = None


class RerankResponse(Struct):
    """The documents, sorted by decreasing relevance."""

    id: str
    model: str
    results: list[RankedResult]
    usage: dict[str, int]


# ---- text ----------------------------------------------------------------------------------------------------------

class StreamOptions(Fields):
    """Options of a streamed response. With ``include_usage``, the last stream chunk has the token counts.
    ``include_obfuscation`` is ignored."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Usage(Struct):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class TextRequest(ConstraintFields, kw_only=True):
    """Fields of completion and chat requests: those of OpenAI's API, and further sampling options of mpool.

    ``metadata``, ``store``, ``service_tier``, ``user``, ``safety_identifier``, ``prompt_cache_key``,
    ``prompt_cache_retention`` and ``prompt_cache_options`` are ignored.
    """

    model: Name
    max_tokens: MaxTokens | None = None
    stop: Text | Stops | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


class CompletionRequest(TextRequest, kw_only=True):
    """A prompt to complete: text, token ids, or a list of either. With ``suffix``, the completion belongs between the
    prompt, which must be text, and the suffix; the vocabulary of the model must have tokens for this. A ``best_of``
    that differs from ``n`` is refused."""

    prompt: Inputs
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Count | None = None
    suffix: str | None = None


class FillInRequest(SamplingFields, kw_only=True):
    """A prompt to continue, and with ``suffix`` the text after the completion, as in Mistral's API. ``random_seed`` is
    the ``seed``. ``metadata`` is ignored."""

    model: Name
    prompt: Text
    suffix: str | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    stop: Text | Stops | None = None
    stream: bool | None = None
    random_seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    metadata: dict[str, Any] | None = None


class CompletionLogprobs(Struct):
    """For each token: its text, its log probability, the most likely alternatives, and its offset in characters."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(Struct):
    """A completion, or its next part in a stream."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class CompletionResponse(Struct):
    """The completions of all prompts: ``n`` completions of the first prompt, then ``n`` of the second, and so on."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None | UnsetType = UNSET
    object: str = "text_completion"


class Part(Fields, tag_field="type", kw_only=True):
    """Base of the parts of a message. ``cache_control`` and ``prompt_cache_breakpoint`` are ignored: the prefix cache
    needs no marks."""

    cache_control: Any = None
    prompt_cache_breakpoint: Any = None


class TextPart(Part, tag="text", kw_only=True):
    """A text part of a message."""

    text: str


class RefusalPart(Part, tag="refusal", kw_only=True):
    """A refusal of the assistant. It counts as text."""

    refusal: str


class ImagePart(Part, tag="image_url", kw_only=True):
    """An image part of a message. A text is the ``url``."""

    image_url: ImageURL | str


class VideoPart(Part, tag="video", kw_only=True):
    """The frames of a video, each base64 or a data URL of an image, and their times: ``fps``, the number of frames per
    second, or ``timestamps`` in seconds (an extension)."""

    video: Annotated[list[str], Meta(min_length=1, max_length=1000)]
    fps: float | None = None
    timestamps: Annotated[list[float], Meta(max_length=1000)] | None = None


class VideoURLPart(Part, tag="video_url", kw_only=True):
    """A video file. It is refused: clients send frames as a part of the type ``video``."""

    video_url: Any = None


class FunctionCall(Fields):
    """Name of a function, and its arguments as JSON text."""

    name: Text
    arguments: str


class MessageToolCall(Struct):
    """A tool call in the message of a response."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class EarlierToolCall(Fields):
    """A tool call in an earlier message of the assistant. ``index``, which some clients keep from a stream, is
    ignored."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | None = None


class Message(Fields, omit_defaults=True):
    """A message of a conversation. A message with the role ``tool`` contains the result of the tool call
    ``tool_call_id``. ``reasoning`` is another name of ``reasoning_content``. ``reasoning_details``, ``annotations`` and
    ``cache_control`` are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | ImagePart | RefusalPart | VideoPart | VideoURLPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[EarlierToolCall], Meta(max_length=1000)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: Any = None
    annotations: Any = None
    cache_control: Any = None


#: Messages of a conversation; a text (an extension) is one message of the user.
Messages = Text | Annotated[list[Message], Meta(min_length=1, max_length=10_000)]


def turns_of(messages: str | list[Message]) -> list[Message]:
    """Return the messages of a conversation."""
    return [Message("user", messages)] if isinstance(messages, str) else messages


class ChatRequest(TextRequest, kw_only=True):
    """A conversation to complete.

    - ``messages`` may be a text (an extension), which is one message of the user.
    - ``tools`` are functions; the chat template of the model must support tools.
    - ``tool_choice`` is auto, none, required or ``{"type": "function", "function": {"name": ...}}``.
    - ``response_format``: with tools, it applies to completions without tool calls.
    - ``reasoning_effort`` sets the reasoning level (``minimal`` counts as low, ``xhigh`` and ``max`` as high), or turns
      thinking on or off, as far as the chat template supports it. Models that always think refuse ``none``.
    - ``chat_template_kwargs`` (an extension) are variables of the chat template, which take precedence over
      ``reasoning_effort``.
    - ``continue_final_message`` and ``add_generation_prompt`` (of vLLM): the completion continues the last message, or
      the prompt does not end with the start of a message of the assistant. They exclude each other.
    - ``image_tokens`` (an extension) is the maximum number of tokens per image, for models that have a choice (Gemma
      4); it takes precedence over ``detail`` of images. ``max_soft_tokens`` in ``mm_processor_kwargs`` (of vLLM) means
      the same.
    - ``verbosity``, ``prediction`` and ``modalities`` (only text) are ignored."""

    messages: Messages
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=128)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    prediction: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    image_tokens: ImageTokens | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class TopToken(Struct):
    """A token with its log probability and its bytes, which may end inside a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(Struct):
    """A token of the completion, and the most likely alternatives at its position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopToken]


class ChatLogprobs(Struct):
    """Log probabilities of the tokens."""

    content: list[ChatToken]
    refusal: None = None


class ResponseMessage(Struct):
    """The completion. ``content`` is null if the completion consists of tool calls. ``reasoning_content``: reasoning of
    the model, if its chat template separates the reasoning from the content."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MessageToolCall] | UnsetType = UNSET


ToolCallLimit = Literal["max_tool_calls", "repeated_tool_calls"]


class ChatChoice(Struct):
    """A completion of a conversation. ``stop_reason`` is an extension of OpenAI's API: the limit of tool calls that
    ended the completion, if one did."""

    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: ToolCallLimit | UnsetType = UNSET


class ChatResponse(Struct):
    """The completions of a conversation."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"


class FunctionDelta(Struct, omit_defaults=True):
    """Delta of a function call: the name, in the first chunk only, and the next part of the arguments."""

    name: str | None = None
    arguments: str | None = None


class CallDelta(Struct, omit_defaults=True):
    """Delta of a tool call. Only the first chunk of a tool call has ``id`` and ``type``."""

    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: FunctionDelta | None = None


class Delta(Struct, omit_defaults=True):
    """Delta of a message: the text and tool calls that a stream chunk adds."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(Struct):
    """Delta of one of the completions. ``stop_reason``: see :class:`ChatChoice`."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    stop_reason: ToolCallLimit | UnsetType = UNSET


class ChatChunk(Struct):
    """A stream chunk of a chat completion."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None | UnsetType = UNSET
    object: str = "chat.completion.chunk"


# ---- images --------------------------------------------------------------------------------------------------------

class ImagesRequest(Fields, kw_only=True):
    """Images to generate. ``negative_prompt``, ``seed``, ``num_inference_steps`` and ``guidance_scale`` are extensions
    of OpenAI's API. ``quality``, ``style``, ``moderation``, ``safety_identifier`` and ``user`` are ignored."""

    prompt: Annotated[str, Meta(min_length=1, max_length=1_000_000)]
    model: Name
    n: Count | None = None
    size: Annotated[str, Meta(pattern=r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$")] | None = None
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, Meta(ge=0, le=100)] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Meta(ge=0, le=3)] | None = None
    background: Literal["auto", "opaque"] | None = None
    negative_prompt: str | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    guidance_scale: Annotated[float, Meta(ge=0, le=1000)] | None = None
    quality: str | None = None
    style: str | None = None
    moderation: str | None = None
    safety_identifier: str | None = None
    user: str | None = None


class ImageData(Struct):
    """An image file as base64."""

    b64_json: str


class ImagesResponse(Struct):
    """The generated images. ``seed``: seed that was used."""

    created: int
    data: list[ImageData]
    size: str
    output_format: str
    seed: int
    background: str = "opaque"


class ImageUsage(Struct):
    """Token counts. They are 0: the generation of an image counts no tokens. Clients require them."""

    input_tokens_details: dict[str, int]
    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0


class ImageEvent(Struct, omit_defaults=True):
    """A preview (``image_generation.partial_image``) or the final image (``image_generation.completed``). Only the
    latter has ``seed`` and ``usage``."""

    type: str
    b64_json: str
    created_at: int
    size: str
    output_format: str
    quality: str
    background: str
    partial_image_index: int | None = None
    seed: int | None = None
    usage: ImageUsage | None = None


__all__ = [name for name, value in list(globals().items()) if isinstance(value, type) and issubclass(value, Struct)]

"""Verbs: name, parameters, options and documentation of every request, each said once.

The functions of the module, the methods of :class:`mpool.Pool` and :class:`mpool.Model`, those of :mod:`mpool.aio`,
their signatures, their documentation and the committed stubs (``python -m mpool._stubs``) are made from these.
Light: imports neither numpy nor the core.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

from ..checks import nearest, refuse, unknown_option
from ..names import CAPABILITIES
from . import options as _options
from .options import CallOptions

REQUIRED: Any = inspect.Parameter.empty
#: Question about an image when the caller asks none.
DESCRIBE = "Describe the image."
MODEL = "str | os.PathLike[str] | Model | None"


class Parameter(NamedTuple):
    """A parameter that may be passed by position: name, type, documentation, default."""

    name: str
    type: str
    doc: str
    default: Any = REQUIRED


def _model(doc: str, default: Any = None) -> Parameter:
    return Parameter("model", MODEL if default is None else MODEL.removesuffix(" | None"), doc, default)


@dataclass(frozen=True, eq=False)
class Verb:
    """One kind of request.

    Attributes:
        name: of the function.
        capability: capability that the model must have.
        positional: parameters that may be passed by position.
        options: dataclass of its own keywords, beside :class:`CallOptions`.
        returns: type of the result.
        stream: type of the result with ``stream=True``, and of that in :mod:`mpool.aio`; None: the verb has no streams.
        text: documentation, with ``{args}`` in the place of the parameters.
        accepts: names that ``options`` does not list and that have an error of their own.
        method: positional parameters as a method of :class:`mpool.Model`, if not those without ``model``.
    """

    name: str
    capability: str
    positional: tuple[Parameter, ...]
    options: type
    returns: str
    text: str
    stream: tuple[str, str] | None = None
    accepts: frozenset[str] = frozenset()
    method: tuple[Parameter, ...] | None = None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every keyword: own options with their aliases, then those of every request."""
        return _options.names_of(self.options)

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset((*(one.name for one in self.positional), *self.names, *self.accepts,
                          *(("stream",) if self.stream else ())))

    def bind(self, args: tuple[Any, ...], keywords: Mapping[str, Any],
             positional: tuple[Parameter, ...] | None = None) -> dict[str, Any]:
        """Arguments by name.

        Raises:
            TypeError: a parameter is missing, given twice, or there are too many by position.
            InvalidArgument: there is no such option; the nearest is named.
        """
        slots = self.positional if positional is None else positional
        if len(args) > len(slots):
            raise TypeError(f"{self.name}() takes {len(slots)} positional arguments, got {len(args)}")
        given = {slot.name: value for slot, value in zip(slots, args)}
        if keywords:
            for name in keywords:
                if name in given:
                    raise TypeError(f"{self.name}() got multiple values for argument {name!r}")
            given.update(keywords)
        for slot in slots:
            if slot.default is REQUIRED and slot.name not in given:
                raise TypeError(f"{self.name}() is missing the argument {slot.name!r}")
        if not given.keys() <= self._known:
            named = {slot.name for slot in slots}
            for name in given:
                if name not in self._known and name not in named:
                    self.refuse(name)
        return given

    def refuse(self, name: str) -> None:
        """Raises the error for an option that does not exist."""
        raise unknown_option(name, (*(one.name for one in self.positional), *self.names), of=self.name)

    # ---- signatures and documentation ----------------------------------------------------------------------------

    def keywords(self, stream: bool = True) -> Iterator[tuple[str, str, Any]]:
        """(name, type, default) of every keyword."""
        if self.stream and stream:
            yield "stream", "bool", False
        for group in (self.options, CallOptions):
            for found in fields(group):
                yield found.name, str(found.type), found.default
                for alias in found.metadata.get("aliases", ()):
                    yield alias, str(found.type), found.default

    def slots(self, form: str) -> tuple[Parameter, ...]:
        """Positional parameters as a ``"function"`` or as a ``"model"``'s method."""
        if form != "model":
            return self.positional
        return self.method or tuple(one for one in self.positional if one.name != "model")

    def signature(self, form: str) -> inspect.Signature:
        """As a ``"function"``, a method of a ``"pool"`` or of a ``"model"``, or a function of ``"aio"``."""
        kind = inspect.Parameter
        found = [kind("self", kind.POSITIONAL_OR_KEYWORD)] if form in ("pool", "model") else []
        slots = self.slots(form)
        found += [kind(one.name, kind.POSITIONAL_OR_KEYWORD, default=one.default, annotation=one.type)
                  for one in slots]
        taken = {one.name for one in slots}
        found += [kind(name, kind.KEYWORD_ONLY, default=default, annotation=type_)
                  for name, type_, default in self.keywords() if name not in taken]
        if form == "aio":
            found.append(kind("pool", kind.KEYWORD_ONLY, default=None, annotation="Pool | None"))
        return inspect.Signature(found, return_annotation=self.result(form))

    def result(self, form: str, stream: bool | None = None) -> str:
        """Type of what the verb returns in a form; ``stream`` None: either."""
        streams = None if self.stream is None else self.stream[form == "aio"]
        if form != "aio":
            whole = self.returns
        elif self.name == "embed_iter":
            return "AsyncIterator[NDArray[Any]]"
        else:
            whole = f"Awaitable[{self.returns}]"
        if streams is None or stream is False:
            return whole
        return streams if stream else f"{whole} | {streams}"

    @cached_property
    def doc(self) -> str:
        """Documentation, every parameter with its default."""
        lines = []
        for slot in self.positional:
            lines.append((slot.name, slot.doc))
        if self.stream:
            lines.append(("stream", f"True: a :class:`mpool.{self.stream[0]}` instead of the whole result (False)."))
        for group in (self.options, CallOptions):
            for found in fields(group):
                aliases = found.metadata.get("aliases", ())
                default = found.metadata.get("shown") or repr(found.default)
                also = f" Also: {', '.join(f'``{name}``' for name in aliases)}." if aliases else ""
                lines.append((found.name, f"{found.metadata['doc']} (default: {default}){also}"))
        wrapped = [textwrap.fill(f"{name}: {doc}", 112, initial_indent=" " * 4, subsequent_indent=" " * 8,
                                 break_long_words=False, break_on_hyphens=False) for name, doc in lines]
        return self.text.replace("{args}", "Args:\n" + "\n".join(wrapped))


def check_capability(capability: Any) -> None:
    """Raises InvalidArgument unless it is a capability; the nearest is named."""
    if not isinstance(capability, str) or capability not in CAPABILITIES:
        near = nearest(capability, CAPABILITIES, 1) if isinstance(capability, str) else []
        allowed = "one of " + ", ".join(CAPABILITIES)
        refuse("capability", capability, allowed, hint=f"Did you mean {near[0]}?" if near else None)


#: Names of either kind of request for text: one that is wrong for a raw prompt, or for a chat, has an error of its own.
_TEXT = frozenset((*_options.names_of(_options.GenerateOptions), *_options.names_of(_options.TextOptions)))
_INPUTS = "str | Sequence[str] | Sequence[Sequence[int]]"
_TASK = Parameter("task", 'Literal["query", "document"] | None', "", None)

EMBED = Verb(
    'embed', 'text_embedding', (
        Parameter('inputs', 'str | Sequence[str] | Sequence[Sequence[int]]',
              'a text of 1 to 1,000,000 characters; a list (tuple, array, Series) of texts; or a list of '
              'lists of token ids, which are used unchanged: no prompt, no added tokens, no truncation.'),
        _model('a key of the catalogue, a name given by :func:`load` or :func:`register`, a path, a reference '
             'such as ``"org/name"``, or a :class:`mpool.Model`; None: all-MiniLM-L6-v2.'),
    ), _options.EmbedOptions, 'NDArray[Any]',
    text=r"""Embeds a text, or a list of texts.

The same text, model, options and version give the same bytes, whatever else is in the request or runs beside it.

{args}

Returns:
    ``(d,)`` for a text, ``(n, d)`` for a list; float32, or int8 or uint8 as ``precision`` says, with d/8 bytes
    (rounded up) for the binary ones.

Raises:
    InvalidArgument: an argument or a text is invalid; ``param``, ``got`` and ``allowed`` say which and why.
    LimitError: there are more texts than ``max_inputs``.
    ContextOverflow: with ``truncate=False``, a text exceeds the model's maximum length; carries both lengths.
    UnknownModel, WrongCapability: the model does not exist, or has another capability; the nearest name is given.
    OfflineError, DownloadError, IntegrityError: the model is not on this machine and could not be downloaded.
    Timeout: the deadline passed. Nothing is left running.
    Overloaded: with ``fail_fast``, the model's queue is full.
    MemoryExhausted, NumericError, ShuttingDown: see :mod:`mpool.errors`.

Example:
    >>> vectors = mpool.embed(["A cat sits on the mat.", "A dog barks.", "Shares fell."])
    >>> vectors.shape, vectors.dtype.name
    ((3, 384), 'float32')
    >>> query = mpool.embed("Where is the cat?", task="query")
    >>> int(mpool.similarity(query, vectors).argmax())
    0

Source:
    Names and conventions follow ``SentenceTransformer.encode``
    (https://sbert.net/docs/package_reference/sentence_transformer/model.html).
""",
    method=(Parameter('inputs', _INPUTS, ''), _TASK),)

EMBED_ITER = Verb(
    'embed_iter', 'text_embedding', (
        Parameter('iterable', 'Iterable[str]',
              'texts; a generator, a file, a column of a table.'),
        _model('a key of the catalogue, a name given by :func:`load` or :func:`register`, a path, a reference '
             'such as ``"org/name"``, or a :class:`mpool.Model`.'),
    ), _options.EmbedIterOptions, 'EmbedIterator',
    text=r"""Embeds any number of texts, lazily and in order.

The iterator reads at most a few thousand texts ahead and tokenises the next texts while the core computes the last
ones, so memory does not grow with the length. Leaving early cancels the requests in flight.

{args}

Returns:
    An iterator and context manager, with the counts ``done`` and ``failed``. It raises the errors of :func:`embed`;
    an invalid text raises when the iteration reaches it, after the vectors before it.

Example:
    >>> lines = (f"Line {number}." for number in range(3000))
    >>> sum(1 for vector in mpool.embed_iter(lines))
    3000
""",
    method=(Parameter('texts', 'Iterable[str]', ''), _TASK),)

EMBED_IMAGE = Verb(
    'embed_image', 'image_embedding', (
        Parameter('images', 'ImageInput | Sequence[ImageInput]',
              'a path; the bytes of a file; base64 text or a ``data:`` URL; a URL (see ``allow_urls``); a '
              'Pillow image; an array ``[height, width, 3]`` (or 1 or 4 channels, or none) of uint8, or of '
              'floats from 0 to 1; or a list of these. Files are PNG, JPEG or WebP of at most 64 MiB, '
              '67,108,864 pixels, 2 to 32,768 a side, one side at most 200 times the other, with one frame.'),
        _model('a model for image_embedding, named as for :func:`embed`. There is no default, because the right '
             'one depends on the task: DINOv2 compares images, CLIP and SigLIP compare images with texts.'),
    ), _options.ImageOptions, 'NDArray[Any]',
    text=r"""Embeds an image, or a list of images.

Models such as CLIP and SigLIP embed texts into the same space: :func:`similarity` compares these vectors with those
of :func:`embed` with the same model. Images are prepared as the model's files say, to the bit as transformers' image
processors do with Pillow: rotated upright, transparency on white, resized, cropped, normalised.

{args}

Returns:
    ``(d,)`` for an image, ``(n, d)`` for a list; float32, or as ``precision`` says.

Raises:
    InvalidArgument: an argument or an image is invalid; ``param``, ``got`` and ``allowed`` say which and why.
    FileError, DownloadError: a path cannot be read, or a URL cannot be fetched.
    LimitError: there are more images than ``max_inputs``.
    UnknownModel, WrongCapability, OfflineError, Timeout, Overloaded: as for :func:`embed`.

Source:
    Preparation: https://huggingface.co/docs/transformers/main_classes/image_processor
""",)

RERANK = Verb(
    'rerank', 'text_embedding', (
        Parameter('query', 'str',
              'a text of 1 to 1,000,000 characters.'),
        Parameter('documents', 'Sequence[str]',
              'a list (tuple, array, Series) of such texts.'),
        _model('a cross-encoder: a folder or reference of a sequence classifier with one label (BERT, RoBERTa, '
             'XLM-RoBERTa, ModernBERT, MPNet, GTE), a language model whose folder declares it a reranker '
             '(Qwen3-Reranker, as sentence-transformers saves it), or a GGUF file of a reranker. There is no '
             'default.', REQUIRED),
    ), _options.RerankOptions, 'Ranking',
    text=r"""Ranks documents by relevance to a query, with a cross-encoder.

{args}

Returns:
    A :class:`mpool.tasks.rerank.Ranking`: the documents, best first, with scores and indices. Scores equal those of
    ``CrossEncoder.predict`` of sentence-transformers and do not depend on the other documents.

Raises:
    InvalidArgument: an argument or a text is invalid.
    LimitError: there are more documents than ``PoolConfig.max_embed_inputs``.
    WrongCapability: the model is no reranker.
    ContextOverflow: with ``truncate=False``, a pair exceeds the model's maximum length.
    UnknownModel, OfflineError, Timeout, Overloaded: as for :func:`embed`.
""",)

GENERATE = Verb(
    'generate', 'text_to_text', (
        Parameter('prompt', 'str | Sequence[int]',
              "a text of 1 to 1,000,000 characters, to which the model's BOS token is prepended if the model "
              'uses one; or token ids, used unchanged.'),
        _model('as for :func:`embed`; None: SmolLM2-135M-Instruct.'),
    ), _options.GenerateOptions, 'Completion',
    text=r"""Continues a text.

The prompt goes to the model unchanged; for instructions and conversations, :func:`chat` applies the model's chat
template. The same seed gives the same tokens, whatever else runs.

{args}

Returns:
    A :class:`mpool.Completion`; with ``stream=True`` a :class:`mpool.Stream`.

Raises:
    InvalidArgument: an option does not exist (the nearest is named) or is out of range, or the prompt is empty, too
        long or not text.
    ContextOverflow: the prompt fills the model's context; carries both lengths.
    UnknownModel, WrongCapability, OfflineError, Timeout, Overloaded: as for :func:`embed`.

Example:
    >>> done = mpool.generate("The capital of France is", temperature=0, max_tokens=4)
    >>> done.text, done.finish_reason, done.usage.completion_tokens
    (' Paris.\n\n', 'length', 4)
    >>> for chunk in mpool.generate("One, two, three,", temperature=0, max_tokens=6, stream=True):
    ...     print(chunk, end="")
     four, five, six,

Source:
    Names follow vLLM's SamplingParams (https://docs.vllm.ai/en/latest/api/vllm/sampling_params.html) and OpenAI's
    completions.
""",
    stream=('Stream', 'AsyncStream'),
    accepts=_TEXT,)

CHAT = Verb(
    'chat', 'text_to_text', (
        Parameter('messages', 'Sequence[Mapping[str, Any]]',
              'dicts ``{"role": ..., "content": ...}``; roles are system, developer, user, assistant, tool; '
              'content is a text, or a list of parts ``{"type": "text", "text": ...}``. For a vision model a part '
              'may be an image, ``{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}`` or '
              '``{"type": "image", "image": ...}`` with any input of :func:`embed_image`; or a message has '
              '``"images": [...]``. An assistant message may have ``tool_calls``, as OpenAI and Ollama write '
              'them; their results are messages of the role tool with ``tool_call_id`` or ``name``.'),
        _model('as for :func:`generate`.'),
    ), _options.TextOptions, 'Completion',
    text=r"""Generates the next message of a conversation.

The model's chat template makes the prompt. The text of a control token inside a message stays plain text.

{args}

Returns:
    As :func:`generate`; append ``message`` of the result to ``messages`` to continue. A model's reasoning (Qwen3's
    ``<think>``, all channels of GPT-OSS but the final one) is in ``reasoning`` of results and stream chunks, not in
    ``text``; stop strings and ``max_tokens`` apply to both. With a ``response_format`` and no tools, the model
    answers without reasoning.

    With ``tools``, function calls are in ``tool_calls``, and ``finish_reason`` is ``"tool_calls"``. With the extra
    ``grammar`` they are valid by construction: the model can write only its own tool-call format, the given names,
    and arguments that fit the schema and have no other properties. Schema keywords that a grammar cannot enforce
    (``uniqueItems``, unknown formats) are refused for strict tools and ignored for others. Without the extra, calls
    are parsed: text that is no valid call of a given function stays text, and no call can be required. With a
    ``response_format`` as well (JSON or a regular expression), a response is either calls or that format; for models
    whose calls have no marker (Llama 3), the JSON cannot begin with a property ``name``.

Raises:
    InvalidArgument: messages or tools are invalid, a schema cannot be used, or tools are combined with a
        ``response_format`` that excludes them, with ``min_tokens`` or with ``ignore_eos``.
    LimitError: there are more than 128 tools, or their JSON has more than 262,144 characters.
    Unsupported: the model has no chat template, the template declares no tools, a call is required without the extra
        ``grammar``, or a message has images and the model has no image encoder.
    TemplateError: the template refuses the conversation.
    ContextOverflow, UnknownModel, WrongCapability, OfflineError, Timeout, Overloaded: as for :func:`generate`.

Example:
    >>> messages = [{"role": "user", "content": "Say hello."}]
    >>> answer = mpool.chat(messages, temperature=0, max_tokens=2)
    >>> answer.text.startswith("Hello")
    True
    >>> messages.append(answer.message)

Source:
    Shape of messages: https://platform.openai.com/docs/api-reference/chat
""",
    stream=('Stream', 'AsyncStream'),
    accepts=_TEXT,)

VISION = Verb(
    'vision', 'vision', (
        Parameter('images', 'ImageInput | Sequence[ImageInput]',
              'an image, or a list of them; each a path, a URL if allowed, bytes of a PNG, JPEG or WebP file, '
              'base64 text, a Pillow image, or an array ``[height, width, 3]`` of uint8 or of floats from 0 '
              'to 1.'),
        Parameter('prompt', 'str',
              'the question.'),
        _model('a vision model, named as for :func:`embed`.'),
    ), _options.TextOptions, 'Completion',
    text=r"""Answers a question about images.

One turn of :func:`chat` whose message is the images followed by the text. Encoded images are cached by content: a
second question about an image, also beside other images, does not encode it again.

{args}

Returns:
    As :func:`generate`. ``usage.prompt_tokens`` counts one token per row of an encoded image.

Raises:
    InvalidArgument: an image is missing, corrupt or beyond a limit, the prompt is empty, or an option is invalid.
    FileError, DownloadError: an image cannot be read or fetched.
    ContextOverflow: prompt and images exceed the model's context; carries both lengths.
    WrongCapability: the model has no image encoder.
    Unsupported: the model has no chat template.
    UnknownModel, OfflineError, Timeout, Overloaded: as for :func:`generate`.

Example:
    >>> def ask(photo):  # the model is a folder, as transformers saves LLaVA
    ...     return mpool.vision(photo, "What is on the table?", "models/llava-1.5-7b", max_tokens=100).text

Source:
    Visual instruction tuning, https://arxiv.org/abs/2310.03744
""",
    stream=('Stream', 'AsyncStream'),
    accepts=_TEXT,)

DESCRIBE_IMAGE = Verb(
    'describe_image', 'vision', (
        Parameter('path', 'str | os.PathLike[str]',
              'path of a PNG, JPEG or WebP file; URLs are refused.'),
        Parameter('query', 'str',
              'the question.', DESCRIBE),
        _model('a key of the catalogue, a name given by :func:`load` or :func:`register`, a path, a reference '
             'such as ``"org/name"``, or a :class:`mpool.Model`.'),
    ), _options.TextOptions, 'str',
    text=r"""Describes an image file: the text of :func:`vision`.

{args}

Returns:
    The text. Raises the errors of :func:`vision`.
""",
    accepts=_TEXT,)

DESCRIBE_URL = Verb(
    'describe_url', 'vision', (
        Parameter('url', 'str',
              'http or https URL of a PNG, JPEG or WebP file.'),
        Parameter('query', 'str',
              'the question.', DESCRIBE),
        _model('a key of the catalogue, a name given by :func:`load` or :func:`register`, a path, a reference '
             'such as ``"org/name"``, or a :class:`mpool.Model`.'),
    ), _options.TextOptions, 'str',
    text=r"""Describes the image at an http or https URL, which is fetched: the text of :func:`vision`.

{args}

Returns:
    The text. Raises the errors of :func:`vision`.
""",
    accepts=_TEXT,)

GENERATE_IMAGE = Verb(
    'generate_image', 'text_to_image', (
        Parameter('prompt', 'str',
              'description of the image. A text encoder truncates a prompt that is too long, with a warning, as '
              'in diffusers.'),
        _model('a diffusers folder (``model_index.json``) of FLUX.1 or Stable Diffusion 3 / 3.5, or a hub '
             'repository with one; a GGUF file of the transformer inside such a folder (T5 may be a GGUF '
             'file in its own folder there); or a :class:`mpool.Model`.'),
    ), _options.GenerateImageOptions, 'GeneratedImages',
    text=r"""Generates images from a text.

Text encoders, transformer and decoder are loaded when they are needed and hand their memory to each other when it is
short. The encoders' outputs for a prompt are cached. The same seed gives the same image.

{args}

Returns:
    :class:`mpool.GeneratedImages`: ``.image`` is a PIL image, ``.array`` is float32 ``(height, width, 3)`` from 0 to
    1; notebooks display it. With ``stream=True`` a :class:`mpool.ImageStream`.

Raises:
    InvalidArgument: an option does not exist (the nearest is named) or is out of range, or the model cannot generate
        that size (the nearest possible size is named).
    MemoryExhausted: the largest stage does not fit into memory.
    UnknownModel, WrongCapability, OfflineError, Timeout, Overloaded: as for :func:`embed`.

Example::

    image = mpool.generate_image("a lighthouse at dusk", "./FLUX.1-schnell", seed=7)
    image.save("lighthouse.png")

Source:
    Names follow diffusers' pipelines (https://huggingface.co/docs/diffusers/api/pipelines/flux).
""",
    stream=('ImageStream', 'AsyncImageStream'),)

VERBS = {verb.name: verb for verb in (EMBED, EMBED_ITER, EMBED_IMAGE, RERANK, GENERATE, CHAT, VISION, DESCRIBE_IMAGE,
                                      DESCRIBE_URL, GENERATE_IMAGE)}

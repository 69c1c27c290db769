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

from ..checks import nearest, shown, unknown_option
from ..errors import InvalidArgument
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
        capability: what the model must be for.
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
        raise InvalidArgument(f"capability is {shown(capability)}" + (f"; the nearest is {near[0]}" if near else "")
                              + ", allowed: " + ", ".join(CAPABILITIES))


#: Names of either kind of request for text: one that is wrong for a raw prompt, or for a chat, has an error of its own.
_TEXT = frozenset((*_options.names_of(_options.GenerateOptions), *_options.names_of(_options.TextOptions)))
_INPUTS = "str | Sequence[str] | Sequence[Sequence[int]]"
_TASK = Parameter("task", 'Literal["query", "document"] | None', "", None)

EMBED = Verb(
    'embed', 'text_embedding', (
        Parameter('inputs', 'str | Sequence[str] | Sequence[Sequence[int]]',
              'a text of 1 to 1,000,000 characters; a list (tuple, array, Series) of texts; or a list of '
              'lists of token ids, which are taken as they are: no prompt, no added tokens, no cut.'),
        _model('a key of the catalogue, a name given by :func:`load` or :func:`register`, a path, a reference '
             'such as ``"org/name"``, or a :class:`mpool.Model`; None: all-MiniLM-L6-v2.'),
    ), _options.EmbedOptions, 'NDArray[Any]',
    text=r"""Embeds a text, or a list of texts.

A vector does not depend on what else is in the call or runs beside it: the same text, model, options and version
give the same bytes.

{args}

Returns:
    ``(d,)`` for a text, ``(n, d)`` for a list; float32, or int8 or uint8 as ``precision`` says, with d/8 bytes
    (rounded up) for the binary ones.

Raises:
    InvalidArgument: an argument or a text is not as described; the message says which and what was allowed.
    LimitError: more texts than ``max_inputs``.
    ContextOverflow: ``truncate=False``, and a text is longer than the model takes; carries both lengths.
    UnknownModel, WrongCapability: no such model, or it is for something else; the nearest is named.
    OfflineError, DownloadError, IntegrityError: the model is not here and could not be fetched.
    Timeout: no answer in time. Nothing is left running.
    Overloaded: ``fail_fast``, and as many calls wait for the model as may.
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

The iterable is read a few thousand texts ahead at most, the next texts are tokenised while the last ones are
computed, and memory does not grow with the length. Leaving early cancels what is in flight.

{args}

Returns:
    an iterator and context manager, with the counts ``done`` and ``failed``.

Raises:
    as :func:`embed`; faults of texts at the place in the iteration where they occur, with the texts before
    already given.

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
        _model('as for :func:`embed`, for image_embedding. There is no default: which vectors are good depends '
             'on what they are for (DINOv2 for how images look, CLIP and SigLIP for what texts say of them).'),
    ), _options.ImageOptions, 'NDArray[Any]',
    text=r"""Embeds an image, or a list of images.

Models such as CLIP and SigLIP embed texts into the same space: :func:`embed` with the same model gives vectors that
:func:`similarity` compares with these. An image is prepared as the model's files say, as transformers' image
processors on Pillow do it: turned upright, transparency put onto white, resized, cropped, normalised.

{args}

Returns:
    ``(d,)`` for an image, ``(n, d)`` for a list; float32, or as ``precision`` says.

Raises:
    InvalidArgument: an argument or an image is not as described; the message says which and what was allowed.
    FileError, DownloadError: a path cannot be read, a URL cannot be fetched.
    LimitError: more images than ``max_inputs``.
    UnknownModel, WrongCapability, OfflineError, Timeout, Overloaded, ...: as for :func:`embed`.

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
             'XLM-RoBERTa, ModernBERT, MPNet, GTE), a model of text whose folder says that it is one '
             '(Qwen3-Reranker, as sentence-transformers saves it), or a GGUF file of a reranker. There is no '
             'default.', REQUIRED),
    ), _options.RerankOptions, 'Ranking',
    text=r"""Ranks documents by relevance to a query, with a cross-encoder.

{args}

Returns:
    A :class:`mpool.tasks.rerank.Ranking`: the documents, best first, with scores and places. Scores equal those of
    ``CrossEncoder.predict`` of sentence-transformers, and do not depend on the other documents.

Raises:
    InvalidArgument: an argument or a text is not as described.
    LimitError: more documents than ``PoolConfig.max_embed_inputs``.
    WrongCapability: the model gives vectors or text, not scores.
    ContextOverflow: a pair is too long and not to be cut.
    And what :func:`embed` raises about models and pools.
""",)

GENERATE = Verb(
    'generate', 'text_to_text', (
        Parameter('prompt', 'str | Sequence[int]',
              "a text of 1 to 1,000,000 characters, before which the model's BOS token is put if it wants "
              'one; or token ids, taken as they are.'),
        _model('as for :func:`embed`; None: SmolLM2-135M-Instruct.'),
    ), _options.GenerateOptions, 'Completion',
    text=r"""Continues a text.

The prompt goes to the model as it is; for instructions and conversations, :func:`chat` puts them into the form
that the model was trained on. The same seed gives the same tokens, whatever else runs.

{args}

Returns:
    a :class:`mpool.Completion`; with ``stream=True`` a :class:`mpool.Stream`.

Raises:
    InvalidArgument: an option is unknown (the nearest is named) or out of range, or the prompt is empty, too long
        or not text.
    ContextOverflow: the prompt leaves no room for an answer; carries both lengths.
    UnknownModel, WrongCapability, OfflineError, Timeout, ...: as for :func:`embed`.

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
              'content is a text, or a list of ``{"type": "text", "text": ...}``. For a model that reads '
              'images a part may be one, ``{"type": "image_url", "image_url": {"url": '
              '"data:image/png;base64,..."}}`` or ``{"type": "image", "image": ...}`` with what '
              ':func:`embed_image` takes; or a message has ``"images": [...]``. An assistant\'s may have '
              '``tool_calls``, as OpenAI and Ollama write them; their results are messages of the role tool, '
              'with ``tool_call_id``, or ``name``.'),
        _model('as for :func:`generate`.'),
    ), _options.TextOptions, 'Completion',
    text=r"""Answers a conversation.

The model's own chat template makes the prompt. What messages say is plain text there: the text of a control token
in them is no control token.

{args}

Returns:
    as :func:`generate`; ``message`` of the result is ready to be appended to ``messages``. What a model thinks
    before it answers (Qwen3's ``<think>``, GPT-OSS's channels but for the final one) is not in ``text`` but in
    ``reasoning``, of results and of the pieces of a stream; stop strings and ``max_tokens`` count in both. With a
    ``response_format``, and no tools, it answers without.

    With ``tools``, the calls that the model asks for are in ``tool_calls``, and ``finish_reason`` is
    ``"tool_calls"``. With the extra ``grammar`` they are valid by construction: nothing can be written but the
    model's own form of calls, names that were given, and arguments that fit the schema, without properties that it
    does not list. Keywords that a grammar cannot keep (``uniqueItems``, unknown formats) are refused of tools that
    are strict, and not kept of others. Without the extra, calls are parsed: what is none, or calls what was not
    given, is text; nothing can be required. With a ``response_format`` as well, JSON or a regular expression, an
    answer is calls or that, and no other text; of models whose calls have no mark (Llama 3), JSON that cannot
    begin with a property ``name``.

Raises:
    InvalidArgument: the messages or tools are not as described, a schema cannot be used, or tools are given with a
        ``response_format`` that cannot stand beside them, ``min_tokens`` or ``ignore_eos``.
    LimitError: there are more tools than 128, or they are larger than 262,144 characters as JSON.
    Unsupported: the model has no chat template, tools are given and the template does not speak of any, a call is
        required and the extra ``grammar`` is not installed, or a message has images and the model reads text only.
    TemplateError: the template refuses the conversation.
    others as for :func:`generate`.

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
              'what is asked.'),
        _model('a model that reads images, given as for :func:`embed`.'),
    ), _options.TextOptions, 'Completion',
    text=r"""Answers a question about images.

One turn of :func:`chat` whose message is the images, then the text. What the model makes of an image is kept by the
image's content: another question about it, also together with other images, does not look at it again.

{args}

Returns:
    as :func:`generate`. ``usage.prompt_tokens`` counts a token for each row of an image.

Raises:
    InvalidArgument: an image is none, broken or beyond a limit, the prompt is empty, or an option is wrong.
    FileError, DownloadError: an image that cannot be read.
    ContextOverflow: the images are more tokens than the model takes; carries both lengths.
    WrongCapability: the model reads text only.
    Unsupported: the model has no chat template.
    others as for :func:`generate`.

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
              'of a PNG, JPEG or WebP file; never a URL.'),
        Parameter('query', 'str',
              'what is asked.', DESCRIBE),
        _model('a key of the catalogue, a name given by :func:`load` or :func:`register`, a path, a reference '
             'such as ``"org/name"``, or a :class:`mpool.Model`.'),
    ), _options.TextOptions, 'str',
    text=r"""Describes an image file: the text of :func:`vision`.

{args}

Raises:
    as :func:`vision`.
""",
    accepts=_TEXT,)

DESCRIBE_URL = Verb(
    'describe_url', 'vision', (
        Parameter('url', 'str',
              'of a PNG, JPEG or WebP file.'),
        Parameter('query', 'str',
              'what is asked.', DESCRIBE),
        _model('a key of the catalogue, a name given by :func:`load` or :func:`register`, a path, a reference '
             'such as ``"org/name"``, or a :class:`mpool.Model`.'),
    ), _options.TextOptions, 'str',
    text=r"""Describes the image at an http or https URL, which is fetched: the text of :func:`vision`.

{args}

Raises:
    InvalidArgument: no such URL.
    others as :func:`vision`.
""",
    accepts=_TEXT,)

GENERATE_IMAGE = Verb(
    'generate_image', 'text_to_image', (
        Parameter('prompt', 'str',
              'description of the image. What is too long for a text encoder is cut off, with a warning, as in '
              'diffusers.'),
        _model('a folder of diffusers (``model_index.json``) of FLUX.1 or Stable Diffusion 3 / 3.5, or a '
             'repository of the hub with one; a GGUF file of their transformer inside such a folder (T5 may '
             'be one in its own folder there); or what :func:`load` and :func:`get` return.'),
    ), _options.GenerateImageOptions, 'GeneratedImages',
    text=r"""Generates images from a text.

Text encoders, transformer and decoder are loaded when they are needed and give their memory to each other when it
is short; what the encoders made of a text is kept for the next call. The same seed gives the same image.

{args}

Returns:
    :class:`mpool.GeneratedImages`: ``.image`` is a PIL image, ``.array`` float32 (height, width, 3) from 0 to 1;
    notebooks show it. With ``stream=True`` a :class:`mpool.ImageStream`.

Raises:
    InvalidArgument: an option is unknown (the nearest is named) or out of range, or the model cannot make images
        of that size (the nearest it can is named).
    MemoryExhausted: the largest stage does not fit into memory.
    UnknownModel, WrongCapability, OfflineError, Timeout, ...: as for :func:`embed`.

Example::

    image = mpool.generate_image("a lighthouse at dusk", "./FLUX.1-schnell", seed=7)
    image.save("lighthouse.png")

Source:
    Names follow diffusers' pipelines (https://huggingface.co/docs/diffusers/api/pipelines/flux).
""",
    stream=('ImageStream', 'AsyncImageStream'),)

VERBS = {verb.name: verb for verb in (EMBED, EMBED_ITER, EMBED_IMAGE, RERANK, GENERATE, CHAT, VISION, DESCRIBE_IMAGE,
                                      DESCRIBE_URL, GENERATE_IMAGE)}

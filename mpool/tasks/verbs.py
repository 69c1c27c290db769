"""Verbs: the single definition of the name, parameters, options and documentation of every kind of request.

The functions of :mod:`mpool` and :mod:`mpool.aio`, the methods of :class:`mpool.Pool` and :class:`mpool.Model`, their
signatures and documentation, and the committed stubs (``python -m mpool.api.stubs``) are generated from these
definitions. This module imports neither NumPy nor the C core, which keeps ``import mpool`` fast.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from ..checks import bad_arguments, nearest, refuse, unknown_option
from ..host.lazy import cached_property
from ..names import CAPABILITIES
from . import options as _options
from .options import CallOptions

REQUIRED: Any = inspect.Parameter.empty
#: Default question about an image.
DESCRIBE = "Describe the image."
MODEL = "str | os.PathLike[str] | Model | None"


class Parameter(NamedTuple):
    """A parameter that may be passed by position.

    Attributes:
        name: parameter name.
        type: type annotation, as source text.
        doc: description for the ``Args`` section.
        default: default value; :data:`REQUIRED` if there is none.
    """

    name: str
    type: str
    doc: str
    default: Any = REQUIRED


def _model(doc: str) -> Parameter:
    """Return the parameter ``model``; None is the default model."""
    return Parameter("model", MODEL, doc, None)


@dataclass(frozen=True, eq=False)
class Verb:
    """Definition of one kind of request.

    Attributes:
        name: function name.
        capability: capability that the model must have.
        positional: parameters that may be passed by position.
        options: dataclass of the verb's own keyword options; :class:`CallOptions` are accepted in addition.
        returns: result type, as source text.
        text: docstring template; ``{args}`` is replaced by the description of all parameters.
        stream: result types with ``stream=True``, in :mod:`mpool` and in :mod:`mpool.aio`; None: the verb cannot
            stream.
        accepts: dataclasses whose options pass :meth:`bind` although the verb does not have them, because a later check
            raises a specific error.
        method: positional parameters of the method of :class:`mpool.Model`; None: ``positional`` without ``model``.
        single: type of the first parameter and of the result for one input, as source text, if they differ from those
            for a list of inputs; None: one result type.
    """

    name: str
    capability: str
    positional: tuple[Parameter, ...]
    options: type
    returns: str
    text: str
    stream: tuple[str, str] | None = None
    accepts: tuple[type, ...] = ()
    method: tuple[Parameter, ...] | None = None
    single: tuple[str, str] | None = None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of all keywords: the verb's options, then those of :class:`CallOptions`."""
        return _options.names_of(self.options)

    @cached_property
    def _known(self) -> frozenset[str]:
        accepted = (name for options in self.accepts for name in _options.names_of(options))
        return frozenset((*(one.name for one in self.positional), *self.names, *accepted,
                          *(("stream",) if self.stream else ())))

    def bind(self, args: tuple[Any, ...], keywords: Mapping[str, Any],
             positional: tuple[Parameter, ...] | None = None) -> dict[str, Any]:
        """Return all arguments of a function call by name.

        Args:
            args: positional arguments.
            keywords: keyword arguments.
            positional: parameters that may be passed by position; None: those of the verb.

        Raises:
            InvalidCall: a parameter is missing or given twice, there are too many positional arguments, or an option
                does not exist; the error suggests the most similar one.
        """
        slots = self.positional if positional is None else positional
        given = {slot.name: value for slot, value in zip(slots, args)}
        if len(args) > len(slots) or not given.keys().isdisjoint(keywords):
            self._refuse_call(slots, args, keywords)
        given.update(keywords)
        if not given.keys() <= self._known:
            named = {slot.name for slot in slots}
            for name in given:
                if name not in self._known and name not in named:
                    self.refuse(name)
        for slot in slots:
            if slot.default is REQUIRED and slot.name not in given:
                self._refuse_call(slots, args, keywords)
        return given

    def _refuse_call(self, slots: tuple[Parameter, ...], args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Raise the error for arguments that are too many, given twice or missing."""
        names = [slot.name for slot in slots]
        error = bad_arguments(self.name, names, [*names, *self.names],
                              [slot.name for slot in slots if slot.default is REQUIRED], args, keywords)
        assert error is not None
        if self.name == "rerank" and error.param == "documents" and _are_pairs(args[0] if args else None):
            error.hint = "For the pairs of one query: rerank(query, [document, ...]). For other pairs of texts: " \
                         "classify(pairs, model)"
        raise error

    def refuse(self, name: str) -> None:
        """Raise the error for an unknown option."""
        raise unknown_option(name, (*(one.name for one in self.positional), *self.names), of=self.name)

    # ---- signatures and documentation ----------------------------------------------------------------------------

    def keywords(self, stream: bool = True) -> Iterator[tuple[str, str, Any]]:
        """Yield (name, type, default) of every keyword; ``stream``: include the keyword ``stream`` if there is one."""
        if self.stream and stream:
            yield "stream", "bool", False
        for group in (self.options, CallOptions):
            for found in fields(group):
                yield found.name, str(found.type), found.default

    def slots(self, form: str) -> tuple[Parameter, ...]:
        """Return the parameters that may be passed by position; ``form`` as in :meth:`signature`."""
        if form == "aio":
            return tuple(one._replace(type=f"{one.type} | " + one.type.replace("Iterable", "AsyncIterable"))
                         if one.type.startswith("Iterable") else one for one in self.positional)
        if form != "model":
            return self.positional
        return self.method or tuple(one for one in self.positional if one.name != "model")

    def signature(self, form: str) -> inspect.Signature:
        """Return the signature of one form of the verb.

        Args:
            form: ``"function"`` (in :mod:`mpool`), ``"aio"`` (in :mod:`mpool.aio`), or ``"pool"`` or ``"model"``
                (methods).
        """
        kind = inspect.Parameter
        found = [kind("self", kind.POSITIONAL_OR_KEYWORD)] if form in ("pool", "model") else []
        slots = self.slots(form)
        if self.single is not None:
            slots = (slots[0]._replace(type=f"{self.single[0]} | {slots[0].type}"), *slots[1:])
        found += [kind(one.name, kind.POSITIONAL_OR_KEYWORD, default=one.default, annotation=one.type)
                  for one in slots]
        taken = {one.name for one in slots}
        found += [kind(name, kind.KEYWORD_ONLY, default=default, annotation=type_)
                  for name, type_, default in self.keywords() if name not in taken]
        if form == "aio":
            found.append(kind("pool", kind.KEYWORD_ONLY, default=None, annotation="Pool | None"))
        return inspect.Signature(found, return_annotation=self.result(form))

    def result(self, form: str, stream: bool | None = None, single: bool | None = None) -> str:
        """Return the result type of one form of the verb, as source text.

        Args:
            form: as in :meth:`signature`.
            stream: value of the argument ``stream``; None: unknown, which gives the union of both types.
            single: True if the request has one input and no list; None: unknown, which gives the union of both types.
        """
        streams = None if self.stream is None else self.stream[form == "aio"]
        whole = self.returns
        if self.single is not None and single is not False:
            whole = self.single[1] if single else f"{self.single[1]} | {whole}"
        if form == "aio":
            if self.name == "embed_iter":
                return "AsyncIterator[Any]"
            whole = f"Awaitable[{whole}]"
        if streams is None or stream is False:
            return whole
        return streams if stream else f"{whole} | {streams}"

    @cached_property
    def doc(self) -> str:
        """Docstring of the function, with the description and default of every parameter."""
        lines = []
        for slot in self.positional:
            lines.append((slot.name, slot.doc))
        if self.stream:
            lines.append(("stream", f"True: return a :class:`mpool.{self.stream[0]}` at once; False: wait for the "
                                    "complete result. (default: False)"))
        for group in (self.options, CallOptions):
            for found in fields(group):
                default = found.metadata.get("shown") or repr(found.default)
                lines.append((found.name, f"{found.metadata['doc']} (default: {default})"))
        wrapped = [textwrap.fill(f"{name}: {doc}", 112, initial_indent=" " * 4, subsequent_indent=" " * 8,
                                 break_long_words=False, break_on_hyphens=False) for name, doc in lines]
        return self.text.replace("{args}", "Args:\n" + "\n".join(wrapped))


def _are_pairs(value: Any) -> bool:
    """Return True for a list of pairs, which cross-encoders of other libraries take."""
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], (list, tuple)) \
        and len(value[0]) == 2


def check_capability(capability: Any) -> None:
    """Raise InvalidArgument, with the most similar capability as hint, unless ``capability`` is one."""
    if not isinstance(capability, str) or capability not in CAPABILITIES:
        near = nearest(capability, CAPABILITIES, 1) if isinstance(capability, str) else []
        allowed = "one of " + ", ".join(CAPABILITIES)
        refuse("capability", capability, allowed, hint=f"Did you mean {near[0]}?" if near else None)


#: Options of all text-generation verbs. :meth:`Verb.bind` lets ``generate`` pass the options of ``chat``, and the
#: reverse: a later check raises an error that names the right function.
_TEXT = (_options.GenerateOptions, _options.TextOptions)
_INPUTS = "str | Sequence[str] | Sequence[Sequence[int]]"
_MIXED = "Input | Sequence[Input] | Sequence[Sequence[int]]"
_ITEMS = "Iterable[Input | Sequence[int]]"
_TASK = Parameter("task", 'Literal["query", "document"] | None', "", None)

EMBED = Verb(
    'embed', 'text_embedding', (
        Parameter('inputs', _MIXED,
              'a text of at most 1,000,000 characters; a list, tuple, array or pandas Series of texts; or a list of '
              'lists, tuples or arrays of token ids of this model, which are used unchanged: without prompt, special '
              'tokens and truncation. The texts of control tokens (``"[SEP]"``, ``"<|im_end|>"``) are plain text, '
              'unless ``parse_special`` is True. With a model that embeds images, an input may also be a dict with '
              '``"text"``, ``"image"`` (an image as for :func:`embed_image`) or both; each may be a list. Models such '
              'as Qwen3-VL-Embedding embed both together, CLIP and SigLIP a text or an image.'),
        _model('a catalogue key, a name assigned with :func:`load` or :func:`register`, a path, a reference '
             'such as ``"org/name"``, or a :class:`mpool.Model`; None: all-MiniLM-L6-v2.'),
    ), _options.EmbedOptions, 'NDArray[Any]',
    text=r"""Embeds a text or a list of texts, with some models also of images.

The result is deterministic: the same text, model, options and mpool version give the same bytes on the same machine,
whatever other texts are in the request and whatever else runs at the same time. ``compute="float32-fast"`` is the
exception.

{args}

Returns:
    Array of shape ``(d,)`` for a text, ``(n, d)`` for a list of n texts. The dtype is float32, or follows
    ``precision``: int8 for ``"int8"`` and ``"binary"``, uint8 for ``"uint8"`` and ``"ubinary"``. Binary vectors have
    d/8 bytes, rounded up.

Raises:
    InvalidArgument: an argument or a text is invalid; ``param``, ``got`` and ``allowed`` say which one and why.
    LimitError: there are more texts than ``max_inputs``.
    ContextOverflow: with ``truncate=False``, a text exceeds the model's maximum length; the error has both lengths.
    UnknownModel, WrongCapability: the model does not exist or has another capability; the error suggests a model.
    OfflineError, DownloadError, IntegrityError: the model is not on this machine and could not be downloaded.
    Timeout: the time limit passed. The request is cancelled.
    Overloaded: with ``fail_fast``, the model's queue is full, or other requests hold the memory for now.
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
    method=(Parameter('inputs', _MIXED, ''), _TASK),)

EMBED_ITER = Verb(
    'embed_iter', 'text_embedding', (
        Parameter('texts', _ITEMS,
              'texts, with a model of texts and images such as Qwen3-VL-Embedding also dicts, or lists, '
              'tuples or arrays of token ids as for :func:`embed`, from any iterable, such as a '
              'generator, an open text file or a column of a table. The first item decides: all are texts, or all are '
              'token ids. In :mod:`mpool.aio` also an asynchronous iterable.'),
        _model('a catalogue key, a name assigned with :func:`load` or :func:`register`, a path, a reference '
             'such as ``"org/name"``, or a :class:`mpool.Model`; None: all-MiniLM-L6-v2.'),
    ), _options.EmbedIterOptions, 'EmbedIterator',
    text=r"""Embeds any number of texts, lazily and in order: dense vectors, or with ``output`` others.

The iterator reads at most 4,097 texts ahead and tokenizes the next texts while the core computes earlier ones. Its
memory use does not depend on the number of texts. Closing the iterator early cancels the requests in flight.

{args}

Returns:
    Iterator over the results of single texts or of batches, which is also a context manager and counts texts in
    ``done`` and ``failed``. It raises the errors of :func:`embed`, or of the function of ``output``. The error of an
    invalid text is raised when the iteration reaches the text; the results of many texts before it are yielded first.

Example:
    >>> lines = (f"Line {number}." for number in range(3000))
    >>> sum(1 for vector in mpool.embed_iter(lines))
    3000
    >>> [batch.values.shape[1] for batch in mpool.embed_iter(["One.", "Two."], output="tokens", batch_size=1)]
    [384, 384]
""",
    method=(Parameter('texts', _ITEMS, ''), _TASK),)

EMBED_IMAGE = Verb(
    'embed_image', 'image_embedding', (
        Parameter('images', 'ImageInput | Sequence[ImageInput]',
              'an image or a list of images. An image is a path; the bytes of a file; base64 text or a ``data:`` '
              'URL; a URL (see ``allow_urls``); a Pillow image; or an array of shape ``(height, width)`` or '
              '``(height, width, channels)`` with 1, 3 or 4 channels, uint8 or floats from 0 to 1. Files are PNG, '
              'JPEG, WebP or GIF (the first frame) or BMP, at most 64 MiB and 67,108,864 pixels; each side '
              'has 1 to 32,768 pixels and is at most 200 times as long as the other.'),
        _model('model with the capability ``image_embedding``, specified as for :func:`embed`; None: '
             'clip-vit-base-patch32. CLIP, SigLIP and Qwen3-VL-Embedding compare images with texts, DINOv2 compares '
             'images with images.'),
    ), _options.ImageOptions, 'NDArray[Any]',
    text=r"""Embeds an image, or a list of images.

Models such as CLIP and SigLIP embed texts and images into the same space: use :func:`similarity` to compare these
vectors with those that :func:`embed` returns for the same model. Images are preprocessed as the model's files specify,
bit for bit like transformers' image processors with Pillow: rotated upright according to EXIF, composited on white,
resized, cropped and normalised.

{args}

Returns:
    Array of shape ``(d,)`` for an image, ``(n, d)`` for a list of n images; float32, or the dtype that ``precision``
    selects, as for :func:`embed`.

Raises:
    InvalidArgument: an argument or an image is invalid; ``param``, ``got`` and ``allowed`` say which one and why.
    FileError, DownloadError: a path cannot be read, or a URL cannot be fetched.
    LimitError: there are more images than ``max_inputs``.
    UnknownModel, WrongCapability, OfflineError, Timeout, Overloaded: as for :func:`embed`.

Source:
    Preprocessing follows https://huggingface.co/docs/transformers/main_classes/image_processor
""",)

_TEXTS = Parameter('inputs', _INPUTS,
                   'a text, or a list of texts or of lists of token ids, as for :func:`embed`.')

EMBED_SPARSE = Verb(
    'embed_sparse', 'text_embedding', (
        _TEXTS,
        Parameter('model', MODEL, 'a sparse encoder: a catalogue key such as ``"splade-v3"``, or the folder or '
                  'reference of a model of sentence-transformers\' ``SparseEncoder`` (SPLADE, '
                  'opensearch-neural-sparse-encoding, Granite sparse; of BERT, RoBERTa, XLM-RoBERTa, ModernBERT or '
                  'MPNet), or of BGE-M3. None: granite-embedding-30m-sparse.', None),
    ), _options.SparseOptions, 'SparseVectors',
    text=r"""Computes sparse vectors: weights of tokens of the vocabulary, for retrieval with an inverted index.

{args}

Returns:
    :class:`mpool.SparseVectors`: a matrix in CSR form with one row per text. It has the same bytes whatever other texts
    are in the request.

Raises:
    WrongCapability: the model has no sparse vectors; the error says what it has.
    LimitError: there are more texts than ``max_inputs``, or the result needs more than a quarter of the pool's memory
        limit.
    InvalidArgument, ContextOverflow, UnknownModel, Timeout, Overloaded: as for :func:`embed`.

Source:
    SPLADE (https://arxiv.org/abs/2109.10086); weights equal those of ``SparseEncoder.encode`` of sentence-transformers.
""",
    method=(_TEXTS, _TASK),)

EMBED_TOKENS = Verb(
    'embed_tokens', 'text_embedding', (
        _TEXTS,
        Parameter('model', MODEL, 'a model of token vectors: a catalogue key such as ``"colbertv2.0"``, or the folder '
                  'or reference of a ColBERT model of sentence-transformers (``MultiVectorEncoder``), PyLate or '
                  'Stanford\'s ColBERT, or of BGE-M3. Any other text encoder returns its hidden states; a model of '
                  'static embeddings has none. None: all-MiniLM-L6-v2.', None),
    ), _options.TokenOptions, 'TokenVectors',
    text=r"""Computes one vector per token, for late interaction (MaxSim).

With a ColBERT model, pass ``task="query"`` or ``task="document"``: it selects the marker, the maximum length, whether
queries are padded with mask tokens, and whether punctuation gets vectors.

{args}

Returns:
    :class:`mpool.TokenVectors`: the matrices of all texts, one after another.

Raises:
    LimitError: there are more texts than ``max_inputs``, or the result needs more than a quarter of the pool's memory
        limit.
    InvalidArgument, ContextOverflow, UnknownModel, Timeout, Overloaded: as for :func:`embed`.

Source:
    ColBERT (https://arxiv.org/abs/2004.12832)
""",
    method=(_TEXTS, _TASK),)

EMBED_ALL = Verb(
    'embed_all', 'text_embedding', (
        _TEXTS,
        _model('a model with several outputs, such as BGE-M3, or any text encoder; None: all-MiniLM-L6-v2.'),
    ), _options.AllOptions, 'TextEmbeddings',
    text=r"""Computes all outputs that a model has in one pass: dense vectors, sparse vectors, token vectors.

{args}

Returns:
    :class:`mpool.TextEmbeddings`; outputs that the model does not have are None.

Raises:
    LimitError: there are more texts than ``max_inputs``, or the result needs more than a quarter of the pool's memory
        limit.
    InvalidArgument, ContextOverflow, UnknownModel, Timeout, Overloaded: as for :func:`embed`.

Example:
    >>> found = mpool.embed_all(["A sentence.", "Another one."])
    >>> found.dense.shape, found.sparse, found.tokens
    ((2, 384), None, None)
""",
    method=(_TEXTS, _TASK),)

RERANK = Verb(
    'rerank', 'text_embedding', (
        Parameter('query', 'Input',
              'a text of 1 to 1,000,000 characters; with a reranker that reads images, such as Qwen3-VL-Reranker, also '
              'a dict with ``"text"``, ``"image"`` or both, as for :func:`embed`.'),
        Parameter('documents', 'Sequence[Input]',
              'a list, tuple, array or pandas Series of texts of at most 1,000,000 characters, or of such dicts.'),
        _model('a cross-encoder: a catalogue key such as ``"bge-reranker-v2-m3"``; the folder or reference of a '
             'sequence classifier with one label (BERT, DistilBERT, ELECTRA, ALBERT, RoBERTa, XLM-RoBERTa, MPNet, '
             'DeBERTa v2 and v3, ModernBERT, GTE, JinaBERT, EuroBERT), or of a language model that its folder declares '
             'a reranker (Qwen3-Reranker, in the format of sentence-transformers); or the GGUF file of a reranker. '
             'None: ms-marco-MiniLM-L6-v2.'),
    ), _options.RerankOptions, 'Ranking',
    text=r"""Ranks documents by relevance to a query, with a cross-encoder.

{args}

Returns:
    :class:`mpool.Ranking` of the documents, best first, with scores and indices. The scores equal those
    of ``CrossEncoder.predict`` of sentence-transformers and do not depend on the other documents.

Raises:
    InvalidArgument: an argument or a text is invalid; ``param``, ``got`` and ``allowed`` say which one and why.
    LimitError: there are more documents than ``PoolConfig.max_embed_inputs``.
    WrongCapability: the model is not a reranker.
    ContextOverflow: with ``truncate=False``, a pair exceeds the model's maximum length.
    UnknownModel, OfflineError, Timeout, Overloaded: as for :func:`embed`.
""",)

CLASSIFY = Verb(
    'classify', 'text_embedding', (
        Parameter('texts', 'list[str] | tuple[str, ...] | NDArray[Any] | Sequence[tuple[str, str]]',
              'a text of at most 1,000,000 characters; a list, tuple, array or pandas Series of texts; or a list of '
              'pairs of texts, such as premise and hypothesis. With ``labels``, no pairs.'),
        Parameter('model', 'str | os.PathLike[str] | Model',
              'a sequence classifier: a catalogue key such as ``"nli-deberta-v3-small"``, a name assigned with '
              ':func:`load` or :func:`register`, the path of a folder or a reference such as ``"org/name"`` whose '
              'config.json names a class ForSequenceClassification (BERT, RoBERTa, XLM-RoBERTa, DistilBERT, ELECTRA, '
              'ALBERT, DeBERTa, ModernBERT, MPNet, GTE, JinaBERT, EuroBERT), or a :class:`mpool.Model`.'),
    ), _options.ClassifyOptions, 'Classifications',
    text=r"""Classifies a text, or a list of texts or pairs of texts.

Labels and scores are those of the pipelines ``text-classification`` and, with ``labels``, ``zero-shot-classification``
of transformers. A score does not depend on the other texts of the request.

{args}

Returns:
    :class:`mpool.results.Classification` for a text: label and score of the best label, and the scores of all labels.
    :class:`mpool.Classifications` for a list: a sequence of them.

Raises:
    InvalidArgument: an argument or a text is invalid; ``param``, ``got`` and ``allowed`` say which one and why.
    LimitError: there are more texts than ``max_inputs``, or more texts times labels; or the hypotheses together have
        more than 1,000,000 characters.
    WrongCapability: the model is not a sequence classifier, or for ``labels``, none of its labels begins with "entail".
    ContextOverflow: with ``truncate=False``, a text or pair exceeds the model's maximum length; or a hypothesis leaves
        no room for a text.
    UnknownModel, OfflineError, NumericError, Timeout, Overloaded: as for :func:`embed`.

Source:
    Names follow https://huggingface.co/docs/transformers/main_classes/pipelines
""",
    single=('str', 'Classification'),)

CLASSIFY_TOKENS = Verb(
    'classify_tokens', 'text_embedding', (
        Parameter('texts', 'list[str] | tuple[str, ...] | NDArray[Any]',
              'a text of at most 1,000,000 characters; or a list, tuple, array or pandas Series of texts.'),
        Parameter('model', 'str | os.PathLike[str] | Model',
              'a token classifier: the catalogue key ``"bert-base-NER"``, a name assigned with :func:`load` or '
              ':func:`register`, the path of a folder or a reference such as ``"org/name"`` whose config.json names a '
              'class ForTokenClassification (BERT, RoBERTa, XLM-RoBERTa, DistilBERT, ELECTRA, ALBERT, DeBERTa, '
              'ModernBERT, MPNet, GTE, EuroBERT), or a :class:`mpool.Model`.'),
    ), _options.ClassifyTokensOptions, 'TokenClassifications',
    text=r"""Labels the tokens of a text, or of a list of texts: names, parts of speech, personal data.

Spans, labels and scores are those of the pipeline ``token-classification`` of transformers. They do not depend on the
other texts of the request.

{args}

Returns:
    :class:`mpool.results.TokenClassification` for a text: a sequence of :class:`mpool.results.LabelledSpan` with
    label, score, the first character and the end in the text of the caller, and the word as the tokenizer writes it.
    :class:`mpool.TokenClassifications` for a list: a sequence of them. A text without tokens has no spans.

Raises:
    InvalidArgument: an argument or a text is invalid; ``param``, ``got`` and ``allowed`` say which one and why.
    LimitError: there are more texts or windows than ``max_inputs``, or the result needs more than a quarter of the
        pool's memory limit.
    WrongCapability: the model is not a token classifier; the error names the function to call instead.
    ContextOverflow: with ``truncate=False``, a text exceeds the model's maximum length.
    UnknownModel, OfflineError, NumericError, Timeout, Overloaded: as for :func:`embed`.

Source:
    Names follow https://huggingface.co/docs/transformers/main_classes/pipelines
""",
    single=('str', 'TokenClassification'),)

#: The scores of all labels for each token, which the server's ``/pooling`` returns. It has no public function: spans
#: (:data:`CLASSIFY_TOKENS`) are what the library returns.
TOKEN_SCORES = Verb('token_scores', 'text_embedding', (_TEXTS, _model('a token classifier.')),
                    _options.TokenScoresOptions, 'TokenVectors', text='')

GENERATE = Verb(
    'generate', 'text_to_text', (
        Parameter('prompt', 'str | Sequence[int]',
              "a text of 1 to 1,000,000 characters, to which the model's BOS token is prepended if the model "
              'uses one; or a sequence of token ids, which are used unchanged.'),
        _model('a language model, specified as for :func:`embed`; None: SmolLM2-135M-Instruct.'),
    ), _options.GenerateOptions, 'Completion',
    text=r"""Generates text that continues a prompt.

The prompt is passed to the model unchanged. For instructions and conversations use :func:`chat`, which applies the
model's chat template. The same seed gives the same tokens, whatever other requests run at the same time.

{args}

Returns:
    :class:`mpool.Completion`; with ``stream=True``, :class:`mpool.Stream`.

Raises:
    InvalidArgument: an option does not exist (the error suggests the most similar one) or is out of range, or the
        prompt is empty, too long or not text.
    ContextOverflow: the prompt leaves no room in the model's context; the error has both lengths.
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
        Parameter('messages', 'str | Sequence[Mapping[str, Any]]',
              'a text, which is one message of the user, or '
              'dicts ``{"role": ..., "content": ...}``. The role is system, developer, user, assistant or tool; the '
              'content is a text, or a list of parts ``{"type": "text", "text": ...}``. For a vision model, a part '
              'may be an image: ``{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}``, or '
              '``{"type": "image", "image": ...}`` with any image that :func:`embed_image` accepts; alternatively, a '
              'message may have ``"images": [...]``. An assistant message may have ``tool_calls`` in the format of '
              'OpenAI or Ollama; the result of a tool call is a message with the role tool and ``tool_call_id`` or '
              '``name``.'),
        _model('a language model or vision model, specified as for :func:`embed`; None: SmolLM2-135M-Instruct.'),
    ), _options.TextOptions, 'Completion',
    text=r"""Generates the next message of a conversation.

The prompt is rendered by the model's chat template. Text in a message that looks like a control token is treated as
plain text.

{args}

Returns:
    Same types as :func:`generate`. To continue the conversation, append ``message`` of the result to ``messages``. The
    model's reasoning (``<think>`` of Qwen3, all channels of GPT-OSS except the final one) is in ``reasoning`` of
    results and stream chunks, not in ``text``. ``max_tokens`` applies to both; stop strings and
    ``response_format`` apply to the response only.

    With ``tools``, function calls are in ``tool_calls``, and ``finish_reason`` is ``"tool_calls"``. If the extra
    ``grammar`` is installed, function calls are constrained while they are sampled: they have the model's tool-call
    format, the name of a given function, and arguments that match its schema without additional properties. Schema
    keywords that a grammar cannot enforce (``uniqueItems``, unknown formats) are errors of strict tools; others lose
    them, and a warning in the log names them. Without the extra, function calls are parsed from the output: text that
    is not a valid call of a given function remains text, and ``tool_choice`` cannot require a call. Combined with a
    ``response_format`` (JSON or a regular expression), a response consists either of function calls or of text in
    that format; for models whose function calls have no start marker (Llama 3), the JSON must not begin with a
    property ``name``.

Raises:
    InvalidArgument: messages or tools are invalid, a schema cannot be used, or tools are combined with a
        ``response_format`` that excludes them, with ``min_tokens`` or with ``ignore_eos``.
    LimitError: there are more than 128 tools, or their JSON has more than 262,144 characters.
    Unsupported: the model has no chat template, the template does not support tools, a function call is required
        without the extra ``grammar``, or a message has images and the model has no image encoder.
    TemplateError: the chat template rejects the conversation or fails.
    ContextOverflow, UnknownModel, WrongCapability, OfflineError, Timeout, Overloaded: as for :func:`generate`.

Example:
    >>> messages = [{"role": "user", "content": "Say hello."}]
    >>> answer = mpool.chat(messages, temperature=0, max_tokens=2)
    >>> answer.text.startswith("Hello")
    True
    >>> messages.append(answer.message)

Source:
    Messages follow https://platform.openai.com/docs/api-reference/chat
""",
    stream=('Stream', 'AsyncStream'),
    accepts=_TEXT,)

VISION = Verb(
    'vision', 'vision', (
        Parameter('images', 'ImageInput | Sequence[ImageInput]',
              'an image or a list of images; each a path, a URL (see ``allow_urls``), the bytes of a PNG, JPEG, WebP, '
              'GIF or BMP file, base64 text, a Pillow image, or an array as for :func:`embed_image`.'),
        Parameter('prompt', 'str',
              'question about the images.'),
        _model('a vision model, specified as for :func:`embed`; None: SmolVLM-256M-Instruct.'),
    ), _options.TextOptions, 'Completion',
    text=r"""Answers a question about images.

Equivalent to :func:`chat` with one user message that contains the images followed by the text. Encoded images are
cached by content: a second question about an image does not encode it again, even together with other images.

{args}

Returns:
    Same types as :func:`generate`. ``usage.prompt_tokens`` counts one token per row of an encoded image.

Raises:
    InvalidArgument: there is no image, an image is corrupt or exceeds a limit, the prompt is empty, or an option is
        invalid.
    FileError, DownloadError: an image cannot be read or fetched.
    ContextOverflow: prompt and images exceed the model's context; the error has both lengths.
    WrongCapability: the model has no image encoder.
    Unsupported: the model has no chat template.
    UnknownModel, OfflineError, Timeout, Overloaded: as for :func:`generate`.

Example:
    >>> def ask(photo):  # the model is a LLaVA folder in transformers' format
    ...     return mpool.vision(photo, "What is on the table?", "models/llava-1.5-7b", max_tokens=100).text

Source:
    Visual instruction tuning, https://arxiv.org/abs/2310.03744
""",
    stream=('Stream', 'AsyncStream'),
    accepts=_TEXT,)

DESCRIBE_IMAGE = Verb(
    'describe_image', 'vision', (
        Parameter('path', 'str | os.PathLike[str]',
              'path of a PNG, JPEG, WebP, GIF or BMP file; not a URL.'),
        Parameter('query', 'str',
              'question about the image.', DESCRIBE),
        _model('a vision model, specified as for :func:`embed`; None: SmolVLM-256M-Instruct.'),
    ), _options.TextOptions, 'str',
    text=r"""Describes an image file with a vision model.

{args}

Returns:
    Text of the completion that :func:`vision` returns; with ``stream=True``, its stream.

Raises:
    MpoolError: the errors of :func:`vision`.
""",
    stream=('Stream', 'AsyncStream'),
    accepts=_TEXT,)

DESCRIBE_URL = Verb(
    'describe_url', 'vision', (
        Parameter('url', 'str',
              'http or https URL of a PNG, JPEG, WebP, GIF or BMP file.'),
        Parameter('query', 'str',
              'question about the image.', DESCRIBE),
        _model('a vision model, specified as for :func:`embed`; None: SmolVLM-256M-Instruct.'),
    ), _options.TextOptions, 'str',
    text=r"""Fetches an image from an http or https URL and describes it with a vision model.

{args}

Returns:
    Text of the completion that :func:`vision` returns; with ``stream=True``, its stream.

Raises:
    MpoolError: the errors of :func:`vision`.
""",
    stream=('Stream', 'AsyncStream'),
    accepts=_TEXT,)

GENERATE_IMAGE = Verb(
    'generate_image', 'text_to_image', (
        Parameter('prompt', 'str',
              'description of the image. As in diffusers, a prompt that is too long for a text encoder is truncated '
              'with a warning.'),
        _model('a diffusers folder (``model_index.json``) of FLUX.1 or Stable Diffusion 3 / 3.5, or a hub '
             'repository with one; a GGUF file of the transformer inside such a folder (T5 may be a GGUF '
             'file in its own subfolder); a key of the catalogue; or a :class:`mpool.Model`. None: FLUX.1-schnell, a '
             'download of 34 GB.'),
    ), _options.GenerateImageOptions, 'GeneratedImages',
    text=r"""Generates images from a text.

Text encoders, transformer and decoder are loaded when they are needed. If memory is short, each is unloaded to make
room for the next. The outputs of the text encoders are cached per prompt. The same seed gives the same image.

{args}

Returns:
    :class:`mpool.GeneratedImages`, which notebooks display: ``.image`` is a PIL image, ``.array`` is float32 of shape
    ``(height, width, 3)`` with values from 0 to 1. With ``stream=True``, :class:`mpool.ImageStream`.

Raises:
    InvalidArgument: an option does not exist (the error suggests the most similar one) or is out of range, or the
        model cannot generate images of that size (the error suggests the nearest size).
    MemoryExhausted: the largest of the networks does not fit into memory.
    UnknownModel, WrongCapability, OfflineError, Timeout, Overloaded: as for :func:`embed`.

Example::

    image = mpool.generate_image("a lighthouse at dusk", "./FLUX.1-schnell", seed=7)
    image.save("lighthouse.png")

Source:
    Names follow diffusers' pipelines (https://huggingface.co/docs/diffusers/api/pipelines/flux).
""",
    stream=('ImageStream', 'AsyncImageStream'),)

VERBS = {verb.name: verb for verb in (EMBED, EMBED_ITER, EMBED_SPARSE, EMBED_TOKENS, EMBED_ALL, EMBED_IMAGE, RERANK,
                                      CLASSIFY, CLASSIFY_TOKENS, GENERATE, CHAT, VISION, DESCRIBE_IMAGE, DESCRIBE_URL,
                                      GENERATE_IMAGE)}

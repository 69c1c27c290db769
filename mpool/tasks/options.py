"""Options of every verb: one frozen dataclass per verb, and :class:`CallOptions`, which all verbs accept.

The signatures and documentation of functions and methods, the committed stubs (``.pyi``), the options of the command
line and the errors for unknown options are generated from these dataclasses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from ..checks import integer, refuse, unknown_option
from ..durations import seconds_of
from ..host.resources import typed
from ..names import CAPABILITIES as CAPABILITIES
from ..names import COMPUTE, POLICIES
from ..runtime import deadlines as _deadlines
from ..runtime import logs as _logs
from .sampling import TABLE, THINKING_TOKENS

if TYPE_CHECKING:
    from ..config import PoolConfig
    from ..runtime.entry import Entry
    from .captures import Capture, CaptureJob

T = TypeVar("T")

Precision = Literal["float32", "int8", "uint8", "binary", "ubinary"]
Compute = Literal["auto", "float32", "float32-fast", "bfloat16", "int8"]
Progress = bool | Callable[[int, int | None], object] | None
Priority = Literal["critical", "high", "normal", "low", "batch", 0, 1, 2, 3, 4]
Policy = Literal["shared", "pack", "p2c", "sequential"]
#: An input of an embedding model or reranker: a text, or a dict with texts and images.
Input = str | Mapping[str, Any]

PRIORITIES = ("critical", "high", "normal", "low", "batch")


def _documented(default: Any, doc: str) -> Any:
    """Return a dataclass field with a default and a documentation text."""
    return field(default=default, metadata={"doc": doc})


# ---- options of every request ----------------------------------------------------------------------------------------

@dataclass(frozen=True)
class CallOptions:
    """Keyword options that every function and method which sends a request accepts.

    Raises:
        InvalidArgument: an option has a value of the wrong type or out of range.

    Example:
        >>> mpool.embed("A sentence.", priority="high", tenant="alice", keep_alive="10m", timeout=60).shape
        (384,)
    """

    timeout: float | None = _documented(
        None, "time limit of the request in seconds from its start; None: only ``PoolConfig.request_timeout`` applies. "
        "A request whose predicted wait in the queue exceeds four times its limit raises Timeout at once.")
    priority: Priority = _documented(
        "normal", '``"critical"``, ``"high"``, ``"normal"``, ``"low"`` or ``"batch"``, or the numbers 0 to 4 in the '
        "same order: requests of a higher priority leave the model's queue first. The priority of a request rises "
        "while it waits.")
    tenant: str | int | None = _documented(
        None, "user or group that the request belongs to: a name, or a number from 1 to 2**64 - 1. Tenants of the same "
        "priority get equal shares of the compute time. Cached results (beginnings of prompts, vectors of repeated "
        "inputs, rows of images, encoded prompts of image generation, compiled response formats) are never shared "
        "between tenants: an input that another tenant has sent takes as much work as a new one. None: all requests "
        "without a tenant count as one tenant.")
    keep_alive: float | str | None = _documented(
        None, "idle time after this request before the model is unloaded: seconds, or text such as ``\"5m\"``; 0: "
        "unload at once; below 0: never unload; None: keep the model's current setting.")
    policy: Policy | None = _documented(
        None, "scheduling policy that chooses the worker, see ``PoolConfig.policy``; None: the policy of the model's "
        "capability.")
    fail_fast: bool | None = _documented(
        None, "True: raise Overloaded at once if the queue is full, with a hint when to retry, or if other requests "
        "hold the memory that this one or the load of its model needs; False: wait until the queue has space and "
        "memory is free; None: use ``PoolConfig.fail_fast``.")

    @typed
    def __post_init__(self) -> None:
        _deadlines.seconds_of(self.timeout)
        self.core()
        if self.fail_fast is not None and not isinstance(self.fail_fast, bool):
            refuse("fail_fast", self.fail_fast, "True, False or None")

    def core(self) -> dict[str, Any]:
        """Return the keywords of the core's submit functions for options that differ from their defaults.

        ``timeout``, ``fail_fast`` and the service class are not included: :meth:`Call.keywords` adds the first two.
        """
        found: dict[str, Any] = {}
        if not isinstance(self.priority, str) or self.priority != "normal":
            found["priority"] = _priority(self.priority)
        if self.tenant is not None:
            found["tenant"] = _tenant(self.tenant)
        if self.keep_alive is not None:
            found["keep_alive"] = seconds_of(self.keep_alive, "keep_alive")
        if self.policy is not None:
            if not isinstance(self.policy, str) or self.policy not in POLICIES:
                refuse("policy", self.policy, f"one of {', '.join(POLICIES)}, or None")
            found["policy"] = self.policy
        return found


def _priority(value: Any) -> int:
    """Return the core's number of a priority: 0 (critical) to 4 (batch)."""
    if isinstance(value, str) and value in PRIORITIES:
        return PRIORITIES.index(value)

    number = integer(value)
    if number is None or not 0 <= number < len(PRIORITIES):
        refuse("priority", value, f"one of {', '.join(PRIORITIES)}, or an integer from 0 to 4")
    return number


def _tenant(value: Any) -> int:
    """Return the core's number of a tenant. A name and a number are different tenants, also ``"1"`` and 1."""
    from .. import _core

    if isinstance(value, str) and value:
        return _core.tenant_number(b"name " + value.encode(errors="surrogatepass"))

    number = integer(value)
    if number is None or not 1 <= number < 2**64:
        refuse("tenant", value, "a name, an integer from 1 to 2**64 - 1, or None")
    return _core.tenant_number(b"number %d" % number)


@dataclass(frozen=True, slots=True)
class Call:
    """Validated :class:`CallOptions` of a request that was started.

    Attributes:
        deadline: value of ``time.monotonic()`` at which the request times out; None: never.
        fail_fast: True if a full queue, or memory that others hold for now, raises Overloaded instead of blocking.
        core: keywords of the core's submit functions, see :meth:`CallOptions.core`.
    """

    deadline: float | None
    fail_fast: bool
    core: Mapping[str, Any]

    def keywords(self, entry: Entry, fail_fast: bool | None = None, uncounted: bool = False) -> dict[str, Any]:
        """Return the keywords of the core's submit functions, except the service class.

        Args:
            entry: model that the request was prepared for.
            fail_fast: True: the core does not block, as with ``self.fail_fast``, but the request waits for its model.
            uncounted: True if the caller retries after Overloaded; the core then counts this error in no metric.

        Raises:
            Timeout: the deadline has passed.
        """
        found = {**self.core, "timeout": _deadlines.remaining(self.deadline, entry.key), "revision": entry.revision,
                 "fail_fast": 2 if self.fail_fast and not uncounted else int(self.fail_fast or bool(fail_fast))}
        if uncounted:
            found["uncounted"] = True
        return found


#: A request without options.
PLAIN = Call(None, False, {})
_PLAIN_FAIL_FAST = Call(None, True, {})


def begin(config: PoolConfig, options: dict[str, Any]) -> Call:
    """Remove the :class:`CallOptions` from ``options``, validate them and start the request's time limit.

    Raises:
        InvalidArgument: an option has a value of the wrong type or out of range.
    """
    _logs.start_again()
    if options.keys().isdisjoint(CALL):
        return _PLAIN_FAIL_FAST if config.fail_fast else PLAIN
    found = CallOptions(**{name: options.pop(name) for name in CALL if name in options})
    fail_fast = config.fail_fast if found.fail_fast is None else found.fail_fast
    return Call(_deadlines.deadline_of(found.timeout), fail_fast, found.core())


def without_fail_fast(call: Call) -> Call:
    """Return ``call`` without ``fail_fast``, for the later slices of a request whose first slice was accepted."""
    return replace(call, fail_fast=False) if call.fail_fast else call


#: Names of the options that every verb accepts.
CALL = tuple(found.name for found in fields(CallOptions))


# ---- options of verbs ------------------------------------------------------------------------------------------------

def option(default: Any, doc: str, *, choices: tuple[Any, ...] | None = None,
           plan: bool = True, meaning: str = "", shown: str | None = None) -> Any:
    """Return a field of an options dataclass.

    Args:
        default: value of the option when it is omitted.
        doc: description in the documentation of every function that has the option.
        choices: all allowed values, if they can be listed.
        plan: True if the option is part of the cache key of plans; False if the plan does not depend on it.
        meaning: description without range and default, for the help of the command line.
        shown: default as shown in the documentation, if it differs from ``default``.
    """
    return field(default=default, compare=plan,
                 metadata={"doc": doc, "choices": choices, "meaning": meaning, "shown": shown})


def meaning_of(options: type, name: str) -> str:
    """Return the description of an option without its range and default, for the command line."""
    return next(str(found.metadata["meaning"]) for found in fields(options) if found.name == name)


def names_of(options: type) -> tuple[str, ...]:
    """Return the names of all options of a dataclass, then the names of :class:`CallOptions`."""
    return (*(found.name for found in fields(options)), *CALL)


def parse_options(options: type[T], of: str, given: Mapping[str, Any]) -> T:
    """Build an options dataclass from keyword arguments.

    Args:
        options: dataclass to build.
        of: name of the function that was called, for errors.
        given: keyword arguments without those of :class:`CallOptions`.

    Raises:
        InvalidArgument: an option does not exist; the error suggests the most similar one.
    """
    if not given:
        return _defaults(options)  # type: ignore[arg-type, return-value]
    known = _fields_of(options)  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            raise unknown_option(name, names_of(options), of=of)
    return options(**given)


@cache
def _defaults(options: Any) -> Any:
    return options()


@cache
def _fields_of(options: Any) -> frozenset[str]:
    return frozenset(found.name for found in fields(options))


# ---- vectors -------------------------------------------------------------------------------------------------------

PRECISIONS = ("float32", "int8", "uint8", "binary", "ubinary")
ON_ERROR = ("raise", "null")
TASKS = ("query", "document")
#: Outputs of a text encoder.
OUTPUTS = ("dense", "sparse", "tokens", "all")
#: Outputs of a classifier.
CLASSIFIED = ("labels", "spans")
#: Outputs of :func:`mpool.embed_iter`; :mod:`mpool.tasks.output_table` describes them.
ITERATED = (*OUTPUTS, *CLASSIFIED)
ACTIVATIONS = ("softmax", "sigmoid", "none")
#: Default hypothesis of zero-shot classification.
TEMPLATE = "This example is {}."
#: How labels of tokens become labels of spans.
AGGREGATIONS = ("none", "simple", "first", "average", "max")
_COMPUTE = ('compute type: ``"float32"``, ``"float32-fast"``, ``"bfloat16"``, ``"int8"`` or ``"auto"``. ``"auto"`` '
            "selects the fastest type on this CPU whose vectors of sentences have a cosine similarity of at least "
            "0.9999 to those of float32, and of degenerate texts, such as one repeated word, 0.9995 (measured for some "
            "models); models with more than 12 pre-norm layers whose weights are stored in float32 are computed in "
            'float32. Use ``"float32"`` for results that are identical across machines. ``"float32-fast"`` is float32, '
            "but a BLAS library may compute large products of float32 weights, even if its sums differ from mpool's: "
            "results may then depend on the other texts that are computed at the same time.")


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorOptions:
    """Options that :func:`mpool.embed` and :func:`mpool.embed_image` share."""

    dimensions: int | None = option(
        None, "number of components of the returned vectors: the first ones are kept, which suits models trained for "
        "it (Matryoshka). Normalised vectors are normalised again after truncation. None: all components, or the "
        "number set in the model's files.")
    normalize: bool | None = option(
        None, "True: scale vectors to length 1; False: return them as pooled; None: follow the model's files.",
        choices=(None, True, False))
    precision: Precision = option(
        "float32", 'type of the returned components: ``"float32"``; ``"int8"`` or ``"uint8"``: quantised to 256 levels '
        "between the minimum and maximum of each component over the vectors of this request, which must have at least "
        'two inputs and should have hundreds; ``"binary"`` or ``"ubinary"``: one sign bit per component, eight per '
        "byte. Same definitions as ``quantize_embeddings`` of sentence-transformers.", choices=PRECISIONS)
    compute: Compute = option("auto", _COMPUTE, choices=COMPUTE)
    on_error: Literal["raise", "null"] = option(
        "raise", '``"raise"``: an input that cannot be embedded raises an error, and an empty text has the vector of '
        'its special tokens, as in sentence-transformers; ``"null"``: the row of such an input, and of an empty text, '
        "is filled with NaN, and the number of such rows is logged as a warning. Only for float32.", choices=ON_ERROR)
    progress: Progress = option(
        None, "True: show a progress bar; a function: call it with (done, total); None: show a bar for requests of "
        "more than 1,024 inputs if the logger ``mpool`` is at level INFO.", plan=False)


def _parse_special(where: str) -> Any:
    """Return the field of the option ``parse_special``; ``where`` names the text that it applies to."""
    return option(False, f"True: parse the text of control tokens in the {where} (such as ``<|im_end|>`` or ``[SEP]``) "
                  "into those tokens; False: treat it as plain text.", choices=(True, False))


def _adapter() -> Any:
    """Return the field of the option ``adapter``. Plans are cached without it, because adapters come and go."""
    return option(None, "name of the adapter (LoRA) that computes the request: one of ``adapters`` of :func:`load`, or "
                  "one in the model's files, whose prompt of the same name is used as well. None: the adapter in the "
                  "model's files for ``task`` or ``prompt_name``, else the model alone.", plan=False)


def _allow_urls(more: str = "") -> Any:
    """Return the field of the option ``allow_urls``; ``more``: what it applies to."""
    return option(
        False, f"True: fetch ``http`` and ``https`` URLs{more}, each within 30 seconds. Off by default: a program that "
        "passes URLs from its users on lets them reach every address that this machine can reach.",
        choices=(True, False))


@dataclass(frozen=True, slots=True, kw_only=True)
class TextVectorOptions(VectorOptions):
    """Options that :func:`mpool.embed` and :func:`mpool.embed_iter` share."""

    task: Literal["query", "document"] | None = option(
        None, '``"query"`` or ``"document"``: prepend the model\'s prompt for this task to each text, if the model has '
        "one, and use the adapter for the task, if there is one in the model's files. For ``document``, prompts named "
        "``passage`` and ``corpus`` are used as well.", choices=(None, *TASKS))
    prompt: str | None = option(None, "text to prepend to each text instead of one of the model's prompts.")
    prompt_name: str | None = option(None, "name of the model's prompt to prepend. Without ``task``, ``prompt`` and "
                                     "``prompt_name``, the model's default prompt is used, if there is one.")
    truncate: bool = option(True, "True: truncate each text to the model's maximum length; False: raise "
                            "ContextOverflow for longer texts.", choices=(True, False))
    parse_special: bool = _parse_special("texts and the prompt")
    adapter: str | None = _adapter()
    allow_urls: bool = _allow_urls(" of images")

    result: ClassVar[str] = "vectors"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedOptions(TextVectorOptions):
    """Options of :func:`mpool.embed`."""

    max_inputs: int | None = option(None, "maximum number of texts in the request; None: "
                                    "``PoolConfig.max_embed_inputs``, by default no limit.", plan=False)
    allow_token_ids: bool = option(
        True, "False: refuse lists of token ids, because ids of another vocabulary would silently give wrong vectors; "
        "a model whose vocabulary is OpenAI's cl100k_base accepts them all the same. OpenAI's and vLLM's routes of "
        "the server pass False by default.", choices=(True, False))


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedIterOptions(TextVectorOptions):
    """Options of :func:`mpool.embed_iter`."""

    output: Literal["dense", "sparse", "tokens", "all", "labels", "spans"] = option(
        "dense", 'what to compute: ``"dense"``, as :func:`embed`; ``"sparse"``, as :func:`embed_sparse`; ``"tokens"``, '
        'as :func:`embed_tokens`; ``"all"``, as :func:`embed_all`; ``"labels"``, as :func:`classify`, also of pairs of '
        'texts; ``"spans"``, as :func:`classify_tokens`. ``dimensions``, ``normalize``, ``precision`` and ``on_error`` '
        'apply to ``"dense"`` only; ``task``, ``prompt`` and ``prompt_name`` not to ``"labels"`` and ``"spans"``.',
        choices=ITERATED, plan=False)
    batch_size: int | None = option(
        None, "None: yield the result of one text at a time: a vector of shape ``(d,)``, token ids and weights, a "
        "matrix ``(tokens, d)``, a :class:`mpool.TextEmbeddings` of one text, a "
        ":class:`mpool.results.Classification` or a :class:`mpool.results.TokenClassification`; a number: yield "
        "results of this many texts, as the functions return them; the last one may have fewer. Affects neither speed "
        "nor values.", plan=False)
    max_active: int | None = option(None, 'only with ``output="sparse"``: maximum number of weights of a text, as for '
                                    ":func:`embed_sparse`.", plan=False)
    labels: Sequence[str] | None = option(
        None, 'only with ``output="labels"``: names of labels for zero-shot classification, as for :func:`classify`, '
        "at most ``PoolConfig.max_embed_inputs``.", plan=False)
    template: str = option(TEMPLATE, "only with ``labels``: as for :func:`classify`.", plan=False)
    multi_label: bool = option(False, "only with ``labels``: as for :func:`classify`.", choices=(True, False),
                               plan=False)
    function_to_apply: Literal["softmax", "sigmoid", "none"] | None = option(
        None, 'only with ``output="labels"``: as for :func:`classify`.', choices=(None, *ACTIVATIONS), plan=False)
    top_k: int | None = option(None, 'only with ``output="labels"``: as for :func:`classify`.', plan=False)
    aggregation: Literal["none", "simple", "first", "average", "max"] = option(
        "none", 'only with ``output="spans"``: as for :func:`classify_tokens`.', choices=AGGREGATIONS, plan=False)
    ignore_labels: Sequence[str] = option(("O",), 'only with ``output="spans"``: as for :func:`classify_tokens`.',
                                          plan=False)
    stride: int | None = option(None, 'only with ``output="spans"``: as for :func:`classify_tokens`, which also states '
                                "the maximum number of windows; here it applies to each slice of texts.", plan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Options that :func:`mpool.embed_sparse`, :func:`mpool.embed_tokens` and :func:`mpool.embed_all` share."""

    task: Literal["query", "document"] | None = option(
        None, '``"query"`` or ``"document"``: prepend the model\'s prompt or marker for this task to each text, if the '
        "model has one. Some sparse models look the weights of queries up in a table, and models of token vectors "
        "fill queries up; both need the task.", choices=(None, *TASKS))
    prompt: str | None = option(None, "text to prepend to each text instead of one of the model's prompts.")
    prompt_name: str | None = option(None, "name of the model's prompt to prepend.")
    truncate: bool = option(True, "True: truncate each text to the model's maximum length; False: raise "
                            "ContextOverflow for longer texts.", choices=(True, False))
    parse_special: bool = _parse_special("texts and the prompt")
    adapter: str | None = _adapter()
    compute: Compute = option("auto", "compute type, as for :func:`embed`.", choices=COMPUTE)
    progress: Progress = option(None, "as for :func:`embed`.", plan=False)
    max_inputs: int | None = option(None, "maximum number of texts in the request; None: "
                                    "``PoolConfig.max_embed_inputs``, by default no limit.", plan=False)

    # The plan reads these attributes like those of EmbedOptions.
    dimensions: ClassVar[None] = None
    normalize: ClassVar[None] = None
    precision: ClassVar[str] = "float32"
    on_error: ClassVar[str] = "raise"
    result: ClassVar[str] = "vectors"
    embedding: ClassVar[str] = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseOptions(OutputOptions):
    """Options of :func:`mpool.embed_sparse`."""

    embedding: ClassVar[str] = "sparse"
    max_active: int | None = option(None, "maximum number of weights of a text, the largest ones; None: all.",
                                    plan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOptions(OutputOptions):
    """Options of :func:`mpool.embed_tokens`."""

    embedding: ClassVar[str] = "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllOptions(OutputOptions):
    """Options of :func:`mpool.embed_all`."""

    embedding: ClassVar[str] = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions(VectorOptions):
    """Options of :func:`mpool.embed_image`."""

    allow_urls: bool = _allow_urls()
    max_inputs: int | None = option(None, "maximum number of images in the request; None: "
                                    "``PoolConfig.max_embed_inputs``, by default no limit.", plan=False)


class _LogitOptions:
    """Fixed values of the vector options that a plan reads: a request for logits runs like one for vectors."""

    __slots__ = ()
    dimensions: ClassVar[None] = None
    normalize: ClassVar[None] = None
    task: ClassVar[None] = None
    precision: ClassVar[str] = "float32"
    on_error: ClassVar[str] = "raise"


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankOptions(_LogitOptions):
    """Options of :func:`mpool.rerank`."""

    top_k: int | None = option(None, "number of documents to return, the best ones; None: all.",
                               plan=False)
    compute: Compute = option("auto", "compute type, as for :func:`embed`.", choices=COMPUTE)
    truncate: bool = option(True, "True: truncate the longer text of a pair (with a language model, always the "
                            "document) so that the pair fits the model's maximum length; False: raise ContextOverflow "
                            "for longer pairs.", choices=(True, False))
    prompt: str | None = option(None, "only for language models: instruction that says what makes a document relevant, "
                                "instead of one of the model's prompts.")
    prompt_name: str | None = option(None, "only for language models: name of the model's prompt to use. Without "
                                     "``prompt`` and ``prompt_name``, the model's default prompt is used, if there is "
                                     "one.")
    function_to_apply: Literal["sigmoid", "none"] | None = option(
        None, 'function that turns logits into scores: ``"sigmoid"`` (the logistic function) or ``"none"``. None: '
        "that of the model's files.", choices=(None, "sigmoid", "none"), plan=False)
    parse_special: bool = _parse_special("query and the documents")
    adapter: str | None = _adapter()
    allow_urls: bool = _allow_urls(" of images")

    result: ClassVar[str] = "scores"
    progress: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyOptions(_LogitOptions):
    """Options of :func:`mpool.classify`."""

    labels: Sequence[str] | None = option(
        None, "names of labels for zero-shot classification, with a model of natural language inference: the model "
        "computes if a text entails the hypothesis that ``template`` makes of each label. None: the labels of the "
        "model.",
        plan=False)
    template: str = option(TEMPLATE, "hypothesis for zero-shot classification, in which ``{}`` stands for "
                           "a label.", plan=False)
    multi_label: bool = option(
        False, "only with ``labels``. False: the scores of a text add up to 1; True: the score of each label is "
        "computed on its own, from the logits of entailment and contradiction. A single label is always computed in "
        "this way.",
        choices=(True, False), plan=False)
    function_to_apply: Literal["softmax", "sigmoid", "none"] | None = option(
        None, 'function that turns logits into scores: ``"softmax"``, ``"sigmoid"`` or ``"none"``. None: as in '
        "transformers, none for models with the problem type regression, the logistic function for models with one "
        "label or the problem type multi_label_classification, softmax for all others. Not with ``labels``.",
        choices=(None, *ACTIVATIONS), plan=False)
    top_k: int | None = option(None, "number of labels in ``results`` of each text, the best ones; None: all.",
                               plan=False)
    compute: Compute = option("auto", "compute type, as for :func:`embed`.", choices=COMPUTE)
    truncate: bool = option(
        True, "True: truncate a text to the model's maximum length; of a pair, the longer text; with ``labels``, never "
        "the hypothesis. False: raise ContextOverflow for longer texts.", choices=(True, False))
    parse_special: bool = _parse_special("texts and the hypotheses")
    adapter: str | None = _adapter()
    max_inputs: int | None = option(None, "maximum number of texts in the request; with ``labels``, of texts times "
                                    "labels. None: ``PoolConfig.max_embed_inputs``, by default no limit.", plan=False)
    progress: Progress = option(
        None, "True: show a progress bar; a function: call it with (done, total); None: show a bar for requests of "
        "more than 1,024 texts if the logger ``mpool`` is at level INFO.", plan=False)

    result: ClassVar[str] = "labels"
    prompt: ClassVar[None] = None
    prompt_name: ClassVar[None] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyTokensOptions(_LogitOptions):
    """Options of :func:`mpool.classify_tokens`."""

    aggregation: Literal["none", "simple", "first", "average", "max"] = option(
        "none", 'how labels of tokens become labels of spans, as in transformers. ``"none"``: each token is a span. '
        '``"simple"``: neighbours with the same label, apart from ``B-`` and ``I-``, are one span, and ``B-`` begins '
        'one. ``"first"``, ``"average"``, ``"max"``: the same with words instead of tokens; the label of a word is '
        "that of its first token, the best one of the mean scores of its tokens, or that of the token with the highest "
        "score.", choices=AGGREGATIONS, plan=False)
    ignore_labels: Sequence[str] = option(
        ("O",), "labels that give no spans; with an aggregation, without ``B-`` and ``I-``.", plan=False)
    stride: int | None = option(
        None, "only with an aggregation: cut a text that exceeds the model's maximum length into windows that overlap "
        "by this number of tokens. Among spans that overlap, the longest one stays. None: see ``truncate``.",
        plan=False)
    compute: Compute = option("auto", "compute type, as for :func:`embed`.", choices=COMPUTE)
    truncate: bool = option(
        True, "True: truncate a text to the model's maximum length, unless there is a ``stride``; False: raise "
        "ContextOverflow for longer texts.", choices=(True, False))
    parse_special: bool = _parse_special("texts")
    adapter: str | None = _adapter()
    max_inputs: int | None = option(None, "maximum number of texts in the request, and of windows with a ``stride``. "
                                    "None: ``PoolConfig.max_embed_inputs``, by default no limit.", plan=False)
    progress: Progress = option(None, "as for :func:`classify`.", plan=False)

    result: ClassVar[str] = "spans"
    prompt: ClassVar[None] = None
    prompt_name: ClassVar[None] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScoresOptions(_LogitOptions):
    """Options of :data:`mpool.tasks.verbs.TOKEN_SCORES`."""

    function_to_apply: Literal["softmax", "none"] = option("softmax", "function that turns logits into scores.",
                                                           choices=("softmax", "none"), plan=False)
    compute: Compute = option("auto", "compute type, as for :func:`embed`.", choices=COMPUTE)
    truncate: bool = option(True, "True: truncate longer texts.", choices=(True, False))
    parse_special: bool = _parse_special("texts")
    adapter: str | None = _adapter()

    result: ClassVar[str] = "spans"
    prompt: ClassVar[None] = None
    prompt_name: ClassVar[None] = None


# ---- text ----------------------------------------------------------------------------------------------------------

#: Text that the default of ``max_tokens`` gets for chats with models that can think.
THINKS = f" ({THINKING_TOKENS:,} in chats with models that can think)"


def _sampling_option(name: str, doc: str) -> Any:
    """Return the field of a sampling option; :data:`mpool.tasks.sampling.TABLE` has its range and default."""
    row = TABLE[name]
    # For max_tokens, None means "no limit" and the default is a number. For all others None means the default.
    found: Any = option(row.default if name == "max_tokens" else None, f"{doc}; {row.allowed}.",
                        meaning=doc,
                        shown="None" if row.default is None else
                        f"{row.default}{THINKS if name == 'max_tokens' else ''}, unless the model's files set another")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Options of every text-generation request.

    A sampling option that is omitted or None has the value of the model's ``generation_config.json`` if that file
    enables sampling; options that the file omits are then off. Otherwise it has the default given with the option.
    """

    temperature: float | None = _sampling_option(
        "temperature", "divisor of the logits: higher values flatten the distribution of the next token")
    top_k: int | None = _sampling_option("top_k", "sample from this many most probable tokens")
    top_p: float | None = _sampling_option(
        "top_p", "sample from the smallest set of most probable tokens whose probabilities sum to at least this value")
    min_p: float | None = _sampling_option(
        "min_p", "sample from tokens whose probability is at least this fraction of the highest one")
    repetition_penalty: float | None = _sampling_option(
        "repetition_penalty", "divisor of the logits of tokens that occur in the prompt or the output (negative logits "
        "are multiplied)")
    presence_penalty: float | None = _sampling_option(
        "presence_penalty", "subtracted once from the logit of every token that was generated")
    frequency_penalty: float | None = _sampling_option(
        "frequency_penalty", "subtracted from the logit of a token for each time that it was generated")
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = option(
        None, "dict from token id to a value from -100 to 100 that is added to the token's logit.")
    seed: int | None = _sampling_option(
        "seed", "seed of the sampler, which the result reports; the same seed gives the same tokens")
    max_tokens: int | None = _sampling_option("max_tokens", "maximum number of tokens to generate per completion")
    min_tokens: int | None = _sampling_option(
        "min_tokens", "number of tokens to generate before a completion may end")
    stop: str | Sequence[str] | None = option(
        None, "stop string, or a list of up to 64; the completion ends before it. The reasoning and "
              "the tool calls of a chat do not.")
    stop_token_ids: Sequence[int] | None = option(
        None, "token ids that end the completion. In the reasoning and the tool calls of a chat, only control tokens "
              "do.")
    ignore_eos: bool | None = _sampling_option(
        "ignore_eos", "never sample the model's end-of-sequence tokens: only other limits then end a completion")
    logprobs: bool | int | None = option(
        None, "True: return the log probability of each generated token; a number from 0 to 20: also return those of "
        "this many most probable tokens at each position.")
    top_logprobs: int | None = option(
        None, "number of most probable tokens to return with log probabilities at each position, 0 to 20.")
    n: int | None = _sampling_option("n", "number of completions; the prompt is processed once for all of them")
    response_format: Mapping[str, Any] | type | None = option(
        None, "format that the output is constrained to: ``{\"type\": \"json_object\"}``, also with ``\"schema\"``, "
        "``{\"type\": \"json_schema\", \"json_schema\": {\"schema\": {...}}}``, a JSON schema, a pydantic class, "
        "``{\"type\": \"regex\", \"regex\": ...}``, or ``{\"type\": \"grammar\", \"grammar\": ...}`` with a Lark "
        "grammar of llguidance or a GBNF grammar of llama.cpp. Only tokens that keep the output valid are sampled, and "
        "the model may end only where the output is complete. It does not constrain the reasoning of a chat. If "
        "``max_tokens`` or a stop string cuts the output, ``finish_reason`` is ``\"length\"`` or ``stop`` is set. "
        "``parsed`` of the result is the parsed JSON value. Requires the extra ``grammar``.")
    context_length: int | None = option(
        None, "maximum number of tokens of the prompt and a completion together, 2 or more; None, or more than the "
        "model's context: the model's context.")
    adapter: str | None = _adapter()
    capture: Capture | CaptureJob | None = option(
        None, "object returned by :func:`mpool.debug.capture`, or by its ``job()`` method, that records the outputs of "
        "the model's layers.")
    compute: Compute = option("auto", "compute type, as for :func:`embed`.", choices=COMPUTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions(SamplingOptions):
    """Options of :func:`mpool.generate`."""

    parse_special: bool = _parse_special("prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions(SamplingOptions):
    """Options of :func:`mpool.chat` and :func:`mpool.vision`."""

    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = option(
        None, "functions that the model may call, at most 128: dicts in OpenAI's format, ``{\"type\": \"function\", "
        "\"function\": {\"name\": ..., \"description\": ..., \"parameters\": JSON schema, \"strict\": bool}}``; Python "
        "functions with annotated parameters and a docstring; or pydantic classes.")
    tool_choice: Literal["auto", "none", "required"] | Mapping[str, Any] | None = option(
        None, "``\"auto\"`` (the default): the model may reply with text or call functions; ``\"required\"``: it must "
        "call a function; ``{\"type\": \"function\", \"function\": {\"name\": ...}}``: it must call this function; "
        "``\"none\"``: it calls none, as without tools.")
    parallel_tool_calls: bool | None = option(
        None, "True (the default): a completion may have several tool calls; False: at most one.")
    template_options: Mapping[str, Any] | None = option(
        None, "dict of additional variables for the model's chat template, such as ``{\"enable_thinking\": False}``.")
    allow_urls: bool = option(False, "True: fetch images at http and https URLs.", choices=(True, False))
    image_tokens: int | None = option(
        None, "maximum number of tokens of each image, for Gemma 4 only: 70, 140, 280, 560 or 1120. None: the number "
        "in the configuration of the model's image processor, for GGUF files 280; an image with OpenAI's ``detail`` "
        "in a message has 70 (``low``), 560 (``high``) or 1120 (``original``).")


# ---- images --------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateImageOptions:
    """Options of :func:`mpool.generate_image`. None selects the model's default."""

    negative_prompt: str | None = option(
        None, "description of what the image should not show; for models with classifier-free guidance (Stable "
        "Diffusion 3) and a ``guidance_scale`` above 1.")
    width: int | None = option(None, "width in pixels; None: the size that the model was trained for.")
    height: int | None = option(None, "height in pixels; None: the size that the model was trained for.")
    num_inference_steps: int | None = option(
        None, "number of denoising steps, 1 to 1,000; None: 28; 4 for FLUX.1-schnell, and for Stable Diffusion 3.5 "
        "large turbo under its name in the catalogue. A local folder of turbo needs 4.")
    guidance_scale: float | None = option(
        None, "guidance scale, 0 to 1000; None: 7 for Stable Diffusion 3 and 3.5, 3.5 for FLUX.1-dev, 0 for "
        "FLUX.1-schnell, and for Stable Diffusion 3.5 large turbo under its name in the catalogue. A local folder of "
        "turbo needs 0.")
    seed: int | None = option(
        None, "seed of the initial noise, 0 to 2**64 - 1; None: a random seed, which the result reports.")
    latents: Any = option(
        None, "initial latents, used instead of noise from the seed: a NumPy array or torch tensor of shape ``(n, "
        "channels, height / 8, width / 8)``, in diffusers' format.")
    n: int = option(1, "number of images, 1 to 64.")
    preview_every: int = option(
        0, "number of steps between the previews of a stream or job; 0: no previews. Each preview runs the decoder "
        "once.")
    max_sequence_length: int | None = option(
        None, "maximum number of prompt tokens for the T5 text encoder; None: 256, or 512 for FLUX.1-dev.")
    compute: Compute = option(
        "auto", 'compute type, as for :func:`embed`; ``"auto"`` keeps quantised weights as they are stored.',
        choices=COMPUTE)

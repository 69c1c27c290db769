"""Options of every verb: one frozen dataclass each, and :class:`CallOptions`, which all verbs take.

The dataclasses drive the signatures of functions and methods, their documentation, the committed stubs (``.pyi``), the
command line's options and the error for an unknown option.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from ..checks import integer, refuse, unknown_option
from ..durations import seconds_of
from ..errors import InvalidArgument
from ..names import CAPABILITIES as CAPABILITIES
from ..names import COMPUTE, POLICIES
from ..runtime import threads as _threads
from .sampling import ALIASES, TABLE

if TYPE_CHECKING:
    from ..config import PoolConfig
    from .captures import Capture, CaptureJob

T = TypeVar("T")

Precision = Literal["float32", "int8", "uint8", "binary", "ubinary"]
Compute = Literal["auto", "float32", "bfloat16", "int8"]
Progress = bool | Callable[[int, int | None], object] | None
Priority = Literal["critical", "high", "normal", "low", "batch", 0, 1, 2, 3, 4]
Policy = Literal["shared", "pack", "p2c", "sequential"]

PRIORITIES = ("critical", "high", "normal", "low", "batch")


def _note(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


# ---- of every call -------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class CallOptions:
    """Options that every request takes, as keywords of the functions and methods.

    Raises:
        InvalidArgument: a value is out of range or of another type.

    Example:
        >>> mpool.embed("A sentence.", priority="high", tenant="alice", keep_alive="10m", timeout=60).shape
        (384,)
    """

    timeout: float | None = _note(None, "seconds for the request, from its start; None: no limit but "
                                  "``PoolConfig.request_timeout``.")
    priority: Priority = _note("normal", '``"critical"``, ``"high"``, ``"normal"``, ``"low"`` or ``"batch"`` (0 to 4): '
                               "requests of a higher priority leave the model's queue first; the priority of a request "
                               "rises while it waits.")
    tenant: str | int | None = _note(None, "a name, or a number from 1 to 2**32 - 1: the party that the request is "
                                     "for. Tenants of one priority get equal shares, and the time of a response tells "
                                     "none of them what another asked. None: one tenant for all unnamed requests.")
    keep_alive: float | str | None = _note(None, "seconds (or ``\"5m\"``) that the model stays loaded without work "
                                           "from this request on; 0: not at all; below 0: for ever. None: unchanged.")
    policy: Policy | None = _note(None, "which worker takes the request, as ``PoolConfig.policy``; None: the model's.")
    fail_fast: bool | None = _note(None, "True: raise Overloaded at once when the queue is full, with a hint when to "
                                   "retry; False: wait for room. None: as ``PoolConfig.fail_fast``.")

    def __post_init__(self) -> None:
        _threads.seconds_of(self.timeout)
        self.core()
        if self.fail_fast is not None and not isinstance(self.fail_fast, bool):
            refuse("fail_fast", self.fail_fast, "True, False or None")

    def core(self) -> dict[str, Any]:
        """Keywords of the core's submit functions, but for timeout, lane and fail_fast; defaults are left out."""
        found: dict[str, Any] = {}
        if self.priority != "normal" or not isinstance(self.priority, str):
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
    if isinstance(value, str) and value in PRIORITIES:
        return PRIORITIES.index(value)

    number = integer(value)
    if number is None or not 0 <= number < len(PRIORITIES):
        refuse("priority", value, f"one of {', '.join(PRIORITIES)}, or 0 to 4")
    return number


def _tenant(value: Any) -> int:
    if isinstance(value, str) and value:
        return _tenant_of_name(value)

    number = integer(value)
    if number is None or not 1 <= number < 2**32:
        refuse("tenant", value, "a name, 1 to 2**32 - 1, or None")
    return number


@lru_cache(maxsize=4096)
def _tenant_of_name(name: str) -> int:
    """The same number in every process."""
    import hashlib

    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest, "little") or 1


@dataclass(frozen=True, slots=True)
class Call:
    """Options of a request that has begun.

    Attributes:
        deadline: ``time.monotonic()`` at which it has run out of time; None: never.
        fail_fast: a full queue is an error.
        core: see :meth:`CallOptions.core`.
    """

    deadline: float | None
    fail_fast: bool
    core: Mapping[str, Any]

    def keywords(self, key: str, fail_fast: bool | None = None, again: bool = False) -> dict[str, Any]:
        """Keywords of the core's submit functions, but for the lane.

        Args:
            key: key of the model, for the error.
            fail_fast: instead of the call's.
            again: the caller retries if the queue is full: a refusal is not counted.

        Raises:
            Timeout: its time is over.
        """
        found = {**self.core, "timeout": _threads.remaining(self.deadline, key),
                 "fail_fast": self.fail_fast if fail_fast is None else fail_fast}
        if again:
            found["uncounted"] = True
        return found


PLAIN = Call(None, False, {})
_PLAIN_FAIL_FAST = Call(None, True, {})


def begin(config: PoolConfig, options: dict[str, Any]) -> Call:
    """Begins a request. Takes its options out of ``options``.

    Raises:
        InvalidArgument: one of them is out of range or of another type.
    """
    if options.keys().isdisjoint(CALL):
        return _PLAIN_FAIL_FAST if config.fail_fast else PLAIN
    found = CallOptions(**{name: options.pop(name) for name in CALL if name in options})
    fail_fast = config.fail_fast if found.fail_fast is None else found.fail_fast
    return Call(_threads.deadline_of(found.timeout), fail_fast, found.core())


def patient(call: Call) -> Call:
    """The same request, for its slices after the first one."""
    return replace(call, fail_fast=False) if call.fail_fast else call


#: Names of the options that every verb takes.
CALL = tuple(found.name for found in fields(CallOptions))


# ---- options of verbs ------------------------------------------------------------------------------------------------

def option(default: Any, doc: str, *, choices: tuple[Any, ...] | None = None, aliases: tuple[str, ...] = (),
           plan: bool = True, meaning: str = "", shown: str | None = None) -> Any:
    """A field of an options dataclass.

    Args:
        default: the value that an omitted option has.
        doc: its line in the documentation of every function that takes it.
        choices: the only values, if they can be listed.
        aliases: names that other libraries use for it, and that are taken as well.
        meaning: the documentation without range and default, for the command line.
        shown: the default as the documentation gives it, if not the field's.
        plan: False for an option that does not change the plan: it takes no part in comparisons.
    """
    return field(default=default, compare=plan, metadata={"doc": doc, "choices": choices, "aliases": aliases,
                                                          "meaning": meaning, "shown": shown})


def meaning_of(options: type, name: str) -> str:
    """The short documentation of an option."""
    return next(str(found.metadata["meaning"]) for found in fields(options) if found.name == name)


def names_of(options: type) -> tuple[str, ...]:
    """Every name that an options dataclass takes, aliases included, then those of :class:`CallOptions`."""
    own = (name for found in fields(options) for name in (found.name, *found.metadata.get("aliases", ())))
    return tuple(dict.fromkeys((*own, *CALL)))


def made(options: type[T], of: str, given: Mapping[str, Any]) -> T:
    """An options dataclass from the keywords of a request, under their own names or aliases.

    Args:
        options: the dataclass.
        of: the function, for the error.
        given: the keywords, without those of :class:`CallOptions`.

    Raises:
        InvalidArgument: an option does not exist (the nearest is named), or is given under two names.
    """
    if not given:
        return _defaults(options)  # type: ignore[arg-type, return-value]
    found: dict[str, Any] = {}
    targets = _targets(options)  # type: ignore[arg-type]
    for name, value in given.items():
        target = targets.get(name)
        if target is None:
            raise unknown_option(name, names_of(options), of=of)
        if target in found:
            raise InvalidArgument(f"`{target}` is given twice, once as `{name}`", param=target,
                                  hint="Both names mean the same option: pass one of them")
        found[target] = value
    return options(**found)


@cache
def _defaults(options: Any) -> Any:
    return options()


@cache
def _targets(options: Any) -> dict[str, str]:
    """Name or alias -> field."""
    return {name: found.name for found in fields(options)
            for name in (found.name, *found.metadata.get("aliases", ()))}


# ---- vectors -------------------------------------------------------------------------------------------------------

PRECISIONS = ("float32", "int8", "uint8", "binary", "ubinary")
ON_ERROR = ("raise", "null")
TASKS = ("query", "document")
_COMPUTE = ('compute type: ``"float32"``, ``"bfloat16"``, ``"int8"``, or ``"auto"``: the fastest on this CPU whose '
            "vectors have a cosine of at least 0.9999 to those of float32; models of more than 12 layers that were "
            'published in 16 bits use 16 bits. Use ``"float32"`` for results that are identical across machines.')


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorOptions:
    """Options that :func:`mpool.embed` and :func:`mpool.embed_image` share."""

    dimensions: int | None = option(None, "length of the returned vectors: the first components, for models trained "
                                    "for that (Matryoshka). Normalised vectors are normalised again after the cut. "
                                    "None: all, or as the model's files say.")
    normalize: bool | None = option(None, "True: vectors of length 1; False: as pooled; None: as the model's files "
                                    "say.", choices=(None, True, False))
    precision: Precision = option("float32", '``"float32"``; ``"int8"`` or ``"uint8"``: 256 levels over the range of '
                                  "each component among the vectors of this request, so it needs at least two inputs "
                                  'and should have hundreds; ``"binary"`` or ``"ubinary"``: signs, eight to a byte. As '
                                  "``quantize_embeddings`` of sentence-transformers.", choices=PRECISIONS)
    compute: Compute = option("auto", _COMPUTE, choices=COMPUTE)
    on_error: Literal["raise", "null"] = option("raise", '``"null"``: an input that cannot be embedded gives a row of '
                                                "NaN and the log a warning with the count, instead of an error. Only "
                                                "for float32.", choices=ON_ERROR)
    progress: Progress = option(None, "True: a progress bar; a function: called with (done, total); None: a bar for "
                                "long requests if the logger ``mpool`` is at INFO.", plan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextVectorOptions(VectorOptions):
    """Options that :func:`mpool.embed` and :func:`mpool.embed_iter` share."""

    task: Literal["query", "document"] | None = option(
        None, '``"query"`` or ``"document"``: puts the model\'s prompt for the task before each text, if it has one '
        "(``document`` also under the names ``passage`` and ``corpus``).", choices=(None, *TASKS))
    prompt: str | None = option(None, "a text to put before each text, instead of one of the model's prompts.")
    prompt_name: str | None = option(None, "the name of one of the model's prompts. Without ``task``, ``prompt`` and "
                                     "``prompt_name``, the model's default prompt is used, if it names one.")
    truncate: bool = option(True, "cut each text to the model's maximum length; False: raise ContextOverflow instead.",
                            choices=(True, False))

    @property
    def scores(self) -> bool:
        """False: the request is for vectors."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedOptions(TextVectorOptions):
    """Options of :func:`mpool.embed`."""

    max_inputs: int | None = option(None, "texts that the request may have; None: ``PoolConfig.max_embed_inputs``, "
                                    "10,000.", plan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedIterOptions(TextVectorOptions):
    """Options of :func:`mpool.embed_iter`."""

    batch_size: int | None = option(None, "None: one vector ``(d,)`` at a time; else arrays ``(batch_size, d)``, of "
                                    "which the last may be shorter. It changes neither speed nor results.", plan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions(VectorOptions):
    """Options of :func:`mpool.embed_image`."""

    allow_urls: bool = option(False, "fetch ``http`` and ``https`` URLs, within 30 seconds. Off by default: a program "
                              "that passes on URLs of others lets them reach every address this machine reaches.",
                              choices=(True, False))
    max_inputs: int | None = option(None, "images that the request may have; None: ``PoolConfig.max_embed_inputs``, "
                                    "10,000.", plan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankOptions:
    """Options of :func:`mpool.rerank`."""

    top_k: int | None = option(None, "documents in the result; None: all.", plan=False)
    compute: Compute = option("auto", "compute type, as for :func:`embed`.", choices=COMPUTE)
    truncate: bool = option(True, "cut the longer text of a pair (with a language model: the document) to the model's "
                            "maximum length; False: raise ContextOverflow instead.", choices=(True, False))
    prompt: str | None = option(None, "for a language model: what to look for, instead of one of the model's prompts.")
    prompt_name: str | None = option(None, "the name of one of those prompts. Without both, the model's default prompt "
                                     "is used, if it has one.")

    # a score is a vector of one component: the plan reads these as it reads those of EmbedOptions
    dimensions: ClassVar[None] = None
    normalize: ClassVar[None] = None
    task: ClassVar[None] = None
    precision: ClassVar[str] = "float32"
    on_error: ClassVar[str] = "raise"
    progress: ClassVar[bool] = False

    @property
    def scores(self) -> bool:
        """True: the request is for scores of pairs."""
        return True


# ---- text ----------------------------------------------------------------------------------------------------------

def _sampled(name: str, doc: str) -> Any:
    """An option of :data:`mpool.tasks.sampling.TABLE`, which says its range and default."""
    row = TABLE[name]
    # None is a value of its own for max_tokens; for the others it means the default
    found: Any = option(row.default if name == "max_tokens" else None, f"{doc}; {row.allowed}.",
                        aliases=tuple(other for other, target in ALIASES.items() if target == name), meaning=doc,
                        shown=f"{row.default}, unless the model's files say otherwise"
                        if row.default is not None else "None")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Options of every request for text. An omitted or None option of sampling has the value of the model's
    ``generation_config.json`` if that asks for sampling, else the default in brackets."""

    temperature: float | None = _sampled("temperature", "flattens the distribution of the next token")
    top_k: int | None = _sampled("top_k", "sample from the likeliest tokens")
    top_p: float | None = _sampled("top_p", "sample from the likeliest tokens that reach this probability together")
    min_p: float | None = _sampled("min_p", "sample from tokens of at least this share of the likeliest")
    repetition_penalty: float | None = _sampled("repetition_penalty", "divides the logits of tokens seen before")
    presence_penalty: float | None = _sampled("presence_penalty", "taken from the logits of generated tokens, once")
    frequency_penalty: float | None = _sampled("frequency_penalty", "the same for each time a token was generated")
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = option(
        None, "dict, token id -> -100 to 100, added to its logit.")
    seed: int | None = _sampled("seed", "the same seed gives the same tokens")
    max_tokens: int | None = _sampled("max_tokens", "tokens of an answer")
    min_tokens: int | None = _sampled("min_tokens", "no end before this many tokens")
    stop: str | Sequence[str] | None = option(None, "a string, or up to 64; the text ends before it.")
    stop_token_ids: Sequence[int] | None = option(None, "ids that end the text.")
    ignore_eos: bool | None = _sampled("ignore_eos", "continue after the model's own end")
    logprobs: bool | int | None = option(None, "True: log probabilities of the tokens; a number: and of as many "
                                         "alternatives.")
    top_logprobs: int | None = option(None, "log probabilities of up to 20 alternatives.")
    n: int | None = _sampled("n", "answers to one reading of the prompt")
    response_format: Mapping[str, Any] | type | None = option(
        None, "what the answer must look like; no other token is sampled. ``{\"type\": \"json_object\"}``, "
        "``{\"type\": \"json_schema\", \"json_schema\": {\"schema\": {...}}}``, a JSON schema, a pydantic class, "
        "``{\"type\": \"regex\", \"regex\": ...}``, or ``{\"type\": \"grammar\", \"grammar\": ...}`` (llguidance's "
        "Lark). The model may end only where the text is complete. If ``max_tokens`` or a stop string cuts it, "
        "``finish_reason`` is ``\"length\"`` or ``stop`` is set. ``parsed`` of the result is the JSON value. Needs the "
        "extra ``grammar``.")
    capture: Capture | CaptureJob | None = option(None, "the result of :func:`capture`, or a ``job()`` of it: records "
                                                  "the outputs of the model's layers.")
    compute: Compute = option("auto", "compute type, as for :func:`embed`.", choices=COMPUTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions(SamplingOptions):
    """Options of :func:`mpool.generate`."""

    parse_special: bool = option(False, "read the texts of control tokens in the prompt as those tokens.",
                                 choices=(True, False))


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions(SamplingOptions):
    """Options of :func:`mpool.chat` and :func:`mpool.vision`."""

    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = option(
        None, "functions that the model may call, at most 128: OpenAI's dicts ``{\"type\": \"function\", "
        "\"function\": {\"name\": ..., \"description\": ..., \"parameters\": JSON schema, \"strict\": bool}}``, Python "
        "functions with annotated parameters (the docstring describes them), pydantic classes.")
    tool_choice: Literal["auto", "none", "required"] | Mapping[str, Any] | None = option(
        None, "\"auto\" (the default): the model may answer or call; \"required\": it must call; ``{\"type\": "
        "\"function\", \"function\": {\"name\": ...}}``: it must call this function; \"none\": as without tools.")
    parallel_tool_calls: bool | None = option(None, "True (the default): an answer may have several tool calls.")
    template_options: Mapping[str, Any] | None = option(None, "dict of further variables of the model's chat template, "
                                                        "such as ``{\"enable_thinking\": False}``.")
    allow_urls: bool = option(False, "fetch images at http and https URLs.", choices=(True, False))


# ---- images --------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateImageOptions:
    """Options of :func:`mpool.generate_image`. None: as the model says."""

    negative_prompt: str | None = option(None, "what the image should not show; for models with guidance (Stable "
                                         "Diffusion 3) and a guidance_scale above 1.")
    width: int | None = option(None, "pixels; None: as the model was trained.")
    height: int | None = option(None, "pixels; None: as the model was trained.")
    num_inference_steps: int | None = option(None, "None: 28; 4 for FLUX.1-schnell. Stable Diffusion 3.5 large turbo "
                                             "needs 4.", aliases=("steps",))
    guidance_scale: float | None = option(None, "None: 7 for Stable Diffusion 3 (turbo needs 0), 3.5 for FLUX.1-dev.",
                                          aliases=("cfg_scale",))
    seed: int | None = option(None, "0 to 2**64 - 1; None: a random one, which the result tells.")
    latents: Any = option(None, "the start instead of noise of the seed: an array (n, channels, height / 8, width / "
                          "8), as diffusers takes it, of numpy or torch.")
    n: int = option(1, "number of images.", aliases=("num_images_per_prompt",))
    preview_every: int = option(0, "steps between previews of a stream or job; each preview runs the decoder once.")
    max_sequence_length: int | None = option(None, "tokens for T5; None: 256, or 512 for FLUX.1-dev.")
    compute: Compute = option("auto", 'as for :func:`embed`; ``"auto"`` keeps quantised weights as they are stored.',
                              choices=COMPUTE)

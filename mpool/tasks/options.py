"""What calls can be told. The names that several functions share stand here, and nowhere else in the package.

Each group is twice, one beside the other: a frozen dataclass with the defaults, for the package, and a TypedDict, for
type checkers and editors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from ..checks import integer, shown
from ..durations import seconds_of
from ..errors import InvalidArgument
from ..names import CAPABILITIES as CAPABILITIES
from ..names import POLICIES
from ..runtime import threads as _threads

if TYPE_CHECKING:
    from ..config import PoolConfig
    from ..debug.captures import Capture, CaptureJob

F = TypeVar("F", bound=Callable[..., Any])

Precision = Literal["float32", "int8", "uint8", "binary", "ubinary"]
Compute = Literal["auto", "float32", "bfloat16", "int8"]
Progress = bool | Callable[[int, int | None], object] | None
Priority = Literal["critical", "high", "normal", "low", "batch", 0, 1, 2, 3, 4]
Policy = Literal["shared", "pack", "p2c", "sequential"]

PRIORITIES = ("critical", "high", "normal", "low", "batch")


# ---- of every call -------------------------------------------------------------------------------------------------

class CallKeywords(TypedDict, total=False):
    """:class:`CallOptions` as keywords."""

    timeout: float | None
    priority: Priority
    tenant: str | int | None
    keep_alive: float | str | None
    policy: Policy | None
    fail_fast: bool | None


@dataclass(frozen=True)
class CallOptions:
    """What every call can be told besides what it is to compute. Calls take these as keywords.

    Attributes:
        timeout: seconds for the call, from its start; None: no limit but ``PoolConfig.request_timeout``.
        priority: ``"critical"``, ``"high"``, ``"normal"``, ``"low"`` or ``"batch"`` (0 to 4): among calls that wait for
            a model, those before go first; who waits long rises.
        tenant: a name, or a number from 1 to 2**32 - 1: who the call is for. Tenants of one priority get equal shares,
            and none can tell by the time of its answer what another asked. None: the tenant of all that name none.
        keep_alive: how long the model stays without work from this call on, as ``PoolConfig.keep_alive``: seconds,
            ``"5m"``; 0: not at all; below 0: for ever. None: as it is.
        policy: which worker takes the call, as ``PoolConfig.policy``. None: the model's.
        fail_fast: True: raise Overloaded at once when as many calls wait as may, with a hint when to come back; False:
            wait for room. None: as ``PoolConfig.fail_fast`` says.

    Raises:
        InvalidArgument: a value is not as described.

    Example:
        >>> mpool.embed("A sentence.", priority="high", tenant="alice", keep_alive="10m", timeout=60).shape
        (384,)
    """

    timeout: float | None = None
    priority: Priority = "normal"
    tenant: str | int | None = None
    keep_alive: float | str | None = None
    policy: Policy | None = None
    fail_fast: bool | None = None

    def __post_init__(self) -> None:
        _threads.seconds_of(self.timeout)
        self.core()
        if self.fail_fast is not None and not isinstance(self.fail_fast, bool):
            raise InvalidArgument(f"fail_fast is {shown(self.fail_fast)}, allowed: True, False, None")

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
                raise InvalidArgument(f"policy is {shown(self.policy)}, allowed: {', '.join(POLICIES)}, or None")
            found["policy"] = self.policy
        return found


def _priority(value: Any) -> int:
    if isinstance(value, str) and value in PRIORITIES:
        return PRIORITIES.index(value)

    number = integer(value)
    if number is None or not 0 <= number < len(PRIORITIES):
        raise InvalidArgument(f"priority is {shown(value)}, allowed: {', '.join(PRIORITIES)}, or 0 to 4")
    return number


def _tenant(value: Any) -> int:
    if isinstance(value, str) and value:
        return _tenant_of_name(value)

    number = integer(value)
    if number is None or not 1 <= number < 2**32:
        raise InvalidArgument(f"tenant is {shown(value)}, allowed: a name, 1 to 2**32 - 1, or None")
    return number


@lru_cache(maxsize=4096)
def _tenant_of_name(name: str) -> int:
    """The same number in every process."""
    import hashlib

    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest, "little") or 1


@dataclass(frozen=True, slots=True)
class Call:
    """Options of a call that has begun.

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
            key: of the model, for the error.
            fail_fast: instead of the call's.
            again: who finds the queue full will come again: it does not count as a call that was refused.

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
    """The call that begins now. Takes its options out of ``options``.

    Raises:
        InvalidArgument: one of them is not as described.
    """
    if options.keys().isdisjoint(_CALL):
        return _PLAIN_FAIL_FAST if config.fail_fast else PLAIN
    found = CallOptions(**{name: options.pop(name) for name in _CALL if name in options})
    fail_fast = config.fail_fast if found.fail_fast is None else found.fail_fast
    return Call(_threads.deadline_of(found.timeout), fail_fast, found.core())


def patient(call: Call) -> Call:
    """The same call, for the parts of it that follow the first one."""
    return replace(call, fail_fast=False) if call.fail_fast else call


_CALL = tuple(field.name for field in fields(CallOptions))


# ---- of embedding --------------------------------------------------------------------------------------------------

class EmbedOptions(CallKeywords, total=False):
    """Options of :func:`mpool.embed` and :func:`mpool.embed_iter` after ``task``."""

    prompt: str | None
    prompt_name: str | None
    dimensions: int | None
    normalize: bool | None
    precision: Precision
    compute: Compute
    truncate: bool
    on_error: Literal["raise", "null"]
    progress: Progress


@dataclass(frozen=True, slots=True)
class Embedding:
    """What an embedding call is to compute, as passed."""

    task: str | None = None
    prompt: str | None = None
    prompt_name: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    precision: str = "float32"
    compute: str = "auto"
    truncate: bool = True
    on_error: str = "raise"

    @property
    def scores(self) -> bool:
        """Whether pairs are to be scored."""
        return False


@dataclass(frozen=True, slots=True)
class Reranking(Embedding):
    """What a reranking call is to compute."""

    @property
    def scores(self) -> bool:
        return True


def embedding(function: str, options: Mapping[str, Any]) -> Embedding:
    """The rest of a call's keywords.

    Raises:
        TypeError: there is no such option, as Python says it.
    """
    try:
        return Embedding(**options)
    except TypeError:
        wrong = next(name for name in options if name not in Embedding.__slots__)
        raise TypeError(f"{function}() got an unexpected keyword argument {wrong!r}") from None


class ImageOptions(CallKeywords, total=False):
    """Options of :func:`mpool.embed_image`."""

    dimensions: int | None
    normalize: bool | None
    precision: Precision
    compute: Compute
    on_error: Literal["raise", "null"]
    allow_urls: bool
    progress: Progress


@dataclass(frozen=True, slots=True)
class ImageEmbedding:
    """What an image embedding call is to compute, as passed."""

    dimensions: int | None = None
    normalize: bool | None = None
    precision: str = "float32"
    compute: str = "auto"
    on_error: str = "raise"
    allow_urls: bool = False


def image_embedding(options: Mapping[str, Any]) -> ImageEmbedding:
    """The rest of a call's keywords.

    Raises:
        TypeError: there is no such option, as Python says it.
    """
    try:
        return ImageEmbedding(**options)
    except TypeError:
        wrong = next(name for name in options if name not in ImageEmbedding.__slots__)
        raise TypeError(f"embed_image() got an unexpected keyword argument {wrong!r}") from None


_EMBED: dict[str, Any] = {**{field.name: field.default for field in fields(Embedding)}, "progress": None,
                          **{field.name: field.default for field in fields(CallOptions)}}
_IMAGES: dict[str, Any] = {**{field.name: field.default for field in fields(ImageEmbedding)}, "progress": None,
                           **{field.name: field.default for field in fields(CallOptions)}}
assert set(_IMAGES) == set(ImageOptions.__annotations__)
assert set(_EMBED) == {*EmbedOptions.__annotations__, "task"} and set(_CALL) == set(CallKeywords.__annotations__)


def spelt_out(function: F) -> F:
    """Has ``inspect.signature`` and ``help`` show the options that the function takes as ``**options``."""
    images = function.__name__ == "embed_image"
    signature = inspect.signature(function)
    named = [parameter for parameter in signature.parameters.values()
             if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    taken = {parameter.name for parameter in named}
    hints = {**(ImageOptions if images else EmbedOptions).__annotations__, **CallKeywords.__annotations__}
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default,
                              annotation=getattr(hints.get(name), "__forward_arg__", Any))
            for name, default in (_IMAGES if images else _EMBED).items() if name not in taken]
    function.__signature__ = signature.replace(parameters=[*named, *more])  # type: ignore[attr-defined]
    return function


class RerankOptions(CallKeywords, total=False):
    """Options of :func:`mpool.rerank` after ``top_k``."""

    compute: Compute
    truncate: bool
    prompt: str | None
    prompt_name: str | None


# ---- of text -------------------------------------------------------------------------------------------------------

class TextOptions(CallKeywords, total=False):
    """Options of :func:`mpool.generate` and :func:`mpool.chat`, the aliases included; see
    :mod:`mpool.tasks.sampling`."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    repeat_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    seed: int | None
    max_tokens: int | None
    max_new_tokens: int | None
    max_completion_tokens: int | None
    num_predict: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    logprobs: bool | int | None
    top_logprobs: int | None
    n: int | None
    parse_special: bool
    response_format: Mapping[str, Any] | type | None
    capture: Capture | CaptureJob | None
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None
    tool_choice: Literal["auto", "none", "required"] | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    template_options: Mapping[str, Any] | None
    allow_urls: bool
    compute: Compute


# ---- of pictures ---------------------------------------------------------------------------------------------------

class PictureOptions(CallKeywords, total=False):
    """Options of :func:`mpool.generate_image`, the aliases included; see :mod:`mpool.tasks.text_to_image`."""

    negative_prompt: str | None
    width: int | None
    height: int | None
    num_inference_steps: int | None
    steps: int | None
    guidance_scale: float | None
    cfg_scale: float | None
    seed: int | None
    latents: Any
    n: int
    num_images_per_prompt: int
    preview_every: int
    max_sequence_length: int | None
    compute: Compute

"""Sampling options: their names, ranges and defaults in one table, and their validation.

The names are those of vLLM and OpenAI. An option that the caller omits has the value of the model's
``generation_config.json`` if that file enables sampling (options that the file omits are then off), else the default of
:data:`TABLE`: temperature 0.7, top_k 40, top_p 0.95, no penalties, 512 tokens.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from ..checks import integer, real, refuse, shown, unknown_option
from ..errors import InvalidArgument

MAX_STOPS, MAX_STOP_BYTES, MAX_IDS, MAX_CHOICES, MAX_TOP_LOGPROBS = 64, 1024, 4096, 128, 20
_MAX_TOKENS = 2**31 - 1
#: Number of token ids that any vocabulary may have, for checks without a model: ids are int32.
MAX_VOCAB = 2**31


class Row(NamedTuple):
    """Definition of a scalar option.

    Attributes:
        kind: ``int``, ``float`` or ``bool``.
        low: lowest allowed value.
        high: highest allowed value.
        default: value of an omitted option if the model's files do not enable sampling.
        off: value that turns the option off.
        allowed: allowed values, as a phrase that completes "must be ..."; shown in documentation and errors.
    """

    kind: type
    low: float
    high: float
    default: Any
    off: Any
    allowed: str


TABLE: dict[str, Row] = {
    "temperature": Row(float, 0.0, 100.0, 0.7, 1.0, "0 (always the most probable token) to 100"),
    "top_k": Row(int, -1, _MAX_TOKENS, 40, 0, "1 to 2**31 - 1, or 0 or -1 for all tokens"),
    "top_p": Row(float, 1e-6, 1.0, 0.95, 1.0, "above 0 and at most 1 (off)"),
    "min_p": Row(float, 0.0, 1.0, 0.0, 0.0, "0 (off) to 1"),
    "repetition_penalty": Row(float, 1e-3, 100.0, 1.0, 1.0, "above 0 and at most 100 (1 is off)"),
    "presence_penalty": Row(float, -2.0, 2.0, 0.0, 0.0, "-2 to 2 (0 is off)"),
    "frequency_penalty": Row(float, -2.0, 2.0, 0.0, 0.0, "-2 to 2 (0 is off)"),
    "max_tokens": Row(int, 1, _MAX_TOKENS, 512, 512, "1 to 2**31 - 1, or None to generate until the context is full"),
    "min_tokens": Row(int, 0, _MAX_TOKENS, 0, 0, "0 to max_tokens"),
    "n": Row(int, 1, MAX_CHOICES, 1, 1, f"1 to {MAX_CHOICES}"),
    "seed": Row(int, 0, 2**64 - 1, None, None, "0 to 2**64 - 1, or None for a random seed"),
    "ignore_eos": Row(bool, 0, 1, False, False, "True or False"),
}

#: Default of ``max_tokens`` in chats with a model that can think: reasoning alone may take more than the usual default.
THINKING_TOKENS = 4096

#: Options that are not scalars. Each has a validation function of its own.
OTHERS = ("stop", "stop_token_ids", "logit_bias", "logprobs", "top_logprobs")

NAMES = (*TABLE, *OTHERS)
#: How the error of a value names its type; 2.0 and True are in the range of many integers.
_KINDS = {int: "an integer ", float: "a number "}


@dataclass(frozen=True, slots=True)
class Sampling:
    """Validated sampling options of a request, with defaults filled in.

    Attributes:
        max_tokens: maximum number of generated tokens; None: until the context is full.
        seed: seed of the sampler; chosen at random if the caller gave none.
        logprobs: number of alternatives to return with log probabilities at each position; 0: only the generated
            token; -1: no log probabilities.
        stop: stop strings.
        stop_ids: stop tokens.
        bias: pairs of token id and value to add to the token's logit.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    max_tokens: int | None
    min_tokens: int
    n: int
    seed: int
    ignore_eos: bool
    logprobs: int
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    bias: tuple[tuple[int, float], ...]


def scalar(name: str, value: Any, row: Row) -> Any:
    """Return the value of a scalar option, converted to its type. Bools are not numbers; NaN is outside every range.

    Raises:
        InvalidArgument: the value has another type or is out of range.
    """
    found: Any
    if row.kind is bool:
        found = value if isinstance(value, bool) else None
    else:
        found = integer(value) if row.kind is int else real(value)
    if found is None or not row.low <= found <= row.high:
        refuse(name, value, row.allowed if row.kind is bool or row.allowed.startswith("True") else
               _KINDS[row.kind] + ("" if row.allowed.startswith("above ") else "from ") + row.allowed)
    return found


def check(options: Mapping[str, Any]) -> dict[str, Any]:
    """Validate sampling options without a model: everything but token ids beyond its vocabulary.

    Returns:
        The numbers and bools that are given, under their own names.

    Raises:
        InvalidArgument: as :func:`resolve`.
    """
    given = _known(options)
    values = {name: scalar(name, given[name], row) for name, row in TABLE.items() if given.get(name) is not None}
    if values.get("min_tokens", 0) > values.get("max_tokens", _MAX_TOKENS):
        _refuse_min_tokens(values)
    _logprobs(given.get("logprobs"), given.get("top_logprobs"))
    _stops(given.get("stop"))
    _ids("stop_token_ids", given.get("stop_token_ids"), MAX_VOCAB)
    _bias(given.get("logit_bias"), MAX_VOCAB)
    return values


def _refuse_min_tokens(values: Mapping[str, Any]) -> NoReturn:
    refuse("min_tokens", values["min_tokens"], f"an integer from 0 to max_tokens, which is {values['max_tokens']}")


def resolve(options: Mapping[str, Any], defaults: Mapping[str, Any], vocab: int, thinks: bool = False) -> Sampling:
    """Validate the sampling options of a request and fill in defaults.

    Args:
        options: names and values as passed by the caller.
        defaults: values of the model's ``generation_config.json``; empty if the file does not enable sampling.
        vocab: number of token ids in the vocabulary.
        thinks: whether the model can think before it answers.

    Raises:
        InvalidArgument: an option does not exist (the error suggests the most similar one), or has an invalid value.
    """
    given = _known(options)
    if thinks and "max_tokens" not in given and "max_tokens" not in defaults:
        given["max_tokens"] = THINKING_TOKENS
    values: dict[str, Any] = {}
    for name, row in TABLE.items():
        value = given.get(name)
        if value is None and (name != "max_tokens" or name not in given):
            value = defaults.get(name, row.off) if defaults else row.default
        values[name] = value if value is None else scalar(name, value, row)
    values["top_k"] = max(values["top_k"], 0)
    if values["seed"] is None:
        values["seed"] = int.from_bytes(os.urandom(4), "little")
    if values["max_tokens"] is not None and values["min_tokens"] > values["max_tokens"]:
        _refuse_min_tokens(values)
    return Sampling(**values, logprobs=_logprobs(given.get("logprobs"), given.get("top_logprobs")),
                    stop=_stops(given.get("stop")), stop_ids=_ids("stop_token_ids", given.get("stop_token_ids"), vocab),
                    bias=_bias(given.get("logit_bias"), vocab))


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, all of which must exist. ``max_tokens`` -1 is "no limit" of llama.cpp."""
    for name in options:
        if name not in NAMES:
            raise unknown_option(name, NAMES, of="sampling")
    return {**options, "max_tokens": None} if integer(options.get("max_tokens")) == -1 else dict(options)


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if getattr(value, "ndim", 0) == 1 and getattr(getattr(value, "dtype", None), "kind", "") in ("U", "T", "O"):
        value = value.tolist()
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, (list, tuple, set, frozenset)) or len(stops) > MAX_STOPS:
        got = f"{len(stops):,} strings" if isinstance(stops, (list, tuple, set, frozenset)) else shown(value)
        raise InvalidArgument(param="stop", got=got, allowed=f"a string or a list of at most {MAX_STOPS} strings")
    for at, stop in enumerate(stops):
        try:
            size = len(stop.encode()) if isinstance(stop, str) else 0
        except UnicodeEncodeError:
            size = 0
        if not 1 <= size <= MAX_STOP_BYTES:
            refuse(f"stop[{at}]", stop, f"Unicode text of 1 to {MAX_STOP_BYTES:,} bytes in UTF-8")
    return tuple(stops)


def check_id(name: str, value: Any, vocab: int) -> int:
    """Return ``value`` as a token id.

    Raises:
        InvalidArgument: it is not an integer from 0 to ``vocab - 1``; ``name`` describes it in the message.
    """
    token = value if type(value) is int else integer(value)
    if token is None or not 0 <= token < vocab:
        refuse(name, value, f"a token id, an integer from 0 to {vocab - 1}")
    return token


def _ids(name: str, value: Any, vocab: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if getattr(value, "ndim", 0) == 1 and hasattr(value, "tolist") \
            and getattr(getattr(value, "dtype", None), "kind", None) in ("i", "u"):
        value = value.tolist()
    if isinstance(value, (str, bytes, bytearray, memoryview)) or not isinstance(value, Sequence) \
            or len(value) > MAX_IDS:
        got = f"{len(value):,} ids" if isinstance(value, (list, tuple)) else shown(value)
        raise InvalidArgument(param=name, got=got, allowed=f"a list of at most {MAX_IDS:,} token ids")
    return tuple(check_id(f"{name}[{at}]", token, vocab) for at, token in enumerate(value))


def _bias(value: Any, vocab: int) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, Mapping) or len(value) > MAX_IDS:
        got = f"{len(value):,} entries" if isinstance(value, Mapping) else shown(value)
        raise InvalidArgument(param="logit_bias", got=got,
                              allowed=f"a dict from token id to bias with at most {MAX_IDS:,} entries")
    found: dict[int, float] = {}
    row = Row(float, -100.0, 100.0, 0.0, 0.0, "-100 to 100")
    for key, bias in value.items():
        # Keys of JSON objects are always strings.
        token = integer(int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10 else key)
        if token is None or not 0 <= token < vocab:
            raise InvalidArgument(param="logit_bias", got=f"the key {shown(key)}",
                                  allowed=f"a dict whose keys are token ids, 0 to {vocab - 1}")
        found[token] = scalar(f"logit_bias[{shown(key)}]", bias, row)
    return tuple(found.items())


def _logprobs(logprobs: Any, top: Any) -> int:
    """Return :attr:`Sampling.logprobs` for the options ``logprobs`` and ``top_logprobs``."""
    row = Row(int, 0, MAX_TOP_LOGPROBS, 0, 0, f"True, False, or an integer from 0 to {MAX_TOP_LOGPROBS}")
    count = -1
    if isinstance(logprobs, bool):
        count = 0 if logprobs else -1
    elif logprobs is not None:
        count = scalar("logprobs", logprobs, row)
    if top is not None:
        alternatives = scalar("top_logprobs", top, row._replace(allowed=f"0 to {MAX_TOP_LOGPROBS}"))
        if logprobs is False and alternatives:
            refuse("top_logprobs", alternatives, "0 or None if logprobs is False", hint="Set logprobs=True, or omit it")
        if alternatives:
            count = max(count, alternatives)
    return count


__all__ = ["NAMES", "Sampling", "TABLE", "check_id", "resolve", "scalar"]

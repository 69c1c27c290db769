"""Keyword arguments that several functions share, for type checkers. Never imported at run time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

Precision = Literal["float32", "int8", "uint8", "binary", "ubinary"]
Compute = Literal["auto", "float32", "bfloat16", "int8"]
Progress = bool | Callable[[int, int | None], object] | None


class EmbedOptions(TypedDict, total=False):
    """Options of :func:`mpool.embed` after ``task``."""

    prompt: str | None
    prompt_name: str | None
    dimensions: int | None
    normalize: bool | None
    precision: Precision
    compute: Compute
    truncate: bool
    on_error: Literal["raise", "null"]
    progress: Progress
    timeout: float | None


class TextOptions(TypedDict, total=False):
    """Options of :func:`mpool.generate` and :func:`mpool.chat`, the aliases included."""

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
    tools: Sequence[Mapping[str, Any]] | None
    template_options: Mapping[str, Any] | None
    compute: Compute
    timeout: float | None

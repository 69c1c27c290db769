"""Conversion of the sampling options of a request to options of the library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..conversation.messages import DETAILS
from ..host import native_calls
from .errors import Refusal
from .models import is_missing

if TYPE_CHECKING:
    from .fields import SamplingFields
    from .models import ServedModel
    from .operations import Context

#: Fields of a request that have the same name in the library. No protocol has all of them.
_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "logit_bias", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "n")


def sampling(context: Context, served: ServedModel, body: SamplingFields, most: int | None) -> dict[str, Any]:
    """Convert the sampling options of a request to options of the library. Unset options have the model's defaults.

    Args:
        context: Context of the request.
        served: The model.
        body: Body of the request.
        most: Maximum number of tokens per completion; None: that of the model, else ``Settings.default_max_tokens``.

    Raises:
        Refusal: The request asks for more completions than the server allows.
    """
    limits = context.state.settings
    found = {**{name: value for name, value in served.defaults.items() if name != "image_tokens"},
             **{name: value for name in _OPTIONS if (value := getattr(body, name, None)) is not None}}
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if getattr(body, name, None) == 0:
            raise Refusal("invalid_value", f"`{name}` must be 1 or more, or -1 for the server's maximum, got 0.", name)
    narrow(found)
    check_count(found.get("n", 1), limits.max_n)
    found["max_tokens"] = limits.completion_tokens(found.get("max_tokens") if most is None else most)
    if "min_tokens" in found:
        found["min_tokens"] = min(found["min_tokens"], found["max_tokens"])
    if body.seed is not None:
        found["seed"] = body.seed % 2**64
    return found


async def image_tokens(context: Context, served: ServedModel, given: int | None, name: str = "image_tokens",
                       messages: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Convert the maximum number of tokens per image to an option of the library. Without it, an alias may have one.

    Args:
        context: Context of the request.
        served: The model. If its images have a fixed number of tokens, or it takes none, it ignores the field.
        given: Value of the field; None: it is absent.
        name: Field of the request, for errors.
        messages: Messages of the library with images whose ``detail`` takes precedence over the number of an alias.

    Raises:
        Refusal: The model ignores the field, and the server is strict.
    """
    tokens = served.defaults.get("image_tokens") if given is None else given
    if tokens is None or is_missing(served):
        return {}
    vision = await native_calls.REQUESTS.arun(lambda: served.model.description.vision)
    if vision is not None and vision.rows_allowed:
        context.names["image_tokens"] = name
        images = [part for message in messages if isinstance(message.get("content"), list)
                  for part in message["content"] if part["type"] == "image"]
        if given is not None or not any(part.get("detail") in DETAILS for part in images):
            return {"image_tokens": tokens}
        for part in images:
            part["image"] = replace(part["image"], tokens=tokens)
        return {}
    if given is not None:
        context.ignore(name, f"`{name}` must be absent: this model has no choice of tokens per image.", name)
    return {}


def narrow(options: dict[str, Any]) -> None:
    """Replace ``top_p`` 0, which clients send for the most likely token, with ``top_k`` 1: the library refuses it."""
    if options.get("top_p") == 0:
        del options["top_p"]
        options["top_k"] = 1


def check_count(count: int, most: int) -> None:
    """Check the number of completions or images of a request.

    Raises:
        Refusal: The number exceeds ``most``.
    """
    if count > most:
        raise Refusal("invalid_value", f"`n` must request at most {most} results in total, got {count}.", "n")


__all__ = ["check_count", "image_tokens", "narrow", "sampling"]

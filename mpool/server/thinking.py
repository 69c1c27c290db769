"""Reasoning effort: each protocol's option as the variables of the model's chat template."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from ..conversation import reasoning
from ..conversation.template import ChatTemplate
from ..errors import MpoolError
from .errors import Refusal

if TYPE_CHECKING:
    from .models import Served

#: Template variables: the switch (Qwen3, SmolLM3; DeepSeek V3.1, Granite), and the degree (GPT-OSS).
_SWITCHES, _DEGREE = ("enable_thinking", "thinking"), "reasoning_effort"
#: Degree of OpenAI's protocol -> degree of templates.
_DEGREES = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


class Thinking(NamedTuple):
    """Reasoning options of a template. ``thinks``: its model may think; ``switches``: variables that turn thinking on
    and off; ``degree``: the template has a degree."""

    thinks: bool
    switches: tuple[str, ...]
    degree: bool

    def turned(self, on: bool) -> dict[str, Any]:
        """Variables that turn thinking on or off."""
        return dict.fromkeys(self.switches, on)


@functools.lru_cache(maxsize=64)
def of_template(source: str) -> Thinking:
    """Find the reasoning options of a chat template.

    Raises:
        FormatError, LimitError: the template is not valid.
    """
    read = ChatTemplate(source).variables()
    switches, degree = tuple(name for name in _SWITCHES if name in read), _DEGREE in read
    return Thinking(degree or bool(switches) or reasoning.of_template(source, "") is not None, switches, degree)


def of_model(served: Served) -> Thinking:
    """Find the reasoning options of a model. Reads its files unless they were read before."""
    source = served.model.description.chat_template
    try:
        return of_template(source) if source else Thinking(False, (), False)
    except MpoolError:  # an invalid template fails when it is used
        return Thinking(False, (), False)


async def of_openai(served: Served, effort: str | None) -> dict[str, Any]:
    """Options of the library for a ``reasoning_effort``. A model that does not think accepts every effort.

    Raises:
        Refusal: the effort is none, and the model always thinks.
    """
    if effort is None:
        return {}
    found = await asyncio.to_thread(of_model, served)
    if effort == "none":
        if found.thinks and not found.switches:
            raise Refusal("unsupported_parameter", "`reasoning_effort` must not be none: this model always thinks.",
                          "reasoning_effort")
        return _options(found.turned(False))
    return _options({**found.turned(True), **({_DEGREE: _DEGREES[effort]} if found.degree else {})})


async def of_ollama(served: Served, think: bool | str | None) -> dict[str, Any]:
    """Options of the library for a ``think``. As in Ollama, a model that always thinks ignores false.

    Raises:
        Refusal: the model does not think, or has no such degree.
    """
    if think is None:
        return {}
    if isinstance(think, str) and think not in ("low", "medium", "high"):
        raise Refusal("invalid_value", "`think` must be one of true, false, low, medium, high.", "think")
    found = await asyncio.to_thread(of_model, served)
    if think is not False and not found.thinks:
        raise Refusal("unsupported_parameter", f'"{served.name}" does not support thinking.', "think")
    if isinstance(think, str):
        if not found.degree:
            raise Refusal("unsupported_parameter", f'think value "{think}" is not supported for this model.', "think")
        return _options({**found.turned(True), _DEGREE: think})
    return _options(found.turned(think))


def _options(variables: dict[str, Any]) -> dict[str, Any]:
    return {"template_options": variables} if variables else {}


__all__ = ["Thinking", "of_model", "of_ollama", "of_openai", "of_template"]

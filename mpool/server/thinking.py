"""Reasoning effort: conversion of each protocol's option to variables of the model's chat template."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from ..checks import shown
from ..conversation import reasoning
from ..conversation.template import ChatTemplate
from ..errors import MpoolError
from ..host import native_calls
from .errors import Refusal
from .models import is_missing

if TYPE_CHECKING:
    from .models import ServedModel

#: Template variable of the level (GPT-OSS).
_LEVEL = "reasoning_effort"
#: Value of OpenAI's ``reasoning_effort`` -> level of chat templates.
_LEVELS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
#: Level of chat templates, and the minimum budget in tokens that selects it. The budgets of Claude Code (4,000, 10,000
#: and 31,999) select the three levels.
_BUDGETS = (("high", 16_384), ("medium", 4096), ("low", 0))


class Thinking(NamedTuple):
    """Reasoning options of a chat template.

    Attributes:
        thinks: The model can think.
        switches: Names of the options that turn thinking on and off.
        has_level: The template has a reasoning level.
    """

    thinks: bool
    switches: tuple[str, ...]
    has_level: bool

    def switched(self, on: bool) -> dict[str, Any]:
        """Return the variables that turn thinking on or off."""
        return {name: reasoning.SWITCHES[name][on] for name in self.switches}


@functools.lru_cache(maxsize=64)
def template_options(source: str) -> Thinking:
    """Return the reasoning options of a chat template.

    Raises:
        FormatError: The template is not valid.
        LimitError: The template exceeds the limits.
    """
    variables = ChatTemplate(source).variables()
    switches, has_level = reasoning.switches(source, variables), _LEVEL in variables
    return Thinking(has_level or bool(switches) or reasoning.of_template(source, "") is not None, switches, has_level)


def model_options(served: ServedModel) -> Thinking:
    """Return the reasoning options of a model. Reads the metadata in its files if it was not read before."""
    source = served.model.description.chat_template
    try:
        return template_options(source) if source else Thinking(False, (), False)
    except MpoolError:  # an invalid template fails when it is used
        return Thinking(False, (), False)


async def openai_options(served: ServedModel, effort: str | None, name: str = "reasoning_effort") -> dict[str, Any]:
    """Convert OpenAI's ``reasoning_effort`` to options of the library. Models that do not think ignore it.
    There are no options for a model that is missing: the library refuses the request.

    Args:
        served: The model.
        effort: Value of the field; None: it is absent.
        name: Field of the request, for the error message.

    Raises:
        Refusal: The effort is ``none``, but the model always thinks.
    """
    if effort is None or is_missing(served):
        return {}
    found = await native_calls.REQUESTS.arun(model_options, served)
    if effort == "none":
        if found.thinks and not found.switches:
            raise Refusal("unsupported_parameter", f"`{name}` must not be none: this model always thinks.", name)
        return _options(found.switched(False))
    return _options({**found.switched(True), **({_LEVEL: _LEVELS[effort]} if found.has_level else {})})


async def ollama_options(served: ServedModel, think: bool | str | None) -> dict[str, Any]:
    """Convert Ollama's ``think`` to options of the library. As in Ollama, a model that always thinks ignores false.

    Raises:
        Refusal: The model does not support thinking, or not this level.
    """
    if think is None:
        return {}
    if isinstance(think, str) and think not in ("low", "medium", "high"):
        raise Refusal("invalid_value", f"`think` must be one of true, false, low, medium, high, got {shown(think)}.",
                      "think")
    if is_missing(served):
        return {}
    found = await native_calls.REQUESTS.arun(model_options, served)
    if think is not False and not found.thinks:
        raise Refusal("unsupported_parameter", f'"{served.name}" does not support thinking.', "think")
    if isinstance(think, str):
        if not found.has_level:
            raise Refusal("unsupported_parameter", f'think value "{think}" is not supported for this model.', "think")
        return _options({**found.switched(True), _LEVEL: think})
    return _options(found.switched(think))


async def anthropic_options(served: ServedModel, on: bool | None, budget: int | None,
                            effort: str | None) -> dict[str, Any]:
    """Convert Anthropic's ``thinking`` and ``output_config.effort`` to options of the library. Models that do not think
    ignore these options, and models that always think ignore a request to turn thinking off.

    Args:
        served: The model.
        on: Turn thinking on or off; None: as the model does by default.
        budget: Maximum number of tokens of the reasoning, which selects a level; None: no maximum.
        effort: Level; None: that of the budget.
    """
    if on is None and effort is None or is_missing(served):
        return {}
    found = await native_calls.REQUESTS.arun(model_options, served)
    if on is False:
        return _options(found.switched(False))
    level = _LEVELS[effort] if effort is not None else None if budget is None else \
        next((level for level, least in _BUDGETS if budget >= least))
    return _options({**(found.switched(True) if on else {}),
                     **({_LEVEL: level} if level is not None and found.has_level else {})})


def _options(variables: dict[str, Any]) -> dict[str, Any]:
    return {"template_options": variables} if variables else {}


__all__ = ["Thinking", "anthropic_options", "model_options", "ollama_options", "openai_options", "template_options"]

"""Tools of a chat request: the functions a completion may or must call, and how it calls them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..checks import refuse, shown
from ..errors import InvalidArgument, Unsupported
from ..results import ToolCall
from . import grammar, tool_formats, tool_schemas
from .tool_calls import Calls, arguments_of
from .tool_formats import Function, ToolFormat
from .tool_grammar import grammar_of
from .tool_templates import use_of

if TYPE_CHECKING:
    from ..tokenizers import Tokenizer
    from .grammar import Ending, Format
    from .reasoning import Splitter
    from .template import ChatTemplate
    from .tool_grammar import Answer, Grammar

_CHOICES = ('"auto", "none", "required" or {"type": "function", "function": {"name": ...}}')
#: An error of llguidance about a grammar: line number, reason, the lines around it.
_REASON, _RULE = re.compile(r"at (\d+)\(\d+\): (.*?)(?: \d+ \| |$)"), re.compile(r"(?:args|value)_(\d+)")
_LETTERS = str.maketrans("+/=", "abc")


@dataclass(frozen=True, slots=True, eq=False)
class Tools:
    """Tools of one request.

    Attributes:
        given: the tools as OpenAI's dicts, for the chat template.
        functions: the functions that a completion may call: all, or the named one.
        forced: a completion must call a function.
        single: at most one call.
        form: the model's tool-call format.
        sure: a grammar constrains completions to that format.
        framed: a completion is calls, or matches ``response_format``.
    """

    given: list[dict[str, Any]]
    functions: tuple[Function, ...]
    forced: bool
    single: bool
    form: ToolFormat
    sure: bool = False
    framed: bool = False

    def parser(self, make_id: Callable[[int], str]) -> Calls:
        """A parser for one completion."""
        return Calls(self.form, {function.name: function.parameters for function in self.functions}, self.sure, make_id,
                     self.framed)


# ---- the caller's options --------------------------------------------------------------------------------------------

def take(template: Callable[[], ChatTemplate], key: str, options: dict[str, Any]) -> Tools | None:
    """Takes ``tools``, ``tool_choice`` and ``parallel_tool_calls`` out of the options of a chat.

    Raises:
        InvalidArgument, LimitError: they are not as described in :func:`mpool.chat`.
        Unsupported: the model's template knows no tools, or writes calls in a form that is not known.
    """
    tools, choice = options.pop("tools", None), options.pop("tool_choice", None)
    parallel = options.pop("parallel_tool_calls", None)
    if parallel is not None and not isinstance(parallel, bool):
        refuse("parallel_tool_calls", parallel, "True or False", key=key)
    given = [] if tools is None else tool_schemas.read(tools)
    name = _named(choice)
    if not given:
        if name is not None or choice == "required":
            raise InvalidArgument(param="tool_choice", got=f"{shown(choice)} without tools",
                                  allowed="unset, \"auto\" or \"none\" without tools", key=key)
        return None
    names = [tool["function"]["name"] for tool in given]
    if name is not None and name not in names:
        refuse("tool_choice", name, "the name of a tool: " + ", ".join(names)[:200], key=key)
    if choice == "none":
        return None
    form = tool_formats.of_template(template().source)
    if use_of(template()).tools is None:
        raise Unsupported("tools are given, and this model does not support tools: its chat template does not speak of "
                          "them", key=key, hint="For answers of a given form use response_format")
    if form is None:
        raise Unsupported("tools are given, and this model writes calls of them in a form that is not known",
                          key=key, hint="For answers of a given form use response_format")
    functions = tuple(Function(tool["function"]["name"], tool["function"]["parameters"],
                               bool(tool["function"].get("strict")))
                      for tool in given if name in (None, tool["function"]["name"]))
    forced = name is not None or choice == "required"
    return Tools(given, functions, forced, name is not None or parallel is False, form)


def _named(choice: Any) -> str | None:
    """The function named by a ``tool_choice``, or None."""
    if choice is None or choice in ("auto", "none", "required"):
        return None
    if isinstance(choice, Mapping) and choice.get("type", "function") == "function":
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return name
    refuse("tool_choice", choice, _CHOICES)


def constrain(tools: Tools, tokenizer: Tokenizer, key: str, sampling: Ending, splitter: Callable[[], Splitter] | None,
              answer: Answer | None = None, model: Any = None) -> Format | None:
    """The format that constrains completions to the model's tool-call format; None if llguidance is missing: then they
    are only parsed.

    Args:
        tools, tokenizer, key, sampling, splitter: those of the request.
        answer, model: the format of a completion without calls, and its pydantic class; None: any text.

    Raises:
        Unsupported: calls are forced, a tool is strict, or an answer is given, and llguidance is not installed.
        InvalidArgument: a schema cannot be used, text without a call could look like one, or an option keeps
            completions from ending.
    """
    strict = next((function.name for function in tools.functions if function.strict), None)
    if not grammar.installed():
        if not tools.forced and strict is None and answer is None:
            return None
        needs = "tool_choice wants a call, which" if tools.forced else "response_format" if answer is not None else \
            f"tools: the tool {strict}, which is strict,"
        raise Unsupported(f"{needs} needs the package llguidance", key=key,
                          hint='pip install "mpool[grammar]" installs it')
    try:
        made = grammar_of(tools.form, tools.functions, forced=tools.forced, single=tools.single, splitter=splitter,
                          answer=answer)
    except ValueError:
        raise InvalidArgument("`response_format` allows JSON that begins with {\"name\", as function calls of this "
                              "model do; beside tools it must be an object that requires another property first, or no "
                              "object", param="response_format", hint='tool_choice="none" leaves the tools out',
                              key=key) from None
    is_json = answer is not None and answer.kind == "schema"
    for part in made.parts:
        _usable(made._replace(lark=part), tools, tokenizer, key, sampling)
    return _usable(made, tools, tokenizer, key, sampling, is_json, model)


def _usable(made: Grammar, tools: Tools, tokenizer: Tokenizer, key: str, sampling: Ending, is_json: bool = False,
            model: Any = None) -> Format:
    """The format of a grammar. Its errors name the caller's option."""
    try:
        return grammar.of_calls(made, tokenizer, sampling, is_json, model)
    except InvalidArgument as error:
        found = _REASON.search(error.message)
        if found is None:
            raise
        line = made.lark.splitlines()[int(found[1]) - 1]
        if line.lower().startswith("answer:"):
            raise InvalidArgument(f"`response_format` cannot be used: {found[2]}", param="response_format") from None
        rule = _RULE.match(line)
        which = f"the schema of {tools.functions[int(rule[1])].name}" if rule else "a schema"
        raise InvalidArgument(f"`tools`: {which} cannot be used: {found[2]}", param="tools",
                              hint="A tool that is not strict may have keywords that cannot be kept") from None


# ---- the conversation ------------------------------------------------------------------------------------------------

def check_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """The calls of an assistant's message, in OpenAI's shape, arguments as dicts.

    Raises:
        InvalidArgument: something is no call.
    """
    if isinstance(calls, (str, bytes, Mapping)) or not isinstance(calls, Sequence):
        refuse(f"{where}.tool_calls", calls, "a list of calls")
    return [_call(f"{where}.tool_calls[{at}]", call, at) for at, call in enumerate(calls)]


def _call(where: str, call: Any, at: int) -> dict[str, Any]:
    if isinstance(call, ToolCall):
        call = {"id": call.id, "function": {"name": call.name, "arguments": call.arguments or {}}}
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        refuse(where, call, '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}')
    arguments = function.get("arguments")  # type: ignore[union-attr]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None if arguments else {}
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        got = shown(function.get("arguments"))  # type: ignore[union-attr]
        raise InvalidArgument(param=f"{where}.function.arguments", got=got, allowed="a dict, or the JSON text of one")
    id = call.get("id")
    if id is not None and not isinstance(id, str):
        refuse(f"{where}.id", id, "text")
    return {"id": id or identifier(b"%d" % at, 0), "type": "function",
            "function": {"name": name, "arguments": dict(arguments)}}


def name_results(messages: list[dict[str, Any]]) -> None:
    """Completes tool results that carry only the function's name or only the call's id: templates read one or the
    other."""
    waiting: list[tuple[str, str]] = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            waiting.append((call["id"], call["function"]["name"]))
        if message["role"] != "tool":
            continue
        id, name = message.get("tool_call_id"), message.get("name") or message.get("tool_name")
        found = next((call for call in waiting if call[0] == id), None) if id is not None else \
            next((call for call in waiting if name in (None, call[1])), None)
        if found is not None:
            waiting.remove(found)
            message.setdefault("tool_call_id", found[0])
            name = name or found[1]
        if name is not None:
            message["name"] = name


# ---- answers ---------------------------------------------------------------------------------------------------------

def identifier(seed: bytes, number: int) -> str:
    """The id of a call: nine letters and digits, as Mistral's templates require. It is derived from the seed, so that
    equal requests get equal ids, and differs from the ids of earlier turns."""
    digest = hashlib.blake2b(b"%s:%d" % (seed, number), digest_size=9).digest()
    return base64.b64encode(digest).decode().translate(_LETTERS)[:9]


def calls_of(parser: Calls) -> tuple[ToolCall, ...]:
    """The calls of a complete completion."""
    return tuple(ToolCall(call.id, call.name, arguments_of(call.raw) if call.complete else None, call.raw)
                 for call in parser.calls)


__all__ = ["Tools", "calls_of", "check_calls", "constrain", "identifier", "name_results", "take"]

"""Tools of a chat request: the functions that a completion may or must call, and how it calls them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..checks import refuse, shown
from ..completions import ToolCall
from ..errors import InvalidArgument, LimitError, Unsupported
from ..host.resources import install_hint
from . import enforced_schemas, grammar, grammar_trial, refusals, schema_keywords, tool_formats, tool_schemas
from .reasoning import Borders
from .schema_references import without_nulls
from .tool_calls import ToolCallParser
from .tool_formats import Function, ToolFormat
from .tool_grammar import build_grammar, closed
from .tool_templates import tool_support
from .tool_values import properties_of

if TYPE_CHECKING:
    from ..tokenizers import Tokenizer
    from .grammar import EndOptions, Format
    from .reasoning import Splitter, ThinkSplitter
    from .template import ChatTemplate
    from .tool_grammar import Grammar, ResponseFormat

#: Starts of a completion that is a call without a marker.
_OBJECT_STARTS = ("<|python_tag|>", '{"name":', '{"type": "function"', '{"type":"function"')
_CHOICES = '"auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
#: Parts of llguidance's error message about a grammar: line number, reason, and the lines around it.
_REASON = re.compile(r"at (\d+)\(\d+\): (.*?)(?: \d+ \| |$)")
#: Rules of a function's arguments, or of one of them: number of the function, and of the property.
_RULE = re.compile(r"(?:args|value|TEXT)_(\d+)(?:_(\d+))?")
_LETTERS = str.maketrans("+/=", "abc")
_STRICT = "Without strict, keywords that a grammar cannot enforce are left out"
#: Maximum number of parts that are left out of the schemas of a request's functions.
_MAX_LEFT_OUT = 64


@dataclass(frozen=True, slots=True, eq=False)
class Tools:
    """Tools of one request.

    Attributes:
        definitions: the tools as OpenAI's dicts, for the chat template.
        functions: the functions that a completion may call: all, or the one that ``tool_choice`` names.
        forced: True if a completion must call a function.
        single: True if a completion may have one call at most.
        format: the model's tool-call format.
        constrained: True if a grammar constrains completions to that format.
        calls_or_format: True if a completion is either calls or matches ``response_format``.
    """

    definitions: list[dict[str, Any]]
    functions: tuple[Function, ...]
    forced: bool
    single: bool
    format: ToolFormat
    constrained: bool = False
    calls_or_format: bool = False

    def parser(self, seed: bytes) -> ToolCallParser:
        """Create the parser of one completion. The ids of its calls are derived from ``seed``."""
        return ToolCallParser(self.format, {function.name: function.parameters for function in self.functions},
                              self.constrained, partial(_call_id, seed), self.calls_or_format)

    def borders(self, stop: Sequence[str]) -> list[Borders]:
        """Return the texts around the calls of a completion, which the stop strings do not end. A stop string that
        contains one of these texts is meant to end the completion there: the list is then empty."""
        format = self.format
        if any(text in one for one in stop for text in (*format.markers, *format.ends)):
            return []
        starts = _OBJECT_STARTS if format.markerless or format.marker_optional else ()
        return [Borders(starts, format.ends, format.markers)]

    def splitter(self, kind: type[ThinkSplitter]) -> ThinkSplitter:
        """Create a splitter of one completion whose reasoning also ends where a call begins."""
        return kind(self.format.markers, lambda: self.parser(b""))

    def constrain(self, tokenizer: Tokenizer, key: str, sampling: EndOptions,
                  splitter: type[Splitter] | None, response: ResponseFormat | None = None,
                  model: Any = None) -> Format | None:
        """Compile the format that constrains completions to the model's tool-call format.

        Args:
            tokenizer: the model's tokenizer.
            key: the model's key, for error messages.
            sampling: the sampling options of the request.
            splitter: class that splits reasoning and response; None if the model writes no reasoning.
            response: format of completions without calls; None: any text.
            model: pydantic class of completions without calls, or None.

        Returns:
            The format; None if llguidance is not installed and no option needs it: completions are then only parsed.

        Raises:
            Unsupported: llguidance is not installed, and calls are forced, a tool is strict, or ``response`` is given.
            InvalidArgument: a schema cannot be used, text without a call could look like a call, or ``sampling`` keeps
                completions from ending.
        """
        if not _is_constrained(self.functions, self.forced, response is not None, key):
            return None
        functions, left_out = _enforceable(self.functions)
        is_json = response is not None and response.kind == "schema"
        while True:
            try:
                call_grammar = build_grammar(self.format, functions, forced=self.forced, single=self.single,
                                             splitter=splitter, response=response)
            except ValueError:
                raise InvalidArgument("`response_format` must not allow JSON that begins with {\"name\" together with "
                                      "tools: tool calls of this model begin with it. Put another required property "
                                      "first, or use a schema that is not an object", param="response_format",
                                      hint='Set tool_choice="none" to leave out the tools', key=key) from None
            try:
                for part in call_grammar.parts:
                    _compile(call_grammar._replace(lark=part), functions, tokenizer, key, sampling)
                found = _compile(call_grammar, functions, tokenizer, key, sampling, is_json, model)
                return replace(found, left_out=tuple(left_out))
            except _RefusedSchema as error:  # a text in tags has another grammar than one in JSON
                if functions[error.function].strict or len(left_out) >= _MAX_LEFT_OUT:
                    raise InvalidArgument(error.message, param=error.param, hint=error.hint, key=key) from None
                functions[error.function], path = _relaxed(functions[error.function], error.argument)
                left_out.append(path)

    @staticmethod
    def free_format(tokenizer: Tokenizer) -> Format:
        """Return a format that allows every text. Its masks end a completion at the limits of calls, without
        llguidance."""
        size = tokenizer.vocab_size
        mask = ((1 << size) - 1).to_bytes(-(-size // 32) * 4, "little")
        matcher: Any = _FreeMatcher(mask)
        return grammar.Format(mask, matcher, False, None, param="tools")


# ---- the caller's options --------------------------------------------------------------------------------------------

class ToolOptions(NamedTuple):
    """Options of a chat about function calls that were checked before its model is known.

    Attributes:
        definitions: the tools in OpenAI's format; empty: none may be called.
        name: function that must be called, or None.
        forced: True if a function must be called.
        single: True if a completion may have one call only.
    """

    definitions: list[dict[str, Any]]
    name: str | None
    forced: bool
    single: bool

    def check_schemas(self, given: Mapping[str, Any]) -> None:
        """Check the tools of a chat as far as :meth:`Tools.constrain` does without its model.

        Args:
            given: sampling options that the caller has set.

        Raises:
            InvalidArgument, LimitError, Unsupported: as :meth:`Tools.constrain`.
        """
        functions = _functions(self)
        if _is_constrained(functions, self.forced, False):
            grammar.check_ends("tools", given.get("ignore_eos"), given.get("min_tokens"))
            _enforceable(functions)


def read_options(options: Mapping[str, Any]) -> ToolOptions:
    """Check ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a chat.

    Raises:
        InvalidArgument, LimitError: an option is not as described in :func:`mpool.chat`.
    """
    tools, choice, parallel = (options.get(name) for name in ("tools", "tool_choice", "parallel_tool_calls"))
    if parallel is not None and not isinstance(parallel, bool):
        refuse("parallel_tool_calls", parallel, "True or False")
    definitions = [] if tools is None else tool_schemas.read(tools)
    name = _named_function(choice)
    if not definitions and (name is not None or choice == "required"):
        raise InvalidArgument(param="tool_choice", got=f"{shown(choice)} without tools",
                              allowed="unset, \"auto\" or \"none\" without tools")
    names = [tool["function"]["name"] for tool in definitions]
    if name is not None and name not in names:
        refuse("tool_choice", name, "the name of a tool: " + ", ".join(names)[:200])
    return ToolOptions([] if choice == "none" else definitions, name, name is not None or choice == "required",
                       name is not None or parallel is False)


def _functions(options: ToolOptions) -> tuple[Function, ...]:
    """Return the functions that may be called."""
    return tuple(Function(tool["function"]["name"], tool["function"]["parameters"],
                          bool(tool["function"].get("strict")))
                 for tool in options.definitions if options.name in (None, tool["function"]["name"]))


def _is_constrained(functions: Sequence[Function], forced: bool, response: bool, key: str | None = None) -> bool:
    """Return True if a grammar constrains completions: llguidance is installed.

    Args:
        functions: the functions that may be called.
        forced: True if a completion must call one of them.
        response: True if the request also has a ``response_format``.
        key: the model's key, for error messages.

    Raises:
        Unsupported: it is not installed, and an option needs it.
    """
    strict = next((function.name for function in functions if function.strict), None)
    if grammar.installed():
        return True
    if not forced and strict is None and not response:
        return False
    param, because = ("tool_choice", " requires a call, which") if forced else ("response_format", "") \
        if response else ("tools", f": the tool {strict} is strict, which")
    raise Unsupported(f"`{param}`{because} needs the package llguidance", param=param, key=key,
                      hint=install_hint("grammar"))


def of_options(template: Callable[[], ChatTemplate], key: str, options: ToolOptions) -> Tools | None:
    """Return the tools of a chat with a model; None if there are none.

    Raises:
        Unsupported: the model's chat template does not support tools, or its tool-call format is not supported.
    """
    definitions = options.definitions
    if not definitions:
        return None
    format = tool_formats.of_template(template().source)
    if tool_support(template()).tools is None:
        raise Unsupported("this model does not support tools: its chat template does not read them",
                          param="tools", key=key, hint="To constrain completions to a format, use response_format")
    if format is None:
        raise Unsupported("the tool-call format of this model is not supported", param="tools", key=key,
                          hint="To constrain completions to a format, use response_format")
    functions = _functions(options)
    definitions = [{**tool, "function": {**tool["function"], "parameters": without_nulls(
        tool["function"]["parameters"])}} for tool in definitions]
    return Tools(definitions, functions, options.forced, options.single, format)


def _named_function(choice: Any) -> str | None:
    """Return the function that a ``tool_choice`` names, or None."""
    if choice is None or isinstance(choice, str) and choice in ("auto", "none", "required"):
        return None
    if isinstance(choice, Mapping) and choice.get("type", "function") == "function":
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return name
    refuse("tool_choice", choice, _CHOICES)


class _FreeMatcher:
    """Stands in for llguidance's matcher: allows every token."""

    def __init__(self, mask: bytes) -> None:
        self._mask = mask

    def deep_copy(self) -> _FreeMatcher:
        return self

    def consume_tokens(self, ids: list[int]) -> bool:
        return True

    def compute_bitmask(self) -> bytes:
        return self._mask

    def is_error(self) -> bool:
        return False


def _enforceable(functions: Sequence[Function]) -> tuple[list[Function], list[str]]:
    """Return the functions with schemas that a grammar enforces, and the paths of what was left out for that. Only
    functions that are not strict lose what cannot be enforced."""
    found, left_out = [], list[str]()
    for function in functions:
        schema = closed(function)
        if not function.strict:
            left_out += [_named(function, name) for name, value in function.parameters.items() if value is None]
        try:
            enforced = enforced_schemas.enforce(json.dumps(schema), not function.strict)
        except ValueError as error:
            raise InvalidArgument(f"`tools`: the schema of {function.name} cannot be used: {error}", param="tools",
                                  hint=_STRICT) from None
        except grammar_trial.Refused as error:
            raise LimitError(f"`tools`: the schema of {function.name} is too complex: {error}", param="tools",
                             hint="Use fewer regular expressions and properties") from None
        made = enforced.schema
        if "properties" in made and "additionalProperties" not in schema:  # still open without the keyword that said so
            made.setdefault("additionalProperties", True)
        found.append(function._replace(parameters=made))
        left_out += [_named(function, path) for path in enforced.left_out]
    return found, left_out


def _named(function: Function, path: str) -> str:
    return f"tools.{function.name}.{path}" if path else f"tools.{function.name}"


def _relaxed(function: Function, argument: int | None) -> tuple[Function, str]:
    """Return a function without the schema of an argument, or of all arguments (None), and the path of that schema."""
    properties = properties_of(function.parameters)
    names = list(properties.schemas)
    if argument is None or argument >= len(names):
        required = [name for name in names if name in properties.required]
        schema = {"type": "object", "properties": dict.fromkeys(names, {}), "required": required}
        return function._replace(parameters=schema), _named(function, "")
    own = function.parameters.get("properties")
    schema = {**function.parameters, "properties": {**(own if isinstance(own, Mapping) else {}), names[argument]: {}}}
    return function._replace(parameters=schema), _named(function, schema_keywords.step("properties", names[argument]))


class _RefusedSchema(InvalidArgument):
    """The schema of a function cannot be used, or that of one of its arguments.

    Attributes:
        function: index of the function.
        argument: index of the argument; None: unknown.
    """

    function = 0
    argument: int | None = None


def _compile(call_grammar: Grammar, functions: Sequence[Function], tokenizer: Tokenizer, key: str,
             sampling: EndOptions, is_json: bool = False, model: Any = None) -> Format:
    """Compile a grammar. Errors name the option or the tool that the failing rule was built from."""
    try:
        return grammar.tool_call_format(call_grammar, tokenizer, sampling, is_json, model)
    except InvalidArgument as error:
        found = _REASON.search(error.message)
        if found is None:
            raise InvalidArgument(refusals.reason(error.message, "schema"), param=error.param, hint=error.hint,
                                  key=key) from None
        why = refusals.reason(found[2], "schema")
        line = call_grammar.lark.splitlines()[int(found[1]) - 1]
        if line.lower().startswith("answer:"):
            raise InvalidArgument(f"`response_format` cannot be used: {why}", param="response_format",
                                  key=key) from None
        rule = _RULE.match(line)
        if rule is None:
            raise InvalidArgument(f"`tools`: a schema cannot be used: {why}", param="tools", key=key,
                                  hint=_STRICT) from None
        refused = _RefusedSchema(f"`tools`: the schema of {functions[int(rule[1])].name} cannot be used: {why}",
                                 param="tools", hint=_STRICT, key=key)
        refused.function, refused.argument = int(rule[1]), None if rule[2] is None else int(rule[2])
        raise refused from None


# ---- the conversation ------------------------------------------------------------------------------------------------

def check_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Validate the calls of an assistant's message. Returns them in OpenAI's shape, with arguments as dicts.

    Raises:
        InvalidArgument: an element is not a function call.
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
    arguments = arguments_of(function.get("arguments"))  # type: ignore[union-attr]
    if arguments is None:
        got = shown(function.get("arguments"))  # type: ignore[union-attr]
        raise InvalidArgument(param=f"{where}.function.arguments", got=got, allowed="a dict, or the JSON text of one")
    id = call.get("id")
    if id is not None and not isinstance(id, str):
        refuse(f"{where}.id", id, "a string")
    return {"id": id or _call_id(b"%d" % at, 0), "type": "function",
            "function": {"name": name, "arguments": dict(arguments)}}


def arguments_of(given: Any) -> Mapping[str, Any] | None:
    """Return the arguments of a call in a message: a dict, or the JSON text of one. None and blank text are equivalent
    to an empty dict. Returns None if ``given`` is none of these."""
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError):
            return None
    elif given is None:
        given = {}
    return given if isinstance(given, Mapping) else None


def complete_results(messages: list[dict[str, Any]]) -> None:
    """Add the missing key to tool results that have only the function's name or only the call's id, in place. Some
    templates read the name, others the id."""
    waiting = _WaitingCalls()
    for message in messages:
        for call in message.get("tool_calls") or ():
            waiting.add(call["id"], call["function"]["name"])
        if message["role"] != "tool":
            continue
        id, name = message.get("tool_call_id"), message.get("name") or message.get("tool_name")
        found = waiting.take(id, name)
        if found is not None:
            message.setdefault("tool_call_id", found.id)
            name = name or found.name
        if name is not None:
            message["name"] = name


@dataclass(slots=True)
class _WaitingCall:
    id: str
    name: str
    taken: bool = False


class _WaitingCalls:
    """Calls without a result, in order. A conversation may have thousands: :meth:`take` is constant time on average."""

    def __init__(self) -> None:
        # keys: ("id", id), ("name", name) and ("any",). A call is in three queues; a queue drops taken calls lazily.
        self._queues: dict[tuple[Any, ...], deque[_WaitingCall]] = {}

    def add(self, id: str, name: str) -> None:
        call = _WaitingCall(id, name)
        for key in (("id", id), ("name", name), ("any",)):
            self._queues.setdefault(key, deque()).append(call)

    def take(self, id: Any, name: Any) -> _WaitingCall | None:
        """Remove and return the first call with this id; without an id, the first with this name; without either, the
        first. None: there is no such call."""
        key = ("id", id) if id is not None else ("any",) if name is None else ("name", name)
        queue = self._queues.get(key, ())
        while queue:
            call = queue.popleft()
            if not call.taken:
                call.taken = True
                return call
        return None


# ---- completions -----------------------------------------------------------------------------------------------------

def _call_id(seed: bytes, number: int) -> str:
    """Return a call id of nine letters and digits, as Mistral's templates require.

    It is derived from ``seed`` and the number of the call: equal requests get equal ids, and later turns get others.
    """
    digest = hashlib.blake2b(b"%s:%d" % (seed, number), digest_size=9).digest()
    return base64.b64encode(digest).decode().translate(_LETTERS)[:9]


__all__ = ["ToolOptions", "Tools", "check_calls", "complete_results", "of_options", "read_options"]

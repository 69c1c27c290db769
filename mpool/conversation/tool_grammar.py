"""Grammars of completions that may or must call functions, in a model's tool-call format
(:mod:`mpool.conversation.tool_formats`).

Text is free up to a marker. After the marker, only calls may follow, up to the end of the completion; the arguments of
each match the function's JSON schema. Reasoning, and text after the marker of another version of the format
(``ToolFormat.openings``), is free up to the name of the first call. If the request also has a ``response_format``, a
completion is either calls or text of that format, from its first character on.

The grammars are written for llguidance. Its lexemes are greedy unless they are marked lazy. A lazy lexeme ends all
other lexemes that began at the same position, so free text cannot extend past a marker.

Sources:
    https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from . import quoted_calls, reasoning
from .enforced_schemas import ESCAPES
from .schema_references import moved
from .tool_formats import HARMONY, Function, ToolFormat
from .tool_values import (
    Properties,
    listed_values,
    options_of,
    properties_of,
    required_names,
    required_parts,
    values_of,
)


class Grammar(NamedTuple):
    """A grammar for completions in a tool-call format.

    Attributes:
        lark: the grammar, in llguidance's Lark dialect.
        markers: texts that change which tokens are allowed. While a text contains none of them and ends with no part of
            one, every position allows the same tokens. None: masks cannot be reused.
        prefixes: starts of completions, without white space, whose masks cannot be reused either.
        call_markers: number of ``markers``, from the first on, after which calls may follow.
        parts: grammars of single schemas that must be enforceable. They are only compiled, to find errors: the compiled
            ``lark`` is lenient and would ignore unsupported keywords.
    """

    lark: str
    markers: tuple[str, ...] | None
    prefixes: tuple[str, ...]
    parts: tuple[str, ...] = ()
    call_markers: int = 1


class ResponseFormat(NamedTuple):
    """A completion without calls: JSON that matches a ``schema`` (JSON text), or text that matches a ``regex``."""

    kind: Literal["schema", "regex"]
    source: str


#: Maximum number of calls in one completion, and of equal calls in a row.
MAX_CALLS, MAX_REPEATS = 32, 8
#: Starts of completions that are calls without a marker, without white space; see the two regular expressions below.
_OBJECT_PREFIXES = ('{"name":"', '{"type":"function","name":"')
MARKERLESS_PREFIXES = tuple(start + found for start in ("", "<|python_tag|>") for found in _OBJECT_PREFIXES)
OPTIONAL_MARKER_PREFIXES = tuple(start + found for start in ("", "```", "```json") for found in _OBJECT_PREFIXES)


_FINAL = "<|channel|>final<|message|>"
#: Start of a completion that is a call, in formats without markers and in formats with optional markers.
_NAME_START = r'\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"'
MARKERLESS_START = r"\s*(<\|python_tag\|>)?\s*" + _NAME_START
OPTIONAL_MARKER_START = r"\s*(```(json)?\s*)?" + _NAME_START
#: White space in the JSON of arguments: one space after "," and ":", or none.
_SPACES = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False,
           "json_allowed_escapes": ESCAPES}
#: White space between the tokens of JSON that is the response. Bounded, so that a model cannot generate blanks forever.
BLANKS = r"[\x20\x0A]{1,16}"
#: Schema keywords that allow an object to have properties other than those under ``properties``.
_OPENERS = ("additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref",
            "$dynamicRef", "if", "dependentSchemas", "propertyNames", "minProperties")
#: Keywords that each describe an object's properties. With two of them, the first property is not easily determined.
_SOURCES = ("properties", "anyOf", "oneOf", "allOf", "$ref")
_ANY = "/(?s:.*)/"
#: Maximum number of schemas within each other that :func:`_text` enforces.
_MAX_TEXT_DEPTH = 8
#: Maximum number of properties of objects within arguments, and of schemas and values of texts, in one grammar: many
#: references may lead to the same ones. Values beyond them may be any. llguidance has at most 65,535 symbols.
_MAX_PROPERTIES, _MAX_TEXTS = 10_000, 30_000


def build_grammar(format: ToolFormat, functions: Sequence[Function], *, forced: bool, single: bool,
                  splitter: type[reasoning.Splitter] | None, response: ResponseFormat | None = None) -> Grammar:
    """Build the grammar of completions.

    Args:
        format: the model's tool-call format.
        functions: the functions that may be called.
        forced: True: a completion is calls, after reasoning if the model writes any. False: it may also be text, or
            text followed by calls.
        single: True: at most one call.
        splitter: class that splits reasoning and response; None if the model writes no reasoning.
        response: format of completions without calls; None: any text, which calls may follow. Ignored if ``forced``.

    Raises:
        ValueError: the format has no marker, and completions that match ``response`` could look like calls.
    """
    response = None if forced else response
    parts: list[str] = []
    if response is not None and format.markerless:
        rules = ["%llguidance {}", "", f"body: %json {_calls_or_response(format, functions, response)}"]
        parts = [f"start: args_{at}\nargs_{at}: %json {json.dumps(_arguments(function))}"
                 for at, function in enumerate(functions) if function.strict]
        parts.append("\n".join(["start: answer", *_response(format, response)]))
    else:
        rules = ["%llguidance {}", "", *_calls(format, functions, single or format.max_calls == 1)]
        rules += [] if response is None else _response(format, response)
    if format is HARMONY and response is not None:
        rules[1] = "start: " + _harmony(rules, True) + f" | thoughts? {_literal(_FINAL)} answer"
        return Grammar("\n".join(rules), None, ())
    if format is HARMONY:
        rules[1] = "start: " + _harmony(rules, forced)
        return Grammar("\n".join(rules), None, ())
    marker = _literal(format.marker)
    constrained = forced or response is not None  # constrain the completion from its first character on
    opened = "" if constrained else "".join(f" | opened_{at} named" for at in range(len(format.openings)))
    if forced:
        body = "calls"
    elif response is not None:
        body = "body" if format.markerless else "(calls | answer)"
    elif format.markerless:
        body = "(calls | NO_CALL)"
        rules.append(f"NO_CALL: {_ANY} & ~/{MARKERLESS_START}(?s:.*)/")
    else:
        other = f" & ~/{OPTIONAL_MARKER_START}(?s:.*)/" if format.marker_optional else ""
        body = f"(head rest{opened} | TEXT)" if not format.marker_optional else f"(head rest{opened} | unmarked | TEXT)"
        rules += ["head[lazy]: HEAD", f"HEAD: ({_ANY} {marker}){other}", f"TEXT: {_ANY}{other}",
                  *(line for at, opening in enumerate(format.openings)
                    for line in (f"opened_{at}[lazy]: OPENED_{at}",
                                 f"OPENED_{at}: /(?s:.*){_opening(format, opening)}/{other}"))]
        if format.marker_optional:
            rules += _unmarked_calls(format, functions, single)
    start, thinks = body, ()  # type: str, tuple[str, ...]
    if splitter is not None and issubclass(splitter, reasoning.ThinkSplitter):
        thinks = splitter.open, splitter.close
        opens, closes = map(_regex, thinks)
        rules += [rf"thoughts[lazy]: /(?s:.*){closes}/", r"GAP: /\n{1,2}/"]
        gap = "GAP? " if constrained else ""
        openings = () if format.markerless else (format.section + format.open, *format.openings)
        within = [f"within_{at} named" for at in range(len(openings))]
        rules += [f"within_{at}[lazy]: /(?s:.*){_opening(format, opening)}/" for at, opening in enumerate(openings)]
        ends = [f"thoughts {gap}{body}", *within, *["UNCLOSED"] * (not constrained)]
        rules += [f"UNCLOSED: {_ANY}"] * (not constrained)
        if splitter.inside:
            start = " | ".join(ends)
        elif constrained or format.markerless:
            start = f"think_open ({' | '.join(ends)}) | {body}"
            rules.append(rf"think_open[lazy]: /\s*{opens}/")
        else:
            start = f"think_open ({' | '.join(ends)}) | plain_head rest | PLAIN" + \
                " | unmarked" * format.marker_optional + opened.replace("opened", "plain_opened")
            rules += [rf"think_open[lazy]: /\s*{opens}/", "plain_head[lazy]: PLAIN_HEAD",
                      rf"PLAIN_HEAD: ({_ANY} {marker}) & ~/\s*{opens}(?s:.*)/{other}",
                      rf"PLAIN: {_ANY} & ~/\s*{opens}(?s:.*)/{other}",
                      *(line for at, opening in enumerate(format.openings)
                        for line in (f"plain_opened_{at}[lazy]: PLAIN_OPENED_{at}",
                                     rf"PLAIN_OPENED_{at}: /(?s:.*){_opening(format, opening)}/ "
                                     rf"& ~/\s*{opens}(?s:.*)/{other}"))]
    rules[1] = "start: " + start
    markers = format.markers + thinks
    prefixes = MARKERLESS_PREFIXES if format.markerless else OPTIONAL_MARKER_PREFIXES if format.marker_optional else ()
    return Grammar("\n".join(rules), None if constrained else markers, prefixes, tuple(parts), len(format.markers))


def _response(format: ToolFormat, response: ResponseFormat) -> list[str]:
    """Return the rule ``answer``: the response format without texts that begin with the marker. JSON never does."""
    if response.kind == "schema":
        schema = json.loads(response.source)
        options = {"x-guidance": {"whitespace_pattern": BLANKS, "json_allowed_escapes": ESCAPES}}
        return [f"answer: %json {json.dumps({**options, **schema} if isinstance(schema, dict) else schema)}"]
    source = escape_slashes(response.source).replace("\n", r"\n")
    if format is HARMONY:
        return ["answer: ANSWER", f"ANSWER: /{source}/"]
    return ["answer: ANSWER", rf"ANSWER: /{source}/ & ~(/\s*/ {_literal(format.marker)} {_ANY})"]


def _calls_or_response(format: ToolFormat, functions: Sequence[Function], response: ResponseFormat) -> str:
    """Return one schema for both calls without a marker and JSON responses."""
    schema = json.loads(response.source) if response.kind == "schema" else None
    if schema is None or _may_start_with_name(schema):
        raise ValueError('{"name": ...')
    options: list[Any] = [{
        "type": "object", "required": ["name", format.key], "additionalProperties": False,
        "properties": {"name": {"const": function.name}, format.key: closed(function)}}
        for function in functions] + [schema]
    found = [moved(option, f"#/anyOf/{at}" + f"/properties/{format.key}" * (at < len(functions)))
             for at, option in enumerate(options)]
    return json.dumps({"x-guidance": {
        "whitespace_pattern": BLANKS, "json_allowed_escapes": ESCAPES, "lenient": True}, "anyOf": found})


def _may_start_with_name(root: Any) -> bool:
    """Return True if JSON that matches a schema may be an object whose first property is ``name``.

    Properties are generated in the order of the schema. Returns True in doubt.
    """
    waiting, seen = [root], set[int]()  # alternatives of the schema; many references may lead to the same one
    while waiting:
        schema = waiting.pop()
        if id(schema) in seen:
            continue
        seen.add(id(schema))
        if not isinstance(schema, dict):
            return True
        kind = schema.get("type")
        if isinstance(kind, str) and kind != "object":
            continue
        if sum(name in schema for name in _SOURCES) > 1:
            return True
        reference = schema.get("$ref")
        if options := options_of(schema):
            waiting += options
        elif isinstance(reference, str):
            waiting.append(_referenced(root, reference))
        elif _object_may_start_with_name(schema):
            return True
    return False


def _referenced(root: Any, reference: str) -> Any:
    """Return the part of a schema that ``reference`` names; None: it is not found."""
    start, *names = reference.split("/")
    found = root if start == "#" else None
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _object_may_start_with_name(schema: dict[str, Any]) -> bool:
    properties, required = schema.get("properties"), schema.get("required")
    if schema.get("type") != "object" or not isinstance(properties, dict) or not isinstance(required, list):
        return True
    found = required_names(required)
    for name in properties:
        if name == "name":
            return True
        if name in found:
            return False
    return True


def _literal(text: str) -> str:
    return json.dumps(text)


def escape_slashes(pattern: str) -> str:
    """Escape the slashes of a regular expression, so that it can be written between slashes."""
    return re.sub(r"\\.|/", lambda char: r"\/" if char[0] == "/" else char[0], pattern, flags=re.DOTALL)


def _regex(text: str) -> str:
    """Escape a text for use in a regular expression between slashes. ``\\<`` would be the start of a word."""
    return re.sub(r"[^\w\s<>]", lambda found: "\\" + found[0] if found[0].isascii() else found[0], text) \
        .replace("\n", r"\n")


def _calls(format: ToolFormat, functions: Sequence[Function], single: bool) -> list[str]:
    """Return the rules ``calls``, ``rest`` (calls without the first marker) and ``named`` (calls from the first name
    on), and the rules they use. For Harmony, only the rule ``call``."""
    rules: list[str] = []
    calls, names, left = [], [], [_MAX_PROPERTIES, _MAX_TEXTS]
    for at, function in enumerate(functions):
        before, after = format.around_arguments(function.name)
        if format.body in ("xml", "python", "quoted"):
            inside = _tagged(at, format, function, rules, left) if format.body == "xml" else \
                _keywords(at, function, rules) if format.body == "python" else \
                quoted_arguments(at, function, rules, left)
            calls.append(" ".join(filter(None, (_literal(before), inside, after and _literal(after)))))
            names.append(calls[-1])
            continue
        if format.numbered:
            head = f"{_literal(before.partition(':')[0] + ':')} /[0-9]{{1,3}}/ {_literal(format.middle)}"
        elif format is HARMONY:
            head = f"{_literal(function.name)} MIDDLE"
        elif format.markerless:  # one lexeme with the text that may precede it, else free text would match first
            typed = r'\{("type": ?"function", ?)?' + _regex(before[1:])
            head = rf"/(\n{{1,2}}|<\|python_tag\|>)?{typed}/"
        else:
            head = _literal(before) if "0" not in format.head else f"/{_numbered(before)}/"
        calls.append(f"{head} args_{at}" + (f" {_literal(after)}" if after else ""))
        name = calls[-1] if format.namespace else calls[-1].replace(head, _literal(
            before.removeprefix(format.head + '"')), 1)
        names.append(name.replace(_literal(format.namespace)[:-1], '"', 1) if format.namespace else name)
        rules.append(f"args_{at}: %json {json.dumps(_arguments(function))}")
    rules.append("call: " + " | ".join(calls))
    if format is HARMONY:
        return rules
    close = f" {_literal(format.close)}" if format.close else ""
    tail = close
    if not single:
        tail += f" ({_literal(format.between + format.open)} call{close}){{0,{MAX_CALLS - 1}}}"
    if format.listed or format.end:
        tail += " " + _literal("]" * format.listed + format.end)
    start, rest = format.prefix, format.prefix[len(format.marker):]
    rules.append("calls:" + (f" {_literal(start)}" if start else "") + " call" + tail)
    rules.append("rest:" + (f" {_literal(rest)}" if rest else "") + " call" + tail)
    namespace = f"{_literal(format.namespace)}? " if format.namespace else ""
    return [*rules, f"named_call: {namespace}({' | '.join(names)})", "named: named_call" + tail]


def _opening(format: ToolFormat, opening: str) -> str:
    """Return a regular expression for the text from an opening of calls up to the name of the first call."""
    blank = r"\s{0,8}"
    found = blank.join(map(_regex, opening.split()))
    if format.section and not opening.endswith(format.open):
        found += blank + _regex(format.open)
    if format.listed and not opening.endswith("["):
        found += blank + r"\["
    if format.body == "json":
        return found + blank + r'\{' + blank + r'("type": ?"function",\s?)?' + _numbered(format.head[1:], " ?") + '"'
    return found


def _numbered(head: str, space: str = " ") -> str:
    """Return a regular expression for the start of a call object, with any number in place of 0."""
    return _regex(head).replace(r'\"0\"', r'\"[0-9]{1,3}\"').replace(" ", space)


def _unmarked_calls(format: ToolFormat, functions: Sequence[Function], single: bool) -> list[str]:
    """Return the rule ``unmarked``: calls without markers, one per line, in a code fence or not.

    The text before the arguments is one lexeme with the text that may precede it, else free text would match first.
    """
    rules, plain, fenced, more = [], [], [], []
    for at, function in enumerate(functions):
        name = _regex(json.dumps(function.name))
        head = rf'\{{\s{{0,3}}("type": ?"function",\s{{1,3}})?"name": ?{name},\s{{1,3}}"{format.key}": ?'
        tail = rf"args_{at} CLOSE"
        plain.append(rf"/\s{{0,3}}{head}/ {tail}")
        fenced.append(rf"/\s{{0,3}}```(json)?\n{head}/ {tail}")
        more.append(rf"/\n{head}/ {tail}")
    again = "" if single else f" again{{0,{MAX_CALLS - 1}}}"
    if not single:
        rules.append("again: " + " | ".join(more))
    return [*rules, r"CLOSE: /\s{0,2}\}/", f"plain: {' | '.join(plain)}", f"fenced: {' | '.join(fenced)}",
            f'unmarked: plain{again} | fenced{again} "\\n```"']


def _harmony(rules: list[str], forced: bool) -> str:
    """Return the start rule. A message to a function names it in its header, before or after the channel."""
    rules.append(r"MIDDLE: / ?(<\|channel\|>(commentary|analysis))?( ?<\|constrain\|>json| json)?<\|message\|>/")
    if forced:
        rules.append(r"thoughts[lazy]: /<\|channel\|>analysis<\|message\|>(?s:.*)<\|end\|><\|start\|>assistant/")
        return f"thoughts? {_literal(reasoning.CALL_HEADER)} call"
    rules += [r"head[lazy]: /(?s:.*)(<\|channel\|>commentary|<\|start\|>assistant) to=functions\./",
              'leading[lazy]: " to=functions."', f"TEXT: {_ANY}"]
    return "(leading | head) call | TEXT"


def _arguments(function: Function) -> dict[str, Any]:
    """Return the schema of a function's arguments, with options for llguidance."""
    return {"x-guidance": {**_SPACES, "lenient": not function.strict}, **closed(function)}


def closed(function: Function) -> dict[str, Any]:
    """Return the schema of a function's arguments. Properties that it does not list are forbidden unless it mentions
    them with a keyword of ``_OPENERS``. A strict function may require them: they then have any value."""
    schema = {name: value for name, value in function.parameters.items() if value is not None}
    if "properties" in function.parameters:  # null: a serialiser had no properties to write
        schema.setdefault("properties", {})
    if not any(name in schema for name in ("type", "$ref", "allOf", "anyOf", "oneOf")):
        schema["type"] = "object"
    if "properties" in schema and not any(name in schema for name in _OPENERS):
        schema["additionalProperties"] = False
        properties, required = schema["properties"], schema.get("required")
        if function.strict and isinstance(properties, Mapping) and isinstance(required, list):
            lacking = [name for name in required if isinstance(name, str) and name not in properties]
            schema["properties"] = {**properties, **{name: {} for name in lacking}}
    return schema


# ---- arguments in tags -----------------------------------------------------------------------------------------------

def _tagged(at: int, format: ToolFormat, function: Function, rules: list[str], left: list[int]) -> str:
    """Return the rule for a function's arguments in tags, in the order of the schema; append its rules to ``rules``.
    ``left``: as for :func:`quoted_arguments`."""
    schema, (before, middle, end) = function.parameters, format.tags
    properties = properties_of(schema)
    found = []
    for number, name in enumerate(properties.schemas):
        value = properties.schema(name)
        rule = f"value_{at}_{number}"
        if values_of(value, schema).is_text:
            rules += [f"{rule}[lazy]: TEXT_{at}_{number}",
                      f"TEXT_{at}_{number}: ({_text(value, schema, left)}) {_literal(end)}"]
            body = rule
        else:
            rules.append(f"{rule}: %json {json_value(function, value)}")
            body = f"{rule} {_literal(end)}"
        one = f"{_literal(before + name + middle)} {body}"
        found.append(one if name in properties.required else f"({one})?")
    return " ".join(found)


#: A reference to a definition of the whole schema, or another reference, in the text of a schema.
_REFERENCE = re.compile(r'"\$ref": "(?:#/(\$defs|definitions)/([^"/\\~%]+)["/])?')


def json_value(function: Function, schema: Any) -> str:
    """Return the schema of one argument of a function, with options for llguidance. It has the definitions of the whole
    schema that it needs: many arguments of a function would multiply all of them."""
    return json.dumps({"x-guidance": {**_SPACES, "lenient": not function.strict},
                       **_definitions(function.parameters, schema),
                       **(schema if isinstance(schema, Mapping) else {})})


def _definitions(root: Mapping[str, Any], schema: Any) -> dict[str, Any]:
    """Return the definitions that a part of a schema refers to, and those that these refer to; all of them, if a
    reference has another form."""
    given = {key: root[key] for key in ("$defs", "definitions") if key in root}
    found: dict[str, dict[str, Any]] = {}
    waiting = [schema] if given else []
    while waiting:
        for place, name in _REFERENCE.findall(json.dumps(waiting.pop())):
            values = given.get(place)
            if not isinstance(values, Mapping) or name not in values:
                return given
            if name not in found.setdefault(place, {}):
                found[place][name] = values[name]
                waiting.append(values[name])
    return dict(found)


def _keywords(at: int, function: Function, rules: list[str]) -> str:
    """Return the rule for a function's named arguments, in the order of the schema; append its rules to ``rules``.
    Values are JSON, which the parser of Python's syntax reads, too."""

    def value(number: int, schema: Any) -> str:
        rules.append(f"value_{at}_{number}: %json {json_value(function, schema)}")
        return f"value_{at}_{number}"

    return in_order(str(at), properties_of(function.parameters), ("=", ", "), value, rules)


def in_order(prefix: str, properties: Properties, marks: tuple[str, str], value: Callable[[int, Any], str],
             rules: list[str]) -> str:
    """Return the rule for properties in the order of the schema; append its rules to ``rules``.

    Args:
        prefix: part of the names of the rules.
        properties: the properties; those that are not required may be missing.
        marks: texts between name and value, and between two properties.
        value: returns the rule for the value of a property, from its number and its schema.
    """
    firsts, optional = [], True  # alternatives of the first property: the optional ones, up to one that is required
    for number, name in enumerate(properties.schemas):
        more = f" more_{prefix}_{number + 1}" if number + 1 < len(properties.schemas) else ""
        one = f"{_literal(name + marks[0])} {value(number, properties.schema(name))}"
        if optional:
            firsts.append(one + more)
        if number:
            one = f"{_literal(marks[1])} {one}"
            rules.append(f"more_{prefix}_{number}: " + (one if name in properties.required else f"({one})?") + more)
        optional = optional and name not in properties.required
    return f"({' | '.join(firsts)})" + "?" * optional if firsts else ""


# ---- arguments of Gemma 4 --------------------------------------------------------------------------------------------

#: Maximum number of schemas of a function that rules are made for, and of schemas within each other. Values beyond them
#: may be any.
_MAX_QUOTED, _MAX_QUOTED_DEPTH = 200, 64
#: Keywords with which a schema allows the same values as its one required part; maximum number of such links followed.
_LINKS, _MAX_LINKS = frozenset({"$ref", "allOf", "title", "description", "default", "examples"}), 8
_MARK = json.dumps(quoted_calls.QUOTE)
#: Rules for any value.
_QUOTED = [f"any_value: {_MARK} any_text | any_plain | any_list | any_object",
           'any_plain: %json {"type": ["number", "boolean", "null"]}',
           'any_list: "[" (any_value ("," any_value)*)? "]"', 'any_object: "{" (any_pair ("," any_pair)*)? "}"',
           rf'any_pair: (/[A-Za-z_][\w\-]{{0,63}}/ | {_MARK} any_text) ":" any_value', "any_text[lazy]: ANY_TEXT",
           f"ANY_TEXT: {_ANY} {_MARK}"]


def quoted_arguments(at: int, function: Function, rules: list[str], left: list[int]) -> str:
    """Return the rule for a function's arguments as Gemma 4 writes them; append its rules to ``rules``. ``left``:
    numbers of properties of objects within arguments, and of schemas and values of texts, that may be written."""
    rules += [] if _QUOTED[0] in rules else _QUOTED
    return _QuotedRules(at, function, rules, left).pairs(f"{at}", properties_of(function.parameters), 0)


class _QuotedRules:
    """Rules for the values of one function's arguments. A schema that contains itself has one rule."""

    def __init__(self, at: int, function: Function, rules: list[str], left: list[int]) -> None:
        self._at, self._function, self._rules, self._left = at, function, rules, left
        self._names: dict[int, tuple[str, Any]] = {}  # id() of a schema -> its rule, and the schema, which must live on

    def pairs(self, prefix: str, properties: Properties, depth: int) -> str:
        """Return the rule for the names and values of an object, without names that contain the mark."""
        found = Properties({quoted_calls.spelled(name): schemas for name, schemas in properties.schemas.items()
                            if quoted_calls.QUOTE not in name}, set(map(quoted_calls.spelled, properties.required)))
        return in_order(prefix, found, (":", ","), lambda _, schema: self.of(schema, depth + 1), self._rules)

    def of(self, schema: Any, depth: int) -> str:
        """Return the name of the rule for a schema that ``depth`` others contain. Many references to the same schema
        have one rule."""
        for _ in range(_MAX_LINKS):
            parts = required_parts(schema, self._function.parameters) \
                if isinstance(schema, Mapping) and schema.keys() <= _LINKS else []
            if len(parts) != 1:
                break
            schema = parts[0]
        known = self._names.get(id(schema))
        if known is not None:
            return known[0]
        if not isinstance(schema, Mapping) or len(self._names) >= _MAX_QUOTED or depth > _MAX_QUOTED_DEPTH or \
                self._left[0] < 0:
            return "any_value"
        name = f"quoted_{self._at}_{len(self._names)}"
        self._names[id(schema)] = name, schema
        self._rules.append(f"{name}: {self._body(name, schema, depth)}")
        return name

    def _body(self, name: str, schema: Mapping[str, Any], depth: int) -> str:
        root = self._function.parameters
        allowed, listed = values_of(schema, root), listed_values(schema)
        parts, options = required_parts(schema, root), options_of(schema)
        if allowed.is_text:
            self._rules += [f"{name}_text[lazy]: TEXT_{name.upper()}",
                            f"TEXT_{name.upper()}: ({_text(schema, root, self._left)}) {_MARK}"]
            return f"{_MARK} {name}_text" + ' | "null"' * ("null" in allowed.kinds)
        if listed is not None:
            return " | ".join(_literal(quoted_calls.write(value)) for value in listed)
        if allowed.kinds <= {"number", "integer", "boolean", "null"}:
            return f"%json {json_value(self._function, schema)}"
        null, kinds = ' | "null"' * ("null" in allowed.kinds), allowed.kinds - {"null"}
        if kinds == {"object"}:
            found = properties_of(schema, root)
            self._left[0] -= len(found.schemas)
            if not found.schemas or self._left[0] < 0:
                return "any_object" + null
            return f'"{{" {self.pairs(name, found, depth)} "}}"' + null
        if options and not parts:
            return " | ".join(self.of(option, depth + 1) for option in options)
        if len(parts) == 1 and not options:
            return self.of(parts[0], depth + 1)
        if kinds == {"array"}:
            low, high = (_whole(schema.get(key, value)) for key, value in (("minItems", 0), ("maxItems", "")))
            item = self.of(schema.get("items", True), depth + 1)
            if high == 0:
                return '"[" "]"' + null
            more = f'("," {item}){{{max(low - 1, 0)},{high if high == "" else high - 1}}}'
            return (f'"[" {item} {more} "]"' if low else f'"[" ({item} {more})? "]"') + null
        return "any_value"


def _text(schema: Any, root: Any, left: list[int], depth: int = 0) -> str:
    """Return a terminal for texts of a schema. It enforces the values, the length and the pattern, also those behind
    references. ``root`` is the document of the references; schemas deeper than ``_MAX_TEXT_DEPTH``, or beyond the
    number of ``left``, allow any text."""
    values = listed_values(schema) if isinstance(schema, Mapping) else None
    left[1] -= 1 + len(values or ())
    if not isinstance(schema, Mapping) or depth > _MAX_TEXT_DEPTH or left[1] < 0:
        return _ANY
    parts, options = [], [option for option in options_of(schema) if values_of(option, root).is_text]
    if values is not None:
        parts.append("(" + " | ".join(_literal(value) for value in values if isinstance(value, str)) + ")")
    if options:
        parts.append("(" + " | ".join(f"({_text(option, root, left, depth + 1)})" for option in options) + ")")
    for part in required_parts(schema, root):
        text = _text(part, root, left, depth + 1)
        parts += [f"({text})"] * (text != _ANY)
    low, high = _whole(schema.get("minLength", 0)), _whole(schema.get("maxLength", ""))
    if low or high != "":
        parts.append(rf"/(?s:.{{{low},{high}}})/")
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        parts.append(f"/{_search(pattern)}/")
    found = " & ".join(parts) or _ANY
    return f'({found}) | "null"' if parts and "null" in values_of(schema, root).kinds else found


def _whole(value: Any) -> Any:
    """Convert floats without a fraction to integers: JSON Schema does not distinguish 1.0 and 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


#: One character of a regular expression, an escape sequence, or a character class. A class without an end reaches to
#: the end of the expression: if it were one character, many of them would take quadratic time.
_CHARS = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*(?:\]|\\?\Z)|.", re.DOTALL)


def _search(pattern: str) -> str:
    """Return a regular expression, for use between slashes, that matches texts in which ``pattern`` is found.

    The result has no anchors: llguidance matches whole lexemes and does not support ``^`` and ``$``. Anchors at the
    ends of the alternatives of ``pattern`` are removed; llguidance rejects all others.
    """
    options: list[list[str]] = [[]]
    depth = 0
    for char in _CHARS.findall(pattern):
        depth += (char == "(") - (char == ")")
        if char == "|" and depth == 0:
            options.append([])
        else:
            options[-1].append(char)
    found = []
    for chars in options:
        begins, ends = chars[:1] == ["^"], chars[-1:] == ["$"]
        inner = "".join(chars[begins:len(chars) - ends])
        found.append(("" if begins else "(?s:.*)") + f"({inner})" + ("" if ends else "(?s:.*)"))
    return escape_slashes("|".join(found))

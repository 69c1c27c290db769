"""Grammars of answers that may call tools, or have to, in a model's own form (:mod:`mpool.conversation.tool_formats`).

Text is free up to a mark; the rest is calls up to the last character, each with arguments that match the function's
JSON schema. Where a caller wants answers of a form of its own, an answer is calls or that, from its first character on.
Written for llguidance, whose lexemes are greedy unless marked lazy; a lazy one ends everything else that began
where it did, which is why text cannot run over a mark.

Sources:
    https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from . import reasoning
from .tool_formats import HARMONY, Function, ToolFormat


class Grammar(NamedTuple):
    """A grammar for completions in a tool-call format.

    Attributes:
        lark: for llguidance.
        marks: a text that holds none of these, and ends with no part of one, can be followed by the same as before;
            behind the first of them come calls. None: that cannot be said.
        leads: nor can it be said of answers that begin with one of these words, or a part of one, spaces left out.
        parts: grammars of schemas all of which has to be kept: ``lark`` allows the texts that cannot be part of one.
    """

    lark: str
    marks: tuple[str, ...] | None
    leads: tuple[str, ...]
    parts: tuple[str, ...] = ()


class Answer(NamedTuple):
    """A completion without calls: JSON that matches a ``schema`` (JSON text), or text that matches a ``regex``."""

    kind: Literal["schema", "regex"]
    source: str


#: Start of completions that are calls without a marker, spaces left out: see LEADING and BARE.
LEADS = ('{"name":"', '<|python_tag|>{"name":"')
BARE_LEADS = ('{"name":"', '```{"name":"', '```json{"name":"')


#: The beginning of an answer that is a call where nothing marks it.
_FINAL = "<|channel|>final<|message|>"
LEADING = r'\s*(<\|python_tag\|>)?\s*\{\s*"name"\s*:\s*"'
BARE = r'\s*(```(json)?\s*)?\{\s*"name"\s*:\s*"'
#: Spaces in arguments: as JSON is written by most, or none.
_SPACES = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
#: Between the parts of JSON that is an answer: bounded, so that a model that likes blanks comes to an end.
BLANKS = r"[\x20\x0A]{1,16}"
#: Keywords of a schema by which objects may have more properties than it lists.
_OPENERS = ("additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref",
            "$dynamicRef", "if", "dependentSchemas", "propertyNames", "minProperties")
#: Keywords whose values are schemas by name, and those whose values are none.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("const", "enum", "default", "examples")
#: Keywords that each describe an object's properties: with two of them, which property comes first is not easily said.
_SOURCES = ("properties", "anyOf", "oneOf", "allOf", "$ref")
_ANY = "/(?s:.*)/"


def grammar_of(form: ToolFormat, functions: Sequence[Function], *, forced: bool, single: bool,
               splitter: Callable[[], reasoning.Splitter] | None, answer: Answer | None = None) -> Grammar:
    """The grammar of answers.

    Args:
        form: of calls.
        functions: the functions that may be called.
        forced: an answer is calls, after thoughts if the model thinks; else it may be text, or text and then calls.
        single: one call at most.
        splitter: the splitter of reasoning and answer; None if they have none.
        answer: the format of completions without calls; None: any text, with calls behind it or not.

    Raises:
        ValueError: answers of that form can look like calls, which have no mark.
    """
    answer = None if forced else answer
    parts: list[str] = []
    if answer is not None and form.leads:
        rules = ["%llguidance {}", "", f"body: %json {_either(form, functions, answer)}"]
        parts = [f"start: args_{at}\nargs_{at}: %json {json.dumps(_arguments(function))}"
                 for at, function in enumerate(functions) if function.strict]
        parts.append("\n".join(["start: answer", *_answer(form, answer)]))
    else:
        rules = ["%llguidance {}", "", *_calls(form, functions, single or form.most == 1)]
        rules += [] if answer is None else _answer(form, answer)
    if form is HARMONY and answer is not None:
        rules[1] = "start: " + _harmony(rules, True) + f" | thoughts? {_literal(_FINAL)} answer"
        return Grammar("\n".join(rules), None, ())
    if form is HARMONY:
        rules[1] = "start: " + _harmony(rules, forced)
        return Grammar("\n".join(rules), None, ())
    mark = _literal(form.mark)
    kept = forced or answer is not None  # from the first character on
    if forced:
        body = "calls"
    elif answer is not None:
        body = "body" if form.leads else "(calls | answer)"
    elif form.leads:
        body = "(calls | UNLED)"
        rules.append(f"UNLED: {_ANY} & ~/{LEADING}(?s:.*)/")
    else:
        other = f" & ~/{BARE}(?s:.*)/" if form.bare else ""
        body = "(head rest | TEXT)" if not form.bare else "(head rest | bare | TEXT)"
        rules += ["head[lazy]: HEAD", f"HEAD: ({_ANY} {mark}){other}", f"TEXT: {_ANY}{other}"]
        if form.bare:
            rules += _bare(form, functions, single)
    thinks = splitter in (reasoning.Thoughts, reasoning.OpenThoughts)
    start = body
    if thinks:
        rules += [r"thoughts[lazy]: /(?s:.*)<\/think>/", r"GAP: /\n{1,2}/"]
        gap = "GAP? " if kept else ""
        if splitter is reasoning.OpenThoughts:
            start = f"thoughts {gap}{body}" + (" | UNENDED" if not kept else "")
            rules += [f"UNENDED: {_ANY}"] * (not kept)
        elif kept or form.leads:
            start = f"opened thoughts {gap}{body} | {body}"
            rules.append(r"opened[lazy]: /\s*<think>/")
        else:
            start = f"opened thoughts {body} | unthought rest | PLAIN" + " | bare" * form.bare
            rules += [r"opened[lazy]: /\s*<think>/", "unthought[lazy]: UNTHOUGHT",
                      rf"UNTHOUGHT: ({_ANY} {mark}) & ~/\s*<think>(?s:.*)/{other}",
                      rf"PLAIN: {_ANY} & ~/\s*<think>(?s:.*)/{other}"]
    rules[1] = "start: " + start
    marks = tuple(found for found in (form.mark, *(("<think>", "</think>") if thinks else ())) if found)
    return Grammar("\n".join(rules), None if kept else marks,
                   LEADS if form.leads else BARE_LEADS if form.bare else (), tuple(parts))


def _answer(form: ToolFormat, answer: Answer) -> list[str]:
    """Rule ``answer``: a text in which calls cannot begin, since JSON begins with no mark."""
    if answer.kind == "schema":
        schema = json.loads(answer.source)
        options = {"x-guidance": {"whitespace_pattern": BLANKS}}
        return [f"answer: %json {json.dumps({**options, **schema} if isinstance(schema, dict) else schema)}"]
    source = _slashed(answer.source).replace("\n", r"\n")
    if form is HARMONY:
        return ["answer: ANSWER", f"ANSWER: /{source}/"]
    return ["answer: ANSWER", rf"ANSWER: /{source}/ & ~(/\s*/ {_literal(form.mark)} {_ANY})"]


def _either(form: ToolFormat, functions: Sequence[Function], answer: Answer) -> str:
    """A schema of calls that nothing marks, and of answers that are none."""
    schema = json.loads(answer.source) if answer.kind == "schema" else None
    if schema is None or _may_lead(schema, schema):
        raise ValueError('{"name": ...')
    options: list[Any] = [{
        "type": "object", "required": ["name", form.key], "additionalProperties": False,
        "properties": {"name": {"const": function.name}, form.key: _object(function)}}
        for function in functions] + [schema]
    found = [_moved(option, f"#/anyOf/{at}" + f"/properties/{form.key}" * (at < len(functions)))
             for at, option in enumerate(options)]
    return json.dumps({"x-guidance": {"whitespace_pattern": BLANKS, "lenient": True}, "anyOf": found})


def _moved(schema: Any, where: str) -> Any:
    """A schema moved inside its document, with its references adjusted."""
    if isinstance(schema, list):
        return [_moved(one, where) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "$ref" and isinstance(value, str) and value.startswith("#"):
            found[name] = where + value[1:]
        elif name in _NAMED and isinstance(value, dict):
            found[name] = {key: _moved(one, where) for key, one in value.items()}
        else:
            found[name] = value if name in _DATA else _moved(value, where)
    return found


def _may_lead(schema: Any, root: Any, depth: int = 0) -> bool:
    """JSON of the schema may be an object whose first property is ``name``; a conservative check:
    properties are written in the order of the schema."""
    if not isinstance(schema, dict) or depth > 8:
        return True
    kind = schema.get("type")
    if isinstance(kind, str) and kind != "object":
        return False
    if sum(name in schema for name in _SOURCES) > 1:
        return True
    options = _options(schema)
    if options:
        return any(_may_lead(option, root, depth + 1) for option in options)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        found = root
        for part in reference.removeprefix("#").split("/")[1:]:
            found = found.get(part) if isinstance(found, dict) else None
        return not reference.startswith("#") or _may_lead(found, root, depth + 1)
    properties, required = schema.get("properties"), schema.get("required")
    if kind != "object" or not isinstance(properties, dict) or not isinstance(required, list):
        return True
    for name in properties:
        if name == "name":
            return True
        if name in required:
            return False
    return True


def _literal(text: str) -> str:
    return json.dumps(text)


def _slashed(pattern: str) -> str:
    """A regular expression as it stands between slashes."""
    return re.sub(r"\\.|/", lambda char: r"\/" if char[0] == "/" else char[0], pattern, flags=re.DOTALL)


def _regex(text: str) -> str:
    """A text as part of a regular expression between slashes."""
    return re.sub(r"[^\w\s]", lambda found: "\\" + found[0] if found[0].isascii() else found[0], text) \
        .replace("\n", r"\n")


def _calls(form: ToolFormat, functions: Sequence[Function], single: bool) -> list[str]:
    """Rules ``calls``, ``rest`` (without the marker) and their dependencies; for harmony ``call`` only."""
    rules: list[str] = []
    calls = []
    for at, function in enumerate(functions):
        before, after = form.around(function.name)
        if form.body == "xml":
            calls.append(f"{_literal(before)} {_tagged(at, function, rules)}".rstrip())
            continue
        if form.numbered:
            head = f"{_literal(function.name + ':')} /[0-9]{{1,3}}/ {_literal(form.middle)}"
        elif form is HARMONY:
            head = f"{_literal(function.name)} MIDDLE"
        elif form.leads:  # one word with what may stand before it, or free text would win over that
            head = rf"/(\n{{1,2}}|<\|python_tag\|>)?{_regex(before)}/"
        else:
            head = _literal(before)
        calls.append(f"{head} args_{at}" + (f" {_literal(after)}" if after else ""))
        rules.append(f"args_{at}: %json {json.dumps(_arguments(function))}")
    rules.append("call: " + " | ".join(calls))
    if form is HARMONY:
        return rules
    close = f" {_literal(form.close)}" if form.close else ""
    tail = f" call{close}"
    if not single:
        tail += f" ({_literal(form.between + form.open)} call{close})*"
    if form.listed or form.end:
        tail += " " + _literal("]" * form.listed + form.end)
    start, rest = form.prefix, form.prefix[len(form.mark):]
    rules.append("calls:" + (f" {_literal(start)}" if start else "") + tail)
    rules.append("rest:" + (f" {_literal(rest)}" if rest else "") + tail)
    return rules


def _bare(form: ToolFormat, functions: Sequence[Function], single: bool) -> list[str]:
    """Rule ``bare``: calls without marks, each a line, in a fence or not. What stands before the arguments is one word
    with what may stand before it, or free text would win over that."""
    rules, plain, fenced, more = [], [], [], []
    for at, function in enumerate(functions):
        head = rf'\{{\s{{0,3}}"name": ?{_regex(json.dumps(function.name))},\s{{1,3}}"{form.key}": ?'
        tail = rf"args_{at} CLOSE"
        plain.append(rf"/\s{{0,3}}{head}/ {tail}")
        fenced.append(rf"/\s{{0,3}}```(json)?\n{head}/ {tail}")
        more.append(rf"/\n{head}/ {tail}")
    again = "" if single else " again*"
    if not single:
        rules.append("again: " + " | ".join(more))
    return [*rules, r"CLOSE: /\s{0,2}\}/", f"plain: {' | '.join(plain)}", f"fenced: {' | '.join(fenced)}",
            f'bare: plain{again} | fenced{again} "\\n```"']


def _harmony(rules: list[str], forced: bool) -> str:
    """The start rule. A message to a function names it in its header, before the channel or behind it."""
    rules.append(r"MIDDLE: / ?(<\|channel\|>(commentary|analysis))?( ?<\|constrain\|>json| json)?<\|message\|>/")
    if forced:
        rules.append(r"thoughts[lazy]: /<\|channel\|>analysis<\|message\|>(?s:.*)<\|end\|><\|start\|>assistant/")
        return f"thoughts? {_literal(reasoning.CALL)} call"
    rules += [r"head[lazy]: /(?s:.*)(<\|channel\|>commentary|<\|start\|>assistant) to=functions\./",
              'leading[lazy]: " to=functions."', f"TEXT: {_ANY}"]
    return "(leading | head) call | TEXT"


def _arguments(function: Function) -> dict[str, Any]:
    """The schema of a function's arguments, for llguidance."""
    return {"x-guidance": {**_SPACES, "lenient": not function.strict}, **_object(function)}


def _object(function: Function) -> dict[str, Any]:
    """The same for anybody: an object, with no property that it does not list unless it says something of others."""
    schema = dict(function.parameters)
    if not any(name in schema for name in ("type", "$ref", "allOf", "anyOf", "oneOf")):
        schema["type"] = "object"
    if "properties" in schema and not any(name in schema for name in _OPENERS):
        schema["additionalProperties"] = False
    return schema


# ---- arguments in tags -----------------------------------------------------------------------------------------------

def is_text(schema: Any) -> bool:
    """A value of this schema is written verbatim between tags; other values are written as JSON."""
    if not isinstance(schema, Mapping):
        return False
    kind = schema.get("type")
    if kind is None:
        values = _values(schema)
        options = _options(schema)
        if options:
            kept = [option for option in options if not (isinstance(option, Mapping) and option.get("type") == "null")]
            return bool(kept) and all(is_text(option) for option in kept)
        return bool(values) and all(isinstance(value, str) for value in values or ())
    return kind == "string" or isinstance(kind, list) and "string" in kind and set(kind) <= {"string", "null"}


def may_be_null(schema: Any) -> bool:
    """The schema allows null."""
    if not isinstance(schema, Mapping):
        return False
    kind = schema.get("type")
    return kind == "null" or isinstance(kind, list) and "null" in kind or \
        kind is None and any(map(may_be_null, _options(schema)))


def _options(schema: Mapping[str, Any]) -> list[Any]:
    found = schema.get("anyOf") or schema.get("oneOf")
    return found if isinstance(found, list) else []


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    found = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return found if isinstance(found, list) else None


def _tagged(at: int, function: Function, rules: list[str]) -> str:
    """Rules for a function's arguments in tags, in the order of the schema."""
    schema = function.parameters
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    found = []
    for number, (name, value) in enumerate(properties.items()):
        rule = f"value_{at}_{number}"
        end = "\n</parameter>\n"
        if is_text(value):
            rules += [f"{rule}[lazy]: TEXT_{at}_{number}", f"TEXT_{at}_{number}: ({_text(value)}) {_literal(end)}"]
            shown = rule
        else:
            shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
            inner = value if isinstance(value, Mapping) else {}
            inner = {"x-guidance": {**_SPACES, "lenient": not function.strict}, **shared, **inner}
            rules.append(f"{rule}: %json {json.dumps(inner)}")
            shown = f"{rule} {_literal(end)}"
        one = f"{_literal(f'<parameter={name}>' + chr(10))} {shown}"
        found.append(one if name in required else f"({one})?")
    return " ".join(found)


def _text(schema: Mapping[str, Any]) -> str:
    """A terminal that matches a text of a schema, as far as that can be said: its values, length and pattern."""
    parts = []
    values, options = _values(schema), [option for option in _options(schema) if is_text(option)]
    if values is not None:
        parts.append("(" + " | ".join(_literal(value) for value in values if isinstance(value, str)) + ")")
    if options:
        parts.append("(" + " | ".join(f"({_text(option)})" for option in options) + ")")
    low, high = _whole(schema.get("minLength", 0)), _whole(schema.get("maxLength", ""))
    if low or high != "":
        parts.append(rf"/(?s:.{{{low},{high}}})/")
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        parts.append(f"/{_search(pattern)}/")
    found = " & ".join(parts) or _ANY
    return f'({found}) | "null"' if parts and may_be_null(schema) else found


def _whole(value: Any) -> Any:
    """Numbers without a fraction are integers in JSON Schema, however they are written."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


#: Characters of a regular expression, each with its quantifier or class.
_CHARS = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|.", re.DOTALL)


def _search(pattern: str) -> str:
    """A regular expression, between slashes, that matches the texts in which a pattern is found: one without anchors,
    which llguidance has at neither end of a part. Those within a pattern it refuses."""
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
    return _slashed("|".join(found))

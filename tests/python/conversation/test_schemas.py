"""JSON schemas that an adversary sends: references in a cycle, many alternatives, keywords that interact."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

import mpool
from grammarsamples import accepts
from grammarsamples import matcher as matcher_of

pytest.importorskip("llguidance")

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
#: Schema -> keyword that the message names.
ENDLESS: list[tuple[dict[str, Any], str]] = [
    ({"$ref": "#"}, "$ref"),
    ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "$ref"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "$ref"),
    ({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "object"}]}}, "$ref": "#/$defs/a"}, "$ref"),
    ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#"}]}}, "$ref": "#/$defs/a"}, "$ref"),
    ({"$defs": {"node": {**NODE, "required": ["next"]}}, "$ref": "#/$defs/node"}, "$ref"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "$ref"),
    ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, "$ref"),
    ({"type": "object", "properties": {"a/b~": {"$ref": "#/properties/a~1b~0"}}, "required": ["a/b~"]}, "$ref"),
    ({"$anchor": "x", "$ref": "#x"}, "$anchor"),
    ({"$id": "http://example.org/a", "$ref": "http://example.org/a"}, "$id"),
]
#: Schemas that contain themselves and have finite values.
RECURSIVE: list[dict[str, Any]] = [
    {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#/$defs/a"},
    {"type": "array", "items": {"$ref": "#"}},
    {"$defs": {"node": {"type": "object", "required": ["next"],
                        "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}},
     "$ref": "#/$defs/node"},
]


def tool(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", **parameters}}}]


@pytest.mark.parametrize(("schema", "keyword"), ENDLESS)
def test_schema_without_a_finite_value_is_named(pool: mpool.Pool, llama: Path, schema: dict[str, Any],
                                                keyword: str) -> None:
    with pytest.raises(mpool.InvalidArgument, match=f"{re.escape(keyword)}.* refers to itself") as caught:
        pool.generate("Once", llama, response_format=schema)
    assert "NoExtensionBias" not in str(caught.value) and caught.value.param == "response_format"


def test_tool_without_finite_arguments_is_named(pool: mpool.Pool, llama: Path) -> None:
    endless = tool({"properties": {"a": {"$ref": "#"}}, "required": ["a"]})
    with pytest.raises(mpool.InvalidArgument, match=r"tools\[0\].function.parameters`: \$ref .*refers to itself"):
        pool.chat([{"role": "user", "content": "x"}], llama, tools=endless)


@pytest.mark.parametrize("schema", RECURSIVE)
def test_recursive_schemas_are_accepted(pool: mpool.Pool, llama: Path, schema: dict[str, Any]) -> None:
    done = pool.generate("Once", llama, response_format=schema, max_tokens=40, seed=3, temperature=1.0)
    assert done.finish_reason == "length" or done.parsed is not None or done.text.strip() == "null"


def test_a_long_chain_of_references_is_checked_in_linear_time(pool: mpool.Pool, llama: Path) -> None:
    """1,500 definitions, each of which refers to the next one, and the last to the first."""
    count = 1500
    chain = {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{(i + 1) % count}"} for i in range(count)}, "$ref": "#/$defs/d0"}
    began = time.process_time()
    with pytest.raises(mpool.InvalidArgument, match="refers to itself"):
        pool.generate("Once", llama, response_format=chain)
    assert time.process_time() - began < 5


@pytest.mark.parametrize("many", [
    {"anyOf": [{}] * 10_000}, {"anyOf": [{"type": "integer"}] * 2_500},
    {"anyOf": [{"type": "object", "properties": {f"k{i}": {}}, "required": [f"k{i}"]} for i in range(900)]},
    {"enum": list(range(10_000))},
])
def test_many_alternatives_are_accepted(pool: mpool.Pool, llama: Path, many: dict[str, Any]) -> None:
    began = time.process_time()
    done = pool.generate("Once", llama, response_format=many, max_tokens=20, seed=1, temperature=1.0)
    assert done.token_ids and time.process_time() - began < 20


def test_too_many_alternatives_are_refused_with_their_limit(pool: mpool.Pool, llama: Path) -> None:
    with pytest.raises(mpool.LimitError, match="characters, the limit is"):
        pool.generate("Once", llama, response_format={"anyOf": [{"const": i} for i in range(10_000)]})


def test_pattern_properties_beside_additional_properties(pool: mpool.Pool, llama: Path) -> None:
    schema = {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "minProperties": 0,
              "additionalProperties": {"type": "boolean"}}
    seen = 0
    for seed in range(6):
        done = pool.generate("Once", llama, response_format=schema, max_tokens=120, seed=seed, temperature=1.0)
        if done.finish_reason == "stop":
            value = json.loads(done.text)
            assert all(isinstance(item, bool) != key.startswith("a") for key, item in value.items()), done.text
            seen += 1
    assert seen
    overlapping = {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "a$": {"type": "string"}}}
    with pytest.raises(mpool.InvalidArgument, match="match the same names"):
        pool.generate("Once", llama, response_format=overlapping)


# ---- one spelling of each key, and no dead ends ----------------------------------------------------------------------

SCORE = {"score": {"type": "integer", "minimum": 1}}
#: Schemas whose patterns match declared properties only, joined in one part or in several, or match nothing.
OVERLAPPING: list[dict[str, Any]] = [
    {"properties": SCORE, "required": ["score"], "patternProperties": {"^score$": {"maximum": 9}}},
    {"required": ["score"], "patternProperties": {"^score$": {"type": "integer"}}},
    {"properties": {**SCORE, "b": {"type": "boolean"}}, "required": ["score"],
     "patternProperties": {"^(score|b)$": {"type": ["integer", "boolean"]}}},
    {"properties": SCORE, "required": ["score"], "patternProperties": {r"[^\s\S]": {"type": "null"}}},
    {"allOf": [{"type": "object", "properties": SCORE, "required": ["score"]},
               {"type": "object", "patternProperties": {"^score$": {"maximum": 9}}, "additionalProperties": False}]},
    {"$defs": {"base": {"type": "object", "properties": SCORE, "required": ["score"]}}, "$ref": "#/$defs/base",
     "patternProperties": {"^s(core)$": {"maximum": 9}}},
    {"properties": {"in": {"type": "object", "properties": SCORE, "required": ["score"], "additionalProperties": False,
                           "patternProperties": {"score": False, "^score$": {}}}}},
    {"properties": {"in": {"type": "object", "properties": SCORE, "required": ["score"], "additionalProperties": False,
                           "patternProperties": {"^score$": {"maximum": 9}}}}, "required": ["in"]},
]
HOT: dict[str, Any] = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "max_tokens": 300}


@pytest.mark.parametrize("schema", OVERLAPPING, ids=str)
def test_patterns_that_match_declared_properties(pool: mpool.Pool, llama: Path, schema: dict[str, Any]) -> None:
    """Both schemas apply to such a property, or the request is refused before its first token."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = {"type": "object", "additionalProperties": False, **schema} if "allOf" not in schema else schema
    for seed in range(5):
        try:
            flow = pool.generate("Once", llama, stream=True, response_format=schema, seed=seed, **HOT)
        except mpool.InvalidArgument:
            assert "score\": False" in str(schema).replace("'", '"')  # two patterns that both match: llguidance refuses
            return
        list(flow)
        done = flow.result()
        assert done.finish_reason == "stop", done.text
        jsonschema.validate(done.parsed, schema)


def test_optional_parts_without_a_finite_value_are_left_out(pool: mpool.Pool, llama: Path) -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#/$defs/endless"}}, "required": ["a"],
               "additionalProperties": False}
    schema = {"$defs": {"endless": endless}, "type": "object", "additionalProperties": False, "required": ["x"],
              "properties": {"x": {"type": "boolean"}, "a": {"$ref": "#/$defs/endless"},
                             "b": {"type": "array", "items": {"$ref": "#/$defs/endless"}}}}
    for seed in range(8):
        done = pool.generate("Once", llama, response_format=schema, seed=seed, **HOT)
        assert done.finish_reason == "stop" and set(done.parsed) <= {"x", "b"} and not done.parsed.get("b")
    first = {"type": "object", "additionalProperties": False, "required": ["b"],
             "properties": {"a": {"$ref": "#/properties/a"}, "b": {"type": "null"}}}
    for seed in range(8):
        assert pool.generate("Once", llama, response_format=first, seed=seed, **HOT).parsed == {"b": None}


#: An object with a free key: schema -> JSON up to the escape that would be a second spelling of a declared key.
ALIASES: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}, '{"a": 1, "\\u00'),
    ({"properties": {"a": {"type": "integer"}}, "additionalProperties": True}, '{"a": 1, "\\u00'),
    ({"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}, '{"\\u00'),
    ({"properties": {"a\n": {"type": "integer"}}, "additionalProperties": True}, '{"a\\n": 1, "a\\u000a'),
    ({"properties": {"b": {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}}},
     '{"b": {"a": null, "\\u00')]


@pytest.mark.parametrize(("schema", "start"), ALIASES)
def test_keys_have_one_spelling(schema: dict[str, Any], start: str) -> None:
    """In formats, strict or not, and in arguments of tools, in every form."""
    import llguidance

    from mpool.conversation import grammar, tool_formats, tool_grammar
    from mpool.conversation.tool_formats import Function

    def check(source: str, before: str) -> None:
        matcher, text = matcher_of(source), list((before + start).encode())
        assert not matcher.is_error(), matcher.get_error()
        taken = matcher.try_consume_tokens(text)
        assert taken < len(text) and bytes(text[:taken]).endswith(b"\\"), (before + start)[:taken]

    schema = {"type": "object", **schema}
    for kind in ("schema", "lenient"):
        made_schema = grammar._enforceable(kind, json.dumps(schema), None)[1]
        check(llguidance.LLMatcher.grammar_from_json_schema(made_schema), "")
    for form in (tool_formats.HERMES, tool_formats.LLAMA3):
        for strict in (True, False):
            made = tool_grammar.build_grammar(form, [Function("f", schema, strict)], forced=True, single=True,
                                              splitter=None)
            head = form.prefix + form.around_arguments("f")[0]
            check(llguidance.LLMatcher.grammar_from_lark(made.lark), head)


def test_strings_that_need_unicode_escapes(pool: mpool.Pool, llama: Path) -> None:
    """A control character without a short escape of JSON is refused, or ignored if the format is not strict."""
    for part in ({"const": "a\x01"}, {"enum": [{"b": ["\x7f"]}]}, {"type": "string", "pattern": "^\\x02$"}):
        with pytest.raises(mpool.InvalidArgument, match="control character") as caught:
            pool.generate("Once", llama, response_format={"type": "array", "items": part})
        assert caught.value.param == "response_format" and "strict" in (caught.value.hint or "")
        relaxed = {"type": "json_schema", "json_schema": {"strict": False, "schema": {
            "type": "array", "items": part, "maxItems": 0}}}
        assert pool.generate("Once", llama, response_format=relaxed, **HOT).parsed == []
    fine = {"type": "object", "properties": {"\x01": {"const": "\b\f\n\r\t\"\\"}, "b": {
        "type": "string", "pattern": r"^[^\x00-\x1f]{2}$"}}, "required": ["\x01", "b"], "additionalProperties": False}
    done = pool.generate("Once", llama, response_format=fine, seed=1, **HOT)
    assert done.parsed["\x01"] == "\b\f\n\r\t\"\\" and len(done.parsed["b"]) == 2


def test_a_number_of_properties_that_a_grammar_cannot_count(pool: mpool.Pool, llama: Path) -> None:
    """``{"a": 1, "a": 2}`` has one property."""
    schema = {"type": "object", "patternProperties": {"^[ab]$": {"type": "integer"}}, "additionalProperties": False}
    with pytest.raises(mpool.InvalidArgument, match="minProperties: 2"):
        pool.generate("Once", llama, response_format={**schema, "minProperties": 2})
    assert pool.generate("Once", llama, response_format={**schema, "minProperties": 1}, seed=1, **HOT).parsed


#: A pattern with a class that excludes what JSON escapes -> values that it matches, values that it does not match.
CLASSES: list[tuple[str, str, str]] = [
    ('^[^"]$', "\\\na-", '"'), ('^[^"\n]$', "\\a", '"\n'), (r"^[^\\]$", '"\na', "\\"), ('^[^-"]$', "\\a", '-"'),
    ('^[^"-]$', "\\a", '-"'), (r"^[^\x22]$", "\\a", '"'), ("^[\t-!]$", "\t\n !", '"\\'), (r"^[^\w\\]$", '"\n', "a\\"),
    (r"^[\x00-!]$", "\t\n!", '"\\'), (r"^\P{P}$", "a\n", '"\\'), (r"^[\s\S]$", '"\\\na', ""), (r"^\W$", '"\\\n', "a"),
    (r"^\[[^\]]$", "", "a")]


@pytest.mark.parametrize(("pattern", "inside", "outside"), CLASSES)
def test_classes_match_no_quote_that_they_exclude(pattern: str, inside: str, outside: str) -> None:
    """In values and in names of properties. Reference: the regular expressions of Python."""
    import llguidance

    from mpool.conversation import grammar

    expressions = pytest.importorskip("regex") if r"\P" in pattern else re
    for text in inside:
        assert expressions.search(pattern, text)
    for text in outside:
        assert not expressions.search(pattern, text)
    for schema, start, end in (({"type": "string", "pattern": pattern}, "", ""),
                               ({"type": "object", "patternProperties": {pattern: True},
                                 "additionalProperties": False}, "{", ": 1}")):
        for kind in ("schema", "lenient"):
            source = llguidance.LLMatcher.grammar_from_json_schema(
                grammar._enforceable(kind, json.dumps(schema), None)[1])
            for text in inside + outside:
                assert accepts(source, start + json.dumps(text) + end) is (text in inside), (text, source)


def test_listed_integers_are_not_rounded(pool: mpool.Pool, llama: Path) -> None:
    """Identifiers beyond 2^53 would become other ones; not strict, any integer is allowed."""
    for value in (2**53 + 1, 10**20, -2**63 - 1, 1234567890123456789):
        for part in ({"type": "integer", "const": value}, {"enum": [None, [value]]}, {"const": {"a": value}}):
            with pytest.raises(mpool.InvalidArgument, match=str(value)) as caught:
                pool.generate("Once", llama, response_format={"type": "array", "items": part})
            assert caught.value.param == "response_format" and "strict" in (caught.value.hint or "")
            relaxed = {"type": "json_schema", "json_schema": {"strict": False, "schema": {
                "type": "array", "items": part, "maxItems": 0}}}
            assert pool.generate("Once", llama, response_format=relaxed, **HOT).parsed == []
    exact = {"type": "integer", "enum": [2**53, -2**60]}
    assert pool.generate("Once", llama, response_format=exact, **HOT).parsed in exact["enum"]

"""Keywords of JSON schemas: what a grammar cannot enforce is left out and named, or refused with its path."""

import json
import re
import logging
from pathlib import Path
from typing import Any

import pytest
import toolmodels as tm

import mpool
from grammarsamples import accepts, matcher, samples

llguidance = pytest.importorskip("llguidance")

from mpool.conversation import enforced_schemas, grammar, tools  # noqa: E402
from mpool.conversation.tool_formats import Function  # noqa: E402

INT, NUM, TEXT, LIST, ANY = ({"type": kind} for kind in ("integer", "number", "string", "array", "object"))
OPTIONAL: dict[str, Any] = {**ANY, "properties": {"x": INT, "y": INT, "z": INT}, "additionalProperties": False}
KIND: list[dict[str, Any]] = [{**ANY, "properties": {"k": {"const": one}}, "required": ["k"]} for one in "xy"]


def outer(part: Any) -> dict[str, Any]:
    """An object whose property ``a`` cannot be enforced wholly; ``b`` can."""
    return {"type": "object", "properties": {"a": part, "b": {"type": "integer", "minimum": 5, "maximum": 7}},
            "required": ["a", "b"], "additionalProperties": False}


#: Schema of a property -> its keywords that are left out: no grammar enforces them, or that of llguidance does not.
LEFT_OUT: list[tuple[Any, list[str]]] = [
    *(({**kind, name: value}, [name]) for kind in (INT, NUM) for name in ("minimum", "exclusiveMaximum")
      for value in (-2**63, 2**64, 3.4028234663852886e38, -1.7976931348623157e308, 10**400, "3", True)
      if value is not True or name == "minimum"),
    ({**NUM, "minimum": 1e-300}, ["minimum"]), ({**NUM, "exclusiveMinimum": 5e-324}, ["exclusiveMinimum"]),
    ({**INT, "maximum": 2**53 + 1}, ["maximum"]), ({**INT, "exclusiveMinimum": 2**53}, ["exclusiveMinimum"]),
    ({**NUM, "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}, ["minimum", "maximum"]),
    ({**INT, "minimum": 5, "maximum": 3}, ["minimum"]),
    *(({**NUM, "multipleOf": value}, ["multipleOf"]) for value in (0, -1, 0.07, 1e-300, 1e300, "2")),
    ({"allOf": [{**NUM, "multipleOf": 1e-7}, {**NUM, "multipleOf": 3000}]}, ["allOf[1].multipleOf"]),
    *(({**kind, name: value}, [name])
      for kind, name in ((TEXT, "minLength"), (LIST, "minItems"), (ANY, "minProperties"))
      for value in (2**53, 2.5, -1, "3", True)),
    *(({**kind, name: value}, [name])
      for kind, name in ((TEXT, "maxLength"), (LIST, "maxItems"), (ANY, "maxProperties"))
      for value in (2.5, -1, "3", True)),
    ({**OPTIONAL, "minProperties": 2}, ["minProperties"]), ({**OPTIONAL, "maxProperties": 2}, ["maxProperties"]),
    ({**ANY, "minProperties": 2}, ["minProperties"]),
    ({**OPTIONAL, "required": ["w"]}, ["required"]), ({**ANY, "required": [3]}, ["required"]),
    ({**ANY, "required": "x"}, ["required"]),
    *(({"type": kind}, ["type"]) for kind in ("any", "float", "STRING", "None", 3, [], ["float", "null"])),
    *(({**TEXT, "pattern": pattern}, ["pattern"]) for pattern in (
        r"\bfoo\b", r"\Bfoo", "a^b", "a$b", "(?m)^a$", "^(?=a)b", r"(a)\1", "(a", r"\Aa\Z", "a{,3}", 3)),
    *(({**TEXT, "format": name}, ["format"]) for name in ("odd", "idn-email", "iri", "regex", "", 3)),
    *(({**kind, name: value}, [name]) for kind, name, value in (
        (LIST, "uniqueItems", True), (LIST, "contains", INT), (ANY, "propertyNames", {"maxLength": 2}),
        (ANY, "dependentRequired", {"x": ["y"]}), (ANY, "dependencies", {"x": ["y"]}), (TEXT, "not", {"const": "x"}),
        ({}, "$dynamicRef", "#x"), (ANY, "dependentSchemas", {"x": {"required": ["y"]}}))),
    ({"if": TEXT, "then": {"minLength": 3}}, ["if"]),
    ({"allOf": [OPTIONAL], "unevaluatedProperties": False}, ["unevaluatedProperties"]),
    *(({"enum": value}, ["enum"]) for value in ([], "x", {"x": 1}, [2**64])), ({**TEXT, "enum": [1, 2]}, ["enum"]),
    ({"const": "\x01"}, ["const"]), ({**TEXT, "const": 3}, ["const"]),
    *(({name: value}, [name]) for name in ("anyOf", "oneOf") for value in ([], {}, "x")),
    ({"oneOf": [{**INT, "minimum": 3}, {**INT, "maximum": 5}]}, ["oneOf"]), ({"oneOf": [NUM, INT]}, ["oneOf"]),
    ({"allOf": [INT, TEXT]}, ["allOf"]), ({"anyOf": ["x", INT]}, ["anyOf[0]"]),
    *(({"$ref": name}, ["$ref"]) for name in ("#/$defs/none", "http://example.org/a", "Name", 3)),
    ({**ANY, "patternProperties": {"^a": INT, "a$": TEXT}}, ["patternProperties"]),
    ({**ANY, "patternProperties": {"^(?!x)": INT}, "additionalProperties": False}, ["patternProperties"]),
    ({**ANY, "properties": ["x"]}, ["properties"]), ({**ANY, "properties": {"x": "string"}}, ["properties.x"]),
    ({**LIST, "items": "string"}, ["items"]), ({**ANY, "additionalProperties": 1}, ["additionalProperties"]),
    ({**LIST, "minItems": 5, "maxItems": 2}, ["minItems"]), (3, [""]), ([INT], [""]),
    ({**ANY, "properties": {"p": {**LIST, "items": {**TEXT, "pattern": "(?=a)"}}}}, ["properties.p.items.pattern"]),
]
#: Keywords that are null: named if the schema is not strict, although nothing is lost.
NULLS = [*(({**kind, name: None}, [name]) for kind, name in (
    (ANY, "properties"), (ANY, "required"), ({}, "enum"), (LIST, "items"), (ANY, "additionalProperties"),
    (TEXT, "pattern"), (TEXT, "format"), ({}, "type"), ({}, "anyOf"), ({}, "$ref"), (INT, "minimum"),
    (ANY, "patternProperties"), (TEXT, "maxLength"), (LIST, "uniqueItems"))),
    *(({**kind, name: 2**53}, [name]) for kind, name in ((TEXT, "maxLength"), (LIST, "maxItems"),
                                                         (ANY, "maxProperties")))]
#: Schemas that a grammar enforces wholly, strict or not.
SUPPORTED: list[Any] = [
    True, {}, {**TEXT, "maxLength": 3.0}, {**LIST, "minItems": 2.0, "items": INT}, {**INT, "minimum": -2**53},
    {**INT, "minimum": 3, "exclusiveMinimum": True}, {**INT, "exclusiveMinimum": 2.5, "maximum": 10**17},
    {**NUM, "minimum": -1e17, "maximum": 1e-20}, {**NUM, "minimum": 0.1, "exclusiveMaximum": 0.3},
    {**INT, "format": "int64"}, {**TEXT, "format": "int64"}, {**TEXT, "format": "password"}, {"format": "date"},
    {**TEXT, "format": "date", "pattern": "^2", "allOf": [{"pattern": "-02-"}]},
    {**NUM, "format": "float", "description": None}, {**INT, "pattern": "(?=a)"},
    {**TEXT, "nullable": True, "example": 3, "$comment": "x", "xml": {}}, {"const": None}, {"enum": ["x", None]},
    {"type": ["string", "null"], "maxLength": 2}, {"oneOf": [TEXT, INT]}, {"oneOf": KIND},
    {"oneOf": [{**OPTIONAL, "required": ["x"]}, {**ANY, "properties": {"w": INT}, "required": ["w"],
                                                  "additionalProperties": False}]},
    {**ANY, "propertyNames": {"pattern": "^a"}, "additionalProperties": INT},
    {**ANY, "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": INT},
    {**ANY, "properties": {"x": INT}, "unevaluatedProperties": False}, {**LIST, "uniqueItems": False},
    {**LIST, "items": [INT, TEXT], "additionalItems": False}, {**LIST, "uniqueItems": True, "maxItems": 1},
    {"if": TEXT}, {"then": INT}, {**LIST, "minContains": 2}, {**ANY, "dependentRequired": {}},
    {**ANY, "required": ["x", "x"], "properties": {"x": INT}}, {**ANY, "properties": {"x": INT}, "required": ["w"]},
    *({**TEXT, "pattern": pattern} for pattern in ("^[[:a]{2}$", "^[a&&b~~c]{3}$", "^[+--]$", r"^[\--0\[&]$")),
    {**ANY, "patternProperties": {"^[a&&b]$": INT}, "additionalProperties": False},
    {**NUM, "multipleOf": 0.01}, {"default": 10**400}, {**OPTIONAL, "minProperties": 1}]


def enforced(schema: Any, strict: bool) -> tuple[str, tuple[str, ...]]:
    kind, source, _, left_out = grammar._enforceable("schema" if strict else "lenient", json.dumps(schema), None)
    assert kind == "schema"
    return llguidance.LLMatcher.grammar_from_json_schema(source), left_out


@pytest.mark.sample(4)
@pytest.mark.parametrize(("part", "names"), LEFT_OUT, ids=str)
def test_what_cannot_be_enforced_is_left_out_or_refused(part: Any, names: list[str]) -> None:
    """Not strict, all else is enforced; strict, the error has the path. In formats and in arguments of tools."""
    jsonschema = pytest.importorskip("jsonschema")
    paths = {".".join(filter(None, ("properties.a", name))) for name in names}
    made, left_out = enforced(outer(part), False)
    assert paths <= set(left_out) and all(path.startswith("properties.a") for path in left_out), left_out
    rest = jsonschema.Draft202012Validator(outer({}))
    texts = samples(made, 8)
    assert texts and all(rest.is_valid(json.loads(text)) for text in texts), texts
    with pytest.raises(mpool.InvalidArgument) as caught:
        enforced(outer(part), True)
    assert caught.value.param == "response_format" and "strict" in caught.value.hint
    assert any(path in caught.value.message for path in paths), caught.value.message
    functions = [Function("g", {"type": "object", "properties": {"c": INT}}), Function("f", outer(part))]
    found, left_out = map(list, tools._enforceable(functions))
    assert {f"tools.f.{path}" for path in paths} <= set(left_out) and not any("tools.g" in path for path in left_out)
    assert enforced_schemas.fault(found[1].parameters) is None
    with pytest.raises(mpool.InvalidArgument, match="the schema of f cannot be used: properties.a") as caught:
        tools._enforceable([functions[0], functions[1]._replace(strict=True)])
    assert caught.value.param == "tools" and caught.value.hint


@pytest.mark.parametrize(("part", "names"), NULLS, ids=str)
def test_keywords_without_an_effect_are_no_errors(part: Any, names: list[str]) -> None:
    for strict in (False, True):
        made, left_out = enforced(outer(part), strict)
        assert left_out == (() if strict else tuple(f"properties.a.{name}" for name in names))
        assert samples(made, 4)


@pytest.mark.parametrize("part", SUPPORTED, ids=str)
def test_supported_schemas(part: Any) -> None:
    """Values are valid by jsonschema."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = outer(part)
    kind = jsonschema.Draft4Validator if "exclusiveMinimum': True" in str(part) or "additionalItems" in str(part) \
        else jsonschema.Draft202012Validator
    for strict in (False, True):
        made, left_out = enforced(schema, strict)
        assert left_out == ()
        texts = samples(made, 12)
        assert texts
        for text in texts:
            value = json.loads(text)
            if "multipleOf" not in str(part):  # jsonschema computes with float64
                assert kind(schema).is_valid(value), text


@pytest.mark.parametrize(("pattern", "found", "missed"), [
    ("[a-z0-9]{1,255}", "-a", "-"), ("^[a-z]{2,200}", "ab-", "a-"), ("^x*", "y", None), ("[a-z]{2,9}$", "-ab", "-b"),
    (r"-[0-9]+\.\x41*?", "-1.b", "-1"), (r"[\]a]{1,200}[0-9]{2,200}", "-]12", "]1"), ("^-|[a-z]{1,3}", "-", "1")])
def test_repetitions_at_the_ends_of_a_pattern(pattern: str, found: str, missed: str | None) -> None:
    """A regular expression is searched for in a name, and its repetitions need no room."""
    for strict in (False, True):
        made, left_out = enforced({**ANY, "patternProperties": {pattern: INT}}, strict)
        assert left_out == () and re.search(pattern, found)
        assert accepts(made, json.dumps({found: 5})) and not accepts(made, json.dumps({found: "x"}))
        if missed is not None:
            assert accepts(made, json.dumps({missed: "x"})) and not re.search(pattern, missed)


@pytest.mark.parametrize(("bounds", "allowed", "others"), [
    ({"exclusiveMinimum": 0, "maximum": 0.5}, "0.5 0.001 0.25", "0 0.0 -0 0.51"),
    ({"minimum": -0.5, "exclusiveMaximum": 0}, "-0.5 -0.01", "0 -0 -0.0"),
    ({"exclusiveMinimum": 1, "minimum": 1.2, "exclusiveMaximum": 1.5}, "1.2 1.49", "1 1.1 1.5"),
    ({"exclusiveMinimum": -1, "maximum": -0.999}, "-0.9995", "-1 -1.0"),
    ({"exclusiveMinimum": 10**7, "maximum": 10**7 + 0.5}, "10000000.25", "10000000"),
    ({"type": "integer", "exclusiveMinimum": 0.25, "maximum": 2.5}, "1 2", "0 3"),
    ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 3}, "2", "1 3"),
    ({"multipleOf": 0.5, "minimum": 0.5, "maximum": 0.51}, "0.5", "0.50 0 1"),
    ({"multipleOf": 0.1, "exclusiveMinimum": 0, "maximum": 0.35}, "0.1 0.2 0.3", "0 0.4 0.35"),
    ({"type": "integer", "multipleOf": 1.5, "minimum": 0, "maximum": 7}, "0 3 6", "1 7")], ids=str)
def test_bounds_of_numbers(bounds: dict[str, Any], allowed: str, others: str) -> None:
    made, left_out = enforced({**ANY, "properties": {"v": {**NUM, **bounds}}, "required": ["v"]}, True)
    assert left_out == ()
    for text in allowed.split():
        assert accepts(made, f'{{"v": {text}}}'), text
    for text in others.split():
        assert not accepts(made, f'{{"v": {text}}}'), text


def test_numbers_are_completed() -> None:
    """Bounds with more digits than the multiples between them lead to no beginning that nothing completes."""
    part = {**NUM, "multipleOf": 0.5, "minimum": 0.5, "maximum": 0.51}
    start = matcher(enforced({**ANY, "properties": {"v": part}, "required": ["v"]}, True)[0])
    assert start.consume_tokens(list(b'{"v": 0.5')) and start.compute_bitmask()[ord("0") // 8] >> ord("0") % 8 & 1 == 0


def test_patterns_that_are_found_in_the_same_names() -> None:
    made, _ = enforced({**ANY, "patternProperties": {"[a-z]{1,5}": {**INT, "minimum": 3}, "[a-z]+": INT}}, True)
    assert accepts(made, '{"a": 3}') and not accepts(made, '{"a": 2}')


def test_references_across_a_schema() -> None:
    """Keywords of definitions and of alternatives with references, also under keywords of OpenAPI."""
    defs: dict[str, Any] = {"x": {**KIND[0], "properties": {"k": {"const": "x"}, "n": {**INT, "minimum": 2**64}}},
                            "y": KIND[1]}
    schema = {**outer({"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}],
                       "discriminator": {"propertyName": "k"}}), "$defs": defs, "$id": "https://example.org/a"}
    assert enforced(schema, False)[1] == ("$defs.x.properties.n.minimum",)
    assert accepts(enforced(schema, False)[0], '{"a": {"k": "y"}, "b": 5}')
    api = {**outer({"$ref": "#/components/schemas/x"}), "components": {"schemas": {"x": {**INT, "minimum": None,
                                                                                         "maximum": 2**64}}}}
    assert set(enforced(api, False)[1]) == {f"components.schemas.x.{name}" for name in ("minimum", "maximum")}
    with pytest.raises(mpool.InvalidArgument, match=r"components.schemas.x.maximum"):
        enforced(api, True)


def test_definitions_that_nothing_refers_to() -> None:
    """The compiler of grammars follows all references, and looks for all versions of JSON Schema, also there."""
    for part in ({"$ref": "http://example.org/a"}, {"$ref": "Name"}, {"$schema": "http://example.org/x"}, {"$id": "^a"},
                 {"$ref": "#none"}, {"properties": {"x": {"$ref": "#/nowhere"}}}):
        schema = {**outer({"$ref": "#/$defs/x"}), "$defs": {"x": INT, "y": part}, "components": {"z": part}}
        assert accepts(enforced(schema, False)[0], '{"a": 1, "b": 5}')
    version = {**outer(INT), "$schema": "http://example.org/own"}
    assert samples(enforced(version, True)[0], 3)


def test_options_of_the_compiler_are_no_keywords() -> None:
    """A client could turn off what keeps keys unique, or strictness."""
    schema = {**outer(TEXT), "x-guidance": {"lenient": True, "json_allowed_escapes": 'nu"\\'}}
    assert "x-guidance" not in json.dumps(enforced_schemas.enforce(json.dumps(schema), True).schema)


def test_many_faults_leave_out_the_whole_schema() -> None:
    parts = {f"p{at}": {**INT, "minimum": 5, "maximum": 3} for at in range(300)}
    schema = {"type": "object", "properties": parts, "required": list(parts)}
    assert enforced_schemas.enforce(json.dumps(schema), True).left_out == ("",)
    with pytest.raises(ValueError, match=r"properties.p0.minimum"):
        enforced_schemas.enforce(json.dumps(schema), False)


def test_tools_with_faulty_schemas_still_serve(pool: mpool.Pool, llama: Path,
                                               caplog: pytest.LogCaptureFixture) -> None:
    """The other tool, and the other arguments of the tool, are constrained; the log names what is not."""
    faulty = {"type": "object", "properties": {"a": {**TEXT, "pattern": "(^a|b^)", "maxLength": 4}, "b": {
        "enum": ["x", "yy"]}, "n": {**INT, "minimum": -2**63}}, "required": ["a", "b", "n", "gone"]}
    given = [{"name": "f", "parameters": faulty}, {"name": "g", "parameters": {"type": "object", "properties": None,
                                                                               "required": None}}]
    for name in ("hermes", "qwen3_coder", "llama3"):
        pool.register(f"faulty-{name}", str(llama), chat_template=tm.TEMPLATES[name], replace=True)
        with caplog.at_level(logging.WARNING, "mpool"):
            caplog.clear()
            for choice in ({"type": "function", "function": {"name": "f"}}, "required"):
                done = pool.chat([{"role": "user", "content": "Hi"}], f"faulty-{name}", tools=given, tool_choice=choice,
                                 parallel_tool_calls=False, temperature=1.5, top_k=0, top_p=1.0, seed=3, max_tokens=400)
                for call in done.tool_calls:
                    if call.name == "f" and call.arguments is not None:
                        assert call.arguments["b"] in ("x", "yy") and isinstance(call.arguments["n"], int)
                        assert "gone" not in call.arguments
                    else:
                        assert not call.arguments
        records = [record for record in caplog.records if "cannot enforce" in record.getMessage()]
        assert len(records) == 2 and all(record.levelno == logging.WARNING for record in records)
        for path in ("f.properties.a", "f.properties.n.minimum", "f.required"):
            assert f"tools.{path}" in records[0].getMessage()

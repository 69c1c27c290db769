"""JSON schemas that an adversary sends: references in a cycle, many alternatives, keywords that interact."""

from __future__ import annotations

import json
import re
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool.conversation import schema_references

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


@pytest.mark.builds
def test_references_of_a_large_schema_are_checked_in_linear_time() -> None:
    """References in any order, and a property with a long name that contains many parts."""
    count = 5000
    chain = {f"x{i}": {"$ref": f"#/$defs/x{i - 1}"} for i in range(1, count)} | {"x0": {"type": "string"}}
    long = {"type": "object", "required": ["n" * 80_000], "properties": {
        "n" * 80_000: {"allOf": [{"$ref": "#/$defs/x0"}] * count}}}
    began = time.process_time()
    for names in (list(chain), list(chain)[::-1]):
        schema = {"allOf": [*({"$ref": f"#/$defs/{name}"} for name in names), long], "$defs": chain}
        schema_references.check(json.loads(json.dumps(schema)), "tools")
    tracemalloc.start()
    schema_references.check(json.loads(json.dumps({**long, "$defs": chain})), "tools")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.process_time() - began < 5 and most < 50_000_000
    with pytest.raises(mpool.InvalidArgument, match="^`tools`: .ref of the JSON schema .*") as caught:
        schema_references.check({"$ref": "#/$defs/" + "n" * 80_000, "$defs": {"n" * 80_000: {"$ref": "#"}}}, "tools")
    assert f"(# -> #/$defs/{'n' * 52} -> #)" in str(caught.value)


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
    with pytest.raises(mpool.InvalidArgument, match="patternProperty regexes .* are not disjoint"):
        pool.generate("Once", llama, response_format=overlapping)

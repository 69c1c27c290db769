"""Tools, schemas and token chains for tests of function calling."""

from typing import Any

import toolmodels as tm

from mpool.conversation import tool_schemas

TOOLS = [tm.WEATHER, tm.CLOCK]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tool_schemas.read(TOOLS)}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
BOOK: dict[str, Any] = {
    "type": "object", "required": ["title", "name", "next"], "additionalProperties": False,
    "properties": {"title": {"type": "string", "maxLength": 12}, "name": {"enum": ["<tool_call>", "[TOOL_CALLS]"]},
                   "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/page"}]}},
    "$defs": {"page": {"type": "integer", "minimum": 0, "maximum": 9}}}
BODY = '\n{"name": "clock", "arguments": {}}\n'
WORDS = ("Wait.", " ", "<tool_call>", "</tool_call>", BODY, "assistant", "analysis", "<think>", "</think>", "Hm",
         "commentary", " to=functions.", "clock", "json", "{}")
WRITES = [("Ċ", "Wait."), ("Wait.", " "), (" ", "<tool_call>"), ("<tool_call>", BODY), (BODY, "</tool_call>"),
          ("</tool_call>", "<|return|>")]

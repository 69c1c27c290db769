"""Tool-call formats: recognition by the template, parsing of completions in chunks of any size, templates, grammars."""

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest

import toolmodels as tm
from mpool.conversation import tool_schemas
from mpool.conversation.running_text import MaskReuse
from mpool.conversation.template import ChatTemplate
from mpool.conversation import quoted_calls, reasoning, tool_formats, tool_grammar
from mpool.conversation.tool_calls import ToolCallParser, parse_arguments
from mpool.conversation.tool_formats import Function, ToolFormat
from mpool.conversation.tools import Tools
from mpool.conversation.tool_templates import tool_support, with_calls, with_tools

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies as some  # noqa: E402

FORMATS = {name: tool_formats.of_template(template) for name, template in tm.TEMPLATES.items()}
TOOLS = tool_schemas.read([tm.WEATHER, tm.CLOCK])
FUNCTIONS: dict[str, Mapping[str, Any]] = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": 'Zü"r{i]ch\\', "days": 2, "parts": ["wind"]}), ("clock", {})]


def format_named(name: str) -> ToolFormat:
    found = FORMATS[name]
    assert found is not None
    return found


def parse(tool_format: ToolFormat, chunks: list[str],
          constrained: bool = False) -> tuple[str, list[tuple[str, str, str, bool]]]:
    """Parses a completion in chunks. Returns its text and its calls; checks that the streamed parts make up the calls.
    """
    parser = ToolCallParser(tool_format, FUNCTIONS, constrained, lambda number: f"id{number}")
    text, found = "", []  # type: str, list[list[Any]]
    for at, chunk in enumerate([*chunks, ""]):
        said, new = parser.feed(chunk, at == len(chunks))
        text += said
        for part in new:
            assert part.number == len(found) - (part.id is None) and (part.id is None) == (part.name is None)
            if part.id is not None:
                found.append([part.id, part.name, ""])
            found[-1][2] += part.arguments
    assert [tuple(call) for call in found] == [call[:3] for call in parser.calls]
    return text, [tuple(call) for call in parser.calls]


def complete_calls(calls: list[tuple[str, str, str, bool]]) -> list[tuple[str, Any]]:
    return [(name, parse_arguments(raw)) for _, name, raw, complete in calls if complete]


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_recognised_by_the_template(name: str) -> None:
    assert format_named(name).name == name
    assert tool_formats.of_template(tm.PLAIN) is None
    assert tool_formats.of_template(tm.QWEN3_5) is tool_formats.QWEN3_CODER
    for other in ('<|python_tag|><function=name>{"parameters"}</function>',
                  ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="',
                  'in <tool_call></tool_call> tags: <tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>'):
        assert tool_formats.of_template(other) is None  # Functionary, MiniMax-M3 and Apriel 1.5 are not supported


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_rendered_calls_are_parsed(name: str, constrained: bool) -> None:
    """Calls with and without text before them."""
    tool_format = format_named(name)
    calls = CALLS[:tool_format.max_calls or None]
    for before in ("", "Let me see.\n\n", "a < b [c {"):
        if before and tool_format.markerless:
            continue
        text, found = parse(tool_format, [before + tool_format.render(calls)], constrained)
        assert (text, complete_calls(found)) == (before.rstrip(), calls)
        assert [one[0] for one in found] == [f"functions.{called}:0" if tool_format.numbered else f"id{at}"
                                             for at, (called, _) in enumerate(calls)]


def test_markers_are_part_of_the_text() -> None:
    """Tokenizers declare most markers control tokens, which are left out of texts otherwise."""
    from mpool.tokenizers.specials import CALL_MARKS

    found = {text.removesuffix("call:") for name in FORMATS
             for text in (format_named(name).marker, *format_named(name).ends)
             if text.startswith(("<|", "<｜", "[")) and format_named(name) is not tool_formats.HARMONY}
    assert len(found) > 9 and {*found, quoted_calls.QUOTE} <= set(CALL_MARKS)


#: Format, completion, its text, its calls.
READ: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", '<tool_call>{"name":"clock","arguments":{}}</tool_call>', "", [("clock", {})]),
    ("hermes", '<tool_call>\n{"arguments": {"a": [1, {"b": "}"}]}, "name": "clock"}\n</tool_call>\n', "",
     [("clock", {"a": [1, {"b": "}"}]})]),
    ("hermes", '<tool_call>\n{"name": "clock", "arguments": "{\\"a\\": 1}"}\n</tool_call>', "", [("clock", {"a": 1})]),
    ("hermes", '<tool_call>\n{"name": "clock", "parameters": {"a": "x\ny"}}', "", [("clock", {"a": "x\ny"})]),
    ("hermes", '<tool_call>\n{"name": "clock"}\n</tool_call> and then', "and then", [("clock", {})]),
    ("hermes", 'A <tool_call>\n{"name": "clock"}\n</tool_call>\n\n B '
     '<tool_call>{"name": "clock", "arguments": {"a": 1}}</tool_call> C ',
     "A\nB\nC ", [("clock", {}), ("clock", {"a": 1})]),
    ("hermes", 'A <tool_call>\n{"name": "clock"}\n</tool_call>\n\n B <tool_call>{"name": "clock"}</tool_call> C ',
     "A\nB\nC ", [("clock", {}), ("clock", {})]),
    ("hermes", "Write  <tool_call> before it.", "Write  <tool_call> before it.", []),
    ("hermes", '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
     '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>', []),
    ("hermes", '<tool_call>\n{"name": "clock", "arguments": [1]}\n</tool_call>',
     '<tool_call>\n{"name": "clock", "arguments": [1]}\n</tool_call>', []),
    ("hermes", '<tool_call>\n{"name": "clock", "arguments": {"a": NaN}}\n</tool_call>',
     '<tool_call>\n{"name": "clock", "arguments": {"a": NaN}}\n</tool_call>', []),
    ("hermes", '<tool_call>\n{"name": "clock", "argum', '<tool_call>\n{"name": "clock", "argum', []),
    ("hermes", "<tool_call", "<tool_call", []),
    ("hermes", "<tool_call>", "<tool_call>", []),
    ("hermes", '<tool_call>\n{"name": "clock", oops}\n</tool_call> <tool_call>{"name": "clock"}</tool_call>',
     '<tool_call>\n{"name": "clock", oops}\n</tool_call>', [("clock", {})]),
    ("hermes", '{"name": "clock", "arguments": {}}', "", [("clock", {})]),
    ("hermes", '```json\n{\n  "name": "clock",\n  "arguments": {\n    "a": 1\n  }\n}\n```\nDone.', "Done.",
     [("clock", {"a": 1})]),
    ("hermes", '{"name": "clock", "arguments": {}}\n{"name": "clock", "arguments": {"b": 2}}', "",
     [("clock", {}), ("clock", {"b": 2})]),
    ("hermes", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    ("hermes", '```json\n{"name": "Ann"}\n```', '```json\n{"name": "Ann"}\n```', []),
    ("hermes", "```python\nx = {}\n```", "```python\nx = {}\n```", []),
    ("hermes", 'So: {"name": "clock", "arguments": {}}', 'So: {"name": "clock", "arguments": {}}', []),
    ("hermes", '{"name": "clock"} <tool_call>{"name": "clock", "arguments": {"b": 2}}</tool_call>', "",
     [("clock", {}), ("clock", {"b": 2})]),
    ("hermes", "mkdir -p test/{test1,test2", "mkdir -p test/{test1,test2", []),
    ("llama3", '{"name": "clock", "parameters": {}}', "", [("clock", {})]),
    ("llama3", '<|python_tag|>{"name": "clock", "parameters": {"a": 1}}', "", [("clock", {"a": 1})]),
    ("llama3", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    ("llama3", '{"nam', '{"nam', []),
    ("llama3", 'It is {"name": "clock", "parameters": {}}', 'It is {"name": "clock", "parameters": {}}', []),
    ("mistral_spaced", '[TOOL_CALLS][{"name": "clock", "arguments": {}, "id": "123456789"}]', "", [("clock", {})]),
    ("mistral_spaced", '[TOOL_CALLS] [{"name": "clock"}, {"name": "no"}]', ', {"name": "no"}]', [("clock", {})]),
    ("mistral_marked", '[TOOL_CALLS]clock[CALL_ID]abc[ARGS]{"a": 1}[TOOL_CALLS]clock[ARGS]{}', "",
     [("clock", {"a": 1}), ("clock", {})]),
    ("mistral_marked", "[TOOL_CALLS]" + "x" * 300 + "[ARGS]{}", "[TOOL_CALLS]" + "x" * 300 + "[ARGS]{}", []),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n<parameter=days>\n2\n</parameter>\n"
     "</function>\n</tool_call>", "", [("get_weather", {"city": "Rome", "days": 2})]),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=days>\n2\n</parameter>\n<parameter=note>\na\n"
     "<parameter=days>\n3\n<parameter=x>\n</parameter>\n</function>\n</tool_call>", "",
     [("get_weather", {"days": 2, "note": "a\n<parameter=days>\n3\n<parameter=x>"})]),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n"
     "</parameter>\n<parameter=more>\nnull\n</parameter>\n</function>\n</tool_call>", "",
     [("get_weather", {"city": "12", "days": 3, "more": None})]),
    ("qwen3_coder", "<tool_call>\n<function=clock>\n</function>", "", [("clock", {})]),
    ("qwen3_coder", "<tool_call>\n<function=clock>\n<parameter=a>\n</function>\n</parameter>\n</function>", "",
     [("clock", {"a": "</function>"})]),
    ("qwen3_coder", "<tool_call>\n<function=clock>\nNo!", "<tool_call>\n<function=clock>\nNo!", []),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}\n```"
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", [("clock", {})]),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.clock:12<|tool_call_argument_begin|>{}"
     "<|tool_call_end|><|tool_calls_section_end|>", "", [("clock", {})]),
    ("granite3", '<|tool_call|>[{"name": "clock", "arguments": {}}]', "", [("clock", {})]),
    ("phi4", '<|tool_call|>[{"name": "clock", "arguments": {}}]<|/tool_call|>', "", [("clock", {})]),
    ("phi4", "<|tool_call|>[]", "<|tool_call|>[]", []),
    # markers that are missing, or of another version of the format
    ("hermes", '<tool_call>{"name": "clock"}\n{"name": "clock", "arguments": {"b": 2}}</tool_call> and', "and",
     [("clock", {}), ("clock", {"b": 2})]),
    ("hermes", '<tool_call>[{"name": "clock"}, {"name": "clock", "arguments": {"b": 2}}]\n</tool_call> and', "and",
     [("clock", {}), ("clock", {"b": 2})]),
    ("hermes", 'So: <tools>\n{"name": "clock", "arguments": {}}\n</tools>\nand', "So:\nand", [("clock", {})]),
    ("hermes", "<tools>\nnone\n</tools>", "<tools>\nnone\n</tools>", []),
    ("hermes", '{"type": "function", "name": "clock", "arguments": {}}', "", [("clock", {})]),
    ("hermes", '<tool_call>{"type": "function", "function": {"name": "clock", "arguments": {}}}</tool_call>', "",
     [("clock", {})]),
    ("qwen3_coder", "Now:\n<function=clock>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\nand",
     "Now:\nand", [("clock", {"a": 1})]),
    ("qwen3_coder", "<function=clock></function><function=get_weather><parameter=city>\nBonn\n</parameter></function>",
     "", [("clock", {}), ("get_weather", {"city": "Bonn"})]),
    ("qwen3_coder", "<tool_call>\n<function=clock>\n</function>\n<function=clock>\n</function>\n</tool_call> and",
     "and", [("clock", {}), ("clock", {})]),
    ("qwen3_coder", "<tool_call> <function=clock> </function> </tool_call> <function=no>", "<function=no>",
     [("clock", {})]),
    ("llama3", '{"type": "function", "name": "clock", "parameters": {}}', "", [("clock", {})]),
    ("llama3", '{"name": "clock", "parameters": {}}; {"name": "clock", "parameters": {"a": 1}}\n<|python_tag|>'
     '{"name": "clock", "arguments": {"a": 2}} so', "so",
     [("clock", {}), ("clock", {"a": 1}), ("clock", {"a": 2})]),
    ("mistral_spaced", '[TOOL_CALLS]{"name": "clock", "arguments": {}} and', "and", [("clock", {})]),
    ("mistral_spaced", '[TOOL_CALLS] [{"name": "clock"}\n{"name": "clock", "arguments": {"a": 1}}] and', "and",
     [("clock", {}), ("clock", {"a": 1})]),
    ("mistral_marked", '[TOOL_CALLS]clock{"a": 1}[TOOL_CALLS]clock {} and', "and",
     [("clock", {"a": 1}), ("clock", {})]),
    ("mistral_marked", '[TOOL_CALLS] [{"name": "clock", "arguments": {"a": 1}}, {"name": "clock"}] and', "and",
     [("clock", {"a": 1}), ("clock", {})]),
    ("phi4", 'A functools[{"name": "clock", "arguments": {}}, {"name": "clock", "arguments": {"a": 1}}] B', "A\nB",
     [("clock", {}), ("clock", {"a": 1})]),
    ("phi4", 'functools.partial', 'functools.partial', []),
    ("phi4", '<|tool_call|>{"name": "clock", "arguments": {}}<|/tool_call|>', "", [("clock", {})]),
    ("phi4_single", '<|tool_call|>[{"name": "clock"}, {"name": "clock"}]<|/tool_call|>', "",
     [("clock", {}), ("clock", {})]),
    ("granite3", '<tool_call> [{"name": "clock", "arguments": {}}]</tool_call> and', "and", [("clock", {})]),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}\n```<｜tool▁call▁end｜>"
     "<｜tool▁calls▁end｜>", "", [("clock", {})]),
    ("deepseek_v3", "<｜tool▁call▁begin｜>clock\n```json\n{}\n```\n<｜tool▁call▁end｜> and", "and", [("clock", {})]),
    ("deepseek_v31", "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
     '<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜> and', "and",
     [("clock", {}), ("clock", {"a": 1})]),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁calls▁end｜>", "", [("clock", {})]),
    ("kimi_k2", "A <|tool_call_begin|>functions.clock:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
     "<|tool_call_begin|>clock:1 <|tool_call_argument_begin|> {\"a\": 1} <|tool_call_end|> B", "A\nB",
     [("clock", {}), ("clock", {"a": 1})]),
    ("kimi_k2", "<|tool_call_section_begin|><|tool_call_begin|>clock:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
     "<|tool_calls_section_end|> B", "B", [("clock", {})]),
    ("hermes", '<tool_call>{"name": "clock"}</tool_call>\n</think>\n\nand', "and", [("clock", {})]),
    # a value between tags may contain any tag; values of other types also as Python writes them
    ("qwen3_coder", "<tool_call>\n<function=clock>\n<parameter=a>\nx </parameter> y\n</function>\n</tool_call>\n"
     "</parameter>\n</function>\n</tool_call> and", "and",
     [("clock", {"a": "x </parameter> y\n</function>\n</tool_call>"})]),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=parts>\n['wind', \"rain\"]\n</parameter>\n"
     "<parameter=days>\nNone\n</parameter>\n</tool_call>\n<tool_call>\n<function=clock>\n</tool_call>", "",
     [("get_weather", {"parts": ["wind", "rain"], "days": "None"}), ("clock", {})]),
    ("seed_oss", "So:\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>\n a</parameter>b</parameter>\n"
     "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>\n\n<seed:tool_call>\n<function=clock>\n"
     '<parameter=a>{"b": [1, null]}</parameter>\n</function>\n</seed:tool_call> and', "So:\nand",
     [("get_weather", {"city": "\n a</parameter>b", "days": 3}), ("clock", {"a": {"b": [1, None]}})]),
    ("seed_oss", "<function=clock>\n<parameter=a>1\n<parameter=b>2</parameter>\n</function>", "",
     [("clock", {"a": "1\n<parameter=b>2"})]),
    ("glm4_5", "I see. <tool_call>get_weather\n    <arg_key>city</arg_key>\n    <arg_value>a </arg_value> b</arg_value>"
     "\n    <arg_key>parts</arg_key>\n    <arg_value>[\"wind\"]</arg_value>\n    </tool_call>\n\nThen:\n<tool_call>"
     "clock\n</tool_call>", "I see.\nThen:",
     [("get_weather", {"city": "a </arg_value> b", "parts": ["wind"]}), ("clock", {})]),
    ("glm4_7", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Köln</arg_value><arg_key>days</arg_key>"
     "<arg_value>2</arg_value></tool_call><tool_call>clock</tool_call> and", "and",
     [("get_weather", {"city": "Köln", "days": 2}), ("clock", {})]),
    ("glm4_7", "<tool_call>no<arg_key>a</arg_key></tool_call>", "<tool_call>no<arg_key>a</arg_key></tool_call>", []),
    ("nemotron2", 'So: <TOOLCALL>[{"name": "clock", "arguments": {"a": ["</TOOLCALL>", {"b": "]"}]}}, {"name": "clock"'
     ', "arguments": "{\\"c\\": 1}"}]</TOOLCALL> and', "So:\nand",
     [("clock", {"a": ["</TOOLCALL>", {"b": "]"}]}), ("clock", {"c": 1})]),
    ("nemotron2", '<TOOLCALL>{"name": "clock", "arguments": {}}</TOOLCALL>', "", [("clock", {})]),
    ("nemotron2", '<TOOLCALL>[{"name": "clock", "arguments": [1]}]</TOOLCALL>',
     '<TOOLCALL>[{"name": "clock", "arguments": [1]}]</TOOLCALL>', []),
    ("cohere", '<|START_ACTION|>\n[\n    {"tool_call_id": "0", "tool_name": "clock", "parameters": {"a": {"b": '
     '"<|END_ACTION|>"}}},\n    {"tool_name": "get_weather", "parameters": {"city": "Rome"}, "tool_call_id": "1"}\n]\n'
     "<|END_ACTION|>", "", [("clock", {"a": {"b": "<|END_ACTION|>"}}), ("get_weather", {"city": "Rome"})]),
    ("cohere", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "direct-injected-document", "parameters": {}}]',
     '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "direct-injected-document", "parameters": {}}]', []),
    # calls in Python's syntax
    ("lfm2", "<|tool_call_start|>[clock(b=True, a=None, c=[1, -2.5e3, (False,), {'k': true, \"l\": null}],)]"
     "<|tool_call_end|>Checking.", "Checking.",
     [("clock", {"b": True, "a": None, "c": [1, -2500.0, [False], {"k": True, "l": None}]})]),
    ("lfm2", "So: <|tool_call_start|>[ get_weather( city = 'L'Aquila, the \"old\" (a)', days=2 ) , clock()]"
     "<|tool_call_end|>", "So:", [("get_weather", {"city": "L'Aquila, the \"old\" (a)", "days": 2}), ("clock", {})]),
    ("lfm2", r"""<|tool_call_start|>[clock(a="\u00e9\ud83d\ude00\n\"\d", b='''it's "x"''', c="","""
     " d='<|tool_call_end|>')]<|tool_call_end|>", "",
     [("clock", {"a": 'é😀\n"\\d', "b": "it's \"x\"", "c": "", "d": "<|tool_call_end|>"})]),
    ("lfm2", '<|tool_call_start|>[{"name": "clock", "arguments": {"a": 1}}, clock(x y=2)]<|tool_call_end|>', "",
     [("clock", {"a": 1}), ("clock", {"x y": 2})]),
    ("lfm2", "<|tool_call_start|>clock(a=1) and", "and", [("clock", {"a": 1})]),
    ("lfm2", "<|tool_call_start|>[clock().a()]<|tool_call_end|>", ".a()]<|tool_call_end|>", [("clock", {})]),
    ("lfm2", '<|tool_call_start|>[clock(filter[status]="x", user:id=2)]<|tool_call_end|>', "",
     [("clock", {"filter[status]": "x", "user:id": 2})]),
    ("olmo3", '<function_calls>clock(a="x", b=true)\nclock()</function_calls> and', "and",
     [("clock", {"a": "x", "b": True}), ("clock", {})]),
    ("gemma4", 'So: <|tool_call>call:get_weather{city:<|"|>Köln, {"a": [<|"|>,days:2,parts:[<|"|>wind<|"|>]}'
     '<tool_call|><|tool_call>call:clock{}<tool_call|> and', "So:\nand",
     [("get_weather", {"city": 'Köln, {"a": [', "days": 2, "parts": ["wind"]}), ("clock", {})]),
    ("gemma4", '<|tool_call>call:clock{ a : {b:[true,None,{}], <|"|>c d<|"|>:<|"|><|"|>} , x-y:-2.5e3,}', "",
     [("clock", {"a": {"b": [True, None, {}], "c d": ""}, "x-y": -2500.0})]),
    *(("gemma4", f"<|tool_call>call:{call}<tool_call|>", f"<|tool_call>call:{call}<tool_call|>",
       list[tuple[str, Any]]()) for call in (
        "no{}", "clock", "clock{", "clock{a:1", 'clock{a:<|"|>x}', "clock{a}", "clock{a:1,a:2}", "clock{a:1 b:2}",
        "clock{a:b}", 'clock{a:"x"}', "clock{5}", "clock{a:[1}", "clock{a:1e999}", "clock{:1}", "clock(a=1)", "",
        "clock{a:" + "[" * 90 + "]" * 90 + "}")),
    *(("lfm2", f"<|tool_call_start|>[{call}]<|tool_call_end|>", f"<|tool_call_start|>[{call}]<|tool_call_end|>",
       list[tuple[str, Any]]()) for call in (
        "no()", "clock", "clock(", "clock(a=1", "clock(a='x)", "clock(5)", "clock(a=1, a=2)", "clock(a=1 b=2)",
        "clock(a=b)", "clock(a=1+1)", "clock(a=open('/x'))", "clock(a=__import__('os'))", "clock(a=[x for x in y])",
        "clock(a={1: 2})", "clock(a=f'x')", "clock(**{'a': 1})", "clock(a=1e999)", "clock(a=(1)", "x = 1; clock()", "",
        "clock(a=" + "[" * 90 + "]" * 90 + ")")),
]


@pytest.mark.parametrize("name, completion, calls", [
    ("hermes", '<tool_call>\n{"name": "clock", "arguments": {"a": [-1e999]}}\n</tool_call>', []),
    ("hermes", '<tool_call>\n{"name": "clock", "arguments": "{\\"a\\": 1e999}"}\n</tool_call>', []),
    ("qwen3_coder", "<tool_call>\n<function=clock>\n<parameter=a>\n1e999\n</parameter>\n</function>",
     [("clock", {"a": "1e999"})]),
    ("lfm2", f"<|tool_call_start|>[clock(a={'9' * 5000})]<|tool_call_end|>", []),
    ("lfm2", "<|tool_call_start|>[clock(a=-1e999)]<|tool_call_end|>", [])])
def test_numbers_beyond_float64(name: str, completion: str, calls: list[tuple[str, Any]]) -> None:
    """As arguments they would become Infinity, which is not JSON: a call is text, and a value between tags a string."""
    text, found = parse(format_named(name), [completion])
    assert complete_calls(found) == calls and text == ("" if calls else completion)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name, completion, text, calls", READ)
def test_completions(name: str, completion: str, text: str, calls: list[tuple[str, Any]]) -> None:
    """Parsed as a whole, by character, and in two chunks split at every position."""
    whole = parse(format_named(name), [completion])
    assert (whole[0], complete_calls(whole[1])) == (text, calls)
    assert parse(format_named(name), list(completion)) == whole
    for at in range(len(completion)):
        assert parse(format_named(name), [completion[:at], completion[at:]]) == whole


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FORMATS)
def test_constrained_completions_in_chunks(name: str) -> None:
    """Every prefix of a completion, split in two at any position, gives the same result as in one chunk."""
    tool_format = format_named(name)
    completion = ("" if tool_format.markerless else "So:\n") + tool_format.render(CALLS[:tool_format.max_calls or None])
    for end in range(0, len(completion) + 1, 3):
        whole = parse(tool_format, [completion[:end]], True)
        assert "{" not in whole[0].replace('{"name":', "" if tool_format.markerless else "{") or tool_format.markerless
        for at in range(0, end, 2):
            assert parse(tool_format, [completion[:at], completion[at:end]], True) == whole
    cut = completion[:completion.index("city") + 6]
    if tool_format.body in ("json", "marked"):  # arguments are emitted while they are generated, as incomplete ones
        (call,) = parse(tool_format, [cut], True)[1]
        assert call[1] == "get_weather" and call[2].startswith('{"city') and not call[3]


PARTS = ["```json\n", "```", '<tool_call>', "\n", '{"name": "clock", ', '"arguments": {}}', "</tool_call>",
         "[TOOL_CALLS]", "[", "]", ", ",
         "<", "x", " ", '{"name": "get_weather", "arguments": {"city": "\\"}"}}', "<function=clock>", "</function>",
         "[ARGS]", "{}", "clock", "<|tool_call|>", "<|/tool_call|>", '"', "\\", "<parameter=a>\n1\n</parameter>",
         "<|python_tag|>",
         "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>", "\n```json\n",
         "\n```<｜tool▁call▁end｜>",
         "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.", ":0", "<|tool_call_argument_begin|>", "ü",
         "<|tool_call>call:", "<tool_call|>", '<|"|>', "clock{a:", "}",
         "<|tool_call_start|>", "<|tool_call_end|>", "clock(", "a=", "'", "1", ")"]


@hypothesis.given(some.sampled_from(sorted(FORMATS)), some.lists(some.sampled_from(PARTS), max_size=14),
                  some.booleans(), some.randoms(use_true_random=False))
@hypothesis.settings(max_examples=300, deadline=None)
def test_any_text_in_chunks(name: str, parts: list[str], constrained: bool, chance: random.Random) -> None:
    """Any text is parsed without an error and independently of the chunks. Without a call, no text is lost."""
    completion = "".join(parts)
    whole = parse(format_named(name), [completion], constrained)
    cuts = sorted(chance.choices(range(len(completion) + 1), k=4))
    chunks = [completion[a:b] for a, b in zip([0, *cuts], [*cuts, len(completion)])]
    assert parse(format_named(name), chunks, constrained) == whole
    assert parse(format_named(name), list(completion), constrained) == whole
    if not whole[1] and not constrained:
        assert whole[0] == completion


def test_parsing_takes_linear_time() -> None:
    """A long call that arrives by character is not scanned from its start each time."""
    import time

    def spent(name: str, size: int) -> float:
        completion = format_named(name).render([("clock", {"text": "a {\\\" ' " * size})])
        begun = time.process_time()
        parse(format_named(name), list(completion))
        return time.process_time() - begun

    for name in ("hermes", "lfm2", "gemma4"):
        assert spent(name, 4000) < 40 * max(spent(name, 400), 1e-3)


def test_lone_surrogates_in_json_escapes() -> None:
    """Lone surrogates are replaced, because UTF-8 cannot encode them."""
    completion = '<tool_call>{"name": "clock", "arguments": {"a": "\\ud800"}}'
    ((_, _, raw, _),) = parse(format_named("hermes"), [completion])[1]
    assert json.loads(raw) == {"a": "?"} == parse_arguments('{"a": "\\ud800"}')


# ---- templates -------------------------------------------------------------------------------------------------------

HOW = {"phi4": ("message", "content"), "granite3": ("variable", "content"), "deepseek_v3": ("variable", "text"),
       "deepseek_v31": ("text", "text")}


@pytest.mark.parametrize("name", FORMATS)
def test_earlier_calls_reach_the_prompt(name: str) -> None:
    """The prompt contains the calls and results of earlier turns as the model writes them, for every template."""
    template = ChatTemplate(tm.TEMPLATES[name], special={"bos_token": "<s>", "eos_token": "</s>"})
    support = tool_support(template)
    assert (support.tools, support.calls) == HOW.get(name, ("variable", "dict"))
    call = {"id": "123456789", "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"},
                                      {"role": "assistant", "content": "", "tool_calls": [call]},
                                      {"role": "tool", "content": "sunny", "tool_call_id": call["id"],
                                       "name": "get_weather"}]
    tools = TOOLS
    shown = with_calls(messages, support, FORMATS[name])
    if support.tools != "variable":
        described = FORMATS[name] if support.tools == "text" else None
        text = template.render(with_tools(shown, tools, described), add_generation_prompt=True)
        assert described is None or format_named(name).prefix + "tool_call_name" in text
    else:
        text = template.render(shown, tools=tools, add_generation_prompt=True)
    assert text.count("Rome") == 1 and "sunny" in text and "The weather of a place." in text or name in (
        "qwen3_coder", "harmony", "mistral_spaced", "mistral_marked")
    if name == "harmony":
        text = reasoning.CALL_HEADER + text.partition("to=functions.")[2].replace("<|channel|>commentary json", "")
    at = text.rindex(format_named(name).marker or '{"name": "get_w')
    assert complete_calls(parse(format_named(name), [text[at:]])[1]) == [("get_weather", {"city": "Rome", "days": 2})]


@pytest.mark.parametrize("source", [tm.LFM2_OLDER, tm.LFM2_UNMARKED])
def test_templates_of_lfm2_without_calls(source: str) -> None:
    """The content then has the calls. LFM2.5's template without them contains no marker of calls."""
    template, found = ChatTemplate(source, special={"bos_token": "<s>"}), tool_formats.of_template(source)
    assert found is tool_formats.LFM2 and tool_support(template)[:2] == ("variable", "content")
    arguments: dict[str, Any] = {"a": "it's", "b": [True], "c": None, "d": False}
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": arguments}}
    text = template.render(with_calls([{"role": "assistant", "content": "", "tool_calls": [call]}],
                                      tool_support(template), found))
    assert complete_calls(parse(found, [text[text.index(found.marker):]])[1]) == [("clock", arguments)]


@pytest.mark.parametrize("content, expected", [
    ("Let me see.", "Let me see.CALL"), (None, "CALL"), ("", "CALL"),
    ([{"type": "text", "text": "Let me see."}], [{"type": "text", "text": "Let me see."},
                                                 {"type": "text", "text": "CALL"}])])
def test_calls_follow_the_content_that_contains_them(content: Any, expected: Any) -> None:
    """For a template without calls, the content of a turn ends with them, whether it is a text or a list of parts."""
    name = next(name for name, (_, calls) in HOW.items() if calls == "content")
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": {}}}
    message = {"role": "assistant", "content": content, "tool_calls": [call]}
    found, = with_calls([message], tool_support(ChatTemplate(tm.TEMPLATES[name])), FORMATS[name])
    text = json.dumps(format_named(name).render([("clock", {})]))[1:-1]
    assert found == {"role": "assistant", "content": json.loads(json.dumps(expected).replace("CALL", text))}


# ---- grammars --------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def letters() -> Any:
    """A tokenizer for llguidance: single bytes, some words and markers, and an end token."""
    llguidance = pytest.importorskip("llguidance")
    words = ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "', '", "', "[TOOL_CALLS]", "}}", '"}',
             "},", "get_", "weather", "cl", "ock", "arguments", ': {"', "\n\n", "<|channel|>", "<|message|>",
             " to=functions.", "é"]

    class Tokens:
        def __init__(self) -> None:
            self.tokens = [bytes((byte,)) for byte in range(256)] + [word.encode() for word in words] + [b"<end>"]
            self.special_token_ids = [len(self.tokens) - 1]
            self.eos_token_id, self.bos_token_id = len(self.tokens) - 1, None

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    tokens = Tokens()
    return tokens.tokens, llguidance.LLTokenizer(llguidance.TokenizerWrapper(tokens), n_vocab=len(tokens.tokens),
                                                 eos_token=[tokens.eos_token_id])


SPLITTERS = {"none": None, "thinks": reasoning.ThinkSplitter, "opened": reasoning.OpenedThinkSplitter}


@pytest.mark.sample(4)
@pytest.mark.parametrize("splitter", SPLITTERS)
@pytest.mark.parametrize("name", FORMATS)
def test_random_walks_through_the_grammar(letters: Any, name: str, splitter: str) -> None:
    """Samples tokens at random from the masks, after a planned start. All parts of the completion match their schemas,
    and reused masks equal computed ones."""
    import llguidance
    import numpy as np

    jsonschema = pytest.importorskip("jsonschema")
    tokens, tokenizer = letters
    tool_format, end, make = format_named(name), len(tokens) - 1, SPLITTERS[splitter]
    if name == "harmony" and make is not None:
        pytest.skip("Harmony marks reasoning by channels, not by <think>")
    functions = [Function(key, value) for key, value in FUNCTIONS.items()]
    made = tool_grammar.build_grammar(tool_format, functions, forced=False, single=False, splitter=make)
    lark = llguidance.LLMatcher.grammar_from_lark(made.lark)
    start = llguidance.LLMatcher(tokenizer, lark, log_level=0)
    assert not start.is_error(), start.get_error()
    chance, called, reused = random.Random(name + splitter), 0, 0
    for _ in range(25):
        matcher = start.deep_copy()
        reuse = None if made.markers is None else MaskReuse(
            tuple(marker.encode() for marker in made.markers), made.prefixes, tokens.__getitem__)
        ids: list[int] = []
        plan = list("".join(chance.choices(["Hm. ", "<", "<t", "é", " \n"], k=6)).encode())
        if make is reasoning.OpenedThinkSplitter or make is reasoning.ThinkSplitter and chance.random() < 0.5:
            opening = b"" if make is reasoning.OpenedThinkSplitter else b"<think>"
            plan = list(opening + bytes(plan) + b"</think>\n\nSo ")
        if tool_format is tool_formats.HARMONY:
            plan += list(reasoning.CALL_HEADER.encode())
        elif tool_format.markerless:
            plan = plan[:-3] if bytes(plan).endswith(b"So ") else []
            plan += list(b'{"name": "')
        elif tool_format.marker_optional and chance.random() < 0.4:  # omit the markers
            plan = plan[:-3] if bytes(plan).endswith(b"So ") else []
            plan += list(chance.choice([b'{"name": "', b'```json\n{\n  "name": "', b'```\n{ "name": "']))
        else:
            plan += list(tool_format.marker.encode())
        while len(ids) < 900:
            mask = matcher.compute_bitmask()
            if reuse is not None and ids:
                known = reuse.lookup(ids[-1:])
                assert known is None or known == mask
                reused += known is not None
                if known is None:
                    reuse.store(mask)
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:len(tokens)])
            token = plan.pop(0) if plan else end if end in allowed else int(chance.choice(allowed))
            assert token in allowed, (bytes(b"".join(tokens[i] for i in ids)), tokens[token])
            if token == end:
                break
            ids.append(token)
            assert matcher.consume_tokens([token])
        else:
            continue  # an endless number or list
        text = b"".join(tokens[token] for token in ids).decode(errors="replace")
        split = reasoning.HarmonyCallSplitter if tool_format is tool_formats.HARMONY else make
        _, completion = reasoning.split(split, text)
        said, calls = parse(tool_format, [completion], True)
        assert calls and (tool_format.markerless or tool_format.marker not in said), text
        for _, function, raw, complete in calls:
            assert complete
            jsonschema.validate(json.loads(raw), FUNCTIONS[function])
            called += 1
    assert called >= 15
    assert reused > 50 or made.markers is None or tool_format.markerless


def test_unsupported_schema_keywords() -> None:
    """The grammar of a strict tool is not lenient; that of other tools ignores unsupported keywords."""
    llguidance = pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"},
                                                     "uniqueItems": True},
                                               "b": {"type": "string", "format": "unheard-of"}}}
    for strict in (False, True):
        made = tool_grammar.build_grammar(format_named("hermes"), [Function("f", schema, strict)], forced=True,
                                          single=True, splitter=None)
        assert ('"lenient": false' in made.lark) == strict
    assert llguidance.LLMatcher.grammar_from_lark(made.lark)
    closed = tool_grammar._arguments(Function("f", schema))
    assert closed["additionalProperties"] is False
    for opener in ({"additionalProperties": True}, {"patternProperties": {}}, {"allOf": []}):
        assert "additionalProperties" not in {**tool_grammar._arguments(Function("f", {**schema, **opener}))} or \
            opener == {"additionalProperties": True}


#: Schema of a string, texts that match, texts that do not.
TEXTS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"pattern": r"^\d+/\d+$"}, ["1/2"], ["1", "1/2/", r"1\/2"]), ({"pattern": r"^\d+\/\d+$"}, ["1/2"], ["1", r"1\/2"]),
    ({"pattern": "^[/|)]$"}, ["/", "|", ")"], ["", "//"]), ({"pattern": r"^US\$"}, ["US$", "US$5"], ["US", "USA"]),
    ({"pattern": r"^a\\$"}, ["a\\"], ["a", "a$", "a\\b"]), ({"pattern": r"\^a"}, ["^a", "b^a"], ["a"]),
    ({"pattern": "^a|b$"}, ["a", "ax", "b", "xb"], ["xa", "bx", ""]),
    ({"pattern": "^(a|b)$"}, ["a", "b"], ["ab", "ax"]),
    ({"pattern": "a|b"}, ["xay", "b"], ["", "c"]), ({"pattern": "a\nb"}, ["a\nb", "xa\nb"], ["ab"]),
    ({"pattern": ""}, ["", "x"], []), ({"pattern": "^$"}, [""], ["x"]), ({"pattern": "^|x"}, ["", "a"], []),
    ({"minLength": 1.0, "maxLength": 2.0}, ["a", "é "], ["", "abc"]), ({"maxLength": 0}, [""], ["a"]),
    ({"enum": ["a", "b/c", ""], "maxLength": 1}, ["a", ""], ["b/c", "c"]), ({"const": "a"}, ["a"], ["b"]),
    ({"type": ["string", "null"], "pattern": "^a$"}, ["a", "null"], ["b", "nul"]),
    ({"type": None, "anyOf": [{"type": "string", "enum": ["a", "b"]}, {"enum": ["c"]}]}, ["a", "b", "c"], ["d", '"c"']),
    ({"type": None, "oneOf": [{"type": "string", "pattern": "^a|b$", "maxLength": 2}, {"const": "long"}, {
        "type": "null", "description": "none"}]}, ["a", "ac", "long", "null"], ["c", "aaa", "lon"]),
]


@pytest.mark.parametrize("schema, fit, others", TEXTS, ids=lambda value: str(value)[:40])
def test_strings_between_tags(letters: Any, schema: dict[str, Any], fit: list[str], others: list[str]) -> None:
    """The grammar accepts the strings that match the schema, and the parser returns them."""
    import llguidance

    jsonschema = pytest.importorskip("jsonschema")
    _, tokenizer = letters
    schema = {key: value for key, value in {"type": "string", **schema}.items() if value is not None}
    whole = {"type": "object", "properties": {"d": schema}, "required": ["d"]}
    tool_format = format_named("qwen3_coder")
    made = tool_grammar.build_grammar(tool_format, [Function("f", whole)], forced=True, single=True, splitter=None)
    start = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(made.lark), log_level=0)
    assert not start.is_error(), start.get_error()
    for text in fit + others:
        completion = tool_format.render([("f", {"d": text})])
        matcher = start.deep_copy()
        accepted = all(matcher.try_consume_tokens([byte]) for byte in completion.encode()) and matcher.is_accepting()
        assert accepted == (text in fit), text
        parser = ToolCallParser(tool_format, {"f": whole}, False, lambda number: "id")
        parser.feed(completion, True)
        ((_, _, raw, _),) = parser.calls
        value = parse_arguments(raw)["d"]
        assert value == (None if text == "null" else text)
        assert jsonschema.Draft202012Validator(schema).is_valid(value) == (text in fit), text


#: Schema of an argument, values that match it, and others.
NESTED: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "string", "maxLength": 4}, ["", 'a"{,', "<|x"], ["abcde", 1, None]),
    ({"type": ["string", "null"]}, ["a", None], [1, True]), ({"enum": ["a", 1, None]}, ["a", 1, None], ["b", 2]),
    ({"type": "integer", "minimum": 3}, [3, 10], [2, "3", 3.5]), ({"type": "boolean"}, [True, False], ["true", 0]),
    ({"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2}, [["a"], ["a", ""]],
     [[], ["a", "b", "c"], [1], "a"]),
    ({"type": "array", "maxItems": 0}, [[]], [[1]]), ({"type": "array", "minItems": 2}, [[1, "a"]], [[1]]),
    ({"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "array", "items": {"enum": ["x"]}}},
      "required": ["a"]}, [{"a": 1.5}, {"a": -1, "b": ["x", "x"]}], [{}, {"b": []}, {"a": 1, "b": ["y"]}, {"a": "1"}]),
    ({"type": "object"}, [{}, {"a": [None, {"b": True}]}, {"a[b]": 1}], [[], 1]),
    ({"type": "object", "properties": {name: {"type": "integer"} for name in (
        "user:id", "filter[status]", "{", "", " a", "a b", "n" * 256, "n" * 257)}, "required": ["user:id", "a b"]},
     [{"user:id": 1, "filter[status]": 2, "{": 3, "": 4, " a": 5, "a b": 6, "n" * 256: 7, "n" * 257: 8},
      {"user:id": 1, "a b": 2}], [{"user:id": 1}, {"user:id": 1, "filter[status]": "a", "a b": 2}]),
    ({"enum": [{"a[b]": 1}]}, [{"a[b]": 1}], [{"a": 1}]),
    ({"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "boolean"}}]}, [1, [True]], ["a", [1]]),
    ({"$ref": "#/$defs/node"}, [{"n": 1}, {"n": 1, "next": {"n": 2}}], [{"next": {}}, {"n": 1, "next": {"n": "a"}}]),
    ({}, [1, "a", [{"a": None}]], [])]


@pytest.mark.parametrize("schema, fit, others", NESTED, ids=lambda value: str(value)[:40])
def test_values_of_gemma4(letters: Any, schema: dict[str, Any], fit: list[Any], others: list[Any]) -> None:
    """The grammar accepts the values that match the schema, and the parser returns them."""
    import llguidance

    _, tokenizer = letters
    node = {"type": "object", "properties": {"n": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
            "required": ["n"]}
    tool_format = format_named("gemma4")
    for name in ("d", "filter[d]:"):
        whole = {"type": "object", "properties": {name: schema}, "required": [name], "$defs": {"node": node}}
        made = tool_grammar.build_grammar(tool_format, [Function("f", whole)], forced=True, single=True, splitter=None)
        start = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(made.lark), log_level=0)
        assert not start.is_error(), start.get_error()
        for value in fit + others:
            completion = tool_format.render([("f", {name: value})])
            matcher = start.deep_copy()
            accepted = all(matcher.try_consume_tokens([byte]) for byte in completion.encode()) and \
                matcher.is_accepting()
            assert accepted == (json.dumps(value) in map(json.dumps, fit)), value
            parser = ToolCallParser(tool_format, {"f": whole}, True, lambda number: "id")
            parser.feed(completion, True)
            ((_, _, raw, _),) = parser.calls
            assert parse_arguments(raw) == {name: value}


@pytest.mark.parametrize("pattern", ["(^a|b)c", "a$b", "(a", r"a(?=b)"])
def test_unsupported_patterns(pattern: str) -> None:
    llguidance = pytest.importorskip("llguidance")
    whole = {"type": "object", "properties": {"d": {"type": "string", "pattern": pattern}}}
    made = tool_grammar.build_grammar(format_named("qwen3_coder"), [Function("f", whole)], forced=True, single=True,
                                      splitter=None)
    says = llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_lark(made.lark))
    assert "regex" in says


@pytest.mark.parametrize("schema, value", [
    ({"type": "string"}, "null"), ({"type": "string", "description": "null if none"}, "null"),
    ({"enum": ["null", "a"]}, "null"), ({"const": "null"}, "null"), ({"type": "string", "nullable": False}, "null"),
    ({"anyOf": [{"type": "string", "description": "null"}, {"enum": ["null"]}]}, "null"),
    ({"type": ["string"], "default": None}, "null"), ({"type": ["string", "null"]}, None),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, None), ({"oneOf": [{"type": ["string", "null"]}]}, None),
    ({"type": "integer"}, None), ({}, None),
], ids=str)
def test_null_between_tags(schema: dict[str, Any], value: Any) -> None:
    """The word null is a string unless the schema allows null."""
    tool_format = format_named("qwen3_coder")
    functions = {"f": {"type": "object", "properties": {"d": schema}}}
    parser = ToolCallParser(tool_format, functions, False, lambda number: "id")
    parser.feed(tool_format.render([("f", {"d": "null"})]), True)
    ((_, _, raw, _),) = parser.calls
    assert parse_arguments(raw) == {"d": value}


# ---- types behind references, and calls in reasoning -----------------------------------------------------------------

DEFS: dict[str, Any] = {
    "code": {"enum": ["12345", "67890"]}, "number": {"type": "integer"}, "again": {"$ref": "#/$defs/code"},
    "text": {"type": "string", "pattern": "^[0-9]+$"},
    "tree": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/tree"}]}}
# a chain of references that is longer than Python's stack
DEFS |= {f"link{i}": {"$ref": f"#/$defs/link{i + 1}"} for i in range(1000)} | {"link1000": {"type": "integer"}}
#: Schema of an argument, the text between the tags, the value.
BEHIND: list[tuple[dict[str, Any], str, Any]] = [
    ({"$ref": "#/$defs/code"}, "12345", "12345"), ({"$ref": "#/$defs/again"}, "12345", "12345"),
    ({"$ref": "#/$defs/code", "description": "A code."}, "12345", "12345"), ({"$ref": "#/$defs/number"}, "5", 5),
    ({"allOf": [{"$ref": "#/$defs/code"}], "default": "12345"}, "12345", "12345"),
    ({"allOf": [{}, {"type": "string"}]}, "12345", "12345"), ({"$ref": "#/$defs/tree"}, "12345", "12345"),
    ({"anyOf": [{"$ref": "#/$defs/code"}, {"type": "null"}]}, "12345", "12345"),
    ({"anyOf": [{"$ref": "#/$defs/code"}, {"type": "null"}]}, "null", None),
    ({"oneOf": [{"$ref": "#/$defs/text"}, {"$ref": "#/$defs/code"}]}, "12345", "12345"),
    ({"anyOf": [{"$ref": "#/$defs/number"}, {"type": "null"}]}, "5", 5),
    ({"type": "string", "nullable": True}, "null", None), ({"type": "string", "nullable": True}, "5", "5"),
    ({"type": ["string", "object"]}, "5", "5"), ({"type": ["string", "object"]}, '{"a": 1}', {"a": 1}),
    ({"type": ["string", "integer"]}, "5", 5), ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "true", "true"),
    ({"enum": ["12345", 5]}, "12345", "12345"), ({"enum": ["12345", 5]}, "5", 5), ({"type": "boolean"}, "True", True),
    ({"const": "5"}, "5", "5"), ({"$ref": "#/nowhere"}, "5", 5),
    ({"anyOf": [{"const": "5"}, {"type": "number"}]}, "5", "5"),
    ({"$ref": "#/$defs/link0"}, "5", 5),
]


@pytest.mark.parametrize("whole", ["properties", "$ref", "allOf", "anyOf"])
@pytest.mark.parametrize("schema, text, value", BEHIND, ids=lambda value: str(value)[:40])
def test_types_of_arguments_behind_references(schema: dict[str, Any], text: str, value: Any, whole: str) -> None:
    """Text between tags is a string where the schema wants one, wherever the schema of the argument or that of all
    arguments is defined. The values follow from JSON Schema; of several that match, the listed one wins."""
    inner = {"type": "object", "properties": {"d": schema}, "required": ["d"]}
    root: dict[str, Any] = {"$defs": {**DEFS, "all": inner}, **(
        inner if whole == "properties" else {"$ref": "#/$defs/all"} if whole == "$ref" else {whole: [inner]})}
    tool_format = format_named("qwen3_coder")
    parser = ToolCallParser(tool_format, {"f": root}, False, lambda number: "id")
    parser.feed(tool_format.render([("f", {"d": text})]), True)
    ((_, _, raw, _),) = parser.calls
    assert json.loads(raw) == {"d": value} and type(json.loads(raw)["d"]) is type(value)


@pytest.mark.parametrize("schema", [{"$ref": "#/$defs/code"}, {"allOf": [{"$ref": "#/$defs/code"}]},
                                    {"anyOf": [{"$ref": "#/$defs/code"}, {"type": "string", "maxLength": 2}]}])
def test_the_grammar_enforces_strings_behind_references(letters: Any, schema: dict[str, Any]) -> None:
    import llguidance

    _, tokenizer = letters
    whole = {"$defs": {**DEFS, "all": {"type": "object", "properties": {"d": schema}, "required": ["d"]}},
             "$ref": "#/$defs/all"}
    tool_format = format_named("qwen3_coder")
    made = tool_grammar.build_grammar(tool_format, [Function("f", whole)], forced=True, single=True, splitter=None)
    start = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(made.lark), log_level=0)
    assert not start.is_error(), start.get_error()
    for text, fits in (("12345", True), ('"12345"', False), ("123", False)):
        matcher = start.deep_copy()
        completion = tool_format.render([("f", {"d": text})]).encode()
        assert (all(matcher.try_consume_tokens([byte]) for byte in completion) and matcher.is_accepting()) == fits


CALLED = '<tool_call>\n{"name": "clock", "arguments": {"a": "</think>"}}\n</tool_call>'
#: Completion that begins inside the reasoning, its reasoning, its text, the number of its calls.
WITHIN: list[tuple[str, str | None, str, int]] = [
    ("Hm.\n" + CALLED, "Hm.", "", 1), (CALLED, None, "", 1), ("Hm." + CALLED + "\n</think>\n\nSo.", "Hm.", "So.", 1),
    ("Hm." + CALLED + CALLED, "Hm.", "", 2), ("Hm.</think>\n" + CALLED, "Hm.", "", 1),
    ("I write <tool_call> before it.\n</think>\nYes.", "I write <tool_call> before it.", "Yes.", 0),
    ('<tool_call>{"name": "no", "arguments": {}}</tool_call> is none.</think>Yes.',
     '<tool_call>{"name": "no", "arguments": {}}</tool_call> is none.', "Yes.", 0),
    ('Hm <tool_call>{"name": "clock", "argum', 'Hm <tool_call>{"name": "clock", "argum', "", 0),
    ('Hm <tool_call>{"name": "clock", "a</think>So.', 'Hm <tool_call>{"name": "clock", "a', "So.", 0),
    ("a <tool_call> b\n\n" + CALLED, "a <tool_call> b", "", 1),
]


@pytest.mark.parametrize("markers", reasoning.THINK_MARKERS, ids=lambda markers: markers[0])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("completion, thoughts, said, count", WITHIN)
def test_a_call_ends_the_reasoning(completion: str, thoughts: str | None, said: str, count: int, inside: bool,
                                   markers: tuple[str, str]) -> None:
    """The same result as a whole, by character, and in two chunks split at every position."""
    completion, thoughts = (None if text is None else text.replace("</think>", markers[1])
                            for text in (completion, thoughts))
    assert completion is not None
    completion = completion if inside else markers[0] + "\n" + completion
    make = reasoning.of_template("".join(markers), "prompt" + markers[0] * inside)
    assert isinstance(make, type) and issubclass(make, reasoning.ThinkSplitter)
    tools = Tools([], tuple(Function(*one) for one in FUNCTIONS.items()), False, False, format_named("hermes"))
    for at in (None, *range(len(completion))):
        chunks = list(completion) if at is None else [completion[:at], completion[at:]]
        splitter, parser = tools.splitter(make), tools.parser(b"")
        thought = text = ""
        for number, chunk in enumerate(chunks):
            new, rest = splitter.feed(chunk, number + 1 == len(chunks))
            thought, text = thought + new, text + parser.feed(rest, number + 1 == len(chunks))[0]
        assert (thought or None, text, len(parser.calls)) == (thoughts, said, count), at
        assert all(json.loads(call.raw) == {"a": markers[1]} for call in parser.calls)


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("harmony", "llama3")])
@pytest.mark.parametrize("opening", range(3))
def test_the_grammar_accepts_calls_within_reasoning_and_other_openings(letters: Any, name: str, opening: int) -> None:
    """It requires arguments that match the schema there, too."""
    import llguidance

    tool_format, (_, tokenizer) = format_named(name), letters
    openings = (tool_format.prefix, *tool_format.openings)
    if opening >= len(openings):
        pytest.skip("the format has fewer openings")
    functions = [Function(key, value) for key, value in FUNCTIONS.items()]
    call = tool_format.render([("get_weather", {"city": "Rome", "days": 2})])
    rest = call[len(tool_format.prefix):]
    opened = openings[opening] + "[" * (opening > 0 and tool_format.listed and not openings[opening].endswith("["))
    for make, before in ((reasoning.OpenedThinkSplitter, "Hm <t "), (reasoning.ThinkSplitter, "<think>Hm "),
                         (reasoning.ThinkSplitter, "So: "), (None, "So: ")):
        made = tool_grammar.build_grammar(tool_format, functions, forced=False, single=False, splitter=make)
        start = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(made.lark), log_level=0)
        for right in (True, False):
            matcher = start.deep_copy()
            text = before + opened + (rest if right else rest.replace("Rome", "Rome" * 3))
            accepted = all(matcher.try_consume_tokens([byte]) for byte in text.encode())
            assert (accepted and matcher.is_accepting()) == right, (make, before)

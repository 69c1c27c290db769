"""Reads the cases of llama.cpp's chat parsers from its ``tests/test-chat.cpp``: completions, and what they mean.

Only declarations and chains such as ``tst.test("...").tools({ x }).expect(y).run();`` are read, as expressions of
literals, names and the few functions of :data:`_MESSAGES`. A chain with anything else is counted as unread.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|R"(?P<tag>[^(\s"]*)\((?P<raw>.*?)\)(?P=tag)"|"(?P<text>(?:[^"\\\n]|\\.)*)"'
                    r"|'(?:[^'\\]|\\.)+'|(?P<name>[A-Za-z_][\w:]*)|(?P<number>\d+)|(?P<sign>[^\s\w])", re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "b": "\b", "f": "\f"}
_WORDS = {"true": True, "false": False, "nullptr": None, "detailed_debug": False}


@dataclass(frozen=True)
class Case:
    """A completion of a model with one chat template.

    Attributes:
        line: line of the test in the file.
        template: path of the chat template.
        text: the completion.
        tools: its tools in OpenAI's format.
        options: further settings of the test, such as ``enable_thinking``.
        content, reasoning, calls: what llama.cpp reads from it; calls as (name, JSON arguments).
    """

    line: int
    template: str
    text: str
    tools: list[dict[str, Any]]
    options: dict[str, Any]
    content: str
    reasoning: str
    calls: list[tuple[str, str]]


@dataclass
class _Message:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def _assistant(content: str, reasoning: str = "", name: str = "", arguments: str = "", id: str = "") -> _Message:
    return _Message(content, reasoning, [(name, arguments)] if name or id else [])


_MESSAGES: dict[str, Callable[..., _Message]] = {
    "simple_assist_msg": _assistant,
    "message_with_tool_calls": lambda name, arguments: _assistant("", "", name, arguments),
    "message_with_tool_calls_and_reasoning": lambda name, arguments, why: _assistant("", why, name, arguments),
    "message_with_content_and_tool_call": lambda content, name, arguments: _assistant(content, "", name, arguments),
    "message_with_reasoning_and_tool_call": lambda why, name, arguments: _assistant("", why, name, arguments),
    "message_with_reasoning_content_and_multiple_tool_calls": lambda why, content, calls: _Message(
        content, why, [(name, arguments) for name, arguments in calls])}


class _Unread(Exception):
    """An expression that is not one of those of the module's text."""


class _Reader:
    def __init__(self, source: str) -> None:
        self.tokens = [found for found in _TOKEN.finditer(source) if not found[0].startswith(("//", "/*"))]
        self.at, self.names = 0, dict[str, Any]()
        self._starts = [found.end() for found in re.finditer("\n", source)]

    def word(self, offset: int = 0) -> str:
        at = self.at + offset
        return self.tokens[at][0] if at < len(self.tokens) else ""

    def line(self) -> int:
        start = self.tokens[self.at].start()
        return 1 + sum(1 for end in self._starts if end <= start)

    def take(self, word: str) -> None:
        if self.word() != word:
            raise _Unread(self.word())
        self.at += 1

    def expression(self) -> Any:
        found = self._operand()
        while self.word() == "+":
            self.at += 1
            other = self._operand()
            if not isinstance(found, str) or not isinstance(other, str):
                raise _Unread("+")
            found += other
        return found

    def _operand(self) -> Any:
        if self.at >= len(self.tokens):
            raise _Unread("the end")
        token = self.tokens[self.at]
        if token["raw"] is not None or token["text"] is not None:
            parts = []
            while self.at < len(self.tokens) and (self.tokens[self.at]["raw"] is not None
                                                  or self.tokens[self.at]["text"] is not None):
                one = self.tokens[self.at]
                parts.append(one["raw"] if one["raw"] is not None else _ESCAPE.sub(_unescaped, one["text"]))
                self.at += 1
            return "".join(parts)
        if token[0] == "{":
            return self.arguments("{", "}")
        if token["number"]:
            self.at += 1
            return int(token[0])
        name = token["name"]
        if name is None:
            raise _Unread(token[0])
        self.at += 1
        if self.word() == "(":
            given = self.arguments("(", ")")
            if name == "std::string" and len(given) == 1:
                return given[0]
            if name not in _MESSAGES:
                raise _Unread(name)
            return _MESSAGES[name](*given)
        if name in _WORDS or name.startswith("COMMON_"):
            return _WORDS.get(name, name)
        if name not in self.names:
            raise _Unread(name)
        return self.names[name]

    def arguments(self, open: str, close: str) -> list[Any]:
        self.take(open)
        found = []
        while self.word() != close:
            found.append(self.expression())
            if self.word() == ",":
                self.at += 1
            elif self.word() != close:
                raise _Unread(self.word())
        self.at += 1
        return found


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    return chr(int(code[1:], 16)) if code[0] in "ux" and len(code) > 1 else _ESCAPES.get(code, code)


def read(path: Path) -> tuple[list[Case], int]:
    """Return the cases of a ``test-chat.cpp``, and the number of chains that were not read."""
    reader = _Reader(path.read_text(encoding="utf-8"))
    cases: list[Case] = []
    template, unread = "", 0
    while reader.at < len(reader.tokens):
        word, start = reader.word(), reader.at
        try:
            if word == "common_chat_tool" and reader.word(2) == "{":
                name = reader.word(1)
                reader.at += 2
                reader.names[name] = _tool(reader.arguments("{", "}"))
            elif word in ("common_chat_msg", "string", "std::string", "char", "auto") and reader.word(2) == "=" \
                    or word == "char" and reader.word(3) == "=":
                at = 2 if word == "char" and reader.word(1) == "*" else 1
                name = reader.word(at)
                reader.at += at + 2
                if reader.word() == "peg_tester":
                    reader.at += 1
                    template = str(reader.arguments("(", ")")[0])
                else:
                    reader.names[name] = reader.expression()
            elif word in ("tst", "tst2") and reader.word(2) == "test":
                cases.append(_case(reader, template))
            else:
                reader.at += 1
        except (_Unread, TypeError, ValueError):
            unread += word in ("tst", "tst2")
            template = "" if "peg_tester" in [token[0] for token in reader.tokens[start:start + 5]] else template
            reader.at = start + 1
    return [case for case in cases if case.template], unread + sum(not case.template for case in cases)


def _tool(given: list[Any]) -> dict[str, Any]:
    name, description, parameters = given
    return {"type": "function", "function": {"name": name, "description": description,
                                             "parameters": json.loads(parameters or "{}") or {"type": "object"}}}


def _case(reader: _Reader, template: str) -> Case:
    line, options, message = reader.line(), dict[str, Any](), _Message()
    text, tools = "", []  # type: str, list[dict[str, Any]]
    reader.at += 1
    while reader.word() == ".":
        name = reader.word(1)
        reader.at += 2
        given = reader.arguments("(", ")")
        if name == "test":
            (text,) = given
        elif name == "tools":
            tools = [_tool(one) if isinstance(one, list) else one for one in given[0]]
        elif name == "expect":
            message = _Message(given[0].content, given[0].reasoning, given[0].calls)
        elif name == "expect_content":
            (message.content,) = given
        elif name == "expect_reasoning":
            (message.reasoning,) = given
        elif name == "expect_tool_calls":
            message.calls = [(call[0], call[1]) for call in given[0]]
        elif name != "run":
            options[name] = given[0] if given else True
    return Case(line, template, text, tools, options, message.content, message.reasoning, message.calls)


__all__ = ["Case", "read"]

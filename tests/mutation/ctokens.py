"""Tokens of C sources, and the statements and functions that they form.

A full parser is not needed: mutants change tokens, and the compiler rejects what does not fit. The sources have
one style, which tells a binary ``a * b`` from a declaration ``type *b``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(r"""
    (?P<comment>/\*.*?\*/|//[^\n]*)
  | (?P<directive>^[ \t]*\#(?:\\\n|/\*.*?\*/|[^\n])*)
  | (?P<string>"(?:\\.|[^"\\\n])*")
  | (?P<char>'(?:\\.|[^'\\\n])*')
  | (?P<number>(?:0[xX][0-9a-fA-F.]+(?:[pP][+-]?\d+)?|\.?\d[\d.]*(?:[eE][+-]?\d+)?)[uUlLfF]*)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<operator><<=|>>=|\.\.\.|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[-+*/%&|^~!<>=?:;,.(){}\[\]])
  | (?P<space>\s+)
  | (?P<other>.)
""", re.VERBOSE | re.DOTALL | re.MULTILINE)


@dataclass
class Token:
    """A token that is neither space, comment nor directive."""

    kind: str
    text: str
    start: int
    spaced: bool
    """Space before and after it."""
    function: str = ""
    skipped: bool = False
    """Within an assertion, a log record, an error's text, an attribute, a type or a size: it is not changed."""
    mate: int = -1
    """Index of the bracket that belongs to this one."""

    @property
    def end(self) -> int:
        """Offset after the token."""
        return self.start + len(self.text)


@dataclass
class Unit:
    """A file in tokens."""

    text: str
    tokens: list[Token] = field(default_factory=list)
    statements: list[tuple[int, int]] = field(default_factory=list)
    """First and last token (the semicolon) of every statement of a function that is no declaration and no jump."""


class Unbalanced(Exception):
    """Brackets of a file do not match: preprocessor branches open or close them unevenly."""


_HEADS = {"if", "for", "while", "switch"}
_NOT_CHANGED = re.compile(r"^(assert|static_assert|_Static_assert|mp_log\w*|mp_trace\w*|MP_TRACE\w*|mp_fail\w*|"
                          r"REFUSE\w*|PyErr_\w+|sizeof|_Alignof|_Alignas|__attribute__|offsetof|"
                          r"__builtin_expect)$")
_TYPES = re.compile(r"^(static|const|struct|enum|union|void|bool|char|short|int|long|unsigned|signed|float|double|"
                    r"typedef|register|volatile|extern|_Alignas|_Thread_local|goto|case|default|return|__m\d+\w*|"
                    r"\w+_t)$")


def _split(text: str) -> list[Token]:
    tokens = []
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or ""
        if kind in ("comment", "directive", "space"):
            continue
        start, end = match.span()
        spaced = text[start - 1:start].isspace() and text[end:end + 1].isspace()
        tokens.append(Token(kind, match.group(), start, spaced))
    return tokens


def _match(tokens: list[Token]) -> None:
    opened: list[int] = []
    pairs = {")": "(", "]": "[", "}": "{"}
    for i, token in enumerate(tokens):
        if token.text in pairs.values() and token.kind == "operator":
            opened.append(i)
        elif token.text in pairs and token.kind == "operator":
            if not opened or tokens[opened[-1]].text != pairs[token.text]:
                raise Unbalanced(f"`{token.text}` at offset {token.start}")
            token.mate = opened.pop()
            tokens[token.mate].mate = i
    if opened:
        raise Unbalanced(f"`{tokens[opened[-1]].text}` at offset {tokens[opened[-1]].start} is not closed")


def _is_block(tokens: list[Token], i: int) -> bool:
    """True if the brace at i, within a function, opens a block and not a list of values."""
    before = tokens[i - 1]
    if before.text == ")":
        head = tokens[before.mate - 1]
        return head.text in _HEADS or (head.kind == "name" and head.text.isupper())
    return before.text in (";", "{", "}", "else", "do", ":", "(")


def _skip(tokens: list[Token], first: int, last: int) -> None:
    for token in tokens[first:last + 1]:
        token.skipped = True


def parse(text: str) -> Unit:
    """Return the tokens of a file, with functions, brackets and statements.

    Raises:
        Unbalanced: brackets do not match.
    """
    unit = Unit(text, _split(text))
    tokens = unit.tokens
    _match(tokens)
    for i, token in enumerate(tokens):
        calls = token.kind == "name" and i + 1 < len(tokens) and tokens[i + 1].text == "("
        if calls and _NOT_CHANGED.match(token.text):
            _skip(tokens, i, tokens[i + 1].mate)
    i = 0
    while i < len(tokens):
        token = tokens[i]
        if token.text == "{" and tokens[i - 1].text == ")":
            _function(unit, tokens[tokens[i - 1].mate - 1].text, i, token.mate)
            i = token.mate
        elif token.text == "{" and tokens[i - 1].text == "=":
            i = token.mate  # a table
        elif token.text == "{":
            is_enum = any(before.text == "enum" for before in tokens[max(0, i - 3):i])
            if not is_enum:
                _skip(tokens, i, token.mate)
            i = token.mate
        elif token.text == "[" and token.mate >= 0:
            _skip(tokens, i, token.mate)
        i += 1
    return unit


def _function(unit: Unit, name: str, first: int, last: int) -> None:
    tokens = unit.tokens
    for token in tokens[first:last + 1]:
        token.function = name
    begins = True
    i = first + 1
    while i < last:
        token = tokens[i]
        if token.text == "{" and _is_block(tokens, i):
            begins = True
            i += 1
            continue
        if token.text in ("}", ";", "else", "do"):
            begins = True
            i += 1
            continue
        if not begins or token.text.endswith("_UNROLL"):  # a pragma of the loop that follows
            i += 1
            continue
        if token.text in _HEADS and tokens[i + 1].text == "(":
            i = tokens[i + 1].mate + 1
            continue
        end = _end(tokens, i, last)
        colon = next((k for k in range(i, end) if tokens[k].text == ":"), None)
        if token.text in ("case", "default") or (token.kind == "name" and tokens[i + 1].text == ":"):
            i = (colon or i) + 1
            continue
        _statement(unit, i, end)
        i = end
    return


def _end(tokens: list[Token], i: int, last: int) -> int:
    """Return the index of the semicolon that ends the statement at i."""
    while i < last and tokens[i].text != ";":
        i = tokens[i].mate + 1 if tokens[i].text in ("(", "[", "{") else i + 1
    return i


def _statement(unit: Unit, first: int, end: int) -> None:
    tokens = unit.tokens
    if tokens[first].skipped or tokens[end].text != ";":
        return
    second = tokens[first + 1]
    declares = bool(_TYPES.match(tokens[first].text)) or (tokens[first].kind == "name" and (
        second.kind == "name" or (second.text == "*" and not second.spaced)))
    if not declares:
        unit.statements.append((first, end))
        return
    if tokens[first].text in ("goto", "return"):
        return
    depth = first
    while depth < end and tokens[depth].text != "=":  # sizes of arrays, up to the initial value
        if tokens[depth].text == "[":
            _skip(tokens, depth, tokens[depth].mate)
        depth += 1

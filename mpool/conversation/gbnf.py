"""Converts grammars of llama.cpp's language, GBNF, to llguidance's dialect of Lark.

A rule that refers to no rule that contains itself, and to no tokens, becomes a terminal: one regular expression. If
the whole grammar is such a rule, llguidance matches exactly its texts. In other grammars, terminals are greedy.

Sources:
    https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
    https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

#: One character of a literal or a class: an escape sequence, or any other character.
_CHAR = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([^\w\s]|[nrt]))|([^\\])", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
_NAME, _SPACE, _BLANK = re.compile(r"[\w-]+"), re.compile(r"(?:\s|#[^\r\n]*)*"), re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_TOKEN = re.compile(r"(!?)<(?:\[([0-9]{1,9})\]|([^\s<>]+))>")
_REFERENCE = re.compile("\0([^\0]*)\0")
_COUNT = re.compile(r"\{\s*([0-9]{1,9})\s*(?:(,)\s*([0-9]{1,9})?\s*)?\}")
#: Highest code point, and the range of those that are no characters.
_LAST, _SURROGATES = 0x10FFFF, range(0xD800, 0xE000)


class _Node(NamedTuple):
    """A part of a rule.

    Attributes:
        text: the part in Lark's language, with the name of each rule that it refers to between NUL characters.
        refers: names of the rules that it refers to.
        has_token: True if it refers to tokens, which terminals cannot contain.
        is_single: True if a repetition needs no parentheses around it.
    """

    text: str
    refers: frozenset[str] = frozenset()
    has_token: bool = False
    is_single: bool = False


def to_lark(source: str, token_of: Callable[[str], int | None], tokens: int, ends: list[int]) -> str:
    """Convert a grammar.

    Args:
        source: the grammar in GBNF.
        token_of: returns the id of the token with a text; None: there is none.
        tokens: number of tokens of the vocabulary.
        ends: ids of the tokens that end a text. A token reference with ``!`` does not match them.

    Raises:
        ValueError: the grammar is malformed, or refers to a rule or a token that does not exist.
    """
    try:
        rules = _Parser(source, token_of, tokens, ends).rules()
    except RecursionError:
        raise ValueError("groups are nested too deeply") from None
    if "root" not in rules:
        raise ValueError("there is no rule root")
    waiting: dict[str, set[str]] = {}  # rule -> rules that it refers to and that are not known to be terminals
    users: dict[str, list[str]] = {}
    for name, node in rules.items():
        for other in node.refers:
            if other not in rules:
                raise ValueError(f"the rule {other} is not defined")
            users.setdefault(other, []).append(name)
        waiting[name] = set(node.refers)
    terminals: set[str] = set()
    ready = [name for name, node in rules.items() if not node.refers and not node.has_token]
    while ready:
        terminals.add(name := ready.pop())
        for user in users.get(name, ()):
            waiting[user].discard(name)
            if not waiting[user] and not rules[user].has_token and user not in terminals:
                ready.append(user)
    names = {}
    for at, name in enumerate(rules):
        plain = re.sub(r"[^a-z0-9]", "_", name.lower())
        names[name] = f"R{at}_{plain}".upper() if name in terminals else f"r{at}_{plain}"
    lines = [f"{names[name]}: " + _REFERENCE.sub(lambda found: names[found[1]], node.text)
             for name, node in rules.items()]
    return "\n".join(["%llguidance {}", f"start: {names['root']}", *lines])


class _Parser:
    """Parses a grammar from its first character to its last."""

    def __init__(self, source: str, token_of: Callable[[str], int | None], tokens: int, ends: list[int]) -> None:
        self._source, self._at = source, 0
        self._token_of, self._tokens, self._ends = token_of, tokens, ends

    def rules(self) -> dict[str, _Node]:
        """Return the rules by name. Of several rules of a name, the last one counts, as in llama.cpp."""
        found: dict[str, _Node] = {}
        self._skip(_SPACE)
        while self._at < len(self._source):
            name = self._match(_NAME, "the name of a rule")[0]
            self._skip(_BLANK)
            if not self._source.startswith("::=", self._at):
                raise self._error("::=")
            self._at += 3
            self._skip(_SPACE)
            found.pop(name, None)
            found[name] = self._alternatives(False)
            if self._at < len(self._source) and self._source[self._at] not in "\r\n":
                raise self._error("the end of the rule")
            self._skip(_SPACE)
        return found

    def _alternatives(self, nested: bool) -> _Node:
        options = [self._sequence(nested)]
        while self._source[self._at:self._at + 1] == "|":
            self._at += 1
            self._skip(_SPACE)
            options.append(self._sequence(nested))
        return options[0] if len(options) == 1 else _joined(options, " | ")

    def _sequence(self, nested: bool) -> _Node:
        parts: list[_Node] = []
        blank = _SPACE if nested else _BLANK
        self._skip(blank)
        while (part := self._part()) is not None:
            self._skip(blank)
            parts.append(self._repeated(part))
            self._skip(blank)
        return _joined(parts, " ") if parts else _Node('""', is_single=True)

    def _part(self) -> _Node | None:
        """Return the next literal, class, group, rule or token; None: another one follows."""
        head = self._source[self._at:self._at + 1]
        if head == '"':
            return self._literal()
        if head == "[":
            return self._class()
        if head == ".":
            self._at += 1
            return _Node("/(?s:.)/", is_single=True)
        if head == "(":
            self._at += 1
            inner = self._alternatives(True)
            if self._source[self._at:self._at + 1] != ")":
                raise self._error(")")
            self._at += 1
            return inner._replace(text=f"({inner.text})", is_single=True)
        if head and head in "<!":
            return self._token()
        if (name := _NAME.match(self._source, self._at)) is not None:
            self._at = name.end()
            return _Node(f"\0{name[0]}\0", frozenset((name[0],)), is_single=True)
        return None

    def _repeated(self, part: _Node) -> _Node:
        head, text = self._source[self._at:self._at + 1], part.text if part.is_single else f"({part.text})"
        if head and head in "*+?":
            self._at += 1
            return part._replace(text=text + head, is_single=False)
        if head == "{":
            low, comma, high = self._match(_COUNT, "a repetition such as {2}, {2,} or {2,5}").groups()
            high = high or ("" if comma else low)
            if high and int(high) < int(low):
                raise self._error(f"at least {low} repetitions")
            return part._replace(text=f"{text}{{{low},{high}}}", is_single=False)
        return part

    def _literal(self) -> _Node:
        start, chars = self._at, list[str]()
        self._at += 1
        while self._source[self._at:self._at + 1] != '"':
            if self._at >= len(self._source):
                self._at = start
                raise self._error("a text that ends with a quotation mark")
            chars.append(_shown(self._char()))
        self._at += 1
        return _Node(f"/{''.join(chars)}/" if chars else '""', is_single=True)

    def _class(self) -> _Node:
        start, ranges = self._at, list[str]()
        self._at += 1
        inverse = self._source.startswith("^", self._at)
        self._at += inverse
        while self._source[self._at:self._at + 1] != "]":
            if self._at >= len(self._source):
                self._at = start
                raise self._error("a class that ends with ]")
            first = last = self._char()
            if self._source[self._at:self._at + 1] == "-" and self._source[self._at + 1:self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._char()
            if last < first:
                raise self._error("a range whose end is not before its start")
            ranges.append(_shown(first) + (f"-{_shown(last)}" if last > first else ""))
        self._at += 1
        if not ranges:
            text = "(?s:.)" if inverse else "[^\\u{0}-\\u{10ffff}]"
        else:
            text = f"[{'^' * inverse}{''.join(ranges)}]"
        return _Node(f"/{text}/", is_single=True)

    def _char(self) -> int:
        """Read a character of a literal or a class. Returns its code point."""
        found = self._match(_CHAR, "an escape sequence such as \\n, \\x41, \\u0041 or \\U0001f600")
        digits, escaped, plain = found[1] or found[2] or found[3], found[4], found[5]
        code = int(digits, 16) if digits else ord(_ESCAPED.get(escaped, escaped) if escaped else plain)
        if code > _LAST or code in _SURROGATES:
            raise self._error("a character of Unicode")
        return code

    def _token(self) -> _Node:
        inverse, number, text = self._match(_TOKEN, "a token such as <think> or <[1000]>, or ! before one").groups()
        token = int(number) if number else self._token_of(f"<{text}>")
        if token is None:
            raise ValueError(f"<{text}> is not a single token of this model")
        if token >= self._tokens:
            raise ValueError(f"the token {token} does not exist: this model has {self._tokens:,} tokens")
        ids = ",".join(map(str, sorted({token, *self._ends}))) if inverse else str(token)
        return _Node(f"<[{'^' * bool(inverse)}{ids}]>", has_token=True, is_single=True)

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._source, self._at)
        assert found is not None
        self._at = found.end()

    def _match(self, pattern: re.Pattern[str], allowed: str) -> re.Match[str]:
        found = pattern.match(self._source, self._at)
        if found is None:
            raise self._error(allowed)
        self._at = found.end()
        return found

    def _error(self, allowed: str) -> ValueError:
        line, got = self._source.count("\n", 0, self._at) + 1, self._source[self._at:self._at + 20]
        return ValueError(f"line {line} must have {allowed}" + (f", got {got!r}" if got else ""))


def _joined(parts: list[_Node], between: str) -> _Node:
    if len(parts) == 1:
        return parts[0]
    return _Node(between.join(part.text for part in parts), frozenset[str]().union(*(part.refers for part in parts)),
                 any(part.has_token for part in parts))


def _shown(code: int) -> str:
    """Return a character for a regular expression."""
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\u{{{code:x}}}"


__all__ = ["to_lark"]

"""Worst-case cost of the regular expressions of a ``tokenizer.json``.

HF tokenizers compiles them with Oniguruma, which backtracks. A hostile expression needs exponential time for a short
text. Oniguruma gives up after 10,000,000 steps for one match; HF tokenizers then aborts the call with a Rust panic,
whose message goes to standard error before Python can catch it. Therefore this module computes, before the
first call, how the steps of one match grow with the length of the text.
"""

from __future__ import annotations

import enum
from functools import lru_cache

from .older_files import WORDS as _CLIP
from .pretokenizers import PRE_TOKENIZERS

#: Maximum length of an expression, depth of its groups, and length after its bounded repetitions are written out.
_MAX_CHARS, _MAX_DEPTH, _MAX_SIZE = 20_000, 50, 50_000
#: Maximum number of ways in which the bounded repetitions before a part can match.
_MAX_WAYS = 256


class Cost(enum.IntEnum):
    """Steps of one match in a text of n characters.

    Attributes:
        CONSTANT: bounded by a constant, or used in published tokenizers and linear over a whole text.
        LINEAR: proportional to n, so that all matches of a text can take n * n.
        UNKNOWN: more, or not derived.
    """

    CONSTANT = 0
    LINEAR = 1
    UNKNOWN = 2


def _canonical(pattern: str) -> str:
    return pattern.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])")


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
#: Expressions of published tokenizers, which were measured to be linear over a text.
_PUBLISHED = frozenset(_canonical(pattern) for row in PRE_TOKENIZERS.values() for pattern in row.patterns
                       if pattern != r"\s+$") | {
    _CLIP, _canonical(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
    # o200k of OpenAI, in the spelling of its tokenizer.json
    _canonical(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
               rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
               r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")}

#: Ends of published expressions. If an alternative reads a run of white space to its end and fails, the last one takes
#: the whole run. The time is therefore linear in the length of a text, whatever precedes these ends.
_ENDS = (r"|\s*[\r\n]+|\s+(?!\S)|\s+", r"|\s*[\r\n]|\s+(?!\S)|\s+", r"|\s+(?!\S)|\s+")


class _Unknown(Exception):
    """The parser does not derive the cost of this expression."""


@lru_cache(maxsize=256)
def cost(pattern: str) -> Cost:
    """Return the cost of the longest match of an expression, given in the syntax of Oniguruma."""
    if _canonical(pattern) in _PUBLISHED:
        return Cost.CONSTANT
    if len(pattern) > _MAX_CHARS:
        return Cost.UNKNOWN
    pattern = pattern.removesuffix(next((end for end in _ENDS if pattern.endswith(end)), ""))
    try:
        parser = _Parser(pattern)
        node = parser.alternation(0)
        if parser.at < len(pattern):
            return Cost.UNKNOWN
        degree, _ = node.degree(False)
    except _Unknown:
        return Cost.UNKNOWN
    return Cost.CONSTANT if degree == 0 else Cost.LINEAR if degree == 1 else Cost.UNKNOWN


class _Node:
    """A part of an expression.

    Attributes:
        size: length with bounded repetitions written out.
        can_fail: True if the part does not match everywhere.
        fixed: True if it has one way to match at a position.
    """

    size, can_fail, fixed = 1, True, True

    def degree(self, tail_fails: bool) -> tuple[int, int]:
        """Return k, if a match takes n ** k steps in a text of n characters, and the number of ways to match.

        ``tail_fails``: the parts after this one may fail, and backtracking then tries all ways of this part.
        """
        return 0, 1


class _Sequence(_Node):
    def __init__(self, parts: list[_Node]) -> None:
        self.parts = parts
        self.size = sum(part.size for part in parts) + 1
        self.can_fail = any(part.can_fail for part in parts)
        self.fixed = all(part.fixed for part in parts)

    def degree(self, tail_fails: bool) -> tuple[int, int]:
        total, ways = 0, 1
        for part in reversed(self.parts):
            degree, count = part.degree(tail_fails)
            total, ways = total + degree, ways * count
            if ways > _MAX_WAYS:
                raise _Unknown
            tail_fails = tail_fails or part.can_fail
        return total, ways


class _Alternation(_Node):
    def __init__(self, branches: list[_Node]) -> None:
        self.branches = branches
        self.size = sum(branch.size for branch in branches)
        self.can_fail = all(branch.can_fail for branch in branches)
        self.fixed = False

    def degree(self, tail_fails: bool) -> tuple[int, int]:
        found = [branch.degree(tail_fails) for branch in self.branches]
        return max(degree for degree, _ in found), sum(ways for _, ways in found) if tail_fails else 1


class _Repetition(_Node):
    def __init__(self, body: _Node, least: int, most: int | None, possessive: bool) -> None:
        self.body, self.least, self.most, self.possessive = body, least, most, possessive
        self.size = body.size * max(1, least, most or 1)
        self.can_fail = least > 0 and body.can_fail
        self.fixed = most == least and body.fixed
        if self.size > _MAX_SIZE:
            raise _Unknown

    def degree(self, tail_fails: bool) -> tuple[int, int]:
        if self.most is None:
            if self.possessive or not tail_fails:
                # the rest of the loop is optional, so a failure in an iteration ends the loop and tries nothing again
                return self.body.degree(False)[0], 1
            if not self.body.fixed:
                raise _Unknown
            return 1, 1
        inner = self.body.degree(not self.possessive and (tail_fails or self.least > 1))
        if self.possessive or not (tail_fails or self.least > 1):
            return inner[0], 1
        ways = sum(inner[1] ** times for times in range(self.least, self.most + 1)) if self.most <= 64 else \
            (self.most - self.least + 1 if inner[1] == 1 else _MAX_WAYS + 1)
        if ways > _MAX_WAYS:
            raise _Unknown
        return inner[0] * max(1, self.most), ways


class _Look(_Node):
    """A lookahead, lookbehind or atomic group: once it has matched, its other ways are not tried."""

    def __init__(self, body: _Node, consumes: bool) -> None:
        self.body, self.size, self.can_fail, self.fixed = body, body.size, not consumes or body.can_fail, not consumes

    def degree(self, tail_fails: bool) -> tuple[int, int]:
        return self.body.degree(False)[0], 1


class _Parser:
    """Parses the common part of Oniguruma's syntax. Raises :class:`_Unknown` for everything else: back references,
    calls of groups, conditionals, absent operators."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.at = pattern, 0

    def _peek(self) -> str:
        return self.pattern[self.at:self.at + 1]

    def _take(self, text: str) -> bool:
        if self.pattern.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def alternation(self, depth: int) -> _Node:
        """Parse up to the end of the group."""
        if depth > _MAX_DEPTH:
            raise _Unknown
        branches = [self._sequence(depth)]
        while self._take("|"):
            branches.append(self._sequence(depth))
        return branches[0] if len(branches) == 1 else _Alternation(branches)

    def _sequence(self, depth: int) -> _Node:
        parts: list[_Node] = []
        while self._peek() not in ("", "|", ")"):
            atom = self._atom(depth)
            while (found := self._quantifier()) is not None:
                atom = _Repetition(atom, *found)
            parts.append(atom)
        return _Sequence(parts)

    def _atom(self, depth: int) -> _Node:
        char = self._peek()
        self.at += 1
        if char == "(":
            return self._group(depth)
        if char == "[":
            self._class()
        elif char == "\\":
            self._escape()
        elif char in "*+?":
            raise _Unknown
        return _Node()

    def _group(self, depth: int) -> _Node:
        kind = ""
        if self._take("?"):
            kind = next((text for text in ("<=", "<!", "=", "!", ">", ":") if self._take(text)), "")
            if not kind:
                flags = self.at
                while self._peek() in ("i", "m", "x", "-", "s") and self._peek():
                    self.at += 1
                if "x" in self.pattern[flags:self.at] or self.at == flags or not self._take(":"):
                    raise _Unknown
        body = self.alternation(depth + 1)
        if not self._take(")"):
            raise _Unknown
        return _Look(body, kind == ">") if kind in ("<=", "<!", "=", "!", ">") else body

    def _class(self) -> None:
        """Skip a character class, which may contain others."""
        depth, first = 1, True
        self._take("^")
        while depth:
            char = self._peek()
            if not char:
                raise _Unknown
            self.at += 1
            if char == "\\":
                self._escape()
            elif char == "[":
                end = self.pattern.find(":]", self.at) if self._peek() == ":" else -1
                if end >= 0:
                    self.at = end + 2
                else:
                    depth += 1
                    self._take("^")
                    first = True
                    continue
            elif char == "]" and not first:
                depth -= 1
            first = False

    def _escape(self) -> None:
        char = self._peek()
        self.at += 1
        if char in ("p", "P", "x", "u") and self._peek() == "{":
            end = self.pattern.find("}", self.at)
            if end < 0:
                raise _Unknown
            self.at = end + 1
        elif char == "u":
            self.at += 4
        elif char == "x":
            self.at += 2
        elif not char or char.isdigit() and char != "0" or char in "kgKXRGcCM":
            raise _Unknown

    def _quantifier(self) -> tuple[int, int | None, bool] | None:
        char = self._peek()
        if char and char in "*+?":
            self.at += 1
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
            possessive = self._take("+")
            if not possessive:
                self._take("?")
            return least, most, possessive
        if char != "{":
            return None
        end = self.pattern.find("}", self.at)
        low, comma, high = self.pattern[self.at + 1:end].partition(",") if end > 0 else ("", "", "")
        if not all(part.isdecimal() or not part for part in (low, high)) or not (low or high) or len(low + high) > 12:
            if low + comma + high and (low + high)[:1].isdecimal():
                raise _Unknown
            self.at += 1  # a literal brace, which counts as a character of its own
            return 1, 1, False
        self.at = end + 1
        self._take("?")
        least = int(low or 0)
        return least, (int(high) if high else None) if comma else least, False


__all__ = ["Cost", "cost"]

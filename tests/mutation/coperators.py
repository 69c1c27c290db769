"""Mutation operators for C."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .ctokens import Token, Unit, parse
from .mutant import Mutant, make

_COMPARE = {"<": ("<=",), "<=": ("<",), ">": (">=",), ">=": (">",), "==": ("!=",), "!=": ("==",)}
_LOGIC = {"&&": "||", "||": "&&"}
_ARITHMETIC = {"+": "-", "-": "+", "*": "+", "/": "*", "%": "+", "<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "&"}
_ASSIGN = {"+=": "-=", "-=": "+=", "*=": "+=", "/=": "*=", "|=": "&=", "&=": "|=", "<<=": ">>=", ">>=": "<<=",
           "^=": "|="}
_STEP = {"++": "--", "--": "++"}
_FLAGS = {"true": "false", "false": "true"}
_KEYWORDS = {"if", "for", "while", "switch", "return", "sizeof", "case", "else", "do"}
_SYMMETRIC = re.compile(r"^(most|least|mp_max\w*|mp_min\w*|max\w*|min\w*|MAX|MIN|f?max|f?min|fmaf?|fmaxf?|fminf?|"
                        r"_mm\d*_(mask\w*_)?(add|adds|mul|mullo|max|min|and|or|xor|fn?madd|fn?msub|madd|dpbusd)_\w+|"
                        r"v(add|mul|max|min)q?_\w+|v_(add|mul|max|min|fma)|vec_(add|mul|fma))$")
"""Functions whose first two arguments may be swapped without effect."""
_EXTREME = re.compile(r"([\w.>-]+) [<>]=? ([\w.>-]+) \? (?:\1 : \2|\2 : \1)(?![\w.>([-])")
"""The smaller or larger of two values: both are right if they are equal."""
_TABLE_LINES = 12
"""Lines of a table at file scope that get mutants: a table of a thousand rows counts no more than a function."""


def mutants(file: str, text: str) -> list[Mutant]:
    """Return every mutant of a C source or header.

    Args:
        file: path below the repository.
        text: its content.

    Raises:
        Unbalanced: preprocessor branches open or close brackets unevenly.
    """
    unit = parse(text)
    found = []
    for start, end, new, operator, function in _all(unit):
        mutant = make(file, text, start, end, new, operator, function)
        if mutant.source != mutant.mutated:
            found.append(mutant)
    return _thin_tables(found)


def _thin_tables(found: list[Mutant]) -> list[Mutant]:
    kept, lines = [], 0
    last = (-2, "")
    for mutant in sorted(found, key=lambda m: m.start):
        if mutant.function:
            lines, last = 0, (-2, "")
        elif mutant.line != last[0]:
            lines = lines + 1 if mutant.line == last[0] + 1 else 1
            last = (mutant.line, "")
        if mutant.function or lines <= _TABLE_LINES:
            kept.append(mutant)
    return kept


def _all(unit: Unit) -> Iterator[tuple[int, int, str, str, str]]:
    tokens = unit.tokens
    extremes = [match.span() for match in _EXTREME.finditer(unit.text)]
    for i, token in enumerate(tokens):
        if token.skipped:
            continue
        before, after = tokens[i - 1] if i else None, tokens[i + 1] if i + 1 < len(tokens) else None
        for new, operator in _of_token(token, before, after):
            if operator == "comparison" and any(start <= token.start < end for start, end in extremes):
                continue
            yield token.start, token.end, new, operator, token.function
        if token.text == "[" and token.function and before is not None and (
                before.kind == "name" or before.text in ("]", ")")) and token.mate > i + 1:
            close = tokens[token.mate].start
            yield token.end, close, f"({unit.text[token.end:close]}) + 1", "index", token.function
        if token.kind == "name" and after is not None and after.text == "(" and token.function:
            yield from _of_call(unit, i)
    for first, end in unit.statements:
        function = tokens[first].function
        yield tokens[first].start, tokens[end].end, ";" + _newlines(unit, first, end), "delete", function


def _newlines(unit: Unit, first: int, end: int) -> str:
    return "\n" * unit.text.count("\n", unit.tokens[first].start, unit.tokens[end].end)


def _of_token(token: Token, before: Token | None, after: Token | None) -> Iterator[tuple[str, str]]:
    text = token.text
    if token.kind == "number":
        for new in _numbers(text):
            yield new, "constant"
    elif token.kind == "name" and text in _FLAGS:
        yield _FLAGS[text], "constant"
    elif token.kind != "operator" or (not token.function and not token.spaced):
        return
    elif token.spaced and text in _COMPARE:
        for new in _COMPARE[text]:
            yield new, "comparison"
    elif token.spaced and text in _LOGIC:
        yield _LOGIC[text], "logic"
    elif token.spaced and text in _ARITHMETIC:
        yield _ARITHMETIC[text], "arithmetic"
    elif text in _ASSIGN:
        yield _ASSIGN[text], "arithmetic"
    elif text in _STEP:
        yield _STEP[text], "arithmetic"
    elif text == "!" and after is not None:
        yield "", "logic"
    elif text in ("-", "~") and not token.spaced and after is not None and after.text != "-":
        yield "", "arithmetic"


def _numbers(text: str) -> list[str]:
    """Return the neighbours of a number."""
    match = re.fullmatch(r"(0[xX][0-9a-fA-F]+|\d+)([uUlL]*)", text)
    if match:
        value = int(match[1], 0) if match[1][:2].lower() == "0x" or not match[1].startswith("0") else int(match[1], 8)
        show = hex if match[1][:2].lower() == "0x" else str
        return [show(n) + match[2] for n in (value + 1, value - 1) if n >= 0]
    match = re.fullmatch(r"([\d.]+(?:[eE][+-]?\d+)?)([fFlL]?)", text)
    if match and re.search(r"[.eE]", match[1]):
        real = float(match[1])
        return [repr(n) + match[2] for n in ((real * 1.05, 0.0) if real else (1.0,))]
    match = re.fullmatch(r"(0[xX][0-9a-fA-F.]+)[pP]([+-]?\d+)([fFlL]?)", text)
    return [f"{match[1]}p{int(match[2]) + 1}{match[3]}"] if match else []


def _of_call(unit: Unit, i: int) -> Iterator[tuple[int, int, str, str, str]]:
    """Mutants of ``name(...)``: swapped arguments, conditions, bounds of loops."""
    tokens, text = unit.tokens, unit.text
    name, opened = tokens[i].text, i + 1
    close, function = tokens[opened].mate, tokens[i].function
    begin, end = tokens[opened].end, tokens[close].start
    if name in ("if", "while"):
        inner = text[begin:end]
        yield begin, end, f"0 && ({inner})", "condition", function
        if name == "if":
            yield begin, end, f"1 || ({inner})", "condition", function
    elif name == "for":
        parts = _parts(tokens, opened, ";")
        if len(parts) == 3:
            for k in range(*parts[1]):
                if tokens[k].text in ("<", "<=") and tokens[k].spaced and parts[1][1] > k + 1:
                    start, stop = tokens[k + 1].start, tokens[parts[1][1] - 1].end
                    if not any(tokens[n].text in ("&&", "||") for n in range(k + 1, parts[1][1])):
                        yield start, stop, f"({text[start:stop]}) - 1", "bound", function
                    break
    elif name not in _KEYWORDS:
        parts = _parts(tokens, opened, ",")
        symmetric = bool(_SYMMETRIC.match(name))
        for (a, b), (c, d) in list(zip(parts, parts[1:]))[symmetric:]:
            if a < b and c < d:
                one = text[tokens[a].start:tokens[b - 1].end]
                between = text[tokens[b - 1].end:tokens[c].start]
                two = text[tokens[c].start:tokens[d - 1].end]
                no_swap = (one == two or '"' in (one[:1], two[:1]) or tokens[a].skipped or _is_type(tokens, a, b)
                           or _is_type(tokens, c, d))
                if not no_swap:
                    yield tokens[a].start, tokens[d - 1].end, two + between + one, "swap", function


def _is_type(tokens: list[Token], first: int, last: int) -> bool:
    """True for a parameter of a declaration: two names in a row, or a pointer type."""
    pair = tokens[first:min(first + 2, last)]
    return len(pair) == 2 and pair[0].kind == "name" and (pair[1].kind == "name" or (
        pair[1].text == "*" and not pair[1].spaced))


def _parts(tokens: list[Token], opened: int, separator: str) -> list[tuple[int, int]]:
    """Return the token ranges between the separators of a bracket."""
    parts, first, k = [], opened + 1, opened + 1
    close = tokens[opened].mate
    while k < close:
        if tokens[k].text == separator:
            parts.append((first, k))
            first = k + 1
        k = tokens[k].mate + 1 if tokens[k].text in ("(", "[", "{") else k + 1
    return [*parts, (first, close)]

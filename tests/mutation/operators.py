"""Mutants of C and Python sources: changes of one place, seldom equivalent to the program, each in one line."""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

#: Replacement, by operator, in both languages.
COMPARISON = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
ARITHMETIC = {"+": "-", "-": "+", "*": "+", "/": "*", "%": "+", "<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "&"}
LOGIC = {"&&": "||", "||": "&&"}
ASSIGNED = {f"{old}=": f"{new}=" for old, new in ARITHMETIC.items()}

#: Lines of C that stay: assertions, log records, texts of errors, sizes, and what the preprocessor reads.
KEPT = re.compile(r"assert|mp_log|mp_trace|MP_TRACE|mp_fail|REFUSE|PyErr_|sizeof|offsetof|__attribute__|^\s*#")
INVISIBLE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
STATEMENT = re.compile(r"^\s+((?:[\w.>\[\]-]+ (?:[-+*/|&^]|<<|>>)?= [^;]*|[\w.>-]+\([^;]*\)|break|continue"
                       r"|[\w.>\[\]-]+(?:\+\+|--));)\s*$")


class Change(NamedTuple):
    """A replacement of ``text[start:end]`` of a file."""

    start: int
    end: int
    new: str
    operator: str


def _c_line(line: str) -> Iterator[Change]:
    """Yield the changes of a line within a function, whose strings and comments are blanks."""
    for found in re.finditer(r"(?<= )([-+*/%&|^<>=!]{1,3})(?= )", line):
        for table, operator in ((COMPARISON, "comparison"), (LOGIC, "logic"), (ARITHMETIC, "arithmetic"),
                                (ASSIGNED, "arithmetic")):
            if found[1] in table:
                yield Change(*found.span(), table[found[1]], operator)
    for found in re.finditer(r"(?<![\w.])(\d+)(?=[uUlL]*\b)(?!\.)", line):
        for value in {int(found[1]) + 1, max(int(found[1]) - 1, 0)}:
            yield Change(*found.span(), str(value), "constant")
    for found in re.finditer(r"\b(?:true|false)\b", line):
        yield Change(*found.span(), "false" if found[0] == "true" else "true", "constant")
    for found in re.finditer(r"!(?=[\w(])", line):
        yield Change(*found.span(), "", "logic")
    for found in re.finditer(r"\+\+|--", line):
        yield Change(*found.span(), "--" if found[0] == "++" else "++", "arithmetic")
    for found in re.finditer(r"^\s*(?:\} else )?(if|while) \((.*)\)( \{)?\s*$", line):
        yield Change(*found.span(2), f"0 && ({found[2]})", "condition")
        if found[1] == "if":
            yield Change(*found.span(2), f"1 || ({found[2]})", "condition")
    for found in re.finditer(r"\bfor \(.*; .* <=? ([^;&|]+);", line):
        yield Change(*found.span(1), f"({found[1]}) - 1", "bound")
    for found in re.finditer(r"(?<=[\w\])]\[)([\w.>+ -]+)(?=\])", line):
        yield Change(*found.span(), f"({found[1]}) + 1", "index")
    for found in re.finditer(r"(?<=\w\()([\w.>-]+), ([\w.>-]+)(?=[,)])", line):
        if found[1] != found[2]:
            yield Change(*found.span(), f"{found[2]}, {found[1]}", "swap")
    for found in STATEMENT.finditer(line):
        yield Change(*found.span(1), ";", "delete")


def of_c(text: str) -> Iterator[Change]:
    """Yield the changes of a C file: of its functions, in the lines that the compiler keeps."""
    visible = INVISIBLE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    start = depth = 0
    for line in visible.splitlines(keepends=True):
        if depth and not KEPT.search(line) and not re.match(r"\s*(?:static |const |enum |\w+_t )", line):
            yield from (Change(start + one.start, start + one.end, *one[2:]) for one in _c_line(line))
        depth += line.count("{") - line.count("}")
        start += len(line)


WORDS: dict[type, str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*",
    ast.FloorDiv: "*", ast.Mod: "+", ast.LShift: ">>", ast.RShift: "<<", ast.BitAnd: "|", ast.BitOr: "&"}


def of_python(text: str) -> Iterator[Change]:
    """Yield the changes of a Python file: of its functions, but for annotations, raised errors and log records."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def span(node: ast.AST) -> tuple[int, int]:
        """Offsets of a node; ast counts columns in bytes."""
        first, last = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
        return (starts[first] + len(lines[first].encode()[:node.col_offset].decode()),  # type: ignore[attr-defined]
                starts[last] + len(lines[last].encode()[:node.end_col_offset].decode()))  # type: ignore[attr-defined]

    def between(left: ast.AST, right: ast.AST, new: str, operator: str) -> Iterator[Change]:
        start, end = span(left)[1], span(right)[0]
        found = re.fullmatch(r"([\s)]*)([^\s()]+(?: not| in)?)([\s(]*)", text[start:end])
        if found:
            yield Change(start + found.start(2), start + found.end(2), new, operator)

    def visit(node: ast.AST) -> Iterator[Change]:
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)):
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await)):
            yield Change(*span(node), "pass", "delete")
        elif isinstance(node, (ast.AugAssign, ast.Break, ast.Continue)):
            yield Change(*span(node), "pass", "delete")
        elif isinstance(node, ast.Return) and node.value and not isinstance(node.value, ast.Constant):
            yield Change(*span(node.value), "None", "return")
        elif isinstance(node, (ast.If, ast.IfExp)):
            start, end = span(node.test)
            if not any(isinstance(part, ast.NamedExpr) for part in ast.walk(node.test)):
                yield Change(start, end, f"(False and ({text[start:end]}))", "condition")
                yield Change(start, end, f"(True or ({text[start:end]}))", "condition")
        elif isinstance(node, ast.Compare):
            for left, word, right in zip([node.left, *node.comparators], node.ops, node.comparators):
                yield from between(left, right, WORDS[type(word)], "comparison")
        elif isinstance(node, ast.BinOp) and type(node.op) in WORDS and not isinstance(node.left, ast.JoinedStr):
            yield from between(node.left, node.right, WORDS[type(node.op)], "arithmetic")
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:]):
                yield from between(left, right, "or" if isinstance(node.op, ast.And) else "and", "logic")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            yield Change(span(node)[0], span(node.operand)[0], "", "logic")
        elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
            value = node.value
            yield Change(*span(node), str(not value if isinstance(value, bool) else value + 1), "constant")
        elif isinstance(node, ast.Call):
            for one, two in zip(node.args, node.args[1:]):
                (a, b), (c, d) = span(one), span(two)
                if text[a:b] != text[c:d] and not isinstance(one, ast.Starred) and not isinstance(two, ast.Starred):
                    yield Change(a, d, text[c:d] + text[b:c] + text[a:b], "swap")
        for name, child in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                for part in child if isinstance(child, list) else [child]:
                    if isinstance(part, ast.AST):
                        yield from visit(part)

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in node.body:
                if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    yield from visit(statement)

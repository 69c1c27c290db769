"""Mutation operators for Python."""

from __future__ import annotations

import ast
import re

from .mutant import Mutant, make

_COMPARE: dict[type, str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
                             ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
_ARITHMETIC: dict[type, str] = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*",
                                ast.Mod: "+", ast.LShift: ">>", ast.RShift: "<<", ast.BitAnd: "|", ast.BitOr: "&",
                                ast.BitXor: "&", ast.Pow: "*"}
_LOGS = re.compile(r"^(?:_?log(?:ger)?|logging|warnings)\.|^(?:print|_log|_say)\(")
_Place = tuple[int, int, str, str, str]


def mutants(file: str, text: str) -> list[Mutant]:
    """Return every mutant of a Python file.

    Args:
        file: path below the repository.
        text: its content.
    """
    finder = _Finder(text)
    finder.visit(ast.parse(text))
    found = [make(file, text, *place) for place in finder.found]
    return [mutant for mutant in found if mutant.source != mutant.mutated]


class _Finder(ast.NodeVisitor):
    def __init__(self, text: str) -> None:
        self.text = text
        self.found: list[_Place] = []
        self.function = ""
        starts, offset = [], 0
        self.lines = text.splitlines(keepends=True)
        for line in self.lines:
            starts.append(offset)
            offset += len(line)
        self.starts = starts

    def at(self, line: int, column: int) -> int:
        """Offset of a position of ast, whose columns count bytes."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno or 0, node.end_col_offset or 0)

    def add(self, start: int, end: int, new: str, operator: str) -> None:
        self.found.append((start, end, new, operator, self.function))

    # --- left as they are: annotations, decorators, type checking, abstract bodies, texts of errors

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self.function = self.function, node.name
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        self.body(node.body)
        self.function = outer

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.body(node.body)

    def visit_Module(self, node: ast.Module) -> None:
        self.body(node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        pass  # kinds and texts of errors; that it is raised at all is what a changed condition asks

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass  # before Python 3.12, positions within are not those of the file

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(isinstance(target, ast.Name) and target.id.startswith("__") for target in node.targets):
            self.visit(node.value)

    def body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.visit(statement)

    # --- statements

    def visit_Expr(self, node: ast.Expr) -> None:
        start, end = self.span(node)
        if isinstance(node.value, ast.Constant) or _LOGS.match(self.text[start:end]):
            return
        if isinstance(node.value, (ast.Call, ast.Await)):
            self.add(start, end, "pass", "delete")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        start, end = self.span(node)
        self.add(start, end, "pass", "delete")
        new = _ARITHMETIC.get(type(node.op))
        if new is not None:
            self.between(self.span(node.target)[1], self.span(node.value)[0], r"\S+(?==)", new, "arithmetic")
        self.visit(node.value)

    def visit_Break(self, node: ast.Break) -> None:
        self.add(*self.span(node), "pass", "delete")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add(*self.span(node), "pass", "delete")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            if not isinstance(node.value, ast.Constant):
                self.add(*self.span(node.value), "None", "return")
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        start, end = self.span(node.test)
        inner = self.text[start:end]
        if "TYPE_CHECKING" in inner or "version_info" in inner or inner.startswith("__name__"):
            return
        self.condition(node.test)
        self.visit(node.test)
        self.body(node.body)
        self.body(node.orelse)

    def condition(self, test: ast.expr) -> None:
        start, end = self.span(test)
        if not any(isinstance(part, ast.NamedExpr) for part in ast.walk(test)):
            self.add(start, end, f"False and ({self.text[start:end]})", "condition")
            self.add(start, end, f"True or ({self.text[start:end]})", "condition")

    def visit_IfExp(self, node: ast.IfExp) -> None:
        start, end = self.span(node.test)
        self.add(start, end, f"not ({self.text[start:end]})", "condition")
        self.generic_visit(node)

    # --- expressions

    def between(self, start: int, end: int, pattern: str, new: str, operator: str) -> None:
        """Replace the one operator between two operands."""
        hits = list(re.finditer(pattern, re.sub(r"#[^\n]*", lambda m: " " * len(m[0]), self.text[start:end])))
        if len(hits) == 1:
            self.add(start + hits[0].start(), start + hits[0].end(), new, operator)

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for op, right in zip(node.ops, node.comparators):
            new = _COMPARE[type(op)]
            self.between(self.span(left)[1], self.span(right)[0], r"[<>=!]+|\b(?:is\s+not|is|not\s+in|in)\b", new,
                         "comparison")
            left = right
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        new = _ARITHMETIC.get(type(node.op))
        left = node.left
        is_text = isinstance(left, (ast.Constant, ast.JoinedStr)) and not isinstance(
            getattr(left, "value", None), (int, float))
        if new is not None and not is_text:
            self.between(self.span(left)[1], self.span(node.right)[0], r"[-+*/%<>&|^]+", new, "arithmetic")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        new = "or" if isinstance(node.op, ast.And) else "and"
        for left, right in zip(node.values, node.values[1:]):
            self.between(self.span(left)[1], self.span(right)[0], r"\b(?:and|or)\b", new, "logic")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, (ast.Not, ast.USub)):
            self.add(self.span(node)[0], self.span(node.operand)[0], "", "logic" if isinstance(node.op, ast.Not)
                     else "arithmetic")
        self.visit(node.operand)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.add(*self.span(node), str(not value), "constant")
        elif isinstance(value, int):
            for new in (value + 1, value - 1):
                if new >= 0:
                    self.add(*self.span(node), str(new), "constant")
        elif isinstance(value, float):
            self.add(*self.span(node), repr(value * 1.05 if value else 1.0), "constant")

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, ast.Constant):
                start, end = self.span(bound)
                self.add(start, end, f"({self.text[start:end]}) + 1", "bound")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "range" and node.args:
            start, end = self.span(node.args[min(1, len(node.args) - 1)])
            self.add(start, end, f"({self.text[start:end]}) - 1", "bound")
        elif not any(isinstance(argument, ast.Starred) for argument in node.args):
            for one, two in zip(node.args, node.args[1:]):
                (a, b), (c, d) = self.span(one), self.span(two)
                if self.text[a:b] != self.text[c:d]:
                    self.add(a, d, self.text[c:d] + self.text[b:c] + self.text[a:b], "swap")
        self.generic_visit(node)

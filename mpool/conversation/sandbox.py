"""A jinja2 environment that limits the time and the memory of any template.

jinja2's immutable sandbox keeps a template away from Python's internals. It does not keep it from counting to 10^10 or
from building a string of 10^9 characters, and alarm signals work on the main thread only. So this environment counts:
the compiled code of a template takes a step for every loop iteration, call, filter and operator, and charges every new
string before it is built. An operation beyond the budget ends the rendering.

Compiling evaluates nothing (constant folding alone can take 14 s). A template can call only its own macros, jinja2's
helpers, and methods of plain data whose cost is known.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from string import Formatter
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.defaults
import jinja2.ext
import jinja2.nodes as nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
from jinja2.exceptions import SecurityError

from ..tokenizers import limits

#: Maximum padding and indentation that a filter may produce, in characters.
_MAX_WIDTH = 10_000
#: Maximum length of integers that arithmetic may produce.
_MAX_INT_BITS = 4096
#: Maximum number of rows that ``batch`` and ``slice`` may produce.
_MAX_ROWS = 100_000

_SCALARS = (int, float, bool, type(None))
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS = (str, list, tuple, dict, range, *_VIEWS)


class Exhausted(Exception):
    """A template exceeded a limit; the message states the limit."""


class Budget:
    """Remaining budget of one rendering."""

    __slots__ = ("_steps", "_text", "_deadline", "_clock", "depth", "limits")

    def __init__(self, steps: int, text: int, seconds: float) -> None:
        self.limits = (steps, text, seconds)
        self._steps, self._text = steps, text
        self._deadline = time.monotonic() + seconds
        self._clock = 0
        self.depth = 0

    def step(self, count: int = 1) -> None:
        """Takes ``count`` steps. Raises Exhausted if none are left or the time is over."""
        self._steps -= count
        if self._steps < 0:
            raise Exhausted(f"{self.limits[0]:,} steps (mpool.tokenizers.limits.max_template_steps)")
        self._clock -= count
        if self._clock < 0:
            self._clock = 2048
            if time.monotonic() > self._deadline:
                raise Exhausted(f"{self.limits[2]:g} s (mpool.tokenizers.limits.max_template_seconds)")

    def text(self, characters: int) -> None:
        """Charges a new string of ``characters`` characters."""
        self._text -= characters
        if self._text < 0:
            raise Exhausted(f"{self.limits[1]:,} characters of text (mpool.tokenizers.limits.max_template_text)")
        self.step(1 + (characters >> 10))


class _Namespace(jinja2.utils.Namespace):
    """``namespace()`` whose attributes cannot begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no parameter `self`, so that an attribute can have that name
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError("a namespace attribute is a name that does not begin with an underscore")


class _Generation(jinja2.ext.Extension):
    """The ``generation`` block of transformers, which marks the assistant's text. Here it is only a scope."""

    tags = {"generation"}

    def filter_stream(self, stream: Any) -> Any:
        for count, token in enumerate(stream):
            if count >= limits.max_template_nodes:
                raise TemplateTooLarge(f"{limits.max_template_nodes:,} nodes "
                                       "(mpool.tokenizers.limits.max_template_nodes)")
            yield token

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Generator(jinja2.compiler.CodeGenerator):
    """Generates the code of a template, with calls that charge the budget."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible()
        return super()._output_child_to_const(node, frame, finalize)

    def visit_Output(self, node: nodes.Output, frame: Any) -> None:
        size = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        if size:
            self.writeline(f"environment.text({size})")
        super().visit_Output(node, frame)

    def _wrapped(self, function: str, node: nodes.Node, frame: Any) -> None:
        self.write(f"environment.{function}(")
        self.visit(node, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Any) -> None:
        self.write("(")
        self._wrapped("weigh", node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Any) -> None:
        self.write(f" {jinja2.compiler.operators[node.op]} ")
        self._wrapped("weigh_container" if node.op in ("in", "notin") else "weigh", node.expr, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Any) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.made(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def visit_Pair(self, node: nodes.Pair, frame: Any) -> None:
        self._wrapped("weigh", node.key, frame)
        self.write(": ")
        self.visit(node.value, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Any) -> None:
        self.write("{")
        for at, item in enumerate(node.items):
            self.write(", " if at else "")
            self.visit_Pair(item, frame)
        self.write("}")


#: Syntax nodes that a template may use. Not allowed: other templates (include, import, extends, block), autoescape.
_ALLOWED_NODES = frozenset((
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.NSRef, nodes.Tuple, nodes.List,
    nodes.Dict, nodes.Pair, nodes.Keyword, nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call, nodes.Getitem,
    nodes.Getattr, nodes.Slice, nodes.Concat, nodes.Compare, nodes.Operand, nodes.Mul, nodes.Div, nodes.FloorDiv,
    nodes.Add, nodes.Sub, nodes.Mod, nodes.Pow, nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Pos, nodes.For,
    nodes.If, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.With, nodes.Assign, nodes.AssignBlock,
    nodes.ExprStmt, nodes.Scope, nodes.Break, nodes.Continue,
))


class TemplateTooLarge(Exception):
    """A template has too many tokens or nodes; the message states the limit."""


class ForbiddenNode(Exception):
    """A template uses a statement that is not allowed in chat templates; the message names it."""


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment of chat templates: the functions that transformers provides, with limits. Thread-safe."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=self._print,
                         extensions=[_Generation, jinja2.ext.loopcontrols])
        self._local = threading.local()
        self.globals = {"range": jinja2.sandbox.safe_range, "dict": dict, "namespace": _Namespace,
                        "cycler": jinja2.utils.Cycler, "joiner": jinja2.utils.Joiner,
                        "raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._functions = tuple(self.globals.values())
        builtin: dict[str, Any] = jinja2.defaults.DEFAULT_FILTERS  # type: ignore[attr-defined]
        tests: dict[str, Any] = jinja2.defaults.DEFAULT_TESTS  # type: ignore[attr-defined]
        self.filters = {name: self._counted(builtin[name], deep=name in _DEEP_FILTERS, check=_FILTER_CHECKS.get(name))
                        for name in (*_DEEP_FILTERS, *_SHALLOW_FILTERS)}
        self.filters["tojson"] = self._counted(_tojson, deep=True, check=None)
        self.tests = {name: self._counted(test, deep=True, check=None) if name in _COMPARISONS else test
                      for name, test in tests.items()}

    # Compiling

    def prepare(self, source: str) -> jinja2.Template:
        """Compiles ``source``.

        Raises:
            TemplateTooLarge: the template has too many tokens or nodes.
            ForbiddenNode: the template uses a statement that is not allowed.
            jinja2.TemplateSyntaxError: ``source`` is not a template.
        """
        tree = self.parse(source)
        count = 0
        pending: list[nodes.Node] = [tree]
        while pending:
            node = pending.pop()
            count += 1
            if count > limits.max_template_nodes:
                raise TemplateTooLarge(f"{limits.max_template_nodes:,} nodes "
                                       "(mpool.tokenizers.limits.max_template_nodes)")
            if type(node) not in _ALLOWED_NODES:
                raise ForbiddenNode(f"{type(node).__name__.lower()} in line {node.lineno}")
            pending.extend(node.iter_child_nodes())
            if isinstance(node, nodes.For):
                # reading this property takes a step
                node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("tick"), lineno=node.lineno))
                if node.test is not None:
                    node.test = nodes.And(nodes.EnvironmentAttribute("tick"), node.test, lineno=node.lineno)
        tree.set_environment(self)
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None), None)

    def render(self, template: jinja2.Template, variables: Mapping[str, Any], budget: Budget) -> str:
        """Renders ``template`` within ``budget``."""
        local = self._local
        outer, local.budget = getattr(local, "budget", None), budget
        try:
            return "".join(template.root_render_func(template.new_context(dict(variables))))
        finally:
            local.budget = outer

    # Called by the compiled code

    @property
    def tick(self) -> bool:
        """Takes one step."""
        self._local.budget.step()
        return True

    def text(self, characters: int) -> None:
        """Charges constant text of the template."""
        self._local.budget.text(characters)

    def weigh(self, value: Any) -> Any:
        """Takes as many steps as a traversal of ``value`` does. Returns the value."""
        kind = type(value)
        if kind is str:
            self._local.budget.step(1 + (len(value) >> 10))
        elif kind not in _SCALARS and isinstance(value, _CONTAINERS):
            self._walk(value)
        return value

    def weigh_container(self, value: Any) -> Any:
        """Like :meth:`weigh`, for the right side of ``in``: a dict takes no steps, since it is not searched."""
        return value if type(value) is dict else self.weigh(value)

    def made(self, value: Any) -> Any:
        """Charges a new value. Returns the value."""
        budget = self._local.budget
        if isinstance(value, str):
            budget.text(len(value))
        elif isinstance(value, (list, tuple, dict)):
            budget.step(len(value))
        elif isinstance(value, Iterator):
            return self._counting(value)
        return value

    def concat(self, parts: Iterable[Any]) -> str:
        """Implements the ``~`` operator."""
        return "".join([str(self._print(part)) for part in parts])

    def _print(self, value: Any) -> Any:
        """Charges the text of ``value`` before it is printed. Only plain data can be printed."""
        budget = self._local.budget
        if isinstance(value, str):
            budget.text(len(value))
        elif type(value) in _SCALARS:
            budget.text(24 if type(value) is not int else 24 + value.bit_length())
        elif isinstance(value, _CONTAINERS):
            entries, characters = self._walk(value)
            budget.text(8 * entries + 4 * characters)
        elif not isinstance(value, jinja2.Undefined):
            raise SecurityError("only data can be printed")
        return value

    def _walk(self, value: Any) -> tuple[int, int]:
        """Return the number of values in a nested value and of their characters. A shared value counts once per use."""
        step = self._local.budget.step
        entries = characters = 0
        pending = [value]
        while pending:
            item = pending.pop()
            step()
            entries += 1
            if isinstance(item, str):
                characters += len(item)
            elif isinstance(item, dict):
                pending.extend(item.keys())
                pending.extend(item.values())
            elif isinstance(item, (list, tuple, *_VIEWS)):
                pending.extend(item)  # type: ignore[arg-type]
            elif isinstance(item, range):
                step(len(item))
            elif type(item) not in _SCALARS and not isinstance(item, jinja2.Undefined):
                raise SecurityError("only data can be printed or compared")
        step(characters >> 10)
        return entries, characters

    def _counting(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self._local.budget.step()
            yield value

    # Called by jinja2's sandbox

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = self._local.budget
        budget.step()
        if isinstance(left, str) and operator == "%":
            self._check_percent(left, right)
        elif operator == "*" and (_sized(left) or _sized(right)):
            sequence, times = (left, right) if _sized(left) else (right, left)
            if type(times) in (int, bool):
                self._grow(sequence, len(sequence) * max(times, 0))
        elif operator == "+" and _sized(left) and _sized(right):
            self._grow(left, len(left) + len(right))
        elif isinstance(left, int) and isinstance(right, int):
            bits = {"*": left.bit_length() + right.bit_length(),
                    "**": left.bit_length() * max(right, 0)}.get(operator, max(left.bit_length(), right.bit_length()))
            if bits > _MAX_INT_BITS:
                raise Exhausted(f"integers of {_MAX_INT_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def _grow(self, sequence: Any, size: int) -> None:
        if isinstance(sequence, str):
            self._local.budget.text(size)
        else:
            self._local.budget.step(size)

    def _check_percent(self, template: str, values: Any) -> None:
        fields = width = 0
        for match in _PERCENT.finditer(template):
            fields += 1
            width += _width(match[1])
        entries, characters = self._walk(values)
        self._local.budget.text(len(template) + width + fields * (8 * entries + 4 * characters))

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(argument) is tuple:
            self._walk(argument)  # computing its hash traverses all of it
        return super().getitem(obj, argument)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        raise SecurityError("an attribute that is not data")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        return None if wrapped is None else _Format(self, value.__self__, wrapped)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # the signature of jinja2's method
        budget = __self._local.budget
        budget.step()
        if isinstance(__obj, BuiltinMethodType):
            target, name = __obj.__self__, __obj.__name__
            kwargs.pop("_loop_vars", None)  # internal arguments that the compiled code adds for jinja2's call
            kwargs.pop("_block_vars", None)
            if isinstance(target, str):
                check = _STR_METHODS.get(name)
                if check is None:
                    raise SecurityError(f"str.{name} is not for templates")
                args = check(__self, budget, target, args, kwargs)
            elif name not in _DATA_METHODS.get(type(target), ()):
                raise SecurityError("only methods of plain data can be called")
            else:
                __self.weigh(target if name in ("index", "count", "copy") else None)
                __self.weigh(args)
            return __self.made(__obj(*args, **kwargs))
        if isinstance(__obj, MethodType):
            if not (isinstance(__obj.__self__, jinja2.runtime.LoopContext) and __obj.__name__ in ("cycle", "changed")
                    or isinstance(__obj.__self__, jinja2.utils.Cycler) and __obj.__name__ in ("next", "reset")):
                raise SecurityError("only methods of plain data can be called")
            __self.weigh(args)
        elif not (isinstance(__obj, (jinja2.runtime.Macro, jinja2.runtime.LoopContext, jinja2.utils.Joiner, _Format,
                                     jinja2.Undefined))
                  or isinstance(__obj, (FunctionType, type)) and any(__obj is known for known in __self._functions)):
            raise SecurityError("only macros and the functions of the template environment can be called")
        if budget.depth >= limits.max_template_depth:
            raise Exhausted(f"{limits.max_template_depth} nested calls (mpool.tokenizers.limits.max_template_depth)")
        budget.depth += 1
        try:
            return super().call(__context, __obj, *args, **kwargs)
        finally:
            budget.depth -= 1

    def _counted(self, function: Callable[..., Any], *, deep: bool, check: Callable[..., None] | None
                 ) -> Callable[..., Any]:
        """Return a filter or test that charges its input and output to the budget."""
        passed = jinja2.utils._PassArg.from_obj(function)
        skip = 0 if passed is None else 1

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._local.budget.step()
            values = args[skip:]
            if deep and values and isinstance(values[0], Iterator):
                values = (list(self._counting(values[0])), *values[1:])
                args = (*args[:skip], *values)
            if deep:
                if values and isinstance(values[0], str):
                    self._local.budget.text(len(values[0]))
                for value in values:
                    self.weigh(value)
                for value in kwargs.values():
                    self.weigh(value)
            if check is not None:
                check(self, self._local.budget, *values, **kwargs)
            return self.made(function(*args, **kwargs))

        if passed is not None:
            counted.jinja_pass_arg = passed  # type: ignore[attr-defined]
        return counted


class _Format:
    """``str.format`` of one string, with a limit on field widths and on the length of the result."""

    def __init__(self, environment: Environment, template: str, function: Callable[..., str]) -> None:
        self._environment, self._template, self._function = environment, template, function

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        environment = self._environment
        fields = width = 0
        for _, name, spec, _ in Formatter().parse(self._template):
            if name is not None:
                fields += 1
                width += _width((spec or "").replace("{", "*"))
        entries, characters = environment._walk((args, kwargs))
        environment.text(len(self._template) + width + fields * (8 * entries + 4 * characters))
        return self._function(*args, **kwargs)


def _sized(value: Any) -> bool:
    return isinstance(value, (str, list, tuple))


_PERCENT = re.compile(r"%(?:\([^)]*\))?([-#0 +]*(?:\*|\d+)?(?:\.(?:\*|\d+))?)[hlL]?.?", re.DOTALL)


def _width(spec: str) -> int:
    """Return the maximum length of a format specification's padding. Widths from arguments (``*``) are not allowed."""
    widths = [int(number) for number in re.findall(r"\d{1,9}", spec)]
    if "*" in spec or any(width > _MAX_WIDTH for width in widths):
        raise Exhausted(f"padding of {_MAX_WIDTH:,} characters")
    return 32 + sum(widths)


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    if not isinstance(format, str) or len(format) > 1000 or re.search(r"%[^A-Za-z%]*\d", format):
        raise Exhausted("a date format of 1,000 characters, without widths")
    return datetime.now().strftime(format)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
            sort_keys: bool = False) -> str:
    if isinstance(indent, int) and indent > 32 or isinstance(indent, str) and len(indent) > 32:
        raise Exhausted("an indentation of 32 characters")
    if separators is not None and any(len(separator) > 32 for separator in separators):
        raise Exhausted("separators of 32 characters")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# Checks before a filter runs: (environment, budget, *arguments of the filter)

def _check_center(environment: Environment, budget: Budget, value: Any, width: int = 80) -> None:
    budget.text(max(int(width), 0))


def _check_indent(environment: Environment, budget: Budget, value: Any, width: Any = 4, first: bool = False,
                  blank: bool = False) -> None:
    size = len(width) if isinstance(width, str) else int(width)
    budget.text(len(str(value)) + (str(value).count("\n") + 2) * max(size, 0))


def _check_replace(environment: Environment, budget: Budget, value: Any, old: Any, new: Any, count: Any = None) -> None:
    text, old, new = str(value), str(old), str(new)
    budget.text(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def _check_join(environment: Environment, budget: Budget, value: Any, d: Any = "", attribute: Any = None) -> None:
    entries, characters = environment._walk(value)
    budget.text(4 * characters + entries * (8 + len(str(d))))


def _check_format(environment: Environment, budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    environment._check_percent(str(value), kwargs or args)


def _check_rows(environment: Environment, budget: Budget, value: Any, count: int, fill_with: Any = None) -> None:
    if fill_with is not None:
        raise SecurityError("batch and slice do not fill up")
    if not 0 < int(count) <= _MAX_ROWS:
        raise Exhausted(f"{_MAX_ROWS:,} rows")
    budget.step(int(count))


def _check_round(environment: Environment, budget: Budget, value: Any, precision: int = 0, method: str = "common"
                 ) -> None:
    if abs(int(precision)) > 300:
        raise Exhausted("a precision of 300 digits")


def _check_sum(environment: Environment, budget: Budget, iterable: Any, attribute: Any = None, start: Any = 0) -> None:
    if type(start) not in (int, float):
        raise SecurityError("sum is for numbers")


def _check_number(environment: Environment, budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    if isinstance(value, str) and len(value) > 1000:
        raise Exhausted("numbers of 1,000 digits")


def _check_container(environment: Environment, budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    if isinstance(value, (str, list, tuple, dict, range)):
        budget.step(len(value))


_FILTER_CHECKS: dict[str, Callable[..., None]] = {
    "center": _check_center, "indent": _check_indent, "replace": _check_replace, "join": _check_join,
    "format": _check_format, "batch": _check_rows, "slice": _check_rows, "round": _check_round, "sum": _check_sum,
    "list": _check_container, "reverse": _check_container, "int": _check_number, "float": _check_number,
}
#: Filters that read their whole input.
_DEEP_FILTERS = ("capitalize", "center", "dictsort", "e", "escape", "filesizeformat", "forceescape", "format",
                 "groupby",
                 "indent", "join", "lower", "max", "min", "replace", "safe", "sort", "string", "sum", "title", "trim",
                 "truncate", "unique", "upper", "urlencode", "wordcount")
#: Filters that read only the outer level, or pass inner values on unchanged.
_SHALLOW_FILTERS = ("abs", "attr", "batch", "count", "d", "default", "first", "float", "int", "items", "last", "length",
                    "list", "map", "reject", "rejectattr", "reverse", "round", "select", "selectattr", "slice")
_COMPARISONS = ("eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge",
                ">=", "in")


_Args = tuple[Any, ...]


# Checks before a method of str runs: (environment, budget, string, args, kwargs) -> args

def _scan(environment: Environment, budget: Budget, target: str, args: _Args, kwargs: dict[str, Any]) -> _Args:
    budget.step(1 + (len(target) >> 8))
    environment.weigh(args)
    return args


def _copy(environment: Environment, budget: Budget, target: str, args: _Args, kwargs: dict[str, Any]) -> _Args:
    budget.text(len(target))
    environment.weigh(args)
    return args


def _pad(environment: Environment, budget: Budget, target: str, args: _Args, kwargs: dict[str, Any]) -> _Args:
    if args and isinstance(args[0], int):
        budget.text(max(args[0], 0))
    return args


def _tabs(environment: Environment, budget: Budget, target: str, args: _Args, kwargs: dict[str, Any]) -> _Args:
    size = args[0] if args else kwargs.get("tabsize", 8)
    if isinstance(size, int):
        budget.text(len(target) + target.count("\t") * max(size, 0))
    return args


def _substitute(environment: Environment, budget: Budget, target: str, args: _Args, kwargs: dict[str, Any]) -> _Args:
    if len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        _check_replace(environment, budget, target, args[0], args[1])
    return args


def _concatenate(environment: Environment, budget: Budget, target: str, args: _Args, kwargs: dict[str, Any]) -> _Args:
    if len(args) == 1 and isinstance(args[0], Iterable):
        parts = list(environment._counting(iter(args[0])))
        budget.text(sum(len(part) for part in parts if isinstance(part, str)) + len(parts) * len(target))
        return (parts,)
    return args


_STR_METHODS: dict[str, Callable[..., _Args]] = {
    **dict.fromkeys(("startswith", "endswith", "find", "rfind", "index", "rindex", "count", "isalnum", "isalpha",
                     "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable",
                     "isspace", "istitle", "isupper"), _scan),
    **dict.fromkeys(("capitalize", "casefold", "lower", "upper", "title", "swapcase", "strip", "lstrip", "rstrip",
                     "removeprefix", "removesuffix", "split", "rsplit", "splitlines", "partition", "rpartition"),
                     _copy),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _pad),
    "expandtabs": _tabs, "replace": _substitute, "join": _concatenate,
}
_DATA_METHODS: dict[type, tuple[str, ...]] = {
    dict: ("get", "items", "keys", "values", "copy"), list: ("index", "count", "copy"), tuple: ("index", "count"),
}

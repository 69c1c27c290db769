"""Program of a renderer: a child process that compiles and renders chat templates for
:mod:`mpool.conversation.rendering`.

``child_main.py`` runs it outside the package; it imports the standard library, jinja2 and markupsafe only. A render
that exceeds its limits ends the process or is reported as an error. jinja2's immutable sandbox is a second barrier.
"""

from __future__ import annotations

import encodings.ascii  # noqa: F401 - jinja2 would import these later, when no file can be opened
import encodings.latin_1  # noqa: F401
import encodings.unicode_escape  # noqa: F401
import encodings.utf_8  # noqa: F401
import html  # noqa: F401
import json
import marshal
import pprint  # noqa: F401
import re
import textwrap  # noqa: F401
import unicodedata  # noqa: F401
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

import jinja2
import jinja2.debug
import jinja2.ext
import jinja2.meta
import jinja2.nodes as nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
from jinja2.exceptions import SecurityError

T = TypeVar("T")

#: Longest error message in characters.
_MESSAGE_CHARS = 2000

#: Syntax nodes that a template may use. Not allowed: other templates (include, import, extends, block), autoescape.
_ALLOWED_NODES = frozenset((
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.NSRef, nodes.Tuple, nodes.List,
    nodes.Dict, nodes.Pair, nodes.Keyword, nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call, nodes.Getitem,
    nodes.Getattr, nodes.Slice, nodes.Concat, nodes.Compare, nodes.Operand, nodes.Mul, nodes.Div, nodes.FloorDiv,
    nodes.Add, nodes.Sub, nodes.Mod, nodes.Pow, nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Pos, nodes.For,
    nodes.If, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.With, nodes.Assign, nodes.AssignBlock,
    nodes.ExprStmt, nodes.Scope, nodes.Break, nodes.Continue,
))

_SCALARS = (str, int, float, bool, type(None), jinja2.Undefined)
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_SEQUENCES = (list, tuple, *_VIEWS)

#: Methods that a template may use, by the type of their object.
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset((
        "startswith", "endswith", "find", "rfind", "index", "rindex", "count", "isalnum", "isalpha", "isascii",
        "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper",
        "capitalize", "casefold", "lower", "upper", "title", "swapcase", "strip", "lstrip", "rstrip", "removeprefix",
        "removesuffix", "split", "rsplit", "splitlines", "partition", "rpartition", "center", "ljust", "rjust", "zfill",
        "expandtabs", "replace", "join")),
    dict: frozenset(("get", "items", "keys", "values", "copy")),
    list: frozenset(("index", "count", "copy")),
    tuple: frozenset(("index", "count")),
    jinja2.runtime.LoopContext: frozenset(("cycle", "changed")),
    jinja2.utils.Cycler: frozenset(("next", "reset")),
}


class TooManyNodes(Exception):
    """The template has more tokens or nodes than allowed."""


class ForbiddenNode(Exception):
    """The template uses a statement that is not allowed; the message names it."""


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
        most: int = self.environment.max_nodes  # type: ignore[attr-defined]
        for count, token in enumerate(stream):
            if count >= most:
                raise TooManyNodes
            yield token

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment of chat templates: the options and functions that transformers provides.

    A template can call only its own macros, the functions of the environment, and methods of plain data; it can print
    only plain data. Names that transformers does not define (``lipsum``) are undefined.
    """

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, finalize=_printable,
                         extensions=[_Generation, jinja2.ext.loopcontrols])
        self.max_nodes = 0
        self.globals = {"range": jinja2.sandbox.safe_range, "dict": dict, "namespace": _Namespace,
                        "cycler": jinja2.utils.Cycler, "joiner": jinja2.utils.Joiner,
                        "raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.filters["tojson"] = _tojson

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if not super().is_safe_attribute(obj, attr, value):
            return False
        if not callable(value) or isinstance(value, (jinja2.Undefined, jinja2.runtime.Macro)) \
                or isinstance(obj, jinja2.utils.Namespace):
            return True
        return any(isinstance(obj, kind) and attr in names for kind, names in _METHODS.items())

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError("an attribute that is not data")

    def parsed(self, source: str, max_nodes: int) -> nodes.Template:
        """Parse a template and check its size and its statements."""
        self.max_nodes = max_nodes
        tree = self.parse(source)
        count = 0
        pending: list[nodes.Node] = [tree]
        while pending:
            node = pending.pop()
            count += 1
            if count > max_nodes:
                raise TooManyNodes
            if type(node) not in _ALLOWED_NODES:
                raise ForbiddenNode(f"{type(node).__name__.lower()} in line {node.lineno}")
            pending.extend(node.iter_child_nodes())
        return tree

    def prepare(self, source: str, max_nodes: int) -> jinja2.Template:
        """Compile a template."""
        code = self.compile(self.parsed(source, max_nodes))
        return self.template_class.from_code(self, code, self.make_globals(None))


def _printable(value: Any) -> Any:
    """Return a value that a template prints. Raises SecurityError unless it is plain data."""
    if isinstance(value, _SCALARS):
        return value
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, _SEQUENCES):
            pending.extend(item)  # type: ignore[arg-type]
        elif not isinstance(item, (*_SCALARS, range)):
            raise SecurityError("only data can be printed")
    return value


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    if not isinstance(format, str) or re.search(r"%[^A-Za-z%]*\d", format):
        raise SecurityError("a date format with a width")
    return datetime.now().strftime(format)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
            sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# ---- requests --------------------------------------------------------------------------------------------------------

_environment = Environment()
_strftime_now("%d %b %Y")  # reads the time zone


def load(text: str, kind: str, max_nodes: int, max_chars: int, data: bytes) -> jinja2.Template | tuple[str, bytes]:
    """Compile a template. Returns a status and a detail if it is refused."""
    return _compiled(_environment.prepare, text, max_nodes)


def _undeclared(text: str, max_nodes: int) -> tuple[str, bytes]:
    # generates code, as compiling does: filters and tests without a function are refused here
    return "text", "\n".join(jinja2.meta.find_undeclared_variables(_environment.parsed(text, max_nodes))).encode()


def handle(template: Any, kind: str, max_nodes: int, max_chars: int, data: bytes) -> tuple[str, bytes]:
    """Render a template with data. With the kind ``variables``, ``data`` is a template's source: find its undeclared
    variables.

    Returns:
        A status and a text. With the status ``text``, it is the rendered text, or one name per line. Any other status
        is an error, and the text its detail.
    """
    if kind == "variables":
        return _compiled(_undeclared, data.decode("utf-8", "surrogatepass"), max_nodes)
    try:
        text = template.render(marshal.loads(data))
        return ("text", text.encode()) if len(text) <= max_chars else ("size", b"")
    except UnicodeEncodeError:
        return "surrogate", b""
    except RecursionError:
        return "depth", b""
    except SecurityError:
        return "security", b""
    except jinja2.UndefinedError as error:
        return "undefined", _message(error.message)
    except jinja2.TemplateError as error:
        return "rejected", _message(error.message or "no reason given")
    except TypeError as error:  # its message names types, never values
        return "type", _message(error)
    except MemoryError:
        raise
    except Exception as error:
        return "failed", _message(type(error).__name__)


def _compiled(function: Callable[[str, int], T], text: str, max_nodes: int) -> T | tuple[str, bytes]:
    try:
        return function(text, max_nodes)
    except TooManyNodes:
        return "nodes", b""
    except ForbiddenNode as error:
        return "forbidden", _message(error)
    except jinja2.TemplateSyntaxError as error:
        reason = (error.message or "no reason given").rstrip(".")
        return "syntax", _message(f"{error.lineno}: {reason}")
    except RecursionError:
        return "nested", b""
    except MemoryError:
        raise
    except Exception as error:
        return "uncompilable", _message(type(error).__name__)


def _message(error: object) -> bytes:
    return str(error)[:_MESSAGE_CHARS].encode("utf-8", "replace")

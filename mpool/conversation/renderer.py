"""Program of a renderer: a process that compiles and renders chat templates for :mod:`mpool.conversation.rendering`.

It runs as a script, outside the package, and imports the standard library, jinja2 and markupsafe only. Descriptor 0 is
one end of a socket pair; the program reads requests from it and writes answers to it, each with its length before it.

Templates are not trusted. A render that exceeds its limits ends this process or is reported as an error; no limit
depends on code that runs inside the render. jinja2's immutable sandbox is the second fence.
"""

from __future__ import annotations

import encodings.ascii  # noqa: F401 - no file can be opened after the start; these modules would be imported later
import encodings.latin_1  # noqa: F401
import encodings.unicode_escape  # noqa: F401
import encodings.utf_8  # noqa: F401
import html  # noqa: F401
import json
import marshal
import os
import pprint  # noqa: F401
import re
import resource
import select
import signal
import sys
import textwrap  # noqa: F401
import unicodedata  # noqa: F401
from collections.abc import Iterator
from datetime import datetime
from typing import Any

if __name__ == "__main__":
    sys.path += sys.argv[1:]  # the folders that hold jinja2 and markupsafe

import jinja2  # noqa: E402
import jinja2.debug  # noqa: E402
import jinja2.ext  # noqa: E402
import jinja2.meta  # noqa: E402
import jinja2.nodes as nodes  # noqa: E402
import jinja2.runtime  # noqa: E402
import jinja2.sandbox  # noqa: E402
import jinja2.utils  # noqa: E402
from jinja2.exceptions import SecurityError  # noqa: E402

_SOCKET = 0
#: Idle time in milliseconds after which the process ends by itself. The parent ends it earlier, if it can.
_IDLE_MS = 90_000
#: Resident memory in bytes, above that of the start, with which the process ends after its answer.
_WORN_BYTES = 64 << 20
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


class TooMuchText(Exception):
    """The rendered text is longer than allowed."""


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

class Templates:
    """Compiled templates by digest. The parent sends each source once, and decides which templates are forgotten."""

    def __init__(self) -> None:
        self._environment = Environment()
        self._compiled: dict[bytes, jinja2.Template] = {}

    def answer(self, kind: str, digest: bytes, source: str | None, evicted: bytes | None, max_nodes: int,
               seconds: float, max_chars: int, data: bytes) -> tuple[str, bytes]:
        """Return a status and a text. ``text``: the rendered text; all others are errors, and the text is a detail."""
        try:
            if kind == "variables":
                assert source is not None
                tree = self._environment.parsed(source, max_nodes)
                return "text", "\n".join(jinja2.meta.find_undeclared_variables(tree)).encode()
            if source is not None:
                self._compiled.pop(evicted, None)  # type: ignore[arg-type]
                self._compiled[digest] = self._environment.prepare(source, max_nodes)
                signal.setitimer(signal.ITIMER_PROF, seconds)  # the same limit for compiling and for rendering
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
        return self._rendered(digest, max_chars, marshal.loads(data))

    def _rendered(self, digest: bytes, max_chars: int, variables: dict[str, Any]) -> tuple[str, bytes]:
        try:
            text = self._compiled[digest].render(variables)
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


def _message(error: object) -> bytes:
    return str(error)[:_MESSAGE_CHARS].encode("utf-8", "replace")


def _read(size: int) -> bytearray | None:
    """Read ``size`` bytes; None if the parent closed its end."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = os.readv(_SOCKET, [view])
        if not count:
            return None
        view = view[count:]
    return data


def _requests() -> Iterator[tuple[Any, ...]]:
    """Yield the requests of the parent, until it closes its end or sends none for a while."""
    poll = select.poll()
    poll.register(_SOCKET, select.POLLIN)
    while poll.poll(_IDLE_MS):
        head = _read(8)
        body = None if head is None else _read(int.from_bytes(head, "little"))
        if body is None:
            return
        yield marshal.loads(body)


def _send(status: str, text: bytes, last: bool) -> None:
    body = b"%c%s\0%s" % (last, status.encode(), text)
    view = memoryview(len(body).to_bytes(8, "little") + body)
    while view:
        view = view[os.write(_SOCKET, view):]


class _Memory:
    """Size of this process's memory."""

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # no /proc
            self._file = -1

    def read(self) -> tuple[int, int]:
        """Return the bytes of the address space, and the resident bytes. The maximum that getrusage returns includes
        the parent's memory at the time of the fork."""
        if self._file < 0:
            return 256 << 20, 0
        mapped, resident = os.pread(self._file, 64, 0).split()[:2]
        return int(mapped) * resource.getpagesize(), int(resident) * resource.getpagesize()


def _limit(what: int, value: int) -> None:
    """Lower both limits of a resource; a limit that is lower already stays."""
    hard = resource.getrlimit(what)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))


def main() -> None:
    """Answer requests until the parent closes its end."""
    # signal masks and ignored signals pass to child processes; a blocked SIGPROF would disable the limit of time
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    templates = Templates()
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    _strftime_now("%d %b %Y")  # reads the time zone
    memory = _Memory()
    mapped, resident = memory.read()
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_NPROC, 0)
    _limit(resource.RLIMIT_NOFILE, 1)  # no further descriptor beyond 0
    _send("ready", b"", False)
    for kind, digest, source, evicted, max_nodes, seconds, max_bytes, max_chars, data in _requests():
        limit = mapped + max_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
        # The default action of SIGPROF ends the process, whatever it runs.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            status, text = templates.answer(kind, digest, source, evicted, max_nodes, seconds, max_chars, data)
        except MemoryError:
            status, text = "memory", b""
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        signal.setitimer(signal.ITIMER_PROF, 0)
        last = status == "memory" or memory.read()[1] > resident + _WORN_BYTES
        _send(status, text, last)
        if last:
            return


if __name__ == "__main__":
    main()

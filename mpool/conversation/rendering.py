"""Renders chat templates in renderers: child processes that can be killed (:mod:`mpool.host.child_processes`).

A template is part of a model, and models are not trusted. No template is compiled or rendered in this process. At most
``MAX`` renderers exist. A template that has not been rendered yet, or whose last render exceeded a limit, uses one
renderer at a time; no template uses all of them. After ``STRIKES`` such renders in a row, a template is refused for
1 s, and after each further one for twice as long, up to 60 s. If no renderer can be started, rendering fails. A
renderer has about 20 MB of resident memory.
"""

from __future__ import annotations

import marshal
import os
import threading
import time
from collections import OrderedDict
from typing import Any, NamedTuple

from ..host.child_processes import Children, Limits, Program, Source, wait
from ..tokenizers import limits

#: Maximum number of renderers of this process.
MAX = 4
#: Renders in a row that exceed a limit, after which a template is refused for 1 s and longer.
STRIKES = 3
#: The program of a renderer; it keeps compiled templates.
PROGRAM = Program(file=os.path.join(os.path.dirname(os.path.abspath(__file__)), "renderer.py"),
                  packages=("jinja2", "markupsafe"), what="render the chat template", most=MAX, kept=32)

#: Longest time for which a template is refused.
_REFUSED_SECONDS = 60.0
#: Maximum number of templates whose history is kept.
_RECORDS = 1024
#: Limits grow with the caller's data: characters of output, bytes of memory and seconds for each byte.
_CHARS_PER_BYTE, _BYTES_PER_BYTE, _SECONDS_PER_BYTE = 32, 64, 1e-6

#: Statuses of renders that exceeded a limit, or ended their renderer.
_EXCEEDED = frozenset(("time", "memory", "size", "died", "silent"))


class TemplateResult(NamedTuple):
    """Result of a renderer's work on a template.

    Attributes:
        status: ``"text"``, or what failed: a word of ``renderer.py`` or of
            :meth:`mpool.host.child_processes.Children.run`.
        text: the text, or a detail of the failure.
        refused: seconds for which the template is refused because of this status; 0: the template was rendered.
    """

    status: str
    text: str
    refused: float = 0.0


class _Record:
    """History of a template in this process.

    Attributes:
        active: renders in progress.
        proven: True if the last render stayed within its limits.
        strikes: renders in a row that exceeded a limit.
        until: time until which the template is refused, in ``time.monotonic()``.
        failure: status and text of the last render that exceeded a limit.
    """

    __slots__ = ("active", "failure", "proven", "strikes", "until")

    def __init__(self) -> None:
        self.active = self.strikes = 0
        self.proven = False
        self.until = 0.0
        self.failure = TemplateResult("time", "")

    def note(self, result: TemplateResult) -> None:
        """Record the outcome of a render."""
        self.proven = result.status not in _EXCEEDED
        if self.proven:
            self.strikes = 0
            return
        self.strikes, self.failure = self.strikes + 1, result
        if self.strikes >= STRIKES:
            self.until = time.monotonic() + min(2.0 ** (self.strikes - STRIKES), _REFUSED_SECONDS)


class Renderers:
    """The renderers of this process, and the history of its templates. Thread-safe."""

    def __init__(self, program: Program = PROGRAM) -> None:
        self.children = Children(program)
        self._changed = threading.Condition(threading.Lock())
        self._records: OrderedDict[bytes, _Record] = OrderedDict()

    def run(self, source: Source, kind: str, variables: dict[str, Any] | None = None,
            deadline: float | None = None) -> TemplateResult:
        """Let a renderer process a template.

        Args:
            source: the template.
            kind: ``"render"``, or ``"variables"`` for the names of its undeclared variables, one per line.
            variables: plain data that the template reads.
            deadline: ``time.monotonic()`` at which the request ends; None: only the limits apply.

        Raises:
            SpawnFailed: no renderer could be started.
            ShuttingDown: the interpreter is shutting down.
            Timeout: the deadline has passed.
        """
        if kind == "render":
            data, loaded = marshal.dumps(variables, 2), source
            size = len(data)
        else:
            data, loaded, size = source.text.encode("utf-8", "surrogatepass"), None, 0
        record, result = self._enter(source, deadline)
        if result is not None:
            return result
        try:
            seconds = max(limits.max_template_seconds + size * _SECONDS_PER_BYTE, 1e-3)
            chars = limits.max_template_text + size * _CHARS_PER_BYTE
            memory = limits.max_template_memory + size * _BYTES_PER_BYTE
            status, text = self.children.run((kind, limits.max_template_nodes, chars, data), Limits(
                seconds, seconds, memory, 4 * chars + (1 << 16)), loaded, deadline)
            result = TemplateResult(status, text.decode("utf-8", "replace"))
            return result
        finally:
            with self._changed:
                if result is not None:
                    record.note(result)
                record.active -= 1
                self._changed.notify_all()

    def exceeded(self, source: Source) -> bool:
        """Return True if the last render of a template exceeded a limit."""
        record = self._records.get(source.digest)
        return record is not None and record.strikes > 0

    def _enter(self, source: Source, deadline: float | None) -> tuple[_Record, TemplateResult | None]:
        """Wait until this template may use a renderer. Returns a result if it is refused."""
        with self._changed:
            while True:
                record = self._records.setdefault(source.digest, _Record())
                self._records.move_to_end(source.digest)
                if record.strikes >= STRIKES:
                    left = record.until - time.monotonic()
                    if left > 0 or record.active:  # after the pause, one request at a time tries it
                        return record, record.failure._replace(refused=max(left, limits.max_template_seconds))
                if record.active < (MAX - 1 if record.proven else 1):
                    break
                wait(self._changed, deadline)
            if len(self._records) > _RECORDS:
                for digest in [digest for digest, old in self._records.items() if not old.active][:_RECORDS // 4]:
                    del self._records[digest]
            result = record, None
            record.active += 1  # last: an error after it would leave the template in use forever
            return result


_renderers = Renderers()


def renderers() -> Renderers:
    """Return the renderers of this process."""
    return _renderers


def _after_fork_in_child() -> None:
    global _renderers
    _renderers = Renderers()  # threads that the records count as active do not exist here


os.register_at_fork(after_in_child=_after_fork_in_child)

__all__ = ["MAX", "PROGRAM", "STRIKES", "Renderers", "Source", "TemplateResult", "renderers"]

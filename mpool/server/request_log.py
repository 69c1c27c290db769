"""The log of requests: one record for each, a warning if it was refused or failed, else at INFO.

No record has a prompt, a result, a header or the query of a URL: values of a request that an error names are left out,
and names that a client chose are cut. The logger escapes what could end a line or control a terminal.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..records import fields, logger
from ..runtime.history import NAME

if TYPE_CHECKING:
    from ..runtime.tally import Tally
    from .errors import Refusal

log = logger("mpool.server")

#: Maximum length of a reason, and of a path.
_REASON, _PATH = 600, 200
#: An invalid value of a request in quotes, which may be a part of a prompt: cut by :func:`mpool.checks.shown`, or
#: complete, or cut with the end of the message.
_QUOTED = r"""(?:['"].{56}\.\.\.(?=[.;,]|$| and )|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|['"].*)"""
#: Matches an invalid value after "got": quoted, or neither a number, a word of JSON nor the name of a type.
_GOT = re.compile(rf"(, got )(?:({_QUOTED}(?:(?: and|,) {_QUOTED})*)|(?!(?:-?[0-9][0-9.,e+-]*|None|True|False|(?:an? )?"
                  r"[a-z]+(?: [a-z]+)?)(?:[;:. ]|$)).*)", re.DOTALL)
#: Paths that the dashboard requests by itself, again and again.
_POLLED = ("/api/mpool/", "/dashboard/")


def log_refused(scope: Mapping[str, Any], refusal: Refusal, status: int) -> None:
    """Log a request that was refused before an operation took it."""
    write(scope, status, refusal=refusal)


def write(scope: Mapping[str, Any], status: int, *, id: str = "-", refusal: Refusal | None = None, outcome: str = "",
          model: str | None = None, used: Tally | None = None, began: float | None = None) -> None:
    """Write the record of a request.

    Args:
        scope: Mapping[str, Any] of ASGI.
        status: HTTP status; 0: no response was begun.
        id: Id of the request.
        refusal: Why it was refused, or failed, also after the head of its response.
        outcome: ``"disconnected"`` (by the client) or ``"failed"`` (the response was not sent to its end).
        model: Name of the model that the client gave.
        used: Tokens of the request.
        began: ``time.monotonic()`` when the body was complete.
    """
    level = logging.WARNING if refusal is not None or status >= 400 or outcome == "failed" else \
        logging.DEBUG if scope["method"] in ("GET", "HEAD") and scope["path"].startswith(_POLLED) else logging.INFO
    if not log.isEnabledFor(level):
        return
    client, path = scope.get("client"), scope["path"][:_PATH]
    status = status or (0 if refusal is None else refusal.row.status)  # the connection has sent the response
    seconds = None if began is None else time.monotonic() - began
    tokens = first = None
    if used is not None and used.capability is not None:
        tokens, first = used.tokens(), used.first_token(began or 0.0)
    parts = [f"{id} {scope['method']} {path} {status or 'no response'}"]
    if seconds is not None:
        parts[0] += f" in {seconds * 1e3:.1f} ms"
    if refusal is not None:
        reason = _reason(refusal)
        parts.append(f"{refusal.code}: {reason}" if reason else refusal.code)
    elif outcome:
        parts.append("client disconnected" if outcome == "disconnected" else "the response was not sent to its end")
    if model:
        parts.append(f"model {model[:NAME]}")
    if client:
        parts.append(f"client {client[0]}")
    if tokens is not None and any(tokens):
        parts.append(f"tokens {tokens[0]} + {tokens[1]}")
    if first is not None:
        parts.append(f"first token after {first * 1e3:.1f} ms")
    log.log(level, "%s", "; ".join(parts), extra=fields(
        event="request", id=id, method=scope["method"], path=path, status=status,
        code=None if refusal is None else refusal.code, reason=None if refusal is None else _reason(refusal),
        outcome=outcome or None, model=model[:NAME] if model else None, client=client[0] if client else None,
        seconds=None if seconds is None else round(seconds, 6),
        prompt_tokens=None if tokens is None else tokens[0], completion_tokens=None if tokens is None else tokens[1],
        first_token_seconds=None if first is None else round(first, 6)))


def _reason(refusal: Refusal) -> str:
    """Return the reason of a refusal without the values of the request."""
    return _GOT.sub(lambda found: found[1] + ("'...'" if found[2] else "..."),
                    refusal.cause or refusal.message)[:_REASON].removesuffix(".")


__all__ = ["log_refused", "write"]

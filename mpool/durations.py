"""Parser of durations: seconds, or text with units as in Ollama (``"5m"``)."""

from __future__ import annotations

import math
import re

from .checks import real, refuse

#: Maximum number of characters of a text. The matcher keeps a mark for each part of a text, about 200 bytes.
MAX_CHARS = 64
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
#: A whole text. It is matched first, because ``_PART.findall`` takes quadratic time for a long text of digits.
_PARTS = re.compile(rf"(?:{_PART.pattern})+")


def seconds_of(value: object, name: str) -> float:
    """Return a ``keep_alive`` in seconds.

    Args:
        value: number of seconds, or text: a number (``"90"``) or numbers with units (``"5m"``, ``"1h30m"``). Below 0
            means forever (``math.inf``), as in Ollama.
        name: name of the parameter, for the error.

    Raises:
        InvalidArgument: the value has neither format, or its text has more than :data:`MAX_CHARS` characters.

    Example:
        >>> from mpool.durations import seconds_of
        >>> seconds_of("1h30m", "keep_alive"), seconds_of(-1, "keep_alive")
        (5400.0, inf)
    """
    if isinstance(value, str):
        if len(value) > MAX_CHARS:
            refuse(name, value, f'seconds, or text of at most {MAX_CHARS} characters such as "5m", "1h30m", "300ms"')
        text = value.strip()
        sign = -1.0 if text.startswith("-") else 1.0
        text = text[1:] if text.startswith("-") else text
        number = float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None
        if number is None and _PARTS.fullmatch(text):
            number = sum(float(amount) * _UNITS[unit] for amount, unit in _PART.findall(text))
        seconds: float | None = None if number is None else sign * number
    else:
        seconds = real(value)
        if seconds is not None and (value if isinstance(value, int) else seconds) >= 1e18:
            seconds = math.inf
    if seconds is None or math.isnan(seconds):
        refuse(name, value, 'a number of seconds (below 0: forever), or a text such as "5m", "1h30m" or "300ms"')
    return math.inf if seconds < 0 else seconds

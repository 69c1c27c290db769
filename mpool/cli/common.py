"""Functions shared by the commands: creating the pool, reading lines, and printing."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from ..models import Resolved
    from ..pool import Pool
    from ..results import Completion

#: Control characters that could move the cursor of a terminal or change its settings. A model can generate them.
_UNPRINTABLE = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def make_pool(arguments: argparse.Namespace) -> Pool:
    """Create a pool with the options ``--threads`` and ``--offline``."""
    from ..config import PoolConfig
    from ..pool import Pool

    return Pool(PoolConfig(threads=arguments.threads, offline=arguments.offline or None,
                           weights=arguments.weights))


def default_model(capability: str) -> str:
    """Return the key of the default model of a capability."""
    from ..models import load_catalogue

    return load_catalogue().default(capability).key


def for_output(text: str, stream: TextIO) -> str:
    """Replace the control characters in generated text if the stream is a terminal."""
    return text.translate(_UNPRINTABLE) if stream.isatty() else text


def say(text: str = "", stream: TextIO | None = None) -> None:
    """Print a line and flush."""
    print(text, file=stream or sys.stdout, flush=True)


def note(text: str) -> None:
    """Print a line to standard error: a message that is not part of the output."""
    say(text, sys.stderr)


def print_json(value: Any) -> None:
    """Print strict JSON. NaN and infinities become null."""
    print(json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format rows as a table with aligned columns."""
    lines = [tuple(head), *map(tuple, rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def size_of(found: Resolved) -> int:
    """Return the total size of a model's files in bytes."""
    import os

    if found.files:
        return sum(os.path.getsize(path) for path in found.files)
    if os.path.isfile(found.path):
        return os.path.getsize(found.path)
    return sum(os.path.getsize(os.path.join(parent, name)) for parent, _, names in os.walk(found.path)
               for name in names)


def speed(done: Completion) -> tuple[float, float]:
    """Return the prefill and decode speed of a completion in tokens per second; 0: too few tokens to measure."""
    prefilled = done.usage.prompt_tokens - done.usage.cached_tokens
    decoded = done.usage.completion_tokens - len(done.choices)  # the prefill yields the first token of each choice
    return (prefilled / done.timings.prompt if done.timings.prompt > 0 else 0.0,
            decoded / done.timings.generation if done.timings.generation > 0 and decoded > 0 else 0.0)


def stats_line(done: Completion) -> str:
    """Format the token counts and the speed of a completion."""
    usage, timings = done.usage, done.timings
    prefill, decode = speed(done)
    parts = [f"{usage.prompt_tokens} prompt tokens in {timings.prompt:.3f} s ({prefill:,.0f} tokens/s)",
             f"{usage.completion_tokens} completion tokens" + (f" at {decode:,.1f} tokens/s" if decode else "")]
    if usage.cached_tokens:
        parts.insert(1, f"{usage.cached_tokens} of them cached")
    return ", ".join([*parts, f"{timings.total:.2f} s in total", f"finish reason: {done.finish_reason}"])


def lines_of(paths: list[str]) -> Iterator[str]:
    """Yield the lines of files, without line terminators and byte order marks. ``-`` is standard input."""
    from ..errors import FileError

    for path in paths:
        if path == "-":
            yield from (line.rstrip("\r\n") for line in sys.stdin)
            continue
        try:
            with open(path, encoding="utf-8-sig") as file:
                yield from (line.rstrip("\r\n") for line in file)
        except UnicodeDecodeError as error:
            raise FileError(f"{path} is not UTF-8 text: {error.reason}",
                            hint="Convert it first, for example with iconv") from None


def texts_of(arguments: argparse.Namespace) -> Iterator[str]:
    """Return the texts of the arguments, of the files of ``--file``, or of standard input."""
    from ..errors import InvalidArgument

    if arguments.text and arguments.file:
        raise InvalidArgument("texts must be given as arguments or with --file, not both")
    return iter(arguments.text) if arguments.text else lines_of(arguments.file or ["-"])

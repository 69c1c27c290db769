"""Prints a completion while it is generated."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TextIO

from .common import for_output, say
from .layout import fit
from .terminal import Spinner, Wrapped, dim, is_screen

if TYPE_CHECKING:
    from ..completions import Completion

#: What is printed of the reasoning: one line that follows it, all of it, or nothing.
Thinking = Literal["folded", "full", "hidden"]


def print_reply(stream: Any, thinking: Thinking = "folded", wrap: bool = True) -> None:
    """Print the text of a stream of chunks to standard output.

    In a terminal, a spinner shows until the first text, lines break between words, and the reasoning is fainter.
    Otherwise standard output gets exactly the text, and a line feed.
    """
    side = sys.stdout if is_screen(sys.stdout) else sys.stderr  # for what is not part of the text
    spinner, reply, reasoning = Spinner(sys.stdout), Wrapped(sys.stdout, wrap=wrap), Wrapped(side, True, wrap)
    thoughts, since = "", 0.0

    def end_thoughts() -> None:
        nonlocal since
        if thinking == "full":
            reasoning.write("\n\n")
        elif side.isatty():
            faint(f"(thought for {time.monotonic() - since:.1f} s)", side)
        since = 0.0

    spinner.start()
    try:
        for chunk in stream:
            if chunk.reasoning and thinking != "hidden":
                since = since or time.monotonic()
                thoughts += chunk.reasoning
                if thinking == "full":
                    spinner.stop()
                    reasoning.write(chunk.reasoning)
                else:
                    spinner.start("thinking:", thoughts[-400:])
            if chunk.text:
                spinner.stop()
                if since:
                    end_thoughts()
                reply.write(chunk.text)
    finally:
        spinner.stop()
        if since:
            end_thoughts()
        reply.end()
        say()


def note_end(done: Completion, context_of: Callable[[], int | None], more: str, full: str = "") -> None:
    """Tell the reader of a terminal that a completion is not complete.

    Args:
        done: the completion.
        context_of: returns the tokens in the context of the model; None: unknown.
        more: how to get more tokens, a format for their number.
        full: what to do if the context is full.
    """
    if done.finish_reason != "length" or not sys.stderr.isatty():
        return
    count, context = done.usage.completion_tokens, context_of()
    if context is not None and done.usage.total_tokens >= context:
        faint(f"(stopped: the context of {context:,} tokens is full{full})")
    else:
        faint(f"(stopped after {count} tokens: {more.format(2 * count)})")


def faint(text: str, stream: TextIO | None = None) -> None:
    """Print a line that is not part of the output, in a fainter colour, to standard error or another stream."""
    stream = stream or sys.stderr
    print(dim(fit(for_output(text, stream), stream), stream), file=stream, flush=True)


__all__ = ["Thinking", "faint", "note_end", "print_reply"]

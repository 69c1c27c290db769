"""Count the tokens of the requests of the library within one context, such as one HTTP request, and collect what the
library reports about them."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .. import _core


class Tally:
    """Adds up the requests of a context. Tasks that the context starts share it.

    Attributes:
        capability: capability of the first request; None: there was none.
        prompt_tokens: prompt tokens of finished requests for vectors and scores.
        tickets: requests for text, whose tokens :meth:`tokens` reads.
        left_out: parts of JSON schemas that do not constrain completions, such as
            ``response_format.properties.age.minimum``.
    """

    __slots__ = ("capability", "left_out", "prompt_tokens", "tickets")

    def __init__(self) -> None:
        self.capability: str | None = None
        self.prompt_tokens = 0
        self.tickets: list[_core.Ticket] = []
        self.left_out: dict[str, None] = {}

    def tokens(self) -> tuple[int, int]:
        """Return the prompt and completion tokens so far."""
        prompt, completion = self.prompt_tokens, 0
        for ticket in self.tickets:
            used = ticket.usage()
            prompt, completion = prompt + used[0], completion + used[1]
        return prompt, completion

    def first_token(self, began: float) -> float | None:
        """Return the seconds from ``began``, a ``time.monotonic()``, to the first token of a completion; None: there
        was none, or its request has not ended."""
        times = []
        for ticket in self.tickets:
            finished, (_, tokens, _, _, _, generation) = ticket.times()[2], ticket.usage()
            if finished and tokens:
                times.append(finished - generation - began)
        return max(0.0, min(times)) if times else None


#: The tally of the context, or None.
current: ContextVar[Tally | None] = ContextVar("mpool.tally", default=None)


def begin(capability: str) -> None:
    """Record the capability of a request that was validated."""
    tally = current.get()
    if tally is not None and tally.capability is None:
        tally.capability = capability


def add_ticket(ticket: _core.Ticket) -> None:
    """Record a request for text that was submitted."""
    tally = current.get()
    if tally is not None and tally.capability in ("text_to_text", "vision"):
        tally.tickets.append(ticket)


def add_left_out(paths: Iterable[str]) -> None:
    """Record parts of JSON schemas that do not constrain completions."""
    tally = current.get()
    if tally is not None:
        tally.left_out.update(dict.fromkeys(paths))


def add_tokens(count: int) -> None:
    """Add the prompt tokens of a finished request."""
    tally = current.get()
    if tally is not None:
        tally.prompt_tokens += count


__all__ = ["Tally", "add_left_out", "add_ticket", "add_tokens", "begin", "current"]

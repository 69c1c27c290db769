"""A progress bar for downloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: True: show progress bars; False: hide them; None: show them if standard error is a terminal. A function is called
#: with the bytes so far and their total, or None, instead; also on other threads.
Progress = bool | None | Callable[[int, int | None], None]


class Bar:
    """A progress bar that counts bytes.

    Args:
        title: text in front of the bar.
        total: total number of bytes, or None.
        progress: see :data:`Progress`.
    """

    def __init__(self, title: str, total: int | None, progress: Progress) -> None:
        self.title, self.total, self.progress = title, total, progress
        self.at = 0
        self._bar: Any = None

    def __enter__(self) -> Bar:
        if self.progress is not False and not callable(self.progress):
            from tqdm import tqdm

            # disable=None: tqdm hides the bar unless standard error is a terminal
            self._bar = tqdm(desc=self.title, total=self.total, unit="B", unit_scale=True, leave=False,
                             disable=None if self.progress is None else False)
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, count: int) -> None:
        """Advance the bar by ``count`` bytes."""
        self.at += count
        if callable(self.progress):
            self.progress(self.at, self.total)
        if self._bar is not None:
            self._bar.update(count)

    def move_to(self, at: int) -> bool:
        """Advance the bar to ``at`` bytes. Return False, and do nothing, if the bar is already there or further."""
        if at <= self.at:
            return False
        self.add(at - self.at)
        return True

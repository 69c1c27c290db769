"""A progress bar for a download, and when to show it."""

from __future__ import annotations

from typing import Any

#: True: always; False: never; None: when standard error is a terminal.
Progress = bool | None


class Bar:
    """A progress bar in bytes. ``total`` may be unknown."""

    def __init__(self, title: str, total: int | None, progress: Progress) -> None:
        self.title, self.total, self.progress = title, total, progress
        self.at = 0
        self._bar: Any = None

    def __enter__(self) -> Bar:
        if self.progress is not False:
            from tqdm import tqdm

            # disable=None is tqdm's own way to ask for a terminal
            self._bar = tqdm(desc=self.title, total=self.total, unit="B", unit_scale=True, leave=False,
                             disable=None if self.progress is None else False)
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, count: int) -> None:
        """Moves the bar on by ``count`` bytes."""
        self.at += count
        if self._bar is not None:
            self._bar.update(count)

    def move_to(self, at: int) -> bool:
        """Moves the bar to ``at`` bytes, never back; returns True if that is further than before."""
        if at <= self.at:
            return False
        self.add(at - self.at)
        return True

"""How far a run is."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

__all__ = ["Progress"]

_SECONDS = 15.0


class Progress:
    """A bar where somebody watches standard error, else a line now and then."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)
        self._started = self._said = time.monotonic()

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, done: int, total: int, what: str) -> None:
        """So many are done, and this is what is under way."""
        self._bar.update(self._task, completed=done, total=total, description=what[:60])
        now = time.monotonic()
        if not self._console.is_terminal and now - self._said >= _SECONDS:
            self._said = now
            line = f"{done:,} of {total:,} after {now - self._started:.0f} s: {what}"
            self._console.print(line, markup=False, soft_wrap=True)
